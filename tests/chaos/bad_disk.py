"""Gate 7: a disk that is full, or read-only from one moment to the next, and mends later."""

from __future__ import annotations

import errno
import time
from pathlib import Path

import httpx
import numpy as np
from harness import TINY, processes, stop, until

from chaos import powercut
from chaos.samples import held
from producers import Producer
from stream_ssl.app.endpoints import load

IMAGE = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)


def run(scratch: Path, number: int, seconds: float = 3.0) -> dict[str, object]:
    """A receiver whose disk fails with this errno while a producer sends, for so long.

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
        ready = f"{load(folder)['receiver']['http']}/readyz"
        sent = 0
        with Producer(run.address, "robot", linger=0.0, on_full="drop_newest") as producer:
            for _ in range(50):
                producer.send(IMAGE, f"robot-{sent}")
                sent += 1
            producer.flush(60)
            fault.write_text(str(number))
            producer.send(IMAGE, f"robot-{sent}")
            sent += 1
            until(lambda: httpx.get(ready).status_code == 503, lambda: run.log("receiver"))
            until(lambda: run.metric("credit_bytes") == 0, lambda: run.log("receiver"))
            before = producer.stats.acked.samples
            time.sleep(seconds)
            meanwhile = producer.stats.acked.samples - before
            fault.unlink()
            for _ in range(50):
                producer.send(IMAGE, f"robot-{sent}")
                sent += 1
            producer.flush(60)
            until(lambda: httpx.get(ready).status_code == 200, lambda: run.log("receiver"))
        assert stop(receiver) == 0
        ids = held(folder)
    return {
        "disk": errno.errorcode[number],
        "ready_503": True,
        "credit_0": True,
        "acked_meanwhile": meanwhile,
        "samples": sent,
        "lost": sent - len(set(ids)),
        "twice": len(ids) - len(set(ids)),
    }
