"""Tests of the scores of predictions and of the confusion matrix."""

from __future__ import annotations

import pytest
import torch

from stream_ssl.evaluation import ProbeResult, confusion, score


def test_scores_equal_values_computed_by_hand() -> None:
    found = score(torch.tensor([0, 0, 2, 2]), torch.tensor([0, 1, 2, 2]))
    assert found == ProbeResult(0.75, {0: 1.0, 1: 0.0, 2: 1.0}, 4)
    assert found.balanced == pytest.approx(2 / 3)


def test_rows_of_a_confusion_matrix_are_true_classes() -> None:
    matrix = confusion(torch.tensor([0, 1, 1, 2]), torch.tensor([0, 0, 1, 1]), 4)
    expected = [[1, 1, 0, 0], [0, 1, 1, 0], [0] * 4, [0] * 4]
    assert matrix.tolist() == expected
    with pytest.raises(ValueError, match="from 0 to 2 do not lie in"):
        confusion(torch.tensor([0]), torch.tensor([2]), 2)
