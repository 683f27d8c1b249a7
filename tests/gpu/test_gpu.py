"""A CUDA GPU gives the CPU's results, and every wait for the GPU is known: `make gpu`.

Without a GPU, tests/learning/test_gpu_by_construction.py tests the same on a simulated GPU.
"""

from __future__ import annotations

import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from decoding_learner import learned
from learning_world import BATCH, Repeatable, build, steps
from losses_cases import Case, case
from losses_table import VARIANTS, Known, call, known

from stream_ssl.learning.checkpoint import Checkpointer
from stream_ssl.learning.pace import Pace
from stream_ssl.learning.records import PHASES
from stream_ssl.learning.upload import Upload
from stream_ssl.losses import fused, negatives
from stream_ssl.memory import Duplicates, WorkingMemory
from stream_ssl.memory.descriptors import Features
from stream_ssl.memory.eviction import (
    MinimumRedundancy,
    MostDuplicated,
    Oldest,
    Redundant,
    Reservoir,
)
from stream_ssl.memory.scores import VonMisesFisher
from stream_ssl.methods import METHODS

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda:0")
POLICIES = {
    "oldest": Oldest,
    "reservoir": Reservoir,
    "linear": MostDuplicated,
    "competing": lambda: MostDuplicated(VonMisesFisher(0.1), compete=True),
    "vMF": lambda: MostDuplicated(VonMisesFisher(0.1)),
    "redundant": lambda: Redundant(VonMisesFisher(0.1), 1.0),
    "minred": MinimumRedundancy,
}


@pytest.mark.parametrize("name", POLICIES)
def test_a_memory_on_a_gpu_holds_the_same_samples_as_on_the_cpu(name: str) -> None:
    """The memories use float64, so rounding decides no step."""
    here, there = (
        WorkingMemory(
            300,
            8,
            POLICIES[name](),
            image_shape=(1, 2, 2),
            device=device,
            dtype=torch.float64,
            seed=5,
            duplicates=Duplicates(threshold=0.9999),
        )
        for device in ("cpu", GPU)
    )
    draw = torch.Generator().manual_seed(0)
    centre_CD = torch.randn(12, 8, generator=draw, dtype=torch.float64)
    for start in range(0, 1500, 50):
        noise_BD = 0.4 * torch.randn(50, 8, generator=draw, dtype=torch.float64)
        z_BD = centre_CD[torch.randint(12, (50,), generator=draw)] + noise_BD
        z_BD = torch.nn.functional.normalize(z_BD, dim=1)
        ids_B, images = torch.arange(start, start + 50), torch.zeros(50, 1, 2, 2).byte()
        one = here.add(ids_B, z_BD, images, labels=ids_B % 5)
        other = there.add(ids_B.to(GPU), z_BD.to(GPU), images.to(GPU), labels=ids_B.to(GPU) % 5)
        assert torch.equal(one.evicted, other.evicted.cpu())
        if len(here) == 300:
            slots = here.stalest(20)
            assert torch.equal(slots, there.stalest(20).cpu())
            fresh_RD = torch.nn.functional.normalize(
                here.embeddings[slots] + 0.1 * z_BD[:20], dim=1
            )
            here.refresh(slots, fresh_RD)
            there.refresh(slots.to(GPU), fresh_RD.to(GPU))
        assert torch.equal(here.sample(5).ids, there.sample(5).ids.cpu())
    assert torch.equal(here.ids, there.ids.cpu())
    torch.testing.assert_close(here.counts(), there.counts().cpu())
    torch.testing.assert_close(here.collisions(z_BD), there.collisions(z_BD).cpu())
    assert there.check_valid() == (True, "")


def test_a_memory_with_features_and_payload_is_equal_on_gpu_and_cpu() -> None:
    """The memories have a payload, count on features, and move between the devices."""
    draw = torch.Generator().manual_seed(0)

    def rows(count: int, size: int) -> torch.Tensor:
        return torch.randn(count, size, generator=draw, dtype=torch.float64)

    def memory(device: str | torch.device) -> WorkingMemory:
        return WorkingMemory(
            100,
            8,
            MostDuplicated(VonMisesFisher(0.1)),
            image_shape=(1, 2, 2),
            device=device,
            dtype=torch.float64,
            seed=5,
            descriptor=Features(6),
            payload={"pose": torch.zeros(3)},
        )

    here, there = memory("cpu"), memory(GPU)
    for start in range(0, 400, 40):
        ids_B = torch.arange(start, start + 40)
        given = {
            "z": torch.nn.functional.normalize(rows(40, 8), dim=1),
            "images": torch.randint(255, (40, 1, 2, 2), generator=draw).byte(),
            "features": rows(40, 10),
        }
        pose = {"pose": rows(40, 3).float()}
        one = here.add(ids_B, **given, payload=pose)
        other = there.add(
            ids_B.to(GPU),
            **{name: value.to(GPU) for name, value in given.items()},
            payload={name: value.to(GPU) for name, value in pose.items()},
        )
        assert torch.equal(one.evicted, other.evicted.cpu())
        if start == 200:
            mix_PF = rows(4, 10)
            for which in (here, there):
                mixed_PF = mix_PF.to(which.device)
                which.describe_again(
                    lambda x, mixed_PF=mixed_PF: x.to(mixed_PF).flatten(1) @ mixed_PF
                )
            assert torch.equal(here.remove([3, 50]), there.remove([3, 50]).cpu())
    heavy_k = torch.rand(100, generator=draw)
    assert torch.equal(
        here.sample(20, weights=heavy_k).ids, there.sample(20, weights=heavy_k.to(GPU)).ids.cpu()
    )
    assert torch.equal(here.ids, there.ids.cpu())
    assert torch.equal(here.payload["pose"], there.payload["pose"].cpu())
    torch.testing.assert_close(here.counts(), there.counts().cpu())
    swapped = memory(GPU), memory("cpu")
    for which, other in zip(swapped, (here, there), strict=True):
        which.load_state_dict(other.state_dict())
        assert torch.equal(which.ids.cpu(), here.ids)
        assert which.check_valid() == (True, "")


def test_approximate_counts_on_a_gpu_have_the_right_mean() -> None:
    """A GPU finds cells in another way than the CPU, so it may evict other samples."""
    draw = torch.Generator().manual_seed(0)
    memory = WorkingMemory(
        300, 8, MostDuplicated(VonMisesFisher(0.1), index="ivf"), device=GPU, seed=5
    )
    for ids_B in torch.arange(1500).split(50):
        z_BD = torch.nn.functional.normalize(torch.randn(50, 8, generator=draw), dim=1)
        memory.add(ids_B.to(GPU), z_BD.to(GPU))
    similar_KK = VonMisesFisher(0.1)(memory.embeddings.double() @ memory.embeddings.double().T)
    exact_K = similar_KK.fill_diagonal_(0).sum(1)
    assert float(memory.counts().mean()) == pytest.approx(float(exact_K.mean()), rel=0.1)
    assert memory.check_valid() == (True, "")


@pytest.mark.parametrize("pass_", ["fused", "chunked"])
@pytest.mark.parametrize("name", VARIANTS)
def test_a_loss_on_a_gpu_equals_the_loss_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, name: str, pass_: str
) -> None:
    assert fused.sound(GPU), "the attention kernel is not trusted here: see the warning"
    if pass_ == "chunked":
        monkeypatch.setattr(negatives, "can_fuse", lambda *_: False)
    given = case(batch=40, positives=2, negatives=1500, dim=16, dtype=torch.float32)
    said, found = known(given), []
    for device in ("cpu", GPU):
        one = Case(*(tensor.to(device) for tensor in given))
        z_BD = one.z_BD.clone().requires_grad_()
        told = Known(*(tensor.to(device) for tensor in said))
        out = call(VARIANTS[name].build(), one._replace(z_BD=z_BD), told)
        out.loss.backward()
        diagnostics = {n: v for n, v in out.diagnostics.items() if n != "first"}
        found.append((out.per_anchor.detach().cpu(), z_BD.grad.cpu(), diagnostics))
    torch.testing.assert_close(found[0][:2], found[1][:2], rtol=1e-3, atol=1e-4)
    assert found[0][2] == pytest.approx(found[1][2], rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("anchors", ["stream", "memory"])
@pytest.mark.parametrize("kind", sorted(METHODS))
def test_a_learner_on_a_gpu_has_the_losses_of_the_cpu(kind: str, anchors: str) -> None:
    settings = {"kind": kind, "anchors": anchors, "reencode": 2}
    here, there = build(**settings), build(device="cuda:0", **settings)
    for one, other in zip(steps(here, 6), steps(there, 6), strict=True):
        assert other.skipped is None
        assert other.loss == pytest.approx(one.loss, rel=0.02, abs=0.02)
        assert other.collision_true == one.collision_true
        assert all(other.seconds[phase] > 0 for phase in PHASES)
    assert there.memory.check_valid() == (True, "")


def test_a_learner_that_counts_on_features_has_the_losses_of_the_cpu() -> None:
    here, there = (
        build(descriptor=Features(8), device=device, reencode=2) for device in ("cpu", "cuda:0")
    )
    for one, other in zip(steps(here, 6), steps(there, 6), strict=True):
        assert other.skipped is None
        assert other.loss == pytest.approx(one.loss, rel=0.02, abs=0.02)
    assert there.memory.check_valid() == (True, "")


@pytest.mark.parametrize("goes_on", ["cuda:0", "cpu"])
def test_a_learner_on_gpu_or_cpu_resumes_from_a_checkpoint_of_a_gpu(
    goes_on: str, tmp_path: Path
) -> None:
    learner, checkpointer = build(device="cuda:0"), Checkpointer(tmp_path)
    steps(learner, 4)
    checkpointer.save(learner, {})
    found = checkpointer.newest()
    assert found is not None
    resumed = build(found.offset, device=goes_on)
    found.restore(resumed)
    assert torch.equal(resumed.memory.ids.cpu(), learner.memory.ids.cpu())
    for one, other in zip(steps(learner, 3), steps(resumed, 3), strict=True):
        assert other.loss == pytest.approx(one.loss, rel=0.02, abs=0.02)


@pytest.mark.parametrize("settings", [{}, {"pace": Pace(2 / BATCH)}], ids=str)
def test_a_step_waits_for_the_gpu_only_in_compute(settings: dict) -> None:
    """torch reports every wait. Each must come from `to_host`."""
    learner = build(device="cuda:0", anchors="memory", reencode=2, **settings)
    steps(learner, 4)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")  # it warns that it is a prototype
        try:
            steps(learner, 2)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waited = (w for w in told if "synchronizing CUDA operation" in str(w.message))
    waits = Counter(f"{Path(w.filename).name}:{w.lineno}" for w in waited)
    assert waits
    assert {place.split(":")[0] for place in waits} == {"compute.py"}, waits


def test_a_learner_with_bfloat16_skips_no_update() -> None:
    records = steps(build(kind="d-simclr", precision="bfloat16", device="cuda:0"), 5)
    assert all(record.skipped is None for record in records)
    assert records[-1].keys_BD.dtype == torch.float32


@pytest.mark.filterwarnings("ignore")  # of torch's compiler
@pytest.mark.parametrize("kind", ["moco", "byol", "simclr"])
def test_compiled_encoders_have_the_losses_of_other_encoders(kind: str) -> None:
    settings = {"kind": kind, "anchors": "memory", "reencode": 2, "device": "cuda:0"}
    plain, compiled = build(**settings), build(compile=True, **settings)
    for one, other in zip(steps(plain, 6), steps(compiled, 6), strict=True):
        assert other.skipped is None
        assert other.loss == pytest.approx(one.loss, rel=0.02, abs=0.02)


def test_a_learner_with_decoding_processes_has_the_losses_of_the_cpu(tmp_path: Path) -> None:
    """With a GPU, processes decode. They must not disturb CUDA, nor change what is learned."""
    here, there = learned("cpu", tmp_path), learned("cuda:0", tmp_path)
    assert [one.rejected for one in there] == [one.rejected for one in here]
    assert [one.loss for one in there] == pytest.approx([one.loss for one in here], rel=1e-3)


def test_batches_arrive_unchanged_on_a_busy_gpu() -> None:
    """Many batches wait while the GPU is busy. A pinned buffer must be read before it is filled."""
    stream, upload = Repeatable(), Upload(GPU)
    batches = [stream.next(0) for _ in range(50)]
    busy = torch.randn(4096, 4096, device=GPU)
    for _ in range(20):
        busy = busy @ busy / 64
    found = [upload(batch) for batch in batches]
    for inputs, batch in zip(found, batches, strict=True):
        assert np.array_equal(inputs.images_BCHW.cpu().numpy(), batch.images_BCHW)
        assert np.array_equal(inputs.ids_B.cpu().numpy(), batch.ids_B)
