"""The experiments of DUEL's Tables 1 to 3: methods under bias, and the score h."""

from __future__ import annotations

from benchmarks.experiments.papers.arms import Experiment, PaperArm, above
from benchmarks.experiments.results import Cell

BIASES = (1, 3, 9, 27)
METHODS = ("MoCo v2", "D-MoCo", "SimCLR", "D-SimCLR", "SimSiam")
TEMPERATURE = {"temperature": 0.7}

SAYS = """Five methods on a stream in which one class is 1, 3, 9 or 27 times as frequent as each
other. D-MoCo is MoCo with DUEL's eviction in the place of the queue; D-SimCLR compares with a
memory of raw images, too, all encoded anew at each step. As in the paper: temperature 0.7, one
linear projection, Adam with a cosine, views without crops (where the settings say crop True, with
them: few steps bring nothing without). Top-k retrieval is among the test
images. Gains are over the same method without DUEL. *vmf0.1* is our sharper score; *from memory*
draws the training batches from the memory after it was updated, which the paper names and did
not try."""


def _arms(bias: int) -> list[PaperArm]:
    column, key = f"x{bias}", bias in (1, 27)

    def arm(row: str, method: str, loss: str = "infonce", **more: object) -> PaperArm:
        options = TEMPERATURE if loss == "infonce" else {}
        return PaperArm(
            row,
            column,
            method,
            loss,
            loss_options=options,
            bias=bias,
            crop=False,
            cosine=True,
            **more,  # type: ignore[arg-type]
        )

    arms = [
        arm("MoCo v2", "moco", key=key),
        arm("D-MoCo", "moco", memory="linear", against="MoCo v2", key=key),
        arm("SimCLR", "simclr", key=key),
        arm("D-SimCLR", "d-simclr", memory="linear", raw=True, against="SimCLR", key=key),
        arm("SimSiam", "simsiam", "negative-cosine"),
    ]
    if bias != BIASES[-1]:
        return arms
    for score in ("gaussian", "quadratic", "vmf0.1"):
        row = f"D-MoCo, {score}"
        arms.append(arm(row, "moco", memory=score, against="MoCo v2", key=True))
    row = "D-MoCo, vmf0.1, from memory"
    arms.append(arm(row, "moco", memory="vmf0.1", anchors="memory", against="MoCo v2", key=True))
    for score in ("gaussian", "quadratic"):
        row = f"D-SimCLR, {score}"
        arms.append(arm(row, "d-simclr", memory=score, raw=True, against="SimCLR"))
    return arms


def _table(rows: dict[str, tuple[float, ...]]) -> dict[Cell, float]:
    return {
        (row, f"x{bias}"): figure
        for row, figures in rows.items()
        for bias, figure in zip(BIASES, figures, strict=True)
    }


LINEAR = _table(
    {
        "MoCo v2": (54.25, 55.32, 49.54, 42.17),
        "SimCLR": (63.34, 61.19, 61.06, 49.02),
        "D-MoCo": (58.15, 56.59, 62.10, 52.06),
        "D-SimCLR": (65.39, 63.69, 60.99, 56.60),
    }
) | {("D-MoCo, gaussian", "x27"): 56.81, ("D-MoCo, quadratic", "x27"): 57.32}
TOP1 = _table(
    {
        "MoCo v2": (31.38, 32.38, 27.68, 23.78),
        "SimCLR": (39.85, 36.94, 35.58, 27.17),
        "SimSiam": (18.55, 16.14, 18.72, 20.11),
        "D-MoCo": (37.12, 34.45, 38.20, 28.13),
        "D-SimCLR": (42.51, 40.79, 37.14, 33.36),
    }
)
TOP10 = _table(
    {
        "MoCo v2": (84.55, 84.32, 81.74, 78.40),
        "SimCLR": (88.38, 87.20, 84.34, 76.98),
        "SimSiam": (76.45, 73.58, 76.58, 78.91),
        "D-MoCo": (87.22, 85.48, 87.59, 82.99),
        "D-SimCLR": (89.33, 88.66, 82.49, 80.51),
    }
)

DUEL = Experiment(
    name="duel",
    title="DUEL: methods under bias, and the score",
    says=SAYS,
    arms=[
        *(arm for bias in (27, 1, 9, 3) for arm in _arms(bias)),
        PaperArm("untrained", "x1", share=0.0),
    ],
    columns=[f"x{bias}" for bias in BIASES],
    claims=[
        *(
            above(
                (f"D-{base}", f"x{bias}"),
                (base + " v2" * (base == "MoCo"), f"x{bias}"),
                f"D-{base} is above {base} at x{bias}",
                "DUEL, Table 2",
            )
            for base in ("MoCo", "SimCLR")
            for bias in BIASES
        ),
        *(
            above(
                (f"D-{base}", "x27"),
                (base + " v2" * (base == "MoCo"), "x27"),
                f"D-{base} retrieves better than {base} at x27 (top-1)",
                "DUEL, Table 1",
                "top1",
            )
            for base in ("MoCo", "SimCLR")
        ),
        *(
            above((base, "x1"), (base, "x27"), f"bias costs {base} accuracy", "DUEL, Table 2")
            for base in ("MoCo v2", "SimCLR")
        ),
        *(
            above(
                (f"D-MoCo, {score}", "x27"),
                ("D-MoCo", "x27"),
                f"D-MoCo under the {score} score is above the linear one at x27",
                "DUEL, Table 3",
            )
            for score in ("gaussian", "quadratic")
        ),
        above(
            ("D-MoCo", "x27"),
            ("MoCo v2", "x27"),
            "D-MoCo's memory is flatter than the queue at x27",
            "DUEL, section 4",
            "entropy",
        ),
        above(
            ("D-MoCo, vmf0.1", "x27"),
            ("MoCo v2", "x27"),
            "under vmf0.1 the memory is flatter than the queue at x27",
            "ours",
            "entropy",
        ),
        above(
            ("D-MoCo, vmf0.1, from memory", "x27"),
            ("MoCo v2", "x27"),
            "vmf0.1 with batches from the memory is above MoCo v2 at x27",
            "ours",
        ),
    ],
    measures=("linear", "top1", "top10", "knn", "entropy", "intra", "inter"),
    paper={"linear": LINEAR, "top1": TOP1, "top10": TOP10},
    curves=("linear", "top1"),
    traces=("entropy",),
    probe="duel",
)
