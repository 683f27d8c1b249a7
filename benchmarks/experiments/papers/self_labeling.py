"""The experiment on self-labeling refinement and momentum mixup."""

from __future__ import annotations

from benchmarks.experiments.papers.arms import Claim, Experiment, PaperArm, above

ONE_HOT, REFINED, MIXED, BOTH = "one-hot", "refinement", "mixup", "both"
COLUMN, SOURCE = "x1", "self-labeling refinement, poster"
WEIGHT = 0.2

SAYS = f"""MoCo against a queue on the balanced stream at temperature 0.2. *Refinement* makes the
labels soft, alpha and beta rising to {WEIGHT} each over the first half of the steps; *mixup*
shows mixed images; *both* does both. Label error is the mean norm of y - y*, where y* gives each
key of the anchor's class the same share; the poster says that this bounds the error. It is
measured on a sample's own label, also after mixup. Mixup averages two labels, and this alone makes
the norm smaller. The control is *even smoothing*: the one-hot label with as much mass
spread over all keys alike, which knows nothing. The poster gives no figures."""


def _arm(row: str) -> PaperArm:
    weight = WEIGHT if row in (REFINED, BOTH) else 0.0
    return PaperArm(
        row,
        COLUMN,
        "self-labeling",
        "self-labeling",
        method_options={"mixup": 1.0 if row in (MIXED, BOTH) else 0.0},
        loss_options={"temperature": 0.2, "alpha": weight, "beta": weight},
        against=None if row == ONE_HOT else ONE_HOT,
        key=True,
    )


SELF_LABELING = Experiment(
    name="self-labeling",
    title="Self-labeling refinement",
    says=SAYS,
    arms=[
        *(_arm(row) for row in (ONE_HOT, REFINED, MIXED, BOTH)),
        PaperArm("untrained", COLUMN, share=0.0),
    ],
    columns=[COLUMN],
    claims=[
        *(
            above((row, COLUMN), (ONE_HOT, COLUMN), f"{row} is above one-hot labels", SOURCE)
            for row in (REFINED, MIXED, BOTH)
        ),
        above((BOTH, COLUMN), (REFINED, COLUMN), "both are above refinement alone", SOURCE),
        above((BOTH, COLUMN), (MIXED, COLUMN), "both are above mixup alone", SOURCE),
        above(
            (ONE_HOT, COLUMN),
            (REFINED, COLUMN),
            "refined labels are nearer the true ones than one-hot labels",
            SOURCE,
            "label_error",
        ),
        Claim(
            "refined labels are nearer the true ones than even smoothing of the same mass",
            "ours",
            ((1.0, REFINED, COLUMN),),
            "nearer_than_even",
        ),
        Claim(
            "the labels of both are nearer the true ones than one-hot labels",
            SOURCE,
            ((1.0, ONE_HOT, COLUMN), (-1.0, BOTH, COLUMN)),
            "label_error",
        ),
    ],
    measures=(
        *("linear", "knn", "label_error", "even_error", "nearer_than_even"),
        *("mixed_error", "label_mass", "loss"),
    ),
    curves=(),
    traces=("label_error", "label_mass"),
)
