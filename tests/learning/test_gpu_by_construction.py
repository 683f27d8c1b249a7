"""Tests of a learner on a simulated GPU: same values as on the CPU, no mixed devices, few waits.

These tests count which parts of the learner, methods, losses, views and probes read from the
device. The memory's tests count its own reads. Every read must be declared.
"""

from __future__ import annotations

from collections import Counter
from itertools import cycle

import numpy as np
import pytest
import torch
from learning_world import BATCH, SIZE, Repeatable, build, state_of, steps
from observe.observe_records import step as record_of
from torch import Tensor

from benchmarks.simulated_gpu import GPU, OnGpu, SimulatedGpu
from stream_ssl.batch import Batch
from stream_ssl.learning.learner import Learner
from stream_ssl.learning.optimiser import OptimiserSettings
from stream_ssl.learning.pace import Pace
from stream_ssl.learning.upload import Upload
from stream_ssl.learning.views import Views
from stream_ssl.losses import Debiased, InfoNCE, SupervisedContrastive, fused
from stream_ssl.methods import METHODS
from stream_ssl.observe.drift import Drift
from stream_ssl.observe.prequential import Prequential

UPDATE = "stream_ssl/learning/weights.py _read"  # after the backward pass: is it finite
RECORD = "stream_ssl/learning/learner.py _read"  # at the end of the step: values of the record
KEYS = "stream_ssl/learning/keys.py __call__"  # are keys for the memory alone finite
MEMORY = "stream_ssl/methods/d_simclr.py prepare"  # are the memory's re-encoded keys finite

READS = {
    "stream": {UPDATE: 1, RECORD: 1},
    "memory": {KEYS: 1, UPDATE: 1, RECORD: 1},
}


def on_gpu(gpu: SimulatedGpu, **settings) -> Learner:
    """Return a learner with a full memory, and clear its waits so far."""
    learner = build(device="cuda:0", **settings)
    steps(learner, 3)
    gpu.waits.clear()
    return learner


def numbers(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the state on the CPU, without the generators of the device."""
    plain = {name: t.value if isinstance(t, OnGpu) else t for name, t in state.items()}
    return {name: value for name, value in plain.items() if name != "rng/cuda"}


def reads(gpu: SimulatedGpu) -> Counter[str]:
    """Return the learner's reads, and check that only `to_host` waits for the device."""
    assert not gpu.count("", declared=False)
    assert not gpu.count("", kind="upload")
    return gpu.count("stream_ssl/")


# Every method, and every kind of anchors with each way of choosing negatives from the memory.
PAIRS = {
    *zip(sorted(METHODS), cycle(READS), strict=False),
    *((kind, anchors) for kind in ("moco", "d-simclr") for anchors in READS),
}


@pytest.mark.parametrize(("kind", "anchors"), sorted(PAIRS))
def test_a_gpu_step_equals_a_cpu_step_and_makes_only_the_expected_reads(
    kind: str, anchors: str
) -> None:
    settings = {"kind": kind, "anchors": anchors}
    on_cpu = build(**settings)
    for (
        group
    ) in on_cpu._step.weights.optimiser.param_groups:  # as on a GPU; it rounds in another order
        group.update(fused=True)
    steps(on_cpu, 4)
    with SimulatedGpu() as gpu:
        learner = on_gpu(gpu, **settings)
        steps(learner, 1)
        found = reads(gpu)
        ours, theirs = numbers(state_of(learner)), numbers(state_of(on_cpu))
    assert found == READS[anchors] | ({MEMORY: 1} if kind == "d-simclr" else {})
    assert ours.keys() == theirs.keys()
    differing = [name for name in ours if not torch.equal(ours[name], theirs[name])]
    assert differing == []


MORE = {
    "re-encoding": (lambda: {"reencode": 3}, {UPDATE: 1, RECORD: 1, KEYS: 1}),
    "clipping": (lambda: {"optimiser": OptimiserSettings("sgd", clip=0.5)}, READS["stream"]),
    "no update": (lambda: {"pace": Pace(0.2 / BATCH)}, {KEYS: 1, RECORD: 1}),
    "labels": (lambda: {"loss": InfoNCE(false_negatives="exclude")}, READS["stream"]),
    "more labels": (lambda: {"loss": SupervisedContrastive()}, READS["stream"]),
    "prior": (lambda: {"loss": Debiased(prior="memory")}, READS["stream"]),
    "blur": (lambda: {"views": Views(SIZE, channels=1, blur=0.5)}, READS["stream"]),
}


@pytest.mark.parametrize("name", MORE)
def test_optional_parts_of_a_step_make_only_the_expected_reads(name: str) -> None:
    settings, expected = MORE[name]
    with SimulatedGpu() as gpu:
        learner = on_gpu(gpu, **settings())
        steps(learner, 1)
        assert reads(gpu) == expected


@pytest.mark.parametrize("how", ["uniform", "hardest", "stratified"])
def test_drawing_fewer_negatives_adds_no_read(how: str) -> None:
    with SimulatedGpu() as gpu:
        learner = build(device="cuda:0")
        drawn = learner.method.memory_negatives
        drawn.negatives, drawn.negatives_by = 5, how
        steps(learner, 3)
        gpu.waits.clear()
        steps(learner, 1)
        assert gpu.count("stream_ssl/") == READS["stream"]
        assert not gpu.count("stream_ssl/", kind="upload")


def test_a_replay_adds_no_read_for_its_labels() -> None:
    with SimulatedGpu() as gpu:
        learner = on_gpu(gpu, pace=Pace(2 / BATCH))
        replay, fresh = steps(learner, 2)
        assert (fresh.replay, replay.replay) == (False, True)
        assert reads(gpu) == {UPDATE: 2, RECORD: 2}
    assert not isinstance(fresh.labels_B, OnGpu)
    assert not isinstance(replay.labels_B, OnGpu)


def test_a_skipped_step_on_a_gpu_changes_neither_weights_nor_optimiser() -> None:
    with SimulatedGpu() as gpu:
        learner = on_gpu(gpu)
        forward = learner.method.forward

        def spoiled(*given):
            out = forward(*given)
            return out.__class__(out.loss.__class__(out.loss.loss * torch.inf, None), out.keys_BD)

        learner.method.forward = spoiled
        before = state_of(learner)
        assert steps(learner, 1)[0].skipped == "loss"
        after = state_of(learner)
        assert gpu.count("stream_ssl/") == READS["stream"]
        fixed = [name for name in before if name.startswith(("model/", "optimiser/"))]
        assert all(torch.equal(before[name].cpu(), after[name].cpu()) for name in fixed)


@pytest.mark.parametrize("channels", [1, 3])
def test_views_on_a_gpu_equal_those_of_the_cpu_without_a_wait(channels: int) -> None:
    image_BCHW = torch.randint(0, 256, (6, channels, 12, 12), dtype=torch.uint8)
    views = Views(12, channels, blur=0.5)
    torch.manual_seed(1)
    expected = views(image_BCHW)
    with SimulatedGpu() as gpu:
        moved, there_BCHW = views.to(GPU), image_BCHW.to(GPU)
        torch.manual_seed(1)
        with gpu.spending() as spent:
            found = moved(there_BCHW)
        assert not spent.waits
        assert spent.kernels.total() <= 20
        assert torch.equal(found.value, expected)


def test_six_uploads_in_a_row_reuse_pinned_buffers_without_a_wait() -> None:
    """Six batches are uploaded one after the other without a wait between them."""
    stream = Repeatable()
    batches = [stream.next(0) for _ in range(6)]
    with SimulatedGpu() as gpu:
        upload = Upload(GPU)
        found = [upload(batch) for batch in batches]
        assert gpu.waits == []
        assert len(gpu._pinned) == 8  # two sets of four buffers, created once
        gpu.landed(len(gpu._in_flight))
        for inputs, batch in zip(found, batches, strict=True):
            columns = inputs.images_BCHW, inputs.ids_B, inputs.labels_B, inputs.hashes_B
            for column, array in zip(columns, given(batch), strict=True):
                assert np.array_equal(column.value.numpy(), array)


def test_batches_of_another_shape_get_buffers_of_their_own() -> None:
    with SimulatedGpu() as gpu:
        upload = Upload(GPU)
        for count in (8, 8, 3, 8):  # two sets of buffers alternate
            batch = Repeatable().next(0)
            fewer = Batch(**{name: column[:count] for name, column in batch.columns().items()})
            assert np.array_equal(upload(fewer).ids_B.value.numpy(), fewer.ids_B)
        gpu.landed(len(gpu._in_flight))


def given(batch: Batch) -> list[np.ndarray]:
    return [batch.images_BCHW, batch.ids_B, batch.labels_B, batch.hashes_B]


def test_the_probes_read_from_the_device_once_per_batch() -> None:
    generator = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(6):
        label_B = torch.randint(-1, 4, (16,), generator=generator)
        key_BD = torch.eye(8)[label_B.clamp(min=0)] + 0.3 * torch.randn(16, 8, generator=generator)
        batches.append((torch.nn.functional.normalize(key_BD, dim=1), label_B))
    here, there = (Prequential(window=40), Drift()), (Prequential(window=40), Drift())
    for key_BD, label_B in batches:
        for probe in here:
            probe.consume(record_of(keys_BD=key_BD, labels_B=label_B))
    with SimulatedGpu() as gpu:
        moved = [(key_BD.to(GPU), label_B) for key_BD, label_B in batches]
        for key_BD, label_B in moved:
            gpu.waits.clear()
            for probe in there:
                probe.consume(record_of(keys_BD=key_BD, labels_B=label_B))
            reads(gpu)
        shift = there[1].shift("embedding")
    assert reads(gpu) == {
        "stream_ssl/observe/prequential.py _predict": 1,
        "stream_ssl/observe/drift.py shift": 1,  # for `shift`, and none for the batch
    }
    assert there[0].read() == here[0].read()
    assert shift == here[1].shift("embedding")


def test_a_learner_on_a_gpu_uses_the_fused_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the loss is an attention kernel. This test uses the CPU's kernel."""
    monkeypatch.setattr("learning_world.DIM", 8)  # the kernel needs multiples of 4
    fused.sound.cache_clear()
    expected = steps(build(), 4)
    try:
        with SimulatedGpu():
            found = steps(build(device="cuda:0"), 4)
            assert fused.sound.cache_info().misses == 1
    finally:
        fused.sound.cache_clear()
    for ours, theirs in zip(found, expected, strict=True):
        assert "first" in theirs.diagnostics
        assert "first" not in ours.diagnostics
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-4)


def test_the_simulated_gpu_rejects_mixed_devices_and_counts_waits() -> None:
    with SimulatedGpu() as gpu:
        there, here = torch.arange(4.0, device=GPU), torch.arange(4.0)
        for mix in (lambda: there + here, lambda: torch.stack([there, here]), lambda: there @ here):
            with pytest.raises(RuntimeError, match="expected all tensors on cuda:0"):
                mix()
        with pytest.raises((RuntimeError, TypeError)):
            there.numpy()
        assert (there * torch.tensor(2.0)).tolist() == [0, 2, 4, 6]
        gpu.waits.clear()
        waits = [
            lambda: float(there.sum()),
            lambda: bool((there > 1).any()),
            lambda: there.tolist(),
            lambda: there[there > 1],
            lambda: torch.unique(there),
            lambda: there.cpu(),
            lambda: here.to(GPU),
            lambda: there[torch.tensor([1, 2])],
        ]
        for number, wait in enumerate(waits, 1):
            wait()
            assert len(gpu.waits) == number
        here.to(GPU, non_blocking=True)
        torch.zeros(3, device=GPU)
        assert len(gpu.waits) == len(waits)
        assert Counter(wait.kind for wait in gpu.waits) == {"read": 6, "upload": 2}
        pinned = here.pin_memory()
        pinned.to(GPU, non_blocking=True)
        pinned.zero_()
        with pytest.raises(AssertionError, match="written to while in flight"):
            there.cpu()
