"""Frames of video files, by FFmpeg's libraries (PyAV)."""

from __future__ import annotations

import datetime
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from producers.sources.base import Skipped
from producers.sources.fields import fitting_meta, short_id
from producers.sources.frames import Frames
from producers.sources.recordings import DamagedError, Recordings, Where
from stream_ssl.wire.sample import Sample

if TYPE_CHECKING:
    from av import Packet, VideoFrame
    from av.container import InputContainer
    from av.video.stream import VideoStream

T = TypeVar("T")
U = TypeVar("U")

BACK_SECONDS = (0, 2, 10, 60)
"""How long before a position a key frame is sought, before a file is read from its beginning."""
ENCODERS = 2  # threads
OLDEST = 631_152_000  # 1990: an earlier creation time is a clock or a field that was never set
GUESSED_RATE = 25  # frames a second of a stream that does not tell


class VideoFiles(Recordings):
    """Frames of video files: MP4, Matroska, MPEG-TS, AVI and what else FFmpeg reads.

    Sample ids are FILE#TIME, in units of the stream's time base; that time is the position, too.
    Capture time is the file's creation time (of its last change, less its duration, where it does
    not tell) plus the time in the stream. What cannot be decoded, and frames whose time does not
    rise, are logged, counted in `skipped` and left out; of a damaged file what lies before the
    damage is sent.

    Args:
        files: paths, globs, or brace expansions such as "drive-{00..09}.mp4".
        epochs: passes to make; null: endless.
        name: the source's name.

    Raises:
        FileNotFoundError: a pattern matches no file.
        ValueError: an argument breaks its rule.
        ModuleNotFoundError: PyAV or Pillow is not installed.
    """

    def __init__(
        self,
        files: list[str] | str,
        epochs: int | None = 1,
        name: str = "video",
        **frames: Any,
    ) -> None:
        import av  # noqa: F401  # a machine without it is to say so at once

        self._frames = Frames(**frames)
        super().__init__(files, epochs, name, "video", self._frames.facts)

    def _recorded(self, path: Path, after: Where | None) -> Iterator[tuple[Sample, Where]]:
        begun = creation_time(path)
        chosen = self._chosen(path, None if after is None else after[0])
        for frame, payload in ahead(self._frames.payload, chosen):
            assert frame.pts is not None
            sample = Sample(
                id=short_id(f"{path.name}#{frame.pts}"),
                time=begun + frame.time,
                source=self.name,
                meta=fitting_meta({"file": path.name, "seconds": round(frame.time, 6)}),
                **payload,
            )
            yield sample, (frame.pts, 0)

    def _chosen(self, path: Path, after: int | None) -> Iterator[VideoFrame]:
        import av

        gate, last = self._frames.gate(), after
        try:
            for frame in self._from(path, after):
                if self._stopped.is_set():
                    return
                assert frame.pts is not None
                if after is not None and frame.pts <= after:
                    if frame.pts == after:
                        gate.takes(frame, frame.time)  # as when it was sent
                elif last is not None and frame.pts <= last:
                    self.skipped.note("out of order", f"{path} at {frame.time:.3f} s", "again")
                else:
                    last = frame.pts
                    if gate.takes(frame, frame.time):
                        yield frame
        except av.FFmpegError as error:
            self.skipped.note("damaged", f"the rest of {path}", error.strerror)

    def _from(self, path: Path, after: int | None) -> Iterator[VideoFrame]:
        """Frames from the one at `after` or before it, for a seek may come down behind it."""
        import av

        for back in () if after is None else BACK_SECONDS:
            assert after is not None
            with opened(path, self._frames.key_frames) as (container, stream):
                try:
                    container.seek(after - int(back / time_base(stream)), stream=stream)
                except av.FFmpegError:
                    break
                frames = decoded(container, stream, self.skipped, path)
                first = next(frames, None)
                if first is None or first.pts is None:
                    break
                if first.pts <= after:
                    yield first
                    yield from frames
                    return
        with opened(path, self._frames.key_frames) as (container, stream):
            step = int(1 / ((stream.guessed_rate or GUESSED_RATE) * time_base(stream)))
            for number, frame in enumerate(decoded(container, stream, self.skipped, path)):
                if frame.pts is None:
                    frame.pts, frame.time_base = number * step, time_base(stream)
                yield frame


@contextmanager
def opened(path: Path, key_frames: bool) -> Iterator[tuple[InputContainer, VideoStream]]:
    """The file and its video.

    Raises:
        DamagedError: it is no video.
    """
    import av

    try:
        # Of a playlist that poses as a video FFmpeg opens other files alone, and no host.
        container = av.open(f"file:{path}", metadata_errors="replace")  # titles in Latin-1
    except av.FFmpegError as error:
        raise DamagedError(f"not a video that can be read: {error.strerror}") from error
    with container:
        if not container.streams.video:
            raise DamagedError("there is no video in it")
        stream = container.streams.video[0]
        stream.thread_type = "AUTO"
        if key_frames:
            stream.codec_context.skip_frame = "NONKEY"
        yield container, stream


def decoded(
    container: InputContainer, stream: VideoStream, skipped: Skipped, what: object
) -> Iterator[VideoFrame]:
    """The frames that can be decoded.

    Raises:
        av.FFmpegError: the rest cannot be read.
    """
    import av

    def frames_of(packet: Packet[VideoStream] | None) -> Iterator[VideoFrame]:
        try:
            frames = stream.decode(packet)
        except av.FFmpegError as error:
            at = packet.pts if packet else "the end"
            skipped.note("undecodable", f"a packet of {what} at {at}", error.strerror)
            return
        for frame in frames:
            if frame.is_corrupt:
                skipped.note("corrupt", f"a frame of {what} at {frame.pts}", "parts are missing")
            else:
                yield frame

    try:
        for packet in container.demux(stream):
            yield from frames_of(packet)
    except av.FFmpegError:
        yield from frames_of(None)  # which the decoder still held
        raise


def time_base(stream: VideoStream) -> Fraction:
    """Seconds in the unit of the stream's times."""
    assert stream.time_base is not None
    return stream.time_base


def creation_time(path: Path) -> float:
    """When a file's stream began, in seconds since the Unix epoch.

    Raises:
        DamagedError: it is no video.
    """
    with opened(path, key_frames=False) as (container, _):
        try:
            told = datetime.datetime.fromisoformat(container.metadata["creation_time"]).timestamp()
            if told > OLDEST:
                return told
        except (KeyError, ValueError, OverflowError):
            pass
        return path.stat().st_mtime - (container.duration or 0) * 1e-6


def ahead(work: Callable[[T], U], items: Iterable[T]) -> Iterator[tuple[T, U]]:
    """Each item with `work(item)`, in order; done in threads, a few items before they are taken."""
    pending: deque[tuple[T, Future[U]]] = deque()
    with ThreadPoolExecutor(ENCODERS) as pool:
        for item in items:
            pending.append((item, pool.submit(work, item)))
            if len(pending) > ENCODERS:
                item, done = pending.popleft()
                yield item, done.result()
        for item, done in pending:
            yield item, done.result()
