"""What is measured while a run learns.

Shapes: B samples, K memory slots, D embedding, C classes.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributions import Beta

from memory import WorkingMemory
from stream_ssl.learning.records import StepRecord
from stream_ssl.losses import SelfLabeling
from stream_ssl.losses.debiased import PriorCorrected
from stream_ssl.losses.schedules import value_at
from stream_ssl.methods import Method, SelfLabelingMoCo
from stream_ssl.methods.negatives import prior

LOOKS = 20  # at a run


class Watch:
    """Looks at a run about twenty times; means are of its second half.

    Attributes of `numbers`, where the run has them:
        entropy: of the memory's classes, as a share of the greatest.
        clamp_rate: share of anchors whose estimate fell to the loss's floor.
        prior: mean tau+ that the loss used.
        prior_true: mean share of the anchor's class in the memory.
        prior_error: mean distance of these two.
        prior_measured, prior_correlation: what the memory measures, and its correlation with the
            truth over anchors.
        label_error: mean |y - y*| of soft labels.
        even_error: that of the one-hot label with as much mass spread evenly over all keys.
        nearer_than_even: even_error - label_error.
        mixed_error: label_error after mixup.
        label_mass: share of y on keys of the anchor's class.
        accuracy: what the callable given gives.
    """

    def __init__(
        self,
        method: Method,
        memory: WorkingMemory,
        classes: int,
        steps: int,
        accuracy: Callable[[], float] | None = None,
    ) -> None:
        self._method, self._memory, self._classes = method, memory, classes
        self._accuracy = accuracy
        self._steps, self._every = steps, max(1, steps // LOOKS)
        self.traces: dict[str, list[tuple[int, float]]] = {}

    def look(self, record: StepRecord) -> None:
        """Called after each step."""
        if record.step % self._every and record.step != self._steps:
            return
        found = {"loss": record.loss, "entropy": self._entropy()}
        if "clamp_rate" in record.diagnostics:
            found["clamp_rate"] = record.diagnostics["clamp_rate"]
        if self._accuracy is not None:
            found["accuracy"] = self._accuracy()
        loss = self._method.loss
        if isinstance(loss, PriorCorrected):
            found |= priors(record, self._memory, loss)
        if isinstance(loss, SelfLabeling):
            mixup = self._method.mixup if isinstance(self._method, SelfLabelingMoCo) else 0.0
            found |= soft_labels(record, self._memory, loss, mixup)
        for name, value in found.items():
            if math.isfinite(value):
                self.traces.setdefault(name, []).append((record.step, value))

    def numbers(self) -> dict[str, float]:
        """Means of the second half."""
        return {
            name: statistics.fmean(value for step, value in trace if 2 * step > self._steps)
            for name, trace in self.traces.items()
            if 2 * trace[-1][0] > self._steps
        }

    def _entropy(self) -> float:
        share_C = torch.bincount(self._memory.labels, minlength=self._classes).double()
        share_C /= share_C.sum()
        return float(torch.special.entr(share_C).sum()) / math.log(self._classes)


def priors(record: StepRecord, memory: WorkingMemory, loss: PriorCorrected) -> dict[str, float]:
    """tau+ as the loss used it, as it is, and how well the memory measures it."""
    same_BK = record.labels_B.cpu()[:, None] == memory.labels.cpu()
    true_B = same_BK.double().mean(dim=1)
    measured_B = memory.prior(record.keys_BD).double().cpu()
    if loss.prior == "memory":
        used_B = prior(record.keys_BD, memory).double().cpu()
    elif isinstance(loss.prior, str):
        used_B = true_B
    else:
        used_B = torch.full_like(true_B, value_at(loss.prior, record.step))
    both_2B = torch.stack([measured_B, true_B])
    varies = len(true_B) > 1 and bool((both_2B.std(dim=1) > 1e-9).all())
    return {
        "prior": float(used_B.mean()),
        "prior_true": float(true_B.mean()),
        "prior_error": float((used_B - true_B).abs().mean()),
        "prior_measured": float(measured_B.mean()),
        "prior_correlation": float(torch.corrcoef(both_2B)[0, 1]) if varies else math.nan,
    }


def soft_labels(
    record: StepRecord, memory: WorkingMemory, loss: SelfLabeling, mixup: float
) -> dict[str, float]:
    """How far the labels are from y*, the same share for each key of the anchor's class.

    The keys are those of the memory, in which the batch's own already are.
    """
    own_BK = record.ids_B[:, None] == memory.ids
    held_B = own_BK.any(dim=1)
    if not bool(held_B.any()):
        return {}
    own_BK, key_BD = own_BK[held_B].double(), record.keys_BD[held_B].double()
    labels_B = record.labels_B.to(memory.device)[held_B]
    same_BK = (labels_B[:, None] == memory.labels).double()
    wrong_BK = _labels(key_BD, memory, loss, own_BK, record.step)
    mass = float((wrong_BK * same_BK).sum(dim=1).mean())
    true_BK = same_BK / same_BK.sum(dim=1, keepdim=True)
    wrong_BK -= true_BK
    soft = value_at(loss.alpha, record.step) + value_at(loss.beta, record.step)
    even_BK = (1 - soft) * own_BK + soft / len(memory) - true_BK
    found = {
        "label_error": float(wrong_BK.norm(dim=1).mean()),
        "even_error": float(even_BK.norm(dim=1).mean()),
        "label_mass": mass,
    }
    found["nearer_than_even"] = found["even_error"] - found["label_error"]
    if mixup:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(record.step)
            theta_B = Beta(mixup, mixup).sample((len(wrong_BK),)).double()[:, None]
            other_B = torch.randperm(len(wrong_BK))
        theta_B = theta_B.to(wrong_BK.device)
        mixed_BK = theta_B * wrong_BK + (1 - theta_B) * wrong_BK[other_B]
        found["mixed_error"] = float(mixed_BK.norm(dim=1).mean())
    return found


def _labels(
    key_BD: Tensor, memory: WorkingMemory, loss: SelfLabeling, own_BK: Tensor, step: int
) -> Tensor:
    """y of each anchor over the memory's keys [B, K] (self-labeling refinement, steps 1 to 3)."""
    alpha, beta = value_at(loss.alpha, step), value_at(loss.beta, step)
    logit_BK = key_BD @ memory.embeddings.double().T / (loss.temperature * loss.sharpening)
    p_BK = logit_BK.softmax(dim=1)
    q_BK = logit_BK.masked_fill(own_BK > 0, -torch.inf).softmax(dim=1)
    return (1 - alpha - beta) * own_BK + alpha * p_BK + beta * q_BK
