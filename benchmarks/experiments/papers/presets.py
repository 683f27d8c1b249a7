"""The sizes of a reproduction for different machines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Network = Literal["conv", "resnet18", "resnet50"]


@dataclass(frozen=True)
class Preset:
    """The settings that all runs of a reproduction share. Each set of settings has its own results.

    Args:
        network: "conv" is a plain convolutional network of 0.62 M parameters. The others are
            torchvision's, with SimCLR's small first convolution.
        samples: number of samples that a run learns from, by experiment; "" is the default.
        batch: samples per update, by experiment; "" is the default.
        raw_capacity: slots of D-SimCLR's memory, which are all encoded at each step.
        dim: dimensions of an embedding. The projector is one linear layer, as in DUEL.
        learning_rate: learning rate of Adam, by experiment; "" is the default.
        probe: "convex" (L-BFGS, fast on a CPU), or "paper" for the probe of each experiment.
        references: number of labelled images per class that the probes may use.
        seeds: number of seeds of the key arms.
        repeat_all: whether the other arms use all seeds, too.
        networks: networks of experiments that do not use `network`.
        cropped: experiments whose views are cropped here, although the paper does not crop.
    """

    network: Network = "conv"
    samples: Mapping[str, int] = field(default_factory=lambda: {"": 25_600})
    batch: Mapping[str, int] = field(default_factory=lambda: {"": 128})
    capacity: int = 2048
    raw_capacity: int = 256
    dim: int = 128
    learning_rate: Mapping[str, float] = field(default_factory=lambda: {"": 1e-3})
    momentum: float = 0.99
    hue: float = 0.0
    precision: Literal["float32", "bfloat16"] = "float32"
    probe: Literal["convex", "paper"] = "convex"
    references: int = 1000
    seeds: int = 3
    repeat_all: bool = False
    device: str = "cpu"
    networks: Mapping[str, Network] = field(default_factory=dict)
    cropped: tuple[str, ...] = ()

    def of(self, experiment: str) -> dict[str, Any]:
        """Return the settings that an experiment's results depend on, as JSON stores them."""
        values = asdict(self)
        for name in ("seeds", "repeat_all", "networks", "cropped"):
            del values[name]
        for name in ("samples", "batch", "learning_rate"):
            by: Mapping[str, Any] = getattr(self, name)
            values[name] = by.get(experiment, by[""])
        if experiment in self.cropped:
            values["crop"] = True
        values["network"] = self.networks.get(experiment, self.network)
        return values


EPOCH = 50_000

PRESETS: dict[str, Preset] = {
    # Each experiment takes at most 15 minutes on two cores: about 1,800 core-seconds.
    "cpu-small": Preset(
        samples={"": 25_600, "self-labeling": 76_800, "aggregation": 19_200},
        batch={"": 128, "aggregation": 64},
        # Without crops, 200 steps leave SimCLR and SimSiam below the untrained network.
        cropped=("duel",),
    ),
    # Each experiment takes a night on eight cores.
    "cpu": Preset(
        samples={"": 5 * EPOCH, "self-labeling": 8 * EPOCH},
        batch={"": 256, "aggregation": 128},
        raw_capacity=512,
        dim=256,
        references=5000,
        repeat_all=True,
    ),
    # The papers' networks and batches. DUEL trains for 40,000 steps of 256, the debiased papers for
    # 50 epochs of 512. Each run takes more than an hour.
    "gpu": Preset(
        network="resnet18",
        networks={"duel": "resnet50"},
        samples={"": 50 * EPOCH, "duel": 40_000 * 256},
        batch={"": 256, "debiased": 512, "aggregation": 256},
        raw_capacity=512,
        dim=256,
        learning_rate={"": 1e-3, "duel": 0.05},
        hue=0.1,
        precision="bfloat16",
        probe="paper",
        references=5000,
        repeat_all=True,
        device="cuda",
    ),
}
