"""Each slim extra works with the packages that it installs, and no others."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

from harness import TINY, Processes, stop, until
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

MEMORY = """
import torch, memory
from stream_ssl.memory.eviction import MostDuplicated
from stream_ssl.memory.scores import VonMisesFisher
policy = MostDuplicated(score=VonMisesFisher(kappa=0.1), index="ivf")
slots = memory.WorkingMemory(capacity=64, dim=8, eviction=policy, seed=0)
slots.add(torch.arange(256), torch.nn.functional.normalize(torch.randn(256, 8), dim=1))
assert len(slots.negatives(16).z_ND) == 16 and slots.stats().occupancy == 64
memory.save(slots, sys.argv[1])
"""

ABSENT = """
import sys
from importlib.machinery import PathFinder
find = PathFinder.find_spec
PathFinder.find_spec = lambda name, path=None, target=None: (
    None if name.partition(".")[0] in {absent!r} else find(name, path, target)
)
"""


def installed(*extras: str) -> set[str]:
    """Return the names of the packages that pip installs for these extras."""
    found: set[tuple[str, str]] = set()
    wanted = [("stream-ssl", extra) for extra in ("", *extras)]
    while wanted:
        name, extra = wanted.pop()
        if (name, extra) in found:
            continue
        found.add((name, extra))
        try:
            lines = requires(name) or ()
        except PackageNotFoundError:  # of another platform, or optional to the machine
            continue
        for line in lines:
            needed = Requirement(line)
            if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                canonical = canonicalize_name(needed.name)
                wanted += [(canonical, e) for e in ("", *needed.extras)]
    return {name for name, _ in found}


modules = cache(packages_distributions)  # it reads the metadata of all packages


def without_the_rest(*extras: str) -> str:
    """Return code that hides every module that these extras do not install."""
    there = installed(*extras)
    absent = {
        module
        for module, names in modules().items()
        if not there & {canonicalize_name(name) for name in names}
    }
    return ABSENT.format(absent=absent)


def test_each_slim_extra_leaves_out_the_packages_of_other_parts() -> None:
    assert installed("producer") == installed()
    assert not installed("receiver") & {"torch", "faiss-cpu", "pillow", "scipy", "matplotlib"}
    assert not installed("memory", "cpu") & {"torchvision", "lmdb", "uvicorn", "pillow", "rich"}
    assert {"torch", "faiss-cpu", "lmdb", "pillow"} <= installed("learner", "cpu")


def test_a_receiver_and_a_producer_work_together_without_torch(tmp_path: Path) -> None:
    main = "from stream_ssl.app.cli import main\nsys.exit(main(sys.argv[1:]))"
    settings = {name: value for name, value in TINY.items() if name != "access"}
    processes = Processes(tmp_path, settings)
    started = []

    def start(extra: str, *arguments: str) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-c", without_the_rest(extra) + main, *arguments]
        with (tmp_path / f"{extra}.log").open("wb") as log:
            started.append(subprocess.Popen(words, stdout=log, stderr=log))
        return started[-1]

    def said(extra: str) -> str:
        return (tmp_path / f"{extra}.log").read_text()

    try:
        receiver = start("receiver", "receiver", str(processes.config))
        until(
            lambda: processes.published("receiver", receiver.pid) or receiver.poll() is not None,
            lambda: said("receiver"),
        )
        assert receiver.poll() is None, said("receiver")
        to = ("--run", str(tmp_path), "--name", "robot", "--source.count", "300")
        producer = start("producer", "produce", "synthetic", *to)
        assert producer.wait(60) == 0, said("producer")
        assert processes.metric("received_samples_total") == 300
        status = start("receiver", "status", str(tmp_path), "--seconds", "0.1")
        assert status.wait(60) == 1, "there is no learner"
        assert stop(receiver) == 0, said("receiver")
    finally:
        for process in started:
            process.kill()
            process.wait()


def test_the_memory_works_with_torch_and_faiss_alone(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", without_the_rest("memory", "cpu") + MEMORY, str(tmp_path / "m")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
