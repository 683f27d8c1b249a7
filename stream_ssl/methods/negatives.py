"""The negatives of a batch's anchors, from the batch and the memory, and their masks.

Shapes: B anchors, S keys of the batch, n negatives of the memory, N = S + n, D embedding, M
positives.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from stream_ssl.batch import Batch
from stream_ssl.losses import Loss, LossOutput, Mix
from stream_ssl.losses.base import check_choice
from stream_ssl.memory.checks import Checked
from stream_ssl.memory.draws import same

if TYPE_CHECKING:
    from stream_ssl.memory import WorkingMemory
    from stream_ssl.memory.draws import Negatives

Sampling = Literal["uniform", "hardest", "stratified"]

BATCHES = 2
"""Largest number of memory slots, in batches, that a loss for batch-sized N accepts."""

LARGEST_PRIOR = 0.5

SMOOTHING = 32
"""Strength of the smoothing of each anchor's prior, in slots.

The prior is measured as if the memory had this many more slots with the batch's mean score. With a
full memory the effect is small. With only a few slots an anchor's own mean would be noise.
"""


class NegativeSet(NamedTuple):
    """Negatives [N, D], or [B, N, D] with a set for each anchor, with their masks and labels."""

    negative: Tensor
    mask_BN: Tensor  # True: left out, because it has the anchor's sample id or content hash
    same_BN: Tensor | None  # True: the labels say that it shares the anchor's class
    # On several ranks the columns are this rank's negatives and the rows all ranks' anchors.

    def concat(self, other: NegativeSet) -> NegativeSet:
        """Return these negatives followed by the other ones."""
        anchors = len(self.mask_BN)
        parts = [self.negative, other.negative.to(self.negative)]
        if any(part.ndim == 3 for part in parts):
            parts = [part if part.ndim == 3 else part.expand(anchors, -1, -1) for part in parts]
        same_BN = None
        if self.same_BN is not None and other.same_BN is not None:
            same_BN = torch.cat([self.same_BN, other.same_BN], dim=1)
        mask_BN = torch.cat([self.mask_BN, other.mask_BN], dim=1)
        return NegativeSet(torch.cat(parts, dim=-2), mask_BN, same_BN)


def batch_negatives(key_SD: Tensor, anchors: Batch[Tensor], keys: Batch[Tensor]) -> NegativeSet:
    """Return the keys of a batch; keys with the anchor's own id or content hash are masked."""
    mask_BS = same(anchors.ids_B, anchors.hashes_B, keys.ids_B, keys.hashes_B)
    return NegativeSet(key_SD, mask_BS, same_class(anchors.labels_B, keys.labels_B))


def of_all_ranks(anchors: Batch[Tensor], memory: WorkingMemory) -> Batch[Tensor]:
    """Return ids, hashes and labels of the anchors of all ranks, in order of rank."""
    if memory.group.size == 1:
        return anchors
    known: dict[str, Any] = anchors.columns()
    names = [name for name in ("ids_B", "hashes_B", "labels_B") if name in known]
    columns = memory.group.gather_equal(torch.stack([known[name] for name in names], dim=1))
    known = dict(zip(names, columns.unbind(1), strict=True))
    return Batch(**known)


class MemoryNegatives:
    """A sampler of negatives from the memory.

    Args:
        negatives: number n of memory slots that an anchor is compared with; null: all.
        negatives_by: how the n slots are chosen, with torch's global generator. "uniform": at
            random. "hardest": for each anchor the most similar slots, which needs B x n x D
            numbers. "stratified": equally many from each k-means cell.

    Raises:
        ValueError: an argument is outside its range.
    """

    def __init__(self, negatives: int | None, negatives_by: Sampling) -> None:
        if negatives is not None and negatives < 1:
            raise ValueError(f"negatives is {negatives}: at least 1 of the memory, or null for all")
        check_choice("negatives_by", negatives_by, ("uniform", "hardest", "stratified"))
        if negatives is None and negatives_by != "uniform":
            raise ValueError(
                f"negatives_by={negatives_by!r} picks from the memory, and all of it is taken: "
                "say how many with negatives"
            )
        self.negatives, self.negatives_by = negatives, negatives_by

    def draw(self, z_BD: Tensor, anchors: Batch[Tensor], memory: WorkingMemory) -> NegativeSet:
        """Return negatives for these anchors; slots with the anchor's own id or content are masked.

        Args:
            z_BD: the anchors of this rank.
            anchors: ids, hashes and labels of the anchors of all ranks.
            memory: the memory to draw from; each rank draws its part from its own shard.
        """
        drawn = self._draw(z_BD, anchors, memory)
        device = anchors.ids_B.device
        mask_Bn = drawn.mask(anchors.ids_B, anchors.hashes_B).to(device)
        labels_n = None if anchors.labels_B is None else self._labels(drawn, memory).to(device)
        return NegativeSet(drawn.z_ND.to(device), mask_Bn, same_class(anchors.labels_B, labels_n))

    def check(self, loss: Loss, memory: WorkingMemory, batch: int | None, views: int = 1) -> None:
        """Raise ValueError unless the memory has enough slots and the loss accepts the number.

        Args:
            loss: the loss that uses the negatives.
            memory: the memory to draw from.
            batch: number of samples in a batch on each rank, if known.
            views: number of views of each sample that are negatives too.
        """
        capacity, ranks = memory.capacity_of_all, memory.group.size
        if ranks > 1 and self.negatives_by == "hardest":
            raise ValueError(
                f"negatives_by='hardest' chooses for each anchor in one process, and {ranks} ranks "
                'hold the memory: choose "uniform" or "stratified"'
            )
        if self.negatives is not None and self.negatives > capacity:
            raise ValueError(
                f"negatives is {self.negatives} and the memory holds {capacity}: ask for at most "
                "as many, or null for all"
            )
        if batch is not None:
            drawn = capacity if self.negatives is None else self.negatives
            check_size(loss, batch * ranks, views, drawn)

    def _draw(self, z_BD: Tensor, anchors: Batch[Tensor], memory: WorkingMemory) -> Negatives:
        if self.negatives is None:
            return memory.negatives()
        if self.negatives_by == "hardest":
            return memory.negatives(
                self.negatives,
                how="hardest",
                anchors=Checked(z_BD.detach()),  # the update checks its own numbers, see weights.py
                ids_B=anchors.ids_B,
                hashes_B=anchors.hashes_B,
                each=True,
            )
        # A forward pass must not change the memory, so it does not use the memory's generator.
        generator = torch.default_generator
        return memory.negatives(
            memory.group.share(self.negatives), generator, how=self.negatives_by
        )

    def _labels(self, drawn: Negatives, memory: WorkingMemory) -> Tensor:
        """Return the labels of the negatives.

        The labels are found by id, because `Negatives` has no slot numbers.
        """
        if self.negatives is None:
            return memory.labels
        ordered = torch.sort(memory.ids)
        at = torch.searchsorted(ordered.values, drawn.ids_N.contiguous())
        return memory.labels[ordered.indices][at]


def check_size(loss: Loss, batch: int, views: int, drawn: int) -> None:
    """Raise ValueError unless the loss accepts this many views of a batch and memory slots."""
    total, most = views * batch + drawn, getattr(loss, "most_negatives", math.inf)
    if loss.batch_sized and (drawn > BATCHES * batch or total > most):
        raise ValueError(
            f"{type(loss).__name__} is made for batch-sized N, and this would be {views} x {batch} "
            f"of the batch and {drawn} of the memory: its gradient vanishes as 1 / (N + 2). Set "
            f"negatives to {batch}, a batch; at most {BATCHES * batch} of the memory, and {most} "
            "in all"
        )


def contrast(
    loss: Loss,
    z_BD: Tensor,
    ids_B: Tensor,
    positive_BMD: Tensor,
    negatives: NegativeSet,
    memory: WorkingMemory,
    mix: Mix | None = None,
) -> LossOutput:
    """Return the loss of the anchors z_BD with the sample ids `ids_B`.

    The loss also gets the labels and the prior that the memory measures, if it reads them.

    Raises:
        ValueError: the loss reads labels, and the batch or the memory has none.
    """
    if loss.needs_labels and negatives.same_BN is None:
        raise ValueError(
            f"{type(loss).__name__} reads labels and there are none: stream labelled samples, or "
            "choose a loss without an oracle"
        )
    return loss(  # type: ignore[no-any-return]
        z_BD,
        positive_BMD,
        negatives.negative,
        negatives.mask_BN,
        same_BN=negatives.same_BN if loss.needs_labels else None,
        prior_B=prior(z_BD, ids_B, memory) if loss.needs_prior else None,
        mix=mix,
        group=memory.group if memory.group.size > 1 else None,
    )


@torch.no_grad()
def prior(z_BD: Tensor, ids_B: Tensor, memory: WorkingMemory) -> Tensor:
    """Return tau+ of each anchor, float32 [B], in [1 / capacity, 0.5].

    tau+ is the anchor's expected collision probability with the memory's embeddings (DUEL,
    Definition 2). It is smoothed with `SMOOTHING` slots of the batch's mean. The slots that hold
    the anchor's own sample do not count: they are masked among the negatives too. Anchors that are
    not finite give values that are not finite, so the update is skipped.
    """
    group = memory.group
    rows_AD, ids_A = group.gather_equal(z_BD.detach()), group.gather_equal(ids_B)
    measured_A = memory.prior(Checked(rows_AD), ids_A).to(z_BD.device, torch.float32)
    slots = memory.occupied_of_all
    prior_A = (slots * measured_A + SMOOTHING * measured_A.mean()) / (slots + SMOOTHING)
    prior_B = prior_A[group.rank * len(z_BD) :][: len(z_BD)]
    return prior_B.clamp(min(1 / memory.capacity_of_all, LARGEST_PRIOR), LARGEST_PRIOR)


def same_class(labels_B: Tensor | None, labels_N: Tensor | None) -> Tensor | None:
    """Return a bool [B, N] that is True if both labels are known (>= 0) and equal.

    The result is None without labels.
    """
    if labels_B is None or labels_N is None:
        return None
    return (labels_B.unsqueeze(1) == labels_N) & (labels_B >= 0).unsqueeze(1)
