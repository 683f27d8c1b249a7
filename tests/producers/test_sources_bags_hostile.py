"""Bags and databases that are damaged, hostile or compressed."""

import bz2
import sqlite3
import struct
import time

import lz4.frame
import pytest
import zstandard
from hostile_logs import salvaged, sent, text
from robot_files import (
    BEGAN,
    IMAGE,
    ROS1,
    ROS2,
    drive,
    image,
    write_bag,
    write_bag2,
)
from rosbags.rosbag2 import CompressionFormat, CompressionMode
from table import table
from video_files import number_of, numbered

from stream_ssl.producers.sources import RosBags
from stream_ssl.producers.sources.bag_file import header_of
from stream_ssl.producers.sources.base import BrokenFileError

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
def test_a_bomb_in_a_bag_costs_no_other_message(tmp_path, compression, plain, claimed):
    pack = {"bz2": bz2.compress, "lz4": lz4.frame.compress}.get(compression, lambda data: data)
    bomb = bag_record(
        pack(plain), op=b"\5", compression=compression.encode(), size=struct.pack("<I", claimed)
    )
    whole = write_bag(tmp_path / "a.bag", drive(ROS1, 2)).read_bytes()
    path = tmp_path / "b.bag"
    begin = len(b"#ROSBAG V2.0\n")
    path.write_bytes(whole[:begin] + bomb + whole[begin:])  # this moves the index, too
    source = RosBags(str(path))
    assert sent(source) == [0, 1]
    assert source.skipped.by_reason == {"damaged": 1}


def test_a_bag_header_with_wrong_lengths_is_refused_as_damaged():
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
def test_a_bag_of_several_files_loses_only_damaged_messages(tmp_path, mcap, harm, caplog):
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


def test_a_glob_of_all_folders_sends_each_bag_once(tmp_path):
    (tmp_path / "days").mkdir()
    for day, mcap in (("tuesday", True), ("monday", False)):
        (tmp_path / day).mkdir()
        bag, names = split(tmp_path / day, mcap)
        bag.rename(tmp_path / "days" / f"{day} bag")
    write_bag(tmp_path / "days" / "ros 1.bag", drive(ROS1, 2))
    source = RosBags(str(tmp_path / "days" / "**"), codec="raw")
    assert sent(source) == [*range(9), 0, 1, *range(9)]  # monday, ros 1, tuesday
    assert source.skipped.by_reason == {}
    by_name = RosBags([str(tmp_path / "days" / "monday bag" / name) for name in names])
    assert sent(by_name) == list(range(9))


@table("mcap", [False, True])
@table("mode", [CompressionMode.FILE, CompressionMode.MESSAGE, CompressionMode.STORAGE])
def test_bags_compressed_by_zstd_are_read(tmp_path, mcap, mode):
    if mode == CompressionMode.STORAGE and not mcap:
        return  # SQLite has no compressed storage
    folder = tmp_path / f"{mcap} {mode}"
    folder.mkdir()
    bag, names = split(folder, mcap, mode)
    assert sent(RosBags(str(bag))) == list(range(9))
    if mode == CompressionMode.FILE:
        assert names[0].endswith(".zstd")
        assert sent(RosBags(str(bag / names[0]))) == [0, 1, 2]
        short = (bag / names[2]).rename(bag / f"{names[2].removesuffix('.zstd')}.zst")
        assert sent(RosBags(str(short))) == [6, 7, 8]  # the command zstd gives this name
        source = RosBags(str(bag))
        assert sent(source) == list(range(9))
        assert source.skipped.by_reason == {}
        packed = (bag / names[1]).read_bytes()
        (bag / names[1]).write_bytes(packed[: len(packed) // 2])
        source = RosBags(str(bag))
        assert set(sent(source)) >= {0, 1, 2, 6, 7, 8}
        assert source.skipped.by_reason["damaged"] >= 1


@table("mcap", [False, True])
def test_a_file_that_rosbag2_compresses_before_its_turn_is_read(tmp_path, mcap):
    """rosbag2 compresses a file of a bag once the next one is recorded."""
    folder = tmp_path / f"{mcap}"
    folder.mkdir()
    bag, names = split(folder, mcap)
    source = RosBags(str(bag))
    stream = source.samples()
    numbers = [number_of(next(stream)[0])]
    plain = bag / names[1]
    (bag / f"{names[1]}.zstd").write_bytes(zstandard.compress(plain.read_bytes()))
    plain.unlink()
    assert [*numbers, *(number_of(sample) for sample, _ in stream)] == list(range(9))
    assert source.skipped.by_reason == {}


def test_a_compressed_bag_that_unpacks_to_too_much_is_refused(tmp_path, monkeypatch, caplog):
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
def test_a_hostile_database_costs_no_other_bag(tmp_path, kind, caplog):
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


def test_a_bag_ends_when_the_work_of_sqlite_outgrows_the_file(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("stream_ssl.producers.sources.rosbag.LOOK", 1)
    monkeypatch.setattr("stream_ssl.producers.sources.rosbag.STEPS", 300)
    monkeypatch.setattr("stream_ssl.producers.sources.rosbag.STEPS_EACH", 0)
    bag = write_bag2(tmp_path / "a", drive(ROS2, 40))
    source = RosBags(str(bag))
    assert len(salvaged(source)) < 40
    assert "takes SQLite less time" in caplog.text
