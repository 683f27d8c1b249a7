"""The film in a video file or a live stream, decoded to frames with FFmpeg's libraries (PyAV)."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from stream_ssl.producers.sources.base import BrokenFileError
from stream_ssl.producers.sources.frames import INTRA

if TYPE_CHECKING:
    from av import Packet, VideoFrame
    from av.container import InputContainer
    from av.video.stream import VideoStream

Frac = Any  # a Fraction, or from PyAV 19 on an AVRational
Packets = Iterator["Packet[VideoStream]"]
NO_TIMES = 0x80  # AVFMT_NOTIMESTAMPS: formats without times
HIDDEN = ("vp8", "vp9", "av1")  # codecs in which some packets are not shown
RECENT = 64  # packets; decoders hold fewer frames back
REFRESHED = 300  # frames after which a stream without key frames shows whole pictures again
GUESSED_RATE = 25  # frames per second, if the stream does not say


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


def tells_no_times(container: InputContainer, stream: VideoStream) -> bool:
    """Return whether frame times are known only by counting frames from the beginning."""
    flags = container.format.flags
    bare = bool(int(getattr(flags, "value", flags)) & NO_TIMES)
    return bare or (container.format.name == "avi" and stream.codec_context.has_b_frames)


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
        after: the time of the last frame that was sent before a restart, in units of the time
            base. Losses before it were counted then, and are not counted again.
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
