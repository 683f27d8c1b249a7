"""The conditions of silence: which producers count as missing when no sample comes."""

from __future__ import annotations

from condition_world import World, idle, sent


def receiving() -> World:
    """A receiver after a minute that went well."""
    world = World("receiver")
    world.receiver.started()
    world.pass_(100, sent(world, fsync_seconds=0.01))
    return world


def test_a_camera_that_ends_normally_does_not_count_as_silent() -> None:
    world = receiving()
    gone = {"producers": 1, "samples": 10, "producer_samples": {"gate": 10}}
    world.pass_(10, sent(world, **gone, producer_finished={"yard": 1.0}))
    world.pass_(600, sent(world, **gone))
    assert world.present == {}
    world.pass_(10, sent(world, producer_finished={"yard": 0.0}))
    world.pass_(300, sent(world, samples=10, producer_samples={"gate": 10}))
    assert set(world.present) == {("producer-silent", "yard")}


def test_a_sporadic_source_does_not_count_as_silent() -> None:
    world = receiving()
    watches = {"producer_sporadic": {"yard": 1.0}, "producer_finished": {"yard": 0.0, "gate": 0.0}}
    world.pass_(120, sent(world, **watches))
    world.pass_(600, sent(world, samples=10, producer_samples={"gate": 10}))
    assert world.present == {}
    world.pass_(10, sent(world, producer_finished={"gate": 1.0}))
    world.pass_(3600, idle(world, producers=1))
    assert world.present == {}
    world.pass_(10, sent(world, producer_sporadic={"yard": 0.0}))  # it connects as another source
    world.pass_(300, idle(world, producers=1))
    assert set(world.present) == {("nothing-received", "")}


def test_ended_sources_do_not_count_as_missing() -> None:
    """Stopped producers are missing, such as the cameras of a machine that does not return."""
    world = receiving()
    world.pass_(300, idle(world, producers=0, producer_finished={"yard": 2.0, "gate": 2.0}))
    assert world.present == {}
    world.pass_(120, idle(world, producers=0, producer_finished={"yard": 1.0}))
    assert set(world.present) == {("no-producers", "")}


def test_a_source_that_had_nothing_to_send_counts_as_ended() -> None:
    """After a restart of the receiver, a repeated command has nothing to send, and ends."""
    world = World("receiver")
    world.receiver.started()
    world.pass_(300, idle(world, producers=0, producer_finished={"yard": 2.0}))
    assert world.present == {}
    world.pass_(120, idle(world, producers=0, producer_finished={"yard": 1.0}))
    assert "no producer has been connected for" in world.present["no-producers", ""]


def test_a_producer_that_was_stopped_without_credit_does_not_count_as_ended() -> None:
    """It connected, could send nothing, and was stopped: its source has more."""
    world = receiving()
    finished = {"yard": 2.0, "gate": 2.0, "film": 1.0}
    world.pass_(300, idle(world, producers=0, producer_finished=finished))
    assert set(world.present) == {("no-producers", "")}


def test_a_full_journal_does_not_hide_a_silent_producer() -> None:
    """A learner that is always behind takes the credit away again and again."""
    world = World("receiver")
    world.receiver.started()
    world.pass_(60, sent(world))
    gate = sent(world, samples=10, producer_samples={"gate": 10})
    for _ in range(30):
        world.pass_(10, gate)
        world.pass_(20, idle(world, credit=0))
    assert set(world.present) == {("producer-silent", "yard")}


def test_a_slow_producer_counts_as_silent_only_after_twenty_of_its_gaps() -> None:
    world = World("receiver")
    world.receiver.started()
    for _ in range(6):
        world.pass_(10, sent(world))
        world.pass_(50, idle(world))
    world.pass_(1000, idle(world))
    assert world.present == {}
    world.pass_(300, idle(world))
    assert set(world.present) == {("nothing-received", "")}
