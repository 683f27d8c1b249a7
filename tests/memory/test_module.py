"""Tests of a memory as a part of other modules: saved, loaded, copied, cast and trained.

Shapes: B samples, D embedding, N samples of a stream.
"""

from __future__ import annotations

import copy
import pickle  # noqa: TID251 - a module that is sent to a worker process is pickled
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from memory_stream import SHAPE, equal, offer, stream
from table import table
from torch import Tensor, nn

from stream_ssl.memory import Duplicates, WorkingMemory, load, save, sketch_distance, sketches
from stream_ssl.memory.descriptors import Features, Thumbnail, Weighted
from stream_ssl.memory.eviction import POLICIES, MostDuplicated
from stream_ssl.memory.scores import VonMisesFisher
from tests.naive import unit_rows


class Model(nn.Module):
    """A typical user's module: an encoder and a memory."""

    def __init__(self, capacity: int = 25, **options: Any) -> None:
        super().__init__()
        self.encoder = nn.Linear(6, 6)
        self.memory = WorkingMemory(capacity, 6, image_shape=SHAPE, **options)


def fed(end: int = 60, **options: Any) -> Model:
    model = Model(**options)
    offer(model.memory, 0, end)
    return model


@table("name", sorted(POLICIES))
def test_a_model_is_saved_and_loaded_with_its_memory(name: str, tmp_path: Path) -> None:
    model = fed(eviction=POLICIES[name]())
    torch.save(model.state_dict(), tmp_path / "model")  # noqa: TID251 - what people do
    state = torch.load(tmp_path / "model", weights_only=True)  # noqa: TID251
    again = Model(eviction=POLICIES[name]())
    assert str(again.load_state_dict(state)) == "<All keys matched successfully>"
    assert equal(again.state_dict(), model.state_dict())
    for each in (model, again):
        offer(each.memory, 60, 90)
    assert equal(again.state_dict(), model.state_dict())


class Head(nn.Linear):
    """A layer whose state has an entry that is no tensor."""

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 2}

    def set_extra_state(self, state: dict[str, int]) -> None:
        assert state == {"version": 2}


class Heads(WorkingMemory):
    """A memory with parts that its user trains."""

    def __init__(self) -> None:
        super().__init__(25, 6, image_shape=SHAPE)
        self.head, self.scale = Head(6, 2), nn.Parameter(torch.ones(3))
        self.register_buffer("mean", torch.zeros(2))


@pytest.mark.parametrize("within", [False, True])
def test_a_state_contains_the_parameters_and_buffers_of_a_subclass(within: bool) -> None:
    memory, again = Heads(), Heads()
    offer(memory, 0, 60)
    with torch.no_grad():
        for value in (memory.scale, memory.mean, memory.head.weight):
            value += 1
    modules = [nn.ModuleDict({"memory": one}) if within else one for one in (memory, again)]
    modules[1].load_state_dict(modules[0].state_dict())
    state, loaded = memory.state_dict(), again.state_dict()
    assert {"head.weight", "scale", "mean"} <= set(state)
    assert state.pop("head._extra_state") == loaded.pop("head._extra_state")
    assert equal(loaded, state)


def draw(memory: WorkingMemory, file: Path) -> None:
    file.write_text(str(memory.sample(5).ids.tolist()))


def test_a_spawned_process_draws_as_its_parent_does(tmp_path: Path) -> None:
    """Workers of torch's DataLoader are such processes on some systems."""
    memory, file = fed(eviction=POLICIES["reservoir"]()).memory, tmp_path / "drawn"
    process = torch.multiprocessing.get_context("spawn").Process(target=draw, args=(memory, file))
    process.start()
    process.join(100)
    assert process.exitcode == 0
    assert file.read_text() == str(memory.sample(5).ids.tolist())


def test_load_state_dict_returns_missing_and_unexpected_keys() -> None:
    missing, unexpected = fed().memory.load_state_dict(fed().memory.state_dict())
    assert (missing, unexpected) == ([], [])


def test_errors_of_loading_name_the_entry_that_does_not_fit() -> None:
    state = fed().state_dict()
    with pytest.raises(RuntimeError, match=r"memory: the state is of capacity 25, .* of 9: build"):
        Model(9).load_state_dict(state)
    sharp = Model(eviction=MostDuplicated(VonMisesFisher(0.1)))
    with pytest.raises(RuntimeError, match=r"memory: .* saved under score Linear\(\), this memory"):
        sharp.load_state_dict(state)
    without = {name: value for name, value in state.items() if not name.startswith("memory.")}
    model = fed(30)
    before = model.memory.state_dict()
    with pytest.raises(RuntimeError, match=r'Missing key.*"memory.counters"'):
        model.load_state_dict(without)
    assert model.load_state_dict(without, strict=False).missing_keys == ["memory.counters"]
    assert equal(model.memory.state_dict(), before)
    del state["memory.columns.ids"]
    with pytest.raises(RuntimeError, match="memory: the state has columns"):
        model.load_state_dict(state)
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"other"'):
        model.load_state_dict(fed().state_dict() | {"other": torch.ones(1)})
    assert nn.Sequential(WorkingMemory(2, 3)).state_dict().keys() >= {"0.counters"}


@table("name", sorted(POLICIES))
def test_a_copied_memory_is_independent_and_continues_in_the_same_way(name: str) -> None:
    model = fed(eviction=POLICIES[name](), descriptor=Thumbnail(2))
    twin = copy.deepcopy(model)
    before = model.state_dict()
    assert equal(twin.state_dict(), before)
    offer(twin.memory, 60, 90)
    assert equal(model.state_dict(), before)
    assert not equal(twin.state_dict(), before)
    offer(model.memory, 60, 90)
    assert equal(twin.state_dict(), model.state_dict())


def test_casting_a_model_does_not_change_the_rows_of_its_memory() -> None:
    model, z_BD = Model(), unit_rows(np.random.default_rng(0), "uniform", 9, 6).float()
    model.memory.add(torch.arange(9), z_BD, stream(9)[2])
    for cast in (lambda m: m.half(), lambda m: m.to(torch.bfloat16), lambda m: m.double()):
        assert torch.equal(cast(model).memory.embeddings, z_BD)
    assert model.encoder.weight.dtype == torch.float64
    assert model.to("cpu").train().memory.check_valid() == (True, "")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_rows_are_stored_as_float32_rows_of_unit_norm(dtype: torch.dtype) -> None:
    z_BD = unit_rows(np.random.default_rng(0), "uniform", 50, 128)
    memory = WorkingMemory(20, 128)
    memory.add(torch.arange(50), z_BD.to(dtype))
    memory.refresh([3], z_BD[:1].to(dtype))
    assert memory.dtype == torch.float32
    assert memory.check_valid() == (True, "")
    norm_k = torch.linalg.vector_norm(memory.embeddings, dim=1)
    torch.testing.assert_close(norm_k, torch.ones(20), atol=1e-6, rtol=0)
    cosine_k = (memory.embeddings.double() * z_BD[memory.ids]).sum(dim=1)
    assert float(cosine_k[torch.arange(20) != 3].min()) > 0.9999
    with pytest.raises(ValueError, match=r"row 0 has norm 1\.0.*must be 1 within 0\.01; divide it"):
        memory.add([0], (1.05 * z_BD[:1]).to(dtype))


@table("name", [*sorted(POLICIES), "ivf"])
def test_a_memory_used_in_inference_mode_has_the_same_state(name: str) -> None:
    def policy() -> Any:
        sharp = VonMisesFisher(0.1)
        return MostDuplicated(sharp, index="ivf") if name == "ivf" else POLICIES[name]()

    with torch.inference_mode():  # as Lightning does; its tensors cannot be changed later
        model = Model(eviction=policy())
        offer(model.memory, 0, 40)
        state = model.memory.state_dict()
        model.memory.load_state_dict(state)
    offer(model.memory, 40, 60)
    with torch.inference_mode():
        offer(model.memory, 60, 80)
        model.memory.collisions(stream(5)[1])
    offer(model.memory, 80, 90)
    other = Model(eviction=policy())
    for start, end in ((0, 40), (40, 60), (60, 80), (80, 90)):
        offer(other.memory, start, end)
    assert equal(model.memory.state_dict(), other.memory.state_dict())


@table("name", [*sorted(POLICIES), "auto"])
def test_copies_made_in_inference_mode_continue_as_the_original(name: str) -> None:
    shape = (1, 8, 8)  # the smallest images that the test "auto" accepts
    if name == "auto":
        memory = WorkingMemory(25, 6, image_shape=shape, duplicates=Duplicates("auto", "refuse"))
    else:
        memory = WorkingMemory(25, 6, POLICIES[name](), shape, descriptor=Thumbnail(2))
    ids, z_ND, _ = stream(90)
    image_NCHW = torch.randint(256, (90, *shape), generator=torch.Generator().manual_seed(0))
    model = nn.Sequential(memory)

    def fed_further(model: nn.Module, start: int, end: int) -> nn.Module:
        part = slice(start, end)
        model[0].add(ids[part], z_ND[part], image_NCHW[part].byte())
        return model

    fed_further(model, 0, 60)
    with torch.inference_mode():
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    fed_further(model, 60, 90)
    for each in copies:
        assert equal(fed_further(each, 60, 90).state_dict(), model.state_dict())
        assert each[0].check_valid() == (True, "")


def test_a_memory_has_no_parameters_for_an_optimiser() -> None:
    model = fed()
    assert {name for name, _ in model.named_parameters()} == {"encoder.weight", "encoder.bias"}
    assert list(model.named_buffers()) == []
    before = model.memory.state_dict()
    optimiser = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        z_BD = nn.functional.normalize(model.encoder(torch.ones(2, 6)), dim=1)
        (z_BD @ model.memory.negatives(8, torch.Generator()).z_ND.float().T).sum().backward()
        optimiser.step()
    assert equal(model.memory.state_dict(), before)
    model.memory.add([1, 2], z_BD, stream(2)[2])
    assert not model.memory.embeddings.requires_grad
    assert "capacity=25, dim=6, occupied=25, eviction=most-duplicated" in repr(model)


def test_lightning_trains_and_restores_a_model_with_a_memory(tmp_path: Path) -> None:
    warnings.simplefilter("ignore")  # Lightning's own warnings, at import and in training
    import pytorch_lightning as lightning

    class Lit(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.memory = nn.Linear(6, 6), WorkingMemory(16, 6)

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            z_BD = nn.functional.normalize(self.encoder(batch[0]), dim=1)
            admission = self.memory.add(torch.arange(len(z_BD)) + 9 * index, z_BD)
            assert admission.inserted == len(z_BD)
            return (z_BD @ self.memory.negatives(4).z_ND.T).exp().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    data = torch.utils.data.TensorDataset(stream(36)[1].float())
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=2,
        logger=False,
        enable_checkpointing=True,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    model = Lit()
    trainer.fit(model, torch.utils.data.DataLoader(data, 12))
    assert len(model.memory) == 16
    path = next(tmp_path.rglob("*.ckpt"))
    again = Lit.load_from_checkpoint(path)
    assert equal(again.memory.state_dict(), model.memory.state_dict())
    assert again.memory.check_valid() == (True, "")


@table("name", [*sorted(POLICIES), "ivf", "auto"])
def test_the_default_device_and_dtype_of_torch_do_not_change_a_memory(
    name: str, tmp_path: Path
) -> None:
    shape = (1, 8, 8)
    ids, z_ND, _ = stream(90)
    image_NCHW = torch.randint(256, (90, *shape), generator=torch.Generator().manual_seed(0)).byte()
    slots, weight_k = torch.arange(4), torch.rand(25)

    def policy() -> Any:
        ivf = MostDuplicated(VonMisesFisher(0.1), index="ivf")
        return ivf if name == "ivf" else POLICIES.get(name, MostDuplicated)()

    def used() -> WorkingMemory:
        test = Duplicates("auto", "refuse") if name == "auto" else None
        count_on = Weighted([Features(dims=4), Thumbnail(2)]) if name == "duel" else None
        memory = WorkingMemory(25, 6, policy(), shape, duplicates=test, descriptor=count_on)
        memory.add(ids[:60], z_ND[:60], image_NCHW[:60], features=z_ND[:60] if count_on else None)
        for how in ("uniform", "inverse-count", "epochs"):
            memory.sample(9, how=how)  # type: ignore[arg-type]
        memory.sample(30)
        memory.sample(9, weights=weight_k)
        memory.negatives(9, how="stratified", cells=3)
        memory.negatives(9, how="hardest", anchors=z_ND[:4], ids_B=ids[:4])
        memory.reencode(lambda image_bCHW: z_ND[: len(image_bCHW)])
        memory.remove(slots)
        memory.load_state_dict(memory.state_dict())
        copy.deepcopy(memory).clear()
        memory.stats()
        save(memory, tmp_path / "memory")
        memory = load(tmp_path / "memory", policy(), duplicates=test, descriptor=count_on)
        memory.add(ids[60:], z_ND[60:], image_NCHW[60:], features=z_ND[60:] if count_on else None)
        assert memory.check_valid() == (True, "")
        return memory

    expected = used()
    with torch.device("meta"):  # as `set_default_device("cuda")`, on any machine
        memory = used()
        state = memory.state_dict()
    assert equal(state, expected.state_dict())
    assert all(value.device.type == "cpu" for value in state.values())
    for dtype in (torch.float64, torch.bfloat16):
        torch.set_default_dtype(dtype)
        for kept in (*vars(sketches).values(), *vars(sketch_distance).values()):
            getattr(kept, "cache_clear", int)()
        try:
            assert equal(used().state_dict(), expected.state_dict())
        finally:
            torch.set_default_dtype(torch.float32)
