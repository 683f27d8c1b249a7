"""Gate 18: under torchrun's elastic launch, a host disappears for some time, or for good."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import ExitStack
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import psutil
from harness import TINY, Process, Processes, kill, processes, stop, until
from test_end_to_end import free_port

from chaos.noting_learner import NOTING, accounts
from chaos.ranks import Reading, log_of, step_of
from stream_ssl.wire.address import receiver_of

BATCH, RANKS = 32, 2
"""Of all ranks; of each host."""
SETTINGS: dict[str, Any] = TINY | {
    "batches": {"batch_size": BATCH},
    "memory": {"capacity": 256, "descriptor": "Thumbnail"},
    "learner": {"threads": 1, "anchors": "memory", "draw": "epochs", "novelty": 0.9},
    "checkpoints": {"every_steps": 20, "every_seconds": None},
    "ranks": {"timeout": 60.0},
}


class Host:
    """A receiver with a journal of its own, and torchrun with the ranks that read it.

    Args:
        run: of the whole group, where checkpoints are; hosts share it.
        meeting: the address at which the hosts' torchruns meet.
        keeps: whether it is this host's.
    """

    def __init__(self, inbox: Path, run: Path, meeting: str, keeps: bool, stack: ExitStack) -> None:
        settings = {"receiver": {"bind": f"tcp://127.0.0.1:{free_port()}"}}
        self.inbox: Processes = stack.enter_context(processes(inbox, SETTINGS | settings))
        self._run, self._meeting, self._keeps, self._stack = run, meeting, keeps, stack
        self.receiver: Process
        self.torchrun: subprocess.Popen[bytes]

    def start(self) -> None:
        """Start torchrun on loopback, as docs/scale.md says."""
        self.receiver = self.inbox.role("receiver")
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2"),
            *(f"--nproc-per-node={RANKS}", "--max-restarts=100", "--monitor-interval=0.2"),
            *("--rdzv-backend=c10d", f"--rdzv-endpoint={self._meeting}", "--rdzv-id=chaos"),
            *(f"--rdzv-conf=last_call_timeout=5,is_host={self._keeps}", "--local-addr=127.0.0.1"),
            *(str(NOTING), str(self._run / "config.yaml")),
            *("--ranks.receivers", f"[{self.inbox.folder}]"),
        ]
        env = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        env |= {"NOTES": str(self._run / "notes")}
        with (self._run / "torchrun.log").open("ab") as log:
            self.torchrun = subprocess.Popen(command, stdout=log, stderr=log, env=env)
        self._stack.callback(self.vanish)

    def vanish(self) -> None:
        """Send SIGKILL to all processes of the host at once, as if its power were cut."""
        if self.torchrun.poll() is None:
            everything = [self.torchrun, *psutil.Process(self.torchrun.pid).children()]
            for process in everything:
                process.kill()
            self.torchrun.wait()
        if self.receiver.poll() is None:
            kill(self.receiver)


def away(folder: Path, samples: int, rate: int) -> dict[str, Any]:
    """Let two hosts learn from one stream each. One host is away until the other has continued.

    Args:
        samples: that each of two producers sends.
        rate: of each, samples/s: so low that they are at it still when the host comes back.

    Returns:
        Seconds until the one left learns, and until both do; how many journals were parked
        meanwhile; how many samples were acknowledged, were counted, wait for their batch to be
        full, were lost, and were counted twice.
    """
    run = folder / "run"
    (run / "notes").mkdir(parents=True)
    with ExitStack() as stack:
        group = stack.enter_context(processes(run, SETTINGS))
        meeting = f"127.0.0.1:{free_port()}"
        stays = Host(folder / "a", run, meeting, True, stack)
        goes = Host(folder / "b", run, meeting, False, stack)
        hosts = [stays, goes]
        for host in hosts:
            host.start()
        names = _names(hosts)
        producers = [_produce(group, hosts, name, samples, rate) for name in names]
        _until(run, lambda: step_of(run) > 0 and _all_learn(group))
        before, began = step_of(run), time.monotonic()
        goes.vanish()
        _until(run, lambda: step_of(run) > before + 40 and group.metric("parked_journals") > 0)
        alone = time.monotonic() - began
        parked = int(group.metric("parked_journals"))
        assert producers[1].poll() is None, "nothing was left to wait for"
        goes.start()
        began = time.monotonic()
        _until(run, lambda: _all_learn(group))
        back = time.monotonic() - began
        assert [producer.wait(600) for producer in producers] == [0, 0]
        reading = [Reading(host.inbox.folder) for host in hosts]
        _until(run, lambda: all(one.has_ended() for one in reading), 600)
        stop(stays.torchrun)
        goes.torchrun.wait(60)
        assert [stop(host.receiver) for host in hosts] == [0, 0]
    sent = {(name, f"3-{number}") for name in names for number in range(samples)}
    return {
        "ranks": f"{2 * RANKS}, {RANKS}, {2 * RANKS}",
        "alone_s": round(alone, 1),
        "parked": parked,
        "back_s": round(back, 1),
        **accounts(run, [host.inbox.folder for host in hosts], sent),
    }


def _names(hosts: list[Host]) -> list[str]:
    """Return one name of a producer for each host."""
    addresses = [host.inbox.address for host in hosts]
    return [
        next(name for n in count() if receiver_of(name := f"robot-{n}", addresses) == address)
        for address in addresses
    ]


def _produce(group: Processes, hosts: list[Host], name: str, samples: int, rate: int) -> Process:
    to = ",".join(host.inbox.address for host in hosts)
    return group.start(
        *("produce", "synthetic", "--to", to, "--name", name),
        *("--source.size", "16", "--source.channels", "1", "--source.seed", "3"),
        *("--shape.limit", str(samples), "--shape.rate", str(rate)),
        log=name,
    )


def _all_learn(group: Processes) -> bool:
    last = f'rank_shard_slots{{rank="{2 * RANKS - 1}"}}'
    return group.metric(last) > 0 and group.metric("parked_journals") == 0


def _until(run: Path, ask: Any, seconds: float = 240.0) -> None:
    until(ask, partial(log_of, run), seconds)
