"""The parts of an experiment: arms, runs, and the claims that they check."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from benchmarks.experiments.findings import FinishedRuns
from benchmarks.experiments.results import Cell

Options = Mapping[str, Any]


@dataclass(frozen=True)
class PaperArm:
    """One cell of the tables: everything that distinguishes a run within its experiment.

    Args:
        row: the compared subject, as named in the tables.
        column: the condition, as named in the tables.
        method: a name of `stream_ssl.methods.METHODS`.
        loss: a name of `stream_ssl.losses.LOSSES`.
        method_options: arguments of the method, except encoder, projector and loss.
        memory: "queue" (FIFO), or the score of DUEL's rule: "linear", "quadratic", "gaussian",
            "vmf0.1", "vmf0.3".
        raw: whether the memory is the small memory of raw images (D-SimCLR).
        prior_by: the memory measures tau+ by this score; None: by the score of its policy.
        batch: samples per update; None: the preset's.
        capacity: slots of the memory; None: the preset's.
        share: how many times the preset's samples the run learns from; 0: the network stays
            untrained.
        bias: how many times as frequent class 0 is in the stream as each other class.
        blur: probability of a blur in views.
        cosine: whether the learning rate falls to 0 by a half cosine; otherwise it is constant.
        anchors: see `Learner`. With "memory", fresh keys are written back and are not augmented.
        against: the row in the same column relative to which gains are computed.
        key: whether claims need its spread over seeds. Key arms are repeated first.
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
        """Return the values that a result depends on, as JSON stores them.

        Values that only the tables use are left out.
        """
        values = asdict(self)
        for name in ("against", "key"):
            del values[name]
        if self.capacity is None:  # older results do not contain this field
            del values["capacity"]
        return values


@dataclass(frozen=True)
class PaperRun:
    """An arm with a seed, which draws the weights, the stream and the views."""

    arm: PaperArm
    seed: int

    @property
    def name(self) -> str:
        return f"{self.arm.column} / {self.arm.row} / seed{self.seed}"

    @property
    def cost(self) -> float:
        """The expected duration: samples times views per sample, plus the evaluation."""
        views = float(self.arm.method_options.get("views", 2))
        return 0.25 + self.arm.share * views / 2

    def facts(self) -> dict[str, Any]:
        return {"arm": self.arm.facts()}


@dataclass(frozen=True)
class Claim:
    """A statement that the sum of weighted cells is above 0, which the runs check.

    Args:
        source: its origin, as "paper, table", or "ours".
        terms: (weight, row, column). For example, (1, A, x27), (-1, B, x27) says that A is above B
            at x27.
    """

    text: str
    source: str
    terms: tuple[tuple[float, str, str], ...]
    measure: str = "linear"


def above(better: Cell, worse: Cell, text: str, source: str, measure: str = "linear") -> Claim:
    """Return the claim that one cell is above another."""
    return Claim(text, source, ((1.0, *better), (-1.0, *worse)), measure)


@dataclass(frozen=True)
class Experiment:
    """One experiment of the papers.

    Args:
        name: the name on the command line.
        says: the comparison, its method, and the differences from the paper, in Markdown.
        arms: the arms, the most informative first.
        columns: the columns in the order of tables and plots.
        measures: the measures of the tables. The first ones are shown with gains and the paper's
            figures.
        paper: the papers' figures by measure and cell, in the unit of the tables.
        curves: measures that are drawn over the columns.
        traces: measures that are drawn over the steps. "accuracy" is measured only for a trace.
        probe: the linear probe of the gpu preset, a name of `stream_ssl.evaluation.linear.PROBES`.
    """

    name: str
    title: str
    says: str
    arms: Sequence[PaperArm]
    columns: Sequence[str]
    claims: Sequence[Claim]
    measures: Sequence[str] = ("linear", "knn")
    paper: Mapping[str, Mapping[Cell, float]] = field(default_factory=dict)
    curves: Sequence[str] = ("linear",)
    traces: Sequence[str] = ()
    probe: str = "debiased"

    def found(self, found: FinishedRuns) -> Iterator[PaperArm]:
        """Yield the arms with a finished run, by column and then in the experiment's order."""
        for column in self.columns:
            for arm in self.arms:
                if arm.column == column and arm.cell in found.results:
                    yield arm

    def plan(self, seeds: int, repeat_all: bool) -> list[PaperRun]:
        """Return every run once, the most informative first.

        All arms come first. The key arms follow with further seeds, then the other arms.
        """
        runs = [PaperRun(arm, 0) for arm in self.arms]
        for key in (True, False) if repeat_all else (True,):
            runs += [
                PaperRun(arm, seed)
                for seed in range(1, seeds)
                for arm in self.arms
                if arm.key is key
            ]
        return runs
