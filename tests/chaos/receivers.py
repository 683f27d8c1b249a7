"""Gate 17: one of three receivers is killed and stays away; its producers wait for it."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from itertools import count, islice
from pathlib import Path
from typing import Any

from harness import TINY, Process, Processes, kill, processes, stop, until
from test_end_to_end import free_port

from chaos.samples import held
from stream_ssl.wire.address import receiver_of

RECEIVERS, EACH = 3, 3


def away(folder: Path, seconds: float, samples: int, rate: int) -> dict[str, Any]:
    """Producers send to three receivers, of which one is killed and comes back so much later.

    Args:
        seconds: for which it stays away.
        samples: that each producer sends.
        rate: of each, samples/s: high enough to be at it when the receiver is killed, and low
            enough to be at it still when it comes back.

    Returns:
        How many samples were sent, how many the others took meanwhile, how many were lost and how
        many are there twice.
    """
    with ExitStack() as stack:
        runs = [_receiver(folder / str(number), stack) for number in range(RECEIVERS)]
        daemons = [run.role("receiver") for run in runs]
        addresses = [run.address for run in runs]
        names = [name for address in addresses for name in _names(address, addresses)]
        gone, waits = 0, names[:EACH]
        sending = {name: _produce(runs[0], addresses, name, samples, rate) for name in names}
        _until_received(runs, rate)
        kill(daemons[gone])
        before = _received(runs, gone)
        threading.Event().wait(seconds)
        meanwhile = _received(runs, gone) - before
        assert all(sending[name].poll() is None for name in waits), "nothing was left to wait for"
        daemons[gone] = runs[gone].role("receiver")
        for name, producer in sending.items():
            assert producer.wait(600) == 0, runs[0].log(name)
        assert [stop(daemon) for daemon in daemons] == [0] * RECEIVERS
    found = [one for run in runs for one in held(run.folder)]
    sent = len(names) * samples
    return {
        "away": seconds,
        "waited": len(waits),
        "samples": sent,
        "others_took_meanwhile": meanwhile,
        "lost": sent - len(set(found)),
        "twice": len(found) - len(set(found)),
    }


def _names(address: str, addresses: list[str]) -> list[str]:
    """Of producers that choose this receiver."""
    names = (f"robot-{number}" for number in count())
    return list(islice((n for n in names if receiver_of(n, addresses) == address), EACH))


def _receiver(folder: Path, stack: ExitStack) -> Processes:
    settings = TINY | {
        "receiver": {"bind": f"tcp://127.0.0.1:{free_port()}"},
        "journal": {"budget": 1 << 30},
    }
    return stack.enter_context(processes(folder, settings))


def _produce(run: Processes, to: list[str], name: str, samples: int, rate: int) -> Process:
    return run.start(
        *("produce", "synthetic", "--to", ",".join(to), "--name", name),
        *("--source.size", "16", "--source.channels", "1", "--source.seed", "3"),
        *("--shape.limit", str(samples), "--shape.rate", str(rate)),
        log=name,
    )


def _until_received(runs: list[Processes], samples: int) -> None:
    until(
        lambda: all(run.metric("received_samples_total") >= samples for run in runs),
        lambda: f"{[run.metric('received_samples_total') for run in runs]}",
    )


def _received(runs: list[Processes], gone: int) -> int:
    alive = [run for number, run in enumerate(runs) if number != gone]
    return int(sum(run.metric("received_samples_total") for run in alive))
