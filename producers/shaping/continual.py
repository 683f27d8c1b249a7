"""A wrapper that orders a labelled source as a continual stream, in tasks of classes."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from stream_ssl.producers.shaping.base import Pairs, Shaping
from stream_ssl.producers.sources.base import Source, SourceError, checked, wrong_position
from stream_ssl.producers.sources.finite import ENDLESS
from stream_ssl.producers.sources.ranges import check_ranges
from stream_ssl.wire.sample import Position, Sample

Kind = Literal["keep", "incremental", "blurred", "blocks", "concurrent"]
Profile = Literal["one", "tail"]
DRAWS = 1024  # random numbers drawn at once


@dataclass(frozen=True, slots=True)
class Widths:
    """The sizes of the orders of `Continual`.

    Args:
        blur: samples of a task that "blurred" mixes with each neighbour.
        block: samples in a block of "blocks".
        concurrent: number of tasks at once in "concurrent".
    """

    blur: int = 500
    block: int = 500
    concurrent: int = 2


class Continual(Shaping):
    """A source that orders another source by tasks, which are groups of classes.

    - "incremental": class-incremental. Each task runs to its end before the next begins.
    - "blurred": incremental with blurred boundaries. Over the last `blur` samples of a task and
      the first `blur` samples of the next, the probability of the next rises linearly from 0 to 1.
    - "blocks": sequential blocks of `block` samples of one task. Each round visits the tasks in a
      new order. A task's last block may be shorter.
    - "concurrent": `concurrent` tasks at once. Each sample comes from one of them, drawn
      uniformly. When a task ends, the next task takes its place.
    - "keep": the order of the source; useful together with an imbalance.

    Each task gives its samples once, in the order of the source. Memory holds at most `blur`
    samples of each of two tasks. The source is read anew for each task. To resume, it is read again
    up to the position. So the source must end and give the same samples again, as files do and a
    camera does not.

    Args:
        source: the source to order. Every sample needs a label.
        kind: the order of the tasks. "incremental": one after the other. "blurred": the same with
            mixed boundaries. "blocks": blocks of the tasks in turn. "concurrent": several tasks at
            once. "keep": the order of the source.
        classes: number of classes of the source, labelled 0, 1, ...
        tasks: number of tasks. Tasks have equally many classes, and the first tasks get the
            remainder. null: each class is a task.
        shuffle_classes: draw the classes of each task. False: in the order of their labels.
        per_task: maximum samples of a task, for all kinds but "keep"; null: all samples of the
            source.
        imbalance: frequency of the most frequent class divided by that of the rarest class; 1 or
            more. Samples of the other classes are dropped.
        profile: "one" makes the first class `imbalance` times as frequent as each other class
            (DUEL). "tail" divides the frequency by the same factor from each class to the next
            (long-tailed, Cui et al., 2019). Classes are in the order of the tasks.
        seed: the key of all randomness.
        widths: the arguments of `Widths`: `blur`, `block` and `concurrent`.

    Raises:
        ValueError: an argument is out of range. While running: a sample has no label, or its label
            is not below `classes`.
    """

    def __init__(
        self,
        source: Source,
        kind: Kind = "keep",
        classes: int = 10,
        tasks: int | None = None,
        shuffle_classes: bool = False,
        per_task: int | None = None,
        imbalance: float = 1.0,
        profile: Profile = "one",
        seed: int = 0,
        **widths: Any,
    ) -> None:
        self._widths = width = Widths(**widths)
        tasks = classes if tasks is None else tasks
        check_ranges(
            ("classes", classes, 1, 2**20),
            ("tasks", tasks, 1, classes),
            ("per_task", per_task, 1, ENDLESS),
            ("blur", width.blur, 1, 2**20),
            ("block", width.block, 1, 2**31),
            ("concurrent", width.concurrent, 1, tasks if kind == "concurrent" else 2**31),
            ("imbalance", imbalance, 1.0, 1e9),
            ("seed", seed, 0, ENDLESS),
        )
        if kind not in ORDERS:
            raise ValueError(f"kind {kind!r}: choose one of {', '.join(ORDERS)}")
        if kind == "keep" and per_task is not None:
            raise ValueError(
                f'per_task {per_task}: kind "keep" sends the samples of all tasks in the order of '
                "the source, so no task ends; choose another kind, or set per_task to null"
            )
        if profile not in ("one", "tail"):
            raise ValueError(f'profile {profile!r}: choose "one" or "tail"')
        endless = any(getattr(source, limit, 1) is None for limit in ("epochs", "count"))
        if kind != "keep" and per_task is None and endless:
            raise ValueError(
                f"source {source.name!r} never ends, so its first task would not: set its epochs "
                "or count, or per_task"
            )
        self.kind = kind
        order_C = np.arange(classes)
        if shuffle_classes:
            order_C = np.random.default_rng([seed, 0]).permutation(classes)
        self.tasks = [part.tolist() for part in np.array_split(order_C, tasks)]
        self._task_C = np.empty(classes, np.int64)
        for task, part in enumerate(self.tasks):
            self._task_C[part] = task
        self._kept_C = kept_shares(order_C, imbalance, profile)
        self._per_task, self._seed = per_task, seed
        super().__init__(
            source,
            kind=kind,
            classes=classes,
            tasks=tasks,
            shuffle_classes=shuffle_classes,
            per_task=per_task,
            width={
                "blurred": width.blur,
                "blocks": width.block,
                "concurrent": width.concurrent,
            }.get(kind),
            imbalance=f"{imbalance} {profile}",
            seed=seed,
        )

    def samples(self, position: Position = None) -> Pairs:
        """Yield each sample with the position after it; see `Source`."""
        sent = 0
        if position is not None:
            sent = checked(position, self._facts, self.name)
            if type(sent) is not int or not 0 <= sent <= ENDLESS:
                raise wrong_position(self.name, f"{sent!r:.80} is no number of samples")
            # The source checks here whether the position is its own.
            self.source.samples(position.get("inner"))
        return itertools.islice(self._marked(), sent, None)

    def _marked(self) -> Pairs:
        for number, (sample, inner) in enumerate(ORDERS[self.kind](self), start=1):
            yield sample, {"at": number, "inner": inner, "of": self._facts}

    def _task(self, task: int | None) -> Pairs:
        """Return the samples of one task, or of all tasks for None, thinned by class."""
        thinning = uniforms(self._seed, 1, -1 if task is None else task)
        given = (
            item
            for item in self.source.samples()
            if task is None or self._task_C[self._label(item[0])] == task
        )
        kept = (item for item in given if next(thinning) < self._kept_C[self._label(item[0])])
        return itertools.islice(kept, None if task is None else self._per_task)

    def _label(self, sample: Sample) -> int:
        if sample.label is None or sample.label >= len(self._task_C):
            held = "carries no label" if sample.label is None else f"is of class {sample.label}"
            raise SourceError(
                f"source {self.name!r}: sample {sample.id!r} {held}, and tasks are made of the "
                f"classes 0 to {len(self._task_C) - 1}; give a labelled source, and set classes"
            )
        return sample.label

    def _lanes(self) -> list[Pairs]:
        return [self._task(task) for task in range(len(self.tasks))]

    def _keep(self) -> Pairs:
        return self._task(None)

    def _incremental(self) -> Pairs:
        return itertools.chain.from_iterable(self._lanes())

    def _blurred(self) -> Pairs:
        chance = uniforms(self._seed, 2)
        ending: deque[tuple[Sample, Position]] = deque()
        for lane in self._lanes():
            if ending:
                beginning = deque(itertools.islice(lane, self._widths.blur))
                yield from merge(ending, beginning, chance)
            ending = deque()
            for item in lane:
                ending.append(item)
                if len(ending) > self._widths.blur:
                    yield ending.popleft()
        yield from ending

    def _blocks(self) -> Pairs:
        lanes = dict(enumerate(self._lanes()))
        for number in itertools.count():
            live = np.array(sorted(lanes), dtype=np.int64)
            for task in np.random.default_rng([self._seed, 3, number]).permutation(live).tolist():
                sent = 0
                for item in itertools.islice(lanes[task], self._widths.block):
                    sent += 1
                    yield item
                if sent < self._widths.block:
                    del lanes[task]
            if not lanes:
                return

    def _concurrently(self) -> Pairs:
        waiting = iter(self._lanes())
        running = list(itertools.islice(waiting, self._widths.concurrent))
        chance = uniforms(self._seed, 4)
        while running:
            chosen = int(next(chance) * len(running))
            item = next(running[chosen], None)
            if item is not None:
                yield item
            elif (lane := next(waiting, None)) is not None:
                running[chosen] = lane
            else:
                del running[chosen]


ORDERS: dict[str, Callable[[Continual], Pairs]] = {
    "keep": Continual._keep,
    "incremental": Continual._incremental,
    "blurred": Continual._blurred,
    "blocks": Continual._blocks,
    "concurrent": Continual._concurrently,
}


def kept_shares(
    order_C: NDArray[np.int64], imbalance: float, profile: Profile
) -> NDArray[np.float64]:
    """Return the share of samples to keep for each label. The first class of the order has 1.

    >>> kept_shares(np.array([1, 0, 2]), 4.0, "tail").tolist()
    [0.5, 1.0, 0.25]
    """
    rank_C = np.empty(len(order_C), np.float64)
    rank_C[order_C] = np.arange(len(order_C))
    if profile == "one":
        return np.where(rank_C == 0, 1.0, 1.0 / imbalance)
    return imbalance ** (-rank_C / max(len(order_C) - 1, 1))


def merge(
    ending: deque[tuple[Sample, Position]],
    beginning: deque[tuple[Sample, Position]],
    chance: Iterator[float],
) -> Pairs:
    """Yield all items of both queues, each in order.

    The probability of an item from `beginning` rises linearly from 0 to 1.
    """
    total = len(ending) + len(beginning)
    for place in range(total):
        second = next(chance) < (place + 0.5) / total
        chosen = beginning if (second and beginning) or not ending else ending
        yield chosen.popleft()


def uniforms(*key: int) -> Iterator[float]:
    """Yield random numbers from [0, 1) without end. They are a function of the key."""
    rng = np.random.default_rng([number + 1 for number in key])
    while True:
        yield from rng.random(DRAWS).tolist()
