"""The display of a running demo: a live page in a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

from rich import box, filesize
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.measure import Measurement
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from stream_ssl.demo.data import CLASSES
from stream_ssl.demo.measures import (
    HOLDERS,
    MEMORIES,
    TITLES,
    Holder,
    entropy_classes,
    losses,
    newest_counts,
    shares,
    true_collisions,
)
from stream_ssl.observe.scrape import History

Stage = Literal["starting", "streaming", "training", "checkpoint", "evaluating", "report"]
STAGES: tuple[Stage, ...] = get_args(Stage)
MEASURED: tuple[Stage, ...] = ("streaming", "training")

COLOUR: dict[Holder, str] = {"stream": "grey62", "queue": "dark_orange", "working": "dodger_blue1"}
BLOCKS = "▁▂▃▄▅▆▇█"
EIGHTHS = " ▏▎▍▌▋▊▉"
NARROW = 72


@dataclass
class DemoProgress:
    """The progress of the demo.

    Args:
        total: seconds that the stream runs.
        elapsed: seconds since the start of the stream.
        detail: a few words on the current wait.
    """

    total: float
    stage: Stage = "starting"
    elapsed: float = 0.0
    detail: str = ""


@dataclass(frozen=True)
class Sparkline:
    """A curve of one line's height, as wide as the space.

    Args:
        values: values in order of time.
        span: values at the bottom and at the top. None: the lowest and the highest value.
    """

    values: Sequence[float]
    style: str = ""
    span: tuple[float, float] | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = max(options.max_width, 1)
        marks = "._-=+*%#" if options.ascii_only else BLOCKS
        columns = resample(self.values, width)
        low, high = self.span or (min(columns, default=0.0), max(columns, default=0.0))
        scale = (len(marks) - 1) / (high - low) if high > low else 0.0
        line = "".join(marks[round((value - low) * scale)] for value in columns)
        yield Segment(line.ljust(width), console.get_style(self.style or "none"))
        yield Segment.line()

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(1, options.max_width)


@dataclass(frozen=True)
class Share:
    """A bar of `part` in [0, 1] on a scale that ends at `full`, followed by the percentage."""

    part: float
    full: float
    style: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        number = f"{self.part:4.0%}"
        width = max(options.max_width - len(number) - 1, 0)
        eighths = round(8 * width * min(self.part / self.full, 1.0)) if self.full else 0
        whole, rest = divmod(eighths, 8)
        if options.ascii_only:
            bar = "#" * (whole + (rest >= 4))
        else:
            bar = "█" * whole + (EIGHTHS[rest] if rest else "")
        yield Segment(bar.ljust(width), console.get_style(self.style))
        yield Segment(" " + number)
        yield Segment.line()

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(8, options.max_width)


def resample(values: Sequence[float], width: int) -> list[float]:
    """Return at most `width` values: means over equal stretches."""
    if len(values) <= width:
        return list(values)
    edges = [round(i * len(values) / width) for i in range(width + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]


def clock(seconds: float) -> str:
    """Return minutes and seconds, as 1:05."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def page(
    history: History, progress: DemoProgress, width: int, ascii_only: bool = False
) -> RenderableType:
    """Return the whole live page, 22 lines high. Below 72 columns it has no panels."""
    if width < NARROW:
        return Group(_header(progress, ascii_only), _classes(history))
    panels = Table.grid(expand=True)
    for _ in range(3):
        panels.add_column(ratio=1)
    panels.add_row(_stream_panel(history), _learner_panel(history), _collision_panel(history))
    return Group(_header(progress, ascii_only), panels, _classes(history))


def _header(progress: DemoProgress, ascii_only: bool) -> RenderableType:
    done = STAGES.index(progress.stage)
    past, present, future = "+*-" if ascii_only else "✓●○"
    trail = Text(" ")
    for i, stage in enumerate(STAGES):
        style = "green" if i < done else "bold" if i == done else "dim"
        trail.append(f"{past if i < done else present if i == done else future} {stage}", style)
        trail.append("  ")
    grid = Table.grid(expand=True, padding=(0, 1))
    grid.add_column(no_wrap=True)
    grid.add_column(ratio=1)
    grid.add_column(justify="right", no_wrap=True)
    elapsed = min(progress.elapsed, progress.total)
    grid.add_row(
        Text(" stream-ssl demo", "bold"),
        ProgressBar(progress.total, elapsed, complete_style="dodger_blue1"),
        f"{clock(elapsed)} of {clock(progress.total)}",
    )
    return Group(grid, trail, Text(f" {progress.detail}", "dim", no_wrap=True, overflow="ellipsis"))


def _panel(title: str, *rows: RenderableType) -> Panel:
    return Panel(
        Group(*rows), title=title, title_align="left", box=box.ROUNDED, border_style="dim", height=6
    )


def _pair(left: str, right: RenderableType, style: str = "") -> Table:
    grid = Table.grid(expand=True, padding=(0, 1))
    grid.add_column(no_wrap=True)
    grid.add_column(ratio=1, no_wrap=True, justify="right")
    grid.add_row(Text(left, style or "dim"), right)
    return grid


def _stream_panel(history: History) -> Panel:
    samples = history.rate("stream_ssl_received_samples_total")
    amount = history.rate("stream_ssl_received_bytes_total")
    return _panel(
        "Receiver",
        _pair("samples/s", f"{samples:,.0f}"),
        _pair("MB/s", f"{amount / 1e6:.2f}"),
        _pair("journal", filesize.decimal(int(history.last("stream_ssl_journal_bytes")))),
        _pair("learner's lag", f"{history.last('stream_ssl_lag_seconds'):.1f} s"),
    )


def _learner_panel(history: History) -> Panel:
    steps = history.last("stream_ssl_steps_total")
    curve = [value for _, value in losses(history)]
    return _panel(
        "Learner",
        _pair("steps", f"{steps:,.0f} ({history.rate('stream_ssl_steps_total'):.1f}/s)"),
        _pair("trained, new", f"{history.last('stream_ssl_trained_samples_total'):,.0f}"),
        _pair("loss", f"{curve[-1]:.3f}" if curve else "-"),
        Sparkline(curve, "green"),
    )


def _collision_panel(history: History) -> Panel:
    curves = {
        holder: [value for _, value in true_collisions(history, holder)] for holder in MEMORIES
    }
    top = max((max(curve, default=0.0) for curve in curves.values()), default=0.0)
    rows: list[RenderableType] = []
    for holder, curve in curves.items():
        newest = f"{curve[-1]:.1%}" if curve else "-"
        rows.append(_pair(TITLES[holder], newest, COLOUR[holder]))
        rows.append(Sparkline(curve, COLOUR[holder], span=(0.0, top)))
    return _panel("Class collisions", *rows)


def _classes(history: History) -> Table:
    table = Table(box=None, expand=True, padding=(0, 1), show_footer=True)
    held = {holder: newest_counts(history, holder) for holder in HOLDERS}
    table.add_column("class", footer="effective classes", no_wrap=True)
    for holder, amounts in held.items():
        footer = Text(f"{entropy_classes(amounts):.1f} of {len(CLASSES)}", f"bold {COLOUR[holder]}")
        header = Text(TITLES[holder], COLOUR[holder])
        table.add_column(header, footer=footer, ratio=1, no_wrap=True)
    parts = {holder: shares(amounts) for holder, amounts in held.items()}
    full = max(max(part) for part in parts.values())
    for c, name in enumerate(CLASSES):
        table.add_row(name, *(Share(parts[h][c], full, COLOUR[h]) for h in HOLDERS))
    return table


def line(history: History, progress: DemoProgress, seconds: float) -> str:
    """Return the page as one line, for logs, `seconds` after the first line."""
    start = f"[{clock(seconds)}] {progress.stage}: "
    if progress.stage not in MEASURED:
        return start + progress.detail
    parts = [
        f"{history.rate('stream_ssl_received_samples_total'):,.0f} samples/s",
        f"{history.rate('stream_ssl_received_bytes_total') / 1e6:.2f} MB/s",
        f"lag {history.last('stream_ssl_lag_seconds'):.1f} s",
        f"step {history.last('stream_ssl_steps_total'):,.0f}",
    ]
    if points := losses(history):
        parts.append(f"loss {points[-1][1]:.3f}")
    for holder in MEMORIES:
        if points := true_collisions(history, holder):
            parts.append(f"{TITLES[holder]} collides {points[-1][1]:.1%}")
    effective = {h: entropy_classes(newest_counts(history, h)) for h in HOLDERS}
    if any(effective.values()):
        listed = ", ".join(f"{TITLES[h]} {number:.1f}" for h, number in effective.items())
        parts.append(f"effective classes: {listed}")
    return start + ", ".join(parts)


class Display:
    """A context that shows history and progress.

    Args:
        console: a terminal shows a live page. Another console gets a line every `every` seconds,
            and a line at each change of stage.
        every: seconds between two lines.
    """

    def __init__(
        self,
        history: History,
        progress: DemoProgress,
        console: Console,
        every: float = 5.0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._history = history
        self._progress = progress
        self._console = console
        self._every = every
        self._now = now
        self._start: float | None = None
        self._next = 0.0
        self._shown: Stage | None = None
        self._live: Live | None = None

    def __enter__(self) -> Display:
        if self._console.is_terminal:
            self._live = Live(
                get_renderable=self._page, console=self._console, refresh_per_second=4
            )
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, stage: Stage | None = None, detail: str | None = None) -> None:
        """Set the stage or the detail, and print a line if one is due."""
        if stage is not None:
            self._progress.stage = stage
        if detail is not None:
            self._progress.detail = detail
        changed = self._progress.stage != self._shown
        due = self._progress.stage in MEASURED and self._now() >= self._next
        if self._live is None and (changed or due):
            now = self._now()
            self._start = now if self._start is None else self._start
            self._shown = self._progress.stage
            self._next = now + self._every
            text = line(self._history, self._progress, now - self._start)
            self._console.print(text, highlight=False, soft_wrap=True)

    def _page(self) -> RenderableType:
        return page(
            self._history,
            self._progress,
            self._console.width,
            self._console.options.ascii_only,
        )
