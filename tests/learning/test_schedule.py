"""Tests of learning rates as functions of the step."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from learning_world import build, steps
from table import table

from stream_ssl.learning.schedule import Constant, Cosine


def test_the_constant_schedule_rises_during_its_warmup_and_stays() -> None:
    rate = Constant(warmup=4)
    assert [rate(step) for step in (0, 1, 2, 3, 4, 10**9)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert Constant()(0) == 1.0


def test_cosine_falls_by_half_at_half_time_and_repeats() -> None:
    rate = Cosine(period=100, warmup=10, floor=0.1)
    assert rate(0) == pytest.approx(0.1)
    assert rate(9) == rate(10) == 1.0
    assert rate(60) == pytest.approx(0.55)
    assert rate(109) < 0.101
    assert rate(110) == 1.0
    assert rate(160) == pytest.approx(rate(60))


def test_cosine_without_repeat_stays_at_its_floor() -> None:
    rate = Cosine(period=100, floor=0.2, repeat=False)
    assert rate(100) == rate(10**6) == pytest.approx(0.2)


def test_schedules_reject_wrong_settings() -> None:
    with pytest.raises(ValueError, match="period is 0"):
        Cosine(0)
    with pytest.raises(ValueError, match="floor is 2"):
        Cosine(10, floor=2)
    with pytest.raises(ValueError, match="warmup is -1"):
        Cosine(10, warmup=-1)
    with pytest.raises(ValueError, match="warmup is -1"):
        Constant(-1)


@table("factor", [math.nan, math.inf, -0.5, None, "0.5x"])
def test_a_factor_that_would_spoil_the_weights_ends_the_run(factor: Any) -> None:
    learner = build(schedule=lambda step: factor if step == 2 else 1.0)
    steps(learner, 2)
    before = [weight.clone() for weight in learner.method.parameters()]
    with pytest.raises(ValueError, match=r"schedule .* gives .* at step 2: must be a finite num"):
        steps(learner, 1)
    assert all(map(torch.equal, before, learner.method.parameters()))


@table("factor", [torch.tensor(0.5), np.float32(0.5)], ids=range(2))
def test_a_factor_of_another_type_is_a_float_in_a_record(factor: Any) -> None:
    (record,) = steps(build(schedule=lambda step: factor), 1)
    assert record.learning_rate == 0.0005
    assert type(record.learning_rate) is float
