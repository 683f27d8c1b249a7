"""The stream, the data, the measurements of a run, and the budget of time."""

from __future__ import annotations

import itertools
import math
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from forked import fork_workers
from table import table
from tiny_reproduction import CLASSES, DATA, EXPERIMENT

from benchmarks.experiments import pool
from benchmarks.experiments.data import Biased, first_of_each, gather, store, stored
from benchmarks.experiments.papers.watch import priors, soft_labels
from benchmarks.experiments.training import Measurements
from stream_ssl.evaluation.labelled import LabelledBatch
from stream_ssl.losses import Debiased, SelfLabeling
from stream_ssl.memory import WorkingMemory


@pytest.mark.parametrize("bias", [1, 9])
def test_the_stream_has_the_requested_bias(bias: int) -> None:
    stream = Biased(DATA.train, CLASSES, bias, batch=1000, seed=3)
    batches = [stream.next(0.0) for _ in range(10)]
    counts = np.bincount(np.concatenate([batch.labels_B for batch in batches]), minlength=CLASSES)
    share = bias / (bias + CLASSES - 1)
    assert counts[0] / counts.sum() == pytest.approx(share, abs=4 * math.sqrt(share / 10_000))
    # Chi-squared with 8 degrees of freedom: 26 is passed once in a thousand.
    rest = counts[1:]
    assert ((rest - rest.mean()) ** 2 / rest.mean()).sum() < 26


def test_the_stream_names_the_image_of_each_sample() -> None:
    batch = Biased(DATA.train, CLASSES, 3, batch=50, seed=0).next(0.0)
    rows = batch.hashes_B - 1
    assert np.array_equal(batch.images_BCHW.transpose(0, 2, 3, 1), DATA.train.image_NHWC[rows])
    assert np.array_equal(batch.labels_B, DATA.train.label_N[rows])
    assert len(set(batch.ids_B.tolist())) == 50


def test_workers_load_the_data_that_was_stored(tmp_path: Path) -> None:
    store(DATA, tmp_path)
    again = stored(tmp_path)
    assert again.classes == CLASSES
    for one, other in ((DATA.train, again.train), (DATA.test, again.test)):
        assert np.array_equal(one.image_NHWC, other.image_NHWC)
        assert np.array_equal(one.label_N, other.label_N)


def part(kind: Any, labels: list[int]) -> LabelledBatch:
    image_BHWC, ids = np.zeros((len(labels), 32, 32, 3), np.uint8), tuple(map(str, labels))
    return LabelledBatch(kind, image_BHWC, np.array(labels), ids)


def test_the_test_set_and_the_references_are_balanced() -> None:
    data = gather([part("reference", [0, 1, 0]), part("query", [0, 1, 1, 1]), part("query", [0])])
    assert sorted(data.test.label_N.tolist()) == [0, 0, 1, 1]
    assert sorted(first_of_each(data.train, 5).label_N.tolist()) == [0, 1]


@table(
    ("parts", "message"),
    [
        ([part("query", [0, 1])], "no training images"),
        ([part("reference", [0, 1])], "no test images"),
        ([part("reference", [0, 2]), part("query", [0])], r"none of \[1\]"),
        ([part("reference", [0, 0]), part("query", [0])], "two or more"),
    ],
    ids=["no training", "no test", "gap", "one class"],
)
def test_data_that_cannot_be_streamed_is_refused(parts: list[LabelledBatch], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gather(parts)


def filled(count: int, dim: int) -> tuple[WorkingMemory, Any]:
    """Return a memory of labelled rows, and the record of a batch of its last rows."""
    draw = torch.Generator().manual_seed(5)
    z_KD = torch.nn.functional.normalize(torch.randn(count, dim, generator=draw), dim=1)
    labels = torch.arange(count) % 3
    memory = WorkingMemory(count, dim)
    memory.add(torch.arange(count), z_KD, labels=labels)
    last = slice(count - 4, count)
    record = SimpleNamespace(
        step=7, keys_BD=z_KD[last], ids_B=torch.arange(count)[last], labels_B=labels[last]
    )
    return memory, record


def test_soft_labels_equal_those_of_a_loop() -> None:
    memory, record = filled(12, 5)
    loss = SelfLabeling(temperature=0.3, alpha=0.25, beta=0.15, sharpening=0.5, rise=0)
    found = soft_labels(record, memory, loss, mixup=0.0)
    errors, masses = [], []
    for key, own, label in zip(record.keys_BD, record.ids_B, record.labels_B, strict=True):
        weights = [
            math.exp(float(key.double() @ z.double()) / 0.15) for z in memory.embeddings.unbind()
        ]
        ids, labels = memory.ids.tolist(), memory.labels.tolist()
        others = sum(w for w, i in zip(weights, ids, strict=True) if i != own)
        wrong = mass = 0.0
        for weight, slot, other in zip(weights, ids, labels, strict=True):
            mine = slot == own
            y = 0.6 * mine + 0.25 * weight / sum(weights) + 0.15 * (not mine) * weight / others
            true = (other == label) / labels.count(label)
            wrong += (y - true) ** 2
            mass += y * (other == label)
        errors.append(math.sqrt(wrong))
        masses.append(mass)
    assert found["label_error"] == pytest.approx(np.mean(errors), rel=1e-6)
    assert found["label_mass"] == pytest.approx(np.mean(masses), rel=1e-6)
    assert "mixed_error" not in found


def test_mixed_labels_have_no_larger_error_than_unmixed_labels() -> None:
    memory, record = filled(12, 5)
    before = torch.random.get_rng_state()
    found = soft_labels(record, memory, SelfLabeling(rise=0), mixup=1.0)
    assert found["mixed_error"] <= found["label_error"]
    assert torch.equal(before, torch.random.get_rng_state())


@table("prior", [0.2, "memory", "labels"])
def test_the_prior_is_compared_with_the_share_of_the_class(prior: Any) -> None:
    memory, record = filled(12, 5)
    found = priors(record, memory, Debiased(prior=prior))
    score_BK = (1 + record.keys_BD.double() @ memory.embeddings.double().T) / 2
    other_BK = record.ids_B[:, None] != memory.ids
    assert other_BK.sum(dim=1).tolist() == [11] * 4
    measured = (score_BK * other_BK).sum(dim=1) / 11
    true = 3 / 11  # four slots have the class, and one of them is the anchor's own
    used = {0.2: 0.2, "memory": float(measured.clamp(1 / 12, 0.5).mean()), "labels": true}[prior]
    assert found["prior"] == pytest.approx(used, rel=1e-5)
    assert found["prior_true"] == pytest.approx(true)
    assert found["prior_measured"] == pytest.approx(float(measured.mean()), rel=1e-5)
    # All classes are equally many: nothing to correlate with.
    assert math.isnan(found["prior_correlation"])


class Instantly:
    """A stand-in for a pool of processes. A run ends at once, 30 seconds later by the clock."""

    def __init__(self, *_: Any) -> None:
        self.begun: list[str] = []

    def __enter__(self) -> Instantly:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def submit(self, _work: Any, _once: Any, run: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result({"run": run.name})
        return future

    def shutdown(self, **_: Any) -> None:
        return None


# Three looks at the clock a run: the third would begin after 70 seconds.
@table(("minutes", "count"), [(None, 5), (1.0, 2), (0.001, 0)])
def test_the_pool_starts_no_run_that_would_end_too_late(
    monkeypatch: pytest.MonkeyPatch, minutes: float | None, count: int
) -> None:
    monkeypatch.setattr(pool, "ProcessPoolExecutor", Instantly)
    ticks = itertools.count(step=10)  # seconds between two looks at the clock
    runs = EXPERIMENT.plan(2, False)
    done = [
        run.name
        for run, _ in pool.finished(
            dict, runs, Path(), 1, minutes, clock=lambda: float(next(ticks))
        )
    ]
    assert done == [run.name for run in runs][:count]


class InterruptedStart:
    """A context of multiprocessing. Ctrl-C comes when its first process has just started."""

    def __init__(self, context: Any, started: list[Any]) -> None:
        self._context = context
        self._started = started

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def Process(self, **options: Any) -> Any:
        process = self._context.Process(**options)

        def interrupted() -> None:
            del process.start  # a process is pickled as it starts
            process.start()
            # The worker's queues are kept, because it ends if it does not find them.
            self._started.append((process, options))
            raise KeyboardInterrupt

        process.start = interrupted
        return process


def test_an_interrupt_during_the_start_of_a_worker_leaves_no_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork_workers(monkeypatch, pool)
    started: list[Any] = []
    context = InterruptedStart(pool.get_context("spawn"), started)
    monkeypatch.setattr(pool, "get_context", lambda how: context)
    store(DATA, tmp_path)
    with pytest.raises(KeyboardInterrupt):
        next(pool.finished(dict, EXPERIMENT.plan(1, False), tmp_path, 1))
    ((worker, _),) = started
    try:
        worker.join(30)
        assert not worker.is_alive()
    finally:
        worker.kill()


def test_a_measurement_is_made_every_few_updates_and_averaged_over_the_second_half() -> None:
    values = iter([1.0, math.nan, 4.0, 6.0])
    watch = Measurements(lambda record: {"entropy": next(values)}, steps=10, every=3)
    for update in range(1, 11):
        watch.look(SimpleNamespace(), update)  # type: ignore[arg-type]
    assert watch.traces == {"entropy": [(3, 1.0), (9, 4.0), (10, 6.0)]}
    assert watch.numbers() == {"entropy": 5.0}
