"""One segment of the journal: an LMDB environment.

Segments are folders `segment-<first position>` with LMDB's `data.mdb` and `lock.mdb`. Three
databases lie in each: `meta` (format), `records` (position, 8 bytes big-endian -> record) and
`producers` (name -> last sequence and source position, of all producers so far).
"""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lmdb
import msgpack

from stream_ssl.durable import sync
from stream_ssl.ingest.layout import PAGE, Damaged, ProducerState, key_of, position_of, unpack_head

FORMAT = 2  # 1: states without the time of writing
PREFIX = "segment-"
_LOCK_BYTES = 8192  # LMDB's size for 126 readers
MAX_RECORDS = 1 << 20  # of a segment, so that a lost one leaves a known gap of positions


class NewerFormat(Exception):
    """The journal was written by a later version of this program."""


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


@dataclass(slots=True)
class _Open:
    env: Any
    records: Any
    producers: Any
    follows: int
    users: int = 0


class Segment:
    """An open segment; writer and readers of one process share LMDB's environment of it.

    LMDB forbids a process to open an environment twice, and a test or a notebook has writer and
    reader in one: so environments are counted, and shared by whoever comes second.

    Args:
        path: its folder.
        write: for the one writer, before others can find the segment.

    Attributes:
        follows: first position of the segment before, as of its beginning; 0: none, or unknown.

    Raises:
        Damaged: the files are no segment.
        NewerFormat: they are one of a later version.
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
        self.follows = shared.follows

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
            pairs = [
                (bytes(k).decode(), msgpack.unpackb(v, strict_map_key=False)) for k, v in cursor
            ]
        return {name: ProducerState(*fields) for name, fields in pairs}

    def newest_total(self) -> int:
        """Bytes ever journalled, as the newest record has it.

        Raises:
            Damaged: there is none, or not an intact one.
        """
        with self.env.begin(db=self.records, buffers=True) as txn, txn.cursor() as cursor:
            if not cursor.last():
                raise Damaged(f"{self.path} holds no record")
            return unpack_head(cursor.value()).total

    def used(self) -> int:
        """Bytes of all pages ever used."""
        return (int(self.env.info()["last_pgno"]) + 1) * PAGE

    def close(self) -> None:
        """Gives the environment up; the last user of the process closes it."""
        with self._lock:
            if self.env is None:
                return
            self.env = None
            shared = self._shared[self.key]
            shared.users -= 1
            if not shared.users:
                del self._shared[self.key]
                shared.env.close()


def create_segment(
    path: Path,
    states: Mapping[str, ProducerState],
    map_size: int,
    records: Mapping[int, bytes] | None = None,
    follows: int = 0,
) -> Path:
    """Makes a segment under a name that no reader looks for; `publish_segment` shows it.

    Args:
        path: of the segment to come.
        states: all producers so far.
        map_size: most bytes that it will hold.
        records: position -> packed record, in order; those that it begins with.
        follows: first position of the segment before; 0: none.

    Raises:
        OSError, lmdb.Error: the disk does not take it.
    """
    fresh = path.with_name(f".new-{path.name}")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(mode=0o700)
    # LMDB makes this file sparse and maps it: on a full disk the first write to it would be SIGBUS.
    (fresh / "lock.mdb").write_bytes(bytes(_LOCK_BYTES))
    env = lmdb.open(str(fresh), max_dbs=3, map_size=map_size, mode=0o600, readahead=False)
    try:
        meta, producers = env.open_db(b"meta"), env.open_db(b"producers")
        database = env.open_db(b"records")
        with env.begin(write=True) as txn:
            txn.put(b"format", str(FORMAT).encode(), db=meta)
            txn.put(b"follows", str(follows).encode(), db=meta)
            for name, state in states.items():
                put_state(txn, producers, name, state)
            for position, value in (records or {}).items():
                txn.put(key_of(position), value, db=database, append=True)
    finally:
        env.close()
    sync(fresh)
    return fresh


def publish_segment(fresh: Path, path: Path) -> None:
    """Gives a new segment its name, in place of one without records that may have it.

    A crash between the two renames is mended by `tidy`.
    """
    gone = path.with_name(f".old-{path.name}")
    with contextlib.suppress(FileNotFoundError):
        path.rename(gone)
    fresh.rename(path)
    sync(path.parent)
    shutil.rmtree(gone, ignore_errors=True)


def tidy(folder: Path) -> None:
    """Ends what a crash left half done: segments half made, half exchanged or half deleted."""
    for gone in folder.glob(f".old-{PREFIX}*"):
        path = folder / gone.name.removeprefix(".old-")
        fresh = folder / f".new-{path.name}"
        if fresh.exists() and not path.exists():
            fresh.rename(path)
            sync(folder)
        shutil.rmtree(gone)
    for fresh in folder.glob(f".new-{PREFIX}*"):
        shutil.rmtree(fresh)


def put_state(txn: Any, producers: Any, name: str, state: ProducerState) -> None:
    """Writes a producer's state within a transaction."""
    txn.put(name.encode(), state.pack(), db=producers)


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


def _open(path: Path, write: bool) -> _Open:
    size = file_bytes(path)
    if size < 2 * PAGE:
        raise Damaged(f"{path}: a data file of {size} bytes holds nothing")
    try:
        env = lmdb.open(
            str(path),
            max_dbs=3,
            map_size=0,  # what the file says
            create=False,
            readonly=not write,
            mode=0o600,
            readahead=False,  # a page touched should bring no others into the resident set
            max_spare_txns=0,
        )
    except lmdb.Error as error:
        raise Damaged(f"{path}: {error}") from error
    try:
        needed = (int(env.info()["last_pgno"]) + 1) * PAGE
        if needed > size:  # touching the missing pages would kill the process
            raise Damaged(f"{path}: {size} bytes where {needed} are due: truncated")
        env.reader_check()
        return _open_databases(env, path)
    except BaseException:
        env.close()
        raise


def _open_databases(env: Any, path: Path) -> _Open:
    """In a writable environment LMDB's binding opens databases within a writing transaction: a
    reader there would wait for the writer, and could keep it waiting."""
    try:
        meta, records, producers = (
            env.open_db(name, create=False) for name in (b"meta", b"records", b"producers")
        )
        with env.begin(db=meta) as txn:
            version, follows = int(txn.get(b"format", b"0")), int(txn.get(b"follows", b"0"))
    except (lmdb.Error, ValueError) as error:
        raise Damaged(f"{path}: {error}") from error
    if version > FORMAT:
        raise NewerFormat(
            f"{path} has journal format {version}; this version reads up to {FORMAT}: "
            "start the newer stream-ssl again, or give the journal another folder"
        )
    if version < 1:
        raise Damaged(f"{path} has no format version")
    return _Open(env, records, producers, follows)
