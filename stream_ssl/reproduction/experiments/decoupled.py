"""The decoupled loss at small and large batches."""

from __future__ import annotations

from stream_ssl.reproduction.arms import Arm, Claim, Experiment, above

BATCHES = (32, 64, 128, 256, 512)
BASE, DCL = "SimCLR", "SimCLR with DCL"
SOURCE = "slides, CIFAR-10 table (kNN)"

SAYS = """SimCLR with the usual loss and with the positive taken out of its denominator, at
temperature 0.1. Every batch sees the same number of samples, as in epochs: a batch of 512 is
updated sixteen times less often than one of 32. The learning rate is Adam's, the same for all;
the paper's grows with the batch. So compare the two losses at a batch, and not batches with each
other."""


def _arm(row: str, batch: int) -> Arm:
    return Arm(
        row,
        f"batch {batch}",
        "simclr",
        "infonce" if row == BASE else "decoupled",
        loss_options={"temperature": 0.1},
        batch=batch,
        against=None if row == BASE else BASE,
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
        Arm("untrained", "batch 32", share=0.0),
    ],
    columns=[f"batch {batch}" for batch in BATCHES],
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
