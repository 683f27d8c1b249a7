"""From a producer's process over TCP and a journal to a trained encoder; with kills."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from harness import BATCH, TINY, Processes, kill, processes, stop, until

from stream_ssl.journal.reader import JournalReader
from stream_ssl.trained.encoder import fresh_encoder, load_encoder
from stream_ssl.wire import Data

pytestmark = pytest.mark.timeout(600)

FILES = ("model", "optimiser", "memory", "rng")


def journalled(run: Path) -> tuple[Counter[tuple[str, int]], Counter[str]]:
    """Count how often each (producer, sequence) and each sample id is in the journal."""
    packets: Counter[tuple[str, int]] = Counter()
    samples: Counter[str] = Counter()
    reader, position = JournalReader(run / "journal"), 1
    while records := reader.read(position):
        for record in records:
            packets[record.producer, record.sequence] += 1
            rows = Data(record.sequence, record.header, record.payload).fields["samples"]
            samples.update(f"{record.producer} {row['id']}" for row in rows)
        position = records[-1].position + 1
    reader.close()
    return packets, samples


def learn(run: Processes, step: int) -> None:
    """Start a learner, wait until it reaches `step`, and stop it."""
    learner = run.role("learner")
    until(lambda: run.metric("checkpoint_step") >= step, lambda: run.log("learner"))
    assert stop(learner) == 0, run.log("learner")


def weights(run: Path, step: int) -> dict[str, bytes]:
    folder = run / "checkpoints" / f"step-{step:09d}"
    return {name: (folder / f"{name}.safetensors").read_bytes() for name in FILES}


def test_a_daemon_trains_an_encoder_from_a_stream(tmp_path: Path) -> None:
    samples = 10 * BATCH
    with processes(tmp_path / "run") as run:
        run.whole_roles = True
        daemon = run.start("run", str(run.config))
        until(lambda: run.metric("steps_total") >= 0, lambda: run.log("run"))
        assert run.produce(samples).wait(60) == 0, run.log("robot")
        until(lambda: run.metric("trained_samples_total") == samples, lambda: run.log("run"))
        assert run.metric("received_samples_total") == samples
        assert run.metric("acked_samples_total") == samples
        assert run.metric('memory_inserted_total{memory="working"}') == samples
        assert run.start("status", str(run.folder)).wait(30) == 0, run.log("status")
        run.whole_roles = False
        assert run.start("run", str(run.config), log="second").wait(60) == 1
        assert "a supervisor already runs here" in run.log("second")
        assert daemon.poll() is None
        assert stop(daemon) == 0, run.log("run")
        assert run.start("status", str(run.folder)).wait(30) == 1
        latest = run.folder / "checkpoints" / "latest"
        state = json.loads((latest / "state.json").read_text())
        assert state["samples"] == samples
        assert state["config"]["memory"]["capacity"] == 64
        image_BCHW = torch.zeros(3, 1, 16, 16, dtype=torch.uint8)
        trained = load_encoder(latest)(image_BCHW)
        fresh = fresh_encoder(state["config"])(image_BCHW)
        assert trained.shape == fresh.shape == (3, 8)
        assert not torch.equal(trained, fresh)


def test_a_daemon_that_is_still_starting_stops_at_once(tmp_path: Path) -> None:
    with processes(tmp_path / "run") as run:
        run.whole_roles = True
        daemon = run.start("run", str(run.config))
        until(lambda: (run.folder / "receiver.lock").exists(), lambda: run.log("run"))
        assert stop(daemon) == 0, run.log("run")
        assert "Traceback" not in run.log("run")
        # A signal that comes before Python has started ends the process without a log.
        said = re.search(
            "stopped before the first step|learner stopped with status -15", run.log("run")
        )
        assert said, "the stop waited for its imports"


def test_kills_of_receivers_and_producers_neither_lose_nor_repeat_a_sample(tmp_path: Path) -> None:
    samples, draw = 6000, random.Random(0)
    settings = TINY | {"receiver": {"bind": f"tcp://127.0.0.1:{free_port()}"}}
    with processes(tmp_path / "run", settings) as run:
        receiver = run.role("receiver")
        producer = run.produce(samples, "--shape.rate", "1500")
        for kills in range(6):
            goal = (kills + 1) * samples // 8
            until(
                lambda goal=goal: run.metric("journal_last_record") >= goal / 64,
                lambda: run.log("robot"),
            )
            if draw.random() < 0.7 or kills < 2:
                kill(receiver)
                receiver = run.role("receiver")
            else:
                kill(producer)
                producer = run.produce(samples, "--shape.rate", "1500")
        assert producer.wait(90) == 0, run.log("robot")
        assert stop(receiver) == 0
        packets, found = journalled(run.folder)
        assert set(packets.values()) == {1}
        assert sorted(sequence for _, sequence in packets) == list(range(1, len(packets) + 1))
        assert set(found.values()) == {1}
        assert len(found) == samples


def free_port() -> int:
    """Return a port that a restarted receiver can bind again."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_a_killed_learner_ends_with_the_same_weights_as_an_uninterrupted_one(
    tmp_path: Path,
) -> None:
    """The newest checkpoint is also damaged after the kills."""
    whole, steps = tmp_path / "whole", 20
    with processes(whole) as run:
        receiver = run.role("receiver")
        assert run.produce(steps * BATCH).wait(60) == 0, run.log("robot")
        assert stop(receiver) == 0
        shutil.copytree(whole, tmp_path / "killed")
        learn(run, steps)
    with processes(tmp_path / "killed") as run:
        for goal in (5, 10):
            learner = run.role("learner")
            until(
                lambda goal=goal: run.metric("checkpoint_step") >= goal, lambda: run.log("learner")
            )
            kill(learner)
        # `latest` may name an older one: the kill can come between the two renames.
        newest = max((run.folder / "checkpoints").glob("step-*")) / "model.safetensors"
        damaged = bytearray(newest.read_bytes())
        damaged[len(damaged) // 2] ^= 1
        newest.write_bytes(damaged)
        learn(run, steps)
        assert "is damaged" in run.log("learner")
        assert weights(run.folder, steps) == weights(whole, steps)


def test_the_daemon_quarantines_bad_samples_and_goes_on(tmp_path: Path) -> None:
    from stream_ssl.producers import Producer
    from stream_ssl.wire import Sample

    good = bytes(16 * 16)
    with processes(tmp_path / "run") as run:
        run.role("receiver")
        run.role("learner")
        with Producer(run.address, name="robot") as producer:
            for index in range(5 * BATCH):
                producer.send(Sample(f"good-{index}", good, shape=(16, 16, 1)))
                if index % BATCH == 0:
                    producer.send(Sample(f"bad-{index}", b"\xff\xd8\xff no image", codec="jpeg"))
            for index in range(3):  # no batch follows these samples
                producer.send(Sample(f"last-{index}", b"\xff\xd8\xff no image", codec="jpeg"))
        until(lambda: run.metric("trained_samples_total") == 5 * BATCH, lambda: run.log("learner"))
        reasons = ("damaged", "format", "fields", "empty")
        metric = 'quarantined_samples_total{{producer="{}",reason="{}"}}'
        names = [metric.format("robot", reason) for reason in reasons]
        # A series exists from its first sample on.
        until(
            lambda: sum(max(0, run.metric(name)) for name in names) == 8,
            lambda: run.log("learner"),
        )
        until(lambda: run.metric("pending_samples") == 0, lambda: run.log("learner"))
        assert len(list((run.folder / "quarantine").glob("*.json"))) == 8


def test_a_wrong_configuration_stops_the_daemon_at_once(tmp_path: Path) -> None:
    with processes(tmp_path / "run", TINY | {"memory": {"capacity": 0}}) as run:
        assert run.start("run", str(run.config)).wait(120) == 2
        assert "capacity 0" in run.log("run")
        assert "Traceback" not in run.log("run")
        assert not (run.folder / "checkpoints" / "latest").exists()
