"""What is compared, and in which order it is run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from benchmarks.memory_policies.stream import Shape
from memory.descriptors import Descriptor, Embedding, Frozen, Thumbnail, Weighted
from memory.eviction import (
    ClassBalanced,
    Hybrid,
    KappaBandit,
    MinimumRedundancy,
    MostDuplicated,
    Oldest,
    Policy,
    Random,
    Reservoir,
)
from memory.scores import Gaussian, Linear, Quadratic, Score, VonMisesFisher
from stream_ssl.reproduction.network import ConvNet

Anchors = Literal["stream", "memory"]
Freshness = Literal["stale", "written", "reencoded"]
Draw = Literal["uniform", "inverse-count"]

AGE_CAP = 16_384  # samples: eight times the memory


def _duplicated(score: Score) -> Callable[[], Policy]:
    return lambda: MostDuplicated(score)


POLICIES: Mapping[str, Callable[[], Policy]] = {
    "queue": Oldest,
    "vmf0.1": _duplicated(VonMisesFisher(0.1)),
    "reservoir": Reservoir,
    "minred": MinimumRedundancy,
    "linear": _duplicated(Linear()),
    "vmf0.3": _duplicated(VonMisesFisher(0.3)),
    "vmf0.02": _duplicated(VonMisesFisher(0.02)),
    "quadratic": _duplicated(Quadratic()),
    "gaussian": _duplicated(Gaussian(1.0)),
    "compete": lambda: MostDuplicated(VonMisesFisher(0.1), compete=True),
    "hybrid": lambda: Hybrid(MostDuplicated(VonMisesFisher(0.1)), age_cap=AGE_CAP),
    "bandit": KappaBandit,
    "random": Random,
    "oracle": ClassBalanced,
}
"""`oracle` balances by the labels, which no run would have: the most that balance can give."""

DESCRIPTORS: Mapping[str, Callable[[], Descriptor]] = {
    "embedding": Embedding,
    "thumbnail": lambda: Thumbnail(side=8),
    "weighted": lambda: Weighted([Embedding(), Thumbnail(side=8)]),
    "weighted-1-9": lambda: Weighted([Embedding(), Thumbnail(side=8)], weights=[1, 9]),
    "frozen": lambda: Frozen(ConvNet()),
}
"""What duplicates are counted on. `frozen` are the features of an untrained network."""

# What anchors and freshness can be together: only what is drawn from the memory can be written
# back to it.
TRAINING: tuple[tuple[Anchors, Freshness], ...] = (
    ("stream", "stale"),
    ("memory", "written"),
    ("memory", "stale"),
    ("memory", "reencoded"),
    ("stream", "reencoded"),
)

STREAMS = tuple(Shape(bias, block) for bias in (27, 1, 9) for block in (1, 64))
SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Arm:
    """A policy, where the training batches come from, and how embeddings stay fresh.

    Args:
        policy: a name of POLICIES.
        anchors: "stream": trained on as it comes; "memory": trained on draws from the memory.
        freshness: "stale": embeddings stay as they came; "written": the fresh keys of what is
            drawn go back to their slots; "reencoded": besides, as many of the stalest slots as a
            batch has are encoded anew at each step.
        draw: how training batches are drawn from the memory.
        plain: newcomers and slots encoded anew are encoded as they are, not augmented.
        descriptor: a name of DESCRIPTORS.
    """

    policy: str
    anchors: Anchors
    freshness: Freshness
    draw: Draw = "uniform"
    plain: bool = False
    descriptor: str = "embedding"

    @property
    def name(self) -> str:
        parts = [self.policy, self.anchors, self.freshness]
        options = (
            ("inverse-count", self.draw == "inverse-count"),
            ("plain", self.plain),
            (self.descriptor, self.descriptor != "embedding"),
        )
        return "/".join([*parts, *(name for name, is_on in options if is_on)])

    def eviction(self) -> Policy:
        """A new policy."""
        return POLICIES[self.policy]()

    def describe(self) -> Descriptor:
        """A new descriptor."""
        return DESCRIPTORS[self.descriptor]()


@dataclass(frozen=True)
class Run:
    """An arm on a stream with a seed, which draws weights, stream and views alike."""

    shape: Shape
    arm: Arm
    seed: int

    @property
    def name(self) -> str:
        return f"{self.shape.name} {self.arm.name} seed{self.seed}"


BASE = Arm("queue", "stream", "stale")
FAVOURITE = Arm("vmf0.1", "memory", "written", plain=True)
PAIR = (BASE, FAVOURITE)
MINRED = Arm("minred", "memory", "written", plain=True)
CONTROLS = (
    Arm("reservoir", "memory", "written"),  # anchors from the memory, but no DUEL
    Arm("vmf0.1", "memory", "written"),  # duplicates found with the noise of views
)
RIVALS = (
    Arm("oracle", "memory", "written"),
    Arm("linear", "stream", "stale"),
    Arm("minred", "memory", "written"),
    Arm("vmf0.02", "memory", "written", plain=True),
    MINRED,
    Arm("vmf0.3", "memory", "written"),
    Arm("linear", "memory", "written"),
    Arm("vmf0.1", "memory", "written", "inverse-count"),
    Arm("vmf0.1", "memory", "reencoded", plain=True),
)
# One change at a time from the favourite, and the policies that no line above has.
VARIED = (
    Arm("vmf0.1", "memory", "reencoded", plain=True),
    Arm("vmf0.1", "memory", "stale", plain=True),
    Arm("vmf0.1", "stream", "stale", plain=True),
    Arm("vmf0.1", "stream", "reencoded", plain=True),
    Arm("vmf0.1", "memory", "written", "inverse-count", plain=True),
    *(
        Arm(policy, "memory", "written", plain=True)
        for policy in ("linear", "compete", "hybrid", "bandit", "quadratic", "gaussian", "random")
    ),
)
FIRST = RIVALS[:5]
HARD = STREAMS[:2]
MILD = Shape(1, 1), Shape(9, 1)


def plan() -> list[Run]:
    """Every run once, the most telling first: a study that is ended early still compares."""
    return list(dict.fromkeys(_by_worth()))


def _by_worth() -> Iterator[Run]:
    def runs(arms: tuple[Arm, ...], shapes: tuple[Shape, ...], seed: int) -> list[Run]:
        return [Run(shape, arm, seed) for shape in shapes for arm in arms]

    yield from runs((*PAIR, *CONTROLS), HARD, 0)
    yield from runs(PAIR, MILD[:1], 0)
    yield from runs(FIRST, HARD[:1], 0)
    for seed in SEEDS[1:]:
        yield from runs(PAIR, HARD, seed)
    for seed in SEEDS:
        yield from runs((MINRED,), HARD, seed)
    for seed in SEEDS[1:]:
        yield from runs(CONTROLS, HARD[1:], seed)
    yield from runs(PAIR, MILD, 0)
    for seed in SEEDS[1:]:
        yield from runs((CONTROLS[0], *FIRST[:2]), HARD[:1], seed)
    yield from runs(VARIED, HARD[1:], 0)
    yield from runs(PAIR, STREAMS[2:], 0)
    yield from runs(VARIED, HARD[:1], 0)
    for seed in SEEDS[1:]:
        yield from runs(PAIR, STREAMS[2:], seed)
    for seed in SEEDS[1:]:
        yield from runs((*CONTROLS, *FIRST), HARD[:1], seed)
    yield from runs(RIVALS, HARD, 0)
    arms = tuple(Arm(name, *training) for training in TRAINING for name in POLICIES)
    for seed in SEEDS:
        yield from runs((*PAIR, *CONTROLS, *RIVALS, *VARIED, *arms), STREAMS, seed)
