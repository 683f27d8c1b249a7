"""The arms that the study compares, and the order of the runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from benchmarks.experiments.network import ConvNet
from benchmarks.experiments.study.oracles import ClassBalanced, ImageBalanced
from benchmarks.experiments.study.streams import STREAMS
from stream_ssl.memory.descriptors import (
    Descriptor,
    Embedding,
    Features,
    Frozen,
    Thumbnail,
    Weighted,
)
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
    "vmf0.5": _duplicated(VonMisesFisher(0.5)),
    "vmf0.02": _duplicated(VonMisesFisher(0.02)),
    "quadratic": _duplicated(Quadratic()),
    "gaussian": _duplicated(Gaussian(1.0)),
    "random": Random,
    "redundant0.01": Redundant,
    "redundant0.03": lambda: Redundant(VonMisesFisher(0.03)),
    "oracle": ClassBalanced,
    "image-oracle": ImageBalanced,
}
"""Policies by name.

No real run could use the last two: `oracle` balances by the labels, and `image-oracle` by the
original image of a frame. They show the most that balance and a perfect search for near-duplicates
can give.
"""

DESCRIPTORS: Mapping[str, Callable[[], Descriptor]] = {
    "embedding": Embedding,
    "features": lambda: Features(ConvNet.dim),
    "mixed": lambda: Weighted([Embedding(), Features(ConvNet.dim)]),
    "thumbnail": lambda: Thumbnail(side=8),
    "weighted": lambda: Weighted([Embedding(), Thumbnail(side=8)]),
    "weighted-9-1": lambda: Weighted([Embedding(), Thumbnail(side=8)], weights=[9, 1]),
    "weighted-99-1": lambda: Weighted([Embedding(), Thumbnail(side=8)], weights=[99, 1]),
    "frozen": lambda: Frozen(ConvNet()),
}
"""Descriptors by name, on which duplicates are counted. `frozen` uses an untrained network."""

SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class StudyArm:
    """A policy, the source of the training batches, and how embeddings are kept fresh.

    Args:
        policy: a name of POLICIES.
        anchors: "stream": train on samples as they arrive; "memory": train on draws from the
            memory.
        freshness: "stale": embeddings are never updated; "written": the new keys of drawn samples
            are written to their slots; "reencoded": in addition, each step encodes the stalest
            slots again, as many as a batch has.
        draw: how training batches are drawn from the memory.
        plain: whether newcomers and slots that are encoded again are encoded without augmentation.
        descriptor: a name of DESCRIPTORS.
        novelty: "auto", or the cosine of descriptors from which a frame is dropped before it is
            encoded; None: no frame is dropped.
        follow: number of updates per batch of frames that are not dropped; None: one update per
            batch of all frames.
        method: a name of `baselines.METHODS`.
    """

    policy: str
    anchors: Anchors
    freshness: Freshness
    draw: DrawOrder = "uniform"
    plain: bool = False
    descriptor: str = "embedding"
    novelty: float | Literal["auto"] | None = None
    follow: int | None = None
    method: str = "moco"

    @property
    def name(self) -> str:
        parts = [self.policy, self.anchors, self.freshness]
        options = (
            (self.draw, self.draw != "uniform"),
            ("plain", self.plain),
            (self.descriptor, self.descriptor != "embedding"),
            (f"new{self.novelty}", self.novelty is not None),
            (f"follow{self.follow}", self.follow is not None),
            (self.method, self.method != "moco"),
        )
        return "/".join([*parts, *(name for name, is_on in options if is_on)])

    def eviction(self) -> Policy:
        """Return a new policy."""
        return POLICIES[self.policy]()

    def describe(self) -> Descriptor:
        """Return a new descriptor."""
        return DESCRIPTORS[self.descriptor]()


@dataclass(frozen=True)
class StudyRun:
    """An arm on a stream with a seed, which draws the weights, the stream and the views."""

    stream: str
    arm: StudyArm
    seed: int

    @property
    def name(self) -> str:
        return f"{self.stream} {self.arm.name} seed{self.seed}"

    @property
    def cost(self) -> float:
        return 1.0

    def facts(self) -> dict[str, Any]:
        return {}


BASE = StudyArm("queue", "stream", "stale")


def drawn(policy: str, descriptor: str = "embedding", **options: Any) -> StudyArm:
    """Return an arm that trains on draws from the memory and writes fresh keys back."""
    return StudyArm(policy, "memory", "written", plain=True, descriptor=descriptor, **options)


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
    NOVEL: "DUEL on thumbnails, near-duplicates dropped",
    UNIFORM: "the same, drawn uniformly",
}
"""The arms of the tables, and their titles."""

BEHIND_THE_DOOR = (
    *(("vmf0.1", "weighted-9-1"), ("vmf0.1", "weighted"), ("vmf0.1", "weighted-99-1")),
    *(("queue", "thumbnail"), ("vmf0.02", "weighted-99-1"), ("minred", "weighted-99-1")),
)
"""Policies and descriptors with near-duplicates dropped by thumbnails, as in NOVEL."""

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
    StudyArm("oracle", "memory", "written"),
    *(drawn("image-oracle", draw=order) for order in ("epochs", "uniform")),
    StudyArm("linear", "stream", "stale"),
    *(drawn(policy) for policy in ("linear", "quadratic", "gaussian")),
)


def behind(policy: str, descriptor: str = "thumbnail") -> StudyArm:
    """Return an arm with the near-duplicate test and draw order of the shipped configurations."""
    return drawn(policy, descriptor, draw="epochs", novelty="auto")


SAME_DOOR = (
    behind("reservoir"),
    behind("redundant0.01"),
    behind("minred", "embedding"),
    behind("vmf0.1", "embedding"),
    behind("vmf0.1", "features"),
    behind("vmf0.5", "features"),
    behind("vmf0.1", "mixed"),
    behind("vmf0.1"),
    behind("redundant0.03"),
)
"""Arms that differ only in what the memory evicts."""

CASSLE = replace(BASE, method="cassle")
CLA = StudyArm("reservoir", "stream", "reencoded", plain=True, method="cla")
CLA_WITH_DUEL = replace(CLA, policy="vmf0.1", descriptor="mixed")
OSIRIS = StudyArm("reservoir", "stream", "stale", method="osiris")
CMP = replace(BASE, method="cmp")
BASELINES = {
    CASSLE: "CaSSLe: a queue, and distillation from a frozen copy",
    CLA: "CLA-E: a reservoir, and alignment to a slow average",
    CLA_WITH_DUEL: "CLA-E with DUEL instead of the reservoir",
    OSIRIS: "Osiris-R: a reservoir, and three losses",
    CMP: "CMP: a queue, and 16 views of a sixteenth of the samples",
}
"""Arms with methods of continual self-supervised learning, and their titles.

They see the whole stream, as in their papers, but CMP trains on the first samples of each batch.
The memory of CLA encodes its stalest slots again, because they are negatives of its loss. Osiris
compares with no stored embedding.
"""

HARDEST = ("shuffled", "x27-iid", "parked", "shift", "crawl")
"""Streams that make different demands on a memory."""

USERS = ("parked", "crawl", "stalls-x27", "shuffled", "video", "shift", "stalls", "x27-iid")
"""Streams as users produce them, and the two streams that other papers compare on."""


def plan() -> list[StudyRun]:
    """Return every run once, the most informative first, so that a partial study also compares."""
    return list(dict.fromkeys(_by_worth()))


def _by_worth() -> Iterator[StudyRun]:
    def runs(
        arms: Iterable[StudyArm], seed: int, streams: Iterable[str] = USERS
    ) -> Iterator[StudyRun]:
        return (StudyRun(stream, arm, seed) for arm in arms for stream in streams)

    def against_the_queue(seed: int) -> Iterator[StudyRun]:
        return (run for stream in USERS for run in runs((NOVEL, BASE), seed, (stream,)))

    yield from against_the_queue(0)
    for seed in range(7):
        yield from (run for stream in HARDEST for run in runs((BASE, *SAME_DOOR), seed, (stream,)))
        yield from runs(BASELINES, seed, HARDEST)
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
