"""A source of frames from live network and USB cameras, with FFmpeg's libraries (PyAV)."""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from stream_ssl.producers.sources.base import Facts, Skipped, SourceError, checked, mark
from stream_ssl.producers.sources.frames import Frames
from stream_ssl.producers.sources.recordings import BrokenFileError
from stream_ssl.producers.sources.video import Film, film_of, lenient
from stream_ssl.wire.sample import Position, Sample

if TYPE_CHECKING:
    from av import VideoFrame
    from av.container import InputContainer

log = logging.getLogger(__name__)

END_SECONDS = 0.5  # timeout of the frame that is being read
FIRST_PAUSE = 0.5  # seconds; doubles with each attempt
DELAY_WINDOW = 60.0  # seconds; the window in which the minimum delay is measured
DELAY_LIMIT = 2.0  # seconds above the minimum delay, after which the stream's clock counts as reset
DEVICES = "/dev/video"


class CaptureClock:
    """Converts stream times, which count from an unknown moment, to capture times.

    The moment is estimated from the frame with the minimum delay in the last one to two minutes.
    Therefore neither network queues nor a drifting camera clock affect the capture times.
    """

    def __init__(self) -> None:
        self._least = [math.inf, math.inf]  # minimum delays of the previous and the current window
        self._begun = -math.inf

    def capture_time(self, seconds: float, now: float) -> float:
        """Return when a frame with stream time `seconds`, received at `now`, was captured."""
        delay = now - seconds
        if delay > min(self._least) + DELAY_LIMIT:
            self._least = [math.inf, math.inf]
        if now - self._begun > DELAY_WINDOW:
            self._begun, self._least = now, [self._least[1], math.inf]
        self._least[1] = min(self._least[1], delay)
        return seconds + min(self._least)


class Camera:
    """Frames of a live stream: RTSP, HTTP, RTMP, UDP, or a V4L2 device such as /dev/video0.

    If the stream is lost or cannot be opened, the source retries after pauses that double up to
    `retry_seconds`. The first pause is 0.5 s. Each change is logged with its reason. The newest
    frames matter most: if the sender cannot keep up, the source drops the oldest waiting frames and
    counts them in `skipped`. A live stream cannot resume at a position. A restart continues with
    the current frames.

    Sample ids are CONNECTED-N: the time of the connection in milliseconds, and the number of the
    frame since then. Capture times follow the stream's own clock.

    Args:
        url: rtsp://USER:PASSWORD@HOST/PATH, http://..., or the path of a device. The user and the
            password are neither logged nor sent.
        rtsp_transport: transport of RTSP frames: "tcp" loses no frames, "udp" has less delay.
        options: further FFmpeg options for this kind of stream, such as {video_size: 1280x720}.
        timeout: seconds without a frame after which the stream is reopened, above 0.
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

        if "://" not in url and not url.startswith(DEVICES):
            raise ValueError(
                f"url {url!r}: must be a URL such as rtsp://HOST/PATH, or a device such as "
                f"{DEVICES}0; files are read by the source video"
            )
        for what, value in (
            ("timeout", timeout),
            ("retry_seconds", retry_seconds),
            ("give_up_seconds", 1.0 if give_up_seconds is None else give_up_seconds),
            ("waiting", waiting),
        ):
            if not value > 0:
                raise ValueError(f"{what} {value}: must be above 0")
        self.name = name
        self.skipped = Skipped(name)
        self._frames = Frames(**frames)
        self._url, self._timeout = url, timeout
        self._options: dict[str, str] = dict(options or {})
        if url.startswith("rtsp"):
            # Do not replay frames that arrive while FFmpeg probes the stream, since their times are
            # wrong.
            own = {"rtsp_transport": rtsp_transport, "fflags": "nobuffer"}
            self._options = {**own, **self._options}
        self._retry_seconds, self._give_up_seconds = retry_seconds, give_up_seconds
        self._waiting = waiting
        self._facts: Facts = {"source": name, "live": True}
        self._ready: deque[tuple[VideoFrame, str, float]] = deque()
        self._changed = threading.Condition()
        self._error: Exception | None = None
        self._stopped = threading.Event()

    def samples(self, position: Position = None) -> Iterator[tuple[Sample, Position]]:
        """Yield each sample with its position, which only identifies this source; see `Source`."""
        if position is not None:
            checked(position, self._facts, self.name)
        return self._sent()

    def stop(self) -> None:
        """End `samples` immediately. Thread-safe."""
        self._stopped.set()
        with self._changed:
            self._changed.notify()

    def _sent(self) -> Iterator[tuple[Sample, Position]]:
        # FFmpeg cannot be interrupted while it waits for a packet, so a thread of its own reads.
        reader = threading.Thread(target=self._read, name=f"camera {self.name}", daemon=True)
        reader.start()
        try:
            while (taken := self._next()) is not None:
                frame, id_, captured = taken
                payload = self._frames.payload(frame)
                sample = Sample(id_, time=captured, source=self.name, **payload)
                yield sample, mark(None, self._facts)
            log.info("source %s was stopped; %s", self.name, self.skipped)
        finally:
            self.stop()
            reader.join(END_SECONDS)  # frees a device; a silent host ends after `timeout`

    def _next(self) -> tuple[VideoFrame, str, float] | None:
        """Return the oldest waiting frame; None once stopped."""
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._error or self._stopped.is_set())
            if self._stopped.is_set():
                return None
            if self._ready:
                return self._ready.popleft()
            assert self._error is not None
            raise self._error

    def _read(self) -> None:
        try:
            self._keep_connected()
        except Exception as error:  # passed on to the caller's thread
            with self._changed:
                self._error = error
                self._changed.notify()

    def _keep_connected(self) -> None:
        """Receive frames and reconnect when the stream ends, until stopped.

        Raises:
            SourceError: no frame came for `give_up_seconds`.
        """
        import av

        pause, came = FIRST_PAUSE, time.monotonic()
        while not self._stopped.is_set():
            why = "the stream ended"
            try:
                for frame, id_, captured in self._received():
                    pause, came = FIRST_PAUSE, time.monotonic()
                    self._hand_over(frame, id_, captured)
                    if self._stopped.is_set():
                        return
            except (av.FFmpegError, OSError, BrokenFileError) as error:
                why = self._reason(error)
            silent = time.monotonic() - came
            if self._give_up_seconds is not None and silent >= self._give_up_seconds:
                raise SourceError(f"source {self.name!r}: no frame for {silent:.0f} s: {why}")
            wait = pause * random.uniform(0.5, 1.0)
            log.warning("source %s: no frames: %s; trying again in %.1f s", self.name, why, wait)
            self._stopped.wait(wait)
            pause = min(2 * pause, self._retry_seconds)

    def _received(self) -> Iterator[tuple[VideoFrame, str, float]]:
        """Yield the selected frames of one connection, with their ids and capture times."""
        with self._opened() as container:
            stream = film_of(container)
            log.info("source %s: connected: %s", self.name, stream)
            connected = round(time.time() * 1000)
            gate, clock = self._frames.gate(), CaptureClock()
            what, key_frames = "the stream", self._frames.key_frames
            film = Film(container, stream, self.skipped.note, what, key_frames, live=True)
            for number, frame in enumerate(film.frames(container.demux(stream))):
                now = time.time()
                # The first frames of a stream may lack a time, because its clock is not known yet.
                captured = now if frame.pts is None else clock.capture_time(frame.time, now)
                if self._frames.wants(frame) and gate.takes(frame, captured):
                    yield frame, f"{connected}-{number}", captured

    def _opened(self) -> InputContainer:
        import av

        began = time.monotonic()
        try:
            container: InputContainer = av.open(
                self._url,
                format="v4l2" if self._url.startswith(DEVICES) else None,
                options=self._options,
                timeout=self._timeout,
                **lenient(),
            )
            return container
        except av.error.InvalidDataError:  # FFmpeg also raises it if an RTSP server is silent
            if time.monotonic() - began < self._timeout:
                raise
            raise OSError(f"nothing came for {self._timeout:g} s") from None

    def _reason(self, error: Exception) -> str:
        """Return why a stream cannot be read, without its URL, which may contain a password."""
        import av

        if isinstance(error, av.error.ExitError):
            return f"nothing came for {self._timeout:g} s"
        return getattr(error, "strerror", None) or str(error)

    def _hand_over(self, frame: VideoFrame, id_: str, captured: float) -> None:
        with self._changed:
            if len(self._ready) >= self._waiting:
                self._ready.popleft()
                self.skipped.note("late", "the oldest frame that waits", "the sender is slower")
            self._ready.append((frame, id_, captured))
            self._changed.notify()
