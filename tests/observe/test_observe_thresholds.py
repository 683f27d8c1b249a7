"""Each threshold of a condition from both sides: the condition is absent below, present above."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from condition_world import World, quiet, received, sent
from observe_records import step

from stream_ssl.batch import Offset, Origin
from stream_ssl.learning.checkpoint import CheckpointRecord
from stream_ssl.learning.divergence import Divergence
from stream_ssl.learning.records import Idle
from stream_ssl.observe import families as exported

Fault = Callable[[World], None]


def idle(world: World, **fields: Any) -> Callable[[], None]:
    return lambda: world.receiver.consume(quiet(**fields))


def stepped(world: World, producer: str = "yard", count: int = 4, **fields: Any) -> Any:
    origins = [Origin(producer, "lens", str(number), 0.0) for number in range(count)]
    usual = {"keys_BD": torch.eye(3)[[0] * count], "origins_B": origins}
    return lambda: world.learner.consume(step(**{**usual, **fields}))


def at_once(world: World, seconds: float) -> None:
    """Let time pass without a look."""
    world.now += seconds
    world.wall += seconds


# -- faults with a number on one side or the other of a threshold


def lag(seconds: float) -> Fault:
    return lambda world: world.pass_(10, stepped(world, lag_seconds=seconds))


def growing(minutes: int, first: float = 100.0, fall_at: int = -1) -> Fault:
    """Lag that rises by a second each minute, with one fall."""

    def work(world: World) -> None:
        for minute in range(minutes):
            at_once(world, 50)
            behind = first + minute - (20 if minute == fall_at else 0)
            world.pass_(10, stepped(world, lag_seconds=behind))

    return work


def bad_samples(bad: int, good: int, producer: str = "yard") -> Fault:
    def work(world: World) -> None:
        world.learner.observe_journal(0, 0, 0, {("damaged", "yard"): bad}, {producer: good})
        world.pass_(10)

    return work


def dropped(away: int, kept: int, seconds: float = 110) -> Fault:
    """Near-duplicates and other samples at each look."""
    lost = [Origin("yard", "lens", str(number), 0.0) for number in range(away)]
    return lambda world: world.pass_(seconds, stepped(world, count=kept, dropped_origins=lost))


def in_a_row(count: int) -> Fault:
    def work(world: World) -> None:
        state = Divergence()
        for _ in range(count):
            state.consume(step(skipped="loss"))
        world.learner.observe_divergence(state)
        world.pass_(10)

    return work


def reloaded(times: int) -> Fault:
    def work(world: World) -> None:
        state = Divergence()
        state.reloads = times
        world.learner.observe_divergence(state)
        world.pass_(10)

    return work


def skipped(count: int) -> Fault:
    def work(world: World) -> None:
        for _ in range(count):
            stepped(world, skipped="gradient")()
        world.pass_(10)

    return work


def ranks(seconds: float, keys: float, peak: float = 11.0, images: float = 30.0) -> Fault:
    def work(world: World) -> None:
        put = world.learner._families.set
        put("recent_effective_rank", keys)
        put("effective_rank_peak", peak)
        put("recent_image_rank", images)
        put("image_rank_peak", 31.0)
        world.pass_(10)
        world.pass_(seconds)

    return work


def flat(
    seconds: float = 110,
    rank: float = 2.4,
    images: float = 23.0,
    norm: float = 0.01,
    steps: int = 100,
    change: float = 0.003,
) -> Fault:
    """A rank that was never higher, and a small gradient or large updates."""

    def work(world: World) -> None:
        ranks(0, rank, rank, images)(world)
        world.learner._families.add("steps_total", steps)
        record = {"grad_norm": norm, "relative_change": change, "skipped": None}
        world.pass_(seconds, stepped(world, **record))

    return work


def alike(seconds: float = 80, images: float = 1.0, copies: float = 1.0) -> Fault:
    def work(world: World) -> None:
        ranks(0, 2.0, 2.0, images)(world)
        world.learner.observe_collisions(None, copies)
        world.pass_(seconds, stepped(world))

    return work


def unsaved(seconds: float) -> Fault:
    def work(world: World) -> None:
        at_once(world, seconds)
        world.pass_(10, stepped(world))

    return work


def waiting(seconds: float, diverged: bool = False) -> Fault:
    def work(world: World) -> None:
        if diverged:
            in_a_row(20)(world)
        world.learner.observe_journal(9, 0, 0, {}, {})
        world.pass_(10)
        world.pass_(seconds, lambda: world.learner.consume(Idle(30.0)))

    return work


def no_producer(seconds: float) -> Fault:
    def work(world: World) -> None:
        world.pass_(10, idle(world, producers=0))
        world.pass_(seconds, idle(world, producers=0))

    return work


def short_visits(world: World) -> None:
    """Producers that connect, send and leave between two looks, once a minute."""
    for _ in range(4):
        world.pass_(60, idle(world, producers=0))
        world.pass_(1, sent(world, producers=0))


def no_credit(seconds: float) -> Fault:
    def work(world: World) -> None:
        world.pass_(10, idle(world, credit=0))
        world.pass_(seconds, idle(world, credit=0))

    return work


def short_turns(world: World) -> None:
    """Credit that each producer uses up before the next look, as behind a slow learner."""
    world.pass_(200, sent(world, credit=0))


def gate_alone(world: World) -> Callable[[], None]:
    return sent(world, samples=10, producer_samples={"gate": 10})


def silent(seconds: float) -> Fault:
    """The yard sends every 10 s, and then stops."""
    return lambda world: world.pass_(seconds, gate_alone(world))


def often_and_silent(seconds: float) -> Fault:
    """The yard sends every second, and then stops."""

    def work(world: World) -> None:
        for _ in range(80):
            at_once(world, 1)
            sent(world)()
            world.watch.look()
        world.pass_(seconds, gate_alone(world))

    return work


def once_and_silent(seconds: float) -> Fault:
    def work(world: World) -> None:
        world.pass_(10, sent(world, producer_samples={"yard": 10, "gate": 10, "new": 1}))
        world.pass_(seconds, sent(world))

    return work


def silent_after(before: Fault, seconds: float) -> Fault:
    """A fault stops the producers for an hour; then the yard sends, and then stops."""

    def work(world: World) -> None:
        before(world)
        at_once(world, 3600)
        before(world)
        world.pass_(100, sent(world))
        world.pass_(seconds, gate_alone(world))

    return work


def jumped(seconds: float, ago: float = 0.0) -> Fault:
    def work(world: World) -> None:
        world.wall += seconds
        world.pass_(10, sent(world))
        at_once(world, ago)
        world.pass_(10, sent(world))
        world.pass_(70, sent(world))

    return work


def ahead(seconds: float) -> Fault:
    captured = {"yard": 50.0 + seconds}
    return lambda world: world.pass_(10, sent(world, producer_captured=captured))


def refused(duration: float, reason: str = "handshake", every: int = 10) -> Fault:
    def work(world: World) -> None:
        for _ in range(round(duration / every)):
            world.receiver.consume(received(refused={reason: 1}))
            world.pass_(every, sent(world))

    return work


def scanned(pause: float) -> Fault:
    """Two bursts of connections that are no producers, and the time before each."""

    def work(world: World) -> None:
        for _ in range(2):
            world.pass_(pause, sent(world))
            world.pass_(60, sent(world, refused={"handshake": 5}))

    return work


SIDES: dict[str, tuple[str, Fault, Fault, str]] = {
    "10 min of lag": ("lag", lag(590), lag(610), ""),
    "10 min in which lag grows": ("lag", growing(9), growing(12), ""),
    "lag that grows and falls": ("lag", growing(12, fall_at=6), growing(12), ""),
    "lag that grows below a minute": ("lag", growing(12, first=20), growing(12, first=70), ""),
    "1 % bad samples": ("bad-samples", bad_samples(9, 500), bad_samples(10, 500), "yard"),
    "3 bad samples": ("bad-samples", bad_samples(2, 4), bad_samples(3, 4), "yard"),
    "bad samples of another": (
        "bad-samples", bad_samples(4, 500), bad_samples(4, 500, "gate"), "yard",
    ),
    "99 % dropped": ("everything-dropped", dropped(100, 2), dropped(300, 2), "yard"),
    "20 dropped": ("everything-dropped", dropped(1, 0), dropped(4, 0), "yard"),
    "90 s of dropping": ("everything-dropped", dropped(300, 0, 40), dropped(300, 0, 110), "yard"),
    "20 skipped in a row": ("divergence", in_a_row(19), in_a_row(20), ""),
    "a reload": ("divergence", reloaded(0), reloaded(1), ""),
    "10 skipped in an hour": ("updates-skipped", skipped(10), skipped(11), ""),
    "a fifth of the rank": ("collapse", ranks(50, keys=3.5), ranks(50, keys=2.5), ""),
    "30 s of a low rank": ("collapse", ranks(20, keys=2.5), ranks(50, keys=2.5), ""),
    "images that vary less": (
        "collapse", ranks(50, 2.5, images=20.0), ranks(50, 2.5, images=25.0), "",
    ),
    "a rank of 1.5": ("collapse", ranks(260, 1.6, 2.0), ranks(260, 1.4, 2.0), ""),
    "4 min of a rank below 1.5": ("collapse", ranks(200, 1.4, 2.0), ranks(260, 1.4, 2.0), ""),
    "a seventh of the images' rank": ("not-learning", flat(rank=4.6), flat(rank=4.1), ""),
    "the figures of simsiam": (
        "not-learning", flat(rank=3.9, images=27.4, norm=0.8), flat(), "",
    ),
    "a gradient of 0.05": ("not-learning", flat(norm=0.06), flat(norm=0.04), ""),
    "a temperature of 1": ("not-learning", flat(rank=2.3, images=27.7, norm=0.2), flat(), ""),
    "a change of the weights by 0.8 %": (
        "not-learning", flat(norm=0.14, change=0.007), flat(norm=0.14, change=0.009), "",
    ),
    "the figures of a learning rate of 0.01": (
        "not-learning", flat(rank=5.3, images=28.1, norm=0.6, change=0.011),
        flat(rank=2.9, images=28.1, norm=0.14, change=0.014), "",
    ),
    "another encoder at each update": (
        "not-learning", flat(rank=11.3, images=27.1, norm=0.004, change=0.04),
        flat(rank=11.3, images=27.1, norm=0.004, change=0.06), "",
    ),
    "10 updates": ("not-learning", flat(seconds=80, steps=0), flat(seconds=80, steps=10), ""),
    "50 updates with large changes": (
        "not-learning", flat(seconds=60, norm=1.2, change=0.012, steps=20),
        flat(seconds=60, norm=1.2, change=0.012, steps=50), "",
    ),
    "30 s of not learning": ("not-learning", flat(seconds=40), flat(seconds=50), ""),
    "a fixed camera": ("not-learning", flat(rank=1.47, images=1.17), flat(rank=1.47), ""),
    "the rank of one picture": ("one-picture", alike(images=1.16), alike(images=1.01), ""),
    "99 % near-duplicates": ("one-picture", alike(copies=0.98), alike(copies=0.99), ""),
    "60 s of one picture": ("one-picture", alike(seconds=50), alike(seconds=80), ""),
    "an hour without a checkpoint": ("checkpoint-old", unsaved(3400), unsaved(3700), ""),
    "90 s without training": ("learner-stuck", waiting(70), waiting(110), ""),
    "90 s of divergence": ("learner-stuck", waiting(110, diverged=True), waiting(110), ""),
    "90 s without producers": ("no-producers", no_producer(80), no_producer(110), ""),
    "visits of a second each": ("no-producers", short_visits, no_producer(110), ""),
    "60 s without credit": ("no-credit", no_credit(50), no_credit(80), ""),
    "credit in short turns": ("no-credit", short_turns, no_credit(80), ""),
    "20 gaps": ("producer-silent", silent(190), silent(220), "yard"),
    "a minute of silence": (
        "producer-silent", often_and_silent(50), often_and_silent(80), "yard",
    ),
    "a producer without a usual gap": (
        "producer-silent", once_and_silent(90), once_and_silent(120), "new",
    ),
    "silence after an hour without credit": (
        "producer-silent", silent_after(no_credit(10), 150), silent_after(no_credit(10), 250),
        "yard",
    ),
    "silence after an hour of silence": (
        "producer-silent", silent_after(silent(10), 150), silent_after(silent(10), 700), "yard",
    ),
    "2 min of refusals": ("refusals", refused(100), refused(150), ""),
    "6 refusals": ("refusals", refused(150, every=50), refused(150, every=20), ""),
    "a port scanner": ("refusals", scanned(900), scanned(130), ""),
    "producers that a restart sends back": (
        "refusals", refused(150, "hello-required"), refused(150, "malformed"), "",
    ),
    "a clock that jumps ahead": ("clock", jumped(50), jumped(70), ""),
    "a clock that jumps back": ("clock", jumped(-50), jumped(-70), ""),
    "10 min after a jump": ("clock", jumped(3600, ago=600), jumped(3600, ago=400), ""),
    "a producer's clock ahead": ("clock", ahead(50), ahead(70), "yard"),
    "a producer's clock behind": ("clock", ahead(-3600), ahead(3600), "yard"),
}  # fmt: skip
"""The condition, a fault below its threshold, a fault above it, and the producer."""
OF_RECEIVER = {"no-producers", "no-credit", "producer-silent", "clock", "refusals"}


def begun(role: str, **options: Any) -> World:
    """Return a process that has worked well for 100 s."""
    world = World(role, **options)
    if role == "receiver":
        world.receiver.started()
        world.pass_(100, sent(world))
    else:
        world.learner.started()
        world.learner.observe_journal(0, 0, 0, {("damaged", "yard"): 0}, {})
        world.learner.observe_divergence(Divergence())
        world.pass_(30, stepped(world, skipped="pace"))
    assert world.present == {}
    return world


@pytest.mark.parametrize("case", SIDES, ids=lambda case: case.replace(" ", "-"))
def test_a_condition_begins_at_its_threshold(case: str) -> None:
    name, too_little, enough, producer = SIDES[case]
    role = "receiver" if name in OF_RECEIVER else "learner"
    world = begun(role)
    too_little(world)
    assert (name, producer) not in world.present
    world = begun(role)
    enough(world)
    assert (name, producer) in world.present


def test_the_condition_names_a_run_without_a_checkpoint_after_three_intervals() -> None:
    world = begun("learner", checkpoint_seconds=600.0)
    unsaved(1700)(world)
    assert world.present == {}
    unsaved(150)(world)
    assert world.present["checkpoint-old", ""].endswith("yet, and the run has no checkpoint")
    world = begun("learner", checkpoint_seconds=600.0)
    world.learner.of_checkpoints.resumed(1, world.wall)
    world.pass_(10, stepped(world))
    unsaved(3400)(world)
    assert world.present == {}, "a checkpoint exists, so an hour is allowed"


def test_rare_checkpoints_are_old_after_three_times_their_interval() -> None:
    world = begun("learner", checkpoint_seconds=3600.0)
    world.learner.of_checkpoints.resumed(1, world.wall)
    world.pass_(10, stepped(world))
    unsaved(10_000)(world)
    assert world.present == {}
    unsaved(1000)(world)
    assert set(world.present) == {("checkpoint-old", "")}


@pytest.mark.parametrize(
    ("free", "checkpoint", "low"),
    [(1.1e9, 0, False), (0.9e9, 0, True), (7e9, 3.4e9, False), (7e9, 3.6e9, True)],
)
def test_a_disk_is_low_at_its_threshold(
    free: float, checkpoint: float, low: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exported, "free", lambda _: free)
    world = World("learner", {"checkpoints": tmp_path})
    saved = (7, 0.0, 0.4, 0.02, int(checkpoint), Path("step-7"), Offset(1, 0), Offset(1, 0))
    world.learner.consume(CheckpointRecord(*saved))
    world.pass_(10)
    assert (("disk-low", "") in world.present) == low
