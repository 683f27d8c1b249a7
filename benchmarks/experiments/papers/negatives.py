"""The experiment on the number of negatives, and on a biased loss that trains longer."""

from __future__ import annotations

from benchmarks.experiments.papers.arms import Experiment, PaperArm, above

LONGER = "half as long again"
BATCHES = (32, 64, 128, 256)
LOSSES = {
    "biased": "infonce",
    "negative-debiased": "debiased",
    "positive-debiased": "positive-debiased",
}
BIASED, NEGATIVE, POSITIVE = LOSSES

SAYS = """SimCLR at temperature 0.5 on the balanced stream, tau+ = 0.1, with the loss exchanged.
*N* is the number of negatives: two less than twice the batch. All train on as many samples, so that
fewer negatives go with more updates. *Half as long again* trains with 254 negatives on 1.5 times as
many samples."""


def _n(batch: int) -> str:
    return f"N = {2 * batch - 2}"


def _arm(row: str, column: str, batch: int, share: float = 1.0) -> PaperArm:
    against = None if row == BIASED else BIASED
    options = {"temperature": 0.5}
    return PaperArm(
        row,
        column,
        "simclr",
        LOSSES[row],
        loss_options=options,
        batch=batch,
        share=share,
        against=against,
        key=True,
    )


NEGATIVES = Experiment(
    name="negatives",
    title="The number of negatives",
    says=SAYS,
    arms=[
        *(_arm(row, _n(batch), batch) for batch in BATCHES for row in LOSSES),
        *(_arm(row, LONGER, 128, share=1.5) for row in (BIASED, NEGATIVE)),
    ],
    columns=[*map(_n, BATCHES), LONGER],
    claims=[
        above(
            (NEGATIVE, _n(128)),
            (BIASED, LONGER),
            "the negative-debiased loss is above the biased one that trains half as long again",
            "Chuang et al. 2020",
        ),
        *(
            above(
                (POSITIVE, _n(batch)),
                (BIASED, _n(batch)),
                f"the positive-debiased loss is above the biased one at {_n(batch)}",
                "debiased-positive",
            )
            for batch in BATCHES
        ),
    ],
)
