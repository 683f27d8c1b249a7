"""The limit on samples per second, with a simulated clock."""

import itertools

import pytest
from going_on import check_stop_ends
from table import table

from stream_ssl.producers.shaping import RateLimit, Shaped, shaped
from stream_ssl.producers.sources import Synthetic


class Clock:
    """A clock that advances in `sleep`, with a delay, and when the test sets it."""

    def __init__(self, late=0.0):
        self.now, self.late = 50.0, late

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        assert seconds > 0
        self.now += seconds + self.late


def limiter(rate, clock):
    return RateLimit(rate, clock=clock, sleep=clock.sleep)


@table("rate", [0.5, 10, 1000, 50_000])
@table("late", [0.0, 0.0002])
def test_the_limiter_reaches_the_given_average_rate(rate, late):
    clock = Clock(late)
    limit = limiter(rate, clock)
    for _ in range(2001):
        limit.wait()
    assert 2000 / (clock.now - 50.0) == pytest.approx(rate, rel=0.01)


def test_the_limiter_delays_the_second_sample_and_not_the_first():
    clock = Clock()
    limit = limiter(4, clock)
    limit.wait()
    assert clock.now == 50.0
    limit.wait()
    assert clock.now == pytest.approx(50.25)


def test_the_limiter_allows_no_long_burst_after_a_pause():
    clock = Clock()
    limit = limiter(1000, clock)
    limit.wait()
    clock.now += 3600
    for _ in range(1020):  # a burst of 0.02 s, and a second
        limit.wait()
    assert clock.now == pytest.approx(3650 + 1.0, abs=0.01)


def test_the_limiter_subtracts_the_time_that_the_consumer_takes():
    clock = Clock()
    limit = limiter(100, clock)
    for _ in range(101):
        limit.wait()
        clock.now += 0.009
    assert clock.now - 50.0 == pytest.approx(1.01, abs=0.01)


@table("rate", [0, -1, float("nan")])
def test_a_rate_that_is_not_positive_is_refused(rate):
    with pytest.raises(ValueError, match="must be above 0"):
        RateLimit(rate)


def test_a_rate_limit_changes_the_speed_and_not_the_content_of_a_stream(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(shaped, "RateLimit", lambda rate, **_: limiter(rate, clock))
    source = Synthetic(size=2, shift=0)
    slow = list(itertools.islice(Shaped(source, rate=20).samples(), 101))
    assert clock.now - 50.0 == pytest.approx(5.0)
    quick = list(itertools.islice(Shaped(source).samples(), 101))
    assert [p for _, p in slow] == [p for _, p in quick]
    assert [s.data for s, _ in slow] == [s.data for s, _ in quick]


def test_stop_ends_a_stream_that_waits_for_its_rate():
    source = Shaped(Synthetic(size=2, shift=0), rate=1e-6)
    stream = source.samples()
    next(stream)
    check_stop_ends(source, stream)
