"""MCAP files and their parts, written byte by byte, and the numbers that sources send."""

import bz2
import struct

import lz4.frame
import zstandard
from mcap.writer import CompressionType, IndexType
from mcap.writer import Writer as McapWriter
from robot_files import (
    BEGAN,
    IMAGE,
    ROS2,
    image,
)
from video_files import number_of, numbered

DEFINITION, _ = ROS2.generate_msgdef(IMAGE, ros_version=2)


def cdr(number, **more):
    return bytes(ROS2.serialize_cdr(image(ROS2, numbered(number), "rgb8", 1, **more), IMAGE))


def write_plain(path, count=9, **options):
    """Write MCAP with one channel of raw images, by the format's own writer."""
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
    """Return what a source sends. A source that sends nothing raises no error here."""
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
