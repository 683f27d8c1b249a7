"""The tables of README and docs, made from all stored runs of the study.

A page marks the place of a table with two comments: `<!-- study: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from scipy.stats import spearmanr

from benchmarks.experiments.findings import FinishedRuns, holm
from benchmarks.experiments.results import Cell, Results, entries
from benchmarks.experiments.study import report
from benchmarks.experiments.study.arms import (
    BASE,
    BASELINES,
    FOLLOWING,
    HARDEST,
    NOVEL,
    SLOWLY,
    USERS,
    StudyArm,
    behind,
    drawn,
)
from benchmarks.experiments.study.report import CEILING, PROBES, both
from benchmarks.experiments.study.streams import STREAMS, TITLES
from benchmarks.experiments.study.training import StudySettings
from benchmarks.experiments.tables import TextTable, markdown

ROOT = Path(__file__).parents[3]
RUNS = ROOT / "benchmarks" / "reports" / "study" / "runs.jsonl"
PAGES = ("README.md", "docs/study.md", "docs/numbers.md")
PLACE = re.compile(r"(<!-- study: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)

NAMES = {"knn": "kNN", "linear": "linear"}
SHOWN = 12  # rows of the table of p-values

TRUTHS = {
    "entropy": "class entropy of the memory",
    "distinct": "different images in the memory",
    "copies": "share of near-duplicates",
    "knn": "kNN accuracy",
}
"""True numbers of a run, which the effective rank is compared with."""

RESERVOIR, MINRED = drawn("reservoir"), drawn("minred")
DEFAULT = behind("vmf0.1", "mixed")
RIVALS = {
    "reservoir": behind("reservoir"),
    "MinRed": behind("minred", "embedding"),
    "DUEL on embeddings": behind("vmf0.1", "embedding"),
    "`redundant` on thumbnails": behind("redundant0.01"),
}
"""Other rules behind the same near-duplicate test, by their titles."""

BY_FEATURES = {"features": "features", "mixed": "embeddings and features"}
"""Descriptors that read features, by name, and their titles."""
OLD = "memory/written/epochs/plain/{}/new0.9"
VARIANTS = {
    "none older than 8,192 samples": f"cap8192/{OLD.format('thumbnail')}",
    "none older than 4,096 samples": f"cap4096/{OLD.format('thumbnail')}",
    "a queue": f"queue/{OLD.format('thumbnail')}",
    "counted on embeddings and thumbnails, 9 : 1": f"vmf0.1/{OLD.format('weighted-9-1')}",
    "the same, 99 : 1, by a sharper score (0.02)": f"vmf0.02/{OLD.format('weighted-99-1')}",
    "MinRed, 99 : 1": f"minred/{OLD.format('weighted-99-1')}",
}
"""Arms with the near-duplicate test and the draw order of `NOVEL`. Some were removed since."""


class StoredRuns:
    """All stored runs of the study."""

    def __init__(self, path: Path) -> None:
        self._path, self.deviation = path, report.deviations(path)

    def at(self, steps: int = 600, capacity: int = 2048) -> FinishedRuns:
        """Return the runs with a number of updates and of slots."""
        settings = StudySettings(steps=steps, capacity=capacity)
        return report.found_in(Results(self._path, settings.facts()).by_name())

    def numbers(self) -> list[tuple[str, Mapping[str, float]]]:
        """Return the name and the numbers of every run, whatever its settings.

        A run that was made again counts once, with its newest numbers.
        """
        newest = {
            json.dumps([entry["run"], entry["settings"]], sort_keys=True): entry
            for entry in entries(self._path)
        }
        return [(entry["run"], entry["numbers"]) for entry in newest.values()]

    def gain(self, found: FinishedRuns, cell: Cell, base: Cell) -> str:
        """Return the differences of kNN and linear accuracy: "+1.2 ± 0.4 / +0.3 ± 0.3 (3)"."""
        knn, linear = (
            report.pair(found, cell, base, probe).difference(self.deviation[probe])
            for probe in PROBES
        )
        return f"{knn.partition(' (')[0]} / {linear}" if knn else ""


def today(stored: StoredRuns) -> TextTable:
    """The default, and its differences from its rivals."""
    found, rows = stored.at(steps=2400), []
    for stream in HARDEST:
        cell = DEFAULT.name, stream
        gains = [stored.gain(found, cell, (arm.name, stream)) for arm in RIVALS.values()]
        rows.append([TITLES[stream], both(found, cell), *gains])
    headings = ["DUEL (the default)", *(f"minus {name}" for name in RIVALS)]
    return TextTable("", ["kNN / linear, %", *headings], rows, names=1)


def queue(stored: StoredRuns) -> TextTable:
    """The default against a queue that is trained on the stream, as in MoCo."""
    found, rows = stored.at(steps=2400), []
    for stream in HARDEST:
        cells = (DEFAULT.name, stream), (BASE.name, stream)
        accuracies = [both(found, cell) for cell in cells]
        rows.append([TITLES[stream], *accuracies, stored.gain(found, *cells)])
    headings = ("DUEL (the default)", "queue, trained on the stream (MoCo)", "DUEL - queue")
    return TextTable("", ["kNN / linear, %", *headings], rows, names=1)


def settled(stored: StoredRuns) -> TextTable:
    """The differences of `today` with the smallest p-values after Holm's correction for all."""
    found = stored.at(steps=2400)
    compared: list[tuple[str, str, str, str]] = []
    values: dict[int, float] = {}
    for stream, (title, rival), probe in itertools.product(HARDEST, RIVALS.items(), PROBES):
        cells = (DEFAULT.name, stream), (rival.name, stream)
        deviation = stored.deviation[probe]
        if all(cell in found.results for cell in cells) and deviation is not None:
            gain = report.pair(found, *cells, probe)
            if gain.values:
                values[len(compared)] = deviation.p(gain.values)
                compared.append((TITLES[stream], title, NAMES[probe], gain.difference(deviation)))
    rows = [
        [*compared[key], "< 0.001" if p < 0.001 else f"{p:.3f}"]
        for key, p in list(holm(values).items())[:SHOWN]
    ]
    headings = ("accuracy", "DUEL - it, points", f"p, corrected for {len(compared)} comparisons")
    return TextTable("", ["stream", "rule", *headings], rows, names=3)


def baselines(stored: StoredRuns) -> TextTable:
    """Methods of continual self-supervised learning, against the queue, a reservoir and DUEL."""
    found, rows = stored.at(steps=2400), []
    for stream, (arm, title) in itertools.product(HARDEST, BASELINES.items()):
        if (cell := (arm.name, stream)) in found.results:
            gains = [
                stored.gain(found, cell, (base.name, stream))
                for base in (BASE, RIVALS["reservoir"])
            ]
            ours = stored.gain(found, (DEFAULT.name, stream), cell)
            rows.append([TITLES[stream], title, both(found, cell), *gains, ours])
    headings = ("accuracy", "minus the queue (MoCo)", "minus the reservoir", "DUEL - it")
    return TextTable("", ["kNN / linear, %", "method", *headings], rows, names=2)


def widths(stored: StoredRuns) -> TextTable:
    """DUEL's width, counted on embeddings, on the stream in which one class dominates."""
    found, rows = stored.at(steps=2400), []
    for width in ("0.1", "0.2", "0.3"):
        cell = behind(f"vmf{width}", "embedding").name, "x27-iid"
        share = f"{100 * found.spread(cell, 'dominant').mean:.0f}"
        rows.append([width, both(found, cell), share])
    return TextTable("", ["kappa", "kNN / linear, %", "dominant class, % of the slots"], rows, 1)


def features(stored: StoredRuns) -> TextTable:
    """DUEL on features, alone or beside embeddings, against embeddings and a reservoir."""
    found, rows = stored.at(steps=2400), []
    rivals = [RIVALS[name].name for name in ("DUEL on embeddings", "reservoir")]
    for stream, (descriptor, title), kappa in itertools.product(
        HARDEST, BY_FEATURES.items(), ("0.1", "0.2", "0.5")
    ):
        ours = behind(f"vmf{kappa}", descriptor).name
        if (cell := (ours, stream)) in found.results:
            differences = [stored.gain(found, cell, (rival, stream)) for rival in rivals]
            classes = [
                f"{math.exp(found.spread((name, stream), 'entropy').mean):.1f}"
                for name in (ours, *rivals)
            ]
            about = [TITLES[stream], title, kappa, both(found, cell)]
            rows.append([*about, *differences, *classes])
    headings = ("accuracy", "minus embeddings", "minus a reservoir")
    held = ("effective classes held", "embeddings", "reservoir")
    columns = ["kNN / linear, %", "descriptor", "kappa", *headings, *held]
    return TextTable("", columns, rows, names=3)


def gains(stored: StoredRuns) -> TextTable:
    found = stored.at()
    rows = []
    for stream in USERS:
        cell = (NOVEL.name, stream)
        bases = [(arm.name, stream) for arm in (BASE, RESERVOIR, MINRED)]
        differences = [stored.gain(found, cell, base) for base in bases]
        shares = [found.share(cell, CEILING, probe).mean for probe in PROBES]
        of_ceiling = " / ".join(f"{100 * share:.1f}" for share in shares)
        rows.append([TITLES[stream], *differences, of_ceiling])
    headings = ("minus the queue", "minus the reservoir", "minus MinRed", "share of the ceiling, %")
    return TextTable("", ["kNN / linear, points", *headings], rows, names=1)


def variants(stored: StoredRuns) -> TextTable:
    found, streams = stored.at(), ("shuffled", "crawl", "parked", "x27-iid", "shift")
    rows = [
        [title, *(stored.gain(found, (name, each), (NOVEL.name, each)) for each in streams)]
        for title, name in VARIANTS.items()
    ]
    return TextTable(
        "", ["kNN / linear, points", *(TITLES[each] for each in streams)], rows, names=1
    )


def _across(arms: Mapping[str, Cell], settings: Mapping[str, FinishedRuns]) -> TextTable:
    rows = [
        [title, *(both(found, cell) for found in settings.values())] for title, cell in arms.items()
    ]
    return TextTable("", ["kNN / linear, %", *settings], rows, names=1)


def _parked(*arms: StudyArm) -> dict[str, Cell]:
    names = {
        BASE: "parked: queue, trained on the stream",
        RESERVOIR: "parked: reservoir",
        MINRED: "parked: MinRed",
        NOVEL: "parked: DUEL on thumbnails, near-duplicates dropped",
    }
    return {names[arm]: (arm.name, "parked") for arm in arms} | {"shuffled: queue": CEILING}


def updates(stored: StoredRuns) -> TextTable:
    settings = {f"{steps:,} updates": stored.at(steps=steps) for steps in (600, 2400)}
    return _across(_parked(BASE, RESERVOIR, MINRED, NOVEL), settings)


def slots(stored: StoredRuns) -> TextTable:
    settings = {f"{count:,} slots": stored.at(capacity=count) for count in (2048, 16384)}
    return _across(_parked(BASE, RESERVOIR, NOVEL), settings)


def follow(stored: StoredRuns) -> TextTable:
    found, rows = stored.at(), []
    arms = {"by frames: one for each batch of all samples": NOVEL, "4": FOLLOWING, "3": SLOWLY}
    for title, arm in arms.items():
        cell = (arm.name, "parked")
        rows.append([title, f"{found.spread(cell, 'frames').mean:,.0f}", both(found, cell)])
    headings = ("updates for each batch of new samples", "frames covered", "kNN / linear, %")
    return TextTable("", headings, rows, names=1)


def worth(stored: StoredRuns) -> TextTable:
    """The default, its rivals behind the same test, and a queue that is trained on the stream."""
    found = stored.at(steps=2400)
    titles = {
        "queue, trained on the stream (MoCo)": BASE,
        **{name: RIVALS[name] for name in ("reservoir", "MinRed")},
        "DUEL (the default)": DEFAULT,
    }
    rows = [
        [TITLES[stream], *(both(found, (arm.name, stream)) for arm in titles.values())]
        for stream in HARDEST
    ]
    return TextTable("", ["kNN / linear, %", *titles], rows, names=1)


def rank(stored: StoredRuns) -> TextTable:
    """Rank correlations of the effective rank with true numbers, over all runs at their end."""
    runs = stored.numbers()
    rows = []
    streams = {"all streams": ""} | {TITLES[name]: f"{name} " for name in STREAMS}
    for title, prefix in streams.items():
        numbers = [found for run, found in runs if run.startswith(prefix)]
        if len(numbers) >= 10:
            rows.append([title, str(len(numbers)), *(_spearman(numbers, each) for each in TRUTHS)])
    headings = ("runs", *TRUTHS.values())
    return TextTable("", ["runs on", *headings], rows, names=1)


def _spearman(numbers: Sequence[Mapping[str, float]], truth: str) -> str:
    """Return Spearman's correlation of a number with the effective rank, of runs that have both."""
    pairs = [(run["effective_classes"], run[truth]) for run in numbers if truth in run]
    if len({value for _, value in pairs}) < 2:
        return ""
    return f"{spearmanr(pairs).statistic:+.2f}"


TABLES: Mapping[str, Callable[[StoredRuns], TextTable]] = {
    "today": today,
    "queue": queue,
    "settled": settled,
    "baselines": baselines,
    "widths": widths,
    "features": features,
    "summary": lambda stored: report.summary(stored.at()),
    "gains": gains,
    "variants": variants,
    "updates": updates,
    "slots": slots,
    "follow": follow,
    "worth": worth,
    "rank": rank,
}


def made(text: str, stored: StoredRuns) -> str:
    """Return the text of a page with the tables of these runs."""
    return PLACE.sub(lambda found: found[1] + markdown(TABLES[found[2]](stored)) + found[3], text)


def write() -> None:
    """Replace the tables of all pages by those of the stored runs."""
    stored = StoredRuns(RUNS)
    for page in PAGES:
        file = ROOT / page
        file.write_text(made(file.read_text(encoding="utf-8"), stored), encoding="utf-8")
