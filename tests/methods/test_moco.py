"""Tests of MoCo: negatives, mask, labels for oracles, priors and the key encoder."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from methods_small import SmallEncoder, SmallProjector, memory_of
from table import table
from torch import Tensor, nn

from stream_ssl.batch import Batch
from stream_ssl.losses import InfoNCE, Loss, LossOutput
from stream_ssl.losses.base import LossInputs
from stream_ssl.memory import WorkingMemory
from stream_ssl.memory.descriptors import Thumbnail
from stream_ssl.memory.eviction import MostDuplicated
from stream_ssl.memory.scores import VonMisesFisher
from stream_ssl.methods import MoCo
from stream_ssl.methods.negatives import SMOOTHING, prior


class Spy(Loss):
    """Keeps the arguments of its call."""

    def __init__(self, needs_labels: bool = False, needs_prior: bool = False) -> None:
        super().__init__()
        self.needs_labels, self.needs_prior = needs_labels, needs_prior

    def compute(self, inputs: LossInputs) -> LossOutput:
        self.given = inputs
        return LossOutput(inputs.z_BD.sum(), inputs.z_BD.sum(1))


def moco(
    loss: Loss | None = None,
    momentum: float = 0.9,
    views: int = 2,
    key_statistics: Literal["average", "batch"] = "average",
) -> MoCo:
    torch.manual_seed(0)
    chosen = InfoNCE(0.2) if loss is None else loss
    settings = {"momentum": momentum, "views": views, "key_statistics": key_statistics}
    return MoCo(SmallEncoder(), SmallProjector(), chosen, **settings)


def views_of(count: int, batch: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(batch, 1, 6, 6, generator=generator) for _ in range(count)]


def test_negatives_are_the_keys_of_the_batch_and_the_memory() -> None:
    spy, memory = Spy(), memory_of(5)
    out = moco(spy)(views_of(2), Batch(torch.arange(4)), memory)
    _, positive_BMD, negative_ND, mask_BN = spy.given[:4]
    assert torch.equal(positive_BMD[:, 0], out.keys_BD)
    assert torch.equal(negative_ND, torch.cat([out.keys_BD, memory.embeddings]))
    assert torch.equal(mask_BN[:, :4], torch.eye(4, dtype=torch.bool))
    assert not mask_BN[:, 4:].any()


def test_the_same_sample_or_content_is_no_negative() -> None:
    spy, memory = Spy(), memory_of(3, first_id=10)  # ids 10 11 12, hashes 11 12 13
    ids_B, hashes_B = torch.tensor([10, 2, 2, 3]), torch.tensor([0, 12, 5, 5])
    moco(spy)(views_of(2), Batch(ids_B, hashes_B), memory)
    expected = [
        [1, 0, 0, 0, 1, 0, 0],  # id 10 is held; no hash known
        [0, 1, 1, 0, 0, 1, 0],  # id 2 twice in the batch; hash 12 is held
        [0, 1, 1, 1, 0, 0, 0],  # and hash 5 twice
        [0, 0, 1, 1, 0, 0, 0],
    ]
    assert spy.given[3].int().tolist() == expected
    unknown_B = torch.zeros(4, dtype=torch.int64)  # equal, and no content
    moco(spy)(views_of(2), Batch(torch.arange(4), unknown_B), memory)
    assert torch.equal(spy.given[3][:, :4], torch.eye(4, dtype=torch.bool))


def drawn(how: str, memory: WorkingMemory, hashes_B: Tensor | None = None) -> tuple[Tensor, ...]:
    """Negatives and mask of four anchors with ids 0 to 3, and the anchors."""
    spy = Spy()
    torch.manual_seed(0)
    method = MoCo(SmallEncoder(), SmallProjector(), spy, negatives=6, negatives_by=how).train()
    method(views_of(2), Batch(torch.arange(4), hashes_B), memory)
    z_BD, _, negative, mask_BN = spy.given[:4]
    return negative, mask_BN, z_BD


def rows(z_ND: Tensor) -> set[tuple[float, ...]]:
    return {tuple(row) for row in z_ND.tolist()}


@pytest.mark.parametrize("how", ["uniform", "stratified"])
def test_some_negatives_are_drawn_for_all_anchors(how: str) -> None:
    memory = memory_of(40)
    negative_ND, mask_BN, _ = drawn(how, memory)
    assert negative_ND.shape == (4 + 6, 4)
    assert mask_BN.shape == (4, 4 + 6)
    assert not mask_BN[:, 4:].any()
    assert rows(negative_ND[4:]) < rows(memory.embeddings)
    assert len(rows(negative_ND[4:])) == 6


def test_the_hardest_negatives_are_the_nearest_slots_except_the_anchor_itself() -> None:
    memory = memory_of(40, first_id=2)  # ids 2 and 3 are anchors, and so held
    hashes_B = torch.tensor([0, 9, 0, 0])  # anchor 1 shows what slot 6 holds (id 8, hash 9)
    negative_BND, mask_BN, z_BD = drawn("hardest", memory, hashes_B)
    assert negative_BND.shape == (4, 4 + 6, 4)
    assert not mask_BN[:, 4:].any()
    cosine_BK = z_BD.detach() @ memory.embeddings.T
    for anchor, slot in ((2, 0), (3, 1), (1, 6)):
        cosine_BK[anchor, slot] = -2
    for anchor in range(4):
        nearest = memory.embeddings[cosine_BK[anchor].topk(6).indices]
        assert rows(negative_BND[anchor, 4:]) == rows(nearest)
        assert torch.equal(negative_BND[anchor, :4], negative_BND[0, :4])


def test_all_slots_are_drawn_if_the_memory_holds_too_few() -> None:
    for how in ("uniform", "hardest", "stratified"):
        negative, mask_BN, _ = drawn(how, memory_of(3))
        assert negative.shape[-2] == mask_BN.shape[1] == 4 + 3


@table("how", ["all", "uniform", "hardest", "stratified"])
def test_oracles_receive_which_negatives_share_the_class_of_an_anchor(how: str) -> None:
    spy, filled = Spy(needs_labels=True), memory_of(40)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(2))  # ids are not slots
    memory, ids = WorkingMemory(40, 4), filled.ids[order]
    memory.add(ids, filled.embeddings[order], labels=ids % 3)
    labels_B = torch.tensor([0, 1, 1, -1])
    chosen = {} if how == "all" else {"negatives": 6, "negatives_by": how}
    method = MoCo(SmallEncoder(), SmallProjector(), spy, **chosen).train()
    method(views_of(2), Batch(torch.arange(4), None, labels_B), memory)
    label_of = {tuple(row): number % 3 for number, row in enumerated(memory)}
    negative = spy.given[2].expand(4, -1, -1) if spy.given[2].ndim == 2 else spy.given[2]
    assert spy.given.same_BN.shape == spy.given[3].shape
    assert spy.given.same_BN[:, :4].int().tolist() == [
        [1, 0, 0, 0],
        [0, 1, 1, 0],
        [0, 1, 1, 0],
        [0] * 4,
    ]
    for anchor, label in enumerate(labels_B.tolist()):
        found = [label_of[tuple(row)] == label for row in negative[anchor, 4:].tolist()]
        assert spy.given.same_BN[anchor, 4:].tolist() == found


def enumerated(memory: WorkingMemory) -> list[tuple[int, list[float]]]:
    return list(zip(memory.ids.tolist(), memory.embeddings.tolist(), strict=True))


def test_the_prior_of_an_anchor_is_its_smoothed_collision_with_the_memory() -> None:
    spy, memory = Spy(needs_prior=True), WorkingMemory(40, 4, MostDuplicated(VonMisesFisher(0.2)))
    filled = memory_of(40)
    memory.add(filled.ids, filled.embeddings)
    moco(spy)(views_of(2), Batch(torch.arange(4)), memory)
    score = VonMisesFisher(0.2)
    measured = [
        float(score(memory.embeddings @ z_D).double().mean()) for z_D in spy.given[0].detach()
    ]
    for anchor, own in enumerate(measured):
        expected = (40 * own + SMOOTHING * sum(measured) / 4) / (40 + SMOOTHING)
        assert spy.given.prior_B[anchor] == pytest.approx(min(max(expected, 1 / 40), 0.5), rel=1e-4)
    assert not spy.given.prior_B.requires_grad


def test_the_prior_uses_embeddings_although_duplicates_are_counted_on_thumbnails() -> None:
    policy, score = MostDuplicated(VonMisesFisher(0.2)), VonMisesFisher(0.2)
    described = Thumbnail(side=2)
    memory = WorkingMemory(400, 4, policy, image_shape=(1, 4, 4), descriptor=described)
    filled = memory_of(400)
    draw = torch.Generator().manual_seed(0)
    image_KCHW = torch.randint(0, 256, (400, 1, 4, 4), generator=draw).to(torch.uint8)
    memory.add(filled.ids, filled.embeddings.float(), image_KCHW)
    z_BD = memory_of(50).embeddings.float()
    own_B = score(z_BD @ memory.embeddings.T).double().mean(dim=1)
    wanted_B = (400 * own_B + SMOOTHING * own_B.mean()) / (400 + SMOOTHING)
    torch.testing.assert_close(
        prior(z_BD, torch.arange(50), memory).double(), wanted_B.clamp(1 / 400, 0.5)
    )
    assert not torch.allclose(memory.collisions(z_BD, image_KCHW[:50]), own_B, rtol=0.1)


def test_priors_of_anchors_differ_less_if_the_memory_holds_few_slots() -> None:
    apart, spread = [], []
    for held in (1, 4000):
        memory = WorkingMemory(4000, 4, MostDuplicated(VonMisesFisher(0.2)))
        filled = memory_of(held)
        memory.add(filled.ids, filled.embeddings)
        z_BD = memory_of(50).embeddings.float()
        measured_B = memory.prior(z_BD)
        apart.append(float(measured_B.std()))
        spread.append(float(prior(z_BD, torch.arange(50), memory).std()))
    assert spread[0] < 0.1 * apart[0]
    assert spread[1] > 0.9 * apart[1]


def test_the_prior_lies_between_1_divided_by_the_capacity_and_a_half() -> None:
    spy = Spy(needs_prior=True)
    moco(spy)(views_of(2), Batch(torch.arange(4)), WorkingMemory(40, 4))
    assert spy.given.prior_B.tolist() == pytest.approx([1 / 40] * 4)  # nothing is held yet
    full = WorkingMemory(40, 4)
    method = moco(spy)
    z_B4 = method.encode_keys(views_of(1)[0])[:1].expand(40, -1)
    full.add(torch.arange(40) + 9, z_B4)
    method(views_of(2), Batch(torch.arange(4)), full)
    assert spy.given.prior_B.max() == 0.5


def test_each_view_beyond_the_first_is_a_positive() -> None:
    spy = Spy()
    views = views_of(4)
    method = moco(spy, views=4)
    out = method(views, Batch(torch.arange(4)), memory_of(0))
    positive_BMD = spy.given[1]
    assert positive_BMD.shape == (4, 3, 4)
    assert torch.equal(out.keys_BD, method.encode_keys(views[1]))
    assert torch.equal(positive_BMD[:, 2], method.encode_keys(views[3]))


def test_the_key_encoder_follows_weights_and_statistics() -> None:
    method = moco(momentum=0.9)
    with torch.no_grad():
        for parameter in method.encoder.parameters():
            parameter.add_(1.0)
    method(views_of(2), Batch(torch.arange(4)), memory_of(0))
    trained = {n: v.clone() for n, v in method.encoder.state_dict().items()}
    before = {n: v.clone() for n, v in method.key_encoder.state_dict().items()}
    method.after_update()
    after = method.key_encoder.state_dict()
    for name, value in after.items():
        if value.is_floating_point():
            expected = 0.9 * before[name] + 0.1 * trained[name]
            torch.testing.assert_close(value, expected)
    assert after["norm.num_batches_tracked"] == trained["norm.num_batches_tracked"] == 1
    assert not torch.equal(after["norm.running_mean"], before["norm.running_mean"])


def test_a_key_encoder_by_batch_statistics_stores_no_statistics() -> None:
    method = moco(key_statistics="batch")
    image_BCHW = views_of(1)[0]
    assert not list(method.key_encoder.buffers())
    together = method.encode_keys(image_BCHW)
    assert not torch.allclose(together[:2], method.encode_keys(image_BCHW[:2]))
    assert torch.equal(together, method.eval().encode_keys(image_BCHW))
    method.after_update()


def test_a_key_is_a_function_of_its_own_image() -> None:
    method = moco()
    image_BCHW = views_of(1)[0]
    together = method.encode_keys(image_BCHW)
    torch.testing.assert_close(together[1:2], method.encode_keys(image_BCHW[1:2]))
    assert not method.train().key_encoder.training


def test_moco_rejects_wrong_settings() -> None:
    with pytest.raises(ValueError, match=r"momentum is 1\.0"):
        moco(momentum=1.0)
    with pytest.raises(ValueError, match="views is 1"):
        moco(views=1)
    with pytest.raises(ValueError, match="key_statistics is 'none'"):
        moco(key_statistics="none")
    for arguments, says in (
        ({"negatives": 0}, "negatives is 0"),
        ({"negatives": 8, "negatives_by": "best"}, "negatives_by is 'best'"),
        ({"negatives_by": "hardest"}, "all of it is taken"),
    ):
        with pytest.raises(ValueError, match=says):
            MoCo(SmallEncoder(), SmallProjector(), InfoNCE(0.2), **arguments)
    with pytest.raises(ValueError, match="Linear has no `dim`"):
        MoCo(SmallEncoder(), nn.Linear(8, 4), InfoNCE(0.2))
    with pytest.raises(ValueError, match="got 3 views: this method wants 2"):
        moco()(views_of(3), Batch(torch.arange(4)), memory_of(0))
