"""Robots' logs that claim what is not there, are cut or sparse: each costs itself alone."""

import bz2
import re
import sqlite3
import struct
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path

import lz4.frame
import numpy as np
import pytest
import zstandard
from mcap.data_stream import RecordBuilder
from mcap.records import Message
from mcap.writer import CompressionType, IndexType
from mcap.writer import Writer as McapWriter
from robot_files import (
    BEGAN,
    COMPRESSED,
    IMAGE,
    ROS1,
    ROS2,
    compressed,
    drive,
    image,
    write_bag,
    write_bag2,
    write_foxglove,
    write_mcap,
)
from rosbags.rosbag2 import CompressionFormat, CompressionMode
from table import table
from video_files import number_of, numbered

from stream_ssl.producers.sources import McapFiles, RosBags, chunked, mcap_file
from stream_ssl.producers.sources.bag_file import header_of
from stream_ssl.producers.sources.recordings import BrokenFileError
from stream_ssl.producers.sources.robot_images import pixels
from stream_ssl.producers.sources.ros_messages import decoder

DEFINITION, _ = ROS2.generate_msgdef(IMAGE, ros_version=2)


def cdr(number, **more):
    return bytes(ROS2.serialize_cdr(image(ROS2, numbered(number), "rgb8", 1, **more), IMAGE))


def write_plain(path, count=9, **options):
    """MCAP with one channel of raw images, by the format's own writer."""
    with path.open("wb") as file:
        writer = McapWriter(file, **({"chunk_size": 20_000} | options))
        writer.start("ros2")
        schema = writer.register_schema(IMAGE, "ros2msg", DEFINITION.encode())
        channel = writer.register_channel("/camera", "cdr", schema)
        for number in range(count):
            writer.add_message(channel, BEGAN + number, cdr(number), BEGAN + number)
        writer.finish()
    return path


def sent(source):
    return [number_of(sample) for sample, _ in source.samples()]


def salvaged(source, tell=number_of):
    """What a source sends, which may be nothing."""
    try:
        return [tell(sample) for sample, _ in source.samples()]
    except ValueError as error:
        assert "not one sample of a whole pass" in str(error)  # noqa: PT017
        return []


OPTIONS = {
    "usual": {},
    "no repeated channels": {"repeat_channels": False},
    "no repeated schemas": {"repeat_schemas": False},
    "neither": {"repeat_channels": False, "repeat_schemas": False},
    "neither, and no statistics": {
        "repeat_channels": False,
        "repeat_schemas": False,
        "use_statistics": False,
    },
    "no chunks": {"use_chunking": False},
    "no chunks, no summary": {
        "use_chunking": False,
        "use_statistics": False,
        "use_summary_offsets": False,
        "repeat_channels": False,
        "repeat_schemas": False,
        "index_types": IndexType.NONE,
    },
    "no index": {"index_types": IndexType.NONE},
    "no message index": {"index_types": IndexType.CHUNK},
    "no message index, nothing repeated": {
        "index_types": IndexType.CHUNK,
        "repeat_channels": False,
        "repeat_schemas": False,
    },
    "lz4": {"compression": CompressionType.LZ4},
    "zstd": {"compression": CompressionType.ZSTD},
    "not compressed": {"compression": CompressionType.NONE},
    "no checksums": {"enable_crcs": False},
    "data checksums": {"enable_data_crcs": True, "use_chunking": False},
    "one chunk": {"chunk_size": 1 << 30},
}


@table("options", OPTIONS)
@table("cls", [McapFiles, RosBags])
def test_mcap_files_of_every_form_are_read(tmp_path, options, cls):
    path = write_plain(tmp_path / "a.mcap", **OPTIONS[options])
    source = cls(str(path))
    stream = list(source.samples())
    assert [number_of(sample) for sample, _ in stream] == list(range(9))
    assert source.skipped.by_reason == {}
    for at in (0, 4, 8):
        assert list(source.samples(stream[at][1])) == stream[at + 1 :]


def write_mixed(path, inside, damage=None):
    """Messages whose numbers are `inside` lie in chunks, the others between the chunks."""
    with path.open("wb") as file:
        writer = McapWriter(file, chunk_size=1)
        writer.start("ros2")
        schema = writer.register_schema(IMAGE, "ros2msg", DEFINITION.encode())
        channel = writer.register_channel("/camera", "cdr", schema)
        places = {}
        for number in range(20):
            message = Message(channel, BEGAN + number, cdr(number), BEGAN + number, number)
            if number in inside:
                writer.add_message(channel, BEGAN + number, cdr(number), BEGAN + number, number)
            else:
                places[number] = file.tell()
                builder = RecordBuilder()
                message.write(builder)
                file.write(builder.end())
        writer.finish()
    if damage is not None:
        data = bytearray(path.read_bytes())
        data[places[damage]] = 0
        path.write_bytes(data)
    return path


@pytest.mark.parametrize("run_bytes", [1, 20_000, 1 << 24])
@pytest.mark.parametrize("seed", range(4))
def test_messages_outside_of_chunks_are_read_in_order(tmp_path, monkeypatch, seed, run_bytes):
    monkeypatch.setattr(mcap_file, "RUN_BYTES", run_bytes)
    inside = set(np.random.default_rng(seed).permutation(20)[: 4 + 4 * seed].tolist())
    source = McapFiles(str(write_mixed(tmp_path / "a.mcap", inside)))
    stream = list(source.samples())
    assert [number_of(sample) for sample, _ in stream] == list(range(20))
    assert source.skipped.by_reason == {}
    for at in (0, 7, 19):
        assert list(source.samples(stream[at][1])) == stream[at + 1 :]


def test_damage_between_chunks_costs_no_chunk(tmp_path):
    path = write_mixed(tmp_path / "a.mcap", {0, 1, 2, 9, 10, 15, 19}, damage=5)
    source = McapFiles(str(path))
    numbers = sent(source)
    assert numbers == [n for n in range(20) if not 5 <= n <= 8]
    assert source.skipped.by_reason == {"damaged": 1}


@table("kind", ["mcap", "mcap, no chunks", "bag", "a ROS 2 folder"])
def test_a_log_that_still_grows_is_gone_on_from(tmp_path, kind):
    """The log of a robot is read while it is written, and again once it is whole."""
    if kind == "bag":
        cls, path = RosBags, write_bag(tmp_path / "a.bag", drive(ROS1, 60))
        part = path
    elif kind == "a ROS 2 folder":
        cls, path = RosBags, tmp_path / "a"
        path.mkdir()
        part = write_mcap(path / "a_0.mcap", drive(ROS2, 60))
        (path / "metadata.yaml").write_text("written last")
    elif kind == "mcap":
        cls, path = McapFiles, write_mcap(tmp_path / "a.mcap", drive(ROS2, 60))
        part = path
    else:
        cls, path = McapFiles, write_plain(tmp_path / "a.mcap", 30, use_chunking=False)
        part = path
    expected = sent(cls(str(path)))
    whole = part.read_bytes()
    if kind == "bag":  # while it is written, its index has no place
        head = re.sub(rb"index_pos=.{8}", b"index_pos=" + bytes(8), whole, count=1, flags=re.DOTALL)
    else:
        head = whole
    numbers, position = [], None
    metadata = path / "metadata.yaml"
    text = metadata.read_bytes() if metadata.exists() else None
    for percent in (40, 70, 100):
        size = len(whole) * percent // 100
        part.write_bytes(whole if percent == 100 else head[:size])
        if text is not None:
            metadata.unlink(missing_ok=True) if percent < 100 else metadata.write_bytes(text)
        stream = list(cls(str(path)).samples(position))
        numbers += [number_of(sample) for sample, _ in stream]
        position = stream[-1][1]
    assert numbers == expected
    (_, position), *_ = cls(str(path)).samples()
    part.write_bytes(whole + b"1")
    with pytest.raises(ValueError, match="bytes was"):
        cls(str(path)).samples(position)


@table("kind", ["mcap", "bag"])
def test_a_log_that_is_removed_before_its_turn_costs_itself_alone(tmp_path, kind):
    write, cls = (write_plain, McapFiles) if kind == "mcap" else (write_ros1, RosBags)
    paths = [write(tmp_path / f"{name}.{kind}") for name in "abc"]
    source = cls([str(path) for path in paths])
    paths[1].unlink()
    assert sent(source) == [*range(9), *range(9)]
    assert source.skipped.by_reason == {"damaged": 1}


def write_ros1(path):
    return write_bag(path, drive(ROS1, 9))


def logs(folder):
    return {
        "mcap, zstd": (McapFiles, write_plain(folder / "a.mcap")),
        "mcap, no chunks": (
            McapFiles,
            write_plain(folder / "b.mcap", use_chunking=False, enable_data_crcs=True),
        ),
        "mcap, nothing repeated": (
            McapFiles,
            write_plain(folder / "c.mcap", **OPTIONS["neither"]),
        ),
        "bag": (RosBags, write_bag(folder / "a.bag", drive(ROS1, 9))),
        "sqlite": (RosBags, write_bag2(folder / "d", drive(ROS2, 9)) / "d.db3"),
    }


KINDS = ("mcap, zstd", "mcap, no chunks", "mcap, nothing repeated", "bag", "sqlite")


@pytest.mark.parametrize("kind", KINDS)
def test_a_log_cut_anywhere_gives_what_is_whole(tmp_path, kind):
    cls, path = logs(tmp_path)[kind]
    whole = path.read_bytes()
    before = []
    for percent in range(0, 100, 5):
        path.write_bytes(whole[: len(whole) * percent // 100])
        source = cls(str(path))
        numbers = salvaged(source)
        if kind != "sqlite":  # whose pages lie in an order of their own
            assert numbers == list(range(len(numbers)))
            assert len(numbers) >= len(before)
        assert set(numbers) <= set(range(9))
        assert source.skipped.by_reason["damaged"] >= 1, percent
        before = numbers
    assert len(before) >= 5


@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_byte_is_told_and_costs_little(tmp_path, kind):
    cls, path = logs(tmp_path)[kind]
    whole = path.read_bytes()
    random, lost = np.random.default_rng(3), []
    for at in random.choice(len(whole), 30, replace=False).tolist():
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        source = cls(str(path))
        samples = salvaged(source, lambda sample: sample)
        lost.append(9 - len(samples))
        assert lost[-1] <= 0 or source.skipped.by_reason, at  # nothing is left out silently
        if cls is McapFiles:  # whose checksums tell also what is changed
            changed = [number_of(sample) for sample in samples] != list(range(9))
            assert source.skipped.by_reason or not changed, at
    assert np.median(lost) <= 3


# Chunks that claim too much.


def record(opcode, content):
    return struct.pack("<BQ", opcode, len(content)) + content


def text(value):
    return struct.pack("<I", len(value)) + value


def mcap_chunk(plain, form, claimed=None):
    packed = {
        "zstd": lambda: zstandard.compress(plain),
        "lz4": lambda: lz4.frame.compress(plain),
        "bz2": lambda: bz2.compress(plain),
        "": lambda: plain,
    }[form]()
    size = len(plain) if claimed is None else claimed
    head = struct.pack("<QQQI", BEGAN, BEGAN, size, 0) + text(form.encode())
    return record(6, head + struct.pack("<Q", len(packed)) + packed)


def message(channel, log_time, data):
    return record(5, struct.pack("<HIQQ", channel, 0, log_time, log_time) + data)


DEFINED = record(
    3, struct.pack("<H", 1) + text(IMAGE.encode()) + text(b"ros2msg") + text(DEFINITION.encode())
) + record(4, struct.pack("<HH", 1, 1) + text(b"/camera") + text(b"cdr") + text(b""))
GOOD = [message(1, BEGAN + number, cdr(number)) for number in range(2)]


def write_records(path, *records):
    end = record(15, bytes(4)) + record(2, bytes(20))
    magic = b"\x89MCAP0\r\n"
    path.write_bytes(magic + record(1, text(b"") + text(b"")) + b"".join(records) + end + magic)
    return path


TINY = message(7, 0, b"")  # of no channel
BOMBS = {
    "29 kB of tiny messages": lambda: mcap_chunk(TINY * 4_000_000, "zstd"),
    "lz4 of tiny messages": lambda: mcap_chunk(TINY * 1_000_000, "lz4"),
    "more than it claims": lambda: mcap_chunk(bytes(1 << 26), "zstd", claimed=100),
    "lz4, more than it claims": lambda: mcap_chunk(bytes(1 << 26), "lz4", claimed=100),
    "2^62 bytes": lambda: mcap_chunk(b"", "zstd", claimed=1 << 62),
    "less than it claims": lambda: mcap_chunk(bytes(99), "zstd", claimed=1 << 27),
    "zeros": lambda: mcap_chunk(bytes(99), "zstd"),
    "a record of 2^63 bytes": lambda: mcap_chunk(struct.pack("<BQ", 5, 1 << 63), "zstd"),
    "a name of 2^32 bytes": lambda: mcap_chunk(
        record(4, struct.pack("<HHI", 9, 1, 0xFFFFFFFF)), "zstd"
    ),
    "its own data of 2^63 bytes": lambda: record(
        6, struct.pack("<QQQI", 0, 0, 9, 0) + text(b"") + struct.pack("<Q", 1 << 63)
    ),
    "an empty chunk record": lambda: record(6, b""),
    "a message without a head": lambda: record(5, b"ab"),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_an_mcap_bomb_costs_itself_alone(tmp_path, bomb):
    path = write_records(tmp_path / "a.mcap", DEFINED, GOOD[0], BOMBS[bomb](), GOOD[1])
    source = McapFiles(str(path))
    began = time.monotonic()
    assert sent(source) == [0, 1]
    assert time.monotonic() - began < 20  # it took minutes; a second where nothing else runs
    # The messages of a channel that is not defined are one more part.
    assert source.skipped.by_reason["damaged"] == (2 if "tiny" in bomb else 1)


def test_an_index_that_names_a_chunk_twice_is_not_followed(tmp_path, caplog):
    chunk = mcap_chunk(DEFINED + GOOD[0] + GOOD[1], "zstd")
    magic, head = b"\x89MCAP0\r\n", record(1, text(b"") + text(b""))
    data = magic + head + chunk + record(15, bytes(4))
    place = len(magic + head)
    indexes = b"".join(
        record(
            8,
            struct.pack("<QQQQ", BEGAN, BEGAN + end, place, len(chunk))
            + text(b"")
            + struct.pack("<Q", 0)
            + text(b"zstd")
            + bytes(16),
        )
        for end in range(1, 2000)
    )
    path = tmp_path / "a.mcap"
    path.write_bytes(data + indexes + record(2, struct.pack("<QQI", len(data), 0, 0)) + magic)
    assert sent(McapFiles(str(path))) == [0, 1]
    assert "has no index: its index names a chunk at" in caplog.text


def test_chunks_that_overlap_do_not_fill_the_memory(monkeypatch):
    monkeypatch.setattr(chunked, "MAX_WAITING", 100)
    places = [chunked.ChunkPlace(at, 0, 9) for at in range(20)]
    dropped = []

    def read(place):
        yield from (chunked.Stored(0, 5, bytes(10)) for _ in range(2))

    messages = list(chunked.in_order(places, read, 0, lambda place, why: dropped.append(place)))
    assert len(messages) == 10
    assert len(dropped) == 15


@table("form", ["zstd", "lz4", "bz2"])
def test_what_unpacks_to_too_much_is_refused_before_it_is_there(form, monkeypatch):
    pack = {"zstd": zstandard.compress, "lz4": lz4.frame.compress, "bz2": bz2.compress}[form]
    monkeypatch.setattr(chunked, "PIECE", 1 << 12)
    given = []
    pieces = chunked.pieces
    monkeypatch.setattr(
        chunked, "pieces", lambda *of: (given.append(len(p)) or p for p in pieces(*of))
    )
    with pytest.raises(BrokenFileError, match=r"unpacks to .* or more"):
        chunked.unpacked(form, pack(bytes(1 << 24)), 10_000)
    assert sum(given) < 20_000
    for damaged in (pack(bytes(999))[:-5], b"", b"no such thing"):
        with pytest.raises(BrokenFileError):
            chunked.unpacked(form, damaged, 999)
    assert chunked.unpacked(form, pack(bytes(999)), 999) == bytes(999)


# ROS 1.


def fields(**values):
    return b"".join(text(name.encode() + b"=" + value) for name, value in values.items())


def bag_record(data, **header):
    return text(fields(**header)) + text(data)


@table(
    ("compression", "plain", "claimed"),
    [
        ("bz2", bytes(1 << 26), 100),
        ("lz4", bytes(1 << 26), 100),
        ("bz2", b"", 0xFFFFFFFF),
        ("rar", b"", 9),
        ("none", struct.pack("<I", 0xFFFFFFFF), 4),
        ("none", text(struct.pack("<I", 0xFFFFFFFF)), 8),
        ("none", text(b"") * 200_000, 800_000),
    ],
)
def test_a_bag_of_bombs_costs_itself_alone(tmp_path, compression, plain, claimed):
    pack = {"bz2": bz2.compress, "lz4": lz4.frame.compress}.get(compression, lambda data: data)
    bomb = bag_record(
        pack(plain), op=b"\5", compression=compression.encode(), size=struct.pack("<I", claimed)
    )
    whole = write_bag(tmp_path / "a.bag", drive(ROS1, 2)).read_bytes()
    path = tmp_path / "b.bag"
    begin = len(b"#ROSBAG V2.0\n")
    path.write_bytes(whole[:begin] + bomb + whole[begin:])  # which moves the index away, too
    source = RosBags(str(path))
    assert sent(source) == [0, 1]
    assert source.skipped.by_reason == {"damaged": 1}


def test_a_header_that_claims_too_much_is_damaged():
    assert header_of(fields(a=b"1", b=b"=2")) == {"a": b"1", "b": b"=2"}
    for broken in (b"\xff\xff\xff\xff", text(b"no equals sign"), b"\1"):
        with pytest.raises(BrokenFileError):
            header_of(broken)


# ROS 2 folders.


def split(folder, mcap=False, compression=None):
    """A bag of three files, of three images each."""
    from rosbags.rosbag2 import StoragePlugin, Writer

    bag = folder / "bag"
    bag.mkdir()
    entries = [
        ("/camera", IMAGE, BEGAN + number, image(ROS2, numbered(number), "rgb8", 1))
        for number in range(9)
    ]
    plugin = StoragePlugin.MCAP if mcap else StoragePlugin.SQLITE3
    for part in range(3):
        one = folder / f"bag_{part}"
        writer = Writer(one, version=9, storage_plugin=plugin)
        if compression is not None:
            writer.set_compression(compression, CompressionFormat.ZSTD)
        with writer:
            camera = writer.add_connection("/camera", IMAGE, typestore=ROS2)
            for _, kind, log_time, each in entries[3 * part : 3 * part + 3]:
                writer.write(camera, log_time, ROS2.serialize_cdr(each, kind))
        for file in one.iterdir():
            if file.suffix != ".yaml":
                file.rename(bag / file.name)
    names = sorted(file.name for file in bag.iterdir())
    listed = "".join(f"    - {name}\n" for name in names)
    (bag / "metadata.yaml").write_text(
        f"rosbag2_bagfile_information:\n  version: 9\n  relative_file_paths:\n{listed}"
    )
    return bag, names


@table("mcap", [False, True])
@table("harm", ["none", "cut", "empty", "missing", "no metadata", "hostile metadata"])
def test_a_bag_of_several_files_loses_only_what_is_damaged(tmp_path, mcap, harm, caplog):
    folder = tmp_path / f"{harm} {mcap}"
    folder.mkdir()
    bag, names = split(folder, mcap)
    middle, metadata = bag / names[1], bag / "metadata.yaml"
    if harm == "cut":
        middle.write_bytes(middle.read_bytes()[:2000])
    elif harm == "empty":
        middle.write_bytes(b"")
    elif harm == "missing":
        middle.unlink()
    elif harm == "no metadata":
        metadata.unlink()
    elif harm == "hostile metadata":
        metadata.write_text("a: &a [x]\n" + "".join(f"b{n}: [*a, *a]\n" for n in range(999)))
    source = RosBags(str(bag), codec="raw")
    stream = list(source.samples())
    numbers = [number_of(sample) for sample, _ in stream]
    whole = harm in ("none", "no metadata", "hostile metadata")
    assert set(numbers) >= {0, 1, 2, 6, 7, 8}
    assert (len(numbers) == 9) == whole
    assert source.skipped.by_reason == ({} if whole else {"damaged": 1})
    assert (names[1] in caplog.text) == (not whole)
    assert list(source.samples(stream[3][1])) == stream[4:]


@table("mcap", [False, True])
@table("mode", [CompressionMode.FILE, CompressionMode.MESSAGE, CompressionMode.STORAGE])
def test_bags_compressed_by_zstd_are_read(tmp_path, mcap, mode):
    if mode == CompressionMode.STORAGE and not mcap:
        return  # SQLite has none
    folder = tmp_path / f"{mcap} {mode}"
    folder.mkdir()
    bag, names = split(folder, mcap, mode)
    assert sent(RosBags(str(bag))) == list(range(9))
    if mode == CompressionMode.FILE:
        assert names[0].endswith(".zstd")
        assert sent(RosBags(str(bag / names[0]))) == [0, 1, 2]
        packed = (bag / names[1]).read_bytes()
        (bag / names[1]).write_bytes(packed[: len(packed) // 2])
        source = RosBags(str(bag))
        assert set(sent(source)) >= {0, 1, 2, 6, 7, 8}
        assert source.skipped.by_reason["damaged"] >= 1


def test_a_packed_bag_that_grows_too_much_is_refused(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("stream_ssl.producers.sources.rosbag.ROOM", 1000)
    (tmp_path / "a.db3.zstd").write_bytes(zstandard.compress(bytes(1 << 26)))
    good = write_bag(tmp_path / "b.bag", drive(ROS1, 2))
    source = RosBags([str(tmp_path / "a.db3.zstd"), str(good)])
    assert sent(source) == [0, 1]
    assert "unpack it elsewhere with zstd -d" in caplog.text


HOSTILE = {
    "a view": (
        "CREATE VIEW messages AS WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) "
        "SELECT x AS id, 1 AS topic_id, x AS timestamp, x'00' AS data FROM n"
    ),
    "computed columns": (
        "CREATE TABLE messages(id INTEGER PRIMARY KEY, topic_id, timestamp, "
        "data AS (zeroblob(900000000))); INSERT INTO messages VALUES(1, 1, 1)"
    ),
    "no columns": "CREATE TABLE messages(x)",
    "texts": (
        "CREATE TABLE messages(id INTEGER PRIMARY KEY, topic_id, timestamp, data);"
        "INSERT INTO messages VALUES(1, 1, 'soon', 'text'), (2, 1, 5, NULL), (3, 1, 6, x'00')"
    ),
}


@table("kind", HOSTILE)
def test_a_hostile_database_costs_itself_alone(tmp_path, kind, caplog):
    path = tmp_path / f"{kind}.db3"
    database = sqlite3.connect(path)
    database.executescript(
        "CREATE TABLE topics(id INTEGER PRIMARY KEY, name, type);"
        f"INSERT INTO topics VALUES(1, '/camera', '{IMAGE}');{HOSTILE[kind]}"
    )
    database.commit()
    database.close()
    good = write_bag(tmp_path / f"{kind}.bag", drive(ROS1, 2))
    source = RosBags([str(path), str(good)])
    began = time.monotonic()
    assert sent(source) == [0, 1]
    assert time.monotonic() - began < 20
    assert source.skipped.by_reason.total() >= 1
    assert ("has no plain tables" in caplog.text) == (kind in ("a view", "computed columns"))


def test_sqlite_stops_where_its_work_outgrows_the_file(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("stream_ssl.producers.sources.rosbag.LOOK", 1)
    monkeypatch.setattr("stream_ssl.producers.sources.rosbag.STEPS", 300)
    monkeypatch.setattr("stream_ssl.producers.sources.rosbag.STEPS_EACH", 0)
    bag = write_bag2(tmp_path / "a", drive(ROS2, 40))
    source = RosBags(str(bag))
    assert len(salvaged(source)) < 40
    assert "takes SQLite less time" in caplog.text


# Messages.


def claims(at, size):
    """A message whose length at a byte is another."""
    data = bytearray(cdr(1))
    data[at : at + 4] = struct.pack("<I", size)
    return bytes(data)


@table("size", [0xFFFFFFFF, 1 << 31, 1 << 24])
def test_a_length_beyond_the_message_is_damage(tmp_path, size):
    whole = cdr(1)
    frame_id = whole.index(b"front") - 4
    encoding = whole.index(b"rgb8") - 4
    data = len(whole) - 64 * 48 * 3 - 4
    bad = [message(1, BEGAN, claims(at, size)) for at in (frame_id, encoding, data)]
    bad += [message(1, BEGAN, whole[:length]) for length in (0, 1, 4, 12, 60)]
    path = write_records(tmp_path / f"{size}.mcap", DEFINED, GOOD[0], *bad, GOOD[1])
    source = McapFiles(str(path))
    assert sent(source) == [0, 1]
    assert source.skipped.by_reason == {"undecodable": 8}


@table(
    "definition",
    [
        DEFINITION.replace("uint32 width", "float64 width"),
        DEFINITION.replace("string frame_id", "string frame_id\nuint8 more"),
        "std_msgs/Header header\n" * 9,
        "uint8[4294967295] data",
        "x" * 100_000,
    ],
)
def test_a_definition_that_is_not_ros_own_decodes_nothing(definition):
    with pytest.raises(ValueError, match="not as ROS does"):
        decoder(IMAGE, definition, ros1=False)
    decoder(IMAGE, DEFINITION, ros1=False)
    decoder("sensor_msgs/Image", ROS1.generate_msgdef(IMAGE)[0], ros1=True)


def claimed(height, width, encoding, step, size):
    made = image(ROS2, np.zeros((1, size, 1), np.uint8), encoding, 1, step=step)
    return replace(made, height=height, width=width)


@table(
    ("claim", "why"),
    [
        (claimed(1, 4, "rgb8", 0xFFFFFFFF, 12), None),
        (claimed(2, 4, "rgb8", 0xFFFFFFFF, 24), "do not fill"),
        (claimed(0xFFFFFFFF, 0xFFFFFFFF, "rgb8", 0, 24), "pixels; at most"),
        (claimed(0, 9, "rgb8", 0, 24), "do not fill"),
        (claimed(1, 70_000, "mono8", 0, 70_000), ""),
        (claimed(1, 3, "yuyv", 6, 6), "must be even"),
    ],
)
@table("codec", ["jpeg", "raw"])
def test_an_image_that_claims_too_much_costs_itself_alone(tmp_path, claim, why, codec, caplog):
    entries = [("/bad", IMAGE, BEGAN, claim), *drive(ROS2, 2)]
    source = McapFiles(str(write_mcap(tmp_path / "a.mcap", entries)), codec=codec)
    samples = [sample for sample, _ in source.samples()]
    assert len(samples) == (3 if why is None else 2)
    assert source.skipped.by_reason == ({} if why is None else {"no image": 1})
    assert (why or "") in caplog.text


def test_a_row_that_claims_gigabytes_takes_no_memory():
    tracemalloc.start()
    try:
        assert pixels(claimed(1, 4, "rgb8", 0xFFFFFFFF, 12)).shape == (1, 4, 3)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@table(("encoding", "order"), [("yuv422", "UYVY"), ("yuv422_yuy2", "YUYV"), ("yuyv", "YUYV")])
def test_yuv_is_told_as_colours(encoding, order):
    colours = {(81, 90, 240): (255, 0, 0), (145, 54, 34): (0, 255, 1), (41, 240, 110): (0, 0, 255)}
    for (level, blue, red), rgb in colours.items():
        pair = {"UYVY": [blue, level, red, level], "YUYV": [level, blue, level, red]}[order]
        data = np.array([pair * 3] * 2, np.uint8)
        made = replace(claimed(2, 6, encoding, 12, 24), data=data.ravel())
        assert np.abs(pixels(made).astype(int) - rgb).max() <= 2


def test_depths_and_video_are_counted(tmp_path, caplog):
    depth = compressed(ROS2, bytes(12) + b"\x89PNG\r\n\x1a\n", "16UC1; compressedDepth png", 1)
    path = tmp_path / "a.mcap"
    with path.open("wb") as file:
        writer = McapWriter(file)
        writer.start("ros2")
        told, _ = ROS2.generate_msgdef(COMPRESSED, ros_version=2)
        kinds = {
            "/depth": (COMPRESSED, told.encode(), bytes(ROS2.serialize_cdr(depth, COMPRESSED))),
            "/video": ("foxglove_msgs/msg/CompressedVideo", b"", b""),
            "/front": (IMAGE, DEFINITION.encode(), cdr(1)),
        }
        for topic, (kind, definition, data) in kinds.items():
            schema = writer.register_schema(kind, "ros2msg", definition)
            writer.add_message(writer.register_channel(topic, "cdr", schema), 1, data, 1)
        writer.finish()
    source = McapFiles(str(path))
    assert sent(source) == [1]
    assert source.skipped.by_reason == {"no image": 1, "video messages": 1}
    assert "is of depths, and no picture" in caplog.text
    assert "foxglove_msgs/msg/CompressedVideo is not read" in caplog.text


def test_a_schema_that_is_no_descriptor_is_read_once(tmp_path, monkeypatch):
    path = Path(write_foxglove(tmp_path / "a.mcap"))
    whole = path.read_bytes()
    from mcap_protobuf import decoder as protobuf

    made = []
    genuine = protobuf.DecoderFactory.decoder_for
    monkeypatch.setattr(
        protobuf.DecoderFactory, "decoder_for", lambda *of: made.append(1) or genuine(*of)
    )
    assert len(whole) > 0
    channel = record(4, struct.pack("<HH", 1, 1) + text(b"/a") + text(b"protobuf") + text(b""))
    schema = record(
        3,
        struct.pack("<H", 1) + text(b"foxglove.RawImage") + text(b"protobuf") + text(b"\xff" * 99),
    )
    bad = [message(1, BEGAN, b"x") for _ in range(5)]
    write_records(path, schema, channel, *bad)
    source = McapFiles(str(path))
    assert salvaged(source) == []
    assert source.skipped.by_reason == {"undecodable": 5}
    assert len(made) == 1
