"""The experiment on the decoupled loss with small and large batches and queues."""

from __future__ import annotations

from benchmarks.experiments.papers.arms import Claim, Experiment, PaperArm, above

BATCHES = (32, 64, 128, 256, 512)
QUEUES = (256, 1024, 4096)
BASE, DCL, DCLW = "SimCLR", "SimCLR with DCL", "SimCLR with DCLW"
MOCO, MOCO_DCL = "MoCo", "MoCo with DCL"
SOURCE, FIGURE = "slides, CIFAR-10 table (kNN)", "slides, Fig. 3b"

SAYS = """SimCLR with the usual loss and with the positive taken out of its denominator, at
temperature 0.1. Every batch sees the same number of samples, as in epochs: a batch of 512 is
updated sixteen times less often than one of 32. The learning rate is Adam's, the same for all;
the paper's grows with the batch. So compare the losses at a batch, and not batches with each
other. DCLW weights the pairs of a batch, sigma 0.5. MoCo compares with a queue of 256, 1,024 or
4,096 keys at the preset's batch."""


def _arm(row: str, batch: int) -> PaperArm:
    return PaperArm(
        row,
        f"batch {batch}",
        "simclr",
        "infonce" if row == BASE else "decoupled",
        loss_options={"temperature": 0.1} | ({"sigma": 0.5} if row == DCLW else {}),
        batch=batch,
        against=None if row == BASE else BASE,
        key=row != DCLW,
    )


def _queued(row: str, capacity: int) -> PaperArm:
    return PaperArm(
        row,
        f"queue {capacity}",
        "moco",
        "infonce" if row == MOCO else "decoupled",
        loss_options={"temperature": 0.1},
        capacity=capacity,
        against=None if row == MOCO else MOCO,
        key=True,
    )


FIGURES = {
    BASE: (78.9, 80.4, 81.1, 81.4, 81.3),
    DCL: (83.7, 84.4, 84.4, 84.2, 83.5),
}

DECOUPLED = Experiment(
    name="decoupled",
    title="Decoupled loss by batch size",
    says=SAYS,
    arms=[
        *(_arm(row, batch) for batch in (32, 512, 128, 64, 256) for row in (BASE, DCL)),
        PaperArm("untrained", "batch 32", share=0.0),
        *(_queued(row, size) for size in QUEUES for row in (MOCO, MOCO_DCL)),
        *(_arm(DCLW, batch) for batch in BATCHES),
    ],
    columns=[f"batch {batch}" for batch in BATCHES] + [f"queue {size}" for size in QUEUES],
    claims=[
        *(
            above(
                (DCL, f"batch {batch}"),
                (BASE, f"batch {batch}"),
                f"DCL is above SimCLR at batch {batch}",
                SOURCE,
                "knn",
            )
            for batch in BATCHES
        ),
        Claim(
            "DCL gains more at batch 32 than at 512",
            SOURCE,
            (
                (1.0, DCL, "batch 32"),
                (-1.0, BASE, "batch 32"),
                (-1.0, DCL, "batch 512"),
                (1.0, BASE, "batch 512"),
            ),
            "knn",
        ),
        *(
            above(
                (MOCO_DCL, f"queue {size}"),
                (MOCO, f"queue {size}"),
                f"DCL is above MoCo at a queue of {size:,}",
                FIGURE,
                "knn",
            )
            for size in QUEUES
        ),
        *(
            above(
                (DCLW, f"batch {batch}"),
                (DCL, f"batch {batch}"),
                f"DCLW is above DCL at batch {batch}",
                "Yeh et al. 2022",
                "knn",
            )
            for batch in (32, 512)
        ),
    ],
    measures=("knn", "linear", "step_ms", "loss"),
    paper={
        "knn": {
            (row, f"batch {batch}"): figure
            for row, figures in FIGURES.items()
            for batch, figure in zip(BATCHES, figures, strict=True)
        }
    },
    curves=("knn", "linear"),
)
