"""A source of images in ROS bags: ROS 1 files, and ROS 2 folders and files."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import sqlite3
import tempfile
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from stream_ssl.producers.sources.bag_file import BagFile
from stream_ssl.producers.sources.base import BrokenFileError, Facts
from stream_ssl.producers.sources.chunked import MAX_BYTES, PIECE
from stream_ssl.producers.sources.mcap_file import McapFile
from stream_ssl.producers.sources.robot_images import Message
from stream_ssl.producers.sources.robot_logs import RobotLogs
from stream_ssl.producers.sources.robot_messages import decode
from stream_ssl.wire.sample import Position

STORED = re.compile(r"^\s*-\s*['\"]?(?:.*/)?([^/'\"\s]+\.(?:db3|mcap)(?:\.zstd)?)['\"]?\s*$", re.M)
PACKED = (".zstd", ".zst")  # as rosbag2 and the command zstd name compressed files
MAX_METADATA = 1 << 24  # bytes
GROWTH, ROOM = 1000, 1 << 30  # an unpacked bag may have GROWTH * its packed size + ROOM bytes
STEPS, STEPS_EACH = 10_000_000, 200  # SQLite's steps: for any file, and per byte of the file
LOOK = 10_000  # steps between two checks
RECORDED = ".active"  # rosbag of ROS 1 appends it to the name of a bag until the bag is complete


class RosBags(RobotLogs):
    """Images of ROS 1 bags (.bag) and ROS 2 bags (folders, or .db3 and .mcap files).

    A ROS 1 bag without an index, for example after a power failure, is read from its beginning up
    to the damage. Its name may still end in .active, as while it is recorded. The files in a ROS 2
    folder are read one after the other. A damaged file does not affect the others. metadata.yaml is
    used only to find missing files. Files and messages that are compressed with zstd are unpacked.
    Sample ids are FILE~DIGEST/TOPIC@LOGTIME, with the log time in nanoseconds.

    Args:
        files: paths, globs, or brace expansions such as "drive-{00..09}.bag".
        name: the source's name.

    Raises:
        FileNotFoundError: a pattern matches no file.
        ValueError: an argument is invalid.
        ModuleNotFoundError: lz4, zstandard or Pillow is not installed.
    """

    FOLDERS = True

    def __init__(self, files: list[str] | str, name: str = "rosbag", **logs: Any) -> None:
        import lz4  # noqa: F401  # fail early if they are not installed
        import zstandard  # noqa: F401

        super().__init__(files, name=name, **logs)
        self._files = bags_among(self._files)

    def _facts(self, number: int, position: Position = None) -> Facts:
        facts = super()._facts(number, position)
        return {**facts, "file": str(facts["file"]).removesuffix(RECORDED)}

    def _messages(self, path: Path, start: int) -> Iterator[Message]:
        if not path.is_dir():
            yield from self._file(path, start)
            return
        files, missing = parts(path)
        for name in missing:
            self.damaged(path, name, "metadata.yaml names it, and it is not there")
        if not files:
            raise BrokenFileError(
                "no .db3 or .mcap file lies in the folder. If its folders are bags, give a pattern "
                f"of them, in quotes: '{path / '*'}'"
            )
        for file in files:
            try:
                for message in self._file(present(file), start):
                    start = 0  # the next files may begin with earlier messages, which also count
                    yield message
            except Exception as error:  # damaged bytes can cause errors of any type
                self.damaged(file, "the rest of it", error)

    def _file(self, path: Path, start: int) -> Iterator[Message]:
        if path.suffix in PACKED:
            with tempfile.TemporaryDirectory() as folder:
                plain = Path(folder, path.stem)
                self._unpack(path, plain)
                yield from self._file(plain, start)
        elif path.name.endswith((".bag", f".bag{RECORDED}")):
            yield from self._chunked(BagFile, path, start)
        elif path.suffix == ".mcap":
            yield from self._chunked(McapFile, path, start)
        elif path.suffix == ".db3":
            try:
                yield from self._sqlite(path, start)
            except sqlite3.OperationalError as error:
                if "interrupted" not in str(error):
                    raise
                if not self._stopped.is_set():
                    raise BrokenFileError("a bag of its size takes SQLite less time") from error
        else:
            raise BrokenFileError("it is no .bag, .db3 or .mcap file, nor a folder with such files")

    def _unpack(self, path: Path, plain: Path) -> None:
        """Unpack a compressed file."""
        import zstandard

        free = shutil.disk_usage(plain.parent).free // 2
        most = min(free, ROOM + GROWTH * path.stat().st_size)
        with path.open("rb") as packed, plain.open("wb") as out:
            reader = zstandard.ZstdDecompressor().stream_reader(packed, read_across_frames=True)
            try:
                while not self._stopped.is_set() and (piece := reader.read(PIECE)):
                    if out.tell() + len(piece) > most:
                        raise BrokenFileError(
                            f"it unpacks to more than {most} bytes, the most that {plain.parent} "
                            "may take; unpack it elsewhere with zstd -d"
                        )
                    out.write(piece)
            except zstandard.ZstdError as error:  # the part before the damage may be readable
                self.damaged(path, "the rest of it", error)

    def _sqlite(self, path: Path, start: int) -> Iterator[Message]:
        """Yield the messages of a .db3 file.

        Raises:
            BrokenFileError, sqlite3.Error: the rest cannot be read.
        """
        with path.open("rb") as stream:
            missing = cut_off(stream.read(100), path.stat().st_size)
        with contextlib.closing(opened(path)) as database:
            bound(database, path.stat().st_size, self._stopped)
            if missing:  # otherwise SQLite rejects a truncated file
                database.execute("PRAGMA writable_schema = ON")
            check_tables(database)
            topics = {}
            for number, topic, kind in database.execute("SELECT id, name, type FROM topics"):
                if self.images.wanted(str(topic), str(kind), path):
                    topics[number] = str(topic), str(kind)
            by_kind = definitions(database)
            query = f"topic_id IN ({','.join('?' * len(topics))}) AND timestamp >= ?"
            table, order = "messages", "ORDER BY timestamp, id"
            try:  # checks the index without reading images
                for _ in database.execute(select(table, query, order), (*topics, start)):
                    pass
            except sqlite3.DatabaseError as error:
                if "interrupted" in str(error):
                    raise
                self._no_index(path, error)
                table, order, start = "messages NOT INDEXED", "", -(2**63)
            rows = database.execute(select(table, query, order), (*topics, start))
            for log_time, number, row in rows:
                topic, kind = topics[number]
                try:
                    ((data,),) = database.execute("SELECT data FROM messages WHERE id = ?", (row,))
                    if type(log_time) is not int or type(data) is not bytes:
                        raise BrokenFileError("its columns are of other types")
                except Exception as error:  # for example from a damaged page
                    self.damaged(path, f"the message {row} of {topic}", error)
                    continue
                made = partial(decode, kind, by_kind.get(kind, ""), False, data)
                yield Message(topic, kind, log_time, made)
        if missing:
            raise BrokenFileError(missing)


def opened(path: Path) -> sqlite3.Connection:
    """Open a .db3 file for reading, with the write-ahead log that a crash may have left beside it.

    SQLite reads a log through an index, a file beside it. If there is none and no file can be made
    there, nobody writes the log, and SQLite keeps the index in memory.
    """
    log, index = (path.with_name(path.name + end) for end in ("-wal", "-shm"))
    how = "&immutable=1"
    if log.exists():
        in_memory = not index.exists() and not os.access(path.parent, os.W_OK)
        how = "&vfs=unix-none" if in_memory else ""
    place = f"file:{quote(os.fsencode(path))}?mode=ro{how}"
    database = sqlite3.connect(place, uri=True, check_same_thread=False)
    if "vfs" in how:
        database.execute("PRAGMA locking_mode = EXCLUSIVE")
    return database


def select(table: str, query: str, order: str) -> str:
    """Return an SQL query for the places of messages."""
    return f"SELECT timestamp, topic_id, id FROM {table} WHERE {query} {order}"  # noqa: S608


def bags_among(paths: list[Path]) -> list[Path]:
    """Leave out paths that a glob with ** matches beside bags.

    These are the files of ROS 2 folders that are listed themselves, and folders above bags.
    """
    folders = {path for path in paths if path.is_dir()}
    bags = {folder for folder in folders if stored(folder)}
    above = {folder for path in paths for folder in path.parents} - bags
    return [path for path in paths if path.parent not in bags and path not in above]


def parts(folder: Path) -> tuple[list[Path], list[str]]:
    """Return the files of a ROS 2 bag in numeric order, and the names of missing files."""
    there = stored(folder)
    files = list(there.values())
    files.sort(
        key=lambda file: [int(p) if p.isdecimal() else p for p in re.split(r"(\d+)", file.name)]
    )
    metadata = folder / "metadata.yaml"
    text = ""
    if metadata.is_file():
        with metadata.open(encoding="utf-8", errors="replace") as lines:
            text = lines.read(MAX_METADATA)
    named = dict.fromkeys(STORED.findall(text))
    return files, [name for name in named if name.removesuffix(PACKED[0]) not in there]


def stored(folder: Path) -> dict[str, Path]:
    """Return the files of a ROS 2 bag by the names of the unpacked files.

    If a file exists both packed and unpacked, the unpacked file is used.
    """
    there: dict[str, Path] = {}
    for suffix in ("", *PACKED):
        for file in itertools.chain(folder.glob(f"*.db3{suffix}"), folder.glob(f"*.mcap{suffix}")):
            if file.is_file() and not file.name.startswith("."):  # not the ._ files of macOS
                there.setdefault(file.name.removesuffix(suffix), file)
    return there


def present(file: Path) -> Path:
    """Return a file, or the packed file that a recorder has put in its place meanwhile."""
    packed = (file.with_name(file.name + suffix) for suffix in PACKED)
    return file if file.exists() else next(filter(Path.is_file, packed), file)


def cut_off(header: bytes, size: int) -> str:
    """Return how much of a database is missing (sqlite.org/fileformat), or "" if it is complete."""
    if len(header) < 100 or header[24:28] != header[92:96]:  # the header's page count is not valid
        return ""
    page = int.from_bytes(header[16:18], "big")
    whole = (65536 if page == 1 else page) * int.from_bytes(header[28:32], "big")
    return f"it has {size} of {whole} bytes" if size < whole else ""


def bound(database: sqlite3.Connection, size: int, stopped: threading.Event) -> None:
    """Limit the work of SQLite for a file of `size` bytes, and interrupt it if the source stops."""
    database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_BYTES)
    database.execute("PRAGMA trusted_schema = OFF")
    left = (STEPS + STEPS_EACH * size) // LOOK

    def look() -> int:
        nonlocal left
        left -= 1
        return left < 0 or stopped.is_set()

    database.set_progress_handler(look, LOOK)


def check_tables(database: sqlite3.Connection) -> None:
    """Check that the tables are plain tables without computed rows or columns.

    Raises:
        BrokenFileError: a table is missing, or is not a plain table.
    """
    found = database.execute(
        "SELECT name FROM sqlite_master WHERE type = 'table' AND rootpage > 0 "
        "AND name IN ('topics', 'messages')"
    ).fetchall()
    computed = [
        column
        for table in ("topics", "messages")
        for column in database.execute("SELECT hidden FROM pragma_table_xinfo(?)", (table,))
        if column[0]
    ]
    if len(found) != 2 or computed:
        raise BrokenFileError("it has no plain tables 'topics' and 'messages', as ROS 2 bags do")


def definitions(database: sqlite3.Connection) -> dict[str, str]:
    """Return the definitions of types by name. Bags of older ROS 2 versions have none."""
    with contextlib.suppress(sqlite3.Error):
        return {
            str(kind): str(definition)
            for kind, definition in database.execute(
                "SELECT topic_type, encoded_message_definition FROM message_definitions "
                "WHERE encoding = 'ros2msg'"
            )
        }
    return {}
