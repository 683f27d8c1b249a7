"""The images that `make containers` built, run by podman: read-only, as nobody, on one volume."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import TINY, until

from stream_ssl import __version__
from stream_ssl.daemon.supervisor import command

pytestmark = [pytest.mark.containers, pytest.mark.timeout(600)]

PODMAN = shlex.split(os.environ.get("PODMAN", "podman"))
FLAGS = shlex.split(os.environ.get("PODMAN_RUN_FLAGS", ""))
LOCKED = ("--read-only", "--tmpfs=/tmp", "--cap-drop=all", "--security-opt=no-new-privileges")
MOST_BYTES = 150_000_000


def podman(*words: str, check: bool = True) -> str:
    done = subprocess.run(
        [*PODMAN, *words], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0 or not check, f"podman {shlex.join(words)}: {done.stderr}"
    return done.stdout


class Containers:
    """Containers on one volume for the run, all of them gone at the end."""

    def __init__(self, folder: Path) -> None:
        self.volume = f"stream-ssl-test-{os.getpid()}"
        self.config = folder / "config.yaml"
        self.config.write_text(json.dumps(TINY))
        folder.chmod(0o755)
        podman("volume", "create", self.volume)
        self.started: list[str] = []

    def start(self, role: str) -> str:
        name = f"{self.volume}-{role}"
        self.started.append(name)
        mounts = (
            f"--volume={self.volume}:/var/lib/stream-ssl",
            f"--volume={self.config}:/etc/stream-ssl/config.yaml:ro",
        )
        words = ("--detach", "--name", name, "--network=host", *LOCKED, *mounts, *FLAGS)
        podman("run", *words, f"stream-ssl-{role}:{__version__}")
        return name

    def exec(self, name: str, *words: str) -> str:
        return podman("exec", name, "/opt/stream-ssl/bin/stream-ssl", *words)

    def endpoints(self) -> Any:
        mount = podman("volume", "inspect", self.volume, "--format", "{{.Mountpoint}}").strip()
        file = Path(mount) / "run" / "endpoints.json"
        return json.loads(file.read_text()) if file.exists() else {}

    def figures(self, name: str) -> Any:
        words = ("status", "/var/lib/stream-ssl/run", "--json=true", "--seconds=0.5")
        return json.loads(self.exec(name, *words))

    def stop(self, name: str) -> int:
        podman("stop", "--time", "120", name)
        return int(podman("inspect", name, "--format", "{{.State.ExitCode}}"))

    def end(self) -> None:
        for name in self.started:
            podman("rm", "--force", "--time", "0", name, check=False)
        podman("volume", "rm", "--force", self.volume, check=False)


@pytest.fixture
def containers(tmp_path: Path) -> Iterator[Containers]:
    made = Containers(tmp_path)
    try:
        yield made
    finally:
        made.end()


def test_each_image_has_a_user_and_a_health_check_and_the_receiver_is_small() -> None:
    for role in ("receiver", "learner"):
        (image,) = json.loads(podman("image", "inspect", f"stream-ssl-{role}:{__version__}"))
        assert image["Config"]["User"] == "65532:65532"
        assert image["Config"]["StopSignal"] == "SIGTERM"
        assert image["Healthcheck"]["Test"][-1] == role
        assert role != "receiver" or image["Size"] < MOST_BYTES


def test_containers_deliver_train_and_stop(containers: Containers) -> None:
    receiver, learner = containers.start("receiver"), containers.start("learner")
    until(
        lambda: containers.endpoints().keys() == {"receiver", "learner"},
        lambda: podman("logs", receiver) + podman("logs", learner),
    )
    to = ("--to", containers.endpoints()["receiver"]["data"], "--name", "robot")
    size = ("--source.size", "16", "--source.channels", "1", "--source.count", "800")
    subprocess.run(command("produce", "synthetic", *to, *size), check=True, timeout=120)
    for name, role in ((receiver, "receiver"), (learner, "learner")):
        assert '"ok":true' in containers.exec(
            name, "status", "/var/lib/stream-ssl/run", "--health", role
        )
    until(
        lambda: containers.figures(learner)["learner"]["steps"] >= 50,
        lambda: podman("logs", learner),
    )
    for name in (learner, receiver):
        assert containers.stop(name) == 0, podman("logs", name)
    done = subprocess.run(
        [*PODMAN, "logs", learner], capture_output=True, text=True, check=True, timeout=60
    )
    assert "checkpoint at step 50" in done.stdout + done.stderr
    assert "damaged" not in done.stdout + done.stderr
