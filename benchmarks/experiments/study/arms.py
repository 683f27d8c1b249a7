"""What is compared, and in which order it is run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from benchmarks.experiments.network import ConvNet
from benchmarks.experiments.study.oracles import ClassBalanced, ImageBalanced
from benchmarks.experiments.study.streams import STREAMS
from stream_ssl.memory.descriptors import Descriptor, Embedding, Frozen, Thumbnail, Weighted
from stream_ssl.memory.draws import DrawOrder
from stream_ssl.memory.eviction import (
    MinimumRedundancy,
    MostDuplicated,
    Oldest,
    Policy,
    Random,
    Redundant,
    Reservoir,
)
from stream_ssl.memory.scores import Gaussian, Linear, Quadratic, Score, VonMisesFisher

Anchors = Literal["stream", "memory"]
Freshness = Literal["stale", "written", "reencoded"]


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
    "random": Random,
    "redundant0.01": Redundant,
    "redundant0.03": lambda: Redundant(VonMisesFisher(0.03)),
    "oracle": ClassBalanced,
    "image-oracle": ImageBalanced,
}
"""`oracle` balances by the labels, `image-oracle` by the image that a frame was made of, which no
run would have: the most that balance, and that knowing all copies can give."""

DESCRIPTORS: Mapping[str, Callable[[], Descriptor]] = {
    "embedding": Embedding,
    "thumbnail": lambda: Thumbnail(side=8),
    "weighted": lambda: Weighted([Embedding(), Thumbnail(side=8)]),
    "weighted-1-9": lambda: Weighted([Embedding(), Thumbnail(side=8)], weights=[1, 9]),
    "weighted-9-1": lambda: Weighted([Embedding(), Thumbnail(side=8)], weights=[9, 1]),
    "weighted-99-1": lambda: Weighted([Embedding(), Thumbnail(side=8)], weights=[99, 1]),
    "frozen": lambda: Frozen(ConvNet()),
}
"""What duplicates are counted on. `frozen` are the features of an untrained network."""

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
        novelty: "auto", or a cosine of descriptors, from which a frame is turned away before it is
            encoded.
        follow: updates for each batch of what is not turned away; None: one for each of all frames.
    """

    policy: str
    anchors: Anchors
    freshness: Freshness
    draw: DrawOrder = "uniform"
    plain: bool = False
    descriptor: str = "embedding"
    novelty: float | Literal["auto"] | None = None
    follow: int | None = None

    @property
    def name(self) -> str:
        parts = [self.policy, self.anchors, self.freshness]
        options = (
            (self.draw, self.draw != "uniform"),
            ("plain", self.plain),
            (self.descriptor, self.descriptor != "embedding"),
            (f"new{self.novelty}", self.novelty is not None),
            (f"follow{self.follow}", self.follow is not None),
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
    """An arm on a stream, by its name, with a seed, which draws weights, stream and views alike."""

    stream: str
    arm: Arm
    seed: int

    @property
    def name(self) -> str:
        return f"{self.stream} {self.arm.name} seed{self.seed}"

    @property
    def cost(self) -> float:
        return 1.0

    def facts(self) -> dict[str, Any]:
        return {}


BASE = Arm("queue", "stream", "stale")


def drawn(policy: str, descriptor: str = "embedding", **options: Any) -> Arm:
    """Trained on draws from the memory, with fresh keys written back."""
    return Arm(policy, "memory", "written", plain=True, descriptor=descriptor, **options)


DEFAULT = drawn("vmf0.1", "thumbnail")
EPOCHS = drawn("vmf0.1", "thumbnail", draw="epochs")
NOVEL = drawn("vmf0.1", "thumbnail", draw="epochs", novelty=0.9)
UNIFORM = drawn("vmf0.1", "thumbnail", novelty=0.9)
FOLLOWING = drawn("vmf0.1", "thumbnail", draw="epochs", novelty=0.9, follow=4)
SLOWLY = replace(FOLLOWING, follow=3)
FRESH = replace(NOVEL, freshness="reencoded")
TITLES = {
    BASE: "queue, trained on the stream (MoCo)",
    drawn("reservoir"): "reservoir",
    drawn("minred"): "MinRed",
    drawn("vmf0.1"): "DUEL on embeddings",
    drawn("vmf0.1", "weighted"): "DUEL on embeddings and thumbnails",
    DEFAULT: "DUEL on thumbnails",
    EPOCHS: "DUEL on thumbnails, drawn by epochs",
    NOVEL: "as shipped: besides, copies turned away",
    UNIFORM: "copies turned away, drawn uniformly",
}
"""The arms of the tables, and what a reader calls them."""

BEHIND_THE_DOOR = (
    *(("vmf0.1", "weighted-9-1"), ("vmf0.1", "weighted"), ("vmf0.1", "weighted-99-1")),
    *(("queue", "thumbnail"), ("vmf0.02", "weighted-99-1"), ("minred", "weighted-99-1")),
)
"""Policies and descriptors where near-copies are turned away by thumbnails, as in NOVEL."""

RIVALS = (
    *(drawn(*which, draw="epochs", novelty=0.9) for which in BEHIND_THE_DOOR),
    drawn("queue"),
    drawn("minred", "thumbnail"),
    drawn("minred", "thumbnail", draw="epochs"),
    drawn("reservoir", draw="epochs"),
    drawn("vmf0.1", "weighted", draw="epochs"),
    drawn("vmf0.1", draw="epochs"),
    drawn("vmf0.1", "frozen", draw="epochs"),
    drawn("random"),
    Arm("oracle", "memory", "written"),
    *(drawn("image-oracle", draw=order) for order in ("epochs", "uniform")),
    Arm("linear", "stream", "stale"),
    *(drawn(policy) for policy in ("linear", "quadratic", "gaussian")),
)


def behind(policy: str, descriptor: str = "thumbnail") -> Arm:
    """Behind the test that the shipped configurations use, and drawn as they draw."""
    return drawn(policy, descriptor, draw="epochs", novelty="auto")


SAME_DOOR = (
    behind("reservoir"),
    behind("redundant0.01"),
    behind("minred", "embedding"),
    behind("vmf0.1"),
    behind("redundant0.03"),
)
"""These arms differ only in what the memory evicts."""

HARDEST = ("shuffled", "x27-iid", "parked", "shift", "crawl")
"""Streams that differ in what they ask of a memory."""

USERS = ("parked", "crawl", "stalls-x27", "shuffled", "video", "shift", "stalls", "x27-iid")
"""Streams as users make them, and the two that others compare on."""


def plan() -> list[Run]:
    """Every run once, the most telling first: a study that is ended early still compares."""
    return list(dict.fromkeys(_by_worth()))


def _by_worth() -> Iterator[Run]:
    def runs(arms: Iterable[Arm], seed: int, streams: Iterable[str] = USERS) -> Iterator[Run]:
        return (Run(stream, arm, seed) for arm in arms for stream in streams)

    def against_the_queue(seed: int) -> Iterator[Run]:
        return (run for stream in USERS for run in runs((NOVEL, BASE), seed, (stream,)))

    yield from against_the_queue(0)
    for seed in range(5):
        yield from (run for stream in HARDEST for run in runs(SAME_DOOR, seed, (stream,)))
    yield from runs((FOLLOWING, SLOWLY), 0, ("parked",))
    yield from runs((FRESH,), 0, ("shuffled",))
    for seed in SEEDS[1:]:
        yield from runs((NOVEL,), seed, ("parked",))
    for seed in SEEDS[1:]:
        yield from against_the_queue(seed)
    yield from runs((drawn("reservoir"), drawn("minred")), 0)
    yield from runs((EPOCHS, DEFAULT), 0)
    for seed in SEEDS[1:]:
        yield from runs(TITLES, seed)
    yield from runs(TITLES, 0)
    for seed in SEEDS:
        yield from runs(RIVALS, seed)
    for seed in SEEDS:
        yield from runs((*TITLES, *RIVALS), seed, STREAMS)
