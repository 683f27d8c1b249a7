"""Linear probes: a softmax regression on frozen features.

Shapes: N references, Q queries, B batch, F features, C classes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from stream_ssl.evaluation.checks import Array, as_labels, as_rows, check_width
from stream_ssl.evaluation.scores import ProbeResult, score


@dataclass(frozen=True)
class LinearSettings:
    """The training settings of a linear layer. Its weights start at 0, because the loss is convex.

    Args:
        optimiser: "sgd", "adam", or "lbfgs", which uses all references at once.
        epochs: number of passes over the references; for L-BFGS the number of iterations.
        learning_rate: initial learning rate; L-BFGS uses a line search instead.
        momentum: momentum of SGD, in [0, 1).
        weight_decay: weight decay of torch's optimisers; for L-BFGS the factor of the weights'
            squares.
        batch_size: number of references in a step.
        standardise: whether to scale each feature to mean 0 and variance 1, by the references.
        seed: seed of the order of the references.

    Raises:
        ValueError: an argument is outside its range.
    """

    optimiser: Literal["sgd", "adam", "lbfgs"] = "sgd"
    epochs: int = 100
    learning_rate: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 1e-6
    batch_size: int = 256
    standardise: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.optimiser not in ("sgd", "adam", "lbfgs"):
            raise ValueError(f'optimiser {self.optimiser!r}: choose "sgd", "adam" or "lbfgs"')
        for name in ("epochs", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)}: must be at least 1")
        if not self.learning_rate > 0 or self.weight_decay < 0 or not 0 <= self.momentum < 1:
            raise ValueError(
                f"learning_rate {self.learning_rate}, weight_decay {self.weight_decay}, momentum "
                f"{self.momentum}: need above 0, 0 or more, and in [0, 1)"
            )


DUEL = LinearSettings()
"""Settings of the DUEL paper (appendix, evaluation metrics).

SGD, 100 epochs, rate 0.01, momentum 0.9, weight decay 1e-6. The paper does not state the batch size
(256 here, as in its training) or a schedule (none here).
"""

DEBIASED = LinearSettings("adam", learning_rate=1e-3, weight_decay=1e-6, batch_size=512)
"""Settings of the debiased papers (debiased contrastive, appendix B).

Adam, rate 1e-3, weight decay 1e-6. The papers do not state the epochs (100 here) or the probe's
batch size (512 here, as in training).
"""

CONVEX = LinearSettings("lbfgs", weight_decay=1e-3, standardise=True)
"""Settings for a fair comparison of encoders.

L-BFGS on standardised features comes close to the minimum, so the result does not depend on a
learning rate or a seed.
"""

PROBES = {"duel": DUEL, "debiased": DEBIASED, "convex": CONVEX}

OnEpoch = Callable[[int, int], None]
"""A progress callback, which gets (epochs done, total epochs)."""


class LinearProbe:
    """A trained linear layer.

    Args:
        reference_NF: frozen features.
        label_N: classes of the references, at least two different ones.
        settings: `DUEL`, `DEBIASED`, `CONVEX` or the caller's own.
        tell: called after each epoch.

    Raises:
        ValueError: shapes or labels do not fit, or there is only one class.
    """

    def __init__(
        self,
        reference_NF: Array,
        label_N: Array,
        settings: LinearSettings = DUEL,
        tell: OnEpoch | None = None,
    ) -> None:
        row_NF = as_rows(reference_NF)
        label_N = as_labels(label_N, row_NF)
        self.classes: Tensor
        self.classes, target_N = torch.unique(label_N, return_inverse=True)
        if len(self.classes) < 2:
            raise ValueError(
                f"all references are of class {int(self.classes[0])}: a linear probe tells classes "
                "apart, so pass references of at least two"
            )
        self._mean_F, self._scale_F = torch.zeros_like(row_NF[0]), torch.ones_like(row_NF[0])
        if settings.standardise:
            deviation_F, self._mean_F = torch.std_mean(row_NF, dim=0)
            self._scale_F = deviation_F.clamp_min(1e-6)
        # The meta device avoids torch's initial weights, which use the global generator.
        layer = nn.Linear(row_NF.shape[1], len(self.classes), device="meta", dtype=row_NF.dtype)
        self._layer = layer.to_empty(device=row_NF.device)
        nn.init.zeros_(self._layer.weight)
        nn.init.zeros_(self._layer.bias)
        row_NF = self._scaled(row_NF)
        fit = _by_lbfgs if settings.optimiser == "lbfgs" else _by_batches
        fit(self._layer, row_NF, target_N, settings, tell or (lambda *_: None))

    @torch.no_grad()
    def predict(self, query_QF: Array) -> Tensor:
        """Return the class of each query, int64 [Q]."""
        row_QF = as_rows(query_QF, "queries").to(self._mean_F)
        check_width(row_QF, self._layer.weight)
        logit_QC: Tensor = self._layer(self._scaled(row_QF))
        class_Q: Tensor = self.classes[logit_QC.argmax(dim=1)]
        return class_Q

    def _scaled(self, row_NF: Tensor) -> Tensor:
        return (row_NF - self._mean_F) / self._scale_F


def linear_probe(
    reference_NF: Array,
    label_N: Array,
    query_QF: Array,
    query_label_Q: Array,
    settings: LinearSettings = DUEL,
) -> ProbeResult:
    """Return the accuracy of a linear layer that is trained on the references' frozen features.

    Queries of a class without references always count as wrong.

    Args:
        reference_NF: features to train the layer on.
        label_N: classes of the references.
        query_QF: features to test the layer on.
        query_label_Q: classes of the queries.
        settings: `DUEL`, `DEBIASED`, `CONVEX` or the caller's own.

    Raises:
        ValueError: shapes or labels do not fit, or there is only one class.
    """
    query_QF = as_rows(query_QF, "queries")
    truth_Q = as_labels(query_label_Q, query_QF, "the queries' labels")
    return score(LinearProbe(reference_NF, label_N, settings).predict(query_QF), truth_Q)


@torch.enable_grad()
def _by_batches(
    layer: nn.Linear, row_NF: Tensor, target_N: Tensor, settings: LinearSettings, tell: OnEpoch
) -> None:
    rate, decay = settings.learning_rate, settings.weight_decay
    optimiser: torch.optim.Optimizer
    if settings.optimiser == "sgd":
        optimiser = torch.optim.SGD(
            layer.parameters(), rate, momentum=settings.momentum, weight_decay=decay
        )
    else:
        optimiser = torch.optim.Adam(layer.parameters(), rate, weight_decay=decay)
    generator = torch.Generator().manual_seed(settings.seed)
    for epoch in range(settings.epochs):
        order_N = torch.randperm(len(row_NF), generator=generator).to(row_NF.device)
        for index_B in torch.split(order_N, settings.batch_size):
            optimiser.zero_grad()
            loss = cross_entropy(layer(row_NF[index_B]), target_N[index_B])
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
        tell(epoch + 1, settings.epochs)


@torch.enable_grad()
def _by_lbfgs(
    layer: nn.Linear, row_NF: Tensor, target_N: Tensor, settings: LinearSettings, tell: OnEpoch
) -> None:
    optimiser = torch.optim.LBFGS(
        layer.parameters(), max_iter=settings.epochs, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimiser.zero_grad()
        penalty = settings.weight_decay * layer.weight.square().sum()
        loss = cross_entropy(layer(row_NF), target_N) + penalty
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimiser.step(closure)  # type: ignore[no-untyped-call]
    tell(settings.epochs, settings.epochs)
