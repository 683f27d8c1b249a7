"""A full disk: the daemon reports it, goes on training, and recovers by itself."""

from __future__ import annotations

import contextlib
import errno
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from chaos import powercut
from harness import BATCH, Process, Processes, processes, stop, until

from stream_ssl.daemon.endpoints import load
from stream_ssl.journal.consumer_offsets import ConsumerOffsets, Positions

pytestmark = pytest.mark.timeout(400)

SAMPLES = 10 * BATCH


class Disk:
    """A file system of 24 MB, or a folder if the test may not mount one.

    In the folder, the system calls that need space fail with ENOSPC.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "disk"
        self.folder.mkdir()
        mount = ("mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(self.folder))
        self.mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
        self.environment: dict[str, str] | None = None
        self._fault = folder / "fault"
        if not self.mounted:
            library = powercut.compiled(folder)
            self.environment = powercut.environment(library, self.folder, fault=self._fault)

    def fill(self) -> Path:
        """Leave no byte free until the returned file is deleted."""
        if not self.mounted:
            self._fault.write_text(str(errno.ENOSPC))
            return self._fault
        ballast = self.folder / "ballast"
        with ballast.open("wb", buffering=0) as file:
            for size in (1 << 20, 4096, 1):
                try:
                    while True:
                        file.write(bytes(size))
                except OSError as full:
                    if full.errno != errno.ENOSPC:
                        raise
        return ballast


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    found = Disk(tmp_path)
    yield found
    if found.mounted:
        subprocess.run(("umount", "--lazy", str(found.folder)), check=True)


class OnDisk:
    """A receiver and a learner whose run is on the disk, and whose logs are elsewhere."""

    def __init__(self, run: Processes, disk: Disk) -> None:
        self.run, self.disk = run, disk.folder
        run.environment = disk.environment

    def start(self, role: str, log: str) -> Process:
        return self.run.start(role, str(self.run.config), "--run", str(self.disk), log=log)

    def role(self, role: str) -> Process:
        process = self.start(role, role)
        self.until_published(role, process)
        return process

    def until_published(self, role: str, process: Process) -> None:
        until(
            lambda: load(self.disk).get(role, {}).get("pid") == process.pid,
            lambda: self.run.log(role),
        )

    def produce(self, samples: int) -> None:
        address = str(load(self.disk)["receiver"]["data"])
        producer = self.run.start(
            *("produce", "synthetic", "--to", address, "--name", "robot"),
            *("--source.size", "16", "--source.channels", "1", "--shape.limit", str(samples)),
        )
        assert producer.wait(90) == 0, self.run.log("produce")


def test_the_learner_starts_and_trains_while_the_disk_is_full(tmp_path: Path, disk: Disk) -> None:
    with processes(tmp_path / "logs") as run, contextlib.ExitStack() as stack:
        on = OnDisk(run, disk)
        receiver, learner = on.role("receiver"), on.role("learner")
        on.produce(SAMPLES)
        assert stop(learner) == 0
        on.produce(2 * SAMPLES)
        ballast = disk.fill()

        learner = on.start("learner", "full")
        pattern = r"metrics at (http://\S+)/metrics"
        found = until(lambda: re.search(pattern, run.log("full")), lambda: run.log("full"))
        trained = r"stream_ssl_trained_samples_total (\d+)"

        client = stack.enter_context(
            httpx.Client(base_url=found[1], transport=httpx.HTTPTransport(retries=8))
        )

        def answer(path: str) -> httpx.Response:
            return client.get(path)

        def samples() -> float:
            told = re.search(trained, answer("metrics").text)
            return float(told[1]) if told else 0.0

        until(lambda: samples() >= SAMPLES, lambda: run.log("full"))
        until(lambda: answer("readyz").status_code == 503, lambda: answer("readyz").text)
        assert "checkpoint not written, training continues" in run.log("full")
        assert "may contain an older address" in run.log("full")
        assert receiver.poll() is None
        ballast.unlink()
        on.until_published("learner", learner)
        on.produce(3 * SAMPLES)
        until(lambda: samples() >= 2 * SAMPLES, lambda: run.log("full"))
        until(lambda: answer("readyz").status_code == 200, lambda: answer("readyz").text)
        assert (stop(learner), stop(receiver)) == (0, 0)


def test_the_learner_goes_on_while_its_offsets_cannot_be_written(tmp_path: Path) -> None:
    with processes(tmp_path) as run:
        run.role("receiver")
        learner = run.role("learner")
        (tmp_path / "cursor.json.part").mkdir()  # in the way
        until(lambda: "training continues" in run.log("learner"), lambda: run.log("learner"))
        assert run.produce(SAMPLES).wait(90) == 0, run.log("robot")
        until(lambda: run.metric("trained_samples_total") == SAMPLES, lambda: run.log("learner"))
        assert ConsumerOffsets(tmp_path).load().read == 1
        (tmp_path / "cursor.json.part").rmdir()
        until(lambda: ConsumerOffsets(tmp_path).load().read > 1, lambda: run.log("learner"))
        assert stop(learner) == 0


MARK = """
import sys
from stream_ssl.journal.consumer_offsets import ConsumerOffsets
ConsumerOffsets(sys.argv[1]).publish(10**15, 10**15)
"""


def test_the_learner_can_publish_its_offsets_on_a_full_disk(disk: Disk) -> None:
    """The receiver then trims the journal, which frees room."""
    ConsumerOffsets(disk.folder).publish(10, 5)
    disk.fill()
    command = (sys.executable, "-c", MARK, str(disk.folder))
    subprocess.run(command, env=disk.environment, check=True)
    assert ConsumerOffsets(disk.folder).load() == Positions(10**15, 10**15)
