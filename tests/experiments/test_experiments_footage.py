"""The footage: reading recordings, what a memory holds of them, its runs and tables."""

from __future__ import annotations

import io
import itertools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from mcap_ros2.writer import Writer
from numpy.typing import NDArray
from PIL import Image
from table import table

from benchmarks.experiments.footage import __main__ as command
from benchmarks.experiments.footage import report
from benchmarks.experiments.footage.recordings import RECORDINGS, Footage, Recording, robot
from benchmarks.experiments.footage.training import (
    ARMS,
    TITLES,
    FootageRun,
    FootageSettings,
    Shown,
    holdings,
    near_duplicates,
    run_once,
)
from benchmarks.experiments.results import Results, RunResult

SIDE = 32
TINY = FootageSettings(capacity=128, updates=1)


def pictures(count: int, seed: int = 0, side: int = SIDE) -> NDArray[np.uint8]:
    """Return different pictures with large blocks of colour."""
    blocks = np.random.default_rng(seed).integers(0, 256, (count, 8, 8, 3), dtype=np.uint8)
    return blocks.repeat(side // 8, axis=1).repeat(side // 8, axis=2)


def frames(image_NHWC: NDArray[np.uint8], **known: Any) -> Footage:
    count = len(image_NHWC)
    facts: dict[str, Any] = {
        "producers": ["robot"] * count,
        "label_N": np.arange(count) % 2,
        "room_N": np.arange(count) // 8,
        "scene_N": np.arange(count) // 4,
        "original_N": np.arange(count),
        "kinds": [frozenset({"door"} if n % 2 else {"lamp"}) for n in range(count)],
    }
    return Footage(image_NHWC, **(facts | known))


def encoded(image_HWC: NDArray[np.uint8], kind: str) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image_HWC).save(file, kind)
    return file.getvalue()


STAMP = "builtin_interfaces/Time stamp\nstring frame_id"
DEFINITION = f"""std_msgs/Header header
string format
uint8[] data
{"=" * 80}
MSG: std_msgs/Header
{STAMP}
{"=" * 80}
MSG: builtin_interfaces/Time
int32 sec
uint32 nanosec
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a patrol of two floors, a yard, a film, and a crawl with copies and broken files."""
    root = tmp_path_factory.mktemp("footage")
    for name in ("patrol", "clips", "web"):
        (root / name).mkdir()
    rows = []
    with (root / "patrol" / "patrol.mcap").open("wb") as file:
        writer = Writer(file)
        schema = writer.register_msgdef("sensor_msgs/msg/CompressedImage", DEFINITION)
        for number, image_HWC in enumerate(pictures(24)):
            when = 10**18 + number * 10**8
            stamp = {"sec": when // 10**9, "nanosec": when % 10**9}
            data = encoded(image_HWC, "JPEG")
            message = {
                "header": {"stamp": stamp, "frame_id": ""},
                "format": "jpeg",
                "data": data,
            }
            writer.write_message("/image", schema, message, when, when)
            seen = {"lamp": 500} if number % 2 else {"door": 500, "speck": 3}
            x = 250.0 if number % 12 < 6 else 260.0
            rows.append([number, when, number // 12, number % 12 // 4, x, -1.0, 0.0, seen])
        writer.finish()
    (root / "patrol" / "patrol.json").write_text(json.dumps(rows))
    for name, count in (("vtest.avi", 6), ("film.avi", 5)):
        with av.open(str(root / "clips" / name), "w") as film:
            stream = film.add_stream("mjpeg", 10)
            stream.width = stream.height = 64
            stream.pix_fmt = "yuvj420p"
            for image_HWC in pictures(count, seed=len(name), side=64):
                frame = av.VideoFrame.from_ndarray(image_HWC, "rgb24")
                film.mux(stream.encode(frame.reformat(format="yuvj420p")))
            film.mux(stream.encode())
    files = []
    for number, image_HWC in enumerate(pictures(40, seed=3)):
        for kind, copied in (("original", image_HWC), ("flip", image_HWC[:, ::-1])):
            name = f"{number}-{kind}.png"
            (root / "web" / name).write_bytes(encoded(copied, "PNG"))
            files.append([name, f"class{number % 3}", f"picture{number}", kind])
    for name, data in (("empty.jpg", b""), ("broken.jpg", b"\xff\xd8 not a picture")):
        (root / "web" / name).write_bytes(data)
        files.append([name, "class0", name, "original"])
    (root / "web" / "web.json").write_text(json.dumps(files))
    return root


def test_the_last_quarter_of_each_floor_is_tested_and_not_streamed(folder: Path) -> None:
    found = robot(folder, SIDE)
    assert found.stream.original_N.tolist() == [*range(9), *range(12, 21)]
    assert found.tested.original_N.tolist() == [9, 10, 11, 21, 22, 23]
    assert found.tested.label_N.tolist() == [0, 0, 0, 1, 1, 1]
    assert found.stream.kinds[:2] == [frozenset({"door"}), frozenset({"lamp"})]
    assert len(np.unique(found.stream.scene_N)) == 6


def test_a_room_is_a_square_of_its_floor(folder: Path) -> None:
    found = robot(folder, SIDE)
    assert found.stream.room_N.tolist() == [0] * 6 + [1] * 3 + [2] * 6 + [3] * 3
    assert found.tested.room_N.tolist() == [1, 1, 1, 3, 3, 3]


def test_cameras_begin_and_end_at_the_same_time(folder: Path) -> None:
    stream = RECORDINGS["cameras"](folder, SIDE).stream
    assert {name: stream.producers.count(name) for name in {*stream.producers}} == {
        "robot": 18,
        "yard": 12,
        "films": 5,
    }
    assert set(stream.producers[:5]) == set(stream.producers[-5:]) == {"robot", "yard", "films"}
    robots = stream.original_N[stream.label_N >= 0]
    assert robots.tolist() == sorted(robots.tolist()), "each producer keeps its order"
    yard = [row for row, name in enumerate(stream.producers) if name == "yard"]
    assert (stream.image_NHWC[yard[0]] == stream.image_NHWC[yard[6]]).all(), "shown twice"


def test_a_crawl_streams_no_broken_file_and_no_copy_of_a_tested_picture(folder: Path) -> None:
    found = RECORDINGS["crawl"](folder, SIDE)
    assert len(found.stream) + 2 * len(found.tested) == 80
    assert 0 < len(found.tested) < 10
    assert not np.isin(found.tested.original_N, found.stream.original_N).any()
    assert len(np.unique(found.stream.original_N)) * 2 == len(found.stream)


def test_a_patrol_with_fewer_rows_than_images_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "patrol").mkdir()
    for name in ("patrol.mcap", "patrol.json"):
        (tmp_path / "patrol" / name).write_bytes((folder / "patrol" / name).read_bytes())
    rows = json.loads((folder / "patrol" / "patrol.json").read_text())
    (tmp_path / "patrol" / "patrol.json").write_text(json.dumps(rows[:-1]))
    with pytest.raises(ValueError, match=r"24 images, patrol\.json 23 rows"):
        robot(tmp_path, SIDE)


def test_holdings_equal_the_counts_by_hand() -> None:
    image_NHWC = pictures(12)
    seen = frames(image_NHWC, producers=["robot", "yard"] * 6)
    rows = np.array([0, 1, 2, 3, 6])
    held = seen.at(np.append(rows, 6))  # the last picture is held twice
    found = holdings(held, seen)
    assert (found["slots robot"], found["slots yard"]) == (4, 2)
    assert found["near_duplicates"] == pytest.approx(2 / 6)
    assert found["copies"] == pytest.approx(1 / 6)
    assert found["scenes"] == 2
    assert found["kinds"] == 2
    share_C = np.array([4, 2]) / 6
    assert found["classes"] == pytest.approx(math.exp(-(share_C * np.log(share_C)).sum()))

    small_NF = image_NHWC.mean(3).reshape(12, 16, 2, 16, 2).mean((2, 4)).reshape(12, -1)
    small_NF -= small_NF.mean(1, keepdims=True)
    small_NF /= np.linalg.norm(small_NF, axis=1, keepdims=True)
    gap_N = np.array([min(np.linalg.norm(one - small_NF[row]) for row in rows) for one in small_NF])
    assert found["gap"] == pytest.approx(gap_N.reshape(3, 4).mean(), abs=1e-3)
    assert found["worst_gap"] == pytest.approx(np.quantile(gap_N, 0.99), abs=1e-3)


def test_near_duplicates_counts_mirrored_pictures_and_no_different_pictures() -> None:
    image_NHWC = pictures(20)
    assert near_duplicates(image_NHWC) == 0
    mirrored = np.concatenate([image_NHWC, image_NHWC[:5, :, ::-1]])
    assert near_duplicates(mirrored) == pytest.approx(10 / 25)


def test_a_recording_is_shown_in_order_and_repeated(folder: Path) -> None:
    shown = Shown(frames(pictures(6)), batch=4, passes=2)
    assert shown.batches == 3
    taken = [shown.next(0.0) for _ in range(3)]
    assert np.concatenate([batch.ids_B for batch in taken]).tolist() == [*range(12)]
    assert (taken[0].images_BCHW[0] == taken[1].images_BCHW[2]).all()
    assert taken[0].hashes_B[0] == taken[1].hashes_B[2]


def test_every_arm_has_a_title() -> None:
    assert {*TITLES} == {*ARMS}


@pytest.fixture(scope="module")
def recording() -> Recording:
    return Recording(frames(pictures(256)), frames(pictures(16, seed=1)))


@pytest.mark.parametrize("arm", ["duel", "queue, no test"])
def test_a_run_trains_on_the_recording_and_measures_its_memory(
    arm: str, recording: Recording
) -> None:
    found = run_once(TINY, FootageRun("cameras", arm, 0), recording)
    assert (found["received"], found["admitted"], found["slots robot"]) == (256, 256, 128)
    assert found["updates"] == 2
    assert 0 <= found["knn"] <= 1
    assert found["object_queries"] == 16
    assert found["room_queries"] == 16


def test_runs_of_two_seeds_differ_and_runs_of_one_seed_are_equal(recording: Recording) -> None:
    one, other, again = (
        run_once(TINY, FootageRun("cameras", "reservoir", seed), recording) for seed in (0, 1, 0)
    )
    told = ("gap", "worst_gap")
    assert [one[name] for name in told] == [again[name] for name in told]
    assert [one[name] for name in told] != [other[name] for name in told]


def results(recording: str, arms: Mapping[str, float]) -> dict[str, RunResult]:
    numbers = dict.fromkeys(report.COLUMNS[recording], 0.25)
    return {
        f"{recording} / {arm} / seed{seed}": RunResult(numbers | {"knn_balanced": value + seed}, {})
        for (arm, value), seed in itertools.product(arms.items(), (0, 1))
    }


def test_tables_have_means_over_seeds_and_paired_differences() -> None:
    found = report.found_in(results("crawl", {"reservoir": 0.5, "duel on both": 0.75}))
    made = report.tables(found)
    assert made["crawl"].rows[0][:3] == [TITLES["duel on both"], "2", "0.2"]
    assert made["crawl"].rows[1][-2] == "100.0"
    assert made["crawl_gains"].rows == [[TITLES["reservoir"], "+25.0 ± 0.0 (2)", "+0.0 ± 0.0 (2)"]]
    assert "## crawl" in report.text(made)
    assert report.written("<!-- footage: crawl -->\nold\n<!-- end -->", made).count("|") > 20
    with pytest.raises(KeyError, match="nothing"):
        report.written("<!-- footage: nothing -->\n<!-- end -->", made)


def test_the_command_makes_missing_runs_once(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    made: list[str] = []

    def once(settings: FootageSettings, run: FootageRun, recording: Recording) -> dict[str, float]:
        assert len(recording.stream) == 18 + 12 + 5
        made.append(run.name)
        numbers = dict.fromkeys(report.COLUMNS["cameras"], 0.5)
        return {**numbers, "train_s": 1.0, "evaluate_s": 1.0}

    monkeypatch.setattr(command, "run_once", once)
    words = [str(folder), "--out", str(tmp_path), "--only", "cameras / duel /", "seed"]
    assert command.main(words) == command.main(words) == 0
    assert made == [f"cameras / duel / seed{seed}" for seed in range(command.SEEDS)]
    assert "5 of 5: cameras / duel / seed4, 2 s" in capsys.readouterr().out
    assert "DUEL on embeddings" in (tmp_path / "tables.md").read_text()
    assert command.main(["--out", str(tmp_path / "empty")]) == 2


@table(
    ("words", "status", "says"),
    [
        (["--passes", "0"], 2, "--passes 0: must be at least 1"),
        (["--size", "0"], 2, "--size 0: must be at least 1"),
        (["nowhere"], 1, "nowhere is no folder of recordings"),
    ],
)
def test_the_command_refuses_wrong_numbers_and_missing_folders(
    words: list[str], status: int, says: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert command.main([*words, "--out", str(tmp_path)]) == status
    assert says in caplog.text


def test_each_page_has_the_tables_of_all_stored_runs() -> None:
    stored = Results(report.RUNS, FootageSettings().facts())
    made = report.tables(report.found_in(stored.by_name()))
    for page in report.PAGES:
        text = (report.ROOT / page).read_text(encoding="utf-8")
        assert report.PLACE.search(text)
        assert report.written(text, made) == text, "run: python -m benchmarks.experiments.footage"


@pytest.mark.parametrize(
    ("folder", "settings"),
    [("", FootageSettings()), ("eight-passes", FootageSettings(passes=8))],
)
def test_the_stored_tables_follow_from_the_stored_runs(
    folder: str, settings: FootageSettings
) -> None:
    stored = report.RUNS.parent / folder
    results = Results(stored / "runs.jsonl", settings.facts())
    made = report.text(report.tables(report.found_in(results.by_name())))
    assert (stored / "tables.md").read_text(encoding="utf-8") == made
