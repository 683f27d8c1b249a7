"""Gates 1, 2 and 3: SIGKILL of receiver, producers and learner; bursts of them."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
from harness import TINY, processes, stop, until
from learning_world import build, differing, steps
from test_end_to_end import free_port

from chaos.samples import held
from stream_ssl.daemon.endpoints import load
from stream_ssl.learning.checkpoint import Checkpointer
from stream_ssl.learning.pace import Pace

HEALTHY_SECONDS = 60.0


def receiver(folder: Path, kills: int, samples: int, seed: int = 0) -> dict[str, int]:
    """Kill a receiver and two producers at random moments, 0 to 6 s apart.

    Returns:
        kills of each, samples, how many were lost, and how many are there twice.
    """
    draw, count = random.Random(seed), {"receiver": 0, "producers": 0}
    settings = TINY | {
        "receiver": {"bind": f"tcp://127.0.0.1:{free_port()}"},
        "journal": {"budget": 1 << 30},
    }
    with processes(folder, settings, whole=True) as run:
        names, each = ("left", "right"), samples // 2
        rate = ("--shape.rate", str(max(500, each // (2 * kills))))
        daemon = run.role("receiver")
        sending = {name: run.produce(each, *rate, name=name) for name in names}
        while count["receiver"] < kills:
            time.sleep(draw.uniform(0, min(6.0, 120 / kills)))
            if draw.random() < 0.2:
                name = draw.choice(names)
                sending[name].kill()
                sending[name].wait()
                sending[name] = run.produce(each, *rate, name=name)
                count["producers"] += 1
            else:
                daemon.kill()
                daemon.wait()
                daemon = run.role("receiver")
                count["receiver"] += 1
        for name, producer in sending.items():
            assert producer.wait(600) == 0, run.log(name)
        assert stop(daemon) == 0
    ids = held(folder)
    return {
        "kills": count["receiver"],
        "producer_kills": count["producers"],
        "samples": 2 * each,
        "lost": 2 * each - len(set(ids)),
        "twice": len(ids) - len(set(ids)),
    }


def learner(folder: Path, kills: int, last: int) -> dict[str, int]:
    """Kill a learner this often. Return the names of state that differs from an unkilled one."""
    script = Path(__file__).parents[1] / "learning" / "learning_killed.py"
    command = [sys.executable, str(script), str(folder), str(last), "0", str(kills)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run(command, check=True, timeout=900, env=env)
    found = Checkpointer(folder).newest()
    assert found is not None
    killed = build(found.offset, pace=Pace(0.2), reencode=2)
    found.restore(killed)
    whole = build(pace=Pace(0.2), reencode=2)
    steps(whole, last)
    return {"kills": kills, "steps": last, "unequal": len(differing(whole, killed))}


def burst(folder: Path, kills: int = 20, seed: int = 0, whole: bool = True) -> dict[str, float]:
    """Kill a receiver and a learner in turn, soon after each start.

    Return how long both then need until they report that they are ready.
    """
    draw = random.Random(seed)
    with processes(folder, whole=whole) as run:
        began = time.monotonic()
        roles = {role: run.role(role) for role in ("receiver", "learner")}
        alone = time.monotonic() - began
        assert run.produce(640).wait(90) == 0
        for number in range(kills):
            role = "receiver" if number % 2 else "learner"
            time.sleep(draw.uniform(0, 0.5))
            roles[role].send_signal(signal.SIGKILL)
            roles[role].wait()
            roles[role] = run.start(role, str(run.config))
        began = time.monotonic()
        until(
            lambda: all(ready(folder, role, process.pid) for role, process in roles.items()),
            lambda: run.log("receiver")[-1000:] + run.log("learner")[-1000:],
        )
        took = time.monotonic() - began
        for role in ("learner", "receiver"):
            assert stop(roles[role]) == 0
    return {"kills": kills, "seconds": took, "first_start": alone}


def ready(folder: Path, role: str, pid: int) -> bool:
    entry = load(folder).get(role, {})
    if entry.get("pid") != pid:
        return False
    try:
        return httpx.get(f"{entry['http']}/readyz").status_code == 200
    except httpx.HTTPError:
        return False
