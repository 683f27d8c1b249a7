"""MCAP files of every form, and files that claim more than they hold."""

import bz2
import struct
import time

import lz4.frame
import numpy as np
import pytest
import zstandard
from hostile_logs import (
    DEFINED,
    DEFINITION,
    GOOD,
    OPTIONS,
    cdr,
    mcap_chunk,
    message,
    record,
    sent,
    text,
    write_plain,
    write_records,
)
from mcap.data_stream import RecordBuilder
from mcap.records import Message
from mcap.writer import Writer as McapWriter
from robot_files import (
    BEGAN,
    IMAGE,
)
from table import table
from video_files import number_of

from stream_ssl.producers.sources import McapFiles, RosBags, chunked, mcap_file
from stream_ssl.producers.sources.base import BrokenFileError


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
    """Write messages: the numbers in `inside` lie in chunks, the others between the chunks."""
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


def test_damage_between_chunks_loses_no_chunk(tmp_path):
    path = write_mixed(tmp_path / "a.mcap", {0, 1, 2, 9, 10, 15, 19}, damage=5)
    source = McapFiles(str(path))
    numbers = sent(source)
    assert numbers == [n for n in range(20) if not 5 <= n <= 8]
    assert source.skipped.by_reason == {"damaged": 1}


TINY = message(7, 0, b"")  # a message without a channel


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
def test_an_mcap_bomb_loses_no_other_message(tmp_path, bomb):
    path = write_records(tmp_path / "a.mcap", DEFINED, GOOD[0], BOMBS[bomb](), GOOD[1])
    source = McapFiles(str(path))
    began = time.monotonic()
    assert sent(source) == [0, 1]
    assert time.monotonic() - began < 20  # an idle machine takes a second
    # The messages of an undefined channel count as one more damaged part.
    assert source.skipped.by_reason["damaged"] == (2 if "tiny" in bomb else 1)


def test_an_index_that_names_a_chunk_twice_is_ignored(tmp_path, caplog):
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
def test_a_chunk_that_unpacks_to_too_much_is_refused_while_it_is_unpacked(form, monkeypatch):
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
