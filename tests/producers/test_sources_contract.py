"""The properties of every source in the table, and of every way to shape a source."""

import errno
import inspect
import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jsonargparse
import numpy as np
import pyarrow
import pytest
from going_on import check_goes_on
from lerobot_files import write_lerobot
from pyarrow.parquet import write_table
from robot_files import ROS1, ROS2, drive, write_bag, write_mcap
from source_files import (
    age,
    encoded,
    pixels,
    shard_members,
    write_cifar,
    write_idx,
    write_images,
    write_tar,
)
from table import table
from video_files import write_video

from stream_ssl.producers.shaping import Parked, Popularity, Shaped, Shift, Stalls, Video
from stream_ssl.producers.sources import (
    SOURCES,
    Camera,
    CifarBinary,
    IdxDataset,
    ImageFolder,
    LeRobot,
    McapFiles,
    NpyVectors,
    ParquetFiles,
    Ros,
    RosBags,
    Source,
    Synthetic,
    VideoFiles,
    WatchedFolder,
    WebDataset,
    ZenohRos,
)
from stream_ssl.producers.sources.base import Skipped, SourceError


def idx(folder: Path, **settings: object) -> Source:
    write_idx(folder / "Tiny/raw", "train", pixels(12, 4, 5), np.arange(12) % 3, packed=True)
    return IdxDataset(folder, epochs=2, **settings)


def cifar(folder: Path, **settings: object) -> Source:
    for part in (1, 2):
        labels = np.arange(5) % 3
        write_cifar(folder / f"data_batch_{part}.bin", pixels(5, 32, 32, 3, seed=part), labels)
    return CifarBinary(folder, epochs=2, **settings)


def images(folder: Path, **settings: object) -> Source:
    for label, name in enumerate(("ant", "bee", "cat")):
        write_images(folder / name, 4, seed=label)
    return ImageFolder(folder, epochs=2, **settings)


def synthetic(folder: Path, **settings: object) -> Source:
    drift = {"prototype_period": 300, "mix_period": 500, "duplicates": 0.3}
    return Synthetic(count=530, size=8, **(drift | settings))


def watch(folder: Path, **settings: object) -> Source:
    for number, path in enumerate(write_images(folder / "in", 9)):
        age(path, 1000 + number % 4)
    quick = {"settle_seconds": 0, "idle_seconds": 0, "poll_seconds": 0}
    return WatchedFolder(folder, **(quick | settings))


def webdataset(folder: Path, **settings: object) -> Source:
    folder.mkdir(exist_ok=True)
    write_tar(folder / "data-000.tar", shard_members(0, 5))
    write_tar(folder / "data-001.tar", shard_members(5, 4), "w:gz")
    return WebDataset(str(folder / "data-{000..001}.tar"), epochs=2, **settings)


def video(folder: Path, **settings: object) -> Source:
    folder.mkdir(exist_ok=True)
    for name, frames in (("a.mp4", 7), ("b.mkv", 4)):
        if not (folder / name).exists():
            write_video(folder / name, frames)
    return VideoFiles(str(folder / "[ab].m*"), epochs=2, **settings)


def mcap(folder: Path, **settings: object) -> Source:
    folder.mkdir(exist_ok=True)
    for name, count in (("a", 4), ("b", 3)):
        write_mcap(folder / f"{name}.mcap", drive(ROS2, count))
    return McapFiles(str(folder / "*.mcap"), epochs=2, **settings)


def rosbag(folder: Path, **settings: object) -> Source:
    folder.mkdir(exist_ok=True)
    if not (folder / "a.bag").exists():
        write_bag(folder / "a.bag", drive(ROS1, 7))
    return RosBags(str(folder / "a.bag"), epochs=2, **settings)


def parquet(folder: Path, **settings: object) -> Source:
    folder.mkdir(exist_ok=True)
    for number, count in enumerate((5, 4)):
        cells = [encoded(image) for image in pixels(count, 6, 5, 3, seed=number)]
        table = pyarrow.table({"image": cells, "label": list(range(count))})
        write_table(table, folder / f"{number}.parquet", row_group_size=2)
    return ParquetFiles(str(folder / "*.parquet"), epochs=2, **settings)


def lerobot(folder: Path, **settings: object) -> Source:
    if not folder.is_dir() or not (folder / "meta").exists():
        write_lerobot(folder, "v3.0")
    return LeRobot(folder, episodes="1:", epochs=2, **settings)


def npy(folder: Path, **settings: object) -> Source:
    folder.mkdir(exist_ok=True)
    np.save(folder / "train.npy", np.random.default_rng(0).normal(size=(12, 6)).astype(np.float16))
    np.save(folder / "labels.npy", np.arange(12) % 3)
    files = {"file": folder / "train.npy", "labels": folder / "labels.npy"}
    return NpyVectors(**files, epochs=2, **settings)


BUILDERS: dict[str, Callable[..., Source]] = {
    "cifar": cifar,
    "idx": idx,
    "images": images,
    "lerobot": lerobot,
    "mcap": mcap,
    "npy": npy,
    "parquet": parquet,
    "rosbag": rosbag,
    "synthetic": synthetic,
    "video": video,
    "watch": watch,
    "webdataset": webdataset,
}
SHAPES = {
    "kept": {"duplicates": 0.3, "near": 0.5, "window": 7},
    "biased": {"bias": 3, "dominant": 1, "order": "iid", "duplicates": 0.2, "window": 5},
    "sequential": {"order": "sequential", "window": 8, "limit": 15},
    "blurred": {"order": "blurred", "blur": 3, "window": 24},
}
PARKED = {"share": 0.6, "scenes": 2, "stretch": 4.0}
ELSEWHERE = {
    "camera",
    "crawl",
    "kafka",
    "nats",
    "ros",
    "zenoh",
}  # sources that need a network, with tests of their own
LIVE = {
    "camera": partial(Camera, "rtsp://127.0.0.1:9/x"),
    "ros": partial(Ros, "ws://127.0.0.1:9"),
    "zenoh": partial(ZenohRos, "tcp/127.0.0.1:9"),
}
CASES = [
    *((kind, None) for kind in BUILDERS),
    # A shape depends on the labels of its source, and on its files, pixels or vectors.
    *itertools.product(("webdataset",), (*SHAPES, "parked")),
    *(("watch", "kept"), ("video", "parked"), ("npy", "kept")),
]


def build(kind: str, shape: str | None, folder: Path) -> Source:
    source = BUILDERS[kind](folder)
    if shape == "parked":
        return Parked(source, **PARKED)
    return source if shape is None else Shaped(source, **SHAPES[shape])


def test_every_listed_source_has_contract_tests_or_tests_elsewhere():
    assert set(BUILDERS) | ELSEWHERE == set(SOURCES)


@pytest.mark.parametrize(("kind", "shape"), CASES)
def test_every_source_resumes_exactly_after_every_position(kind, shape, tmp_path):
    """Positions may have passed through JSON or msgpack. Each id stands for one content."""
    name = build(kind, shape, tmp_path).name
    contents: dict[str, bytes] = {}
    for sample, _ in check_goes_on(lambda: build(kind, shape, tmp_path)):
        assert sample.source == name
        assert contents.setdefault(sample.id, bytes(sample.data)) == bytes(sample.data)
    assert len(contents) >= 5


@table("kind", [kind for kind in BUILDERS if kind not in ("watch", "synthetic")])
def test_ids_are_the_same_in_every_epoch(kind, tmp_path):
    ids = [sample.id for sample, _ in BUILDERS[kind](tmp_path).samples()]
    half = len(ids) // 2
    assert set(ids[:half]) == set(ids[half:])
    assert len(set(ids)) == half


@table("kind", [kind for kind in BUILDERS if kind != "synthetic"])
def test_stop_ends_every_source_after_the_current_sample(kind, tmp_path, caplog):
    caplog.set_level("INFO")
    source = BUILDERS[kind](tmp_path)
    stream = source.samples()
    next(stream)
    source.stop()
    assert list(stream) == []
    assert caplog.messages[-1] == f"source {source.name} was stopped; left out: nothing"


@table("kind", ["images", "lerobot", "mcap", "parquet", "rosbag", "video", "webdataset"])
def test_a_lack_of_file_descriptors_ends_a_source_and_costs_no_sample(kind, tmp_path, monkeypatch):
    ids = [sample.id for sample, _ in BUILDERS[kind](tmp_path).samples()]
    source = BUILDERS[kind](tmp_path)
    _, position = next(source.samples())
    with monkeypatch.context() as patch:
        busy = OSError(errno.EMFILE, "Too many open files")
        patch.setattr(Path, "open", lambda *_: (_ for _ in ()).throw(busy))
        with pytest.raises(SourceError, match="Too many open files; raise ulimit -n, and start"):
            list(source.samples(position))
    assert source.skipped.by_reason == {}
    assert [sample.id for sample, _ in source.samples(position)] == ids[1:]


@table("kind", BUILDERS)
def test_a_source_refuses_the_position_of_another_source(kind, tmp_path):
    source = BUILDERS[kind](tmp_path)
    _, position = next(iter(source.samples()))
    other = BUILDERS[kind](tmp_path, name="another")
    with pytest.raises(ValueError, match=r"source was '.+' and is 'another'.*position None"):
        next(other.samples(position))
    for broken in (17, "here", [], {}, {"at": [0], "of": 3}, position | {"at": [-1, "x"]}):
        with pytest.raises(ValueError, match="position does not fit"):
            next(source.samples(broken))


@table("kind", LIVE)
def test_a_live_source_refuses_the_position_of_another_live_source(kind):
    source = LIVE[kind](name="one")
    position = {"at": None, "of": {"source": "one", "live": True}}
    source.samples(position)
    with pytest.raises(ValueError, match="source was 'one' and is 'two'"):
        LIVE[kind](name="two").samples(position)
    for broken in (17, "here", [], {}, {"at": [0], "of": 3}):
        with pytest.raises(ValueError, match="position does not fit"):
            source.samples(broken)


@table("kind", ["lerobot", "mcap", "rosbag", "video"])
def test_a_position_outside_the_files_is_refused(kind, tmp_path):
    source = BUILDERS[kind](tmp_path)
    _, position = next(source.samples())
    for at in ([0, 2**64, 0], [0, -(2**64), 0], [0, 0, -1], [0, 0, 2**64], [-1, 0, 0], [0, 0]):
        with pytest.raises(ValueError, match=r"position does not fit: .* does not lie within"):
            next(source.samples(position | {"at": at}))


@table("kind", ["cifar", "idx", "images", "synthetic"])
def test_a_position_of_another_seed_is_refused(kind, tmp_path):
    _, position = next(iter(BUILDERS[kind](tmp_path, seed=1).samples()))
    with pytest.raises(ValueError, match="seed was 1 and is 2"):
        BUILDERS[kind](tmp_path, seed=2).samples(position)


@table("kind", ["cifar", "idx", "images"])
def test_a_position_of_another_subset_is_refused(kind, tmp_path):
    _, position = next(iter(BUILDERS[kind](tmp_path, subset=":7").samples()))
    with pytest.raises(ValueError, match="samples was"):
        BUILDERS[kind](tmp_path, subset="1:8").samples(position)


@table("source", [*SOURCES.values(), Parked, Shaped, Popularity, Shift, Stalls, Video])
def test_every_argument_has_a_type_and_a_help_text(source):
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(source, "of", skip={"source"})
    described = {action.dest: action.help for action in parser._actions}
    arguments = inspect.signature(source).parameters.values()
    own = {one.name for one in arguments if one.kind is not one.VAR_KEYWORD} - {"source"}
    assert {f"of.{name}" for name in own} <= set(described)
    for name, text in described.items():
        assert name == "help" or name.endswith((".help",)) or text, name


def test_a_config_file_can_nest_a_source_in_a_shape(tmp_path):
    write_idx(tmp_path / "Tiny/raw", "train", pixels(12, 4, 5), np.arange(12), packed=False)
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(Shaped, "stream")
    source = {
        "class_path": "stream_ssl.producers.sources.IdxDataset",
        "init_args": {"root": str(tmp_path), "subset": "2:9", "epochs": None, "seed": 3},
    }
    arguments = {"source": source, "bias": 27, "dominant": 2, "order": "iid"}
    shaped = "stream_ssl.producers.shaping.Shaped"
    config = {"stream": {"class_path": shaped, "init_args": arguments}}
    shaped = parser.instantiate(parser.parse_object(config)).stream
    assert isinstance(shaped, Shaped)
    assert len(shaped.source) == 7
    assert shaped.source.epochs is None


def test_the_log_prints_names_of_left_out_files_without_control_characters(
    caplog: pytest.LogCaptureFixture,
) -> None:
    Skipped("tar").note("damaged", "a\x1b[2J\nname.jpg", ValueError("b\x9b31m"))
    (made,) = caplog.records
    assert made.getMessage() == "source tar: left out a?[2J?name.jpg (damaged): b?31m"
