"""The experiment on negative- and positive-debiased losses under several conditions."""

from __future__ import annotations

from typing import Any

from benchmarks.experiments.papers.arms import Experiment, PaperArm, above

PLAIN, TRUE, BLUR = "as they are", "no false negatives", "blur p = 0.3"
SWEEP = (0.01, 0.05, 0.2)
BIASED, NEGATIVE, POSITIVE = "biased", "negative-debiased", "positive-debiased"
ORACLE, SPLIT = "unbiased oracle", "positive-debiased, split"

SAYS = """SimCLR at temperature 0.5 on the balanced stream, tau+ = 0.1, with the loss exchanged.
In *no false negatives* negatives of the anchor's class are dropped by label, from the sums and
from the count (the paper's Figure 2); the biased loss is then the *unbiased oracle*. *Split*
keeps them in the positive-debiased loss's sample of all classes alone, as its theory supposes.
In *blur* a Gaussian blur of probability 0.3 is added to the views (Figure 3). HCL weights hard
negatives up (beta 1). The paper gives these results as curves without numbers, so that there is
a direction to compare and no figure."""


def _arm(row: str, column: str, loss: str, **more: Any) -> PaperArm:
    options = {"temperature": 0.5, **more.pop("loss_options", {})}
    return PaperArm(row, column, "simclr", loss, loss_options=options, **more)


def _tau(value: float) -> str:
    return f"tau+ = {value}"


def _swept(value: float) -> list[PaperArm]:
    options = {"prior": value}
    return [
        _arm(NEGATIVE, _tau(value), "debiased", loss_options=options, key=True),
        _arm(POSITIVE, _tau(value), "positive-debiased", loss_options=options, key=True),
    ]


EXCLUDE = {"false_negatives": "exclude"}

DEBIASED = Experiment(
    name="debiased",
    title="Debiased losses",
    says=SAYS,
    arms=[
        _arm(BIASED, PLAIN, "infonce", key=True),
        _arm(NEGATIVE, PLAIN, "debiased", against=BIASED, key=True),
        _arm(POSITIVE, PLAIN, "positive-debiased", against=BIASED, key=True),
        _arm("HCL", PLAIN, "hard-negative", against=BIASED, key=True),
        _arm(ORACLE, TRUE, "infonce", loss_options=EXCLUDE, key=True),
        _arm(NEGATIVE, TRUE, "debiased", loss_options=EXCLUDE, against=ORACLE, key=True),
        _arm(POSITIVE, TRUE, "positive-debiased", loss_options=EXCLUDE, against=ORACLE, key=True),
        _arm(
            SPLIT,
            TRUE,
            "positive-debiased",
            loss_options={"false_negatives": "split"},
            against=ORACLE,
        ),
        _arm(BIASED, BLUR, "infonce", blur=0.3, key=True),
        _arm(NEGATIVE, BLUR, "debiased", blur=0.3, against=BIASED, key=True),
        _arm(POSITIVE, BLUR, "positive-debiased", blur=0.3, against=BIASED, key=True),
        *(arm for value in SWEEP for arm in _swept(value)),
        PaperArm("untrained", PLAIN, share=0.0),
    ],
    columns=[PLAIN, TRUE, BLUR, *map(_tau, SWEEP)],
    claims=[
        above(
            (NEGATIVE, PLAIN),
            (BIASED, PLAIN),
            "the negative-debiased loss is above the biased one",
            "debiased-positive, Fig. 1",
        ),
        above(
            (POSITIVE, PLAIN),
            (BIASED, PLAIN),
            "the positive-debiased loss is above the biased one",
            "debiased-positive, Fig. 1",
        ),
        above(
            (POSITIVE, PLAIN),
            (NEGATIVE, PLAIN),
            "the positive-debiased loss is above the negative-debiased one",
            "debiased-positive, Fig. 1",
        ),
        above(
            (ORACLE, TRUE),
            (BIASED, PLAIN),
            "the biased loss gains where false negatives are dropped by label",
            "slides, Fig. 2",
        ),
        above(
            (POSITIVE, TRUE),
            (NEGATIVE, TRUE),
            "without false negatives positive-debiased stays above negative-debiased",
            "debiased-positive, Fig. 2",
        ),
        above(
            (POSITIVE, BLUR),
            (NEGATIVE, BLUR),
            "under blur positive-debiased is above negative-debiased",
            "debiased-positive, Fig. 3",
        ),
        above(
            (POSITIVE, BLUR),
            (BIASED, BLUR),
            "under blur positive-debiased is above biased",
            "debiased-positive, Fig. 3",
        ),
        above(
            ("HCL", PLAIN), (BIASED, PLAIN), "HCL is above the biased loss", "Robinson et al. 2021"
        ),
    ],
    measures=("linear", "knn", "clamp_rate", "loss"),
    curves=("linear", "knn"),
    traces=("accuracy",),
)
