"""A segment of the journal: an LMDB environment on disk, and the encoding of the records in it.

A segment is a folder `segment-<first position>` with LMDB's `data.mdb` and `lock.mdb`. It has three
databases: `meta` (format version, previous segment), `records` (position, 8 bytes big-endian ->
record) and `producers` (name -> `ProducerState`, for all producers so far).
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import struct
import threading
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import lmdb
import msgpack

from stream_ssl.bounded_files import read_text
from stream_ssl.durable import UNREAD, entries, move, sync
from stream_ssl.wire import Data, Position

# Format 3: producer states without a checksum; 2: also without `active`; 1: also without `written`.
FORMAT = 4
PAGE = 4096  # bytes of a page of LMDB
MAX_RECORDS = 1 << 20  # of a segment; bounds the positions that a lost segment can have used
RECORD_MAGIC = b"SSJ1"

ID_FILE = "id"
_PREFIX = "segment-"
_NAME = re.compile(f"{_PREFIX}0[0-9]{{19}}")  # as of `segment_path`; positions are below 2^63
_NEW, _OLD = ".new-", ".old-"  # prefixes for a segment being created, and one being deleted
_LOCK_BYTES = 8192  # LMDB's size for 126 readers
_KEY = struct.Struct(">Q")
# magic, CRC-32 of the rest of the head and the name, position, total (see Head), sequence,
# received, CRC-32 of DATA, lengths of name, header and payload
_HEAD = struct.Struct(">4sIQQQdIHII")
_CHECKED_FROM = 8
_CRC = struct.Struct(">I")  # ends a producer's state


class NewerFormat(Exception):
    """An error for a journal that a later version of this program has written."""


class Damaged(Exception):
    """An error for bytes that do not match their checksum, or a file that LMDB cannot open."""


# -- the bytes of a record


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """A packet to append to the journal.

    Args:
        producer: the name of the producer.
        sequence: the number of the packet.
        resume_token: the source's resume token after the packet; DATA calls it `position`.
        received: the time when the packet was received, in seconds since the Unix epoch.
        header: the header of the packet. None: write no record and only advance the producer's
            sequence, because the packet was permanently rejected.
        payload: the payload of the packet.
        checksum: the checksum of DATA; None: compute it.
    """

    producer: str
    sequence: int
    resume_token: Position = None
    received: float = 0.0
    header: bytes | memoryview | None = None
    payload: bytes | memoryview = b""
    checksum: int | None = None


@dataclass(frozen=True, slots=True)
class Record:
    """A packet that was read back. Positions count from 1; a gap means that records were lost."""

    position: int
    producer: str
    sequence: int
    received: float  # seconds since the Unix epoch
    header: bytes
    payload: bytes


@dataclass(frozen=True, slots=True)
class ProducerState:
    """The last durable sequence of a producer, and the source's resume token after it."""

    sequence: int = 0
    resume_token: Position = None
    written: float = field(default=0.0, compare=False)  # seconds since the Unix epoch
    # Total seconds for which writers had the journal open until then; unlike `written`, no jumps.
    active: float = field(default=0.0, compare=False)

    def pack(self, name: bytes) -> bytes:
        """Return the value for the database `producers`, with a checksum, also of the name."""
        packed = msgpack.packb((self.sequence, self.resume_token, self.written, self.active))
        return b"".join((packed, _CRC.pack(zlib.crc32(packed, zlib.crc32(name)))))

    @classmethod
    def unpack(cls, name: bytes, value: bytes, version: int) -> ProducerState:
        """Return the state in a value of the database `producers` of a segment's format.

        Raises:
            ValueError, TypeError: the value is damaged.
        """
        if version > 3:
            value, crc = value[: -_CRC.size], value[-_CRC.size :]
            if crc != _CRC.pack(zlib.crc32(value, zlib.crc32(name))):
                raise ValueError("its checksum does not match")
        return cls(*msgpack.unpackb(value, strict_map_key=False))


@dataclass(frozen=True, slots=True)
class Head:
    """The verified fixed part of a record, with the name of its producer."""

    position: int
    total: int  # bytes of header and payload journalled so far, this record included
    sequence: int
    received: float
    checksum: int
    producer: str
    header_at: int  # this and the following fields are offsets in the packed record
    payload_at: int
    end: int


def key_of(position: int) -> bytes:
    """Return the key of the record at a position."""
    return _KEY.pack(position)


def position_of(key: bytes | memoryview) -> int:
    """Return the position that a key encodes."""
    return int(_KEY.unpack(key)[0])


def pack_record(position: int, total: int, entry: JournalEntry) -> bytes:
    """Return the packed record of an entry; `total` is as in Head.

    The record keeps the checksum of DATA, so that the checksum covers the whole way from the
    producer to the learner.
    """
    header, payload, checksum = entry.header, entry.payload, entry.checksum
    assert header is not None
    if checksum is None:
        checksum = Data(entry.sequence, header, payload).checksum()
    name = entry.producer.encode()
    lengths = (len(name), len(header), len(payload))
    fields = (position, total, entry.sequence, entry.received, checksum, *lengths)
    head = _HEAD.pack(RECORD_MAGIC, 0, *fields)
    crc = zlib.crc32(name, zlib.crc32(head[_CHECKED_FROM:]))
    return b"".join((_HEAD.pack(RECORD_MAGIC, crc, *fields), name, header, payload))


def unpack_head(value: memoryview) -> Head:
    """Return the head of a packed record.

    Raises:
        Damaged: the head does not match its checksum.
    """
    if len(value) < _HEAD.size:
        raise Damaged(f"{len(value)} bytes are no record")
    magic, crc, position, total, sequence, received, checksum, n_name, n_header, n_payload = (
        _HEAD.unpack_from(value)
    )
    header_at = _HEAD.size + n_name
    checked = value[_CHECKED_FROM:header_at]
    if magic != RECORD_MAGIC or zlib.crc32(checked) != crc:
        raise Damaged("head does not match its checksum")
    name = bytes(value[_HEAD.size : header_at]).decode()
    payload_at = header_at + n_header
    end = payload_at + n_payload
    return Head(position, total, sequence, received, checksum, name, header_at, payload_at, end)


def unpack_record(value: memoryview) -> Record:
    """Return the record at the beginning of `value`.

    Raises:
        Damaged: the head, the header or the payload does not match its checksum.
    """
    head = unpack_head(value)
    if head.end > len(value):
        raise Damaged(f"record {head.position} is cut off")
    header, payload = value[head.header_at : head.payload_at], value[head.payload_at : head.end]
    if Data(head.sequence, header, payload).checksum() != head.checksum:
        raise Damaged(f"record {head.position} does not match its checksum")
    return Record(
        head.position, head.producer, head.sequence, head.received, bytes(header), bytes(payload)
    )


def entry_bytes(entry: JournalEntry) -> int:
    """Return the most bytes that an entry takes on disk."""
    if entry.header is None:
        return 0
    state = ProducerState(entry.sequence, entry.resume_token)
    length = 128 + len(entry.producer) + len(entry.header) + len(entry.payload)
    return disk_bytes(length) + state_bytes(entry.producer, state)


def state_bytes(name: str, state: ProducerState) -> int:
    """Return the most bytes that the state of a producer takes in each segment."""
    return disk_bytes(len(name) + len(state.pack(name.encode())))


def disk_bytes(length: int) -> int:
    """Return the most bytes that a value takes in LMDB.

    A short value shares a page of the tree with others; a long value takes whole pages.
    """
    if length < PAGE // 2 - 64:
        return 2 * length + 64  # twice the length, because a page of the tree may be half empty
    return -(-(length + 16) // PAGE) * PAGE + 64


# -- segments in the journal's folder


def journal_id(path: Path) -> str | None:
    """Return the id of the journal in a folder, or None if it is missing or damaged."""
    try:
        first, second = read_text(path / ID_FILE, 4096).split()
    except (OSError, ValueError):
        return None
    return first if first == second else None  # stored twice, to detect a flipped bit


def list_segments(folder: Path, coming: bool = False) -> list[tuple[int, Path]]:
    """Return (first position, folder) of each segment, the oldest first.

    Args:
        folder: the folder of the journal.
        coming: include segments whose folder does not exist yet; see `is_coming`.
    """
    try:
        names = {child.name for child in folder.iterdir()}
    except FileNotFoundError:
        return []
    if coming:
        names |= {name.removeprefix(_NEW) for name in names if name.startswith(_NEW)}
    found = filter(_NAME.fullmatch, names)
    return sorted((int(name.removeprefix(_PREFIX)), folder / name) for name in found)


def disk_room(folder: Path) -> int:
    """Return the bytes available to segments in a folder: their present size plus free space."""
    own = sum(file_bytes(path) for _, path in list_segments(folder))
    return own + shutil.disk_usage(folder).free


def is_coming(path: Path) -> bool:
    """Return whether the writer is creating or replacing this segment."""
    return path.with_name(f"{_NEW}{path.name}").exists()


def segment_path(folder: Path, first: int) -> Path:
    """Return the folder of the segment whose first position is `first`."""
    return folder / f"{_PREFIX}{first:020d}"


def file_bytes(path: Path) -> int:
    """Return the bytes of a segment's data file, or 0 if it does not exist."""
    try:
        return (path / "data.mdb").stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        return 0


def create_segment(
    path: Path,
    states: Mapping[str, ProducerState],
    map_size: int,
    records: Mapping[int, bytes] | None = None,
    follows: int = 0,
) -> Path:
    """Create a segment under a temporary name, which `publish_segment` renames; return its path.

    Args:
        path: the final path of the segment.
        states: the states of all producers so far.
        map_size: most bytes that the segment can have.
        records: position -> packed record, in order; the first records of the segment.
        follows: the first position of the previous segment; 0: none.

    Raises:
        OSError, lmdb.Error: the segment cannot be written.
    """
    fresh = path.with_name(f"{_NEW}{path.name}")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(mode=0o700)
    try:
        # LMDB creates this file sparse and maps it: on a full disk, a write would raise SIGBUS.
        (fresh / "lock.mdb").write_bytes(bytes(_LOCK_BYTES))
        with lmdb.open(
            str(fresh), max_dbs=3, map_size=map_size, mode=0o600, readahead=False
        ) as env:
            meta, producers = env.open_db(b"meta"), env.open_db(b"producers")
            database = env.open_db(b"records")
            with env.begin(write=True) as txn:
                txn.put(b"format", str(FORMAT).encode(), db=meta)
                txn.put(b"follows", str(follows).encode(), db=meta)
                for name, state in states.items():
                    key = name.encode()
                    txn.put(key, state.pack(key), db=producers)
                for position, value in (records or {}).items():
                    txn.put(key_of(position), value, db=database, append=True)
        sync(fresh)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)  # otherwise readers would wait for it
        raise
    return fresh


def publish_segment(fresh: Path, path: Path) -> Path:
    """Rename a new segment to its final path, replacing an empty or damaged segment there.

    After a crash between the two renames, `finish_interrupted` completes the exchange and deletes
    the old segment. Until then a reader waits.

    Returns:
        The path that the old segment has now, if there was one.
    """
    gone = path.with_name(f"{_OLD}{path.name}")
    with contextlib.suppress(FileNotFoundError):
        move(path, gone)
    fresh.rename(path)
    sync(path.parent)
    return gone


def delete_segment(path: Path) -> None:
    """Delete a segment, so that no reader finds it half deleted. It may be missing."""
    gone = path.with_name(f"{_OLD}{path.name}")
    for step in (_remove, partial(move, path), _remove):  # first remove the rest of an earlier try
        with contextlib.suppress(FileNotFoundError):
            step(gone)


def finish_interrupted(folder: Path) -> None:
    """Complete or undo the creations, exchanges and deletions that a crash interrupted."""
    for gone in entries(folder, f"{_OLD}{_PREFIX}*"):
        path = folder / gone.name.removeprefix(_OLD)
        fresh = folder / f"{_NEW}{path.name}"
        if path.is_dir() and not file_bytes(path):
            _remove(path)  # `move` was interrupted
        if fresh.exists() and not path.exists():
            fresh.rename(path)
            sync(folder)
        _remove(gone)
    for fresh in entries(folder, f"{_NEW}{_PREFIX}*"):
        _remove(fresh)


def _remove(path: Path) -> None:
    """Delete a segment. If the path is a link or a file, delete only the link or the file."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


# -- an open segment


@dataclass(slots=True)
class _Open:
    env: Any
    records: Any
    producers: Any
    version: int
    follows: int
    users: int = 0


class Segment:
    """An open segment; the writer and readers of one process share its LMDB environment.

    LMDB does not allow a process to open an environment twice, but a test or a notebook has the
    writer and a reader in one process. Open environments are therefore shared, with a use count.

    Args:
        path: the folder of the segment.
        write: open for writing; only for the writer, before the segment is published.

    Attributes:
        follows: the first position of the previous segment when this segment began; 0: none or
            unknown.

    Raises:
        Damaged: the files are not a valid segment.
        NewerFormat: a later version wrote the segment.
        OSError: the files cannot be opened, which says nothing about their content.
    """

    _shared: dict[tuple[int, int], _Open] = {}  # noqa: RUF012 - by device and inode
    _lock = threading.Lock()

    def __init__(self, path: Path, write: bool = False) -> None:
        self.path = path
        self.key = identity(path)
        with self._lock:
            shared = self._shared.get(self.key)
            if shared is None:
                shared = self._shared[self.key] = _open(path, write)
            shared.users += 1
        self.env: Any = shared.env
        self.records, self.producers = shared.records, shared.producers
        self._version, self.follows = shared.version, shared.follows

    def bounds(self) -> tuple[int, int] | None:
        """Return the first and last position, or None if there are no records."""
        with self.env.begin(db=self.records) as txn, txn.cursor() as cursor:
            if not cursor.first():
                return None
            first = position_of(cursor.key())
            cursor.last()
            return first, position_of(cursor.key())

    def states(self) -> dict[str, ProducerState]:
        """Return the states of the producers after the last commit.

        Raises:
            Damaged: a state is damaged.
        """
        with self.env.begin(db=self.producers) as txn, txn.cursor() as cursor:
            try:
                return {
                    name.decode(): ProducerState.unpack(name, value, self._version)
                    for name, value in cursor
                }
            except (ValueError, TypeError) as error:
                raise Damaged(f"{self.path}: the state of a producer is damaged: {error}") from None

    def newest_total(self) -> int:
        """Return `Head.total` of the newest record.

        Raises:
            Damaged: there is no record, or its head is damaged.
        """
        with self.env.begin(db=self.records, buffers=True) as txn, txn.cursor() as cursor:
            if not cursor.last():
                raise Damaged(f"{self.path} holds no record")
            return unpack_head(cursor.value()).total

    def total_before(self, position: int) -> int:
        """Return the bytes of header and payload journalled before the record at a position.

        If the record is gone, the next record in the segment counts instead.

        Raises:
            Damaged: there is no such record, or its head is damaged.
        """
        with self.env.begin(db=self.records, buffers=True) as txn, txn.cursor() as cursor:
            if not cursor.set_range(key_of(position)):
                raise Damaged(f"{self.path} has no record from position {position} on")
            head = unpack_head(cursor.value())
            return head.total - (head.end - head.header_at)

    def used(self) -> int:
        """Return the bytes of all pages that were ever used."""
        return (int(self.env.info()["last_pgno"]) + 1) * PAGE

    def is_cut_off(self) -> bool:
        """Return whether the file was truncated after it was opened.

        Reading a missing page would kill the process.
        """
        return file_bytes(self.path) < 2 * PAGE or self.used() > file_bytes(self.path)

    def close(self) -> None:
        """Release the environment; the last user in the process closes it."""
        with self._lock:
            if self.env is None:
                return
            self.env = None
            shared = self._shared[self.key]
            shared.users -= 1
            if not shared.users:
                del self._shared[self.key]
                shared.env.close()


def identity(path: Path) -> tuple[int, int]:
    """Return the device and inode of a segment's data file.

    Raises:
        Damaged: the data file does not exist.
    """
    try:
        stat = (path / "data.mdb").stat()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise Damaged(f"{path} has no data file") from error
    return stat.st_dev, stat.st_ino


def _open(path: Path, write: bool) -> _Open:
    size = file_bytes(path)
    if size < 2 * PAGE:
        raise Damaged(f"{path}: a data file of {size} bytes holds nothing")
    try:
        env = lmdb.open(
            str(path),
            max_dbs=3,
            map_size=0,  # use the size that is stored in the file
            create=False,
            readonly=not write,
            mode=0o600,
            readahead=False,  # reading one page should not load others into the resident set
            max_spare_txns=0,
        )
    except lmdb.Error as error:
        raise _unusable(path, error) from error
    try:
        needed = (int(env.info()["last_pgno"]) + 1) * PAGE
        size = file_bytes(path)  # measured after the pages, because a writer may be adding some
        if needed > size:  # reading a missing page would kill the process
            raise Damaged(f"{path}: {size} bytes where {needed} are due: truncated")
        env.reader_check()
        return _open_databases(env, path)
    except BaseException:
        env.close()
        raise


def _unusable(path: Path, error: Exception) -> Exception:
    """Return the error to raise if LMDB cannot open a segment."""
    for number in UNREAD:  # such as too many open files
        if (reason := os.strerror(number)) in str(error):
            return OSError(number, reason, str(path))
    if os.strerror(errno.EAGAIN) not in str(error):
        return Damaged(f"{path}: {error}")
    return OSError(  # LMDB locks the byte of the process id at the first reading transaction
        errno.EAGAIN,
        f"{path} is read by another process that has this one's id, {os.getpid()}, as containers' "
        "processes may: LMDB cannot tell them apart. Let `stream-ssl learner` be its container's "
        "first process (it then takes another id), or let containers share their PID namespace",
    )


def _open_databases(env: Any, path: Path) -> _Open:
    """Open the databases of an environment, once per environment.

    In a writable environment, LMDB's Python binding opens databases in a write transaction. A
    reader that opened them again would wait for the writer and could block it.
    """
    try:
        meta, records, producers = (
            env.open_db(name, create=False) for name in (b"meta", b"records", b"producers")
        )
        with env.begin(db=meta) as txn:
            version, follows = int(txn.get(b"format", b"0")), int(txn.get(b"follows", b"0"))
    except (lmdb.Error, ValueError) as error:
        raise _unusable(path, error) from error
    if version > FORMAT:
        raise NewerFormat(
            f"{path} has journal format {version}; this version reads up to {FORMAT}: "
            "start the newer stream-ssl again, or give the journal another folder"
        )
    if version < 1:
        raise Damaged(f"{path} has no format version")
    return _Open(env, records, producers, version, follows)
