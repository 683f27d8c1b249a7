"""A source of frames from live network and USB cameras, with FFmpeg's libraries (PyAV)."""

from __future__ import annotations

import errno
import logging
import math
import os
import re
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from stream_ssl.producers.sources.base import BrokenFileError, SourceError
from stream_ssl.producers.sources.film import Film, film_of, lenient, silence, tells_no_times
from stream_ssl.producers.sources.frames import Frames
from stream_ssl.producers.sources.live import Live, connection_id
from stream_ssl.wire.sample import Sample

if TYPE_CHECKING:
    from av import VideoFrame
    from av.container import InputContainer

DELAY_WINDOW = 60.0  # seconds; the window in which the minimum delay is measured
DELAY_LIMIT = 2.0  # seconds above the minimum delay, after which the stream's clock counts as reset
CATCH_UP = 20.0  # seconds; frames that a network or a segment held back have caught up by then
JUMP = 60.0  # seconds by which no network holds a stream back
DEVICES = "/dev/"  # also /dev/v4l/by-id/..., which names a camera for good
UNDECODABLE = "nothing could be decoded"
NO_STREAM = "Invalid data found"
"""FFmpeg's text about an answer that is no stream."""

LiveFrame = tuple["VideoFrame", str, float]
"""frame, sample id, capture time"""


class CaptureClock:
    """Converts stream times, which count from an unknown moment, to capture times.

    The moment is estimated from the frame with the minimum delay in the last one to two minutes.
    Therefore neither network queues nor a drifting camera clock affect the capture times. Frames
    may come in bursts, as segments of HLS and after a stall of the network. A stream's clock counts
    as reset if it goes back, or if no frame of a period of CATCH_UP seconds is in time.
    """

    def __init__(self) -> None:
        self._least = [math.inf, math.inf]  # minimum delays of the previous and the current window
        self._begun = self._looked = -math.inf
        self._low = math.inf  # minimum delay since `_looked`
        self._last = -math.inf  # stream time of the last frame

    def capture_time(self, seconds: float, now: float) -> float:
        """Return when a frame with stream time `seconds`, received at `now`, was captured."""
        delay, least = now - seconds, min(self._least)
        if seconds < self._last - DELAY_LIMIT or delay > least + JUMP:
            self._least = [math.inf, math.inf]
        elif abs(now - self._looked) > CATCH_UP and self._low > least + DELAY_LIMIT:
            self._least = [math.inf, self._low]
        if abs(now - self._looked) > CATCH_UP:
            self._looked, self._low = now, math.inf
        if abs(now - self._begun) > DELAY_WINDOW:
            self._begun, self._least = now, [self._least[1], math.inf]
        self._least[1] = min(self._least[1], delay)
        self._low, self._last = min(self._low, delay), seconds
        return seconds + min(self._least)


class Camera(Live["LiveFrame"]):
    """Frames of a live stream: RTSP, HTTP, RTMP, UDP, or a V4L2 device such as /dev/video0.

    The source reconnects, and drops the oldest waiting frames if the sender cannot keep up; see
    `Live`. Sample ids are CONNECTED-N: a name of the connection, and the number of the frame since
    then. Capture times follow the stream's own clock. Motion JPEG over HTTP and bare H.264 have no
    clock: their frames are dated when they arrive.

    Args:
        url: rtsp://USER:PASSWORD@HOST/PATH, http://..., or the path of a device. The user and the
            password are neither logged nor sent.
        rtsp_transport: transport of RTSP frames: "tcp" loses no frames, "udp" has less delay.
        options: further FFmpeg options for this kind of stream, such as {video_size: 1280x720}.
        timeout: seconds after which the stream is reopened, above 0: without data, or, after a
            first frame, with packets that cannot be decoded.
        retry_seconds: longest pause between two attempts, in seconds, above 0.
        give_up_seconds: seconds without a frame after which the source fails; null: never.
        waiting: maximum number of frames that wait for the sender.
        name: the source's name.

    Raises:
        ValueError: an argument is invalid.
        ModuleNotFoundError: PyAV or Pillow is not installed.
    """

    def __init__(
        self,
        url: str,
        rtsp_transport: Literal["tcp", "udp"] = "tcp",
        options: dict[str, str] | None = None,
        timeout: float = 10.0,
        retry_seconds: float = 30.0,
        give_up_seconds: float | None = None,
        waiting: int = 16,
        name: str = "camera",
        **frames: Any,
    ) -> None:
        import av  # noqa: F401  # fail early if it is not installed

        scheme, mark, rest = url.strip().partition("://")
        url = scheme.lower() + mark + rest if mark else scheme  # FFmpeg knows small letters only
        if not mark and not url.startswith(DEVICES):
            shown = url.rpartition("@")[2]
            raise ValueError(
                f"url {shown!r}: must be a URL such as rtsp://HOST/PATH, or a device such as "
                f"{DEVICES}video0; files are read by the source video"
            )
        super().__init__(name, timeout, retry_seconds, give_up_seconds, waiting)
        self._frames = Frames(**frames)
        self._gate = self._frames.gate()  # some cameras end each connection after a frame
        self._url, self._wait = url, timeout
        # FFmpeg takes texts, and a number such as a frame rate is easily given as one.
        self._options = {name: str(value) for name, value in (options or {}).items()}
        if url.startswith("rtsp"):
            # Do not replay frames that arrive while FFmpeg probes the stream, since their times are
            # wrong.
            own = {"rtsp_transport": rtsp_transport, "fflags": "nobuffer"}
            self._options = {**own, **self._options}

    def sample(self, item: LiveFrame) -> Sample | None:
        """Return the sample of a frame; None if it cannot be encoded, which is counted."""
        frame, id_, captured = item
        try:
            return Sample(id_, time=captured, source=self.name, **self._frames.payload(frame))
        except ValueError as error:  # such as a side that WebP cannot hold
            self.skipped.note("not encoded", f"frame {id_}", error)
            return None

    def failures(self) -> tuple[type[Exception], ...]:
        """Return the error types of FFmpeg and of the network."""
        import av

        return (av.FFmpegError, OSError, BrokenFileError)

    def reason(self, error: Exception) -> str:
        """Return why a stream cannot be read, without its URL, which may contain a password."""
        import av

        if isinstance(error, av.error.ExitError):
            return f"nothing came for {self._wait:.2g} s"
        return getattr(error, "strerror", None) or str(error)

    def explained(self, why: str) -> str:
        """Return why no frame comes, with the device or the host, and the remedy."""
        if "://" not in self._url:
            remedy = (
                "check that the camera is connected, and that this user may read the device: "
                f"ls -l {DEVICES}video*"
            )
            if os.strerror(errno.EBUSY) in why:
                remedy = f"another program uses the camera; find and end it: fuser -v {self._url}"
            return f"{self._url}: {why} ({remedy})"
        # The path and its parameters may contain a password, too.
        scheme, _, rest = self._url.partition("://")
        authority = re.split("[/?#]", rest, maxsplit=1)[0]
        host = authority.rpartition("@")[2]
        remedy = "check that the camera is on, and its address, user and password"
        if "@" in rest[len(authority) :]:  # or the password has one of these characters
            host = "..."
            remedy += ", in which the characters /, ? and # are written as %2F, %3F and %23"
        elif why.startswith(UNDECODABLE):
            remedy = (
                "it sends no key frame, damaged frames, or a codec that FFmpeg does not decode: "
                "choose another codec or more key frames in its settings, or restart it"
            )
        elif scheme.startswith("http") and why.startswith(NO_STREAM):
            remedy = (
                "it answers with no stream that FFmpeg reads: check the path of the address. If it "
                "sends Motion JPEG without boundaries, or parts that are not image/jpeg, give the "
                "address of its RTSP stream or of its single pictures"
            )
        return f"{scheme}://{host}: {why} ({remedy})"

    def received(self) -> Iterator[tuple[LiveFrame, int]]:
        """Yield the selected frames of one connection, with their sizes in bytes; see `Live`."""
        self._wait = self.patience(time.monotonic() - self._came)
        with self._opened() as container:
            self._wait = self.patience()
            stream = film_of(container)
            codec = stream.codec_context
            says = f"source {self.name}: connected: {codec.name}, {codec.width} x {codec.height}"
            self._limited_log.log(logging.INFO, "connected", says)
            connected, opened = connection_id(), time.monotonic()

            def note(reason: str, *loss: Any) -> None:
                self.skipped.note(reason, *loss)
                silent = time.monotonic() - self._came
                # A stream may begin long before its first key frame, also after each opening.
                lost = self._came > opened and silent >= self._timeout
                if reason == "undecodable" and (lost or self.is_overdue()):
                    raise OSError(f"{UNDECODABLE} for {silent:.2g} s")

            clock = CaptureClock()
            # FFmpeg counts 25 frames a second of these streams, whatever their rate is.
            counted = tells_no_times(container, stream) or container.format.name.endswith("pipe")
            what, key_frames = "the stream", self._frames.key_frames
            film = Film(container, stream, note, what, key_frames, live=True)
            for number, frame in enumerate(film.frames(container.demux(stream))):
                now = time.time()
                self._came = time.monotonic()  # a frame that is not sent came, too
                # The first frames of a stream may lack a time, because its clock is not known yet.
                timed = frame.pts is not None and not counted
                captured = clock.capture_time(frame.time, now) if timed else now
                if self._frames.wants(frame) and self._gate.takes(frame, captured):
                    size = sum(plane.buffer_size for plane in frame.planes)
                    yield (frame, f"{connected}-{number}", captured), size

    def _opened(self) -> InputContainer:
        import av

        silence()
        began = time.monotonic()
        try:
            container: InputContainer = av.open(
                self._url,
                format="v4l2" if self._url.startswith(DEVICES) else None,
                options=self._options,
                timeout=(self._wait, self.patience()),
                **lenient(),
            )
            return container
        except av.error.ProtocolNotFoundError:  # no later attempt can succeed
            scheme = self._url.partition("://")[0]
            raise SourceError(
                f"source {self.name!r}: url {scheme}://...: FFmpeg knows no such protocol; give a "
                "URL such as rtsp://HOST/PATH"
            ) from None
        except av.error.InvalidDataError:  # FFmpeg also raises it if an RTSP server is silent
            if time.monotonic() - began < self._wait:
                raise
            raise OSError(f"nothing came for {self._wait:.2g} s") from None
