"""How large a reproduction is: what fits a machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Network = Literal["conv", "resnet18", "resnet50"]


@dataclass(frozen=True)
class Preset:
    """What all runs of a reproduction share; results of other settings are not mixed with them.

    Args:
        network: "conv" is a plain convolutional net of 0.62 M parameters; the others are
            torchvision's with SimCLR's small first convolution.
        samples: that a run learns from, by experiment; "" is of the others.
        batch: samples an update; by experiment likewise.
        capacity: slots of the memory.
        raw_capacity: slots of D-SimCLR's memory, all encoded at each step.
        dim: dimensions of an embedding; the projector is one linear layer, as in DUEL.
        learning_rate: of Adam; by experiment likewise.
        momentum: of the key encoder.
        hue: jitter of the hue; on a CPU it costs as much as all other augmentation.
        precision: of the network's arithmetic.
        probe: "convex" (L-BFGS, fast on a CPU), or the "paper" of each experiment.
        references: labelled images of each class that the probes may use.
        seeds: how often key arms are repeated.
        repeat_all: the other arms as well.
        device: where runs are made.
        networks: network by experiment, where it is another.
        cropped: experiments whose views have crops here though they have none in the paper.
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
        """The settings that an experiment's results depend on, as JSON holds them."""
        told = asdict(self)
        for name in ("seeds", "repeat_all", "networks", "cropped"):
            del told[name]
        for name in ("samples", "batch", "learning_rate"):
            by: Mapping[str, Any] = getattr(self, name)
            told[name] = by.get(experiment, by[""])
        if experiment in self.cropped:
            told["crop"] = True
        told["network"] = self.networks.get(experiment, self.network)
        return told


EPOCH = 50_000

PRESETS: dict[str, Preset] = {
    # Each experiment within 15 minutes on two cores: about 1,800 core-seconds.
    "cpu-small": Preset(
        samples={"": 25_600, "self-labeling": 76_800, "aggregation": 19_200},
        batch={"": 128, "aggregation": 64},
        # Without crops, 200 steps leave SimCLR and SimSiam below the untrained network.
        cropped=("duel",),
    ),
    # A night on eight cores.
    "cpu": Preset(
        samples={"": 5 * EPOCH, "self-labeling": 8 * EPOCH},
        batch={"": 256, "aggregation": 128},
        raw_capacity=512,
        dim=256,
        references=5000,
        repeat_all=True,
    ),
    # The papers' networks and batches. DUEL trains for 40,000 steps of 256, the debiased papers
    # for 50 epochs of 512; more than an hour a run even so.
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
