"""Robots' logs that grow, are cut or are damaged: none of them costs another log."""

import re
from pathlib import Path

import numpy as np
import pytest
from hostile_logs import OPTIONS, salvaged, sent, write_plain
from robot_files import (
    ROS1,
    ROS2,
    drive,
    write_bag,
    write_bag2,
    write_mcap,
)
from table import table
from video_files import number_of

from stream_ssl.producers.sources import McapFiles, RosBags
from stream_ssl.producers.sources.rosbag import parts


@table("kind", ["mcap", "mcap, no chunks", "bag", "a ROS 2 folder"])
def test_a_growing_log_resumes_and_a_changed_log_is_refused(tmp_path, kind):
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
    if kind == "bag":  # the place of the index is written last
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


def test_a_bag_resumes_after_rosbag_renames_the_complete_file(tmp_path):
    """ROS 1 appends .active to the name until the bag is complete. A crash leaves this name."""
    bag = write_bag(tmp_path / "a.bag", drive(ROS1, 60))
    whole, expected = bag.read_bytes(), sent(RosBags(str(bag)))
    head = re.sub(rb"index_pos=.{8}", b"index_pos=" + bytes(8), whole, count=1, flags=re.DOTALL)
    active = bag.rename(tmp_path / "a.bag.active")
    active.write_bytes(head[: len(head) // 2])
    stream = list(RosBags(str(active)).samples())
    active.rename(bag).write_bytes(whole)
    rest = RosBags(str(tmp_path / "a.bag*")).samples(stream[-1][1])
    assert [number_of(sample) for sample, _ in (*stream, *rest)] == expected


@table("kind", ["mcap", "bag"])
def test_a_log_that_is_removed_before_its_turn_costs_no_other_log(tmp_path, kind):
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
def test_a_log_that_is_cut_anywhere_sends_only_whole_images_and_counts_damage(tmp_path, kind):
    cls, path = logs(tmp_path)[kind]
    whole = path.read_bytes()
    before = []
    for percent in range(0, 100, 5):
        path.write_bytes(whole[: len(whole) * percent // 100])
        source = cls(str(path))
        numbers = salvaged(source)
        if kind != "sqlite":  # its pages have an order of their own
            assert numbers == list(range(len(numbers)))
            assert len(numbers) >= len(before)
        assert set(numbers) <= set(range(9))
        assert source.skipped.by_reason["damaged"] >= 1, percent
        before = numbers
    assert len(before) >= 5


@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_byte_is_counted_and_costs_few_images(tmp_path, kind):
    cls, path = logs(tmp_path)[kind]
    whole = path.read_bytes()
    random, lost = np.random.default_rng(3), []
    for at in random.choice(len(whole), 30, replace=False).tolist():
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        source = cls(str(path))
        samples = salvaged(source, lambda sample: sample)
        lost.append(9 - len(samples))
        assert lost[-1] <= 0 or source.skipped.by_reason, at  # nothing is left out silently
        if cls is McapFiles:  # its checksums also reveal changes
            changed = [number_of(sample) for sample in samples] != list(range(9))
            assert source.skipped.by_reason or not changed, at
    assert np.median(lost) <= 3


def test_parts_of_a_bag_are_sorted_by_number_despite_odd_digits_in_names(tmp_path: Path) -> None:
    for name in ("drive_10.db3", "drive_9.db3", "drive_²_1.db3"):
        (tmp_path / name).touch()
    files, missing = parts(tmp_path)
    assert [file.name for file in files] == ["drive_9.db3", "drive_10.db3", "drive_²_1.db3"]
    assert not missing
