"""Gate 17: one of three receivers is killed and stays away; and a fourth joins a group of ranks."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
from harness import TINY, Process, Processes, kill, processes, stop, until
from test_end_to_end import free_port

from chaos.noting_learner import NOTING, accounts
from chaos.ranks import Reading, log_of, torchrun
from chaos.samples import held
from stream_ssl.producers import Producer
from stream_ssl.wire.address import receiver_of

RECEIVERS, EACH = 3, 3
GROUP: dict[str, Any] = TINY | {
    "batches": {"batch_size": 24},
    "memory": {"capacity": 240, "descriptor": "Thumbnail"},
    "learner": {"threads": 1, "anchors": "memory", "draw": "epochs", "novelty": 0.9},
    "checkpoints": {"every_steps": 20, "every_seconds": None},
}


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


def joins(folder: Path, names: int, samples: int) -> dict[str, Any]:
    """Three receivers with a rank each, then four. All receivers are killed while producers send,
    which then come with the new list, and with what nobody has acknowledged.

    Args:
        names: of producers.
        samples: that each sends to the three, and once more to the four.

    Returns:
        How many producers moved, and how many should not have; how often each sample counted.
    """
    run, to_come = folder / "run", iter(count())
    (run / "notes").mkdir(parents=True)
    (run / "config.yaml").write_text(json.dumps({**GROUP, "run": str(run)}))
    with ExitStack() as stack:
        inboxes = [_receiver(folder / str(number), stack) for number in range(RECEIVERS + 1)]
        folders = [inbox.folder for inbox in inboxes]
        daemons = [inbox.role("receiver") for inbox in inboxes]
        four = [inbox.address for inbox in inboxes]
        three = four[:-1]
        robots = [f"robot-{number}" for number in range(names)]
        send = partial(_send, robots, folder / "spools", to_come, samples)
        with _learning(run, folders[:-1]):
            producers = send(three, [])
            for daemon in daemons[:-1]:
                kill(daemon)
            for producer in producers:
                producer.close(0.0)
            waiting = sum(producer.stats.spooled.samples for producer in producers)
            daemons[:-1] = [inbox.role("receiver") for inbox in inboxes[:-1]]
        with _learning(run, folders):
            for producer in send(four, three):
                producer.close(120)
                assert not producer.stats.spooled.samples, "not all was acknowledged"
        assert [stop(daemon) for daemon in daemons] == [0] * len(daemons)
    sent = {(name, f"{number}") for name in robots for number in range(2 * samples)}
    went = [{(name, inbox.name) for name, _ in held(inbox)} for inbox in folders]
    due = {(name, str(to.index(receiver_of(name, to)))) for name in robots for to in (three, four)}
    moved = [name for name in robots if receiver_of(name, four) == four[-1]]
    return {
        "producers": names,
        "moved": len(moved),
        "went_elsewhere": len(set().union(*went) - due),
        "unacknowledged": waiting,
        **accounts(run, folders, sent),
    }


@contextmanager
def _learning(run: Path, inboxes: list[Path]) -> Iterator[None]:
    """A rank for each receiver, until they have read all that the block has sent."""
    command = [str(NOTING), str(run / "config.yaml")]
    command += ["--ranks.receivers", f"[{','.join(map(str, inboxes))}]"]
    with torchrun(run, len(inboxes), 0, *command) as group:
        yield
        reading = [Reading(inbox) for inbox in inboxes]
        until(lambda: all(one.has_ended() for one in reading), partial(log_of, run), 600)
        stop(group)


def _send(
    names: list[str],
    spools: Path,
    numbers: Iterator[int],
    samples: int,
    to: list[str],
    before: list[str],
) -> list[Producer]:
    """Each name's producer, with so many samples that nobody may have acknowledged yet."""
    producers = [
        Producer(
            to,
            name,
            linger=0.01,
            packet_samples=4,
            before=before,
            on_full="spool",
            spool=spools / name,
        )
        for name in names
    ]
    for number in islice(numbers, samples):
        image = np.full((16, 16), number % 256, np.uint8)
        for producer in producers:
            producer.send(image, f"{number}")
    return producers


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
