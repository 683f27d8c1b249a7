"""Gate 7: a disk that is full, or read-only from one moment to the next, and mends later.

`run` makes one by a shim, anywhere; `real` has a file system of its own, for which it must be root.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
from harness import BATCH, TINY, Processes, processes, stop, until
from test_end_to_end import free_port

from chaos import powercut
from chaos.samples import held
from stream_ssl.daemon.endpoints import load
from stream_ssl.producers import Producer

SMALL = TINY | {
    "receiver": {"bind": f"tcp://127.0.0.1:{free_port()}"},
    "journal": {"budget": 64 << 20},
}
OF_LITTLE = SMALL | {
    "receiver": SMALL["receiver"] | {"max_packet": 1 << 20, "total_credit": 2 << 20},
    "journal": {"budget": 256 << 20},
}
"""A journal with a larger budget than its disk."""
IMAGE = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)


class Sender:
    """A producer beside a run, which compares the journal with the samples that it sent."""

    def __init__(self, run: Processes, producer: Producer) -> None:
        self.run, self.producer, self.sent = run, producer, 0
        self.ready = f"{load(run.folder)['receiver']['http']}/readyz"

    def send(self, count: int) -> None:
        for _ in range(count):
            self.producer.send(IMAGE, f"robot-{self.sent}")
            self.sent += 1

    def until_ready(self, status: int) -> None:
        answers = lambda: httpx.get(self.ready, timeout=30).status_code == status  # noqa: E731
        until(answers, lambda: self.run.log("receiver"))

    def meanwhile(self, breaks: Callable[[], object], seconds: float) -> int:
        """Return the samples acknowledged in these seconds after the fault of the disk is known."""
        self.send(50)
        self.producer.flush(60)
        breaks()
        self.send(1)
        self.until_ready(503)
        until(lambda: self.run.metric("credit_bytes") == 0, lambda: self.run.log("receiver"))
        before = self.producer.stats.acked.samples
        time.sleep(seconds)
        return self.producer.stats.acked.samples - before

    def journalled(self, disk: str, meanwhile: int) -> dict[str, object]:
        ids = held(self.run.folder)
        lost, twice = self.sent - len(set(ids)), len(ids) - len(set(ids))
        return self.found(disk, meanwhile, lost, twice)

    def trained(self, disk: str, meanwhile: int) -> dict[str, object]:
        """The same where the learner reads, and the journal lets go."""
        whole = self.sent // BATCH * BATCH
        trained = lambda: int(self.run.metric("trained_samples_total"))  # noqa: E731
        until(lambda: trained() >= whole, lambda: self.run.log("learner")[-2000:])
        return self.found(disk, meanwhile, 0, trained() - whole)

    def found(self, disk: str, meanwhile: int, lost: int, twice: int) -> dict[str, object]:
        return {
            "disk": disk,
            "ready_503": True,
            "credit_0": True,
            "acked_meanwhile": meanwhile,
            "samples": self.sent,
            "lost": lost,
            "twice": twice,
        }


@contextmanager
def sender(run: Processes) -> Iterator[Sender]:
    with Producer(run.address, "robot", linger=0.0, on_full="drop_newest") as producer:
        yield Sender(run, producer)


def run(scratch: Path, number: int, seconds: float = 3.0) -> dict[str, object]:
    """Let the disk of a receiver fail with this errno for some time while a producer sends.

    Returns:
        whether /readyz said 503 and credit went to 0, how many samples were acknowledged while the
        disk took none, how many were lost, and how many are there twice.
    """
    folder, fault = scratch / "run", scratch / "fault"
    folder.mkdir(parents=True)
    library = powercut.compiled(scratch)
    with processes(folder, TINY | {"journal": {"budget": 256 << 20}}, whole=True) as run:
        run.environment = powercut.environment(library, folder, fault=fault)
        receiver = run.role("receiver")
        with sender(run) as robot:
            meanwhile = robot.meanwhile(lambda: fault.write_text(str(number)), seconds)
            fault.unlink()
            robot.send(50)
            robot.producer.flush(60)
            robot.until_ready(200)
        assert stop(receiver) == 0
        return robot.journalled(errno.errorcode[number], meanwhile)


def real_full(scratch: Path, seconds: float) -> dict[str, object]:
    """Fill the file system of a receiver and a learner to the last byte, and clear it."""
    with mounted(scratch) as disk, processes(disk / "run", SMALL, whole=True) as run:
        receiver, learner = run.role("receiver"), run.role("learner")
        with sender(run) as robot:
            meanwhile = robot.meanwhile(lambda: fill(disk / "filler"), seconds)
            assert learner.poll() is None, run.log("learner")
            (disk / "filler").unlink()
            robot.send(50)
            robot.producer.flush(60)
            robot.until_ready(200)
            found = robot.trained("ext4 filled", meanwhile)
        assert (stop(learner), stop(receiver)) == (0, 0)
        return found


def own_journal(scratch: Path) -> dict[str, object]:
    """Let a receiver fill a small file system before a learner starts and makes room."""
    disk = scratch / "disk"
    disk.mkdir(parents=True)
    tool("mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(disk))
    try:
        with processes(disk / "run", OF_LITTLE, whole=True) as run:
            receiver = run.role("receiver")
            with sender(run) as robot:
                while httpx.get(robot.ready, timeout=30).status_code == 200:
                    robot.send(100)
                    time.sleep(0.05)
                free = shutil.disk_usage(disk).free
                before = robot.producer.stats.acked.samples
                learner = run.start("learner", str(run.config))
                until(lambda: run.metric("credit_bytes") > 0, lambda: run.log("learner"), 400)
                robot.producer.flush(120)
                robot.until_ready(200)
                robot.send(50)
                robot.producer.flush(60)
                found = robot.trained("tmpfs filled by the journal", 0)
            until(lambda: (disk / "run/checkpoints/latest").exists(), lambda: run.log("learner"))
            assert "checkpoint not written" not in run.log("learner")
            assert (stop(learner), stop(receiver)) == (0, 0)
            return found | {"journalled_before": before, "free_mb": round(free / 1e6, 1)}
    finally:
        tool("umount", "--lazy", str(disk))


def real_read_only(scratch: Path, seconds: float) -> dict[str, object]:
    """Let the kernel make the file system of a receiver read-only, as after a fault of a disk.

    The kernel keeps such a one read-only until it is mounted anew, for which nobody may use it: so
    the receiver is stopped, and started on the repaired file system.
    """
    with mounted(scratch) as disk, processes(disk / "run", SMALL, whole=True) as run:
        os.sync()  # the configuration; what comes later must be durable without
        receiver = run.role("receiver")
        with sender(run) as robot:
            abort = ("mount", "-o", "remount,abort", str(disk))
            meanwhile = robot.meanwhile(lambda: tool(*abort), seconds)
            assert stop(receiver) == 0
            repair(scratch, disk)
            receiver = run.role("receiver")
            robot.send(50)
            robot.producer.flush(60)
        assert stop(receiver) == 0
        return robot.journalled("ext4 read-only", meanwhile)


def tool(*command: str, allowed: tuple[int, ...] = (0,)) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode not in allowed:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")


@contextmanager
def mounted(scratch: Path, size: int = 256 << 20) -> Iterator[Path]:
    """Mount an ext4 file system in a file for the duration of the block."""
    disk = scratch / "disk"
    disk.mkdir(parents=True)
    with (scratch / "image").open("wb") as image:
        image.truncate(size)
    tool("mkfs.ext4", "-q", "-F", str(scratch / "image"))
    mount(scratch, disk)
    try:
        yield disk
    finally:
        tool("umount", str(disk))


def mount(scratch: Path, disk: Path) -> None:
    tool("mount", "-o", "loop,errors=remount-ro", str(scratch / "image"), str(disk))


def repair(scratch: Path, disk: Path) -> None:
    """Unmount, check and mount the file system, as an operator does."""
    tool("umount", str(disk))
    tool("fsck.ext4", "-f", "-y", str(scratch / "image"), allowed=(0, 1))
    mount(scratch, disk)


def fill(path: Path) -> None:
    """Leave no free block."""
    with path.open("wb") as file:
        for size in (1 << 20, 1 << 12):
            try:
                while True:
                    file.write(bytes(size))
                    file.flush()
                    os.fsync(file.fileno())
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
