"""A memory as the buffer of another training loop: further columns, weights and removal."""

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

from stream_ssl.memory import Duplicates, WorkingMemory
from stream_ssl.memory.descriptors import Thumbnail
from stream_ssl.memory.eviction import (
    Duel,
    MinimumRedundancy,
    MostDuplicated,
    Oldest,
    Random,
    Redundant,
    Reservoir,
)
from stream_ssl.memory.scores import VonMisesFisher
from stream_ssl.memory.state import load, save

PAYLOAD = {"seen": torch.zeros(2, 3), "action": torch.zeros((), dtype=torch.int64)}


def embeddings(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return normalize(torch.randn(count, 4, generator=generator), dim=1)


def entries(ids):
    """Payload that follows from the ids, so that a mixed-up row shows."""
    return {"seen": ids[:, None, None] + torch.zeros(1, 2, 3), "action": ids * 7}


def filled(policy=None, count=40, **settings):
    memory = WorkingMemory(16, 4, eviction=policy, payload=PAYLOAD, **settings)
    z_BD = embeddings(count)
    for ids in torch.arange(count).split(5):
        memory.add(ids, z_BD[ids], payload=entries(ids))
    return memory


def check_rows(memory):
    assert memory.check_valid() == (True, "")
    for name, column in entries(memory.ids).items():
        assert torch.equal(memory.payload[name], column)
        assert memory.payload[name].dtype == PAYLOAD[name].dtype
    assert torch.equal(memory.embeddings, embeddings(200)[memory.ids])


POLICIES = {
    "duel": Duel,
    "most-duplicated": MostDuplicated,
    "approximate": lambda: MostDuplicated(index="ivf"),
    "redundant": Redundant,
    "minimum-redundancy": MinimumRedundancy,
    "oldest": Oldest,
    "reservoir": Reservoir,
    "random": Random,
}


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_a_memory_keeps_its_other_samples_and_continues_after_a_removal(policy, tmp_path):
    memory = filled(policy())
    check_rows(memory)
    ids, born = memory.ids.clone(), memory.born.clone()
    gone = memory.remove([15, 0, 7])
    assert gone.tolist() == ids[[15, 0, 7]].tolist()
    stays = [slot for slot in born.argsort().tolist() if slot not in (15, 0, 7)]
    assert memory.ids.tolist() == ids[stays].tolist()
    check_rows(memory)
    before = memory.ids[0].item()
    save(memory, tmp_path / "memory")
    again = load(tmp_path / "memory", policy())
    for number in range(60, 90, 3):
        ids = torch.arange(number, number + 3)
        z_BD = embeddings(200)[ids]
        evicted = memory.add(ids, z_BD, payload=entries(ids)).evicted
        if policy is Oldest and number == 63:
            assert evicted.tolist()[0] == before
        again.add(ids, z_BD, payload=entries(ids))
        check_rows(memory)
        assert torch.equal(memory.ids, again.ids)
    assert len(memory) == 16


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_a_loaded_memory_has_the_seed_of_the_saved_one(policy, tmp_path):
    """A removal starts the policy's random draws anew, from the seed."""
    memory = filled(policy(), seed=7)
    save(memory, tmp_path / "memory")
    again = load(tmp_path / "memory", policy())
    ids = torch.arange(60, 90)
    for each in (memory, again):
        each.remove([15, 0, 7])
        each.add(ids, embeddings(200)[ids], payload=entries(ids))
    assert torch.equal(memory.ids, again.ids)


def test_a_reservoir_remembers_the_length_of_its_stream_after_a_removal():
    """A reservoir that forgot its stream would take every newcomer."""
    memory = WorkingMemory(100, 4, eviction=Reservoir(), seed=3)
    z_BD = embeddings(1000)
    for number in range(50):
        memory.add(torch.arange(number * 1000, (number + 1) * 1000), z_BD)
    memory.remove([4])
    taken = int((memory.add(torch.arange(1000), z_BD).slots >= 0).sum())
    assert 1 <= taken <= 10  # the empty slot, and 2 by chance
    memory.clear()
    assert len(memory.add(torch.arange(1000), z_BD).evicted) > 100


def test_a_cleared_memory_starts_anew():
    memory = filled()
    memory.clear()
    assert len(memory) == 0
    assert memory.payload["seen"].shape == (0, 2, 3)
    check_rows(memory)
    memory.clear()
    memory.add(torch.arange(20), embeddings(20), payload=entries(torch.arange(20)))
    assert len(memory) == 16
    check_rows(memory)


def test_near_duplicates_of_removed_samples_are_admitted_again():
    image_BCHW = torch.randint(256, (20, 3, 16, 16), dtype=torch.uint8)
    memory = WorkingMemory(
        32,
        4,
        image_shape=(3, 16, 16),
        descriptor=Thumbnail(),
        duplicates=Duplicates(threshold="auto", action="refuse"),
    )
    ids, z_BD = torch.arange(20), embeddings(20)
    memory.add(ids, z_BD, images=image_BCHW)
    assert memory.add(ids + 100, z_BD, images=image_BCHW).inserted == 0
    memory.remove(torch.arange(0, 20, 2))
    assert torch.equal(memory.images, image_BCHW[1::2])
    admission = memory.add(ids + 200, z_BD, images=image_BCHW)
    assert admission.duplicates.tolist() == (ids + 200)[1::2].tolist()
    assert memory.check_valid() == (True, "")


def test_draws_follow_the_weights():
    memory = filled()
    weight_k = torch.zeros(16)
    weight_k[3], weight_k[5] = 1.0, 3.0
    drawn = memory.sample(4000, weights=weight_k)
    assert set(drawn.slots.tolist()) == {3, 5}
    assert (drawn.slots == 5).float().mean() == pytest.approx(0.75, abs=0.03)
    assert torch.equal(drawn.payload["action"], drawn.ids * 7)
    assert sorted(memory.sample(2, weights=weight_k).slots.tolist()) == [3, 5]
    assert memory.sample(0, weights=weight_k).slots.tolist() == []


ids = torch.arange(2)
REFUSED = {
    "no payload": (lambda m: m.add(ids, embeddings(2)), r"has \[\], and .* \['action', 'seen'\]"),
    "another name": (
        lambda m: m.add(ids, embeddings(2), payload={**entries(ids), "x": ids}),
        "pass one tensor of each",
    ),
    "another shape": (
        lambda m: m.add(ids, embeddings(2), payload={**entries(ids), "seen": torch.zeros(2, 3)}),
        r"'seen' is torch.float32 \(2, 3\): must be torch.float32 \(2, 2, 3\)",
    ),
    "another dtype": (
        lambda m: m.add(ids, embeddings(2), payload={**entries(ids), "action": ids.float()}),
        "'action' is torch.float32",
    ),
    "weights of other slots": (lambda m: m.sample(2, weights=[1.0]), r"\[1\]|\(1,\)"),
    "weights below 0": (lambda m: m.sample(2, weights=[-1.0] + [1.0] * 15), "at least 0"),
    "weights of 0": (lambda m: m.sample(2, weights=[0.0] * 16), "not all 0"),
    "weights that are no numbers": (lambda m: m.sample(2, weights=[float("nan")] * 16), "finite"),
    "weights and a way": (
        lambda m: m.sample(2, how="epochs", weights=[1.0] * 16),
        "use one of them",
    ),
    "payload of float64 rows": (lambda m: m.add(ids, embeddings(2).double()), "pass one tensor"),
    "payload that is no tensor": (
        lambda m: m.add(ids, embeddings(2), payload={**entries(ids), "action": "left"}),
        "payload 'action' are 'left': must be a tensor or an array",
    ),
    "a slot twice": (lambda m: m.remove([1, 1]), "twice"),
    "an empty slot": (lambda m: m.remove([16]), "occupied slots"),
}


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED)
def test_wrong_arguments_are_rejected_and_do_not_change_the_memory(call, message):
    memory = filled()
    before = {name: value.clone() for name, value in memory.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        call(memory)
    after = memory.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_a_state_of_another_payload_is_refused():
    state = filled().state_dict()
    for payload in (None, {**PAYLOAD, "action": torch.zeros(())}, {"seen": PAYLOAD["seen"]}):
        with pytest.raises(ValueError, match=r"build it with the state's .*payload"):
            WorkingMemory(16, 4, payload=payload).load_state_dict(state)


def test_a_payload_example_that_is_no_tensor_is_refused():
    with pytest.raises(ValueError, match=r"payload .action. is 0\.5: must be a tensor"):
        WorkingMemory(16, 4, payload={"action": 0.5})


def test_a_payload_column_whose_name_is_no_text_is_refused():
    """A file would return the column under another name."""
    with pytest.raises(ValueError, match=r"column 1: a name must be text, such as '1'"):
        WorkingMemory(16, 4, payload={1: torch.zeros(2)})


def test_payload_may_be_a_reversed_read_only_array():
    memory = WorkingMemory(16, 4, payload={"action": torch.zeros((), dtype=torch.int64)})
    actions = np.arange(3)[::-1]
    actions.flags.writeable = False
    memory.add(torch.arange(3), embeddings(3), payload={"action": actions})
    assert memory.payload["action"].tolist() == [2, 1, 0]


@pytest.mark.parametrize(
    "dtype", ["bool", "uint8", "uint16", "uint32", "uint64", "int16", "bfloat16", "complex64"]
)
def test_payload_may_have_any_dtype(dtype, tmp_path):
    """Depth images of a robot are uint16."""
    kept = getattr(torch, dtype)
    depth_NP = torch.randint(0, 1 << 15, (40, 2)).to(kept)
    memory = WorkingMemory(16, 4, payload={"depth": torch.zeros(2, dtype=kept)})
    for ids in torch.arange(40).split(5):
        memory.add(ids, embeddings(40)[ids], payload={"depth": depth_NP[ids[0] : ids[-1] + 1]})
    memory.remove([3, 5])
    save(memory, tmp_path / "memory")
    for held in (memory, load(tmp_path / "memory")):
        assert torch.equal(held.payload["depth"], depth_NP[held.ids])
        draw = held.sample(4)
        assert torch.equal(draw.payload["depth"], depth_NP[draw.ids])


def test_a_dtype_whose_entries_torch_cannot_write_is_refused_at_once():
    """An older torch cannot write single entries of uint16 either, and `add` would fail midway."""
    example = torch.zeros(2, dtype=torch.uint8).view(torch.bits8)
    with pytest.raises(ValueError, match=r"'x' is torch\.bits8, and torch [\w.+]+ cannot write or"):
        WorkingMemory(16, 4, payload={"x": example})


def test_save_rejects_a_dtype_that_the_file_format_lacks(tmp_path):
    memory = WorkingMemory(2, 4, payload={"wave": torch.zeros((), dtype=torch.complex128)})
    with pytest.raises(ValueError, match=r"torch\.complex128: give the payload another dtype"):
        save(memory, tmp_path / "memory")
    assert list(tmp_path.iterdir()) == []


def test_draws_follow_the_proportions_of_very_large_weights():
    drawn = filled().sample(4000, weights=torch.full((16,), 1e308, dtype=torch.float64))
    assert drawn.slots.bincount(minlength=16).min() > 150


def test_approximate_counts_continue_bit_equal_after_a_removal():
    def build():
        return WorkingMemory(256, 4, MostDuplicated(VonMisesFisher(0.3), index="ivf"), seed=3)

    memory = build()
    memory.add(torch.arange(256), embeddings(256))
    memory.remove(torch.arange(0, 256, 2))
    for first in (256, 300, 600):  # the cells are fitted again meanwhile
        again = build()
        again.load_state_dict(memory.state_dict())
        ids, z_BD = torch.arange(first, first + 300), embeddings(300, seed=first)
        assert torch.equal(memory.add(ids, z_BD).evicted, again.add(ids, z_BD).evicted)
        states = memory.state_dict(), again.state_dict()
        assert states[0].keys() == states[1].keys()
        assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
