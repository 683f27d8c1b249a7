"""Measures of learning task after task: average accuracy, forgetting, transfer, recovered share.

Shapes: T tasks; accuracy_TT has a row for each stage and a column for each task. Entry [i, j] is
the accuracy, in [0, 1], on task j of the encoder after the stream's task i.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True, slots=True)
class ContinualResult:
    """The measures of one stream.

    `forward_transfer` is None without the untrained encoder's accuracies. With only one task,
    `forgetting`, `backward_transfer` and `forward_transfer` are None.
    """

    average_accuracy: float
    forgetting: float | None
    backward_transfer: float | None
    forward_transfer: float | None


def average_accuracy(accuracy_TT: ArrayLike) -> float:
    """Return the mean accuracy over the tasks after the last stage.

    Lopez-Paz and Ranzato, Gradient Episodic Memory for Continual Learning, 2017, eq. 2 (ACC).

    >>> average_accuracy([[0.8, 0.1], [0.6, 0.9]])
    0.75
    """
    return float(_matrix(accuracy_TT)[-1].mean())


def forgetting(accuracy_TT: ArrayLike) -> float:
    """Return the mean drop from the best earlier accuracy to the last, over all tasks but the last.

    Chaudhry et al., Riemannian Walk for Incremental Learning, 2018, section 3.2 (F). The result is
    in [-1, 1]. A negative result means that later tasks improved the earlier ones.

    >>> round(forgetting([[0.8, 0.1], [0.6, 0.9]]), 12)
    0.2
    """
    matrix_TT = _several(accuracy_TT)
    return float((matrix_TT[:-1, :-1].max(axis=0) - matrix_TT[-1, :-1]).mean())


def backward_transfer(accuracy_TT: ArrayLike) -> float:
    """Return the mean change of accuracy since the task's own stage, over all tasks but the last.

    Lopez-Paz and Ranzato, 2017, eq. 3 (BWT). The result is in [-1, 1].
    """
    matrix_TT = _several(accuracy_TT)
    return float((matrix_TT[-1] - matrix_TT.diagonal())[:-1].mean())


def forward_transfer(accuracy_TT: ArrayLike, untrained_T: ArrayLike) -> float:
    """Return the mean gain over the untrained encoder just before a task, over all but the first.

    Lopez-Paz and Ranzato, 2017, eq. 4 (FWT). The result is in [-1, 1].

    >>> round(forward_transfer([[0.8, 0.3], [0.6, 0.9]], [0.1, 0.1]), 12)
    0.2
    """
    matrix_TT = _several(accuracy_TT)
    start_T = _accuracies(untrained_T, "untrained_T")
    if start_T.shape != matrix_TT.shape[:1]:
        raise ValueError(
            f"untrained_T has shape {list(start_T.shape)}: must be [{len(matrix_TT)}], one "
            "accuracy for each task"
        )
    before = matrix_TT.diagonal(offset=1)  # entry [j - 1, j] of task j
    return float((before - start_T[1:]).mean())


def recovered_share(accuracy: float, decorrelated: float) -> float:
    """Return the accuracy on a correlated stream divided by that on the decorrelated stream.

    The decorrelated stream has the same samples. This is MinRed's measure (Purushwalkam et al., The
    Challenges of Continuous Self-Supervised Learning, 2022), which is 0.975 on its benchmark. Above
    1 the correlated stream gave the better encoder.

    Raises:
        ValueError: an accuracy is outside [0, 1], or `decorrelated` is 0.

    >>> recovered_share(0.39, 0.4)
    0.975
    """
    if not (0 <= accuracy <= 1 and 0 < decorrelated <= 1):
        raise ValueError(
            f"accuracies {accuracy} and {decorrelated}: must lie in [0, 1], the second above 0"
        )
    return accuracy / decorrelated


def recovered_gain(accuracy: float, decorrelated: float, untrained: float) -> float:
    """Return the gain over the untrained encoder, divided by that of the decorrelated stream.

    An untrained encoder already has much of the accuracy, so `recovered_share` hides losses. For
    example, 0.70 of 0.72 is 97 %, but with an untrained accuracy of 0.65 the gain is only 71 %. 1
    means that all is recovered. A negative result means that the stream made the encoder worse.

    Raises:
        ValueError: an accuracy is outside [0, 1], or the decorrelated stream gained nothing.

    >>> round(recovered_gain(0.70, 0.72, 0.65), 2)
    0.71
    """
    if not all(0 <= value <= 1 for value in (accuracy, decorrelated, untrained)):
        raise ValueError(
            f"accuracies {accuracy}, {decorrelated} and {untrained}: must lie in [0, 1]"
        )
    if decorrelated <= untrained:
        raise ValueError(
            f"the decorrelated stream led from {untrained} to {decorrelated}: it gained nothing, "
            "so no gain can be recovered"
        )
    return (accuracy - untrained) / (decorrelated - untrained)


def summarise(accuracy_TT: ArrayLike, untrained_T: ArrayLike | None = None) -> ContinualResult:
    """Return all measures that the accuracies allow."""
    matrix_TT = _matrix(accuracy_TT)
    several = len(matrix_TT) > 1
    return ContinualResult(
        average_accuracy(matrix_TT),
        forgetting(matrix_TT) if several else None,
        backward_transfer(matrix_TT) if several else None,
        forward_transfer(matrix_TT, untrained_T) if several and untrained_T is not None else None,
    )


def divide(classes: Sequence[int], tasks: int) -> list[list[int]]:
    """Return the classes in order, divided into tasks of equal size.

    If the sizes cannot be equal, the first tasks have one class more.

    >>> divide(range(5), 2)
    [[0, 1, 2], [3, 4]]
    """
    if not 1 <= tasks <= len(classes):
        raise ValueError(
            f"{tasks} tasks over {len(classes)} classes: give 1 to {len(classes)} tasks"
        )
    return [part.tolist() for part in np.array_split(np.asarray(classes), tasks)]


def _several(accuracy_TT: ArrayLike) -> NDArray[np.float64]:
    matrix_TT = _matrix(accuracy_TT)
    if len(matrix_TT) < 2:
        raise ValueError("transfer and forgetting are between tasks: at least 2 are needed")
    return matrix_TT


def _matrix(accuracy_TT: ArrayLike) -> NDArray[np.float64]:
    matrix_TT = _accuracies(accuracy_TT, "accuracy_TT")
    if matrix_TT.ndim != 2 or matrix_TT.shape[0] != matrix_TT.shape[1] or not len(matrix_TT):
        raise ValueError(
            f"accuracy_TT has shape {list(matrix_TT.shape)}: need [T, T], a row for the stage "
            "after each task and a column for each task"
        )
    return matrix_TT


def _accuracies(values: ArrayLike, what: str) -> NDArray[np.float64]:
    found = np.asarray(values, dtype=np.float64)
    if not ((found >= 0) & (found <= 1)).all():
        raise ValueError(f"{what} holds values outside [0, 1]; accuracies are shares, not per cent")
    return found
