"""The condition `clock`: clocks that differ, and times of capture that show no difference."""

from __future__ import annotations

from condition_world import World, sent
from table import table

DAYS = 86_400.0


def test_a_time_of_capture_far_in_the_future_is_shown_in_few_words() -> None:
    world = World("receiver")
    world.pass_(10, sent(world, producer_captured={"yard": 1e300}))
    says = "yard's clock is more than 100 years ahead of this machine's clock"
    assert world.present["clock", "yard"] == says


OLD = {"yard": 50.0 - 40 * DAYS, "gate": 50.0 - 30 * DAYS}
"""Times of capture of recordings that are sent again."""


def test_the_condition_names_a_receiver_whose_clock_is_behind_all_producers() -> None:
    world = World("receiver")
    ahead = {"yard": 19_000 * DAYS, "gate": 19_000 * DAYS + 5}
    world.pass_(10, sent(world, producer_clock=ahead, producer_captured=OLD))
    assert "this machine's clock is more than 100 years" not in world.present["clock", ""]
    assert "19000 days behind the clocks of all 2 producers" in world.present["clock", ""]


def test_recordings_and_producers_without_a_clock_cause_no_condition() -> None:
    """A HELLO contains the current time, even if the producer has run for long."""
    world = World("receiver")
    clocks = {"yard": 0.2, "gate": -1.0}
    world.pass_(120, sent(world, producer_clock=clocks, producer_captured=OLD))
    assert not any(name == "clock" for name, _ in world.present)
    world = World("receiver")
    world.pass_(120, sent(world, producer_captured=OLD))
    assert not any(name == "clock" for name, _ in world.present)


@table("who", ["receiver", "producers"])
def test_a_corrected_clock_ends_the_condition_without_a_new_hello(who: str) -> None:
    world = World("receiver")
    wrong = {"yard": -40 * DAYS, "gate": -40 * DAYS}
    captured = dict.fromkeys(wrong, 50.0 - 40 * DAYS)
    world.pass_(60, sent(world, producer_clock=wrong, producer_captured=captured))
    assert "40 days ahead of" in world.present["clock", ""]
    if who == "receiver":
        world.wall -= 40 * DAYS
        world.pass_(30, sent(world, producer_captured=captured))
        assert "jumped back by 40 days" in world.present["clock", ""]
        world.pass_(720, sent(world, producer_captured=captured))
    else:
        world.pass_(120, sent(world))
    assert not any(name == "clock" for name, _ in world.present)
