"""The dominant class changes, and its share follows from the arguments."""

import math

import numpy as np
import pytest
from going_on import check_goes_on
from shaped_streams import draw

from stream_ssl.producers.shaping import Shift
from stream_ssl.producers.sources import Synthetic


def small(**settings):
    return Synthetic(**({"size": 4, "shift": 0, "classes": 5} | settings))


@pytest.mark.parametrize("bias", [1.0, 20.0])
def test_the_dominant_class_of_a_period_is_bias_times_as_frequent(bias):
    period = 4000
    shift = Shift(small(), classes=5, period=period, bias=bias)
    label = np.array([s.label for s in draw(shift, 5 * period)]).reshape(5, period)
    chance = bias / (bias + 4)
    error = 4.5 * math.sqrt(chance * (1 - chance) / period)
    for phase in range(5):
        share = np.bincount(label[phase], minlength=5) / period
        dominant = shift.dominant(phase * period)
        assert abs(share[dominant] - chance) < error < 0.05
        rest = np.delete(share, dominant)
        assert np.abs(rest - (1 - chance) / 4).max() < 0.03


def test_each_class_dominates_once_in_each_round_and_the_order_changes():
    shift = Shift(small(), classes=5, period=10)
    rounds = np.array([shift.dominant(10 * phase) for phase in range(200)]).reshape(-1, 5)
    assert (np.sort(rounds, axis=1) == np.arange(5)).all()
    assert len({tuple(order) for order in rounds.tolist()}) > 20
    assert {shift.dominant(sent) for sent in range(10)} == {shift.dominant(0)}


def test_a_shifted_stream_keeps_the_order_of_its_source():
    source = small(count=3000)
    order = {sample.id: at for at, sample in enumerate(draw(source, 3000))}
    at = [order[s.id] for s in draw(Shift(source, 5, period=100), 10_000)]
    assert at == sorted(set(at))
    assert len(draw(Shift(source, 5, bias=1.0), 10_000)) == 3000


def test_a_shifted_stream_resumes_exactly_after_every_position():
    stream = check_goes_on(
        lambda: Shift(small(count=6000), 5, period=70, bias=6.0, seed=3), every=61, ahead=200
    )
    assert len(stream) > 1500
    with pytest.raises(ValueError, match=r"bias was 6\.0 and is 7\.0"):
        Shift(small(count=6000), 5, period=70, bias=7.0, seed=3).samples(stream[3][1])
