"""The report: one HTML file without other files.

N images.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from jinja2 import Environment, StrictUndefined
from numpy.typing import NDArray

from stream_ssl.demo import charts
from stream_ssl.demo.data import CLASSES
from stream_ssl.demo.evaluation import DemoEvaluation
from stream_ssl.demo.measures import (
    HOLDERS,
    MEMORIES,
    TITLES,
    losses,
    newest_counts,
    shares,
    true_collisions,
)
from stream_ssl.demo.stream import Replay
from stream_ssl.demo.summary import Figures, too_few_updates
from stream_ssl.observe.scrape import History, Points
from stream_ssl.pictures import png_address, tiled

COLUMNS, ROWS = 24, 24
SMOOTH_SECONDS = 5.0
TEMPLATE = "report.html.j2"
REPRESENTATION_TITLES = {
    "memory": "trained from the DUEL memory",
    "queue": "trained with a queue",
    "untrained": "untrained encoder",
    "pixels": "raw pixels",
}
COLOURS = {"memory": charts.DUEL, "queue": charts.QUEUE}


@dataclass(frozen=True)
class DemoFacts:
    """Facts about the run for the report, besides its figures.

    Args:
        created: date and time, as the page shows them.
        seconds: how long the stream ran.
        parked: share of the stream's samples that show the scene of a stop.
        scenes: how many scenes there are.
        stretch: mean number of samples of a stop.
        run: (name, value) of versions, hardware and settings.
        commands: command lines that were run.
        places: (what, path) of the run's files.
        addresses: HTTP addresses by role during the run.
        config: the text of the configuration file.
    """

    created: str
    seconds: float
    parked: float
    scenes: int
    stretch: int
    run: Sequence[tuple[str, str]]
    commands: Sequence[str]
    places: Sequence[tuple[str, str]]
    addresses: Mapping[str, str] = field(default_factory=dict)
    config: str = ""


def write(
    path: Path,
    history: History,
    evaluation: DemoEvaluation,
    found: Figures,
    sent: Replay,
    facts: DemoFacts,
) -> None:
    """Write the report."""
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    source = files("stream_ssl.demo").joinpath(TEMPLATE).read_text()
    page = environment.from_string(source).render(
        f=found,
        facts=facts,
        classes=CLASSES,
        headlines=headlines(found),
        outcome=outcome(found),
        warning=too_few_updates(found),
        beside=beside(found),
        plots=plots(history, evaluation, facts),
        mosaics=mosaics(evaluation, sent),
        accuracy_rows=accuracy_rows(evaluation),
        representation_titles=REPRESENTATION_TITLES,
        slots=int(found["memory_capacity_slots"]),
    )
    path.write_text(page)


def headlines(f: Figures) -> list[tuple[str, str, str]]:
    """Return (figure, what it is, its comparison) for the top of the page."""
    return [
        (
            f"{f['memory_near_duplicates']:.0%}",
            "of the DUEL memory are near-duplicates of another slot",
            f"{f['queue_near_duplicates']:.0%} of a queue of the same size",
        ),
        (
            f"{f['memory_pictures']:,.0f}",
            f"different pictures are in the {f['memory_slots']:,.0f} slots of the DUEL memory",
            f"{f['queue_pictures']:,.0f} in a queue of the same size",
        ),
        (
            f"{f['knn_memory_accuracy']:.1%}",
            "of held-out images are classified correctly with the encoder of that memory",
            (
                f"{f['knn_queue_accuracy']:.1%} trained with a queue, "
                f"{f['knn_untrained_accuracy']:.1%} untrained"
            ),
        ),
        (
            f"{f['received_samples']:,.0f}",
            (
                "samples were received for the DUEL memory, and were on disk before they were "
                "acknowledged"
            ),
            (
                f"its learner read {f['read_samples']:,.0f}, and dropped "
                f"{f['dropped_samples']:,.0f} as near-duplicates before the stop; the queue's "
                f"learner read {f['queue_read_samples']:,.0f} from a producer of its own"
            ),
        ),
    ]


def outcome(f: Figures) -> str:
    """Return the result in a sentence: the accuracy of both encoders, with its uncertainty."""
    return (
        "The encoder trained from the DUEL memory "
        f"{_compare(f['knn_memory_accuracy'], f['knn_queue_accuracy'])} the one trained "
        "with a queue, in the same time and on the same stream."
    )


def beside(f: Figures) -> str:
    """Return sentences that compare the other accuracies."""
    memory, queue, untrained, pixels = (
        f[f"knn_{name}_accuracy"] for name in ("memory", "queue", "untrained", "pixels")
    )
    return (
        f"It {_compare(memory, untrained)} the same encoder before training, and "
        f"{_compare(memory, pixels, 'stands')} raw pixels. The queue's "
        f"{_compare(queue, untrained)} the encoder before training."
    )


def _compare(ours: float, other: float, verb: str = "ended") -> str:
    # Two standard errors of a difference between two accuracies on 1,000 images.
    noise = 2 * (2 * max(ours * (1 - ours), 0.0) / 1000) ** 0.5
    points = 100 * (ours - other)
    if abs(ours - other) <= noise:
        return f"{verb} within the noise of the probe ({points:+.1f} points) of"
    return f"{verb} {abs(points):.1f} points {'above' if points > 0 else 'below'}"


def plots(history: History, evaluation: DemoEvaluation, facts: DemoFacts) -> dict[str, Any]:
    """Return the plots by name, as SVG."""
    parts = {holder: shares(newest_counts(history, holder)) for holder in HOLDERS}
    true = {holder: true_collisions(history, holder) for holder in MEMORIES}
    curve = losses(history)
    largest = ", ".join(f"{TITLES[h]} {max(part):.0%}" for h, part in parts.items())
    ends = ", ".join(f"{TITLES[h]} {_last(points):.0%}" for h, points in true.items())
    probes = evaluation.probes
    return {
        "classes": charts.class_bars(
            parts, f"Bar chart of the share of each class. Largest class: {largest}."
        ),
        "collisions": charts.collision_curves(
            true,
            f"Line chart of collision probability over time. True, at last: {ends}.",
        ),
        "loss": charts.loss_curve(
            curve,
            smooth(curve),
            f"Line chart of the loss over time, {_last(curve):.2f} at last.",
        ),
        "flow": charts.flow_curves(
            history.rates("stream_ssl_received_samples_total"),
            history.rates("stream_ssl_trained_samples_total"),
            history.series("stream_ssl_lag_seconds"),
            f"Line charts over {facts.seconds:.0f} s: samples received and trained per second, "
            "and the learner's lag.",
        ),
        "accuracy": charts.accuracy_bars(
            [
                (
                    REPRESENTATION_TITLES[name],
                    probe.accuracy,
                    COLOURS.get(name, charts.PLAIN),
                )
                for name, probe in probes.items()
            ],
            "Bar chart of kNN accuracy: "
            + ", ".join(f"{REPRESENTATION_TITLES[n]} {p.accuracy:.1%}" for n, p in probes.items()),
        ),
    }


def mosaics(evaluation: DemoEvaluation, sent: Replay) -> dict[str, tuple[str, int, int, int]]:
    """Return (data address, images, width, height) by name, with equally many images of each."""
    count = min(COLUMNS * ROWS, len(evaluation.image_KHW), len(sent.newest_KHW))
    count = count // COLUMNS * COLUMNS or count  # whole rows, without black tiles
    found = {}
    for name, image_NHW, label_N in (
        ("queue", sent.newest_KHW, sent.newest_K),
        ("memory", evaluation.image_KHW, evaluation.label_K),
    ):
        chosen_NHW = by_class(image_NHW, label_N, count)
        picture_HWC = tiled(chosen_NHW[..., None], COLUMNS)
        height, width, _ = picture_HWC.shape
        found[name] = (png_address(picture_HWC, level=9), count, width, height)
    return found


def by_class(
    image_NHW: NDArray[np.uint8], label_N: NDArray[np.int64], count: int
) -> NDArray[np.uint8]:
    """Return at most `count` random images without replacement, in the order of their classes."""
    count = min(count, len(image_NHW))
    chosen = np.random.default_rng(0).choice(len(image_NHW), count, replace=False)
    return image_NHW[chosen[np.argsort(label_N[chosen], kind="stable")]]


def accuracy_rows(evaluation: DemoEvaluation) -> list[tuple[str, list[float], int]]:
    """Return rows of the table: (class, accuracy by representation, index of the best)."""
    probes = list(evaluation.probes.values())
    rows = []
    for c, name in enumerate(CLASSES):
        values = [probe.per_class[c] for probe in probes]
        rows.append((name, values, max(range(len(values)), key=values.__getitem__)))
    return rows


def smooth(points: Points) -> Points:
    """Return the mean over the SMOOTH_SECONDS before each point."""
    return [
        (time, fmean(value for at, value in points[: i + 1] if at > time - SMOOTH_SECONDS))
        for i, (time, _) in enumerate(points)
    ]


def _last(points: Points) -> float:
    return points[-1][1] if points else 0.0
