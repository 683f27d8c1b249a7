"""stream-ssl watch: a live view of a run in a terminal, such as over ssh."""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import sys
import termios
import threading
import time
import tty
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from stream_ssl.app.commands.status import COLOURS, MARKS
from stream_ssl.config.parser import run_function
from stream_ssl.daemon.run_states import Reading, Run, not_a_folder, run_at
from stream_ssl.observe.wording import duration, percent, plural, rate
from stream_ssl.process.failures import DONE, FAILED, USAGE
from stream_ssl.process.signals import interrupted_by
from stream_ssl.rate_limited_logger import printable

BARS = "▁▂▃▄▅▆▇█"
POINTS = 24
"""The number of past values that a line shows."""
NAME = 11
"""The width of the names on the left, in characters."""
LEAST_PRODUCERS = 3
"""Lines that the producers get before the answers are shortened."""
USES_SECONDS = 10.0
"""Seconds between two questions for the memory's slots by producer."""
MOST_PRODUCERS = 100
"""The most producers that are asked for at once."""

_Settings = list[Any] | None
"""The settings of a terminal; None without one."""


def watch(run: Path, seconds: float = 2.0, token_file: Path | None = None) -> int:
    """Show the five answers, the producers, the memory and the speed of a run until q or Ctrl-C.

    Args:
        run: the run's folder, as `run:` in the config file, or the address of its page.
        seconds: the time between two questions to the run, 0.2 or more.
        token_file: the file of the token that the page at an address requires.
    """
    if not (seconds >= 0.2 and math.isfinite(seconds)):
        return _refuse(f"--seconds {seconds:g}: must be finite and at least 0.2")
    if why := not_a_folder(run):
        return _refuse(why)
    console = Console()
    if not sys.stdout.isatty() or console.is_dumb_terminal:
        return _refuse(
            "the output is not a terminal whose cursor moves, which this view needs: use "
            "`stream-ssl status`, set TERM if it is dumb, or use `ssh -t` over ssh"
        )
    try:
        place = run_at(run, token_file)
    except ValueError as error:
        print(error, file=sys.stderr)
        return FAILED
    view = View(place.title)
    stop = threading.Event()
    asking = threading.Thread(target=_ask, args=(place, view, stop, seconds), daemon=True)
    before = _settings()
    with (
        contextlib.suppress(KeyboardInterrupt),
        _keys() as key,
        Live(view, console=console, screen=True, auto_refresh=False) as live,
        _suspendable(live, before),
    ):
        asking.start()
        while key() not in ("q", "Q"):
            live.refresh()
    stop.set()
    return DONE


def main(arguments: Sequence[str]) -> int:
    return run_function(watch, arguments)


def _refuse(why: str) -> int:
    print(why, file=sys.stderr)
    return USAGE


def _ask(run: Run, view: View, stop: threading.Event, seconds: float) -> None:
    """Ask the run every `seconds` until `stop` is set."""
    asker = Asker(run)
    while not stop.is_set():
        view.take(asker.look)
        stop.wait(seconds)


@contextmanager
def _keys() -> Iterator[Callable[[], str]]:
    """Give a function that waits up to a quarter of a second for a key, and returns it or "".

    Without a terminal as input, only Ctrl-C ends the view. SIGTERM ends it like Ctrl-C, so that the
    terminal gets its settings back.
    """

    def key() -> str:
        if not select.select([sys.stdin] if there else [], [], [], 0.25)[0]:
            return ""
        pressed = os.read(sys.stdin.fileno(), 64).decode(errors="replace")
        return pressed[:1] or "q"  # the terminal is gone

    there, settings = sys.stdin.isatty(), _settings()
    try:
        with interrupted_by(signal.SIGTERM):
            if there:
                tty.setcbreak(sys.stdin)
            yield key
    finally:
        _set(settings)


@contextmanager
def _suspendable(live: Live, shell: _Settings) -> Iterator[None]:
    """Let Ctrl-Z give the shell its screen and settings, and let `fg` take them again."""

    def suspend(*_: object) -> None:
        live.stop()
        ours = _settings()
        _set(shell)
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)  # this process stands still here until `fg`
        signal.signal(signal.SIGTSTP, suspend)
        _set(ours)
        live.start()

    before = signal.signal(signal.SIGTSTP, suspend)
    try:
        yield
    finally:
        signal.signal(signal.SIGTSTP, before)


def _settings() -> _Settings:
    """Return the settings of the terminal; None without one."""
    return termios.tcgetattr(sys.stdin) if sys.stdin.isatty() else None


def _set(settings: _Settings) -> None:
    """Give the terminal these settings."""
    if settings is not None:
        with contextlib.suppress(termios.error):  # the terminal is gone
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, settings)


# -- What is asked


@dataclass(frozen=True)
class Look:
    """The states, answers and producers of one moment.

    Attributes:
        reading: the states and the five answers.
        producers: the rows of the receivers' tables, those that sent most recently first.
        uses: what became of each producer's samples, by producer.
    """

    reading: Reading
    producers: Sequence[Mapping[str, Any]] = ()
    uses: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


class Asker:
    """Asks a run for a `Look`, and seldom for the slots by producer, which take longer."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._uses: Mapping[str, Mapping[str, Any]] = {}
        self._next = -math.inf

    def look(self) -> Look:
        """Return the answers of the run at this moment. Without any, raise ValueError."""
        reading = self._run.read()
        rows = [
            row
            for reply in self._try("receiver", "producers", sort="rate", limit=MOST_PRODUCERS)
            for row in reply["producers"]
        ]
        rows.sort(key=lambda row: (-(row["rate"] or 0.0), row["silent"]))
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + USES_SECONDS
            replies = self._try("learner", "memory/producers", limit=1000)
            if replies:
                self._uses = _summed([reply["uses"] for reply in replies])
        return Look(reading, rows, self._uses)

    def _try(self, role: str, question: str, **arguments: object) -> list[dict[str, Any]]:
        """Return the answers, none if the role does not answer. `Look.reading` has the reason."""
        with contextlib.suppress(ValueError):
            return self._run.ask(role, question, **arguments)
        return []


def _summed(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the sums of maps of numbers and of such maps, key by key."""
    found: dict[str, Any] = {}
    for key, value in (item for part in parts for item in part.items()):
        before = found.get(key)
        if isinstance(value, Mapping):
            found[key] = _summed([before or {}, value])
        else:
            found[key] = value + (before or 0.0)
    return found


# -- What is shown


class View:
    """The screen of a run: it has the newest look, and shows it in any size."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._lock = threading.Lock()
        self._look: Look | None = None
        self._at, self._why = time.monotonic(), ""
        self._past: dict[str, deque[float]] = {name: deque(maxlen=POINTS) for name in SPEED}

    def take(self, ask: Callable[[], Look]) -> None:
        """Ask for a look. If it fails, the last look stays, and the screen gives the reason."""
        try:
            look = ask()
        except (ValueError, LookupError, TypeError, AttributeError, OSError) as error:
            with self._lock:
                self._why = str(error) or type(error).__name__
            return
        with self._lock:
            self._look, self._at, self._why = look, time.monotonic(), ""
            figures = figures_of(look.reading)
            for name, past in self._past.items():
                value = figures.get(name)
                past.append(math.nan if value is None else value)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, height = console.size
        with self._lock:
            yield from self.lines(width, height)[:height]

    def lines(self, width: int, height: int) -> list[Text]:
        """Return at most `height` lines of at most `width` characters."""
        clock = time.strftime("%H:%M:%S")
        age = time.monotonic() - self._at
        head = Text(f"stream-ssl · {printable(self._title, 200)} · {clock}", "bold")
        foot = Text("q or Ctrl-C ends the view", "dim")
        notes = [Text(printable(self._why, 500), "red")] if self._why else []
        if self._look is None:
            return _cut([head, *(notes or [Text("asking", "dim")]), foot], width)
        if self._why or age > 15:
            notes.append(Text(f"the values below are {duration(age)} old", "yellow"))
        figures = figures_of(self._look.reading)
        speed = [*notes, *self._speed(figures), self._memory(figures)]
        room = height - len(speed) - 2
        rows = self._producers()
        answers = self._answers(width, room - min(LEAST_PRODUCERS, len(rows)))
        rows = rows[: max(0, room - len(answers))]
        return _cut([head, *answers, *speed, *rows, foot], width)

    def _answers(self, width: int, room: int) -> list[Text]:
        """Return the answers. The longest ones are cut until they fit into `room` lines."""
        assert self._look is not None
        given = self._look.reading.answers
        texts = [printable(f"{one.word}: {one.says}", 2000) for one in given]
        folded = [_folded(one, max(8, width - NAME - 2)) for one in texts]
        kept = [len(lines) for lines in folded]
        while sum(kept) > max(len(kept), room):
            kept[max(range(len(kept)), key=kept.__getitem__)] -= 1
        found: list[Text] = []
        for one, lines, most in zip(given, folded, kept, strict=True):
            shown = lines[:most]
            if most < len(lines):
                shown[-1] = f"{shown[-1][: max(8, width - NAME - 2) - 2].rstrip()} …"
            for number, line in enumerate(shown):
                mark = f"{MARKS[one.level]} {one.question}" if not number else ""
                found.append(
                    Text.assemble((mark.ljust(NAME + 2), f"bold {COLOURS[one.level]}"), line)
                )
        return found

    def _speed(self, figures: Mapping[str, float | None]) -> list[Text]:
        return [
            Text.assemble(
                (f"  {name}".ljust(NAME + 2), "bold"),
                f"{'-' if figures.get(name) is None else form(figures):<24}",
                (bars(self._past[name]), "cyan"),
            )
            for name, form in SPEED.items()
        ]

    def _memory(self, figures: Mapping[str, float | None]) -> Text:
        slots, capacity = figures.get("slots"), figures.get("capacity")
        text = "-"
        if slots is not None and capacity is not None:
            text = f"{slots:,.0f} of {plural(capacity, 'slot')}"
        if (alike := figures.get("near_duplicates")) is not None:
            text += f", {percent(alike)} near-duplicates"
        if (age := figures.get("checkpoint_age")) is not None and figures.get("checkpoint_step"):
            text += f"; checkpoint {duration(age)} ago"
        return Text.assemble(("  memory".ljust(NAME + 2), "bold"), text)

    def _producers(self) -> list[Text]:
        assert self._look is not None
        if not self._look.producers:
            return []
        found = [
            Text(
                f"  {'producers':<20}{'rate':>9}{'used':>10}{'dropped':>10}{'bad':>7}"
                f"{'slots':>8}  last seen",
                "bold",
            )
        ]
        for row in self._look.producers:
            use = self._look.uses.get(row["name"], {})
            bad = sum(row["rejected"].values()) + sum(use.get("bad", {}).values())
            away = sum(use.get("dropped", {}).values())
            name = _fitted(printable(row["name"], 200), 20)
            speed = "-" if row["rate"] is None else f"{rate(row['rate'])}/s"
            seen = duration(row["silent"]) + ("" if row["connected"] else ", away")
            counts = (use.get("admitted"), away if use else None)
            shown = "".join(f"{_count(value):>10}" for value in counts)
            text = f"  {name}{speed:>9}{shown}{_count(bad):>7}{_count(use.get('slots')):>8}  {seen}"
            found.append(Text(text, "red" if bad else "" if row["connected"] else "dim"))
        return found


SPEED: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "received": lambda of: f"{rate(of['received'])}/s",
    "trained": lambda of: f"{rate(of['trained'])}/s new, {rate(of.get('replayed') or 0.0)}/s again",
    "lag": lambda of: duration(of["lag"]),
    "loss": lambda of: f"{of['loss']:.3f}",
}
"""The figures with a line of their past, and their forms."""
RANK_PARTS = ("trained", "replayed", "slots", "capacity")
"""Each rank reports its own part of these figures, so they are summed."""


def figures_of(reading: Reading) -> dict[str, float | None]:
    """Return the figures of all processes.

    The figures of several receivers, and the RANK_PARTS of several ranks, are summed. The lag is
    the longest of all ranks. The other figures are those of the first rank.
    """
    found: dict[str, float | None] = {}
    for name, state in sorted(reading.states.items()):
        for figure, value in state.get("figures", {}).items():
            before = found.get(figure)
            if before is None or value is None:
                found[figure] = value if before is None else before
            elif name.startswith("receiver") or figure in RANK_PARTS:
                found[figure] = before + value
            elif figure == "lag":
                found[figure] = max(before, value)
    return found


def bars(values: Sequence[float]) -> str:
    """Return a line of bars, from 0 to the largest value; a blank where there is no value.

    >>> bars([0.0, 1.0, float("nan"), 8.0])
    '▁▂ █'
    """
    most = max((value for value in values if math.isfinite(value)), default=0.0)
    last = len(BARS) - 1
    return "".join(
        BARS[round(last * max(0.0, value) / most) if most > 0 else 0]
        if math.isfinite(value)
        else " "
        for value in values
    )


def _count(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value < 1e5 else f"{value:.2g}"


def _fitted(text: str, width: int) -> str:
    """Return the text in exactly `width` columns of the terminal."""
    line = Text(text)
    line.truncate(width, overflow="ellipsis", pad=True)
    return line.plain


def _folded(text: str, width: int) -> list[str]:
    """Return the lines of a sentence, broken at blanks, each at most `width` columns wide."""
    lines = Text(text).wrap(Console(width=width, file=sys.stderr), width)
    return [line.plain.rstrip() for line in lines] or [""]


def _cut(lines: Sequence[Text], width: int) -> list[Text]:
    for line in lines:
        line.truncate(width, overflow="ellipsis")
        line.no_wrap = True
    return list(lines)
