"""The results of an evaluation as JSON, as a table, and as a page with plots.

Shapes: T tasks.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stream_ssl.evaluation.continual import ContinualResult, recovered_gain, recovered_share
from stream_ssl.evaluation.encoding import Encoded
from stream_ssl.evaluation.measures import Measures

if TYPE_CHECKING:
    from rich.table import Table

FORMAT = 1
JSON = "evaluation.json"
"""The file of the results. A folder that holds it has an earlier evaluation."""


@dataclass(frozen=True)
class ContinualMeasures:
    """The accuracy on each task after each stage of a stream.

    Attributes:
        tasks: classes of each task.
        accuracy_TT: accuracy by stage (row) and task (column).
        untrained_T: accuracy of the encoder before its first update; None if it was not evaluated.
        k: number of neighbours of the probe.
    """

    tasks: Sequence[Sequence[int]]
    accuracy_TT: Sequence[Sequence[float]]
    untrained_T: Sequence[float] | None
    k: int
    result: ContinualResult


@dataclass(frozen=True)
class Recovered:
    """The recovered shares of the decorrelated stream's results.

    Attributes:
        share: share of the decorrelated stream's accuracy.
        gain: share of its gain over the untrained encoder; None if that is unknown or not positive.
    """

    share: float
    gain: float | None

    @classmethod
    def of(cls, accuracy: float, decorrelated: float, untrained: float | None) -> Recovered:
        """Return the recovered shares of these accuracies.

        Args:
            decorrelated: accuracy of the encoder trained on the decorrelated stream.
            untrained: accuracy of the untrained encoder; None if unknown.
        """
        gained = untrained is not None and decorrelated > untrained
        gain = recovered_gain(accuracy, decorrelated, untrained or 0.0) if gained else None
        return cls(recovered_share(accuracy, decorrelated), gain)

    def text(self) -> str:
        """Return both shares as text for a table."""
        whole = f"{100 * self.share:.1f} %"
        return whole if self.gain is None else f"{whole} ({100 * self.gain:.0f} % of the gain)"


@dataclass(frozen=True)
class Evaluation:
    """The results of one evaluation.

    Attributes:
        facts: checkpoint, step, data, device and settings, as plain values.
        measures: measures by encoder: "trained"; also "untrained" and "decorrelated" if requested.
        continual: results by stage, if stages were given.
        notes: remarks on the data for the reader.
    """

    facts: Mapping[str, Any]
    measures: Mapping[str, Measures]
    continual: ContinualMeasures | None = None
    notes: Sequence[str] = field(default_factory=tuple)

    @property
    def recovered(self) -> dict[str, Recovered] | None:
        """The recovered shares by probe; None without the decorrelated stream."""
        if "decorrelated" not in self.measures:
            return None
        found = {name: dict(_accuracies(measures)) for name, measures in self.measures.items()}
        before = found.get("untrained", {})
        return {
            probe: Recovered.of(accuracy, found["decorrelated"][probe], before.get(probe))
            for probe, accuracy in found["trained"].items()
            if found["decorrelated"][probe] > 0
        }

    def as_json(self) -> dict[str, Any]:
        """Return the results as plain values."""
        found = self.continual
        return {
            "format": FORMAT,
            **self.facts,
            "notes": list(self.notes),
            "encoders": {name: measures.as_json() for name, measures in self.measures.items()},
            "recovered": None
            if (recovered := self.recovered) is None
            else {probe: asdict(parts) for probe, parts in recovered.items()},
            "continual": None if found is None else asdict(found),
        }


def rows(evaluation: Evaluation) -> Iterator[tuple[str, list[str]]]:
    """Yield (measure, its value for each encoder) for each row of the table."""
    all_measures = list(evaluation.measures.values())
    for name, _ in _accuracies(all_measures[0]):
        cells = []
        for measures in all_measures:
            accuracy, error = dict(_with_errors(measures))[name]
            cells.append(f"{100 * accuracy:.2f} ± {100 * error:.2f} %")
        yield name, cells
    for k in all_measures[0].retrieval:
        yield f"top-{k} retrieval", [f"{100 * m.retrieval[k]:.2f} %" for m in all_measures]
    yield "intra-class cosine", [f"{m.similarity.intra:.4f}" for m in all_measures]
    yield "inter-class cosine", [f"{m.similarity.inter:.4f}" for m in all_measures]
    yield "alignment", [f"{m.alignment:.4f}" for m in all_measures]
    yield "uniformity", [f"{m.uniformity:.4f}" for m in all_measures]
    yield "RankMe", [f"{m.rank_me:.1f} of {m.dim}" for m in all_measures]


def continual_rows(found: ContinualMeasures) -> Iterator[tuple[str, str]]:
    """Yield (measure, its value) for the stages of the stream."""
    result = found.result
    yield "average accuracy", f"{100 * result.average_accuracy:.2f} %"
    for name, value in (
        ("forgetting", result.forgetting),
        ("backward transfer", result.backward_transfer),
        ("forward transfer", result.forward_transfer),
    ):
        if value is not None:
            yield name, f"{100 * value:+.2f} points"


def table(evaluation: Evaluation) -> Table:
    """Return the table for a terminal."""
    from rich.table import Table

    shown = Table(title=_title(evaluation), title_justify="left", title_style="bold")
    shown.add_column("")
    for name in evaluation.measures:
        shown.add_column(name, justify="right")
    for what, cells in rows(evaluation):
        shown.add_row(what, *cells)
    blank = [""] * (len(evaluation.measures) - 1)
    if evaluation.continual is not None:
        shown.add_section()
        for what, value in continual_rows(evaluation.continual):
            shown.add_row(what, value, *blank)
    if evaluation.recovered is not None:
        shown.add_section()
        for what, parts in evaluation.recovered.items():
            shown.add_row(f"recovered, {what}", parts.text(), *blank)
    return shown


def write(folder: Path, evaluation: Evaluation, encoded: Encoded, names: Sequence[str]) -> None:
    """Write evaluation.json, report.md and the plots, and replace those of an earlier evaluation.

    Args:
        folder: the output folder, created if it does not exist.
        encoded: the trained encoder's features, for the plots.
        names: names of the classes, in the order of the confusion's rows.
    """
    from stream_ssl.evaluation import plots

    folder.mkdir(parents=True, exist_ok=True)
    content = json.dumps(evaluation.as_json(), indent=1, allow_nan=False)
    (folder / JSON).write_text(content + "\n")
    measures = evaluation.measures["trained"]
    most = max(measures.knn)
    (folder / "confusion.png").unlink(missing_ok=True)
    if measures.confusion_CC is not None:
        plots.confusion_plot(
            folder / "confusion.png",
            measures.confusion_CC,
            names,
            f"kNN, k = {most}: {100 * measures.knn[most].accuracy:.1f} % right",
        )
    plots.map_plot(
        folder / "map.png", encoded.query_QF, encoded.label_Q, list(measures.classes), names
    )
    plots.similarity_plot(folder / "similarity.png", encoded.query_QF, encoded.label_Q)
    (folder / "continual.png").unlink(missing_ok=True)
    if evaluation.continual is not None:
        tasks = [short(task) for task in evaluation.continual.tasks]
        plots.continual_plot(folder / "continual.png", evaluation.continual.accuracy_TT, tasks)
    page = "\n".join(_page(evaluation, names)) + "\n"
    (folder / "report.md").write_text(page, errors="replace")  # names may not be UTF-8


def short(classes: Sequence[int]) -> str:
    """Return the classes of a task as a short text.

    >>> short([0, 1, 2]), short([4, 1]), short([3])
    ('0-2', '4, 1', '3')
    """
    if len(classes) > 2 and list(classes) == list(range(classes[0], classes[-1] + 1)):
        return f"{classes[0]}-{classes[-1]}"
    shown = ", ".join(map(str, classes[:4]))
    return shown + (", …" if len(classes) > 4 else "")


def _page(evaluation: Evaluation, names: Sequence[str]) -> Iterator[str]:
    facts = evaluation.facts
    yield f"# {_title(evaluation)}\n"
    yield f"Checkpoint `{facts['checkpoint']}`, made {facts['created']}.  "
    references, queries = f"{facts['references']:,} references", f"{facts['queries']:,} queries"
    yield f"{references} of {len(names)} classes, and {queries}, as many of each "
    yield f"class that has any, of `{facts['data']}`; {facts['of']} of the encoder.\n"
    for note in evaluation.notes:
        yield f"> {note}\n"
    yield "| |" + "".join(f" {name} |" for name in evaluation.measures)
    yield "|---|" + "---:|" * len(evaluation.measures)
    for what, cells in rows(evaluation):
        yield f"| {what} |" + "".join(f" {cell} |" for cell in cells)
    yield "\n± is the standard error that the number of queries leaves. Each measure, its source "
    yield "and what to expect of it: docs/evaluation.md.\n"
    if evaluation.recovered is not None:
        yield "## Recovered share\n\n| probe | of the decorrelated stream's accuracy |\n|---|---:|"
        for what, parts in evaluation.recovered.items():
            yield f"| {what} | {parts.text()} |"
        yield ""
    if evaluation.continual is not None:
        yield from _continual(evaluation.continual)
    yield "## Classes\n\n| class |" + "".join(
        f" {what} |" for what, _ in _accuracies(evaluation.measures["trained"])
    )
    yield "|---|" + "---:|" * len(list(_accuracies(evaluation.measures["trained"])))
    yield from _classes(evaluation.measures["trained"], names)
    yield ""
    if evaluation.measures["trained"].confusion_CC is not None:
        yield "![What the queries of each class were taken for](confusion.png)\n"
    yield "![The queries on their first two principal components](map.png)\n"
    yield "![Cosine similarity of pairs of one class and of two](similarity.png)"


def _continual(found: ContinualMeasures) -> Iterator[str]:
    yield f"## Stages of the stream\n\nkNN, k = {found.k}, among the references of all classes.\n"
    yield "| | |\n|---|---:|"
    for what, value in continual_rows(found):
        yield f"| {what} | {value} |"
    yield "\n| after task |" + "".join(f" {short(task)} |" for task in found.tasks)
    yield "|---|" + "---:|" * len(found.tasks)
    if found.untrained_T is not None:
        yield "| untrained |" + "".join(f" {100 * value:.1f} % |" for value in found.untrained_T)
    for stage, accuracies in enumerate(found.accuracy_TT, start=1):
        yield f"| {stage} |" + "".join(f" {100 * value:.1f} % |" for value in accuracies)
    yield "\n![Accuracy on each task after each stage](continual.png)\n"


def _classes(measures: Measures, names: Sequence[str]) -> Iterator[str]:
    results = [*measures.knn.values(), *measures.linear.values()]
    for label, name in zip(measures.classes, names, strict=True):
        cells = (result.per_class.get(label) for result in results)
        cell = html.escape(name, quote=False).replace("|", "\\|")  # Markdown may hold HTML
        yield f"| {cell} |" + "".join(
            " |" if share is None else f" {100 * share:.1f} % |" for share in cells
        )


def _title(evaluation: Evaluation) -> str:
    facts = evaluation.facts
    return f"Evaluation at step {facts['step']:,}, after {facts['samples']:,} samples"


def _accuracies(measures: Measures) -> Iterator[tuple[str, float]]:
    for name, (accuracy, _) in _with_errors(measures):
        yield name, accuracy


def _with_errors(measures: Measures) -> Iterator[tuple[str, tuple[float, float]]]:
    for k, result in measures.knn.items():
        yield f"kNN, k = {k}", (result.accuracy, result.error)
    for name, result in measures.linear.items():
        yield f"linear probe, {name}", (result.accuracy, result.error)
