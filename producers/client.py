"""The `Producer`, which robots, crawlers and cameras use to send images to a receiver."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import math
import os
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

import numpy as np
from numpy.typing import NDArray

from stream_ssl.producers._connection import Curve, curve_in_run, curve_of
from stream_ssl.producers._images import as_sample, owned
from stream_ssl.producers._io_thread import IoThread
from stream_ssl.producers._packer import NOT_GIVEN, OnDelivery, Packer, cost_of, pack
from stream_ssl.producers._protocol import MIN_SLEEP_SECONDS, ProtocolState
from stream_ssl.producers._reporter import Reporter
from stream_ssl.producers._spool import Spool
from stream_ssl.producers.errors import (
    BufferFullError,
    CannotConnectError,
    ClosedError,
    DeadlineError,
    DeliveryError,
    ProducerError,
    SampleTooLargeError,
)
from stream_ssl.producers.stats import Delivery, Rejection, StateChange, Stats
from stream_ssl.wire import Hello, Keys, Sample, Welcome, check_name
from stream_ssl.wire.address import check_address, receiver_of
from stream_ssl.wire.messages import Verdict
from stream_ssl.wire.sample import MAX_SOURCE_BYTES, Position, Scalar, check_position, short

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

AGENT = "stream-ssl producers 1"

FIELDS = ("label", "codec", "shape", "time", "source", "meta")
_NOTHING = (None,) * (1 + len(FIELDS))  # a call that sets neither an id nor a field
OnFull = Literal["block", "drop_newest", "drop_oldest", "raise", "spool"]


class Producer:
    """A client that sends samples to a receiver and keeps each sample until it is acknowledged.

    An acknowledged sample is on the receiver's disk. Any thread may call any method. A producer
    does not survive fork(): create it in the process that uses it. Callbacks run in the producer's
    thread and must not wait for the producer.

    Args:
        address: the receiver's address, "tcp://HOST:PORT", or a list of addresses. The producer
            chooses one address of a list by its name and stays with it. All receivers of a list
            use the same key pair. Plain text is allowed on loopback only. None: use `run`.
        name: the name of this producer. It must be unique at the receiver and stay the same after
            a restart. It has 1 to 128 letters, digits and characters of `._/-`. With keys, the
            name equals the key's name on the allow-list, or starts with that name and "/".
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
        exit_timeout: seconds to wait for acknowledgements when the interpreter ends, or when a
            producer that was not closed is garbage-collected.
        on_rejected: called with a Rejection when the receiver rejects samples permanently.
        on_state: called with a StateChange when the connection's state, or its reason, changes.
        on_stats: called with a copy of the counters every `stats_seconds`.
        stats_seconds: seconds between two calls of `on_stats`.
        on_verdict: called with a Verdict: "kept" or "refused" by the memory, with the number of
            slots that showed the same image, and later "evicted". Some samples get no verdict
            (docs/producers.md).

    Raises:
        ValueError: an argument is invalid, or another producer uses the spool.
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
        before: str | Sequence[str] = (),
        abandon: bool = False,
        run: str | Path | None = None,
    ) -> None:
        if on_full not in get_args(OnFull):
            raise ValueError(f"on_full {on_full!r}: must be one of {', '.join(get_args(OnFull))}")
        if (on_full == "spool") != (spool is not None):
            raise ValueError('on_full="spool" and spool=FOLDER belong together: pass both')
        for what, value in (
            ("packet_bytes", packet_bytes),
            ("packet_samples", packet_samples),
            ("buffer_bytes", buffer_bytes),
            ("spool_bytes", spool_bytes),
            ("stats_seconds", stats_seconds),
        ):
            if not value > 0:
                raise ValueError(f"{what} {value}: must be above 0")
        if not (linger >= 0 and exit_timeout >= 0):
            raise ValueError(f"linger {linger}, exit_timeout {exit_timeout}: must be 0 or more")
        self.name = check_name(name)
        if (address is None) == (run is None):
            raise ValueError("give either the receiver's address, or the folder of its run as run=")
        curve: Curve | None = None
        if run is not None:
            address, curve = curve_in_run(run, name, keys, server_key)
        assert address is not None
        home, last = _chosen(address, name, "address"), _chosen(before, name, "before")
        if home is None:
            raise ValueError("address: an empty list; give at least one receiver")
        self.address = home
        self.source = source or name[:MAX_SOURCE_BYTES]
        if run is None:
            curve = curve_of(home, keys, server_key)
        self._buffer_bytes, self._on_full = buffer_bytes, on_full
        label = f"producer {name!r} to {home}"
        reporter = Reporter(label, on_state, on_stats, on_rejected, stats_seconds, on_verdict)
        # No argument may be refused below this line, because the spool's lock would stay taken.
        disk = None if spool is None else Spool(Path(spool), name, spool_bytes)
        if disk is not None:
            last = disk.marked_for or last
            disk.receiver = home
            if abandon:
                disk.forget_mark()
        ask_first = None if abandon or last == home else last
        self._spooled_position = disk.position if disk is not None and disk.samples else None
        self._epoch = time.time_ns() if disk is None else disk.epoch
        self._numbers = itertools.count(1)
        self._closed = False
        if on_full == "drop_oldest":  # whole packets are dropped, so keep them small
            packet_bytes = min(packet_bytes, max(1, buffer_bytes // 8))
        self._packer = Packer(packet_bytes, packet_samples)
        self._protocol = ProtocolState(
            Hello(name, self._epoch, 1, agent=AGENT, verdicts=on_verdict is not None),
            self._packer,
            linger,
            f"still connecting to {home}",
            key="this plain-text connection" if curve is None else str(curve),
            takeover=takeover,
            spool=disk,
            buffer_bytes=buffer_bytes,
        )
        self._io = IoThread(home, curve, self._protocol, reporter, exit_timeout, ask_first)
        self._changed = self._io.changed
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
        deadline = time.monotonic() + timeout
        self._check_process()
        with self._changed:
            self._check_open()
            while self._protocol.state != "active":
                self._check_open()
                if not self._wait(deadline):
                    raise CannotConnectError(
                        f"no connection within {timeout:g} s: {self._protocol.why()}"
                    )
            welcome, position = self._protocol.welcome, self._protocol.position
        assert welcome is not None
        if self._spooled_position is not None:
            position = self._spooled_position
        return replace(welcome, position=position)

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
        told = (id, label, codec, shape, time, source, meta)
        if isinstance(image, Sample) and told == _NOTHING:
            sample = owned(image)
        else:
            sample = self._sample(image, id, dict(zip(FIELDS, told[1:], strict=True)))
        return self._offer(sample, position, timeout, on_delivery)

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
        sample = self._named(image, id, label, fields)
        future: Future[Delivery] = Future()
        self._submit(sample, position, timeout, future)
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
        sample = self._named(image, id, label, fields)
        self._check_process()
        loop, deadline = asyncio.get_running_loop(), _deadline(timeout)
        future: Future[Delivery] = Future()
        while True:
            room = asyncio.Event()
            with self._changed:
                try:
                    self._submit(sample, position, 0.0, future)
                    return asyncio.wrap_future(future)
                except DeadlineError:
                    if time.monotonic() >= deadline:
                        raise
                self._io.room_waiters.append(functools.partial(_set_in, loop, room))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(room.wait(), min(1.0, deadline - time.monotonic()))

    def flush(self, timeout: float | None = 30.0) -> None:
        """Wait until all samples sent so far are on the receiver's disk, rejected or dropped.

        Args:
            timeout: seconds to wait. None: no limit.

        Raises:
            DeadlineError: samples are still unacknowledged; the message gives the reason.
            RefusedError: the receiver refuses this producer.
        """
        deadline, protocol = _deadline(timeout), self._protocol
        self._check_process()
        with self._changed:
            self._check_open()
            target = protocol.taken
            protocol.flush_to = max(protocol.flush_to, target)
            self._io.wake()
            while protocol.done < target:
                self._check_open()
                if not self._wait(deadline):
                    raise DeadlineError(
                        f"{target - protocol.done} of {target} samples are not acknowledged after "
                        f"{timeout:g} s: {protocol.why()}"
                    )

    def close(self, timeout: float | None = 30.0) -> None:
        """Flush, send BYE and free all resources. A second call does nothing.

        With a spool, samples that are not acknowledged in time stay in the spool for the next run.
        If the network is down, close() leaves them there after two seconds.

        Args:
            timeout: seconds to wait for acknowledgements. None: no limit.

        Raises:
            DeadlineError: the flush timed out. The producer is closed nevertheless. Samples that
                were not acknowledged are lost and counted in `stats`.
            RefusedError: the receiver refuses this producer, and samples are unacknowledged.
        """
        if self._closed or self._io.forked:
            self._closed = True
            return
        spooling, protocol = self._protocol.spool is not None, self._protocol
        try:
            if not spooling and protocol.done < protocol.taken:
                self.flush(timeout)
        finally:
            with self._changed:
                self._closed = True
                self._changed.notify_all()
            self._io.finish((math.inf if timeout is None else timeout) if spooling else 0.0)
            self._io.join()
        lost = protocol.stats.dropped_by_reason.get("closed")
        if spooling and lost is not None:
            raise DeadlineError(f"{lost.samples} samples are lost: the spool could not take them")

    @property
    def stats(self) -> Stats:
        """A copy of the counters.

        Raises:
            ClosedError: this process was forked from the producer's process.
        """
        self._check_process()
        with self._changed:
            return self._io.snapshot()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
            return
        try:  # the error that ended the block must not be hidden by an error of close()
            self.close(timeout=2.0)
        except ProducerError as late:
            assert error is not None
            error.add_note(f"closing the producer: {late}")

    def __del__(self) -> None:
        io: IoThread | None = getattr(self, "_io", None)  # the constructor may have failed
        if io is None or self._closed or io.closed or io.forked:
            return
        text = f"producer {self.name!r} was not closed; use `with Producer(...)`, or close()"
        warnings.warn(text, ResourceWarning, source=self, stacklevel=2)
        io.finish()

    def _sample(self, image: Image, id: str | None, fields: dict[str, Any]) -> Sample:  # noqa: A002
        if isinstance(image, Sample):
            if id is not None or list(fields.values()).count(None) < len(fields):
                raise ValueError("a Sample carries its own id, label and fields; pass it alone")
            return owned(image)
        if id is None:
            id = f"{self._epoch:x}-{next(self._numbers)}"  # noqa: A001
        if fields.get("source") is None:
            fields["source"] = self.source
        return as_sample(image, id, **fields)

    def _named(
        self,
        image: Image,
        id: str | None,  # noqa: A002
        label: int | None,
        fields: dict[str, Any],
    ) -> Sample:
        unknown = fields.keys() - set(FIELDS)
        if unknown:
            raise TypeError(
                f"{', '.join(sorted(unknown))}: no such argument; a sample has {', '.join(FIELDS)}"
            )
        return self._sample(image, id, {"label": label, **fields})

    def _offer(
        self,
        sample: Sample,
        position: Position,
        timeout: float | None,
        on_delivery: OnDelivery | None,
    ) -> bool:
        """Accept a sample. Return False if it was dropped."""
        if position is not NOT_GIVEN:
            check_position(position)
        cost = cost_of(sample)
        self._check_process()
        with self._io.lock:
            self._check_open()
            self._check_size(sample, cost, position)
            if not self._make_room(cost, timeout):
                reason = "buffer_full" if self._protocol.spool is None else "spool_full"
                self._protocol.stats.drop(reason, 1, len(sample.data))
                return False
            self._protocol.stats.accepted.add(1, len(sample.data))
            self._protocol.taken += 1
            now = time.monotonic()
            for packet in self._packer.add(sample, cost, position, now, on_delivery):
                self._protocol.enqueue(packet)
                self._io.wake()
            if self._protocol.linger < MIN_SLEEP_SECONDS:  # otherwise the thread wakes in time
                self._io.wake()
        return True

    def _submit(
        self, sample: Sample, position: Position, timeout: float | None, future: Future[Delivery]
    ) -> None:
        def settle(delivery: Delivery) -> None:
            with contextlib.suppress(InvalidStateError):  # the user cancelled the future
                if delivery.outcome in ("acknowledged", "spooled"):
                    future.set_result(delivery)
                else:
                    text = f"sample {short(delivery.id)} was {delivery.outcome}: {delivery.detail}"
                    future.set_exception(DeliveryError(text, delivery))

        if not self._offer(sample, position, timeout, settle):
            settle(Delivery(sample.id, "dropped", "the buffer is full"))

    def _check_size(self, sample: Sample, cost: int, position: Any) -> None:
        """Raise an error for a sample that can never be sent, before it takes up room."""
        if len(sample.data) > self._buffer_bytes:
            raise SampleTooLargeError(
                f"sample {short(sample.id)}: {len(sample.data)} bytes exceed buffer_bytes "
                f"{self._buffer_bytes}; raise it or send a smaller image"
            )
        welcome = self._protocol.welcome
        if welcome is not None and sample.codec not in welcome.codecs:
            raise ValueError(
                f"sample {short(sample.id)}: codec {sample.codec!r}: the receiver takes "
                f"{', '.join(welcome.codecs)}"
            )
        if welcome is None or cost + 4096 <= welcome.max_packet:
            return
        if position is NOT_GIVEN:
            position = self._packer.position
        size = pack([sample], (position,)).size
        if size > welcome.max_packet:
            raise SampleTooLargeError(
                f"sample {short(sample.id)}: {size} bytes in a packet, the receiver takes at most "
                f"{welcome.max_packet}; send a smaller or compressed image, or raise its max_packet"
            )

    def _make_room(self, cost: int, timeout: float | None) -> bool:
        """Wait, or drop samples, until the buffer has `cost` free bytes.

        Return False if the new sample must be dropped.
        """
        deadline, protocol = None, self._protocol
        while (used := protocol.memory) and used + cost > self._buffer_bytes:
            deadline = _deadline(timeout) if deadline is None else deadline
            self._io.full = True
            if self._on_full == "drop_oldest" and self._drop_oldest():
                continue
            if self._on_full.startswith("drop") or (protocol.spool and protocol.spool.full):
                return False
            reason = f"the buffer of {self._buffer_bytes} bytes is full"
            if self._on_full == "raise":
                raise BufferFullError(f"{reason}: {protocol.why()}")
            self._io.wake()
            if not self._wait(deadline):
                raise DeadlineError(f"{reason} after {timeout:g} s: {protocol.why()}")
            self._check_open()
        return True

    def _drop_oldest(self) -> bool:
        if self._protocol.drop_oldest():
            return True
        if not len(self._packer):
            return False
        self._protocol.enqueue(self._packer.take())
        return self._protocol.drop_oldest()

    def _wait(self, deadline: float) -> bool:
        """Wait for a change. Return False if the deadline has passed."""
        if threading.current_thread() is self._io.thread:
            raise ProducerError("a callback would wait for itself; call the producer elsewhere")
        left = deadline - time.monotonic()
        return left > 0 and (self._changed.wait(None if left == math.inf else left) or True)

    def _check_process(self) -> None:
        """Raise ClosedError in a forked process.

        Call this before taking the lock, because a fork may copy the lock while it is held.
        """
        if self._io.forked:
            raise ClosedError("a producer does not survive fork(); make it in this process")

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"producer {self.name!r} is closed")
        fatal = self._protocol.fatal
        if fatal is not None:
            raise type(fatal)(*fatal.args)  # a new error, so that each caller has its own traceback


def _chosen(addresses: str | Sequence[str], name: str, what: str) -> str | None:
    """Return the receiver's address for a producer's name, or None for an empty list.

    Raises:
        ValueError: an address is invalid, or a list contains an address twice.
    """
    listed: Sequence[Any] = addresses if isinstance(addresses, list | tuple) else [addresses]
    for one in listed:
        check_address(one)
    if len(set(listed)) < len(listed):
        raise ValueError(f"{what} {', '.join(listed)}: a receiver stands in it twice; remove one")
    return receiver_of(name, listed) if listed else None


def _deadline(timeout: float | None) -> float:
    return math.inf if timeout is None else time.monotonic() + timeout


def _set_in(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    with contextlib.suppress(RuntimeError):  # the loop may have been closed in the meantime
        loop.call_soon_threadsafe(event.set)
