"""Messages and images of robots that claim more than they hold."""

import struct
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hostile_logs import (
    DEFINED,
    DEFINITION,
    GOOD,
    cdr,
    message,
    record,
    salvaged,
    sent,
    text,
    write_records,
)
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
    write_mcap,
)
from table import table

from stream_ssl.producers.sources import McapFiles
from stream_ssl.producers.sources.robot_messages import decoder
from stream_ssl.producers.sources.robot_pixels import pixels


def claims(at, size):
    """Return a message with another length at a byte."""
    data = bytearray(cdr(1))
    data[at : at + 4] = struct.pack("<I", size)
    return bytes(data)


@table("size", [0xFFFFFFFF, 1 << 31, 1 << 24])
def test_a_message_whose_length_exceeds_its_bytes_costs_no_other_message(tmp_path, size):
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
def test_a_definition_that_differs_from_the_one_of_ros_is_refused(definition):
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
def test_an_image_that_claims_too_much_costs_no_other_image(tmp_path, claim, why, codec, caplog):
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
def test_packed_yuv_pixels_become_rgb_colours(encoding, order):
    colours = {(81, 90, 240): (255, 0, 0), (145, 54, 34): (0, 255, 1), (41, 240, 110): (0, 0, 255)}
    for (level, blue, red), rgb in colours.items():
        pair = {"UYVY": [blue, level, red, level], "YUYV": [level, blue, level, red]}[order]
        data = np.array([pair * 3] * 2, np.uint8)
        made = replace(claimed(2, 6, encoding, 12, 24), data=data.ravel())
        assert np.abs(pixels(made).astype(int) - rgb).max() <= 2


@table("encoding", ["nv12", "nv21", "nv24"])
@table("padding", [0, 10])
def test_planar_yuv_images_become_rgb_colours(encoding, padding):
    """In an image of 4 x 6 pixels, the upper left 2 x 2 are red and the others blue."""
    side = 1 if encoding == "nv24" else 2
    (level, blue, red), (others) = (81, 90, 240), (41, 240, 110)
    level_HW = np.full((4, 6 + padding), others[0], np.uint8)
    level_HW[:2, :2] = level
    pair_HWC = np.full((4 // side, (6 + padding) // side, 2), others[1:], np.uint8)
    pair_HWC[: 2 // side, : 2 // side] = blue, red
    if encoding == "nv21":
        pair_HWC = pair_HWC[..., ::-1]
    data = np.frombuffer(level_HW.tobytes() + pair_HWC.tobytes(), np.uint8)
    last = padding * 2 // side  # bytes after the pixels of the last row, which may be missing
    for whole in (data, data[: len(data) - last]):
        made = replace(claimed(4, 6, encoding, 6 + padding, 24), data=whole)
        image_HWC = pixels(made).astype(int)
        assert np.abs(image_HWC[:2, :2] - (255, 0, 0)).max() <= 2
        assert np.abs(image_HWC[2:] - (0, 0, 255)).max() <= 2
        assert np.abs(image_HWC[:, 2:] - (0, 0, 255)).max() <= 2
    with pytest.raises(ValueError, match=f"do not fill 4 x 6 {encoding}"):
        pixels(replace(made, data=whole[:-1]))
    with pytest.raises(ValueError, match="do not fill"):
        pixels(replace(made, step=0xFFFFFFFF))
    if side == 2:
        with pytest.raises(ValueError, match="3 x 6: must be even, for nv"):
            pixels(replace(made, height=3))


def test_depth_images_and_video_messages_are_counted_and_left_out(tmp_path, caplog):
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


def test_an_invalid_protobuf_schema_is_parsed_only_once(tmp_path, monkeypatch):
    from mcap_protobuf import decoder as protobuf

    made = []
    genuine = protobuf.DecoderFactory.decoder_for
    monkeypatch.setattr(
        protobuf.DecoderFactory, "decoder_for", lambda *of: made.append(1) or genuine(*of)
    )
    channel = record(4, struct.pack("<HH", 1, 1) + text(b"/a") + text(b"protobuf") + text(b""))
    schema = record(
        3,
        struct.pack("<H", 1) + text(b"foxglove.RawImage") + text(b"protobuf") + text(b"\xff" * 99),
    )
    bad = [message(1, BEGAN, b"x") for _ in range(5)]
    path = write_records(tmp_path / "a.mcap", schema, channel, *bad)
    source = McapFiles(str(path))
    assert salvaged(source) == []
    assert source.skipped.by_reason == {"undecodable": 5}
    assert len(made) == 1
