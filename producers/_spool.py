"""A bounded folder of packets that wait for the network, across reboots and power cuts.

Samples are numbered from the folder's first sample. A packet is identified by the number of its
first sample.

    first            next               end
      |  in the window  |  on disk only  |

Packets are records in segment files (`_spool_segments`, `_spool_records`). A mark, also a record,
holds the sequence that each packet was about to be sent with. After a restart, the marks and
WELCOME's `resume` show which packets the receiver has, so no packet is stored twice. A copy of the
newest mark (`_spool_marks`) is used if that record is damaged, or if the disk had no room for it.

A start skips damaged bytes, and the next whole record shows how many samples they held. If no whole
record follows, a power cut has torn the end, which is cut off. A segment is deleted once all of its
packets are acknowledged.
"""

from __future__ import annotations

import errno
import itertools
import json
import logging
import os
import secrets
import time
import weakref
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stream_ssl import durable
from stream_ssl.bounded_files import open_file, read_bytes, read_map
from stream_ssl.producers._packer import Packet
from stream_ssl.producers._spool_marks import COPY_FILES, MarkCopies
from stream_ssl.producers._spool_records import (
    MARK,
    SpooledPacket,
    pack_record,
    packet_record,
    read_packet,
)
from stream_ssl.producers._spool_segments import OWNER, Segments
from stream_ssl.wire import Position

RETRY_SECONDS = 5.0  # pause after a failed write or read
_FULL = (errno.ENOSPC, errno.EDQUOT)
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # as on some network file systems
_SPREAD = 1 << 30  # a second, in nanoseconds

logger = logging.getLogger("stream_ssl.producers")

Part = tuple[int, int]
"""The number of a packet's first sample, and the number of its samples."""


class Spool:
    """An ordered queue of packets on disk. It is not thread-safe.

    Args:
        folder: the folder, which belongs to one producer. It is created if it does not exist.
        producer: the producer's name. Sequences belong to this name.
        max_bytes: maximum bytes of all segments. A packet that would exceed them is not written.

    Raises:
        ValueError: the folder belongs to another producer, or another process uses it.
        OSError: the folder cannot be created or read, or a new folder's disk is full.
    """

    def __init__(self, folder: Path, producer: str, max_bytes: int) -> None:
        self.folder, self.max_bytes = folder, max_bytes
        self.first = self.next = self.end = 0
        self.position: Position = None  # the source's position after the last packet
        self.cuts: deque[Part] = deque()  # the next packets, as they were cut when last sent
        self.full = False  # also while the disk cannot be written
        self.lost = 0  # samples that became unreadable
        self.receiver = ""  # the address of the receiver that marks are written for
        self.marked_for: str | None = None  # the receiver of an earlier run's mark, while valid
        self._marks = 0  # the number of the newest mark
        self._marked = False  # whether an earlier run's mark gives the sequence of the first cut
        self._sequence = 1
        self._records: deque[SpooledPacket] = deque()
        self._total = 0  # samples of all records
        self._retry_at = self._read_at = 0.0  # before, nothing is written, or read
        import fcntl  # imported here, because Windows lacks it and only the spool needs it

        _prepare(folder)
        self._lock = _opened(folder / "lock")
        # Whoever makes a spool may fail before it can close it.
        self._release = weakref.finalize(self, os.close, self._lock)
        self._release.atexit = False  # the last packets are written later
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.epoch = _next_epoch(folder, producer)
            self._copies = MarkCopies(folder)
            self._segments = Segments(folder, max_bytes)
            self._read_all()
        except BaseException as error:
            self._release()
            if isinstance(error, BlockingIOError):
                raise ValueError(
                    f"spool {folder}: another producer uses it; close that producer, or give each "
                    "its own folder"
                ) from None
            if isinstance(error, OSError) and error.errno in _NO_LOCKS:
                raise ValueError(
                    f"spool {folder} cannot be locked ({error.strerror}): choose a folder on a "
                    "local disk"
                ) from None
            raise

    @property
    def stored_bytes(self) -> int:
        """The bytes of all segments."""
        return self._segments.bytes

    @property
    def unloaded(self) -> bool:
        """Whether some packets are on disk only."""
        return self.next < self.end

    @property
    def samples(self) -> int:
        """The number of samples that are not acknowledged yet."""
        acked = self.first - self._records[0].number if self._records else 0
        return self._total - max(0, acked)

    def append(
        self, packets: Sequence[Packet], loaded: int, mark: tuple[int, list[Part]] | None
    ) -> int:
        """Write packets to disk in order and number them. Return how many were written.

        Args:
            packets: the packets. If `loaded` is above 0, no packet may be on disk only.
            loaded: how many of the first packets are in the window.
            mark: the arguments of `mark`, which is written before the packets. None: no mark.
        """
        if time.monotonic() < self._retry_at:
            return 0
        blobs = [] if mark is None else [self._mark_record(*mark)]
        size, number = sum(map(len, blobs)), self.end
        places = list[tuple[int, int, int]]()
        for packet in packets:
            blob = packet_record(number, packet)
            if self.stored_bytes + size + len(blob) > self.max_bytes:
                break
            places.append((number, packet.count, len(blob)))
            blobs.append(blob)
            size += len(blob)
            number += packet.count
        self.full = len(places) < len(packets)
        if not places or not self._write(b"".join(blobs), places):
            return 0
        if mark is not None:
            self._copies.write(blobs[0])
        for packet, (start, _, _) in zip(packets, places, strict=False):
            packet.spooled = start
            self.position = packet.data.position
        self.end = number
        if loaded:
            last = places[min(loaded, len(places)) - 1]
            self.next = last[0] + last[1]
        return len(places)

    def mark(self, sequence: int, parts: list[Part]) -> bool:
        """Write the sequences of packets to disk. Return False if the disk cannot be written.

        Args:
            sequence: the sequence of the first packet.
            parts: the packets, in the order of their sequences.
        """
        record = self._mark_record(sequence, parts)
        if not self._write(record, []):
            return self._copies.write_reserve(record, self._marks)
        self._copies.write(record)
        return True

    def forget_mark(self) -> None:
        """Discard the sequences of an earlier receiver. Packets stay cut as they were."""
        self._marked, self.marked_for = False, None

    def resume(self, durable_through: int) -> int:
        """Remove the samples that the receiver of the mark has, according to its first WELCOME.

        Return how many samples need not be sent: the removed samples, and samples that the
        receiver rejected in earlier runs.

        Args:
            durable_through: WELCOME's `resume`, the last sequence on the receiver's disk.
        """
        before, rejected = self.samples, 0
        if self._marked:
            self.skip(durable_through - self._sequence + 1)
            if self.cuts:
                self.ack(self.cuts[0][0])
            rejected = sum(after[0] - sum(part) for part, after in itertools.pairwise(self.cuts))
        return before - self.samples + rejected

    def load(self) -> Packet | None:
        """Return the next packet that is on disk only, or None if there is none.

        The packet is cut as it was when it was last sent. Damaged records are skipped and counted
        in `lost`. If this process cannot read now, such as with too many open files, the result is
        None, too.
        """
        if time.monotonic() < self._read_at:
            return None
        for place in self._records:
            end, lost = place.number + place.count, 0
            if self.next >= end:
                continue
            try:
                packet = read_packet(place)
            except OSError as error:
                self._read_at = time.monotonic() + RETRY_SECONDS
                logger.error("spool %s: %s; it is tried again", place.segment, error.strerror)
                return None
            while self.next < end:
                number, count = self.cuts[0] if self.cuts else (self.next, end - self.next)
                if number >= end:  # the receiver rejected the rest of this record
                    break
                if self.cuts:
                    self.cuts.popleft()
                self.next = number + count
                if packet is not None:
                    return packet.part(number - place.number, self.next - place.number)
                lost += count
            if lost:
                logger.error("spool %s: %d samples are damaged and lost", place.segment, lost)
                self.lost += lost
        return None

    def unload(self, part: Part) -> None:
        """Put a loaded packet back: it is on disk only again, and load() cuts it the same way."""
        self.next = part[0]
        self.cuts.appendleft(part)

    def skip(self, count: int) -> list[Part]:
        """Remove up to `count` of the packets in `cuts`, which the receiver has. Return them."""
        known = [self.cuts.popleft() for _ in range(min(max(0, count), len(self.cuts)))]
        if known:
            self.ack(sum(known[-1]))
        return known

    def ack(self, number: int) -> None:
        """Remove all samples before `number`, which are acknowledged or rejected."""
        self.first = max(self.first, number)
        self.next = max(self.next, self.first)
        while self._records and self._records[0].number + self._records[0].count <= self.first:
            self._total -= self._records.popleft().count
        if not self._records and self.first == self.end:
            self._copies.forget()
            self._segments.clear()
        self._segments.keep_from(self._records[0].segment if self._records else None)
        self.full = self.full and self.stored_bytes > self.max_bytes // 2

    def forget_lock(self) -> None:
        """Close a forked process's copy of the lock, which would hold the folder for that process.

        The lock of the parent process stays.
        """
        self._release()

    def close(self) -> None:
        """Release the lock. Packets on disk stay."""
        import fcntl

        if not self._records:
            self.ack(self.end)  # delete what the disk refused to delete before
        fcntl.flock(self._lock, fcntl.LOCK_UN)  # closing is not enough after a fork
        self._release()

    def _read_all(self) -> None:
        """Find the packets, and apply the last mark."""
        mark: dict[str, Any] = {"sequence": 1, "parts": []}
        self.end = self._segments.first_number
        for number, path, offset, found in self._segments.read():
            self._lose(number, path)
            if found is None:
                continue
            if found.kind == MARK:
                mark = found.info
                continue
            count = found.info["count"]
            self._records.append(SpooledPacket(number, count, path, offset))
            self.end += count
            self._total += count
            self.position = found.info["positions"][-1]
        self.first = self.next = self._records[0].number if self._records else self.end
        if not self._segments.paths:  # new packets begin at number 0 again
            self._copies.forget()
        copy = self._copies.newest()
        lost = copy.get("order", 0) > mark.get("order", 0)
        if lost:
            text = "spool %s: no segment holds its newest mark, and the copy is used"
            logger.warning(text, self.folder)
            mark = copy
        self._marks = mark.get("order", 0)
        self._sequence, self.marked_for = mark["sequence"], mark.get("receiver")
        parts = [(first, count) for first, count in mark["parts"]]
        while parts and self._records and sum(parts[0]) <= self.first:  # its segment was deleted
            parts.pop(0)
            self._sequence += 1
        if parts:  # packets before the first part are acknowledged; the last parts may be torn off
            self.ack(min(parts[0][0], self.end))
        self.cuts = deque((number, count) for number, count in parts if number + count <= self.end)
        self._marked = bool(self.cuts)
        self.marked_for = self.receiver = (self.marked_for if self._marked else None) or ""
        if (len(self.cuts) < len(parts) or lost) and self._records:
            # New packets will get the numbers of the packets that were torn off.
            self.mark(self._sequence, list(self.cuts))

    def _lose(self, number: int, segment: Path) -> None:
        """Record that the samples from `end` to `number` are damaged. `load` counts them."""
        if (count := number - self.end) > 0:
            self._records.append(SpooledPacket(self.end, count, segment, None))
            self.end = number
            self._total += count

    def _write(self, data: bytes, records: Sequence[tuple[int, int, int]]) -> bool:
        """Write records to disk. Return False if this fails.

        Args:
            data: the bytes of all records, marks first.
            records: number, count and size of each packet record.
        """
        try:
            path, offset = self._segments.append(data, self.end)
        except OSError as error:
            self._retry_at, self.full = time.monotonic() + RETRY_SECONDS, True
            logger.error("spool %s: %s; it is tried again", self.folder, error.strerror)
            return False
        offset -= sum(size for _, _, size in records)
        for number, count, size in records:
            self._records.append(SpooledPacket(number, count, path, offset))
            self._total += count
            offset += size
        return True

    def _mark_record(self, sequence: int, parts: list[Part]) -> bytes:
        self._marks += 1
        info = {
            "number": self.end,
            "sequence": sequence,
            "parts": parts,
            "receiver": self.receiver,
            "order": self._marks,  # development builds did not write it
        }
        return pack_record(MARK, info)


def _prepare(folder: Path) -> None:
    """Create the folder of a spool, or check that it holds nothing else."""
    try:
        durable.make_folder(folder)
        if (folder / OWNER).exists() or (folder / "lock").is_symlink():  # `open_file` refuses it
            return
        names = sorted(path.name for path in folder.iterdir())
    except OSError as error:
        if error.errno is None:  # it says already which link to mend
            raise
        why = "is a file" if folder.is_file() else f"cannot be made or read: {error.strerror}"
        raise OSError(error.errno, f"spool {folder}: {why}; choose another folder") from None
    others = [name for name in names if not _is_ours(name)]
    if others:
        count = f" and {len(others) - 1} more" if len(others) > 1 else ""
        raise ValueError(
            f"spool {folder}: holds {others[0]!r}{count}, which no spool has written; choose an "
            "empty or a new folder"
        )


def _opened(path: Path) -> int:
    """Open the file that is locked, and return its descriptor."""
    try:
        return open_file(path, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise OSError(
            error.errno,
            f"spool {path.parent}: {path.name} cannot be written: {error.strerror}; let this user "
            "write the folder, or choose another",
        ) from None


def _is_ours(name: str) -> bool:
    """Return whether a spool writes files of this name, or a disk has it from the beginning."""
    if name.startswith(".") or name.endswith((".spool", ".damaged")):
        return True
    return name in ("lost+found", "lock", OWNER, f"{OWNER}.part", *COPY_FILES)


def _is_blank(path: Path) -> bool:
    """Return whether a power cut has left a file without its content: empty, or of zero bytes."""
    try:
        blank = not read_bytes(path).strip(b"\0")
    except (OSError, ValueError):
        return False
    if blank:
        logger.error(
            "spool %s: has lost its content, as after a power cut. It is written again, and the "
            "samples of the spool are sent",
            path,
        )
    return blank


def _next_epoch(folder: Path, producer: str) -> int:
    """Return an epoch above the epochs of all earlier runs, even if the clock was set back.

    If the disk is full, the spool keeps the epoch before, and only this process knows the new one.
    """
    path, epoch, known = folder / OWNER, time.time_ns(), None
    if path.exists() and not _is_blank(path):
        try:
            known = read_map(path)
            owner, last = known["producer"], known["epoch"]
            if type(last) is not int or not 0 <= last < 1 << 63:
                raise ValueError(f"{path}: epoch is {last!r:.80}")
        except (ValueError, KeyError) as error:
            raise ValueError(
                f"spool {path}: is no spool's ({error}); choose another folder. If this folder is "
                f"the producer's and only {path.name} is damaged, delete that file: the samples "
                "of the spool are sent"
            ) from None
        if owner != producer:
            raise ValueError(
                f"spool {folder}: belongs to producer {owner!r}, not {producer!r}; "
                "use that name, or another folder"
            )
        epoch = max(epoch, last + 1)
    try:
        durable.write(path, json.dumps({"producer": producer, "epoch": epoch}) + "\n", 0o600)
    except OSError as error:
        text = f"spool {path}: {error.strerror}"
        if known is None or error.errno not in _FULL:
            remedy = (
                "free space there" if error.errno in _FULL else "let this user write the folder"
            )
            raise OSError(error.errno, f"{text}; {remedy}, or choose another") from None
        logger.error("%s; the samples in it are sent all the same. Free space on its disk", text)
        # The next run may find the same epoch in the file and the same wrong clock.
        epoch += 1 + secrets.randbelow(_SPREAD)
    return epoch
