"""One segment of the journal: an LMDB environment, and the layout of a record in it.

Segments are folders `segment-<first position>` with LMDB's `data.mdb` and `lock.mdb`. Three
databases lie in each: `meta` (format), `records` (position, 8 bytes big-endian -> record) and
`producers` (name -> last sequence and source position, of all producers so far).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
import threading
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lmdb
import msgpack

from stream_ssl.wire import Position

FORMAT = 1
PREFIX = "segment-"
PAGE = 4096

# magic, CRC-32 of all of the head after it, position, bytes journalled up to and with this record,
# sequence, received, CRC-32 as on the wire, lengths of name, header and payload
_HEAD = struct.Struct(">4sIQQQdIHII")
MAGIC = b"SSJ1"
_KEY = struct.Struct(">Q")
_CHECKED_FROM = 8


@dataclass(frozen=True, slots=True)
class Record:
    """One packet as the journal holds it; positions run from 1, without gaps but where damaged."""

    position: int
    producer: str
    sequence: int
    received: float  # seconds since the Unix epoch
    header: bytes
    payload: bytes


@dataclass(frozen=True, slots=True)
class ProducerState:
    """The last sequence of a producer that is on disk, and the source's position after it."""

    sequence: int = 0
    position: Position = None


class Damaged(Exception):
    """Bytes that do not match their checksum, or a file that LMDB cannot open."""


class NewerFormat(Exception):
    """The journal was written by a later version of this program."""


def key_of(position: int) -> bytes:
    """The record's key."""
    return _KEY.pack(position)


def position_of(key: bytes | memoryview) -> int:
    """The position that a key stands for."""
    return int(_KEY.unpack(key)[0])


def wire_checksum(sequence: int, header: Any, payload: Any) -> int:
    """CRC-32 as in DATA: kept from producer to learner, so that it covers every copy between."""
    crc = zlib.crc32(header, zlib.crc32(sequence.to_bytes(8, "big")))
    return zlib.crc32(payload, crc)


def pack_record(
    position: int,
    total: int,
    producer: str,
    sequence: int,
    received: float,
    checksum: int,
    header: Any,
    payload: Any,
) -> bytes:
    """The value that `records` holds."""
    name = producer.encode()
    fields = (position, total, sequence, received, checksum, len(name), len(header), len(payload))
    head = _HEAD.pack(MAGIC, 0, *fields)
    crc = zlib.crc32(name, zlib.crc32(head[_CHECKED_FROM:]))
    return b"".join((_HEAD.pack(MAGIC, crc, *fields), name, header, payload))


@dataclass(frozen=True, slots=True)
class Head:
    """A record's fixed part and name, checked."""

    position: int
    total: int
    sequence: int
    received: float
    checksum: int
    producer: str
    start: int  # of the header, in the value
    middle: int  # of the payload
    end: int


def unpack_head(value: memoryview) -> Head:
    """The head of a record.

    Raises:
        Damaged: it does not match its checksum.
    """
    if len(value) < _HEAD.size:
        raise Damaged(f"{len(value)} bytes are no record")
    magic, crc, position, total, sequence, received, checksum, n_name, n_header, n_payload = (
        _HEAD.unpack_from(value)
    )
    start = _HEAD.size + n_name
    checked = value[_CHECKED_FROM:start]
    if magic != MAGIC or zlib.crc32(checked) != crc:
        raise Damaged("head does not match its checksum")
    name = bytes(value[_HEAD.size : start]).decode()
    middle = start + n_header
    return Head(
        position, total, sequence, received, checksum, name, start, middle, middle + n_payload
    )


def unpack_record(value: memoryview) -> Record:
    """The record that a value holds; value may be longer.

    Raises:
        Damaged: head, header or payload do not match their checksum.
    """
    head = unpack_head(value)
    if head.end > len(value):
        raise Damaged(f"record {head.position} is cut off")
    header, payload = value[head.start : head.middle], value[head.middle : head.end]
    if wire_checksum(head.sequence, header, payload) != head.checksum:
        raise Damaged(f"record {head.position} does not match its checksum")
    return Record(
        head.position, head.producer, head.sequence, head.received, bytes(header), bytes(payload)
    )


def disk_bytes(length: int) -> int:
    """Bytes that a value takes in LMDB: a share of a tree's page if short, else whole pages."""
    if length < PAGE // 2 - 64:
        return 2 * length + 64  # a page of two such values may be half empty
    return -(-(length + 16) // PAGE) * PAGE + 64


def list_segments(folder: Path) -> list[tuple[int, Path]]:
    """(first position, folder) of each segment, oldest first."""
    try:
        names = [child.name for child in folder.iterdir()]
    except FileNotFoundError:
        return []
    numbers = (name.removeprefix(PREFIX) for name in names if name.startswith(PREFIX))
    return sorted((int(n), folder / f"{PREFIX}{n}") for n in numbers if n.isdecimal())


def segment_path(folder: Path, first: int) -> Path:
    """Where the segment that begins with a position lies."""
    return folder / f"{PREFIX}{first:020d}"


def file_bytes(path: Path) -> int:
    """Bytes of a segment's data file; 0 when it is gone."""
    try:
        return (path / "data.mdb").stat().st_size
    except FileNotFoundError:
        return 0


class Segment:
    """An open segment; writer and readers of one process share LMDB's environment of it.

    LMDB forbids a process to open an environment twice, and a test or a notebook has writer and
    reader in one: so environments are counted per path.

    Raises:
        Damaged: the files are no segment.
        NewerFormat: they are one of a later version.
    """

    _shared: dict[tuple[int, int], tuple[Any, int]] = {}  # noqa: RUF012 - by device and inode
    _lock = threading.Lock()

    def __init__(self, path: Path, map_size: int = 0) -> None:
        self.path = path
        self.key = identity(path)
        with self._lock:
            env, users = self._shared.get(self.key, (None, 0))
            if env is None:
                env = _open(path, map_size)
            self._shared[self.key] = (env, users + 1)
        self.env: Any = env
        try:
            self.records, self.producers = self._databases()
        except BaseException:
            self.close()
            raise

    def _databases(self) -> tuple[Any, Any]:
        try:
            meta = self.env.open_db(b"meta", create=False)
            with self.env.begin(db=meta) as txn:
                version = int(txn.get(b"format", b"0"))
            if version > FORMAT:
                raise NewerFormat(
                    f"{self.path} has journal format {version}; this version reads up to {FORMAT}: "
                    "start the newer stream-ssl again, or give the journal another folder"
                )
            if version < 1:
                raise Damaged(f"{self.path} has no format version")
            records = self.env.open_db(b"records", create=False)
            return records, self.env.open_db(b"producers", create=False)
        except (lmdb.Error, ValueError) as error:
            raise Damaged(f"{self.path}: {error}") from error

    def bounds(self) -> tuple[int, int] | None:
        """First and last position; None when there are no records."""
        with self.env.begin(db=self.records) as txn, txn.cursor() as cursor:
            if not cursor.first():
                return None
            first = position_of(cursor.key())
            cursor.last()
            return first, position_of(cursor.key())

    def states(self) -> dict[str, ProducerState]:
        """The producers' states as of the last commit."""
        with self.env.begin(db=self.producers) as txn, txn.cursor() as cursor:
            pairs = [(bytes(k).decode(), msgpack.unpackb(v)) for k, v in cursor]
        return {name: ProducerState(*fields) for name, fields in pairs}

    def used(self) -> int:
        """Bytes of all pages ever used."""
        return (int(self.env.info()["last_pgno"]) + 1) * PAGE

    def close(self) -> None:
        """Gives the environment up; the last user of the process closes it."""
        with self._lock:
            env, users = self._shared.get(self.key, (None, 0))
            if env is None or self.env is None:
                return
            self.env = None
            if users > 1:
                self._shared[self.key] = (env, users - 1)
                return
            del self._shared[self.key]
            env.close()


def create_segment(path: Path, states: dict[str, ProducerState], map_size: int) -> None:
    """Makes an empty segment that knows the producers; it appears at once or not at all.

    Raises:
        OSError, lmdb.Error: the disk does not take it.
    """
    fresh = path.with_name(f".new-{path.name}")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(mode=0o700)
    env = lmdb.open(str(fresh), max_dbs=3, map_size=map_size, mode=0o600, readahead=False)
    try:
        meta, producers = env.open_db(b"meta"), env.open_db(b"producers")
        env.open_db(b"records")
        with env.begin(write=True) as txn:
            txn.put(b"format", str(FORMAT).encode(), db=meta)
            for name, state in states.items():
                put_state(txn, producers, name, state)
    finally:
        env.close()
    sync_folder(fresh)
    delete_segment(path)  # left by a commit that failed: none of it was promised
    fresh.rename(path)
    sync_folder(path.parent)


def put_state(txn: Any, producers: Any, name: str, state: ProducerState) -> None:
    """Writes a producer's state within a transaction."""
    txn.put(name.encode(), msgpack.packb((state.sequence, state.position)), db=producers)


def sync_folder(path: Path) -> None:
    """Makes names in a folder durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def delete_segment(path: Path) -> None:
    """Deletes a segment; no reader opens half of it. Missing is fine."""
    gone = path.with_name(f".old-{path.name}")
    with contextlib.suppress(FileNotFoundError):
        path.rename(gone)
        shutil.rmtree(gone)


def identity(path: Path) -> tuple[int, int]:
    """Device and inode of a segment's data file.

    Raises:
        Damaged: there is none.
    """
    try:
        facts = (path / "data.mdb").stat()
    except FileNotFoundError as error:
        raise Damaged(f"{path} has no data file") from error
    return facts.st_dev, facts.st_ino


def _open(path: Path, map_size: int) -> Any:
    size = file_bytes(path)
    if size < 2 * PAGE:
        raise Damaged(f"{path}: a data file of {size} bytes holds nothing")
    try:
        env = lmdb.open(
            str(path),
            max_dbs=3,
            map_size=map_size,  # 0: the size that the file names
            create=False,
            mode=0o600,
            readahead=False,  # a page touched should bring no others into the resident set
            max_spare_txns=0,
        )
    except lmdb.Error as error:
        raise Damaged(f"{path}: {error}") from error
    needed = (int(env.info()["last_pgno"]) + 1) * PAGE
    if needed > size:  # touching the missing pages would kill the process
        env.close()
        raise Damaged(f"{path}: {size} bytes where {needed} are due: truncated")
    env.reader_check()
    return env
