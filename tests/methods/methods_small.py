"""Small encoders, and a method of each kind, for the tests of methods."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from stream_ssl.batch import Batch
from stream_ssl.losses import LOSSES, Loss, NegativeCosine
from stream_ssl.memory import WorkingMemory
from stream_ssl.methods import METHODS, Method, MethodOutput
from stream_ssl.methods.norm import BatchNorm2d

BATCH, DIM, SIZE = 6, 4, 6


class SmallEncoder(nn.Module):
    """A convolution, a BatchNorm and an average: [B, 1, 6, 6] to [B, 8]."""

    dim = 8

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, bias=False)
        self.norm = BatchNorm2d(8)

    def forward(self, image_BCHW: Tensor) -> Tensor:
        feature_BFHW: Tensor = self.norm(self.conv(image_BCHW)).relu()
        return feature_BFHW.mean((2, 3))


class SmallProjector(nn.Module):
    dim = DIM

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, DIM)

    def forward(self, feature_BF: Tensor) -> Tensor:
        z_BD: Tensor = self.layer(feature_BF)
        return z_BD


def memory_of(count: int, first_id: int = 1000, dim: int = DIM) -> WorkingMemory:
    """A memory of `count` unit rows, with ids, hashes, labels 0 to 2 and images."""
    memory = WorkingMemory(capacity=max(count, 1), dim=dim, image_shape=(1, SIZE, SIZE))
    if count:
        generator = torch.Generator().manual_seed(count)
        rows = torch.randn(count, dim, generator=generator)
        ids = torch.arange(first_id, first_id + count)
        shape = (count, 1, SIZE, SIZE)
        images = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        z = nn.functional.normalize(rows, dim=1)
        memory.add(ids, z, images=images, hashes=ids + 1, labels=ids % 3)
    return memory


def plain(image_BCHW: Tensor) -> Tensor:
    """The memory's images as the encoder takes them."""
    return image_BCHW.float() / 64 - 2


def samples_of(count: int, first_id: int = 0) -> Batch[Tensor]:
    ids_B = torch.arange(first_id, first_id + count)
    return Batch(ids_B, ids_B + 1, ids_B % 3)


def views_of(count: int, batch: int = BATCH, seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, 1, SIZE, SIZE, generator=generator) for _ in range(count)]


def step(method: Method, memory: WorkingMemory, seed: int = 0, batch: int = BATCH) -> MethodOutput:
    """The output of a method for one update, with the calls that the learner makes before it."""
    method.begin(seed)
    method.prepare(memory, plain)
    output: MethodOutput = method(views_of(method.views, batch, seed), samples_of(batch), memory)
    return output


def fitting() -> Iterator[tuple[str, str]]:
    """Every method with every loss that fits it, by their names."""
    for method in METHODS:
        for loss in LOSSES:
            if fits(method, loss):
                yield method, loss


def fits(method: str, loss: str) -> bool:
    if method == "self-labeling":
        return loss == "self-labeling"
    return METHODS[method].contrasts == LOSSES[loss].uses_negatives


def default_loss(method: str) -> Loss:
    if method == "self-labeling":
        return LOSSES["self-labeling"]()
    return LOSSES["infonce"]() if METHODS[method].contrasts else NegativeCosine()


def made(method: str, loss: Loss | None = None, **settings: object) -> Method:
    """A small method by its name, in training."""
    torch.manual_seed(0)
    chosen = default_loss(method) if loss is None else loss
    return METHODS[method](SmallEncoder(), SmallProjector(), chosen, **settings).train()
