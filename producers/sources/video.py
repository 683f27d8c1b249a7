"""A source of frames from video files, with FFmpeg's libraries (PyAV)."""

from __future__ import annotations

import contextlib
import datetime
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from stream_ssl.producers.sources.base import BrokenFileError, Skipped
from stream_ssl.producers.sources.fields import (
    OLDEST,
    file_name,
    fitting_meta,
    fitting_time,
    short_id,
    utf8_name,
)
from stream_ssl.producers.sources.film import (
    Film,
    Packets,
    film_of,
    is_picture,
    lenient,
    silence,
    tells_no_times,
    time_base,
)
from stream_ssl.producers.sources.frames import Frames
from stream_ssl.producers.sources.image_files import check_pulled
from stream_ssl.producers.sources.recordings import Recordings, Where
from stream_ssl.producers.sources.truncation import missing_bytes
from stream_ssl.wire.sample import Sample

if TYPE_CHECKING:
    from av import VideoFrame
    from av.container import InputContainer
    from av.video.stream import VideoStream

T = TypeVar("T")
U = TypeVar("U")
Start = Callable[["InputContainer", "VideoStream"], Packets]
"""Positions an opened file and returns its packets from there on."""
MATROSKA = "matroska,webm"
SEEKABLE = ("mov,mp4,m4a,3gp,3g2,mj2", MATROSKA)
"""Formats that store the time of each packet, so that a seek does not change the times."""
BACK_SECONDS = (0, 2, 10, 60)
"""How far before a position to look for a key frame, before the file is read from its beginning."""
BACK_KEYS = (1, 2, 10)  # the same in key frames, for files that are read without a seek
PROBED = 32  # packets that show whether a file stores the times of its frames
ENCODERS = 2  # threads


class VideoFiles(Recordings):
    """Frames of video files: MP4, Matroska, MPEG-TS, AVI and others that FFmpeg reads.

    Sample ids are FILE~DIGEST#TIME; see `file_name`. TIME counts units of the stream's time base
    and is also the position. The file's creation time counts as the capture time of its beginning.
    If a file has no creation time, its last modification counts as the end of the recording.

    If a file has several video streams, the source sends the first one that is not a cover picture.
    The source logs, counts in `skipped` and leaves out:

    - damaged packets and frames,
    - frames whose time does not increase,
    - the missing end of a truncated file.

    Args:
        files: paths, globs, or brace expansions such as "drive-{00..09}.mp4".
        epochs: number of passes, 1 or more; null: endless.
        name: the source's name.

    Raises:
        FileNotFoundError: a pattern matches no file.
        ValueError: an argument is invalid.
        ModuleNotFoundError: PyAV or Pillow is not installed.
    """

    def __init__(
        self,
        files: list[str] | str,
        epochs: int | None = 1,
        name: str = "video",
        **frames: Any,
    ) -> None:
        import av  # noqa: F401  # fail early if it is not installed

        self._frames = Frames(**frames)
        super().__init__(files, epochs, Skipped(name), "video", self._frames.facts)

    def damages(self) -> tuple[type[Exception], ...]:
        """Return the error types that a file's bytes may cause."""
        import av

        # An encoder raises ValueError for frames that it cannot hold.
        return av.FFmpegError, OSError, BrokenFileError, ValueError

    def _recorded(self, path: Path, after: Where | None) -> Iterator[tuple[Sample, Where]]:
        zero, name = time_of_zero(path), file_name(path)
        self._note_other_streams(path)
        chosen = self._chosen(path, None if after is None else after[0])
        for frame, payload in ahead(self._frames.payload, chosen):
            assert frame.pts is not None
            sample = Sample(
                id=short_id(f"{name}#{frame.pts}"),
                time=fitting_time(zero + frame.time, zero),
                source=self.name,
                meta=fitting_meta({"file": utf8_name(path.name), "seconds": round(frame.time, 6)}),
                **payload,
            )
            yield sample, (frame.pts, 0)

    def _note_other_streams(self, path: Path) -> None:
        with opened(path) as (container, chosen):
            for stream in container.streams.video:
                if stream is not chosen and not is_picture(stream):
                    what = f"video stream {stream.index} of {path}"
                    self.skipped.note("other stream", what, f"stream {chosen.index} is sent")

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
                        gate.takes(frame, frame.time)  # restores the gate's state at that frame
                elif last is not None and frame.pts <= last:
                    what = f"a frame of {path} at {frame.time:.3f} s"
                    remedy = (
                        "its time does not rise; remultiplex the file: ffmpeg -i IN -c copy OUT"
                    )
                    self.skipped.note("out of order", what, remedy)
                else:
                    last = frame.pts
                    if self._frames.wants(frame) and gate.takes(frame, frame.time):
                        yield frame
        except av.FFmpegError as error:
            self.skipped.note("damaged", f"the rest of {path}", error.strerror)
        else:
            if lost := missing_bytes(path):
                why = f"{lost:,} bytes are missing or blank: copy the file again"
                self.skipped.note("damaged", f"the rest of {path}", why)

    def _from(self, path: Path, after: int | None) -> Iterator[VideoFrame]:
        """Yield frames, beginning with the frame at `after` or an earlier frame."""
        ordered = stores_order_alone(path)
        for start in starts(path, after, ordered):
            with opened(path) as (container, stream):
                note = self.skipped.note if start is beginning else ignore
                key_frames = self._frames.key_frames
                film = Film(container, stream, note, path, key_frames, after, ordered=ordered)
                frames = film.frames(start(container, stream))
                first = next(frames, None)
                if start is not beginning and (first is None or (first.pts or 0) > (after or 0)):
                    continue
                film.note = self.skipped.note
                if first is not None:
                    yield first
                    yield from frames
                return


@contextmanager
def opened(path: Path) -> Iterator[tuple[InputContainer, VideoStream]]:
    """Open a file and select its video stream.

    Raises:
        BrokenFileError: the file is not a video.
    """
    import av

    silence()
    try:
        # With the protocol `file:`, a playlist can name files only, and no hosts.
        container = av.open(f"file:{path}", **lenient())
    except av.FFmpegError as error:
        raise BrokenFileError(unreadable(path, str(error.strerror))) from error
    with container:
        yield container, film_of(container)


def unreadable(path: Path, why: str) -> str:
    """Return why FFmpeg cannot read a file, and the remedy.

    Raises:
        BrokenFileError: the file is a pointer of Git LFS.
    """
    check_pulled(path)
    with path.open("rb") as file:
        head = file.read(12)
    if not head:
        return "the file is empty: copy it again"
    if head[4:8] in (b"ftyp", b"moov", b"mdat", b"wide", b"free"):
        return (
            f"{why}: an MP4 file without its index (moov), which is written last. The recording "
            "or the copy was cut off: copy the file again, or repair it (untrunc)"
        )
    if head.startswith((b"#EXTM3U", b"ffconcat")):
        return f"{why}: a playlist. Name the files themselves, or give the URL to the source camera"
    return f"not a video that FFmpeg can read: {why}; it begins with {head!r}"


def ignore(*_loss: object) -> None:
    """Ignore a loss, because another attempt will read the same packets."""


def beginning(container: InputContainer, stream: VideoStream) -> Packets:
    """Return all packets, beginning with the first packet."""
    return container.demux(stream)


def starts(path: Path, after: int | None, ordered: bool) -> Iterator[Start]:
    """Yield places from which to read, nearest first, to reach the frame at `after`.

    A place may turn out to lie after that frame. The last place is the beginning of the file. It
    is the only place if the file is `ordered` (`stores_order_alone`).
    """
    import av

    def sought(pts: int, container: InputContainer, stream: VideoStream) -> Packets:
        try:
            container.seek(pts, stream=stream)
        except (av.FFmpegError, OverflowError):  # a position may have more than 63 bits
            return iter(())
        return container.demux(stream)

    def behind(count: int, container: InputContainer, stream: VideoStream) -> Packets:
        colours = None  # AVI stores the palette of its frames only before the first of them
        for number, packet in enumerate(container.demux(stream)):
            if packet.has_sidedata("palette"):
                colours = packet.get_sidedata("palette")
            elif colours is not None and number == count:
                packet.set_sidedata(colours)
            if number >= count:
                yield packet

    if after is not None and not ordered:
        with opened(path) as (container, stream):
            name, unit = container.format.name, time_base(stream)
            counted = tells_no_times(container, stream)
            keys: list[int] = []
            if name not in SEEKABLE and not counted:
                # FFmpeg may report other times after a seek, and reading without decoding is fast.
                keys = key_packets(container, stream, after)
        if name in SEEKABLE:
            for back in BACK_SECONDS:
                yield partial(sought, after - int(back / unit))
        for back in BACK_KEYS[: len(keys)]:
            yield partial(behind, keys[-min(back, len(keys))])
    yield beginning


def key_packets(container: InputContainer, stream: VideoStream, last: int) -> list[int]:
    """Return the numbers of the key packets up to the time `last`."""
    import av

    found = []
    with contextlib.suppress(av.FFmpegError):
        for number, packet in enumerate(container.demux(stream)):
            if packet.dts is not None and packet.dts > last:
                break
            if packet.is_keyframe and packet.pts is not None and packet.pts <= last:
                found.append(number)
            if packet.pts == last:  # behind it, the times of a joined file may begin again
                break
    return found


def stores_order_alone(path: Path) -> bool:
    """Return whether a file other than AVI has B frames, and stores no times at which to show them.

    An example is an MP4 file that was made from a bare H.264 stream. The decoder returns the frames
    in the order in which they are shown, so they take the times of the packets in rising order.
    """
    with opened(path) as (container, stream):
        if container.format.name == "avi" or not stream.codec_context.has_b_frames:
            return False
        first = itertools.islice(container.demux(stream), PROBED)
        times = [packet.pts for packet in first if packet.size]
    return all(a is not None and b is not None and a < b for a, b in itertools.pairwise(times))


def time_of_zero(path: Path) -> float:
    """Return the capture time of the time 0 of a file's streams, in seconds since the Unix epoch.

    A part of a broadcast or of a long recording begins at a later time than 0.

    Raises:
        BrokenFileError: the file is not a video.
    """
    with opened(path) as (container, _):
        begin = max(0, container.start_time or 0) * 1e-6
        try:
            created = datetime.datetime.fromisoformat(container.metadata["creation_time"])
            if (seconds := created.timestamp()) > OLDEST:
                return seconds - begin
        except (KeyError, ValueError, OverflowError):
            pass
        length = (container.duration or 0) * 1e-6
        # Matroska's duration is the time of its end.
        end = length if container.format.name == MATROSKA else begin + length
        return path.stat().st_mtime - end


def ahead(work: Callable[[T], U], items: Iterable[T]) -> Iterator[tuple[T, U]]:
    """Yield each item with `work(item)`, in order; threads compute a few results ahead."""
    pending: deque[tuple[T, Future[U]]] = deque()
    with ThreadPoolExecutor(ENCODERS) as pool:
        for item in items:
            pending.append((item, pool.submit(work, item)))
            if len(pending) > ENCODERS:
                item, done = pending.popleft()
                yield item, done.result()
        for item, done in pending:
            yield item, done.result()
