"""The place where the user's threads hand samples over to a producer's own thread."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import threading
import time
from dataclasses import replace
from typing import Literal

from stream_ssl.producers._io_thread import IoThread
from stream_ssl.producers._packer import NOT_GIVEN, OnDelivery, cost_of, pack
from stream_ssl.producers._protocol import MIN_SLEEP_SECONDS, ProducerProtocol
from stream_ssl.producers.errors import (
    BufferFullError,
    CannotConnectError,
    ClosedError,
    DeadlineError,
    ProducerError,
    SampleTooLargeError,
)
from stream_ssl.wire import Position, Sample, Welcome
from stream_ssl.wire.sample import check_position, short

OnFull = Literal["block", "drop_newest", "drop_oldest", "raise", "spool"]


class SendBuffer:
    """A bounded buffer of samples, with the waits of the user's threads.

    Each method raises ClosedError after `close`, and in a forked process. It raises the producer's
    fatal error once the receiver has refused the producer.

    Args:
        io: the thread that empties the buffer, by the protocol. Only its bare lock is entered here:
            Ctrl-C could leave its condition locked.
        on_full: what to do when the buffer is full; see `Producer`.

    Attributes:
        closed: whether the producer is closed.
    """

    def __init__(self, io: IoThread, protocol: ProducerProtocol, on_full: OnFull) -> None:
        self.closed = False
        self._io, self._on_full = io, on_full
        self._protocol, self._outbox = protocol, protocol.outbox

    def close(self) -> None:
        """End the waits of all threads, with a ClosedError."""
        with self._io.lock:
            self.closed = True
            self._io.changed.notify_all()

    def wait_for_welcome(self, timeout: float) -> Welcome:
        """Return the receiver's WELCOME, with the source's position after the last sample.

        Raises:
            CannotConnectError: no WELCOME arrived within `timeout` seconds.
        """
        deadline, protocol = _deadline(timeout), self._protocol
        self.check_process()
        with self._io.lock:
            self._check_open()
            while not protocol.active:
                self._check_open()
                if not self._wait(deadline):
                    raise CannotConnectError(
                        f"no connection within {timeout:g} s: {protocol.why()}"
                    )
            assert protocol.welcome is not None
            return replace(protocol.welcome, position=protocol.position)

    def flush(self, timeout: float | None) -> None:
        """Wait until all samples offered so far are on the receiver's disk, rejected or dropped.

        Raises:
            DeadlineError: samples are still unacknowledged after `timeout` seconds.
        """
        deadline, outbox = _deadline(timeout), self._outbox
        self.check_process()
        with self._io.lock:
            self._check_open()
            target = outbox.taken
            outbox.flush_to = max(outbox.flush_to, target)
            self._io.wake()
            while outbox.done < target:
                self._check_open()
                if not self._wait(deadline):
                    raise DeadlineError(
                        f"{target - outbox.done} of {target} samples are not acknowledged after "
                        f"{timeout:g} s: {self._protocol.why()}"
                    )

    def offer(
        self,
        sample: Sample,
        position: Position,
        timeout: float | None,
        on_delivery: OnDelivery | None,
    ) -> bool:
        """Accept a sample. Return False if it was dropped. `Producer.send` names the errors."""
        if position is not NOT_GIVEN:
            position = check_position(position)  # the source may go on counting in the same object
        cost, outbox = cost_of(sample), self._outbox
        self.check_process()
        with self._io.lock:
            self._check_open()
            self._check_size(sample, cost, position)
            if not self._make_room(cost, timeout):
                reason = "buffer_full" if outbox.spool is None else "spool_full"
                outbox.stats.drop(reason, 1, len(sample.data))
                return False
            full = outbox.offer((sample, cost, position, time.monotonic(), on_delivery))
            if full or outbox.linger < MIN_SLEEP_SECONDS:  # otherwise the thread wakes in time
                self._io.wake()
        return True

    async def offer_async(
        self,
        sample: Sample,
        position: Position,
        timeout: float | None,
        on_delivery: OnDelivery | None,
    ) -> bool:
        """Accept a sample as `offer` does, without blocking the event loop."""
        self.check_process()
        loop, deadline = asyncio.get_running_loop(), _deadline(timeout)
        while True:
            room = asyncio.Event()
            with self._io.lock:
                try:
                    return self.offer(sample, position, 0.0, on_delivery)
                except DeadlineError:
                    if time.monotonic() >= deadline:
                        raise self._no_room_after(timeout) from None
                self._io.room_waiters.append(functools.partial(_set_in, loop, room))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(room.wait(), min(1.0, deadline - time.monotonic()))

    def _check_size(self, sample: Sample, cost: int, position: Position) -> None:
        """Raise an error for a sample that can never be sent, before it takes up room."""
        limit = self._outbox.buffer_bytes
        if len(sample.data) > limit:
            raise SampleTooLargeError(
                f"sample {short(sample.id)}: {len(sample.data)} bytes exceed buffer_bytes "
                f"{limit}; raise it or send a smaller image"
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
            position = self._outbox.packer.position
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
        deadline, outbox, limit = None, self._outbox, self._outbox.buffer_bytes
        while (used := outbox.memory) and used + cost > limit:
            deadline = _deadline(timeout) if deadline is None else deadline
            self._io.full = True
            if self._on_full == "drop_oldest" and self._drop_oldest():
                continue
            if self._on_full.startswith("drop") or (outbox.spool and outbox.spool.full):
                return False
            if self._on_full == "raise":
                raise BufferFullError(
                    f"the buffer of {limit} bytes is full: {self._protocol.why()}"
                )
            self._io.wake()
            if not self._wait(deadline):
                raise self._no_room_after(timeout)
            self._check_open()
        return True

    def _no_room_after(self, timeout: float | None) -> DeadlineError:
        return DeadlineError(
            f"the buffer of {self._outbox.buffer_bytes} bytes is full after {timeout:g} s: "
            f"{self._protocol.why()}"
        )

    def _drop_oldest(self) -> bool:
        outbox = self._outbox
        if outbox.drop_oldest():
            return True
        outbox.take_in()
        if outbox.drop_oldest():
            return True
        if not len(outbox.packer):
            return False
        outbox.enqueue(outbox.packer.take())
        return outbox.drop_oldest()

    def _wait(self, deadline: float) -> bool:
        """Wait for a change. Return False if the deadline has passed."""
        self.check_thread()
        left = min(deadline - time.monotonic(), threading.TIMEOUT_MAX)
        return left > 0 and (self._io.changed.wait(left) or True)

    def check_thread(self) -> None:
        """Raise ProducerError in a callback, whose thread may not wait for the producer."""
        if threading.current_thread() is self._io.thread:
            raise ProducerError("a callback would wait for itself; call the producer elsewhere")

    def check_process(self) -> None:
        """Raise ClosedError in a forked process.

        Call this before taking the lock, because a fork may copy the lock while it is held.
        """
        if self._io.forked:
            raise ClosedError("a producer does not survive fork(); make it in this process")

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError(f"producer {self._protocol.hello.producer!r} is closed")
        fatal = self._protocol.fatal
        if fatal is not None:
            raise type(fatal)(*fatal.args)  # a new error, so that each caller has its own traceback


def _deadline(timeout: float | None) -> float:
    """Return the time of time.monotonic after `timeout` seconds; None: infinity."""
    return math.inf if timeout is None else time.monotonic() + timeout


def _set_in(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    with contextlib.suppress(RuntimeError):  # the loop may have been closed in the meantime
        loop.call_soon_threadsafe(event.set)
