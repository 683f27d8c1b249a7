"""The options of the learner, which are the section `learner` of a config file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from stream_ssl.learning.randomness import check_threads
from stream_ssl.memory.draws import ORDERS, DrawOrder


@dataclass(frozen=True, slots=True)
class LearnerSettings:
    """The options of a learner: its device, its random draws, its anchors and its keys.

    Args:
        device: "cpu", "cuda" or "cuda:1".
        precision: number type in which the method computes. Losses, keys and memory stay in
            float32.
        seed: seed of all random draws of the learner, and of the initial weights.
        threads: number of torch threads on the CPU, from 1 to 1,024; null keeps torch's default. A
            run repeats only with the same number.
        reencode: number of the memory's stalest slots to re-encode in each step, 0 or more. One
            pass encodes them and the samples that join, unless these were trained on first. Use a
            few dozen or more if keys are normalised by the statistics of their batch.
        anchors: samples that updates use: the batch of the "stream", or samples drawn from the
            "memory", which must then store images.
        write_back: whether the fresh keys of samples drawn from the memory, as anchors or for
            replays, replace the older keys in their slots. This needs no extra encoding.
        plain_keys: whether images that are encoded only for the memory are encoded without
            augmentation. This concerns batches that join without training, and re-encoded slots.
            Duplicates are then found with less noise.
        draw: how samples are drawn from the memory: "uniform"; "epochs", which draws newly admitted
            samples first and then each slot once before any repeats; or "inverse-count", with
            probability proportional to 1 / (1 + N(j)), where N(j) is the duplicate count.
        novelty: test that drops near-duplicates of the memory's samples before they are encoded.
            The other samples join once they fill a batch. "auto" compares the pictures closely
            (docs/duplicates.md). A number is a cosine of descriptors; the memory's descriptor must
            then be of images, such as Thumbnail, or Weighted with such a part, and only this part
            is compared. null: every sample is encoded.
        sync_batchnorm: whether, on several ranks, BatchNorm normalises updates by the statistics of
            all ranks' batches, as one process would. This takes some exchanges per layer
            (docs/scale.md). false: by the statistics of the rank's own batch. Images encoded only
            for the memory always use their own rank's statistics.
        compile: whether torch.compile makes kernels for the encoders. Steps then take less time,
            but the first ones take half a minute to some minutes, and torch needs a C++ compiler
            (docs/performance.md).

    Raises:
        ValueError: an argument is outside its range. `Novelty` checks `novelty`, which depends on
            the memory.
    """

    device: str = "cpu"
    precision: Literal["float32", "bfloat16"] = "float32"
    seed: int = 0
    threads: int | None = None
    reencode: int = 0
    anchors: Literal["stream", "memory"] = "stream"
    write_back: bool = True
    plain_keys: bool = False
    draw: DrawOrder = "uniform"
    novelty: float | Literal["auto"] | None = None
    sync_batchnorm: bool = False
    compile: bool = False

    def __post_init__(self) -> None:
        if self.precision not in ("float32", "bfloat16"):
            raise ValueError(f'precision is {self.precision!r}: choose "float32" or "bfloat16"')
        if self.anchors not in ("stream", "memory"):
            raise ValueError(f'anchors is {self.anchors!r}: choose "stream" or "memory"')
        check_threads(self.threads)
        if self.reencode < 0:
            raise ValueError(f"reencode is {self.reencode}: it is a number of slots, 0 or more")
        if self.compile and self.sync_batchnorm:
            raise ValueError(
                "compile and sync_batchnorm are both true: exchanges between ranks are not compiled"
            )
        if self.draw not in ORDERS:
            raise ValueError(f"draw is {self.draw!r}: choose one of {', '.join(ORDERS)}")
