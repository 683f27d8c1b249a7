"""MCAP files and ROS bags: every image is sent once, and damage costs little."""

import base64
import io
import itertools
import json
import os
import shutil
import sqlite3
import struct
from contextlib import closing
from types import SimpleNamespace

import numpy as np
import pytest
from mcap.writer import Writer as McapWriter
from PIL import Image
from robot_files import (
    BEGAN,
    COMPRESSED,
    IMAGE,
    ROS1,
    ROS2,
    SECOND,
    compressed,
    drive,
    image,
    write_bag,
    write_bag2,
    write_foxglove,
    write_mcap,
)
from rosbags.rosbag1 import Writer
from source_files import encoded
from table import table
from video_files import number_of, numbered

from stream_ssl.producers.shaping import Shaped
from stream_ssl.producers.sources import McapFiles, RosBags
from stream_ssl.producers.sources.robot_images import Message, RobotImages
from stream_ssl.producers.sources.robot_messages import decoder, json_image
from stream_ssl.producers.sources.robot_pixels import BAYER, demosaic, pixels
from stream_ssl.wire.sample import check_position

LOGS = {
    "mcap": lambda path: McapFiles(str(write_mcap(path / "a.mcap", drive(ROS2, 60)))),
    "bag": lambda path: RosBags(str(write_bag(path / "a.bag", drive(ROS1, 60)))),
    "bag, bz2": lambda path: RosBags(
        str(write_bag(path / "a.bag", drive(ROS1, 60), fmt=Writer.CompressionFormat.BZ2))
    ),
    "sqlite": lambda path: RosBags(str(write_bag2(path / "a", drive(ROS2, 60)))),
    "mcap in a bag": lambda path: RosBags(str(write_bag2(path / "a", drive(ROS2, 60), mcap=True))),
}


@pytest.mark.parametrize("kind", LOGS)
def test_a_robots_log_sends_every_image_once_and_resumes_after_each(tmp_path, kind):
    source = LOGS[kind](tmp_path)
    stream = list(source.samples())
    numbers = [number_of(sample) for sample, _ in stream]
    assert [number // 2 for number in numbers] == [n // 2 for n in range(60)]  # two share a time
    assert sorted(numbers) == list(range(60))
    assert source.skipped.by_reason == {}
    assert len({sample.id for sample, _ in stream}) == 60
    first, second = stream[0][0], stream[1][0]
    assert [sample.meta["topic"] for sample in (first, second)] == ["/camera/jpeg", "/camera/raw"]
    assert first.meta["frame_id"] == "front"
    assert first.time == pytest.approx(BEGAN / SECOND - 0.005, abs=1e-6)
    assert first.data == encoded(numbered(0), "JPEG")
    for at in (0, 1, 2, 30, 58, 59):
        assert list(source.samples(stream[at][1])) == stream[at + 1 :]


def test_a_position_has_room_for_many_topics(tmp_path):
    write_mcap(tmp_path / "a.mcap", drive(ROS2, 3))
    topics = [f"/robot_{number:03d}/camera/front/image" for number in range(200)]
    topics.append("/camera/raw")
    files = str(tmp_path / "a.mcap")
    (_, position), *rest = Shaped(McapFiles(files, topics=topics)).samples()
    check_position(position)
    assert list(Shaped(McapFiles(files, topics=topics[::-1])).samples(position)) == rest
    with pytest.raises(ValueError, match=r"topics was '201 topics, .*' and is '200 topics, "):
        Shaped(McapFiles(files, topics=topics[1:])).samples(position)


@table(
    ("topics", "expected"),
    [
        (["/camera/raw"], 40),
        ([COMPRESSED], 20),
        (["/camera/raw", "/camera/jpeg"], 60),
        ([IMAGE, "/nothing"], 40),
    ],
)
@table("kind", ["mcap", "bag"])
def test_topics_are_chosen_by_name_or_type(tmp_path, kind, topics, expected):
    LOGS[kind](tmp_path)
    cls = McapFiles if kind == "mcap" else RosBags
    source = cls(str(tmp_path / f"a.{kind}"), topics=topics)
    assert len(list(source.samples())) == expected


@pytest.mark.parametrize("kind", ["mcap", "bag"])
def test_a_warning_names_the_image_topics_if_no_wanted_topic_exists(tmp_path, kind, caplog):
    LOGS[kind](tmp_path)
    cls = McapFiles if kind == "mcap" else RosBags
    with pytest.raises(ValueError, match="not one sample of a whole pass"):
        list(cls(str(tmp_path / f"a.{kind}"), topics=["/chatter"]).samples())
    assert (
        "no message of a topic that is asked for; it has images of /camera/jpeg, /camera/raw"
        in caplog.text
    )


def test_images_of_foxglove_in_protobuf_are_read(tmp_path):
    source = McapFiles(str(write_foxglove(tmp_path / "a.mcap")), codec="raw")
    first, second = (sample for sample, _ in source.samples())
    assert [number_of(first), number_of(second)] == [3, 5]
    assert [first.codec, second.codec] == ["webp", "raw"]
    assert [first.time, second.time] == [BEGAN / SECOND + 1, BEGAN / SECOND + 2]
    assert second.meta == {"file": "a.mcap", "topic": "/2", "frame_id": "rear"}


@table("share", [0.37, 0.8, 0.999])
@table("kind", ["mcap", "bag", "bag, bz2"])
def test_a_cut_log_sends_the_whole_images_before_the_cut(tmp_path, kind, share, caplog):
    source = LOGS[kind](tmp_path)
    (path,) = tmp_path.iterdir()
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    stream = list(source.samples())
    numbers = [number_of(sample) for sample, _ in stream]
    assert numbers == list(range(len(numbers)))
    assert len(numbers) >= 60 * share - 15
    assert "has no index" in caplog.text
    assert source.skipped.by_reason == {"damaged": 1}
    middle = len(stream) // 2
    assert list(source.samples(stream[middle][1])) == stream[middle + 1 :]


def test_a_bag_ignores_hidden_files_in_its_folder(tmp_path):
    source = LOGS["sqlite"](tmp_path)
    stream = list(source.samples())
    (bag,) = (tmp_path / "a").glob("*.db3")
    for name in (f"._{bag.name}", ".DS_Store"):  # macOS writes these files
        (bag.parent / name).write_bytes(b"attributes")
    assert list(source.samples(stream[9][1])) == stream[10:]
    assert source.skipped.by_reason == {}


def with_log(tmp_path):
    """A bag as a killed recorder leaves it: its log (-wal) deletes all messages but ten images."""
    live, left = write_bag2(tmp_path / "live", drive(ROS2, 60)), tmp_path / "left"
    with closing(sqlite3.connect(live / "live.db3", isolation_level=None)) as database:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("DELETE FROM messages WHERE id > 20")
        shutil.copytree(live, left)
    (left / "live.db3-shm").unlink()
    return left


def test_a_bag_with_a_write_ahead_log_resumes_after_a_position(tmp_path):
    """SQLite makes another file in the folder while it reads the log."""
    bag = str(with_log(tmp_path))
    reading = RosBags(bag).samples()
    _, position = next(reading)
    again = list(RosBags(bag).samples(position))
    assert [sample.id for sample, _ in again] == [sample.id for sample, _ in reading]
    assert len(again) == 9


@table("log", ["with messages", "empty"])
def test_a_write_ahead_log_is_read_from_a_read_only_folder(tmp_path, monkeypatch, log):
    archive = with_log(tmp_path)
    if log == "empty":
        (archive / "live.db3-wal").write_bytes(b"")
    before = sorted(archive.iterdir())
    monkeypatch.setattr(os, "access", lambda *_: False)
    stream = RosBags(str(archive)).samples()
    next(stream)
    assert sorted(archive.iterdir()) == before
    assert len(list(stream)) == (59 if log == "empty" else 9)


@pytest.mark.parametrize("kind", LOGS)
def test_a_log_whose_name_is_not_unicode_is_read_and_resumed(tmp_path, kind):
    LOGS[kind](tmp_path)
    (path,) = tmp_path.iterdir()
    path = path.rename(tmp_path / os.fsdecode(b"caf\xe9" + os.fsencode(path.suffix)))
    source = (McapFiles if kind == "mcap" else RosBags)(str(path))
    stream = list(source.samples())
    assert len(stream) == 60
    for sample, position in stream:
        assert sample.meta["file"] == r"caf\xe9" + path.suffix
        check_position(position)
    assert list(source.samples(stream[30][1])) == stream[31:]


@table("mcap", [False, True])
def test_files_of_a_bag_that_overlap_in_time_are_read_one_after_the_other(tmp_path, mcap):
    """A recorder that splits a bag may write a late message of one topic to the next file."""
    parts = {0: (0, 2, 4, 6), 1: (3, 5, 7, 8)}
    suffix = "mcap" if mcap else "db3"
    (tmp_path / "bag").mkdir()
    for part, times in parts.items():
        entries = [
            ("/camera/raw", IMAGE, BEGAN + n * SECOND, image(ROS2, numbered(n), "rgb8", BEGAN))
            for n in times
        ]
        (file,) = write_bag2(tmp_path / str(part), entries, mcap).glob(f"*.{suffix}")
        file.rename(tmp_path / "bag" / f"bag_{part}.{suffix}")
    source = RosBags(str(tmp_path / "bag"))
    stream = list(source.samples())
    assert [number_of(sample) for sample, _ in stream] == [0, 2, 4, 6, 3, 5, 7, 8]
    for at in range(8):
        assert list(source.samples(stream[at][1])) == stream[at + 1 :]


@table("suffix", [".mcap", ".bag", ".db3", ""])
@table("data", [b"", b"no log at all " * 100, b"#ROSBAG V2.0\n" + b"\xff" * 99])
def test_a_file_that_is_no_log_costs_no_other_log(tmp_path, caplog, suffix, data):
    bad = tmp_path / f"bad{suffix}"
    bad.write_bytes(data)
    if suffix == ".mcap":
        good = write_mcap(tmp_path / "good.mcap", drive(ROS2, 3))
        source = McapFiles([str(bad), str(good)])
    else:
        good = write_bag(tmp_path / "good.bag", drive(ROS1, 3))
        source = RosBags([str(bad), str(good)])
    assert [number_of(sample) for sample, _ in source.samples()] == [0, 1, 2]
    assert source.skipped.by_reason == {"damaged": 1}
    assert str(bad) in caplog.text


@table(
    ("head", "remedy"),
    [
        (b"#ROSBAG V2.0\n", "it is a ROS 1 bag: use the source rosbag"),
        (b"SQLite format 3\0", "it may be a ROS 2 bag: use the source rosbag"),
        (b"\x28\xb5\x2f\xfd" + bytes(9), "compressed with Zstandard: unpack it with zstd -d"),
    ],
)
def test_a_warning_names_a_log_of_another_format_and_the_remedy(tmp_path, caplog, head, remedy):
    path = tmp_path / "a.mcap"
    path.write_bytes(head)
    with pytest.raises(ValueError, match="not one sample"):
        list(McapFiles(str(path)).samples())
    assert remedy in caplog.text


def test_the_refusal_of_a_folder_of_logs_suggests_a_pattern(tmp_path, caplog):
    """A ROS 2 bag is a folder, and a folder of bags is no bag."""
    bag = write_bag2(tmp_path / "bags" / "a", drive(ROS2, 3), mcap=True)
    with pytest.raises(ValueError, match=r"in quotes: '.*a/\*\.mcap'"):
        McapFiles(str(bag))
    with pytest.raises(ValueError, match="not one sample"):
        list(RosBags(str(bag.parent)).samples())
    assert f"give a pattern of them, in quotes: '{bag.parent}/*'" in caplog.text
    assert len(list(RosBags(f"{bag.parent}/*").samples())) == 3


@table(
    ("message", "why"),
    [
        (image(ROS2, numbered(1), "yuv9", 0), "encoding 'yuv9' is none of mono8"),
        (image(ROS2, numbered(1)[:9], "rgb8", 0, step=7), "in rows of 7 do not fill 9 x 64 rgb8"),
        (image(ROS2, numbered(1)[:0].reshape(1, 0, 3), "rgb8", 0), "do not fill 1 x 0"),
        (compressed(ROS2, b"II*\0" + b"x" * 99, "tiff", 0), "format 'tiff' is neither JPEG"),
        (compressed(ROS2, b"", "jpeg", 0), "format 'jpeg' is neither JPEG"),
    ],
)
def test_a_message_without_an_image_costs_no_other_message(tmp_path, caplog, message, why):
    bad = ("/bad", COMPRESSED if hasattr(message, "format") else IMAGE, BEGAN, message)
    path = write_mcap(tmp_path / "a.mcap", [*drive(ROS2, 2), bad, *drive(ROS2, 2)])
    source = McapFiles(str(path))
    assert [number_of(sample) for sample, _ in source.samples()] == [0, 1, 0, 1]
    assert source.skipped.by_reason == {"no image": 1}
    assert why in caplog.text
    assert "/bad" in caplog.text


@table("stamp", [0, 12 * SECOND])
def test_a_stamp_before_1990_gives_way_to_the_log_time(tmp_path, stamp):
    """The clock of a camera may count from its start."""
    entry = ("/camera", IMAGE, BEGAN, image(ROS2, numbered(1), "rgb8", stamp))
    ((sample, _),) = McapFiles(str(write_mcap(tmp_path / "a.mcap", [entry]))).samples()
    assert sample.time == BEGAN / SECOND


@table("ros1", [False, True])
def test_a_type_with_new_fields_at_its_end_is_decoded(ros1):
    """Foxglove has appended fields to its images."""
    types = ROS1 if ros1 else ROS2
    text, _ = types.generate_msgdef(IMAGE, ros_version=1 if ros1 else 2)
    own, rest = text.split("\n===", 1)
    grown = f"{own}\nstring message_id\nother_msgs/LineageInfo lineage\n==={rest}"
    data = types.serialize_ros1 if ros1 else types.serialize_cdr
    message = bytes(data(image(types, numbered(4), "rgb8", BEGAN), IMAGE))
    decoded = decoder(IMAGE, grown, ros1)(message + struct.pack("<I", 0))
    assert (pixels(decoded) == numbered(4)).all()


@table(
    "name",
    [
        *("sensor_msgs/msg/Image", "sensor_msgs::msg::Image", "sensor_msgs::msg::dds_::Image_"),
        *("sensor_msgs::msg::CompressedImage", "sensor_msgs::msg::dds_::CompressedImage_"),
    ],
)
def test_the_source_recognises_the_type_names_of_dds_recorders(tmp_path, name):
    if "Compressed" in name:
        message = compressed(ROS2, encoded(numbered(4), "JPEG"), "jpeg", BEGAN)
        data = bytes(ROS2.serialize_cdr(message, COMPRESSED))
    else:
        data = bytes(ROS2.serialize_cdr(image(ROS2, numbered(4), "rgb8", BEGAN), IMAGE))
    path = tmp_path / "a.mcap"
    with path.open("wb") as file:
        writer = McapWriter(file)
        writer.start()
        schema = writer.register_schema(name, "omgidl", b"module sensor_msgs {};")
        writer.add_message(writer.register_channel("rt/front", "cdr", schema), BEGAN, data, BEGAN)
        writer.finish()
    source = McapFiles(str(path))
    ((sample, _),) = source.samples()
    assert number_of(sample) == 4
    assert source.skipped.by_reason == {}


@table("json", [False, True])
def test_a_channel_without_a_definition_of_its_type_is_read(tmp_path, json):
    """rosbag2 records no definition if the package of a type is not installed. JSON needs none."""
    data = bytes(ROS2.serialize_cdr(image(ROS2, numbered(4), "rgb8", BEGAN), IMAGE))
    if json:
        data = b'{"format": "png", "data": "' + base64.b64encode(encoded(numbered(4))) + b'"}'
    path = tmp_path / f"{json}.mcap"
    with path.open("wb") as file:
        writer = McapWriter(file)
        writer.start()
        schema = writer.register_schema("foxglove.CompressedImage" if json else IMAGE, "", b"")
        channel = writer.register_channel("/front", "json" if json else "cdr", schema)
        writer.add_message(channel, BEGAN, data, BEGAN)
        writer.finish()
    source = McapFiles(str(path))
    assert [number_of(sample) for sample, _ in source.samples()] == [4]
    assert source.skipped.by_reason == {}


def test_plain_kinds_of_cdr_are_read_and_other_kinds_are_refused():
    read = decoder(IMAGE, "", ros1=False)
    little = bytes(ROS2.serialize_cdr(image(ROS2, numbered(4), "rgb8", BEGAN), IMAGE))
    big = bytes(
        ROS2.serialize_cdr(image(ROS2, numbered(4), "rgb8", BEGAN), IMAGE, little_endian=False)
    )
    for kind in (0x01, 0x03, 0x07, 0x11):
        assert (pixels(read(bytes([0, kind]) + little[2:])) == numbered(4)).all()
        assert (pixels(read(bytes([0, kind - 1]) + big[2:])) == numbered(4)).all()
    with pytest.raises(ValueError, match="CDR of kind 0x09: only plain kinds are read: 0x00, 0x01"):
        read(b"\0\x09" + little[2:])


PNG = encoded(numbered(6))
LATER = 1_700_000_007


@table(
    ("fields", "time"),
    [
        (
            {"timestamp": {"sec": LATER, "nsec": 500_000_000}, "frame_id": "", "format": "png"},
            LATER + 0.5,
        ),
        ({"timestamp": {"sec": LATER}}, LATER),
        ({"timestamp": {"nsec": 500_000_000}}, 3.0),
        ({"timestamp": "2023-11-14T22:13:27.500000000Z", "format": None}, LATER + 0.5),
        ({"timestamp": "noon", "frame_id": None}, 3.0),
        ({"timestamp": {"sec": "x"}}, 3.0),
        ({"timestamp": {"sec": 1_764_000_000_000}}, 3.0),  # milliseconds
        ({}, 3.0),
    ],
)
def test_json_images_may_lack_every_field_except_the_data(fields, time):
    """JSON that was made from Protobuf lacks default values. The log time is 3 s."""
    images = RobotImages("robot", None, "raw", 90)
    text = json.dumps({"data": base64.b64encode(PNG).decode(), **fields}).encode()
    message = Message("/a", "foxglove.CompressedImage", 3 * SECOND, lambda: json_image(text))
    sample = images.sample(message, "1", "a.mcap")
    assert images.skipped.by_reason == {}
    assert (sample.data, sample.codec, sample.time) == (PNG, "png", time)
    assert sample.meta == {"topic": "/a", "frame_id": ""}


def test_a_raw_image_of_json_may_lack_its_step():
    fields = {"width": 2, "height": 1, "encoding": "mono8"}
    text = json.dumps(fields | {"data": base64.b64encode(b"\1\2").decode()}).encode()
    assert pixels(json_image(text))[..., 0].tolist() == [[1, 2]]


@table(
    ("fields", "why"),
    [({"format": 5}, "format 5: must be a text"), ({"width": -1}, "width -1: must be a whole")],
)
def test_json_with_a_wrong_type_is_refused_with_the_name_of_the_field(fields, why):
    with pytest.raises(ValueError, match=why):
        json_image(json.dumps({"data": ""} | fields).encode())


def message(array, encoding, **more):
    height, width = array.shape[:2]
    facts = {"step": array.nbytes // height, "data": array.tobytes(), "is_bigendian": 0} | more
    return SimpleNamespace(height=height, width=width, encoding=encoding, **facts)


@table(
    ("encoding", "order"),
    [
        ("rgb8", [0, 1, 2]),
        ("bgr8", [2, 1, 0]),
        ("rgba8", [0, 1, 2, 3]),
        ("bgra8", [2, 1, 0, 3]),
        ("mono8", [0]),
        ("8UC3", [2, 1, 0]),
    ],
)
def test_pixels_have_the_channel_order_of_their_encoding(encoding, order):
    array = np.random.default_rng(0).integers(0, 256, (5, 7, len(order)), np.uint8)
    assert (pixels(message(array, encoding)) == array[..., order]).all()
    padded = np.pad(array.reshape(5, -1), ((0, 0), (0, 3)))
    assert (
        pixels(message(array, encoding, step=padded.shape[1], data=padded.tobytes()))
        == array[..., order]
    ).all()


@pytest.mark.parametrize("big", [0, 1])
@pytest.mark.parametrize(
    ("values", "sent"),
    [
        ([0, 255, 256, 65535, 4660], [0, 0, 1, 255, 18]),
        ([0, 1, 16, 4095, 256], [0, 0, 1, 255, 16]),  # a camera of 12 bits
        ([0, 8191, 8192, 5000, 100], [0, 127, 128, 78, 1]),  # a thermal camera of 14 bits
        ([0, 2047, 1024, 300, 16], [0, 127, 64, 18, 1]),  # no camera has 11 bits
        ([0, 1, 128, 255, 254], [0, 1, 128, 255, 254]),
        ([0, 0, 0, 0, 0], [0, 0, 0, 0, 0]),
    ],
)
def test_a_16_bit_image_is_sent_as_the_upper_8_of_the_bits_in_use(big, values, sent):
    array = np.array([values], ">u2" if big else "<u2")
    assert pixels(message(array, "mono16", is_bigendian=big))[..., 0].tolist() == [sent]


def naive_demosaic(image_HW, pattern):
    height, width = image_HW.shape
    out = np.zeros((height, width, 3), np.uint8)

    def has(y, x, colour):
        inside = 0 <= y < height and 0 <= x < width
        return inside and pattern[(y % 2) * 2 + x % 2] == colour

    for y, x, colour in itertools.product(range(height), range(width), range(3)):
        if has(y, x, colour):
            out[y, x, colour] = image_HW[y, x]
            continue
        total = weights = 0
        for down, right in itertools.product((-1, 0, 1), repeat=2):
            if has(y + down, x + right, colour):
                weight = 3 - abs(down) - abs(right)
                total += weight * int(image_HW[y + down, x + right])
                weights += weight
        out[y, x, colour] = round(total / weights)
    return out


@table("encoding", [name for name in BAYER if name.endswith("8")])
@table("shape", [(6, 8), (5, 7)])
def test_bayer_images_are_demosaiced_bilinearly(encoding, shape):
    image_HW = np.random.default_rng(1).integers(0, 256, shape, np.uint8)
    expected = naive_demosaic(image_HW, BAYER[encoding])
    assert (demosaic(image_HW, BAYER[encoding]) == expected).all()
    assert (pixels(message(image_HW, encoding)) == expected).all()
    flat = pixels(message(np.full(shape, 77, np.uint8), encoding))
    assert (flat == 77).all()


@table("tail", ["", "bayer_grbg8", "bayer_grbg16"])
@table("kind", ["jpeg", "png"])
def test_a_compressed_bayer_image_is_sent_in_colours(kind, tail):
    colour_C = [200, 100, 40]
    encoding = tail or "bayer_grbg8"
    levels_HW = np.tile([[100, 200], [40, 100]], (16, 16))
    deep = kind == "png" and encoding.endswith("16")
    levels_HW = levels_HW.astype(np.uint16) * 256 if deep else levels_HW.astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(levels_HW).save(file, kind, quality=100)
    form = f"{encoding}; {kind} compressed {tail}"
    sample = sent(compressed(ROS2, file.getvalue(), form, BEGAN))
    sent_HWC = np.frombuffer(sample.data, np.uint8).reshape(sample.shape)
    assert np.abs(sent_HWC[2:-2, 2:-2].astype(int) - colour_C).max() <= 2


@table("form", ["bayer_rggb8; jpeg compressed bgr8", "bayer_rggb8; jpeg compressed mono8", "jpeg"])
def test_a_compressed_image_that_is_no_mosaic_is_sent_unchanged(form):
    data = encoded(numbered(7)[..., :1] if "mono" in form else numbered(7), "JPEG")
    assert sent(compressed(ROS2, data, form, BEGAN)).data == data


def test_a_mosaic_in_colours_is_sent_unchanged_and_a_damaged_one_is_counted(caplog):
    form = "bayer_rggb8; jpeg compressed "
    data = encoded(numbered(7), "JPEG")
    assert sent(compressed(ROS2, data, form, BEGAN)).data == data
    assert sent(compressed(ROS2, data[: len(data) // 2], form, BEGAN)) is None
    assert "the compressed Bayer image cannot be decoded" in caplog.text


def sent(message):
    """Return the sample of a compressed image."""
    images = RobotImages("mcap", None, "raw", 90)
    return images.sample(Message("/camera", COMPRESSED, BEGAN, lambda: message), "id", "a.mcap")
