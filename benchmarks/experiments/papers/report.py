"""The dated report of an experiment, with tables and plots, named by hardware."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.experiments import tables
from benchmarks.experiments.findings import FinishedRuns, Spread
from benchmarks.experiments.papers import plots
from benchmarks.experiments.papers.arms import Experiment
from benchmarks.experiments.papers.verdicts import MEASURES, Judgement, verdicts
from benchmarks.experiments.tables import TextTable
from benchmarks.report import slug

RULE = """Verdicts are computed from the runs. A claim *agrees* if the difference is above 0 with
p < 0.05, *disagrees* if it is below 0 with p < 0.05, and is *not settled* otherwise. p is of a
two-sided t-test of differences between runs with the same data and test images, corrected by Holm's
method for all claims of the experiment. The deviation over seeds is pooled over the claims about
the same number. ± is the standard deviation over seeds. A cell without a run is empty."""


def write(
    experiment: Experiment,
    found: FinishedRuns,
    planned: int,
    preset: str,
    settings: Mapping[str, Any],
    folder: Path,
) -> Path:
    """Write report and plots, and replace older ones of the same experiment and preset.

    They depend only on stored results: the same results give the same bytes.
    """
    made = [result.made for cell in found.results.values() for result in cell.values()]
    days = sorted({one["day"] for one in made})
    machines = sorted({one["machine"] for one in made})
    kind = f"{experiment.name}-{preset}-"
    name = f"{days[-1]}-{kind}{slug(machines[-1])}"
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob(f"????-??-??-{kind}*"):
        if old.suffix in (".md", ".png", ".svg"):
            old.unlink()
    plots.draw(experiment, found, folder / f"{name}.png")
    judged = verdicts(experiment, found)
    done = len(made)
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    command = f"python -m benchmarks.experiments {experiment.name} --preset {preset} --data ..."
    parts = [
        f"# {experiment.title}: {preset}\n",
        f"{done} of {planned} planned runs are done ({when}; {'; '.join(machines)}).\n",
        f"`{command}`{' goes on with the rest' if done < planned else ''}.\n",
        experiment.says + "\n",
        f"Settings: {_settings(settings)}.\n",
        _summary(judged) + "\n",
        RULE + "\n",
        *(tables.markdown(table) for table in tables_of(experiment, found, judged)),
        f"![plots]({name}.png)\n",
    ]
    path = folder / f"{name}.md"
    path.write_text("\n".join(parts))
    return path


def tables_of(
    experiment: Experiment, found: FinishedRuns, judged: Sequence[Judgement]
) -> list[TextTable]:
    """Return a table of the claims, one table per accuracy, and one table of the other measures.

    A cell without a run is empty.
    """
    shown = [claims(judged)]
    own = [name for name in experiment.measures if MEASURES[name].share]
    shown += [by_measure(experiment, found, name) for name in own]
    others = [name for name in experiment.measures if name not in own]
    if others:
        shown.append(together(experiment, found, others))
    return shown


def claims(judged: Sequence[Judgement]) -> TextTable:
    """Return a row per claim: by how much its sum is above 0, in the paper and here."""
    rows = []
    for claim, paper, ours, p, word in judged:
        measure = MEASURES[claim.measure]
        figure = "" if paper is None else f"{paper:+.{measure.decimals}f}"
        seeds = str(len(ours.values) or "")
        about = [claim.text, claim.source, measure.heading]
        own = ours.text(measure.scale, measure.decimals, sign=True)
        rows.append([*about, figure, own, seeds, "" if p is None else f"{p:.3f}", word])
    headings = ("claim", "source", "difference in", "paper", "ours", "seeds", "p", "verdict")
    return TextTable("Claims", headings, rows, 3)


def by_measure(experiment: Experiment, found: FinishedRuns, name: str) -> TextTable:
    """Return a row per arm: our number, its gain over the baseline, and both in the paper."""
    measure, figures = MEASURES[name], experiment.paper.get(name, {})
    rows = []
    for arm in experiment.found(found):
        against = None if arm.against is None else (arm.against, arm.column)
        base = None if against is None else figures.get(against)
        paper = figures.get(arm.cell)
        gained = Spread(()) if against is None else found.gain(arm.cell, against, name)
        cells = [
            *(arm.column, arm.row, str(found.seeds(arm.cell))),
            found.spread(arm.cell, name).text(measure.scale, measure.decimals),
            gained.text(measure.scale, measure.decimals, sign=True),
        ]
        if figures:
            gain = None if paper is None or base is None else paper - base
            cells += [
                "" if paper is None else f"{paper:.{measure.decimals}f}",
                "" if gain is None else f"{gain:+.{measure.decimals}f}",
            ]
        rows.append(cells)
    headings = ["", "arm", "seeds", "ours", "gain"]
    if figures:
        headings += ["paper", "paper's gain"]
    return TextTable(measure.heading[0].upper() + measure.heading[1:], headings, rows)


def together(experiment: Experiment, found: FinishedRuns, names: Sequence[str]) -> TextTable:
    """Return a row per arm, with a column per measure."""
    rows = [
        [
            *(arm.column, arm.row),
            *(
                found.spread(arm.cell, name).text(MEASURES[name].scale, MEASURES[name].decimals)
                for name in names
            ),
        ]
        for arm in experiment.found(found)
    ]
    return TextTable(
        "Also measured", ["", "arm", *(MEASURES[name].heading for name in names)], rows
    )


def _summary(judged: Sequence[Judgement]) -> str:
    words = [verdict.word for verdict in judged]
    parts = [
        f"{words.count(word)} {verb}"
        for word, verb in (
            ("agrees", "hold here"),
            ("disagrees", "do not"),
            ("not settled", "are not settled"),
            ("not run", "have not been run"),
        )
    ]
    return f"Results of {len(words)} claims: {', '.join(parts)}."


def _settings(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items())
