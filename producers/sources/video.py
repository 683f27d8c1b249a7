"""A source of frames from video files, with FFmpeg's libraries (PyAV)."""

from __future__ import annotations

import contextlib
import datetime
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from fractions import Fraction
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
from stream_ssl.producers.sources.frames import INTRA, Frames
from stream_ssl.producers.sources.image_files import check_pulled
from stream_ssl.producers.sources.recordings import Recordings, Where
from stream_ssl.producers.sources.truncation import missing_bytes
from stream_ssl.wire.sample import Sample

if TYPE_CHECKING:
    from av import Packet, VideoFrame
    from av.container import InputContainer
    from av.video.stream import VideoStream

T = TypeVar("T")
U = TypeVar("U")
Frac = Any  # a Fraction, or from PyAV 19 on an AVRational
Packets = Iterator["Packet[VideoStream]"]
Start = Callable[["InputContainer", "VideoStream"], Packets]
"""Positions an opened file and returns its packets from there on."""

MATROSKA = "matroska,webm"
SEEKABLE = ("mov,mp4,m4a,3gp,3g2,mj2", MATROSKA)
"""Formats that store the time of each packet, so that a seek does not change the times."""
NO_TIMES = 0x80  # AVFMT_NOTIMESTAMPS: formats without times
HIDDEN = ("vp8", "vp9", "av1")  # codecs in which some packets are not shown
BACK_SECONDS = (0, 2, 10, 60)
"""How far before a position to look for a key frame, before the file is read from its beginning."""
BACK_KEYS = (1, 2, 10)  # the same in key frames, for files that are read without a seek
PROBED = 32  # packets that show whether a file stores the times of its frames
ENCODERS = 2  # threads
RECENT = 64  # packets; decoders hold fewer frames back
REFRESHED = 300  # frames after which a stream without key frames shows whole pictures again
GUESSED_RATE = 25  # frames per second, if the stream does not say


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


def film_of(container: InputContainer) -> VideoStream:
    """Return the first video stream that is not a cover picture and that FFmpeg can decode.

    Raises:
        BrokenFileError: there is no such stream.
    """
    for stream in container.streams.video:
        if not is_picture(stream) and stream.codec_context is not None:
            stream.thread_type = "AUTO"
            if stream.codec_context.name == "mjpeg":  # FFmpeg fills a truncated JPEG with grey
                stream.codec_context.options = {"err_detect": "explode"}
            return stream
    also = " but a cover picture, or one of an unknown codec" * bool(container.streams.video)
    raise BrokenFileError(f"there is no video in it{also}")


def is_picture(stream: VideoStream) -> bool:
    """Return whether the stream contains only a cover picture or thumbnails."""
    from av.stream import Disposition

    return bool(stream.disposition & (Disposition.attached_pic | Disposition.timed_thumbnails))


def lenient() -> dict[str, Any]:
    """Return arguments of `av.open` that accept titles in Latin-1. PyAV 19 always accepts them."""
    import av

    return {"metadata_errors": "replace"} if int(av.__version__.split(".")[0]) < 19 else {}


def silence() -> None:
    """Switch off PyAV's log, which torchvision before 0.26 switches on.

    With the log, FFmpeg's threads wait for Python's lock (GIL). PyAV holds this lock while it
    closes a file and waits for these threads.
    """
    import av

    av.logging.set_level(None)


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


def tells_no_times(container: InputContainer, stream: VideoStream) -> bool:
    """Return whether frame times are known only by counting frames from the beginning."""
    flags = container.format.flags
    bare = bool(int(getattr(flags, "value", flags)) & NO_TIMES)
    return bare or (container.format.name == "avi" and stream.codec_context.has_b_frames)


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


class Damage:
    """A loss in a stream. Decoders show frames that refer to lost data, and call them whole."""

    def __init__(self) -> None:
        self._times: set[int | None] = set()  # of the packets since the loss
        self._frames = 0  # that may refer to what is lost

    def add(self, *times: int | None) -> None:
        """Record the times of packets that the decoder gets after the loss.

        After a packet whose time is not known, all frames may refer to what is lost.
        """
        self._times.update(times)

    def reaches(self, frame: VideoFrame) -> bool:
        """Return whether the frame may refer to what is lost."""
        reached = frame.pts in self._times or None in self._times
        self._frames += reached
        return reached

    def ends_at(self, frame: VideoFrame) -> bool:
        """Return whether this frame and all later frames are whole, so that the loss ends here.

        Streams without key frames refresh the picture part by part, within some seconds.
        """
        intra = frame.key_frame or int(frame.pict_type) == INTRA
        return (intra or self._frames > REFRESHED) and not frame.is_corrupt


class Film:
    """Decodes packets to frames with times, and counts the packets that gave no frame.

    Args:
        container: the opened file or live stream.
        stream: its video stream.
        note: called for each loss; see `Skipped.note`.
        what: the name of the file in messages.
        key_frames: decode only frames that are stored whole.
        after: time of the last sent frame, in units of the time base. Earlier losses are not
            counted again.
        live: whether the stream is live. Data before its first key frame then does not count as a
            loss.
        ordered: whether the file stores no times of frames; see `stores_order_alone`.
    """

    def __init__(
        self,
        container: InputContainer,
        stream: VideoStream,
        note: Callable[..., None],
        what: object,
        key_frames: bool = False,
        after: int | None = None,
        live: bool = False,
        ordered: bool = False,
    ) -> None:
        self.note, self._stream, self._what, self._after = note, stream, what, after
        self._avi = container.format.name == "avi"
        self._ordered = ordered or self._avi
        self._waiting: list[int] = []  # a heap of the times of ordered packets without a frame yet
        self._last: int | None = None
        self._due = 0  # packets after `after`, minus their frames and counted losses
        self._damage: Damage | None = None
        self._recent: deque[int | None] = deque(maxlen=RECENT)  # the times of the last packets
        self._ahead: deque[Packet[VideoStream]] = deque()
        self._most_ahead = 0 if live else 2
        self._h264 = stream.codec_context.name == "h264"
        self._length_bytes = length_bytes(stream.codec_context.extradata or b"")
        self._notes = 0  # packets without a picture, which the decoder will call invalid
        # HLS loses no packets. Some servers number the packets of each segment from the start,
        # which looks like a loss.
        self._lossy = not container.format.name.startswith("hls")
        # If frames are counted to find their times, all frames must be decoded.
        partly = key_frames and not (ordered or tells_no_times(container, stream))
        self._counts = not (partly or live or stream.codec_context.name in HIDDEN)
        if partly:
            # NONKEY also skips key frames of open GOPs in H.264 without recovery points.
            stream.codec_context.skip_frame = "NONINTRA"

    def frames(self, packets: Packets) -> Iterator[VideoFrame]:
        """Yield the frames that can be decoded.

        Raises:
            av.FFmpegError: the rest cannot be read.
        """
        import av

        try:
            for packet in packets:
                self._ahead.append(packet)
                if len(self._ahead) > self._most_ahead:
                    yield from self._decoded(self._ahead.popleft())
            while self._ahead:
                yield from self._decoded(self._ahead.popleft())
        except av.FFmpegError:
            while self._ahead:
                yield from self._decoded(self._ahead.popleft())
            yield from self._decoded(None)  # flush the decoder
            raise
        if self._counts and self._due > 0:
            what = f"{self._due} packets of {self._what}"
            why = "the decoder gave no frame for them: what they refer to is missing"
            self.note("without a frame", what, why, self._due)

    def _decoded(self, packet: Packet[VideoStream] | None) -> Iterator[VideoFrame]:
        """Decode a packet, or flush the decoder, and yield the frames that are whole."""
        import av

        due = False
        if packet is not None and packet.size:
            due = self._enters(packet)
        elif packet is not None and packet.dts is not None:
            return  # AVI's sign for "repeat the frame", which a decoder would take for the end
        try:
            frames = self._stream.decode(packet)
        except av.FFmpegError as error:
            at = packet.pts if packet else "the end"
            self.note("undecodable", f"a packet of {self._what} at {at}", error.strerror)
            self._due -= due
            if self._notes:
                self._notes -= 1
            else:  # with several threads, the decoder reports an error some packets late
                self._lose(*self._recent)
            if self._waiting:
                heapq.heappop(self._waiting)
            return
        yield from filter(self._is_whole, frames)

    def _enters(self, packet: Packet[VideoStream]) -> bool:
        """Record a packet that the decoder gets next; return whether its frame must be counted."""
        time = packet.dts if self._avi or packet.pts is None else packet.pts
        due = not packet.is_discard and (self._after is None or (time or 0) > self._after)
        if self._ordered and time is not None and not packet.is_discard:
            heapq.heappush(self._waiting, time)
            packet.pts = None
        self._due += due
        self._notes += self._h264 and not holds_picture(bytes(packet), self._length_bytes)
        self._recent.append(packet.pts)
        if self._damage is not None:
            self._damage.add(packet.pts)
        # The container lacks parts of this packet or of the next ones. It also says so at the seam
        # of two joined files, but there a key frame follows.
        lossy = self._lossy and packet.is_corrupt
        if lossy and not any(one.is_keyframe for one in self._ahead):
            self._lose()
        return due

    def _lose(self, *times: int | None) -> None:
        """Begin or extend the damage by packets with these times."""
        self._damage = self._damage or Damage()
        self._damage.add(*times)

    def _is_whole(self, frame: VideoFrame) -> bool:
        """Give a decoded frame its time; return whether no lost data reaches it, or count it."""
        self._set_time(frame)
        new = self._after is None or (frame.pts or 0) > self._after
        self._due -= new
        if frame.interlaced_frame:  # a packet may contain half a frame
            self._counts = False
        if frame.is_corrupt:
            self._lose(*self._since(frame.pts))
        if self._damage is None or not self._damage.reaches(frame):
            return True
        if self._damage.ends_at(frame):
            self._damage = None
            return True
        if new:
            what = f"a frame of {self._what} at {frame.pts}"
            why = "parts of it, or of a frame before it that it refers to, are missing"
            self.note("corrupt", what, why)
        return False

    def _since(self, time: int | None) -> list[int | None]:
        """Return the times of the last packets, from the one with this time on; [None]: unknown."""
        recent = [*self._recent]
        return recent[recent.index(time) :] if time in recent else [None]

    def _set_time(self, frame: VideoFrame) -> None:
        if frame.pts is None:
            step = step_of(self._stream)
            frame.pts = 0 if self._last is None else self._last + step
            if self._waiting:
                frame.pts = heapq.heappop(self._waiting)
            frame.time_base = time_base(self._stream)
        elif not frame.time_base:  # PyAV gives none to frames that are flushed after an error
            frame.time_base = time_base(self._stream)
        self._last = frame.pts


def length_bytes(header: bytes) -> int:
    """Return the bytes of the length before each unit of H.264; 0 if units begin with a mark.

    Args:
        header: the stream's header; that of MP4 and Matroska begins with 1 (ISO/IEC 14496-15).
    """
    return header[4] % 4 + 1 if header[:1] == b"\1" and len(header) > 4 else 0


def holds_picture(data: bytes, size: int) -> bool:
    """Return whether a packet of H.264 holds a part of a picture.

    Some cameras send packets with notes or filler alone, which the decoder calls invalid.

    Args:
        data: the packet.
        size: the `length_bytes` of its stream.
    """
    kinds, at = [], 0
    if not size:
        kinds = [part[0] & 31 for part in data.split(b"\0\0\1")[1:] if part]
    else:  # each unit follows its length
        while at + size < len(data):
            kinds.append(data[at + size] & 31)
            at += size + int.from_bytes(data[at : at + size])
        if at != len(data):
            return True  # damaged
    return any(1 <= kind <= 5 for kind in kinds)


def fraction(value: Frac, default: Fraction) -> Fraction:
    """Return a PyAV number as a Fraction, or the default if the file does not define it."""
    if value is None or not value.numerator or not value.denominator:
        return default
    return Fraction(value.numerator, value.denominator)


def time_base(stream: VideoStream) -> Fraction:
    """Return the unit of the stream's times, in seconds."""
    return fraction(stream.time_base, Fraction(1, 90_000))


def step_of(stream: VideoStream) -> int:
    """Return the usual time between two frames, in units of the stream's time base."""
    rate = fraction(stream.guessed_rate, Fraction(GUESSED_RATE))
    return max(1, round(1 / (rate * time_base(stream))))


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
