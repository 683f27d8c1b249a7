"""Each condition is present on real records, is shown everywhere, and ends."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from condition_world import World, idle, messages, received, sent
from observe_records import step
from table import table

from stream_ssl.app.commands import status
from stream_ssl.batch import Offset, Origin
from stream_ssl.daemon.endpoints import FILE
from stream_ssl.learning.checkpoint import CheckpointRecord
from stream_ssl.learning.divergence import Divergence
from stream_ssl.learning.records import Idle
from stream_ssl.observe import families as exported
from stream_ssl.observe.catalogue import LAST_END
from stream_ssl.observe.conditions import TABLE
from stream_ssl.observe.server import Server
from stream_ssl.observe.wording import plural

Fault = Callable[[World, Path], None]


def stepped(world: World, **fields: Any) -> Callable[[], None]:
    origins = [Origin("yard", "lens", str(number), 0.0) for number in range(4)]
    return lambda: world.learner.consume(step(**{"origins_B": origins, **fields}))


# -- each fault, as the records of a process that worked well for a minute


def no_producers(world: World, _: Path) -> None:
    world.pass_(120, idle(world, producers=0, credit=0))


def nothing_received(world: World, _: Path) -> None:
    world.pass_(210, idle(world))


def producer_silent(world: World, _: Path) -> None:
    world.pass_(210, sent(world, samples=10, producer_samples={"gate": 10}))


def no_credit(world: World, _: Path) -> None:
    world.health.set("credit", False, "no producer may send: journal full")
    world.pass_(80, idle(world, credit=0))


def journal_failing(world: World, _: Path) -> None:
    world.health.set("journal", False, "no space left")
    world.pass_(10, sent(world, journal_failures=1))


def journal_damaged(world: World, _: Path) -> None:
    world.pass_(10, sent(world, journal_damaged=1))


def missing_packets(world: World, _: Path) -> None:
    world.pass_(10, sent(world, missing=3))


def slow_disk(world: World, _: Path) -> None:
    world.pass_(60, sent(world, fsync_seconds=0.4))


def refusals(world: World, _: Path) -> None:
    world.pass_(30, sent(world, refused={"unauthorised": 1}))


def keys_at_a_plain_receiver(world: World, _: Path) -> None:
    world.pass_(30, sent(world, refused={"plain-receiver": 1}))


def another_version(world: World, _: Path) -> None:
    world.health.refused = {"version": "robot-3 at 10.0.0.7"}
    world.pass_(150, sent(world, refused={"version": 50}))


def allow_list(world: World, _: Path) -> None:
    world.pass_(10, sent(world, allow_list_broken=True))


def rejected_samples(world: World, _: Path) -> None:
    world.pass_(30, sent(world, producer_rejected={"yard": 4}))


def clock_jumped(world: World, _: Path) -> None:
    world.wall += 40 * 86_400
    world.pass_(10, sent(world))


DAYS = 86_400.0


def clock_of_the_receiver(world: World, _: Path) -> None:
    clock = {"yard": -40 * DAYS, "gate": -40 * DAYS + 3}
    captured = {name: 50.0 + behind for name, behind in clock.items()}
    world.pass_(10, sent(world, producer_clock=clock, producer_captured=captured))


def clock_that_is_told(world: World, _: Path) -> None:
    clock = {"yard": -3600.0, "gate": 0.1}
    world.pass_(10, sent(world, producer_clock=clock, producer_captured={"yard": 50.0 - 3600}))


def clock_ahead(world: World, _: Path) -> None:
    world.pass_(10, sent(world, producer_captured={"yard": 50.0 + 3600}))


def lag(world: World, _: Path) -> None:
    world.pass_(10, stepped(world, lag_seconds=2220.0))


def lag_grows(world: World, _: Path) -> None:
    begun = world.now
    world.pass_(720, lambda: world.learner.consume(step(lag_seconds=60 + (world.now - begun) / 4)))


def learner_stuck(world: World, _: Path) -> None:
    world.learner.observe_journal(9, 0, 0, {}, {})
    world.pass_(110, lambda: world.learner.consume(Idle(30.0)))


def diverging(world: World, state: Divergence) -> Callable[[], None]:
    def work() -> None:
        record = step(skipped="loss", loss=float("nan"))
        state.consume(record)
        world.learner.consume(record)
        world.learner.observe_divergence(state)

    return work


def divergence(world: World, _: Path) -> None:
    world.pass_(230, diverging(world, Divergence()))


def learner_halted(world: World, _: Path) -> None:
    state = Divergence()
    world.pass_(230, diverging(world, state))
    state.halted = True
    world.learner.observe_divergence(state)
    world.pass_(10)


def updates_skipped(world: World, _: Path) -> None:
    world.pass_(120, stepped(world, skipped="gradient"))


def collapse(world: World, _: Path) -> None:
    world.pass_(50, lambda: ranks(world, keys=1.05, images=30.0))


def not_learning(world: World, _: Path) -> None:
    """The figures of an encoder that a learning rate of 10 has ruined from the start."""
    world.learner._families.add("steps_total", 100)
    world.learner._families.set("effective_rank_peak", 2.4)

    def work() -> None:
        world.learner._families.set("recent_effective_rank", 2.4)
        stepped(world, loss=3.6, grad_norm=0.01)()

    world.pass_(110, work)


def changing_too_much(world: World, _: Path) -> None:
    """The figures of an encoder that a rate of 0.1 has ruined; its gradient is not small."""
    world.learner._families.add("steps_total", 50)

    def work() -> None:
        ranks(world, keys=2.5, images=28.0)
        world.learner._families.set("effective_rank_peak", 2.5)
        stepped(world, loss=5.1, grad_norm=0.14, relative_change=0.014)()

    world.pass_(60, work)


def one_picture(world: World, _: Path) -> None:
    """The learner trains on all frames of a hung camera, so the loss is 0."""
    ranks(world, keys=2.2, images=1.0)
    world.learner.observe_collisions(None, 1.0)
    world.pass_(80, stepped(world, loss=0.0, grad_norm=0.0))


def process_hung(world: World, _: Path) -> None:
    world.watch._hung = lambda: ["the receiver (pid 7) exists and has not answered for 61 s"]
    world.pass_(10, stepped(world))


def everything_dropped(world: World, _: Path) -> None:
    away = [Origin("yard", "lens", str(number), 0.0) for number in range(32)]
    nothing = {"batch": 0, "keys_BD": torch.empty(0, 3), "origins_B": []}
    world.pass_(
        110,
        stepped(world, **nothing, dropped_origins=away, skipped="novelty"),
    )


def bad_samples(world: World, _: Path) -> None:
    world.learner.observe_journal(0, 0, 0, {("damaged", "yard"): 9}, {})
    world.pass_(10, stepped(world))


def checkpoint_old(world: World, _: Path) -> None:
    world.pass_(3700, stepped(world))


def checkpoint_failing(world: World, _: Path) -> None:
    world.health.set("checkpoint", False, "no space left")
    world.pass_(10, stepped(world))


def checkpoint_damaged(world: World, folder: Path) -> None:
    (folder / "damaged-step-7").mkdir()
    world.pass_(10, stepped(world))


def copies_late(world: World, _: Path) -> None:
    world.learner.of_checkpoints.watch_copies(lambda: 2400.0)
    world.pass_(10, stepped(world))


def not_kept(world: World, _: Path) -> None:
    world.learner.observe_unkept("quarantine", {"rate": 5, "disk": 2})
    world.learner.observe_originals(0, {"budget": 3})
    world.pass_(10, stepped(world))


def collisions(world: World, _: Path) -> None:
    world.learner.observe_collisions(0.7, None)
    world.pass_(1820, stepped(world))


def near_duplicates(world: World, _: Path) -> None:
    world.learner.observe_collisions(None, 0.8)
    world.pass_(1820, stepped(world))


def drift(world: World, _: Path) -> None:
    world.learner.observe_drift(0.1, 0.4, {"image": 1})
    world.pass_(10, stepped(world))


def parked_journal(world: World, _: Path) -> None:
    world.learner.parked(1)
    world.pass_(20, stepped(world))


def slow_rank(world: World, _: Path) -> None:
    def work() -> None:
        for rank, share in enumerate((0.4, 0.4, 0.9)):
            world.learner._raise_to(
                "rank_busy_seconds_total", share * (world.now - 1000), rank=str(rank)
            )

    world.pass_(1000, work)


def starting(world: World, _: Path) -> None:
    world.learner._families.set("starting", 1.0)
    world.pass_(620)


def restarting(world: World, _: Path) -> None:
    world.learner._families.add("restarts_total")
    world.pass_(10, stepped(world))


def loop_stopped(world: World, _: Path) -> None:
    world.health.expect("learner", 60.0)
    world.pass_(80)


def ranks(world: World, keys: float, images: float) -> None:
    put = world.learner._families.set
    put("recent_effective_rank", keys)
    put("effective_rank_peak", 4.4)
    put("recent_image_rank", images)
    put("image_rank_peak", 30.0)


def disk_low(world: World, _: Path) -> None:
    world.pass_(10, stepped(world))


RECEIVER: dict[str, tuple[Fault, str, str]] = {
    "no-producers": (no_producers, "", "no producer has been connected for"),
    "nothing-received": (nothing_received, "", "none of 2 connected producers has sent for"),
    "producer-silent": (producer_silent, "yard", "min; its usual gap is 10 s"),
    "no-credit": (no_credit, "", "journal full"),
    "journal-failing": (journal_failing, "", "no space left"),
    "journal-damaged": (journal_damaged, "", "1 part of the journal was damaged"),
    "missing-packets": (missing_packets, "", "the journal lacks 3 acknowledged packets"),
    "slow-disk": (slow_disk, "", "of the commits take longer than 0.25 s"),
    "refusals": (refusals, "", "connections were refused within 2 min: 3 unauthorised"),
    "refusals in plain text": (
        keys_at_a_plain_receiver,
        "",
        "the producer uses keys, and this receiver uses plain text; restart the producer",
    ),
    "refusals of a version": (
        another_version,
        "",
        "another version of the protocol; upgrade the older side (last: robot-3 at 10.0.0.7)",
    ),
    "allow-list": (allow_list, "", "keys that were revoked since then are still admitted"),
    "rejected-samples": (rejected_samples, "yard", "of yard's samples were refused"),
    "clock": (clock_jumped, "", "this machine's clock jumped ahead by 40 days"),
    "clock of the receiver": (
        *(clock_of_the_receiver, ""),
        "this machine's clock is 40 days ahead of the clocks of all 2 producers",
    ),
    "clock that is told": (clock_that_is_told, "yard", "yard's clock is 60 min behind this"),
    "clock of a producer": (clock_ahead, "yard", "yard's clock is 60 min ahead"),
}
LEARNER: dict[str, tuple[Fault, str, str]] = {
    "lag": (lag, "", "the learner is 37 min behind the stream"),
    "lag that grows": (lag_grows, "", "this has grown for 10 min"),
    "learner-stuck": (learner_stuck, "", "the learner has trained on none for"),
    "divergence": (divergence, "", "updates in a row had no finite loss"),
    "updates-skipped": (updates_skipped, "", "updates within an hour were skipped"),
    "collapse": (collapse, "", "the embeddings have collapsed: their effective rank is 1.1"),
    "not-learning": (not_learning, "", "the encoder does not learn: the effective rank of the"),
    "not-learning by large updates": (
        changing_too_much,
        "",
        "an update changes the weights by 1.4 % of their norm",
    ),
    "one-picture": (one_picture, "", "one picture over and over: 100 % of the memory's slots"),
    "process-hung": (process_hung, "", "the receiver (pid 7) exists and has not answered"),
    "everything-dropped": (
        everything_dropped,
        "yard",
        "of yard's decoded samples within 2 min were dropped as near-duplicates; no update for",
    ),
    "bad-samples": (bad_samples, "yard", "of yard's samples within"),
    "checkpoint-old": (checkpoint_old, "", "min ago are in no checkpoint yet"),
    "checkpoint-failing": (checkpoint_failing, "", "no space left"),
    "checkpoint-damaged": (
        checkpoint_damaged,
        "",
        "1 checkpoint was damaged and renamed to damaged-*",
    ),
    "copies-late": (copies_late, "", "waits for 40 min to be copied"),
    "not-kept": (not_kept, "", "within an hour, 2 samples to quarantine/ could not be written"),
    "collisions": (collisions, "", "with probability 0.70"),
    "near-duplicates": (near_duplicates, "", "80 % of the memory's slots"),
    "drift": (drift, "", "the stream shows different things"),
    "parked-journal": (parked_journal, "", "no rank reads 1 of the run's journals"),
    "slow-rank": (slow_rank, "", "rank 2 needs longer"),
    "starting": (starting, "", "the learner has been starting for"),
    "restarting": (
        restarting,
        "",
        "the learner has died and was started again 1 min ago; 1 restart since",
    ),
    "loop-stopped": (loop_stopped, "", "the learner's main loop has made no round for"),
    "disk-low": (disk_low, "", "MB are left on the disk of"),
}
ELSEWHERE = {"learner-halted"}
"""Conditions with a test of their own below."""


def test_every_condition_is_covered_by_a_test() -> None:
    shown = {name.partition(" ")[0] for name in {**RECEIVER, **LEARNER}} | ELSEWHERE
    assert shown == {condition.name for condition in TABLE}


def going_well(world: World, role: str) -> None:
    """Let a process work well for a minute."""
    if role == "receiver":
        world.receiver.started()
        world.pass_(100, sent(world, fsync_seconds=0.01))
    else:
        world.learner.started()
        ranks(world, 4.2, 30.0)
        world.learner.observe_journal(0, 0, 0, {("damaged", "yard"): 0}, {})
        world.pass_(60, stepped(world))


CASES = [("receiver", name) for name in RECEIVER] + [("learner", name) for name in LEARNER]


@pytest.mark.parametrize(("role", "case"), CASES, ids=[case.replace(" ", "-") for _, case in CASES])
def test_a_condition_is_exported_logged_and_listed_with_a_remedy(
    role: Any,
    case: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    fault, producer, says = {**RECEIVER, **LEARNER}[case]
    name = case.partition(" ")[0]
    folders = {"journal" if role == "receiver" else "checkpoints": tmp_path}
    caplog.set_level(logging.INFO, "stream_ssl.health")
    free = [5e11]
    monkeypatch.setattr(exported.shutil, "disk_usage", lambda _: SimpleNamespace(free=free[0]))
    world = World(role, folders)
    going_well(world, role)
    assert world.present == {}
    assert world.gauge(name) == 0
    free[0] = {"disk-low": 5e8}.get(name, 5e11)
    fault(world, tmp_path)

    others = {("updates-skipped", "")} if name == "divergence" else set()
    assert set(world.present) - others == {(name, producer)}
    assert says in world.present[name, producer]
    assert world.gauge(name, producer) == 1  # what the alert asks for
    (begun,) = [line for line in messages(caplog) if line.startswith(f"{name} begins")]
    assert says in begun
    (told,) = (one for one in world.health.problems() if one["name"] == name)
    assert told["producer"] == producer
    assert says in str(told["says"])
    assert told["remedy"]


@pytest.mark.parametrize(
    ("role", "fault", "name", "producer"),
    [
        ("receiver", producer_silent, "producer-silent", "yard"),
        ("learner", divergence, "divergence", ""),
    ],
)
def test_readiness_the_page_and_status_show_a_condition(
    role: Any,
    fault: Fault,
    name: str,
    producer: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    world = World(role)
    going_well(world, role)
    fault(world, tmp_path)
    says = world.present[name, producer]
    with Server(world.registry, world.health, role) as server:
        (tmp_path / FILE).write_text(json.dumps({role: {"http": server.address}}))
        ready = httpx.get(f"{server.address}/readyz", trust_env=False, verify=False)
        page = httpx.get(f"{server.address}/api/{role}/state", trust_env=False, verify=False).json()
        status.main([str(tmp_path), "--seconds", "0.01"])
    for told in (ready.json()["conditions"], page["problems"]):
        (one,) = (found for found in told if found["name"] == name)
        assert (one["name"], one["producer"]) == (name, producer)
        assert says in one["says"]
        assert one["remedy"]
    printed = " ".join(capsys.readouterr().out.split())
    assert f"{name}: " in printed


def test_a_rank_does_not_count_as_slow_while_the_stream_pauses() -> None:
    world = World("learner")
    going_well(world, "learner")

    def look() -> None:
        for rank, share in enumerate((0.01, 0.03)):
            worked = share * (world.now - 1000)
            world.learner._raise_to("rank_busy_seconds_total", worked, rank=str(rank))

    world.pass_(1000, look)
    assert ("slow-rank", "") not in world.present


def test_skipped_updates_still_count_while_training_diverges() -> None:
    """A divergence and its reloads do not freeze the count of an earlier look."""
    world, state = World("learner"), Divergence()
    going_well(world, "learner")
    for skipped in (14, 20, 60):
        while state.skipped_in_a_row < skipped:
            diverging(world, state)()
        world.pass_(10)
        assert world.present["updates-skipped", ""].startswith(f"{skipped} updates within an hour")
    assert "60 updates in a row" in world.present["divergence", ""]


@pytest.mark.parametrize("whole", [True, False])
def test_the_condition_says_whether_damaged_checkpoints_made_the_run_begin_anew(
    whole: bool, tmp_path: Path
) -> None:
    world = World("learner", {"checkpoints": tmp_path})
    world.pass_(10)  # it is starting
    if whole:
        world.learner.of_checkpoints.resumed(5, world.wall)
    world.learner.started()
    checkpoint_damaged(world, tmp_path)
    world.learner.of_checkpoints.resumed(9, world.wall)
    world.pass_(10)
    assert ("began anew" in world.present["checkpoint-damaged", ""]) is not whole


def test_damage_that_a_running_learner_finds_did_not_cause_a_new_start(tmp_path: Path) -> None:
    """A divergence makes a running learner read its checkpoints."""
    world = World("learner", {"checkpoints": tmp_path})
    world.learner.started()
    world.pass_(10)
    world.learner.of_checkpoints.resumed(0, 1.0)
    (tmp_path / "damaged-step-000000000").mkdir()
    world.pass_(10)
    assert "anew" not in world.present["checkpoint-damaged", ""]


def test_a_condition_ends_a_minute_after_its_fault(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "stream_ssl.health")
    world = World("receiver")
    going_well(world, "receiver")
    producer_silent(world, Path())
    world.pass_(50, sent(world))
    held = world.present["producer-silent", "yard"]
    assert held.endswith(" (this ended 50 s ago)"), "a past state is marked as past"
    assert world.gauge("producer-silent", "yard") == 1  # held, so that it does not flap
    world.pass_(20, sent(world))
    assert world.present == {}
    assert world.gauge("producer-silent", "yard") == 0
    (over,) = messages(caplog, logging.INFO)
    assert over.startswith("producer-silent ends; its last state: yard has sent nothing")


def test_a_condition_that_flaps_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "stream_ssl.health")
    world = World("learner")
    going_well(world, "learner")
    for _ in range(20):
        world.pass_(10, stepped(world, lag_seconds=700.0))
        world.pass_(70, stepped(world))
    assert len(messages(caplog)) == 3
    assert len(messages(caplog, logging.INFO)) == 3


def test_a_restart_names_how_the_process_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LAST_END, "was killed by SIGKILL (signal 9)")
    world = World("learner")
    world.learner._families.add("restarts_total", 3)
    world.pass_(10, stepped(world))
    (says,) = world.present.values()
    told = "was killed by SIGKILL (signal 9) and was started again 10 s ago; 3 restarts since"
    assert told in says


BEFORE_THE_FIRST_LOOK: dict[str, tuple[str, Fault]] = {
    "journal-damaged": (
        "receiver",
        lambda world, _: world.receiver.consume(received(journal_damaged=1)),
    ),
    "journal-damaged of a learner": (
        "learner",
        lambda world, _: world.learner.observe_journal(0, 0, 28, {}, {}),
    ),
    "missing-packets": ("receiver", lambda world, _: world.receiver.consume(received(missing=3))),
    "refusals": (
        "receiver",
        lambda world, _: world.receiver.consume(received(refused={"unauthorised": 3})),
    ),
    "bad-samples": (
        "learner",
        lambda world, _: world.learner.observe_journal(
            0, 0, 0, {("damaged", "yard"): 6}, {"yard": 20}
        ),
    ),
    "drift": ("learner", lambda world, _: world.learner.observe_drift(0.1, 0.4, {"image": 1})),
}


@pytest.mark.parametrize("case", BEFORE_THE_FIRST_LOOK, ids=lambda case: case.replace(" ", "-"))
def test_counts_from_before_the_first_look_make_a_condition_present(case: str) -> None:
    role, fault = BEFORE_THE_FIRST_LOOK[case]
    world = World(role)
    fault(world, Path())
    world.pass_(60)
    assert case.partition(" ")[0] in {name for name, _ in world.present}


def test_samples_that_wait_for_their_batch_count_as_good() -> None:
    world = World("learner")
    world.learner.observe_journal(0, 20, 0, {("damaged", "bad2"): 6}, {"bad2": 20})
    world.pass_(10)
    assert world.present["bad-samples", "bad2"].startswith("23 % of bad2's samples within")


@table("count, said", [(0, "0 parts"), (1, "1 part"), (2, "2 parts"), (1234, "1,234 parts")])
def test_a_noun_agrees_with_its_number(count: float, said: str) -> None:
    assert plural(count, "part") == said


def test_a_covered_camera_does_not_count_as_a_collapse() -> None:
    world = World("learner")
    going_well(world, "learner")
    world.pass_(400, lambda: ranks(world, keys=1.05, images=1.3))
    assert world.present == {}


def test_a_producer_with_some_new_samples_does_not_count_as_dropped() -> None:
    world = World("learner")
    going_well(world, "learner")
    away = [Origin("yard", "lens", str(number), 0.0) for number in range(40)]
    world.pass_(600, stepped(world, dropped_origins=away))  # 4 of 44 are new
    assert world.present == {}


def test_new_samples_that_wait_for_a_full_batch_do_not_count_as_dropped() -> None:
    """No batch fills within the time, as with a parked robot that sends a few frames a second."""
    world = World("learner")
    going_well(world, "learner")
    origins = [Origin("yard", "lens", str(number), 0.0) for number in range(44)]
    nothing: dict[str, Any] = {"batch": 0, "keys_BD": torch.empty(0, 3), "origins_B": []}
    parts = {"new_origins": origins[:4], "dropped_origins": origins[4:]}
    for _ in range(4):
        world.pass_(30, stepped(world, **nothing, skipped="novelty", **parts))
    assert world.present == {}
    parts = {"new_origins": [], "dropped_origins": origins}
    for _ in range(8):
        world.pass_(30, stepped(world, **nothing, skipped="novelty", **parts))
    assert ("everything-dropped", "yard") in world.present


def test_a_halted_learner_is_not_ready() -> None:
    world = World("learner")
    going_well(world, "learner")
    learner_halted(world, Path())
    assert {("learner-halted", ""), ("divergence", "")} <= set(world.present)
    assert not world.health.ready().ok


def test_two_processes_report_one_full_disk_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exported, "free", lambda _: 5e8)
    folders = {"checkpoints": tmp_path / "checkpoints", "quarantine": tmp_path / "quarantine"}
    learner = World("learner", folders)
    learner.pass_(10)
    ((key, says),) = learner.present.items()
    assert key == ("disk-low", "")
    assert says.count("left on the disk") == 1
    beside = World("learner", folders, journal=tmp_path / "journal")
    beside.pass_(10)
    assert beside.present == {}  # the receiver reports that disk
    receiver = World("receiver", {"journal": tmp_path / "journal"})
    receiver.receiver.consume(received())
    receiver.pass_(10)
    assert set(receiver.present) == {("disk-low", "")}


@pytest.mark.parametrize(
    ("inodes", "free", "low"), [(10**6, 12, True), (10**6, 2000, False), (0, 0, False)]
)
def test_a_disk_without_inodes_is_low(
    inodes: int, free: int, low: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """File systems without inodes, such as Btrfs, report zero of them."""
    disk = SimpleNamespace(f_files=inodes, f_favail=free)
    monkeypatch.setattr("stream_ssl.observe.watch.os.statvfs", lambda _: disk)
    monkeypatch.setattr(exported, "free", lambda _: 5e11)
    learner = World("learner", {"checkpoints": tmp_path / "new"})
    learner.pass_(10)
    assert (("disk-low", "") in learner.present) == low
    if low:
        assert "only 12 more files can be made on the disk" in learner.present["disk-low", ""]


def test_a_disk_without_room_for_two_checkpoints_is_low(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exported, "free", lambda _: 7e9)
    learner = World("learner", {"checkpoints": tmp_path}, journal=tmp_path)
    offset = Offset(1, 0)
    learner.learner.consume(
        CheckpointRecord(7, 0.0, 0.4, 0.02, 4 * 10**9, Path("step-7"), offset, offset)
    )
    learner.pass_(10)
    assert "less than two checkpoints fit" in learner.present["disk-low", ""]


def test_the_page_and_readiness_do_not_wait_for_the_next_look() -> None:
    world = World("receiver")
    world.health.set("journal", False, "cannot be written")
    (one,) = world.health.problems()
    assert (one["name"], one["says"]) == ("journal-failing", "journal: cannot be written")
