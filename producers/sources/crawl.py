"""A source that downloads images from lists of URLs."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stream_ssl.producers.sources.base import (
    Facts,
    Skipped,
    SourceError,
    checked,
    mark,
    wrong_position,
)
from stream_ssl.producers.sources.fields import digest, short_id
from stream_ssl.producers.sources.file_patterns import find_files
from stream_ssl.producers.sources.image_files import codec_of
from stream_ssl.producers.sources.passes import nothing_readable
from stream_ssl.producers.sources.ranges import check_ranges
from stream_ssl.producers.sources.tables import kept_facts, label_in
from stream_ssl.producers.sources.url_lists import UrlRow, count_rows, read_rows
from stream_ssl.producers.sources.url_secrets import url_id, without_secrets
from stream_ssl.wire.sample import Position, Sample

if TYPE_CHECKING:
    from stream_ssl.producers.sources.web.fetch import Fetcher

log = logging.getLogger(__name__)

READY = 64  # images waiting for the sender; at this number, no more are fetched
TICK = 0.2  # seconds between two checks of `stop`
PROBED = 1000  # rows that identify a list of signed URLs
PASSED = 1000  # finished rows that are skipped between two yields to the event loop
END_SECONDS = 5.0  # timeout of cancelled requests


class Crawl:
    """Images downloaded from lists of URLs, many at a time.

    Lists are text (one URL per line), CSV, TSV, Parquet or JSON Lines. Images are sent as they
    arrive. A position records which rows of the lists are finished. A resumed crawl fetches each of
    the other rows once. Sample ids are the URLs without their signatures (`url_id`), so repeated
    crawls give the same ids. In the log, digests replace the passwords, tokens and signatures of
    URLs. A row without an image is counted by reason in `skipped`. The first rows of each reason
    are logged. While this machine has no network, the crawl waits.

    Args:
        urls: paths, globs, or brace expansions such as "part-{000..127}.parquet".
        column: column of the URL in CSV, TSV, Parquet or JSON Lines.
        label: column of the class, a whole number, or empty or -1 for no class; null: no labels. An
            image with another label is sent without it.
        keep: columns that are sent as meta: text, numbers, and times as text. Other values are
            counted as `bad facts`, and so is a column that a row lacks.
        concurrency: number of concurrent requests, 1 to 1000.
        window: how many rows the crawl may be ahead of the oldest unfinished row, 1 to 8192.
        name: the source's name.

    Raises:
        FileNotFoundError: a pattern matches no file.
        ValueError: an argument is out of range.
        ModuleNotFoundError: a library is not installed.
    """

    def __init__(
        self,
        urls: list[str] | str,
        column: str = "url",
        label: str | None = None,
        keep: list[str] | None = None,
        concurrency: int = 64,
        window: int = 1024,
        name: str = "crawl",
        **fetching: Any,
    ) -> None:
        from stream_ssl.producers.sources.web.fetch import Fetcher

        # With a larger window, a position would not fit into a packet.
        check_ranges(("concurrency", concurrency, 1, 1000), ("window", window, 1, 8192))
        self.name = name
        self.skipped = Skipped(name)
        self.fetcher: Fetcher = Fetcher(**fetching)
        self._files = find_files(urls, "list of URLs")
        self._column, self._label, self._keep = column, label, keep or []
        self._concurrency, self._window = concurrency, window
        self._stopped = threading.Event()
        content = digest(list_facts(path, column).encode() for path in self._files)
        self._facts: Facts = {"source": name, "content": content, "column": column}

    def samples(self, position: Position = None) -> Iterator[tuple[Sample, Position]]:
        """Yield each sample with the position after it; see `Source`."""
        first, done = 0, 0
        if position is not None:
            at = checked(position, self._facts, self.name)
            try:
                first, done = at[0], int(at[1], 16)
            except (TypeError, ValueError, IndexError, KeyError):
                first = -1
            if type(first) is not int or first < 0 or done < 0:
                raise wrong_position(self.name, f"{at!r:.80} is no [row, done rows behind it]")
        return self._crawled(CrawlProgress(first, done))

    def stop(self) -> None:
        """End `samples`, and cancel the running requests. Thread-safe."""
        self._stopped.set()

    def _crawled(self, progress: CrawlProgress) -> Iterator[tuple[Sample, Position]]:
        total = sum(map(count_rows, self._files)) if sys.stderr.isatty() else 0
        given = progress.first or progress.done
        work = CrawlTasks(self, progress)
        try:
            with bar(self.name, total) as show:
                for number, sample, losses in work.results(self._stopped):
                    losses.count_in(self.skipped)
                    work.make_room(progress.finish(number))
                    show(progress.first, str(self.skipped))
                    if sample is not None:
                        given += 1
                        yield sample, mark([progress.first, f"{progress.done:x}"], self._facts)
        finally:
            work.end()
        log.info("source %s has done %d URLs; %s", self.name, progress.first, self.skipped)
        if not given and not self._stopped.is_set():
            if not progress.first:
                raise SourceError(f"source {self.name!r}: the lists of URLs hold no row")
            raise nothing_readable(self.name, self.skipped)

    def rows(self) -> Iterator[UrlRow]:
        """Return an iterator over the rows of all lists, in order."""
        facts = [*self._keep, *([] if self._label is None else [self._label])]
        lists = (read_rows(path, self._column, facts) for path in self._files)
        return itertools.chain.from_iterable(lists)

    async def crawl(self, row: UrlRow, losses: Losses) -> Sample | None:
        """Return the sample of a row. If there is none, return None, and note why in `losses`."""
        from stream_ssl.producers.sources.web.skip import Skip

        url = without_secrets(row.url)
        try:
            data = await self._fetched(row.url)
            codec = codec_of(data)
            assert codec is not None
            label = None
            if self._label is not None:
                label = label_in(row.facts, self._label, losses, url)
            meta = kept_facts(row.facts, self._keep, losses, url)
            name = url_id(row.url)
            return Sample(name, data, codec, source=self.name, label=label, meta=meta)
        except Skip as skip:
            losses.note(skip.reason, url or "a row", without_secrets(str(skip)))
        except (KeyError, ValueError, TypeError) as error:
            losses.note("bad row", url, f"{type(error).__name__}: {error}")
        except Exception as error:  # the answer of one host must not end the crawl
            why = without_secrets(f"{type(error).__name__}: {error}")
            losses.note("error", url, why)
        return None

    async def _fetched(self, url: str) -> bytes:
        """Return the bytes of an image. Wait while this machine has no network.

        Raises:
            Skip: the URL gives no image.
        """
        from stream_ssl.producers.sources.web.skip import Skip

        while True:
            try:
                return await self.fetcher.fetch(url)
            except Skip as skip:
                if not (skip.silent and await self.fetcher.outage.waited(skip, self.name)):
                    raise

    async def crawl_all(self, progress: CrawlProgress, work: CrawlTasks) -> None:
        """Crawl all unfinished rows, and hand over their results.

        Raises:
            SourceError: a list cannot be read to its end.
        """
        first, done = progress.first, progress.done
        await self.fetcher.open(self._concurrency)
        room = work.room = asyncio.Semaphore(self._window)

        async def one(number: int, row: UrlRow) -> None:
            losses = Losses(self.name)
            work.put((number, await self.crawl(row, losses), losses))
            if work.waiting() >= READY:
                self.fetcher.flowing.clear()

        unreadable: SourceError | None = None
        async with asyncio.TaskGroup() as group:
            try:
                for number, row in enumerate(self.rows()):
                    if number >= first:
                        await room.acquire()
                        if not done >> (number - first) & 1:
                            group.create_task(one(number, row))
                    elif number % PASSED == 0:
                        await asyncio.sleep(0)
            except SourceError as error:  # running requests still finish
                unreadable = error
        if unreadable is not None:
            raise SourceError(f"source {self.name!r}: {unreadable}")


def list_facts(path: Path, column: str) -> str:
    """Return a text that identifies a list: its name and size, or its first rows if it is signed.

    New signatures change the size of a list.

    Raises:
        SourceError: the column does not exist, or the first rows cannot be read.
    """
    urls = [row.url for row in itertools.islice(read_rows(path, column), PROBED)]
    ids = [url_id(url) for url in urls]
    if ids == [short_id(without_secrets(url)) for url in urls]:
        return f"{path.name} {path.stat().st_size}"
    return " ".join([path.name, *ids])


class Losses(Skipped):
    """Everything that one row lost. It is counted when the row is finished.

    A request may end before the position holds its row. A crawl that is stopped in between fetches
    the row again, and must not count its loss twice.
    """

    def __init__(self, source: str) -> None:
        super().__init__(source)
        self._notes: list[tuple[str, object, object, int]] = []

    def note(self, reason: str, what: object, why: object, count: int = 1) -> None:
        """Remember a loss for `count_in`."""
        self._notes.append((reason, what, why, count))

    def count_in(self, skipped: Skipped) -> None:
        """Add all losses to the counts of the source, and log them."""
        for loss in self._notes:
            skipped.note(*loss)


class CrawlProgress:
    """The set of finished rows.

    All rows before `first` are finished, and row `first + i` is finished if bit i of `done` is 1.
    """

    def __init__(self, first: int = 0, done: int = 0) -> None:
        self.first, self.done = first, done

    def finish(self, row: int) -> int:
        """Mark a row as finished, and return by how many rows `first` advances."""
        self.done |= 1 << (row - self.first)
        moved = 0
        while self.done & 1:
            self.done >>= 1
            moved += 1
        self.first += moved
        return moved


Result = tuple[int, Sample | None, Losses]
"""The number of a row, its sample if it has one, and its losses."""


class CrawlTasks:
    """A running crawl, with an event loop in its own thread."""

    def __init__(self, crawl: Crawl, progress: CrawlProgress) -> None:
        self.room: asyncio.Semaphore | None = None
        self._crawl = crawl
        self._results: queue.SimpleQueue[Result | Exception | None] = queue.SimpleQueue()
        self.put, self.waiting = self._results.put, self._results.qsize
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop = self._runner.get_loop()
        self._task = self._loop.create_task(crawl.crawl_all(progress, self))
        self._thread = threading.Thread(target=self._run, name=f"crawl {crawl.name}", daemon=True)
        self._thread.start()

    def results(self, stopped: threading.Event) -> Iterator[Result]:
        """Yield results as they arrive, until the end or until stopped."""
        while not stopped.is_set():
            try:
                result = self._results.get(timeout=TICK)
            except queue.Empty:
                continue
            if result is None:
                return
            if isinstance(result, Exception):
                raise result
            if self.waiting() == READY // 2:
                self._soon(self._crawl.fetcher.flowing.set)
            yield result

    def make_room(self, rows: int) -> None:
        """Allow the crawl to advance by `rows` rows."""
        if rows:
            self._soon(self._release, rows)

    def end(self) -> None:
        """Cancel the running requests, and wait for the thread."""
        self._soon(self._task.cancel)
        self._thread.join(END_SECONDS)
        if self._thread.is_alive():
            log.error("source %s: requests do not end; they are left", self._crawl.name)

    def _soon(self, callback: Callable[..., object], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(callback, *arguments)

    def _release(self, rows: int) -> None:
        assert self.room is not None
        for _ in range(rows):
            self.room.release()

    def _run(self) -> None:
        try:
            with self._runner:  # cancels remaining tasks, such as a request of robots.txt
                self._loop.run_until_complete(self._task)
            self.put(None)
        except asyncio.CancelledError:
            self.put(None)
        except Exception as error:
            self.put(error)


@contextlib.contextmanager
def bar(name: str, total: int) -> Iterator[Callable[[int, str], None]]:
    """Show a progress bar in a terminal: the finished rows, and counts of those left out."""
    if not sys.stderr.isatty():
        yield lambda _done, _left_out: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), "{task.description}")
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(name, total=total)
        yield lambda done, out: progress.update(task, completed=done, description=out)
