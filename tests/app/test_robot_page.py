"""The commands of docs/robot.md, with Foxglove's own server as the robot."""

from __future__ import annotations

import re
import shlex
import socket
import subprocess
import sys
import time
from pathlib import Path

import foxglove
import numpy as np
from foxglove.channels import RawImageChannel
from foxglove.messages import RawImage, Timestamp
from harness import processes, stop, until
from PIL import Image

from stream_ssl.producers.sources import Ros

PAGE = Path(__file__).parents[2] / "docs" / "robot.md"


def command_of(name: str) -> list[str]:
    """The words of the page's first command `stream-ssl NAME`, after stream-ssl."""
    found = re.search(rf"^ +stream-ssl ({name} .*)$", PAGE.read_text(), re.MULTILINE)
    assert found is not None
    return shlex.split(found[1])


def test_the_page_installs_what_its_commands_need() -> None:
    (extras,) = re.findall(r"pip install 'stream-ssl\[(.*)\]'", PAGE.read_text())
    assert set(extras.split(",")) == {"learner", "cpu", "ros", "export"}


def test_the_commands_of_the_page_train_and_export_an_encoder(tmp_path: Path) -> None:
    context = foxglove.Context()
    server = foxglove.start_server(port=0, context=context)
    camera = RawImageChannel("/camera/image_raw/compressed", context=context)
    other = RawImageChannel("/other", context=context)
    noise = np.random.default_rng(0)

    def publish() -> None:
        data = noise.integers(0, 256, (16, 16), np.uint8).tobytes()
        facts = {"width": 16, "height": 16, "step": 16, "encoding": "mono8"}
        for channel in (camera, other):
            channel.log(RawImage(timestamp=Timestamp.now(), data=data, **facts))
        time.sleep(0.01)

    folder = tmp_path / "run"
    places = {"runs/laptop": str(folder), "ws://ROBOT:8765": f"ws://127.0.0.1:{server.port}"}
    try:
        with processes(folder) as run:
            daemon = run.start("run", str(run.config))
            assert run.address
            words = [places.get(word, word) for word in command_of("produce ros")]
            assert set(places.values()) <= set(words)
            producer = run.start(*words, log="robot")

            def learned() -> bool:
                for _ in range(8):
                    publish()
                return run.metric("steps_total") >= 5

            until(learned, lambda: run.log("robot") + run.log("run"))
            assert stop(producer) == 0, run.log("robot")
            assert "subscribes to /camera/image_raw/compressed" in run.log("robot")
            assert "/other" not in run.log("robot")
            assert stop(daemon) == 0, run.log("run")
            words = [places.get(word, word) for word in command_of("export")]
            words[words.index("encoder")] = str(tmp_path / "encoder")
            assert run.start(*words, "--no-onnx").wait(120) == 0, run.log("export")
    finally:
        server.stop()
    assert any((tmp_path / "encoder").iterdir())


def test_the_program_of_the_page_sends_images_like_a_robot(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    sent = []
    for level in (0, 90, 200):
        file = tmp_path / "photos" / f"{level}.jpg"
        Image.new("L", (16, 16), level).save(file)
        sent.append(file.read_bytes())
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    found = re.search(r"```python\n(.+?)```", PAGE.read_text(), re.DOTALL)
    assert found is not None
    program = found[1].replace("port=8765", f"port={port}")
    assert program != found[1]
    with subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path) as robot:
        try:
            source = Ros(f"ws://127.0.0.1:{port}", retry_seconds=0.1, timeout=20.0)
            sample, _ = next(iter(source.samples()))
        finally:
            robot.kill()
    assert bytes(sample.data) in sent
    assert sample.codec == "jpeg"
