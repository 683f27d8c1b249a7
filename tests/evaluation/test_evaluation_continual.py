"""Continual measures on matrices that were worked out by hand."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from table import table

from stream_ssl.evaluation import (
    ContinualResult,
    average_accuracy,
    backward_transfer,
    forgetting,
    forward_transfer,
    recovered_gain,
    recovered_share,
    summarise,
)
from stream_ssl.evaluation.continual import divide
from stream_ssl.evaluation.report import Recovered

# Task 1 falls from 0.9 by 0.8 to 0.5; task 2 rises to 0.7, ends at 0.6; task 3 ends at 0.8.
MATRIX = [[0.9, 0.2, 0.1], [0.8, 0.7, 0.3], [0.5, 0.6, 0.8]]
UNTRAINED = [0.1, 0.15, 0.05]


def test_continual_measures_of_three_tasks_equal_values_computed_by_hand() -> None:
    assert average_accuracy(MATRIX) == pytest.approx((0.5 + 0.6 + 0.8) / 3)
    assert forgetting(MATRIX) == pytest.approx(((0.9 - 0.5) + (0.7 - 0.6)) / 2)
    assert backward_transfer(MATRIX) == pytest.approx(((0.5 - 0.9) + (0.6 - 0.7)) / 2)
    assert forward_transfer(MATRIX, UNTRAINED) == pytest.approx(((0.2 - 0.15) + (0.3 - 0.05)) / 2)


def test_forgetting_counts_from_the_best_earlier_stage() -> None:
    """The first task is best after stage 2: it forgets 0.2, and its backward transfer is 0.1."""
    matrix = [[0.6, 0.0, 0.0], [0.9, 0.5, 0.0], [0.7, 0.5, 0.5]]
    assert forgetting(matrix) == pytest.approx((0.2 + 0.0) / 2)
    assert backward_transfer(matrix) == pytest.approx(0.1 / 2)


def test_forgetting_is_negative_if_a_task_is_best_at_the_end() -> None:
    assert forgetting([[0.5, 0.1], [0.8, 0.9]]) == pytest.approx(-0.3)


def test_an_encoder_that_never_changes_forgets_and_transfers_nothing() -> None:
    matrix = np.tile([0.3, 0.4, 0.5], (3, 1))
    assert summarise(matrix, matrix[0]) == ContinualResult(pytest.approx(0.4), 0, 0, 0)


def test_one_task_has_an_average_only() -> None:
    assert summarise([[0.4]]) == ContinualResult(0.4, None, None, None)
    assert summarise(MATRIX).forward_transfer is None
    assert summarise(MATRIX, UNTRAINED).forward_transfer == pytest.approx(0.15)


def test_the_recovered_share_is_the_ratio_of_the_accuracies() -> None:
    assert recovered_share(0.5, 0.5) == 1
    assert recovered_share(0.39, 0.40) == pytest.approx(0.975)
    assert recovered_share(0.0, 0.4) == 0


def test_the_recovered_gain_is_the_ratio_of_the_gains_over_the_untrained_encoder() -> None:
    assert recovered_gain(0.5, 0.5, 0.3) == pytest.approx(1)
    assert recovered_gain(0.3, 0.5, 0.3) == 0
    assert recovered_gain(0.2, 0.5, 0.3) == pytest.approx(-0.5)


def test_a_recovered_gain_is_given_only_if_the_decorrelated_run_gained() -> None:
    assert Recovered.of(0.39, 0.40, None) == Recovered(pytest.approx(0.975), None)
    assert Recovered.of(0.39, 0.40, 0.45).gain is None
    assert Recovered.of(0.39, 0.40, 0.30).text() == "97.5 % (90 % of the gain)"
    assert Recovered.of(0.39, 0.40, 0.0).text() == "97.5 % (98 % of the gain)"


def test_classes_are_divided_into_tasks_in_order() -> None:
    assert divide(range(10), 5) == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    assert divide([7, 1, 4], 2) == [[7, 1], [4]]
    assert divide([3], 1) == [[3]]


@table(
    ("ask", "message"),
    [
        (lambda: average_accuracy([[0.1, 0.2]]), "need .T, T."),
        (lambda: average_accuracy([]), "need .T, T."),
        (lambda: average_accuracy([[81.0]]), "not per cent"),
        (lambda: average_accuracy([[float("nan")]]), "outside .0, 1."),
        (lambda: average_accuracy([[1.5]]), "outside .0, 1."),
        (lambda: average_accuracy([[-0.5]]), "outside .0, 1."),
        (lambda: recovered_share(1.5, 0.5), "must lie in"),
        (lambda: recovered_share(0.5, 1.5), "must lie in"),
        (lambda: forgetting([[0.5]]), "at least 2"),
        (lambda: forward_transfer(MATRIX, [0.1]), "one accuracy for each task"),
        (lambda: recovered_share(0.3, 0.0), "the second above 0"),
        (lambda: recovered_gain(0.3, 0.4, 1.4), "must lie in"),
        (lambda: recovered_gain(0.3, 0.4, 0.4), "no gain can be recovered"),
        (lambda: divide(range(3), 4), "give 1 to 3 tasks"),
    ],
)
def test_continual_measures_reject_wrong_arguments(ask: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ask()
