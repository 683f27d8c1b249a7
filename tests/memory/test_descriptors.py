"""Tests of descriptors, and that duplicates are counted only on descriptors.

Shapes: B samples, D embedding, A descriptor, C H W image, F features.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from memory_stream import equal
from safetensors.torch import save_file
from table import table
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, normalize

from stream_ssl.memory import Duplicates, WorkingMemory
from stream_ssl.memory.descriptors import (
    Descriptor,
    Embedding,
    Features,
    Frozen,
    Thumbnail,
    Vector,
    Weighted,
)
from stream_ssl.memory.eviction import MinimumRedundancy, MostDuplicated, Policy
from stream_ssl.memory.index import cells_of
from stream_ssl.memory.scores import Linear, Score, VonMisesFisher
from stream_ssl.memory.state import decode, encode
from tests.naive import IncrementalDuel, unit_rows

SHAPE = (3, 16, 16)
ONE = torch.ones(1, 1)


def scenes(count: int, seed: int = 0, shape: tuple[int, ...] = SHAPE) -> Tensor:
    """Return uint8 images of `count` scenes, with patches as large as a thumbnail's pixels."""
    rng = np.random.default_rng(seed)
    patches = rng.integers(40, 200, (count, shape[0], shape[1] // 2, shape[2] // 2))
    return torch.from_numpy(patches.repeat(2, axis=2).repeat(2, axis=3).astype(np.uint8))


def noisy(image_BCHW: Tensor, seed: int = 0, sigma: float = 4.0) -> Tensor:
    noise = np.random.default_rng(seed).normal(0, sigma, image_BCHW.shape)
    return (image_BCHW + torch.from_numpy(noise)).clamp(0, 255).to(torch.uint8)


def encoder(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Dropout(0.5)
    )


def diverged() -> nn.Module:
    module = encoder()
    nn.init.constant_(module.get_parameter("0.bias"), torch.nan)
    return module


def unit(row_BA: Tensor) -> bool:
    return bool(((torch.linalg.vector_norm(row_BA, dim=1) - 1).abs() < 1e-5).all())


# Each descriptor by itself.


@table("shape", [(3, 16, 16), (1, 32, 32), (3, 8, 8), (3, 4, 6)], ids=str)
@table("dtype", [torch.float32, torch.float64], ids=str)
def test_thumbnails_are_unit_vectors_of_pixel_means_less_their_mean(
    shape: Any, dtype: torch.dtype
) -> None:
    describe, image_BCHW = Thumbnail(8), scenes(5, shape=shape)
    row_BA = describe(ONE.to(dtype), image_BCHW)
    assert row_BA.shape == (5, describe.dim(99, shape)) == (5, 64 * shape[0])
    assert row_BA.dtype == dtype
    assert unit(row_BA)
    if shape[1] % 8 == 0:
        small_BA = avg_pool2d(image_BCHW.double() / 255, shape[1] // 8).flatten(1)
        expected_BA = small_BA - small_BA.mean(dim=1, keepdim=True)
        cosine_B = (normalize(expected_BA, dim=1) * row_BA).sum(dim=1)
        assert bool((cosine_B > 0.97).all())  # up to a small constant
    assert describe(ONE, image_BCHW[:0]).shape == (0, 64 * shape[0])


def test_thumbnails_are_alike_for_one_scene_and_different_for_two() -> None:
    describe, image_BCHW = Thumbnail(8), scenes(40)
    row_BA = describe(ONE, image_BCHW)
    near_BB = row_BA @ row_BA.T
    assert float(near_BB.fill_diagonal_(0).abs().max()) < 0.5
    for other_BCHW in (noisy(image_BCHW), image_BCHW + 50, noisy(image_BCHW - 30)):
        assert float((row_BA * describe(ONE, other_BCHW)).sum(dim=1).min()) > 0.98
    # Nearly constant frames are one scene, whatever their brightness and noise.
    level_B = torch.linspace(10, 240, 20).to(torch.uint8)[:, None, None, None]
    flat_BA = describe(ONE, noisy(level_B.expand(20, *SHAPE), sigma=1.0))
    assert float((flat_BA @ flat_BA.T).min()) > 0.95


def test_frozen_features_equal_those_of_the_encoder_in_evaluation_mode() -> None:
    module, image_BCHW = encoder(), scenes(10)
    describe = Frozen(module, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4), centre=True, batch=3)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    row_BA = describe(ONE.double(), image_BCHW)
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in ((0.4, 0.5, 0.6), (0.2, 0.3, 0.4)))
    feature_BF = module.eval()((image_BCHW / 255 - mean) / std).flatten(1).double()
    expected_BA = normalize(feature_BF - feature_BF.mean(dim=1, keepdim=True), dim=1)
    torch.testing.assert_close(row_BA, expected_BA, atol=1e-5, rtol=0)
    assert row_BA.shape == (10, describe.dim(7, SHAPE)) == (10, 16)
    assert not row_BA.requires_grad
    assert not any(parameter.requires_grad for parameter in module.parameters())
    assert all(torch.equal(before[name], v) for name, v in module.state_dict().items())
    plain_BA = Frozen(encoder(), None, describe.mean, describe.std, False)(ONE, image_BCHW)
    torch.testing.assert_close(plain_BA, normalize(feature_BF, dim=1).float())


def test_frozen_features_without_information_look_alike() -> None:
    class Odd(nn.Module):
        def forward(self, image_BCHW: Tensor) -> Tensor:
            value_B = image_BCHW.flatten(1)[:, :1]
            nan_B, inf_B = value_B * torch.nan, torch.full_like(value_B, torch.inf)
            odd_B = torch.where(value_B < 0, nan_B, torch.where(value_B > 1.9, inf_B, 0 * value_B))
            return odd_B * torch.ones(1, 6)

    image_BCHW = torch.tensor([0, 255, 140], dtype=torch.uint8)[:, None, None, None]
    row_BA = Frozen(Odd())(ONE, image_BCHW.expand(3, *SHAPE))
    assert unit(row_BA)
    assert float((row_BA @ row_BA.T).min()) > 0.999


@pytest.mark.parametrize("policy", [MostDuplicated, MinimumRedundancy])
def test_vectors_without_information_look_alike(policy: Callable[[], Policy]) -> None:
    odd_B = [torch.nan, torch.inf, 0.0, 0.1, 1e30, -1e-30]  # each fills a whole vector
    odd_BD = torch.tensor(odd_B)[:, None].expand(-1, 7).clone()
    spread_BD = torch.randn(40, 7, generator=torch.Generator().manual_seed(0))
    spread_BD[:2] *= torch.tensor([[1e30], [1e-30]])  # their squares overflow or underflow float32
    pixels_BCHW = torch.cat([odd_BD, spread_BD]).view(torch.uint8)[:, :, None, None]
    memory = WorkingMemory(20, 3, policy(), (28, 1, 1), descriptor=Vector())
    memory.add(torch.arange(46), unit_rows(np.random.default_rng(0), "uniform", 46, 3), pixels_BCHW)
    assert memory.check_valid() == (True, "")
    row_BA = Vector()(ONE, pixels_BCHW)
    assert unit(row_BA)
    assert float((row_BA[:6] @ row_BA[:6].T).min()) > 0.999
    apart_BD = (spread_BD - spread_BD.mean(dim=1, keepdim=True)).double()
    expected_BA = (apart_BD / apart_BD.norm(dim=1, keepdim=True)).float()
    torch.testing.assert_close(row_BA[6:], expected_BA)
    assert unit(Vector()(ONE, pixels_BCHW[:, :4]))  # vectors of a single number


@pytest.mark.parametrize(
    ("row_BA", "message"),
    [
        (torch.eye(4)[:2], r"of Given the descriptors have shape \(2, 4\): must be \[B, 3\]"),
        (torch.eye(3)[:1], "Given gave 1 rows for 2 samples"),
        (torch.eye(3)[:2] * torch.nan, "of Given the descriptor row 0 is not finite"),
        (torch.eye(3)[:2] * 2, "of Given the descriptor row 0 has norm 2: must be 1"),
    ],
    ids=range(4),
)
def test_the_memory_rejects_wrong_rows_of_a_descriptor(row_BA: Tensor, message: str) -> None:
    class Given(Descriptor):
        needs_images = False

        def dim(self, embedding_dim: int, image_shape: Any) -> int:
            return 3

        def __call__(self, z_BD: Tensor, image_BCHW: Tensor | None) -> Tensor:
            return row_BA

        def __repr__(self) -> str:
            return "Given"

    memory = WorkingMemory(4, 5, descriptor=Given())
    for ask in (lambda z: memory.add([0, 1], z), memory.collisions):
        with pytest.raises(ValueError, match=message):
            ask(torch.eye(5)[:2])
    assert (memory.added, len(memory), memory.check_valid()) == (0, 0, (True, ""))
    row_BA = torch.eye(3, dtype=torch.float64)[:2]
    memory.add([0, 1], torch.eye(5)[:2])
    assert memory.descriptors.dtype == torch.float32


def test_frozen_weights_come_from_a_file_and_are_known_by_their_hash(tmp_path: Path) -> None:
    weights = {name: v.contiguous() for name, v in encoder(1).state_dict().items()}
    save_file(weights, tmp_path / "w")
    loaded, same = Frozen(encoder(0), tmp_path / "w"), Frozen(encoder(1))
    assert loaded.fingerprint == same.fingerprint != Frozen(encoder(0)).fingerprint
    assert repr(loaded) == f"Frozen(Sequential, weights={same.fingerprint}, centre=True)"
    assert torch.equal(loaded(ONE, scenes(4)), same(ONE, scenes(4)))
    compiled = Frozen(torch.compile(encoder(0), backend="eager"), tmp_path / "w")
    assert repr(compiled) == repr(same)


def test_the_training_mode_of_a_model_does_not_change_its_frozen_encoder() -> None:
    model = nn.ModuleDict({"backbone": encoder()})
    describe, image_BCHW = Frozen(model["backbone"]), scenes(4)
    expected_BA = describe(ONE, image_BCHW)
    model.train()
    assert torch.equal(describe(ONE, image_BCHW), expected_BA)


def test_a_weighted_descriptor_has_the_weighted_mean_of_the_cosines() -> None:
    z_BD = unit_rows(np.random.default_rng(0), "uniform", 6, 5)
    parts, image_BCHW = [Embedding(), Thumbnail(4), Frozen(encoder())], scenes(6)
    both = Weighted(parts, weights=[1, 2, 5])
    assert both.dim(5, SHAPE) == 5 + 48 + 16
    row_BA = both(z_BD, image_BCHW)
    assert unit(row_BA)
    wanted_BB = torch.zeros(6, 6, dtype=torch.float64)
    for part, weight in zip(parts, (1 / 8, 2 / 8, 5 / 8), strict=True):
        own_BA = part(z_BD, image_BCHW)
        wanted_BB += weight * (own_BA @ own_BA.T)
    torch.testing.assert_close(row_BA @ row_BA.T, wanted_BB, atol=1e-6, rtol=0)
    # Only descriptors that depend on the embedding change with it.
    other_BD = unit_rows(np.random.default_rng(1), "uniform", 6, 5)
    assert both.moving == slice(0, 5)
    moved_BA = both.refreshed(row_BA, other_BD)
    torch.testing.assert_close(moved_BA, both(other_BD, image_BCHW))
    assert torch.equal(moved_BA[:, 5:], row_BA[:, 5:])
    assert (both.moves, both.needs_images) == (True, True)
    assert (Weighted([Thumbnail()]).moves, Weighted([Embedding()]).needs_images) == (False, False)


def test_the_fixed_part_of_a_descriptor_depends_only_on_images() -> None:
    image_BCHW, z_BD = scenes(9), unit_rows(np.random.default_rng(0), "uniform", 9, 5)
    thumbnail, frozen = Thumbnail(4), Frozen(encoder())
    both = Weighted([thumbnail, Embedding(), frozen], weights=[1, 7, 2])
    assert both.dim(5, SHAPE) == 48 + 5 + 16
    assert both.moving == slice(48, 53)
    fixed = both.fixed()
    assert fixed is not None
    fixed_BA = fixed(z_BD[:, :0], image_BCHW)
    torch.testing.assert_close(both.of_fixed(both(z_BD, image_BCHW)), fixed_BA)
    expected_BA = Weighted([thumbnail, frozen], weights=[1, 2])(z_BD, image_BCHW)
    torch.testing.assert_close(fixed_BA, expected_BA)
    assert thumbnail.fixed() is thumbnail
    assert Embedding().fixed() is None
    assert Weighted([Embedding()]).fixed() is None


@table(
    ("build", "message"),
    [
        (lambda p: Thumbnail(1), "side is 1: must be at least 2 pixels: a single one has"),
        (lambda p: Vector("int8"), "dtype is 'int8': choose \"float32\" or"),
        (lambda p: Frozen("resnet"), r"encoder is 'resnet': must be a torch.nn.Module that"),
        (lambda p: Frozen(encoder(), std=(0.2, 0)), r"std is \(0.2, 0\): must be above 0; pixels"),
        (lambda p: Frozen(encoder(), batch=0), "batch is 0: must be at least 1"),
        (lambda p: Frozen(encoder(), p / "no"), "no do not fit Sequential: .*must be a safetens"),
        (lambda p: Frozen(diverged()), "weights 0.bias of Sequential are not finite, because"),
        (
            lambda p: Frozen(nn.Linear(3, 2), p / "w"),
            "(?s)w do not fit Linear: .*this module's state",
        ),
        (lambda p: WorkingMemory(4, 2, descriptor=Frozen(encoder())), "keeps none: give it image"),
        (
            lambda p: WorkingMemory(4, 2, image_shape=(1, 8, 8), descriptor=Frozen(encoder())),
            r"the frozen encoder Sequential cannot take images of shape \(1, 8, 8\)",
        ),
        (lambda p: Weighted([]), "Weighted has no parts: give it one descriptor or more"),
        (lambda p: Weighted([Thumbnail]), r"descriptor is <class .*build it with Thumbnail\(\)"),
        (lambda p: Weighted([Embedding()], [1, 2]), "2 weights for 1 parts: give each part one"),
        (lambda p: Weighted([Embedding()], [0]), r"weights are \[0\]: must be above 0; leave out"),
        (lambda p: WorkingMemory(4, 2, descriptor="dino"), "'dino': .*such as Thumbnail"),
        (
            lambda p: WorkingMemory(4, 2, descriptor=Thumbnail()),
            r"Thumbnail\(side=8\) .*give it im",
        ),
        (lambda p: counted(Thumbnail()).collisions(torch.eye(5)), "pass images="),
        (lambda p: Features(0), "dims is 0: must be at least 1"),
        (lambda p: Features().dim(2, SHAPE), "give it dims, or call fit"),
        (lambda p: WorkingMemory(4, 2, descriptor=Features(2)), r"Features\(dims=2\) .*give it im"),
        (lambda p: described(4).collisions(torch.eye(5)), "5 samples without features: pass fea"),
        (
            lambda p: described(4).collisions(torch.eye(5), features=torch.ones(4, 6)),
            r"features are torch.float32 \(4, 6\): must be floating-point numbers \[5, F\]",
        ),
        (lambda p: described(4).collisions(torch.eye(5), features=torch.eye(5).long()), "int64"),
        (lambda p: described(4).describe_again(lambda image: image), r"features are torch.uint8"),
        (lambda p: counted(Thumbnail()).describe_again(lambda image: image), "leave it out"),
        (
            lambda p: WorkingMemory(4, 2, None, SHAPE, descriptor=Features(2)).describe_again(id),
            "the memory is empty: add samples",
        ),
    ],
    ids=range(26),
)
def test_errors_name_the_remedy(build: Callable[[Path], Any], message: str, tmp_path: Path) -> None:
    save_file(nn.Conv2d(3, 1, 1).state_dict(), tmp_path / "w")
    with pytest.raises(ValueError, match=message):
        build(tmp_path)


# A memory whose embeddings and images disagree about similarity.


def disagreeing(count: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return dissimilar embeddings, and images of eight scenes, half of them of one scene."""
    rng = np.random.default_rng(seed)
    scene_N = torch.from_numpy(rng.integers(0, 8, count) * rng.integers(0, 2, count))
    return unit_rows(rng, "uniform", count, 5), noisy(scenes(8)[scene_N], seed), scene_N


def counted(descriptor: Descriptor, policy: Policy | None = None, **options: Any) -> WorkingMemory:
    memory = WorkingMemory(30, 5, policy, SHAPE, descriptor=descriptor, **options)
    z_ND, image_NCHW, scene_N = disagreeing(120)
    for part in torch.arange(120).split(33):
        memory.add(part, z_ND[part], image_NCHW[part], labels=scene_N[part])
        assert memory.check_valid() == (True, "")
    return memory


@table("score", [Linear(), VonMisesFisher(0.1)], ids=repr)
@table("compete", [False, True])
def test_counts_are_computed_from_descriptors(score: Score, compete: bool) -> None:
    memory = counted(Thumbnail(4), MostDuplicated(score, compete))
    row_KA = Thumbnail(4)(memory.embeddings, memory.images)
    assert torch.equal(memory.descriptors, row_KA)
    count_K = IncrementalDuel(score, row_KA).count_K
    torch.testing.assert_close(memory.counts(), count_K, atol=1e-9, rtol=1e-9)
    z_BD, image_BCHW, _ = disagreeing(7, seed=3)
    near_BK = score(Thumbnail(4)(z_BD, image_BCHW) @ row_KA.T)
    found_B = memory.collisions(z_BD, image_BCHW)
    torch.testing.assert_close(found_B, near_BK.mean(dim=1), atol=1e-9, rtol=0)
    prior_B = score(z_BD @ memory.embeddings.T).mean(dim=1)
    torch.testing.assert_close(memory.prior(z_BD), prior_B, atol=1e-9, rtol=0)
    assert memory.stats().count_mean == pytest.approx(float(count_K.mean()))


@pytest.mark.parametrize("policy", [lambda: MostDuplicated(VonMisesFisher(0.1)), MinimumRedundancy])
def test_policies_keep_all_scenes_that_descriptors_tell_apart(policy: Callable[[], Policy]) -> None:
    """With thumbnails the memory holds all scenes. With embeddings half of it is one scene."""
    by_thumbnail = torch.bincount(counted(Thumbnail(4), policy()).labels, minlength=8)
    by_embedding = torch.bincount(counted(Embedding(), policy()).labels, minlength=8)
    assert 1 <= int(by_thumbnail.min()) <= int(by_thumbnail.max()) <= 7
    assert int(by_embedding[0]) > 10


def test_near_duplicates_and_strata_are_found_by_descriptors() -> None:
    memory = counted(Thumbnail(4), duplicates=Duplicates(0.9, "refuse"))
    assert sorted(memory.labels.tolist()) == list(range(8))
    assert counted(Embedding(), duplicates=Duplicates(0.99, "refuse")).stats().duplicates == 0
    memory = counted(Thumbnail(4))
    drawn = memory.negatives(16, how="stratified", cells=8)
    cell_k = cells_of(memory.descriptors, memory.state_dict()["strata.centres"])
    taken_C = torch.bincount(cell_k[(memory.embeddings[:, None] == drawn.z_ND).all(2).any(1)])
    assert int(taken_C.sum()) == 16
    assert int((taken_C - 2).clamp(min=0).sum()) <= int((2 - taken_C).clamp(min=0).sum())


@table(
    ("descriptor", "moves"),
    [(Thumbnail(4), False), (Embedding(), True), (Weighted([Embedding(), Thumbnail(4)]), True)],
    ids=["thumbnail", "embedding", "weighted"],
)
@table("score", [Linear(), VonMisesFisher(0.1)], ids=repr)
def test_encoding_again_changes_counts_only_if_the_descriptor_uses_embeddings(
    descriptor: Descriptor, moves: bool, score: Score
) -> None:
    memory = counted(descriptor, MostDuplicated(score))
    before_K, slots = memory.counts(), torch.tensor([3, 1, 29, 7])
    z_RD = unit_rows(np.random.default_rng(9), "one class", 4, 5)
    memory.refresh(slots, z_RD)
    assert torch.equal(memory.embeddings[slots], z_RD)
    assert torch.equal(memory.counts(), before_K) == (not moves)
    again_KA = descriptor(memory.embeddings, memory.images)
    torch.testing.assert_close(memory.descriptors, again_KA, atol=1e-9, rtol=0)
    count_K = IncrementalDuel(score, again_KA).count_K
    torch.testing.assert_close(memory.counts(), count_K, atol=1e-8, rtol=0)


def features_of(image_BCHW: Tensor, size: int = 6) -> Tensor:
    """Features as of an encoder with ReLU: none is negative, and all have much in common."""
    pooled_BP = avg_pool2d(image_BCHW.float(), 4).flatten(1)
    mixed_PF = torch.randn(pooled_BP.shape[1], size, generator=torch.Generator().manual_seed(1))
    return 40 + (pooled_BP @ mixed_PF).relu() / 100


def described(dims: int, policy: Policy | None = None, size: int = 6) -> WorkingMemory:
    """Return a memory that counts on features, filled and described once."""
    memory = WorkingMemory(30, 5, policy, SHAPE, descriptor=Features(dims))
    z_ND, image_NCHW, scene_N = disagreeing(120)
    for part in torch.arange(120).split(33):
        image_BCHW = image_NCHW[part]
        features_BF = features_of(image_BCHW, size)
        memory.add(part, z_ND[part], image_BCHW, labels=scene_N[part], features=features_BF)
        assert memory.check_valid() == (True, "")
        if len(memory) == memory.capacity and not memory.descriptor.is_centred:
            memory.describe_again(lambda image_bCHW: features_of(image_bCHW, size), batch=7)
            assert memory.check_valid() == (True, "")
    return memory


@table("dims", [6, 9])
@pytest.mark.parametrize("score", [Linear(), VonMisesFisher(0.1)], ids=repr)
def test_features_are_compared_after_their_mean_is_subtracted(dims: int, score: Score) -> None:
    memory = described(dims, MostDuplicated(score))
    assert memory.images is not None
    memory.describe_again(features_of, batch=7)
    feature_KF = features_of(memory.images).double()
    row_KF = normalize(feature_KF - feature_KF.mean(dim=0), dim=1)
    torch.testing.assert_close(memory.descriptors[:, :6].double(), row_KF, atol=1e-5, rtol=0)
    assert not memory.descriptors[:, 6:].any()
    count_K = IncrementalDuel(score, memory.descriptors).count_K
    torch.testing.assert_close(memory.counts(), count_K, atol=1e-8, rtol=0)
    z_BD, image_BCHW, _ = disagreeing(7, seed=3)
    row_BF = normalize(features_of(image_BCHW).double() - feature_KF.mean(dim=0), dim=1)
    near_BK = score(row_BF @ row_KF.T)
    found_B = memory.collisions(z_BD, features=features_of(image_BCHW))
    torch.testing.assert_close(found_B, near_BK.mean(dim=1), atol=1e-4, rtol=0)
    slots = torch.tensor([4, 0, 17])
    own_R = score(row_KF[slots] @ row_KF.T).mean(dim=1)
    found_R = memory.collisions(memory.embeddings[slots], slots=slots)
    torch.testing.assert_close(found_R, own_R, atol=1e-4, rtol=0)


def test_a_memory_that_counts_on_features_keeps_all_scenes() -> None:
    held_8 = torch.bincount(described(6, MostDuplicated(VonMisesFisher(0.1))).labels, minlength=8)
    assert 1 <= int(held_8.min()) <= int(held_8.max()) <= 7


def test_many_features_are_projected_on_fixed_orthogonal_directions() -> None:
    feature_BF = torch.randn(50, 40, generator=torch.Generator().manual_seed(2))
    one_BA, other_BA = (Features(12).project(feature_BF) for _ in range(2))
    assert torch.equal(one_BA, other_BA)
    basis_FA = Features(12).project(torch.eye(40))
    torch.testing.assert_close(basis_FA.T @ basis_FA, torch.eye(12), atol=1e-5, rtol=0)
    torch.testing.assert_close(one_BA, feature_BF @ basis_FA, atol=1e-4, rtol=0)


def test_constant_and_nan_features_keep_the_memory_valid() -> None:
    """A collapsed or diverged encoder stops neither the memory nor a count."""
    for value in (0.0, 3.0, float("nan")):
        memory = WorkingMemory(4, 5, None, SHAPE, descriptor=Features(3))
        z_BD, image_BCHW, _ = disagreeing(9)
        same_BF = torch.full((9, 3), value)
        memory.add(torch.arange(9), z_BD, image_BCHW, features=same_BF)
        memory.describe_again(lambda image_bCHW: same_BF[: len(image_bCHW)])  # noqa: B023
        assert torch.isfinite(memory.descriptors).all()
        assert memory.check_valid() == (True, "")


def test_features_that_are_not_finite_do_not_count_in_the_mean() -> None:
    feature_kF = torch.tensor([[3.0, 0.0], [float("inf"), 1.0], [1.0, 0.0], [float("nan"), 2.0]])
    describe = Features(dims=2)
    none_k0 = feature_kF[:, :0]
    row_kA = describe.redescribed(none_k0, feature_kF)
    sound_2A = Features(dims=2).redescribed(none_k0[:2], feature_kF[[0, 2]])
    assert torch.equal(row_kA[[0, 2]], sound_2A)
    assert torch.equal(row_kA[1], row_kA[3])
    assert torch.equal(describe.state()["mean"], torch.tensor([2.0, 0.0]))
    describe.redescribed(none_k0[:0], feature_kF[:0])
    assert torch.equal(describe.state()["mean"], torch.zeros(2))


def test_an_error_about_features_changes_no_row() -> None:
    memory = WorkingMemory(4, 5, None, SHAPE, descriptor=Features(3))
    z_BD, image_BCHW, _ = disagreeing(4)
    memory.add(torch.arange(4), z_BD.float(), image_BCHW, features=torch.rand(4, 3))
    before = memory.state_dict()
    with pytest.raises(ValueError, match="without features"):
        memory.add(torch.arange(4), z_BD.double(), image_BCHW)
    assert memory.dtype == torch.float32
    assert equal(memory.state_dict(), before)


def test_features_of_another_size_are_refused() -> None:
    memory = described(4)
    z_BD, image_BCHW, _ = disagreeing(5)
    again = WorkingMemory(30, 5, None, SHAPE, descriptor=Features(4))
    again.load_state_dict(memory.state_dict())
    for each in (memory, again):
        before = each.state_dict()
        for size in (5, 3):
            wider = features_of(image_BCHW, size)
            with pytest.raises(ValueError, match=f"features have {size} numbers: must have 6"):
                each.add(torch.arange(5), z_BD, image_BCHW, features=wider)
            with pytest.raises(ValueError, match=f"features have {size} numbers: must have 6"):
                each.collisions(z_BD, features=wider)
        assert equal(each.state_dict(), before)
        each.add(torch.arange(0), z_BD[:0], image_BCHW[:0])
        # Another encoder describes all slots again.
        each.describe_again(lambda image_bCHW: features_of(image_bCHW, 9))
        each.add(torch.arange(5), z_BD, image_BCHW, features=features_of(image_BCHW, 9))
        assert each.check_valid() == (True, "")


def test_only_added_samples_decide_the_size_of_features() -> None:
    z_BD, image_BCHW, _ = disagreeing(5)
    memory = WorkingMemory(4, 5, None, SHAPE, descriptor=Weighted([Features(3), Thumbnail(2)]))
    memory.collisions(z_BD, image_BCHW, features_of(image_BCHW, 7))
    with pytest.raises(ValueError, match="is not finite"):
        memory.add(torch.arange(5), z_BD / 0, image_BCHW, features=features_of(image_BCHW, 7))
    memory.add(torch.arange(5), z_BD, image_BCHW, features=features_of(image_BCHW, 6))
    with pytest.raises(ValueError, match="features have 7 numbers: must have 6"):
        memory.collisions(z_BD, image_BCHW, features_of(image_BCHW, 7))


@table("beside", [False, True])
def test_a_loaded_state_with_features_continues_bit_equal(beside: bool) -> None:
    def describe() -> Descriptor:
        return Weighted([Embedding(), Features(4)]) if beside else Features(4)

    memory, again = (WorkingMemory(30, 5, None, SHAPE, descriptor=describe()) for _ in range(2))
    z_BD, image_BCHW, _ = disagreeing(40, seed=5)
    given = {"z": z_BD, "images": image_BCHW, "features": features_of(image_BCHW)}
    memory.add(torch.arange(40), **given)
    memory.describe_again(features_of)
    again.load_state_dict(memory.state_dict())
    for each in (memory, again):
        each.add(torch.arange(200, 240), **given)
        each.describe_again(features_of)
        each.add(torch.arange(300, 340), **given)
    assert equal(again.state_dict(), memory.state_dict())
    assert any(name.endswith(".mean") for name in memory.state_dict())


def test_features_beside_embeddings_are_compared_by_a_weighted_mean_of_cosines() -> None:
    """Each part changes alone, and the other keeps its bits."""
    score = VonMisesFisher(0.2)
    beside = Weighted([Embedding(), Features(4)], weights=[3, 1])
    memory = WorkingMemory(30, 5, MostDuplicated(score), SHAPE, descriptor=beside)
    alone = Features(4)
    z_ND, image_NCHW, _ = disagreeing(90)
    row_KA = None
    for part in torch.arange(90).split(15):
        given = {"z": z_ND[part], "images": image_NCHW[part]}
        memory.add(part, **given, features=features_of(given["images"]))
        if int(part[0]) % 30:
            continue
        before_kA = memory.descriptors.clone()
        memory.describe_again(features_of)
        row_KA = alone.redescribed(before_kA[:, :0], features_of(memory.images)).double()
        assert torch.equal(memory.descriptors[:, :5], before_kA[:, :5])
        torch.testing.assert_close(2 * memory.descriptors[:, 5:], row_KA, atol=1e-6, rtol=0)
        moved_RD = memory.embeddings[[2, 7]].flip(0)
        before_kA = memory.descriptors.clone()
        memory.refresh([2, 7], moved_RD)
        assert torch.equal(memory.descriptors[:, 5:], before_kA[:, 5:])
        near_KK = 0.75 * memory.embeddings @ memory.embeddings.T + 0.25 * row_KA @ row_KA.T
        count_K = score(near_KK).fill_diagonal_(0).sum(dim=1)
        torch.testing.assert_close(memory.counts(), count_K, atol=1e-3, rtol=0)
        assert memory.check_valid() == (True, "")
    assert row_KA is not None
    found_B = memory.collisions(z_ND[:7], image_NCHW[:7], features_of(image_NCHW[:7]))
    new_BA = alone.of_features(features_of(image_NCHW[:7]))
    row_BA = torch.cat([0.75**0.5 * z_ND[:7], 0.5 * new_BA], dim=1)
    near_BK = score(row_BA @ memory.descriptors.T)
    torch.testing.assert_close(found_B, near_BK.mean(dim=1), atol=1e-4, rtol=0)


class Mean(Descriptor):
    """A descriptor from outside: the mean of each channel. It has no repr of its own."""

    def dim(self, embedding_dim: int, image_shape: Any) -> int:
        return int(image_shape[0])

    def __call__(self, z_BD: Tensor, image_BCHW: Tensor | None) -> Tensor:
        assert image_BCHW is not None
        return normalize(image_BCHW.to(z_BD).mean((2, 3)) + 1, dim=1)


class Reminded(Mean):
    """A descriptor whose repr contains an address."""

    def __repr__(self) -> str:
        return f"Reminded({object.__repr__(self)}, {unit_rows})"


@table("build", [Mean, Reminded, lambda: Weighted([Embedding(), Mean()])], ids=range(3))
def test_a_state_loads_under_the_same_descriptor_from_outside(
    build: Callable[[], Descriptor],
) -> None:
    def remembering(descriptor: Descriptor) -> WorkingMemory:
        return WorkingMemory(30, 5, None, SHAPE, descriptor=descriptor)

    memory, again = remembering(build()), remembering(build())
    z_ND, image_NCHW, _ = disagreeing(50)
    memory.add(torch.arange(50), z_ND, image_NCHW)
    state = memory.state_dict()
    assert "0x" not in decode(state)["descriptor"]
    # Earlier versions saved the address of the object.
    said = json.loads(bytes(state["description"].numpy()))
    address = f"<{Mean.__module__}.Mean object at 0x7f2f00bdb350>"
    older = said | {"descriptor": said["descriptor"].replace("Mean", address)}
    if build is Reminded:
        older["descriptor"] = repr(build())
    for saved in (state, {**state, "description": encode(older)}):
        again.load_state_dict(saved)
        assert equal(again.state_dict(), state)
    with pytest.raises(ValueError, match=r"this memory has descriptor Thumbnail\(side=2\)"):
        remembering(Thumbnail(2)).load_state_dict(state)


@table("part", ["thumbnail", "frozen", "weighted"])
def test_a_loaded_state_with_descriptors_continues_bit_equal(part: str) -> None:
    def build(part: str) -> WorkingMemory:
        made = {
            "thumbnail": lambda: Thumbnail(4),
            "frozen": lambda: Frozen(encoder(1)),
            "weighted": lambda: Weighted([Embedding(), Thumbnail(4)]),
            "other": lambda: Frozen(encoder(2)),
        }
        return WorkingMemory(30, 5, None, SHAPE, descriptor=made[part]())

    memory, again = build(part), build(part)
    z_ND, image_NCHW, _ = disagreeing(90)
    memory.add(torch.arange(50), z_ND[:50], image_NCHW[:50])
    again.load_state_dict(memory.state_dict())
    for each in (memory, again):
        each.add(torch.arange(50, 90), z_ND[50:], image_NCHW[50:])
    assert equal(again.state_dict(), memory.state_dict())
    before = (other := build("other")).state_dict()
    with pytest.raises(ValueError, match=r"under descriptor .*this memory has descriptor Frozen"):
        other.load_state_dict(memory.state_dict())
    assert equal(other.state_dict(), before)
