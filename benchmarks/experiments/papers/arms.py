"""What is compared: arms, runs, and the statements that they are to check."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from benchmarks.experiments.findings import Found
from benchmarks.experiments.results import Cell

Options = Mapping[str, Any]


@dataclass(frozen=True)
class Arm:
    """One cell of the tables: all that sets a run apart from the others of its experiment.

    Args:
        row: what is compared, as the tables name it.
        column: the condition, as the tables name it.
        method: of `stream_ssl.methods.METHODS`.
        loss: of `stream_ssl.losses.LOSSES`.
        method_options: arguments of the method, beside encoder, projector and loss.
        loss_options: arguments of the loss.
        memory: "queue" (FIFO), or the score of DUEL's rule: "linear", "quadratic", "gaussian",
            "vmf0.1", "vmf0.3".
        raw: the memory is the small one of raw images (D-SimCLR).
        prior_by: the score by which the memory measures tau+; null: that of its policy.
        batch: samples an update; null: the preset's.
        capacity: slots of the memory; null: the preset's.
        share: of the preset's samples that are learned from; 0 leaves the network untrained.
        bias: how many times as frequent as any other class 0 is in the stream.
        crop, blur: of the views.
        cosine: the learning rate falls by a half cosine to 0; else it stays.
        anchors: see `Learner`; from the "memory", fresh keys are written back and plain.
        against: row of the same column that gains are counted from.
        key: its claims need the spread over seeds: repeated first.
    """

    row: str
    column: str
    method: str = "moco"
    loss: str = "infonce"
    method_options: Options = field(default_factory=dict)
    loss_options: Options = field(default_factory=dict)
    memory: str = "queue"
    raw: bool = False
    prior_by: str | None = None
    batch: int | None = None
    capacity: int | None = None
    share: float = 1.0
    bias: int = 1
    crop: bool = True
    blur: float = 0.0
    cosine: bool = False
    anchors: Literal["stream", "memory"] = "stream"
    against: str | None = None
    key: bool = False

    @property
    def cell(self) -> Cell:
        return self.row, self.column

    def facts(self) -> dict[str, Any]:
        """What a result depends on, as JSON holds it: not what only the tables look at."""
        told = asdict(self)
        for name in ("against", "key"):
            del told[name]
        if self.capacity is None:  # as results were written before there was a choice
            del told["capacity"]
        return told


@dataclass(frozen=True)
class Run:
    """An arm with a seed, which draws weights, stream and views alike."""

    arm: Arm
    seed: int

    @property
    def name(self) -> str:
        return f"{self.arm.column} / {self.arm.row} / seed{self.seed}"

    @property
    def cost(self) -> float:
        """The samples and the evaluation, and the views of a sample."""
        views = float(self.arm.method_options.get("views", 2))
        return 0.25 + self.arm.share * views / 2

    def facts(self) -> dict[str, Any]:
        return {"arm": self.arm.facts()}


@dataclass(frozen=True)
class Claim:
    """A statement that the sum of weighted cells is above 0; the runs decide whether it is.

    Args:
        text: the statement.
        source: who says so, "paper, table", or "ours".
        terms: (weight, row, column); (1, A, x27), (-1, B, x27) says that A is above B at x27.
        measure: of which number.
    """

    text: str
    source: str
    terms: tuple[tuple[float, str, str], ...]
    measure: str = "linear"


def above(better: Cell, worse: Cell, text: str, source: str, measure: str = "linear") -> Claim:
    """The claim that one cell is above another."""
    return Claim(text, source, ((1.0, *better), (-1.0, *worse)), measure)


@dataclass(frozen=True)
class Experiment:
    """One of the papers' experiments.

    Args:
        name: as on the command line.
        title: heading of its report.
        says: what is compared, how, and where that departs from the paper; Markdown.
        arms: in the order of what they tell.
        columns: in the order in which tables and plots show them.
        claims: what is checked.
        measures: of the tables, the first ones with gains and the paper's figures.
        paper: the papers' figures by measure and cell, in the unit of the tables.
        curves: measures drawn over the columns.
        traces: what is drawn over the steps; "accuracy" is measured for it alone.
        probe: linear probe of the gpu preset, of `stream_ssl.evaluation.linear.PROBES`.
    """

    name: str
    title: str
    says: str
    arms: Sequence[Arm]
    columns: Sequence[str]
    claims: Sequence[Claim]
    measures: Sequence[str] = ("linear", "knn")
    paper: Mapping[str, Mapping[Cell, float]] = field(default_factory=dict)
    curves: Sequence[str] = ("linear",)
    traces: Sequence[str] = ()
    probe: str = "debiased"

    def found(self, found: Found) -> Iterator[Arm]:
        """Yield the arms with a finished run, by column and then in the experiment's order."""
        for column in self.columns:
            for arm in self.arms:
                if arm.column == column and arm.cell in found.results:
                    yield arm

    def plan(self, seeds: int, repeat_all: bool) -> list[Run]:
        """Every run once, the most telling first: all arms, then the key ones under further
        seeds, then the others."""
        runs = [Run(arm, 0) for arm in self.arms]
        for key in (True, False) if repeat_all else (True,):
            runs += [
                Run(arm, seed) for seed in range(1, seeds) for arm in self.arms if arm.key is key
            ]
        return runs
