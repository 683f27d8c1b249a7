"""Tests of each method's step against a twin that computes sample by sample in plain autograd.

Shapes: B samples, D embedding, k slots of the memory.
"""

from __future__ import annotations

import copy

import pytest
import torch
from methods_small import BATCH, made, memory_of, plain, samples_of, step, views_of
from table import table
from torch import Tensor, nn
from torch.nn.functional import normalize

from stream_ssl.losses import InfoNCE, NegativeCosine, SelfLabeling
from stream_ssl.methods import Method

T = 0.3


def network(method: Method, image_BCHW: Tensor) -> Tensor:
    return normalize(method.projector(method.encoder(image_BCHW)), dim=1)


def keys(method: Method, image_BCHW: Tensor) -> Tensor:
    """By the momentum network, normalised by its batch."""
    with torch.no_grad():
        return normalize(method.key_projector(method.key_encoder(image_BCHW)), dim=1)


def one_loss(anchor_D: Tensor, positive_D: Tensor, negatives: list[Tensor]) -> Tensor:
    up = torch.exp(anchor_D @ positive_D / T)
    down = up
    for negative_D in negatives:
        down = down + torch.exp(anchor_D @ negative_D / T)
    return -torch.log(up / down)


def moco(method: Method, view_VBCHW: list[Tensor], held_kD: Tensor) -> Tensor:
    z_BD, key_BD = network(method, view_VBCHW[0]), keys(method, view_VBCHW[1])
    losses = []
    for b in range(BATCH):
        negatives = [key_BD[i] for i in range(BATCH) if i != b] + list(held_kD)
        losses.append(one_loss(z_BD[b], key_BD[b], negatives))
    return sum(losses) / BATCH


def simclr(method: Method, view_VBCHW: list[Tensor], held_kD: Tensor) -> Tensor:
    both = network(method, torch.cat(view_VBCHW))
    losses = []
    for a in range(2 * BATCH):
        negatives = [both[i] for i in range(2 * BATCH) if i % BATCH != a % BATCH]
        losses.append(one_loss(both[a], both[(a + BATCH) % (2 * BATCH)], negatives + list(held_kD)))
    return sum(losses) / (2 * BATCH)


def simclr_alone(method: Method, view_VBCHW: list[Tensor], held_kD: Tensor) -> Tensor:
    return simclr(method, view_VBCHW, held_kD[:0])


def guesses(method: Method, view_VBCHW: list[Tensor], target_VBD: list[Tensor]) -> Tensor:
    """The negative cosine of each view's guess and the other view's target."""
    total = torch.zeros(())
    for guessing, guessed in ((0, 1), (1, 0)):
        z_BD = method.projector(method.encoder(view_VBCHW[guessing]))
        guess_BD = method.predictor(z_BD)
        for b in range(BATCH):
            cosine = torch.cosine_similarity(guess_BD[b], target_VBD[guessed][b], dim=0)
            total = total - cosine
    return total / (2 * BATCH)


def simsiam(method: Method, view_VBCHW: list[Tensor], held_kD: Tensor) -> Tensor:
    del held_kD
    frozen = copy.deepcopy(method)  # the twin passes the encoder once more
    target_VBD = [network(frozen, view).detach() for view in view_VBCHW]
    return guesses(method, view_VBCHW, target_VBD)


def byol(method: Method, view_VBCHW: list[Tensor], held_kD: Tensor) -> Tensor:
    del held_kD
    return guesses(method, view_VBCHW, [keys(method, view) for view in view_VBCHW])


def self_labeling(method: Method, view_VBCHW: list[Tensor], held_kD: Tensor) -> Tensor:
    """The poster's: x' = theta x + (1 - theta) x~_k against soft labels over batch and memory."""
    loss = method.loss
    torch.manual_seed(3)
    mix = method.draw(BATCH, torch.device("cpu"))
    key_BD = keys(method, view_VBCHW[1])
    mixed = [
        mix.theta_B[i] * view_VBCHW[0][i] + (1 - mix.theta_B[i]) * view_VBCHW[1][k]
        for i, k in enumerate(mix.permutation_B.tolist())
    ]
    z_BD = network(method, torch.stack(mixed))
    all_keys = torch.cat([key_BD, held_kD])
    labels = []
    for i in range(BATCH):
        weight = torch.exp(all_keys @ key_BD[i] / T / loss.sharpening)
        p = weight / weight.sum()
        weight[i] = 0
        q = weight / weight.sum()
        onehot = torch.zeros(len(all_keys)).index_fill_(0, torch.tensor(i), 1.0)
        labels.append((1 - loss.alpha - loss.beta) * onehot + loss.alpha * p + loss.beta * q)
    total = torch.zeros(())
    for i, k in enumerate(mix.permutation_B.tolist()):
        label = mix.theta_B[i] * labels[i] + (1 - mix.theta_B[i]) * labels[k]
        total = total - (label * torch.log_softmax(all_keys @ z_BD[i] / T, dim=0)).sum()
    return total / BATCH


TWINS = {
    "self-labeling": self_labeling,
    "moco": moco,
    "simclr": simclr_alone,
    "d-simclr": simclr,
    "simsiam": simsiam,
    "byol": byol,
}


def trained_apart(kind: str) -> Method:
    """A method whose momentum network, if any, differs from its trained network."""
    loss = {
        "simsiam": NegativeCosine(),
        "byol": NegativeCosine(),
        "self-labeling": SelfLabeling(T, alpha=0.3, beta=0.2, sharpening=0.7, rise=0),
    }.get(kind, InfoNCE(T))
    method = made(kind, loss)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in method.trained:
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return method


@table("kind", sorted(TWINS))
def test_a_step_equals_its_twin_of_the_paper(kind: str) -> None:
    method, memory = trained_apart(kind), memory_of(9)
    twin = copy.deepcopy(method)
    torch.manual_seed(3)
    out = step(method, memory)
    out.loss.loss.backward()
    held_kD = memory_of(9).embeddings
    if kind == "d-simclr":
        with torch.no_grad():
            held_kD = network(copy.deepcopy(twin), plain(memory.images))
        torch.testing.assert_close(memory.embeddings, held_kD)
    expected = TWINS[kind](twin, views_of(2, seed=0), held_kD)
    expected.backward()
    torch.testing.assert_close(out.loss.loss, expected)
    pairs = zip(method.named_parameters(), twin.parameters(), strict=True)
    for (name, ours), theirs in pairs:
        assert (ours.grad is None) == (theirs.grad is None), name
        if ours.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("kind", ["simclr", "d-simclr"])
def test_three_views_have_two_positives_each(kind: str) -> None:
    method, memory = made(kind, InfoNCE(T), views=3), memory_of(0)
    twin = copy.deepcopy(method)
    found = method(views_of(3), samples_of(BATCH), memory).loss.loss
    every = network(twin, torch.cat(views_of(3)))
    losses = []
    for a in range(3 * BATCH):
        negatives = [every[i] for i in range(3 * BATCH) if i % BATCH != a % BATCH]
        for shift in (BATCH, 2 * BATCH):
            losses.append(one_loss(every[a], every[(a + shift) % (3 * BATCH)], negatives))
    torch.testing.assert_close(found, sum(losses) / len(losses))


def test_d_simclr_encodes_the_memory_again_in_even_batches() -> None:
    method, memory = made("d-simclr"), memory_of(300)
    sizes = []
    encode = method.encode_keys

    def encode_keys(image_BCHW: Tensor) -> Tensor:
        sizes.append(len(image_BCHW))
        return encode(image_BCHW)

    method.encode_keys = encode_keys
    method.prepare(memory, plain)
    assert sizes == [150, 150]
    assert bool((memory.encoded == 300).all())


def test_an_encoder_of_zeros_does_not_change_the_memory() -> None:
    method, memory = made("d-simclr"), memory_of(9)
    nn.init.zeros_(method.projector.layer.weight)
    nn.init.zeros_(method.projector.layer.bias)
    method.prepare(memory, plain)
    assert torch.equal(memory.embeddings, memory_of(9).embeddings)
