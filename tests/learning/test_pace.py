"""Tests that the pace depends only on counts."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stream_ssl.learning.pace import Pace


def drive(pace: Pace, batch: int, idle: int) -> int:
    """Process one batch by the learner's rule and `idle` empty polls. Return the updates made."""
    before = pace.updates
    pace.received(batch)
    if pace.must_update():
        pace.updated()
    while pace.must_update():
        pace.updated()
    for _ in range(idle):
        if pace.must_update():
            pace.updated()
    return pace.updates - before


@given(
    worth=st.one_of(st.none(), st.integers(1, 400).map(lambda n: 1 / n), st.floats(0.001, 3.0)),
    batches=st.lists(st.tuples(st.integers(1, 300), st.integers(0, 9)), max_size=30),
)
def test_updates_follow_the_target(worth: float | None, batches: list[tuple[int, int]]) -> None:
    pace = Pace(worth)
    for batch, idle in batches:
        drive(pace, batch, idle)
        assert pace.updates == math.floor(pace.target)
    assert pace.samples == sum(batch for batch, _ in batches)


@given(batches=st.lists(st.tuples(st.integers(1, 300), st.integers(0, 9)), max_size=30))
def test_idle_polls_do_not_change_the_number_of_updates(batches: list[tuple[int, int]]) -> None:
    busy, idle = Pace(1 / 64), Pace(1 / 64)
    for batch, looks in batches:
        assert drive(busy, batch, 0) == drive(idle, batch, looks)


@given(idles=st.lists(st.integers(0, 20), max_size=20))
def test_a_fresh_batch_always_trains_at_one_update_a_batch(idles: list[int]) -> None:
    pace = Pace(1 / 128)
    for idle in idles:
        assert drive(pace, 128, idle) >= 1


def test_a_pace_of_a_hundredth_per_sample_adds_up_exactly() -> None:
    pace = Pace(0.01)
    assert [drive(pace, 50, 0) for _ in range(6)] == [0, 1, 0, 1, 0, 1]
    for _ in range(10_000):
        drive(pace, 50, 0)
    assert pace.updates == 5003
    assert pace.target == Fraction(500_300, 100)


def test_the_default_pace_is_one_update_per_batch_of_any_size() -> None:
    pace = Pace()
    assert [drive(pace, size, 5) for size in (1, 200, 7)] == [1, 1, 1]


def test_replays_tells_whether_a_batch_size_needs_replays() -> None:
    assert not Pace().replays(128)
    assert not Pace(1 / 128).replays(128)
    assert Pace(1 / 128).replays(129)


@given(worth=st.floats(0.001, 3.0), batches=st.lists(st.integers(1, 300), max_size=10))
def test_the_pace_resumes_from_its_state(worth: float, batches: list[int]) -> None:
    pace, other = Pace(worth), Pace(worth)
    for batch in batches:
        drive(pace, batch, 0)
    other.load_state_dict(pace.state_dict())
    assert drive(pace, 77, 0) == drive(other, 77, 0)
    assert pace.state_dict() == other.state_dict()


def test_the_pace_rejects_wrong_settings() -> None:
    for worth in (0.0, -1.0, 1e-10, math.nan, math.inf):
        with pytest.raises(ValueError, match="updates_per_sample is"):
            Pace(worth)
    with pytest.raises(ValueError, match='choose "received" or "new"'):
        Pace(counts="all")
    with pytest.raises(ValueError, match="received 0 samples"):
        Pace().received(0)
