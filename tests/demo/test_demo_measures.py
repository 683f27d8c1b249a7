"""Shares, collisions and effective classes, checked by hand."""

import numpy as np
import pytest

from stream_ssl.demo import report
from stream_ssl.demo.measures import (
    entropy_classes,
    same_class_probability,
    shares,
    side_by_side,
    true_collisions,
)
from stream_ssl.demo.summary import mean_rate, tail_mean
from stream_ssl.observe.scrape import History, Snapshot, key


def test_shares_sum_to_one_and_are_zero_without_counts():
    assert shares([1, 3]) == [0.25, 0.75]
    assert shares([0, 0]) == [0, 0]


def test_same_class_probability_equals_the_probability_by_hand():
    assert same_class_probability([1] * 10, [5] * 10) == pytest.approx(0.1)
    assert same_class_probability([1, 0], [0, 1]) == 0
    assert same_class_probability([27] + [1] * 9, [27] + [1] * 9) == pytest.approx(
        (27**2 + 9) / 36**2
    )


def test_entropy_classes_counts_equally_frequent_classes():
    assert entropy_classes([4] * 10) == pytest.approx(10)
    assert entropy_classes([4, 0, 0]) == pytest.approx(1)
    assert entropy_classes([0, 0]) == 0


def test_true_collisions_skip_moments_without_labels():
    def values(stream: int, queue: int) -> dict[str, float]:
        return {
            key("stream_ssl_stream_class_samples_total", {"class": "1"}): stream,
            key("stream_ssl_memory_class_slots", {"class": "1", "memory": "queue"}): queue,
        }

    history = History([Snapshot(0, values(0, 0)), Snapshot(1, values(3, 2))])
    assert true_collisions(history, "queue") == [(1, 1.0)]


def test_mean_rate_ignores_times_without_progress():
    points = [(0.0, 0.0), (10.0, 0.0), (11.0, 50.0), (12.0, 100.0), (60.0, 100.0)]
    assert mean_rate(points) == pytest.approx(50)
    assert mean_rate([(0.0, 1.0), (1.0, 1.0)]) == 0


def test_tail_mean_averages_only_the_last_seconds():
    assert tail_mean([(0.0, 100.0), (95.0, 1.0), (100.0, 3.0)]) == 2
    assert tail_mean([]) == 0


def test_mosaic_sample_is_sorted_and_repeatable():
    label_N = np.random.default_rng(1).integers(0, 10, 100)
    image_NHW = label_N.astype(np.uint8)[:, None, None] * np.ones((1, 2, 2), np.uint8)
    chosen = report.by_class(image_NHW, label_N, 40)
    assert len(chosen) == 40
    assert np.all(np.diff(chosen[:, 0, 0].astype(int)) >= 0)
    assert np.array_equal(chosen, report.by_class(image_NHW, label_N, 40))
    assert len(report.by_class(image_NHW, label_N, 500)) == 100


def test_side_by_side_takes_the_queue_from_the_memory_of_the_other_daemon():
    slots, loss = "stream_ssl_memory_slots", "stream_ssl_loss"
    seen = key("stream_ssl_stream_class_samples_total", {"class": "3"})
    working, queue = (key(slots, {"memory": name}) for name in ("working", "queue"))
    ours = Snapshot(4.0, {working: 10.0, seen: 2.0, loss: 5.0}, ("receiver", "learner"))
    theirs = Snapshot(4.1, {working: 20.0, seen: 90.0, loss: 6.0}, ("learner",))
    found = side_by_side(ours, theirs)
    assert found.values == {working: 10.0, queue: 20.0, seen: 90.0, loss: 5.0}
    assert (found.time, found.up) == (4.0, ("receiver", "learner"))
