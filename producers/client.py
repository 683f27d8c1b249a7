"""The client that robots, crawlers and cameras send their images with."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from producers._arguments import as_sample, curve_of
from producers._courier import Courier
from producers._dialogue import MIN_SLEEP_SECONDS, Dialogue
from producers._packer import NOT_GIVEN, Packer, cost_of, pack
from producers.errors import (
    CannotConnectError,
    ClosedError,
    DeadlineError,
    ProducerError,
    SampleTooLargeError,
)
from producers.stats import Rejection, Stats
from stream_ssl.wire import Hello, Keys, Sample, Welcome, check_name
from stream_ssl.wire.address import check_address
from stream_ssl.wire.sample import MAX_SOURCE_BYTES, check_position

AGENT = "stream-ssl producers 1"


class Producer:
    """Sends samples to a receiver, and keeps each one until it is on the receiver's disk.

    Any thread may call any method. A producer does not survive fork(): make it in the process that
    uses it.

    Args:
        address: of the receiver, as "tcp://HOST:PORT". In plain text only on loopback.
        name: of this producer, unique at the receiver, and the same after a restart. 1 to 128
            characters of letters, digits and `._/-`; with keys the key's name on the allow-list,
            or that + "/...".
        keys: this producer's own pair, or its NAME.secret.json.
        server_key: the receiver's public key: keys, a file, or 40 characters.
        source: where samples that are given as arrays come from; the name if that fits.
        packet_bytes: a packet closes before it grows beyond.
        packet_samples: a packet closes at so many samples.
        linger: seconds after which a packet leaves that is not full.
        buffer_bytes: of samples waiting or unacknowledged.
        on_full: what send() does when the buffer is full: "block", or "drop" the new sample.
        on_rejected: called, in the producer's thread, with what the receiver refuses for good. It
            must not call back into the producer.

    Raises:
        ValueError: an argument breaks its rule.
    """

    def __init__(
        self,
        address: str,
        name: str,
        keys: Keys | str | Path | None = None,
        server_key: Keys | str | Path | None = None,
        source: str | None = None,
        packet_bytes: int = 256 * 1024,
        packet_samples: int = 64,
        linger: float = 0.2,
        buffer_bytes: int = 64 * 1024 * 1024,
        on_full: Literal["block", "drop"] = "block",
        on_rejected: Callable[[Rejection], None] | None = None,
    ) -> None:
        if on_full not in ("block", "drop"):
            raise ValueError(f'on_full {on_full!r}: must be "block" or "drop"')
        if packet_bytes < 1 or packet_samples < 1 or linger < 0 or buffer_bytes < 1:
            raise ValueError(
                f"packet_bytes {packet_bytes}, packet_samples {packet_samples}, linger {linger}, "
                f"buffer_bytes {buffer_bytes}: must be positive (linger may be 0)"
            )
        self.address, self.name = check_address(address), check_name(name)
        self.source = source or name[:MAX_SOURCE_BYTES]
        curve = curve_of(address, keys, server_key)
        self._buffer_bytes, self._drop = buffer_bytes, on_full == "drop"
        self._epoch = time.time_ns()
        self._numbers = itertools.count(1)
        self._pid, self._closed = os.getpid(), False
        self._packer = Packer(packet_bytes, packet_samples)
        hello = Hello(name, self._epoch, first=1, agent=AGENT)
        self._dialogue = Dialogue(hello, self._packer, linger, f"still connecting to {address}")
        self._changed = threading.Condition()
        self._courier = Courier(address, curve, self._dialogue, self._changed, on_rejected)
        self._courier.thread.start()

    def connect(self, timeout: float = 10.0) -> Welcome:
        """Waits until the receiver has said WELCOME, and returns it.

        `welcome.position` is where a source goes on after a restart; None: at its beginning.

        Raises:
            CannotConnectError: not in time; the message says why.
            RefusedError: the receiver refuses this producer.
        """
        deadline = time.monotonic() + timeout
        with self._changed:
            self._check_usable()
            while self._dialogue.state != "active":
                self._check_usable()
                if not self._wait(deadline):
                    raise CannotConnectError(
                        f"no connection within {timeout:g} s: {self._dialogue.why()}"
                    )
            welcome = self._dialogue.welcome
        assert welcome is not None
        return welcome

    def send(
        self,
        image: NDArray[np.uint8] | Sample | bytes,
        id: str | None = None,  # noqa: A002
        label: int | None = None,
        *,
        position: Any = NOT_GIVEN,
        timeout: float | None = None,
        **fields: Any,
    ) -> bool:
        """Takes one sample; False: dropped, as the buffer is full.

        Args:
            image: a Sample, or uint8 pixels H x W or H x W x C, which are copied, or an encoded
                file with codec="jpeg", "png" or "webp".
            id: names the image within its source; the same image keeps its id. None: a new one.
            label: class, where there is one.
            position: the source's position after this sample: what WELCOME tells a restarted
                producer once the sample is on disk.
            timeout: seconds to wait for room when on_full is "block"; None: as long as it takes.
            **fields: more of Sample's.

        Raises:
            ValueError: the sample breaks a rule.
            SampleTooLargeError: no packet, or the buffer, can hold it.
            DeadlineError: no room in time.
            RefusedError: the receiver refuses this producer.
        """
        if isinstance(image, Sample):
            if id is not None or label is not None or fields:
                raise ValueError("a Sample carries its own id, label and fields; pass it alone")
        elif id is None:
            id = f"{self._epoch:x}-{next(self._numbers)}"  # noqa: A001
        sample = as_sample(image, id, label, {"source": self.source, **fields})
        if position is not NOT_GIVEN:
            check_position(position)
        cost = cost_of(sample)
        with self._changed:
            self._check_usable()
            self._check_size(sample, cost, position)
            if not self._make_room(cost, timeout):
                self._dialogue.stats.dropped.add(1, len(sample.data))
                return False
            self._dialogue.stats.accepted.add(1, len(sample.data))
            for packet in self._packer.add(sample, cost, position, time.monotonic()):
                self._dialogue.enqueue(packet)
                self._courier.wake()
            if self._dialogue.linger < MIN_SLEEP_SECONDS:  # else it looks by itself in time
                self._courier.wake()
        return True

    def flush(self, timeout: float | None = 30.0) -> None:
        """Waits until all that was sent before is on the receiver's disk, or rejected.

        Raises:
            DeadlineError: not in time; the message says why.
            RefusedError: the receiver refuses this producer.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        dialogue = self._dialogue
        with self._changed:
            self._check_usable()
            target = dialogue.stats.accepted.samples
            dialogue.flush_to = max(dialogue.flush_to, target)
            self._courier.wake()
            while dialogue.done < target:
                self._check_usable()
                if not self._wait(deadline):
                    raise DeadlineError(
                        f"{target - dialogue.done} of {target} samples are not acknowledged after "
                        f"{timeout:g} s: {dialogue.why()}"
                    )

    def close(self, timeout: float | None = 30.0) -> None:
        """Flushes, says BYE and frees everything; a second call does nothing.

        Raises:
            DeadlineError: not flushed in time. The producer is closed all the same, and samples
                that were not acknowledged are lost.
            RefusedError: the receiver refuses this producer, and samples are unacknowledged.
        """
        if self._closed or os.getpid() != self._pid:
            self._closed = True
            return
        try:
            if self._dialogue.done < self._dialogue.stats.accepted.samples:
                self.flush(timeout)
        finally:
            with self._changed:
                self._closed = True
                self._changed.notify_all()
            self._courier.stop()

    @property
    def stats(self) -> Stats:
        """A copy of the counters."""
        with self._changed:
            stats = deepcopy(self._dialogue.stats)
            window = self._dialogue.window
            stats.buffered.add(window.samples + len(self._packer), window.size + self._packer.size)
        return stats

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
        try:  # the error that ended the block matters more than what the last samples met
            self.close(timeout=2.0)
        except ProducerError as late:
            assert error is not None
            error.add_note(f"closing the producer: {late}")

    def _check_size(self, sample: Sample, cost: int, position: Any) -> None:
        """Refuses what can never travel, before it takes up room."""
        if len(sample.data) > self._buffer_bytes:
            raise SampleTooLargeError(
                f"sample {sample.id!r}: {len(sample.data)} bytes exceed buffer_bytes "
                f"{self._buffer_bytes}; raise it or send a smaller image"
            )
        welcome = self._dialogue.welcome
        if welcome is not None and sample.codec not in welcome.codecs:
            raise ValueError(
                f"sample {sample.id!r}: codec {sample.codec!r}: the receiver takes "
                f"{', '.join(welcome.codecs)}"
            )
        if welcome is None or cost + 4096 <= welcome.max_packet:
            return
        if position is NOT_GIVEN:
            position = self._packer.position
        size = pack([sample], (position,)).size
        if size > welcome.max_packet:
            raise SampleTooLargeError(
                f"sample {sample.id!r}: {size} bytes in a packet, the receiver takes at most "
                f"{welcome.max_packet}; send a smaller or compressed image, or raise its max_packet"
            )

    def _make_room(self, cost: int, timeout: float | None) -> bool:
        """Waits until the buffer takes `cost` more bytes; False: it does not, and may drop."""
        deadline = None if timeout is None else time.monotonic() + timeout
        window = self._dialogue.window
        while (used := window.size + self._packer.size) and used + cost > self._buffer_bytes:
            if self._drop:
                return False
            if not self._wait(deadline):
                raise DeadlineError(
                    f"the buffer of {self._buffer_bytes} bytes is full after {timeout:g} s: "
                    f"{self._dialogue.why()}"
                )
            self._check_usable()
        return True

    def _wait(self, deadline: float | None) -> bool:
        """Waits for a change; False: the deadline has passed."""
        if threading.current_thread() is self._courier.thread:
            raise ProducerError("on_rejected would wait for itself; call the producer elsewhere")
        if deadline is None:
            self._changed.wait()
            return True
        left = deadline - time.monotonic()
        return left > 0 and (self._changed.wait(left) or True)

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise ClosedError("a producer does not survive fork(); make it in this process")
        if self._closed:
            raise ClosedError(f"producer {self.name!r} is closed")
        fatal = self._dialogue.fatal
        if fatal is not None:
            raise type(fatal)(*fatal.args)  # afresh: each caller's has its own traceback
