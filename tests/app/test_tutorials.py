"""The tutorials, command by command, on small data that the tests make."""

from __future__ import annotations

import re
import shlex
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import pytest
from forked import Forked, run_script
from harness import BATCH, Process, Processes, stop, until
from mcap_ros2.writer import Writer
from PIL import Image
from rosbags.typesys import Stores, get_typestore

from stream_ssl.app.commands import init

DOCS = Path(__file__).parents[2] / "docs"
SMALL = [
    *("--receiver.bind", "tcp://127.0.0.1:0", "--http.receiver", "127.0.0.1:0"),
    *(
        "--http.learner",
        "127.0.0.1:0",
        "--batches.batch_size",
        str(BATCH),
        "--memory.capacity",
        "64",
    ),
    *("--encoder.width", "4", "--encoder.depths", "[1, 1, 0, 0]", "--projector.dim", "16"),
    *("--learner.threads", "1", "--shadows", "{}", "--decoder.size", "16"),
]
"""Options that make a run of the tutorial small. The other options are those of the page."""

IMAGE = "sensor_msgs/msg/CompressedImage"


class Reader:
    """Somebody who follows a tutorial in a folder."""

    def __init__(self, folder: Path, run: str) -> None:
        self.folder = folder
        self.run = Processes(folder / run)
        self.daemons: list[Process] = []

    def command(self, line: str) -> None:
        """Follow a line of the page."""
        words = shlex.split(line)[1:]
        if words[0] == "init":
            with (self.folder / words[3]).open("w") as file, redirect_stdout(file):
                assert init.main([words[1]]) == 0
        elif words[0] == "run":
            for role in ("receiver", "learner"):
                self.daemons.append(self.run.start(role, *words[1:], *SMALL))
            assert self.run.address
            # A reader sees the address of the page before they go on.
            until(lambda: "page at" in self.run.log("learner"), lambda: self.run.log("learner"))
        else:
            process = self.run.start(*words)
            assert process.wait(120) == 0, self.run.log(words[0]) + self.run.log("learner")
        if words[0] == "status":
            until(self.all_read, lambda: self.run.log("learner"))
            assert [stop(daemon) for daemon in reversed(self.daemons)] == [0, 0]

    def all_read(self) -> bool:
        """Return whether fewer samples than a batch wait for the learner."""
        records, samples = map(self.run.metric, ("lag_records", "pending_samples"))
        return records == 0 and 0 <= samples < BATCH

    def script(self, code: str, number: int) -> str:
        """Run a snippet of the page, and return what it prints."""
        script, output = self.folder / f"{number}.py", self.folder / f"{number}.log"
        script.write_text(code)
        assert Forked(run_script, script, output=output).wait(120) == 0, output.read_text()
        return output.read_text()

    def follow(self, page: str) -> list[str]:
        """Follow a page from top to bottom, and return what its snippets print."""
        text = (DOCS / page).read_text()
        steps = re.findall(r"(?m)^    (stream-ssl .*)$|^```python\n([^`]*)```", text)
        assert len(steps) >= 6
        printed = []
        for line, code in steps:
            if line:
                self.command(line)
            else:
                printed.append(self.script(code, len(printed)))
        return printed


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


def pictures(count: int) -> list[Image.Image]:
    """Pictures of a few large patches of colour, each unlike the others."""
    draw = np.random.default_rng(5)
    small = draw.integers(0, 256, (count, 4, 4, 3), np.uint8)
    return [Image.fromarray(one).resize((40, 40), Image.Resampling.BICUBIC) for one in small]


def test_the_tutorial_on_a_folder_ends_with_an_index(folder: Path) -> None:
    (folder / "photos" / "inner").mkdir(parents=True)
    every = pictures(48)
    for number, picture in enumerate(every):
        picture.save(folder / "photos" / ("inner" if number % 2 else "") / f"{number}.png")
    (folder / "photos" / "damaged.jpg").write_bytes(b"<html>")
    every[33].save(folder / "query.jpg", quality=90)
    reader = Reader(folder, "runs/photos")
    try:
        built, asked = reader.follow("tutorial-folder.md")
    finally:
        reader.run.end()
    assert "left out damaged.jpg" in reader.run.log("embed")
    assert built == "48 images of 8 numbers each\n"
    lines = asked.splitlines()
    assert len(lines) == 5
    assert lines[0].split()[1] == "photos/inner/33.png"
    cosines = [float(line.split()[0]) for line in lines]
    assert cosines == sorted(cosines, reverse=True)
    assert cosines[0] > 0.99


def write_log(path: Path, frames: list[Image.Image]) -> None:
    """Write a log in which the camera sends each frame three times, like a robot at rest."""
    schema_text, _ = get_typestore(Stores.ROS2_HUMBLE).generate_msgdef(IMAGE, ros_version=2)
    with path.open("wb") as file, Writer(file) as writer:
        schema = writer.register_msgdef(IMAGE, schema_text)
        for number in range(3 * len(frames)):
            encoded = path.with_suffix(".jpg")
            frames[number // 3].save(encoded, quality=90)
            time = 1_700_000_000_000_000_000 + number * 100_000_000
            stamp = {"sec": time // 10**9, "nanosec": time % 10**9}
            message = {
                "header": {"stamp": stamp, "frame_id": "front"},
                "format": "jpeg",
                "data": encoded.read_bytes(),
            }
            for topic in ("/camera/image/compressed", "/rear/image/compressed"):
                writer.write_message(topic, schema, message, time, time)


def test_the_tutorial_on_a_log_ends_with_an_encoder(folder: Path) -> None:
    (folder / "logs").mkdir()
    write_log(folder / "logs" / "drive.mcap", pictures(48))
    reader = Reader(folder, "runs/robot")
    try:
        (told,) = reader.follow("tutorial-robot.md")
    finally:
        reader.run.end()
    lines = told.splitlines()
    assert len(lines) == 3 * 48
    assert all("/camera/image/compressed@" in line for line in lines)
    found = [line.split()[4] for line in lines]
    assert 40 <= len({*found}) <= 48, "each picture that was kept is found for its own frames alone"
    assert found[0::3] == found[1::3] == found[2::3]
