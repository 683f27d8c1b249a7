"""Our experiment: each anchor's own prior, measured by the memory, against one constant prior."""

from __future__ import annotations

from benchmarks.experiments.papers.arms import Claim, Experiment, PaperArm, above

BIASES = (1, 9, 27)
MEMORIES = {"FIFO": "queue", "DUEL": "vmf0.1"}
NONE, CONSTANT, LABELS = "no correction", "tau+ = 0.1", "true tau+ (labels)"
LINEAR, SHARP = "memory's, linear", "memory's, vmf0.3"
ROWS = (CONSTANT, LINEAR, SHARP, LABELS)
UNCLAMPED = ", floor biased"

SAYS = """MoCo with the negative-debiased loss at temperature 0.5, the memory a queue (FIFO) or
DUEL's under vmf0.1. *Memory's* takes for each anchor the tau+ that the memory measures, its mean
score with all slots (DUEL, Definition 2), smoothed and within [1/K, 0.5], under the linear score
or vmf0.3. *True* takes the share of the anchor's class in the memory by label: an oracle, the most
that a prior of the anchor's own can give. Gains are over the constant 0.1, the balanced value of
ten classes. No paper has this: that the memory's own prior is worth more than a constant is our
claim, under test here.

The loss clamps an anchor whose estimate falls below its floor, which takes its negatives' gradient
away. At x27 the rows *floor biased* compare such an anchor with the mean of all negatives instead,
so that the priors are compared and not the floor."""


def _column(bias: int, memory: str) -> str:
    return f"x{bias}, {memory}"


def _arm(row: str, bias: int, memory: str) -> PaperArm:
    plain = row.removesuffix(UNCLAMPED)
    prior = {NONE: None, CONSTANT: 0.1, LABELS: "labels"}.get(plain, "memory")
    options = {"temperature": 0.5} | ({} if prior is None else {"prior": prior})
    options |= {} if plain == row else {"floor": "biased"}
    return PaperArm(
        row,
        _column(bias, memory),
        "moco",
        "infonce" if prior is None else "debiased",
        loss_options=options,
        memory=MEMORIES[memory],
        prior_by="vmf0.3" if plain == SHARP else "linear",
        bias=bias,
        against=None if plain == CONSTANT else CONSTANT + row[len(plain) :],
        key=bias == BIASES[-1] and (plain == row or memory == "DUEL"),
    )


def _claims(bias: int, memory: str) -> list[Claim]:
    column = _column(bias, memory)
    where = f"at x{bias} with {memory}"
    claims = [
        above((row, column), (CONSTANT, column), f"{row} prior is above tau+ = 0.1 {where}", "ours")
        for row in (LINEAR, SHARP, LABELS)
    ]
    claims += [
        above(
            (CONSTANT, column),
            (row, column),
            f"{row} prior is nearer the truth than 0.1 {where}",
            "ours",
            "prior_error",
        )
        for row in (LINEAR, SHARP)
    ]
    text = "what the memory measures rises with the truth over anchors"
    claims += [
        Claim(f"{text} ({row}) {where}", "ours", ((1.0, row, column),), "prior_correlation")
        for row in (LINEAR, SHARP)
    ]
    return claims


PRIOR = Experiment(
    name="prior",
    title="The memory's own prior against a constant",
    says=SAYS,
    arms=[
        *(
            _arm(row, bias, memory)
            for bias in (27, 1, 9)
            for memory in MEMORIES
            for row in (*ROWS, NONE)
        ),
        PaperArm("untrained", _column(1, "FIFO"), share=0.0),
        *(_arm(row + UNCLAMPED, BIASES[-1], memory) for memory in MEMORIES for row in ROWS),
    ],
    columns=[_column(bias, memory) for bias in BIASES for memory in MEMORIES],
    claims=[
        *(
            claim
            for bias in reversed(BIASES)
            for memory in MEMORIES
            for claim in _claims(bias, memory)
        ),
        *(
            above(
                (row + UNCLAMPED, _column(BIASES[-1], memory)),
                (CONSTANT + UNCLAMPED, _column(BIASES[-1], memory)),
                f"{row} prior is above tau+ = 0.1 at x27 with {memory}, without clamping",
                "ours",
            )
            for memory in MEMORIES
            for row in (LINEAR, SHARP, LABELS)
        ),
    ],
    measures=(
        *("linear", "knn", "entropy", "clamp_rate"),
        *("prior", "prior_measured", "prior_true", "prior_error", "prior_correlation"),
    ),
    curves=("linear", "prior_error"),
    traces=("prior",),
)
