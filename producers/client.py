"""The `Producer`, which robots, crawlers and cameras use to send images to a receiver."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, get_args

import numpy as np
from numpy.typing import NDArray

from stream_ssl.producers._connection import Curve, curve_in_run, curve_of
from stream_ssl.producers._dialer import Dialer
from stream_ssl.producers._images import SampleMaker, given
from stream_ssl.producers._io_thread import IoThread
from stream_ssl.producers._outbox import Outbox
from stream_ssl.producers._packer import NOT_GIVEN, OnDelivery, Packer
from stream_ssl.producers._protocol import ProducerProtocol
from stream_ssl.producers._reporter import Reporter
from stream_ssl.producers._send_buffer import OnFull, SendBuffer
from stream_ssl.producers._spool import Spool
from stream_ssl.producers.errors import DeadlineError, DeliveryError, ProducerError
from stream_ssl.producers.sources.ranges import check_above_0, check_ranges
from stream_ssl.producers.stats import Delivery, Rejection, StateChange, Stats
from stream_ssl.wire import Bye, Hello, Keys, Sample, Welcome, check_name
from stream_ssl.wire.address import check_address, receiver_of
from stream_ssl.wire.messages import Verdict
from stream_ssl.wire.sample import MAX_SOURCE_BYTES, Position, Scalar, check_text, short

if TYPE_CHECKING:
    from PIL.Image import Image as PillowImage

    Image = (
        NDArray[np.uint8]
        | NDArray[np.floating[Any]]
        | Sample
        | bytes
        | bytearray
        | memoryview
        | PillowImage
        | str
        | os.PathLike[str]
    )

AGENT = "stream-ssl, protocol 1"


class Producer:
    """A client that sends samples to a receiver and keeps each sample until it is acknowledged.

    An acknowledged sample is on the receiver's disk. Any thread may call any method. A producer
    does not survive fork(): create it in the process that uses it. Callbacks run in the producer's
    thread and must not wait for the producer.

    Args:
        address: the receiver's address, "tcp://HOST:PORT", or a list of addresses. The producer
            chooses one address of a list by its name and stays with it. All receivers of a list
            use the same key pair. Plain text is allowed on loopback only. None: use `run`.
        name: the name of this producer, unique at the receiver and the same after a restart: 1 to
            128 letters, digits and characters of `._/-`. With keys, the name equals the key's name
            on the allow-list, or starts with that name and "/".
        keys: this producer's own key pair, or the path of its NAME.secret.json.
        server_key: the receiver's public key: a Keys object, a file, or 40 characters.
        source: the source of samples that name no source. None: the producer's name, cut to 64
            characters.
        packet_bytes: maximum size of a packet in bytes. A larger sample travels alone.
        packet_samples: maximum number of samples in a packet.
        linger: seconds after which the producer sends a packet that is not full.
        buffer_bytes: maximum bytes of waiting and unacknowledged samples in memory.
        on_full: what send() does when the buffer is full. "block" waits for room. "drop_newest"
            drops the new sample. "drop_oldest" drops the oldest packets that were never sent.
            "raise" raises BufferFullError. "spool" writes samples to disk while the network is
            down or slower than the source; they survive restarts and power cuts.
        spool: the spool's folder. Only one producer may use a folder.
        spool_bytes: maximum bytes of the spool. A full spool drops the newest samples.
        before: the list of addresses before its last change. If the name had another receiver
            then, the producer first asks that receiver which packets it has, and may take over its
            position. A spool stores the address of its receiver, so it does not need `before`.
        abandon: do not ask the earlier receiver, because it is gone for good. Samples that it
            stored and did not acknowledge are sent again. They count twice if its journal is read.
        run: the folder of a run on this machine. The producer reads the address, the server key
            and its own key from the folder. `keys` and `server_key` override the keys of the run.
        takeover: displace a connected producer of the same name. False: refuse this producer.
        exit_timeout: seconds to wait for acknowledgements of a producer that was not closed.
        on_rejected: called with a Rejection when the receiver rejects samples permanently.
        on_state: called with a StateChange when the connection's state, or its reason, changes.
        on_stats: called with a copy of the counters every `stats_seconds`.
        stats_seconds: seconds between two calls of `on_stats`.
        on_verdict: called with a Verdict: "kept" or "refused" by the memory, with the number of
            slots that showed the same image, and later "evicted" (docs/producers.md).
        sporadic: the source may send nothing for long, and its silence is no fault.

    Raises:
        ValueError: an argument is invalid, or the folder of the spool is not this producer's.
        OSError: the spool cannot be read or written.
    """

    def __init__(
        self,
        address: str | Sequence[str] | None = None,
        name: str = "",
        keys: Keys | str | Path | None = None,
        server_key: Keys | str | Path | None = None,
        source: str | None = None,
        packet_bytes: int = 256 * 1024,
        packet_samples: int = 64,
        linger: float = 0.2,
        buffer_bytes: int = 64 * 1024 * 1024,
        on_full: OnFull = "block",
        on_rejected: Callable[[Rejection], None] | None = None,
        spool: str | Path | None = None,
        spool_bytes: int = 1024 * 1024 * 1024,
        takeover: bool = False,
        exit_timeout: float = 5.0,
        on_state: Callable[[StateChange], None] | None = None,
        on_stats: Callable[[Stats], None] | None = None,
        stats_seconds: float = 10.0,
        on_verdict: Callable[[Verdict], None] | None = None,
        sporadic: bool = False,
        before: str | Sequence[str] = (),
        abandon: bool = False,
        run: str | Path | None = None,
    ) -> None:
        _check_on_full(on_full, spool)
        check_above_0(packet_bytes=packet_bytes, packet_samples=packet_samples)
        check_above_0(buffer_bytes=buffer_bytes, spool_bytes=spool_bytes)
        check_above_0(stats_seconds=stats_seconds)
        check_ranges(("linger", linger, 0, math.inf), ("exit_timeout", exit_timeout, 0, math.inf))
        self.name = check_name(name)
        self.address, curve = _receiver(address, run, name, keys, server_key)
        last = _chosen(before, name, "before")
        self.source = source or name[:MAX_SOURCE_BYTES]
        check_text("source", self.source, MAX_SOURCE_BYTES)
        label = f"producer {name!r} to {self.address}"
        reporter = Reporter(label, on_state, on_stats, on_rejected, stats_seconds, on_verdict)
        disk = None if spool is None else Spool(Path(spool), name, spool_bytes)
        if disk is not None:
            last = disk.marked_for or last
            disk.receiver = self.address
            if abandon:
                disk.forget_mark()
        ask_first = None if abandon or last == self.address else last
        self._spooled_position = disk.position if disk is not None and disk.samples else None
        epoch = time.time_ns() if disk is None else disk.epoch
        self._samples = SampleMaker(self.source, epoch)
        if on_full == "drop_oldest":  # whole packets are dropped, so keep them small
            packet_bytes = min(packet_bytes, max(1, buffer_bytes // 8))
        self._outbox = Outbox(Packer(packet_bytes, packet_samples), linger, disk, buffer_bytes)
        self._protocol = ProducerProtocol(
            Hello(name, epoch, 1, agent=AGENT, verdicts=on_verdict is not None, sporadic=sporadic),
            self._outbox,
            f"still connecting to {self.address}",
            key="this plain-text connection" if curve is None else str(curve),
            takeover=takeover,
        )
        dialer = Dialer(self.address, curve, ask_first)
        self._io = IoThread(dialer, self._protocol, reporter, exit_timeout)
        self._buffer = SendBuffer(self._io, self._protocol, on_full)
        self._io.start()

    def connect(self, timeout: float = 10.0) -> Welcome:
        """Wait for the receiver's WELCOME and return it.

        After a restart, a source resumes at `welcome.position`. None means the beginning. If an
        earlier run left samples in the spool, `position` is the position after the last of them.

        Args:
            timeout: seconds to wait.

        Raises:
            CannotConnectError: no WELCOME arrived in time; the message gives the reason.
            RefusedError: the receiver refuses this producer.
        """
        welcome = self._buffer.wait_for_welcome(timeout)
        spooled = self._spooled_position
        return welcome if spooled is None else replace(welcome, position=spooled)

    def send(
        self,
        image: Image,
        id: str | None = None,  # noqa: A002
        label: int | None = None,
        *,
        codec: str | None = None,
        shape: tuple[int, int, int] | None = None,
        time: float | datetime | np.datetime64 | None = None,  # noqa: A002, RUF100
        source: str | None = None,
        meta: Mapping[str, Scalar | datetime | np.generic] | None = None,
        position: Position = NOT_GIVEN,
        timeout: float | None = None,
        on_delivery: OnDelivery | None = None,
    ) -> bool:
        """Accept one sample for sending. Return False if the sample was dropped.

        A sample is dropped, and counted in `stats`, when the buffer or the spool is full.

        Args:
            image: one of:

                - a uint8 array H x W or H x W x C; the pixels are copied
                - an encoded file as bytes, bytearray or memoryview
                - the path of an encoded file, which is read now
                - a PIL image; its pixels are sent, oriented by its EXIF data
                - a vector, float16 or float32 [D]; it is copied
                - a Sample, which excludes `id`, `label` and the fields up to `meta`
            id: identifies the image within its source. An image keeps its id when it is sent
                again. None: a new id.
            label: the class of the image, if it has one.
            codec: "jpeg", "png", "webp" or "raw". None: detect the codec from the bytes.
            shape: (H, W, C), required for raw pixels in bytes.
            time: capture time: seconds since the Unix epoch, or a datetime. None: now.
            source: where the image was captured. None: the producer's `source`.
            meta: further facts. NumPy scalars and datetimes are converted to plain values.
            position: the source's position after this sample. WELCOME returns it to a restarted
                producer once the sample is on the receiver's disk.
            timeout: seconds to wait for room when `on_full` is "block" or "spool". None: no limit.
            on_delivery: called once with the outcome of the sample, if the sample was accepted.

        Raises:
            TypeError: `image` is of an unsupported type.
            ValueError: a field of the sample is invalid.
            OSError: a file cannot be read.
            SampleTooLargeError: the sample exceeds the maximum size of a packet or of the buffer.
            DeadlineError: the buffer had no room within `timeout`.
            BufferFullError: the buffer is full, and `on_full` is "raise".
            RefusedError: the receiver refuses this producer.
        """
        sample = self._samples.make(image, id, given(label, codec, shape, time, source, meta))
        return self._buffer.offer(sample, position, timeout, on_delivery)

    def submit(
        self,
        image: Image,
        id: str | None = None,  # noqa: A002
        label: int | None = None,
        *,
        position: Position = NOT_GIVEN,
        timeout: float | None = None,
        **fields: Any,
    ) -> Future[Delivery]:
        """Accept one sample as send() does, and return a future of its Delivery.

        The future raises DeliveryError if the sample is rejected or dropped.
        """
        sample = self._samples.make(image, id, {"label": label, **fields})
        future, settle = _awaited()
        if not self._buffer.offer(sample, position, timeout, settle):
            settle(_no_room(sample, self._outbox))
        return future

    async def send_async(
        self,
        image: Image,
        id: str | None = None,  # noqa: A002
        label: int | None = None,
        *,
        position: Position = NOT_GIVEN,
        timeout: float | None = None,
        **fields: Any,
    ) -> asyncio.Future[Delivery]:
        """Wait for room without blocking the event loop, and return a future as submit() does.

        Also `await` the future to wait until the sample is on the receiver's disk, or spooled.
        """
        sample = self._samples.make(image, id, {"label": label, **fields})
        future, settle = _awaited()
        if not await self._buffer.offer_async(sample, position, timeout, settle):
            settle(_no_room(sample, self._outbox))
        return asyncio.wrap_future(future)

    def flush(self, timeout: float | None = 30.0) -> None:
        """Wait until all samples sent so far are on the receiver's disk, rejected or dropped.

        Args:
            timeout: seconds to wait. None: no limit.

        Raises:
            DeadlineError: samples are still unacknowledged; the message gives the reason.
            RefusedError: the receiver refuses this producer.
        """
        self._buffer.flush(timeout)

    def close(self, timeout: float | None = 30.0, ended: bool = False) -> None:
        """Flush, send BYE and free all resources. A second call does nothing.

        With a spool, samples that are not acknowledged in time stay in the spool for the next run.
        If the network is down, close() leaves them there after two seconds.

        Args:
            timeout: seconds to wait for acknowledgements. None: no limit.
            ended: the source has ended, so the run does not warn that this producer is away.

        Raises:
            DeadlineError: the flush timed out. The producer is closed nevertheless. Samples that
                were not acknowledged are lost and counted in `stats`.
            RefusedError: the receiver refuses this producer, and samples are unacknowledged.
        """
        buffer, outbox = self._buffer, self._outbox
        if buffer.closed or self._io.forked:
            buffer.closed = True
            return
        buffer.check_thread()
        if ended:
            self._io.farewell = Bye.ENDED
        spooling = outbox.spool is not None
        try:
            if not spooling and outbox.done < outbox.taken:
                self.flush(timeout)
        finally:
            buffer.close()
            self._io.finish((math.inf if timeout is None else timeout) if spooling else 0.0)
            self._io.join()
        lost = outbox.stats.dropped_by_reason.get("closed")
        if spooling and lost is not None:
            raise _lost(lost.samples)

    @property
    def stats(self) -> Stats:
        """A copy of the counters.

        Raises:
            ClosedError: this process was forked from the producer's process.
        """
        self._buffer.check_process()
        with self._io.lock:
            return self._io.snapshot()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
            return
        try:  # the error that ended the block must not be hidden by an error of close()
            self.close(timeout=2.0)
        except ProducerError as late:
            error.add_note(f"closing the producer: {late}")

    def __del__(self) -> None:
        io: IoThread | None = getattr(self, "_io", None)  # the constructor may have failed
        if io is None or self._buffer.closed or io.closed or io.forked:
            return
        io.finish()  # first, because the warning may be an error
        text = f"producer {self.name!r} was not closed; use `with Producer(...)`, or close()"
        warnings.warn(text, ResourceWarning, source=self, stacklevel=2)


def _no_room(sample: Sample, outbox: Outbox) -> Delivery:
    full = "buffer" if outbox.spool is None else "spool"
    return Delivery(sample.id, "dropped", f"the {full} is full")


def _lost(samples: int) -> DeadlineError:
    return DeadlineError(
        f"{samples} samples are lost: the spool could not take them; raise spool_bytes, or free "
        "space on its disk"
    )


def _awaited() -> tuple[Future[Delivery], OnDelivery]:
    """Return a future, and a function that settles it with the outcome of a sample."""
    future: Future[Delivery] = Future()

    def settle(delivery: Delivery) -> None:
        with contextlib.suppress(InvalidStateError):  # the user cancelled the future
            if delivery.outcome in ("acknowledged", "spooled"):
                future.set_result(delivery)
            else:
                text = f"sample {short(delivery.id)} was {delivery.outcome}: {delivery.detail}"
                future.set_exception(DeliveryError(text, delivery))

    return future, settle


def _check_on_full(on_full: OnFull, spool: str | Path | None) -> None:
    if on_full not in get_args(OnFull):
        raise ValueError(f"on_full {on_full!r}: must be one of {', '.join(get_args(OnFull))}")
    if (on_full == "spool") != (spool is not None):
        raise ValueError('on_full="spool" and spool=FOLDER belong together: pass both')


def _receiver(
    address: str | Sequence[str] | None,
    run: str | Path | None,
    name: str,
    keys: Keys | str | Path | None,
    server_key: Keys | str | Path | None,
) -> tuple[str, Curve | None]:
    """Return the receiver's address for a producer's name, and the keys of the connection."""
    if (address is None) == (run is None):
        raise ValueError("give either the receiver's address, or the folder of its run as run=")
    if run is not None:
        return curve_in_run(run, name, keys, server_key)
    assert address is not None
    home = _chosen(address, name, "address")
    if home is None:
        raise ValueError("address: an empty list; give at least one receiver")
    return home, curve_of(home, keys, server_key)


def _chosen(addresses: str | Sequence[str], name: str, what: str) -> str | None:
    """Return the receiver's address for a producer's name, or None for an empty list."""
    listed: Sequence[Any] = addresses if isinstance(addresses, list | tuple) else [addresses]
    for one in listed:
        check_address(one)
    if len(set(listed)) < len(listed):
        raise ValueError(f"{what} {', '.join(listed)}: it names a receiver twice; remove one")
    return receiver_of(name, listed) if listed else None
