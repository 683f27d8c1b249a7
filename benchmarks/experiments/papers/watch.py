"""The measurements of a run while it learns.

Shapes: B samples, K memory slots, D embedding, C classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributions import Beta

from stream_ssl.learning.records import StepRecord
from stream_ssl.losses import SelfLabeling
from stream_ssl.losses.debiased import PriorCorrected
from stream_ssl.losses.schedules import value_at
from stream_ssl.memory import WorkingMemory
from stream_ssl.methods import Method, SelfLabelingMoCo
from stream_ssl.methods.negatives import prior

LOOKS = 20  # measurements per run


def measure(
    method: Method,
    memory: WorkingMemory,
    classes: int,
    accuracy: Callable[[], float] | None,
    record: StepRecord,
) -> dict[str, float]:
    """Return the measurements of a step, as far as the run has them.

    - loss: the loss of the step.
    - entropy: the entropy of the memory's classes, divided by the maximum.
    - clamp_rate: the share of anchors whose estimate fell to the loss's floor.
    - accuracy: the value of the given callable.

    The numbers of `priors` and `soft_labels` are added.
    """
    share_C = torch.bincount(memory.labels, minlength=classes).double()
    share_C /= share_C.sum()
    entropy = float(torch.special.entr(share_C).sum()) / math.log(classes)
    found = {"loss": record.loss, "entropy": entropy}
    if "clamp_rate" in record.diagnostics:
        found["clamp_rate"] = record.diagnostics["clamp_rate"]
    if accuracy is not None:
        found["accuracy"] = accuracy()
    loss = method.loss
    if isinstance(loss, PriorCorrected):
        found |= priors(record, memory, loss)
    if isinstance(loss, SelfLabeling):
        mixup = method.mixup if isinstance(method, SelfLabelingMoCo) else 0.0
        found |= soft_labels(record, memory, loss, mixup)
    return found


def priors(record: StepRecord, memory: WorkingMemory, loss: PriorCorrected) -> dict[str, float]:
    """Compare the tau+ that the loss used with the true tau+.

    - prior: the mean tau+ that the loss used.
    - prior_true: the mean share of the anchor's class among the other slots.
    - prior_error: the mean distance of these two.
    - prior_measured: the mean tau+ that the memory measures.
    - prior_correlation: the correlation of the measured and the true tau+ over anchors.
    """
    other_BK = record.ids_B.cpu()[:, None] != memory.ids.cpu()
    same_BK = (record.labels_B.cpu()[:, None] == memory.labels.cpu()) & other_BK
    true_B = same_BK.double().sum(dim=1) / other_BK.sum(dim=1)
    measured_B = memory.prior(record.keys_BD, record.ids_B).double().cpu()
    if loss.prior == "memory":
        used_B = prior(record.keys_BD, record.ids_B, memory).double().cpu()
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
    """Compare the soft labels y with y*, which is the same for each key of the anchor's class.

    The keys are those of the memory, which already contains the batch's own keys.

    - label_error: the mean |y - y*|.
    - even_error: the same for the one-hot label with as much mass spread evenly over all keys.
    - nearer_than_even: even_error - label_error.
    - mixed_error: label_error after mixup.
    - label_mass: the share of y on keys of the anchor's class.
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
    """Return y of each anchor over the memory's keys [B, K].

    See self-labeling refinement, steps 1 to 3.
    """
    alpha, beta = value_at(loss.alpha, step), value_at(loss.beta, step)
    logit_BK = key_BD @ memory.embeddings.double().T / (loss.temperature * loss.sharpening)
    p_BK = logit_BK.softmax(dim=1)
    q_BK = logit_BK.masked_fill(own_BK > 0, -torch.inf).softmax(dim=1)
    return (1 - alpha - beta) * own_BK + alpha * p_BK + beta * q_BK
