"""Methods of continual self-supervised learning, as baselines of the study.

Each baseline is the study's MoCo with the changes that its paper describes. The runs of the study
have no tasks, so no baseline knows when the classes of its stream change. The weights of losses
are the defaults in the authors' public code. They are not tuned here.

Shapes: V views, B samples of the stream, R samples of the memory, C channels, H height, W width, D
embedding, A = V B anchors if each view is one.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stream_ssl.batch import Batch
from stream_ssl.learning.step import draw_batch
from stream_ssl.losses import Loss, LossOutput
from stream_ssl.memory import WorkingMemory
from stream_ssl.methods import MethodOutput, MoCo
from stream_ssl.methods.base import Transform, repeated, unit
from stream_ssl.methods.momentum import move_towards
from stream_ssl.methods.negatives import batch_negatives, contrast
from stream_ssl.methods.norm import forget_statistics, freeze
from stream_ssl.methods.simsiam import Predictor


def compared(
    loss: Loss,
    anchor_BD: Tensor,
    target_BD: Tensor,
    samples: Batch[Tensor],
    negative_ND: Tensor | None = None,
    others: Batch[Tensor] | None = None,
) -> LossOutput:
    """Return the loss of anchors with one target each.

    Args:
        target_BD: unit rows; row b is the positive of anchor b.
        negative_ND: the negatives. If it is None, they are the targets of the other samples.
        others: ids and hashes of the negatives. If it is None, they are those of `samples`.
    """
    rows_ND = target_BD if negative_ND is None else negative_ND
    negatives = batch_negatives(rows_ND, samples, samples if others is None else others)
    return loss(anchor_BD, target_BD.unsqueeze(1), negatives.negative, negatives.mask_BN)


def added(loss: LossOutput, other: Tensor, weight: float) -> LossOutput:
    """Return `loss + weight * other`. Each anchor's loss contains the other loss, a scalar."""
    more = weight * other
    return LossOutput(loss.loss + more, loss.per_anchor + more, loss.diagnostics)


class Distilled(MoCo):
    """MoCo with the distillation of CaSSLe (Fini et al. 2022, arXiv 2112.04215).

        L = L_MoCo(z, k) + weight L_D,    L_D = -log(e^{g(z) . p / t} / sum_j e^{g(z) . p_j / t})

    z is the projection of the anchor, and g is a predictor. p is the projection of the same view by
    a frozen copy of encoder and projector. p_j are these projections of all samples of the batch.

    CaSSLe freezes its copy at the end of each task. A stream has no tasks, so here the copy is
    renewed every `period` updates. There is no distillation before the first renewal, as in
    CaSSLe's first task. MoCo trains on one view, so one view is distilled. The method needs no
    samples of the past.

    Args:
        period: updates between two renewals of the copy. With 480, 2,400 updates have the five
            parts that CaSSLe's runs have.
    """

    def __init__(
        self,
        encoder: nn.Module,
        projector: nn.Module,
        loss: Loss,
        *,
        period: int = 480,
        weight: float = 1.0,
        hidden: int = 2048,
        **common: Any,
    ) -> None:
        super().__init__(encoder, projector, loss, **common)
        if period < 1:
            raise ValueError(f"period is {period}: the copy is renewed after 1 update or more")
        self.period, self.weight = period, weight
        self.predictor = Predictor(self.dim, hidden)
        self.past = nn.Sequential(copy.deepcopy(encoder), copy.deepcopy(projector))
        freeze(self.past)
        self.distils = False

    def begin(self, step: int) -> None:
        """Set the step, and renew the frozen copy if this is due."""
        super().begin(step)
        self.distils = step >= self.period
        if self.distils and step % self.period == 0:
            for past, now in zip(self.past, (self.encoder, self.projector), strict=True):
                past.load_state_dict(now.state_dict())

    def forward(
        self, view_VBCHW: Sequence[Tensor], samples: Batch[Tensor], memory: WorkingMemory
    ) -> MethodOutput:
        self.check_views(view_VBCHW, samples)
        z_BD = self.projector(self.encoder(view_VBCHW[0]))
        output = self.contrasted(unit(z_BD), view_VBCHW, samples, memory)
        if not self.distils:
            return output
        with torch.no_grad():
            past_BD = unit(self.past(view_VBCHW[0]))
        distilled = compared(self.loss, unit(self.predictor(z_BD)), past_BD, samples)
        return MethodOutput(added(output.loss, distilled.loss, self.weight), output.keys_BD)


class Replaying(MoCo):
    """MoCo that trains on samples of the stream together with samples drawn from the memory.

    An update trains on as many samples as MoCo's: R samples of the memory take the places of the
    last R samples of the batch. All samples of the batch join the memory.

    Args:
        augment: makes a view of the memory's images.
        replayed: R. Updates train on the stream alone while the memory holds fewer samples.

    Attributes:
        replay: views and samples that `prepare` drew for the next update, or None.
    """

    needs_images = True

    def __init__(
        self,
        encoder: nn.Module,
        projector: nn.Module,
        loss: Loss,
        *,
        augment: Transform,
        replayed: int,
        **common: Any,
    ) -> None:
        super().__init__(encoder, projector, loss, **common)
        self.augment, self.replayed = augment, replayed
        self.replay: tuple[list[Tensor], Batch[Tensor]] | None = None

    def prepare(self, memory: WorkingMemory, transform: Transform) -> None:
        """Draw the samples of the memory, uniformly, and augment them."""
        del transform
        self.replay = None
        if len(memory) >= self.replayed:
            drawn = draw_batch(memory, self.replayed, next(self.parameters()).device)
            images_RCHW = drawn.images_BCHW
            assert images_RCHW is not None, "`needs_images` says so"
            self.replay = [self.augment(images_RCHW) for _ in range(self.views)], drawn

    def mixed(
        self, view_VBCHW: Sequence[Tensor], samples: Batch[Tensor]
    ) -> tuple[list[Tensor], Batch[Tensor], Batch[Tensor] | None]:
        """Return the views and samples to train on, and the samples of the memory among them.

        The samples of the memory are the last ones. None: there are none yet.
        """
        if self.replay is None:
            return list(view_VBCHW), samples, None
        kept = samples[: max(0, len(samples) - self.replayed)]
        again_VRCHW, drawn = self.replay
        views = [
            torch.cat([view[: len(kept)], again])
            for view, again in zip(view_VBCHW, again_VRCHW, strict=True)
        ]
        assert kept.hashes_B is not None, "0 where there are none"
        assert drawn.hashes_B is not None, "0 where there are none"
        hashes_B = torch.cat([kept.hashes_B, drawn.hashes_B])
        return views, Batch(torch.cat([kept.ids_B, drawn.ids_B]), hashes_B), drawn

    def stored(self, key_BD: Tensor, view_BCHW: Tensor) -> Tensor:
        """Return the keys of all samples of the stream. `key_BD` are the keys of the first ones."""
        rest_BCHW = view_BCHW[len(key_BD) :]
        return torch.cat([key_BD, self.encode_keys(rest_BCHW)]) if len(rest_BCHW) else key_BD


class Aligned(Replaying):
    """MoCo with the alignment of CLA (Cignoni et al. 2025, arXiv 2507.10434), its variant CLA-E.

        L = L_MoCo(z, k) + weight L_A,    L_A = -log(e^{g(z) . p / t} / sum_j e^{g(z) . p_j / t})

    L_MoCo is the mean over samples of the stream and of the memory. L_A is the mean over samples of
    the memory alone. p is the projection of the anchor's view by a slow average of the trained
    network, and g is a predictor, which the paper calls the aligner. The alignment has the form of
    the base method's loss, as in the authors' code. Their base methods are SimSiam and BYOL, and
    here it is MoCo.

    Args:
        past_momentum: share of the slow average that each update keeps.
    """

    def __init__(
        self,
        encoder: nn.Module,
        projector: nn.Module,
        loss: Loss,
        *,
        past_momentum: float = 0.999,
        weight: float = 0.1,
        hidden: int = 512,
        **common: Any,
    ) -> None:
        super().__init__(encoder, projector, loss, **common)
        self.past_momentum, self.weight = past_momentum, weight
        self.predictor = Predictor(self.dim, hidden)
        self.past = nn.Sequential(copy.deepcopy(encoder), copy.deepcopy(projector))
        self.past.requires_grad_(False)
        forget_statistics(self.past)

    @torch.no_grad()
    def after_update(self) -> None:
        super().after_update()
        for past, now in zip(self.past, (self.encoder, self.projector), strict=True):
            move_towards(now, past, 1 - self.past_momentum)

    def forward(
        self, view_VBCHW: Sequence[Tensor], samples: Batch[Tensor], memory: WorkingMemory
    ) -> MethodOutput:
        self.check_views(view_VBCHW, samples)
        views, together, drawn = self.mixed(view_VBCHW, samples)
        z_BD = self.projector(self.encoder(views[0]))
        output = self.contrasted(unit(z_BD), views, together, memory)
        if drawn is None:
            return output
        stream = len(together) - len(drawn)
        with torch.no_grad():
            past_RD = unit(self.past(views[0][stream:]))
        aligned = compared(self.loss, unit(self.predictor(z_BD[stream:])), past_RD, drawn)
        key_BD = self.stored(output.keys_BD[:stream], view_VBCHW[1])
        return MethodOutput(added(output.loss, aligned.loss, self.weight), key_BD)


class Osiris(Replaying):
    """MoCo with the three losses of Osiris (Zhang et al. 2024, arXiv 2404.19132), variant Osiris-R.

        L = L_current + (L_cross + L_past) / 2

    L_current compares samples of the stream with each other, after the projector. L_cross and
    L_past use a second projector. L_cross compares samples of the stream with samples of the
    memory, as the mean of both directions. L_past compares samples of the memory with each other.
    Each comparison is InfoNCE with keys of a slow average, as in MoCo. The authors use SimCLR.

    Osiris uses L_current alone in its first task, and then copies the second projector from the
    first. A stream has no tasks, so here the second projector begins as a copy of the first. All
    losses are used as soon as the memory has R samples.
    """

    def __init__(self, encoder: nn.Module, projector: nn.Module, loss: Loss, **common: Any) -> None:
        super().__init__(encoder, projector, loss, **common)
        self.second = copy.deepcopy(projector)
        self.key_second = copy.deepcopy(projector).requires_grad_(False)
        forget_statistics(self.key_second)

    @torch.no_grad()
    def after_update(self) -> None:
        super().after_update()
        move_towards(self.second, self.key_second, 1 - self.momentum)

    def forward(
        self, view_VBCHW: Sequence[Tensor], samples: Batch[Tensor], memory: WorkingMemory
    ) -> MethodOutput:
        del memory
        self.check_views(view_VBCHW, samples)
        views, together, drawn = self.mixed(view_VBCHW, samples)
        stream = len(together) - (0 if drawn is None else len(drawn))
        feature_BF = self.encoder(views[0])
        key_BD, key_feature_BF = self.encode_newcomers(views[1])
        z_BD = unit(self.projector(feature_BF[:stream]))
        new = samples[:stream]
        loss = compared(self.loss, z_BD, key_BD[:stream], new)
        if drawn is None:
            return MethodOutput(loss, key_BD)
        with torch.no_grad():
            target_BD = unit(self.key_second(key_feature_BF))
        anchor_BD = unit(self.second(feature_BF))
        z_BD, u_RD = anchor_BD[:stream], anchor_BD[stream:]
        z_key_BD, u_key_RD = target_BD[:stream], target_BD[stream:]
        loss = added(loss, compared(self.loss, z_BD, z_key_BD, new, u_key_RD, drawn).loss, 1 / 4)
        loss = added(loss, compared(self.loss, u_RD, u_key_RD, drawn, z_key_BD, new).loss, 1 / 4)
        loss = added(loss, compared(self.loss, u_RD, u_key_RD, drawn).loss, 1 / 2)
        return MethodOutput(loss, self.stored(key_BD[:stream], view_VBCHW[1]))


class MultiPatches(MoCo):
    """MoCo with the many views of CMP (Cignoni et al. 2025, arXiv 2502.09140).

        L = mean_v L_MoCo(z_v, k) - weight R,
        R = mean_v log det(I + D / (B precision^2) Z_v^T Z_v) / 2

    Z_v are the embeddings [B, D] of view v. The target k of all views of a sample is the mean of
    the keys of these views. R is the total coding rate, which is large if embeddings fill the
    space. CMP extends other methods. Its paper uses SimSiam and BYOL, and the authors' public code
    also SimCLR, whose weights are used here. In that code the losses have the weights 200 and
    0.005, and 0.2 is the precision.

    The method needs no samples of the past, and MoCo's queue holds no images.

    Args:
        views: V, 20 in the authors' runs. With 16, an update encodes as many views of 8 samples as
            MoCo encodes of 128.
    """

    def __init__(
        self,
        encoder: nn.Module,
        projector: nn.Module,
        loss: Loss,
        *,
        views: int = 16,
        weight: float = 0.005 / 200,
        precision: float = 0.2,
        **common: Any,
    ) -> None:
        super().__init__(encoder, projector, loss, views=views, **common)
        self.weight, self.precision = weight, precision

    def forward(
        self, view_VBCHW: Sequence[Tensor], samples: Batch[Tensor], memory: WorkingMemory
    ) -> MethodOutput:
        self.check_views(view_VBCHW, samples)
        view_ACHW, anchors = torch.cat(list(view_VBCHW)), repeated(samples, self.views)
        z_AD = unit(self.projector(self.encoder(view_ACHW)))
        key_VBD = self.encode_keys(view_ACHW).unflatten(0, (self.views, -1))
        target_BD = unit(key_VBD.mean(dim=0))
        of_batch = batch_negatives(target_BD, anchors, samples)
        negatives = of_batch.concat(self.memory_negatives.draw(z_AD, anchors, memory))
        target_AMD = target_BD.repeat(self.views, 1).unsqueeze(1)
        loss = contrast(self.loss, z_AD, anchors.ids_B, target_AMD, negatives, memory)
        rate = self.coding_rate(z_AD.unflatten(0, (self.views, -1)))
        return MethodOutput(added(loss, rate, -self.weight), target_BD)

    def coding_rate(self, z_VBD: Tensor) -> Tensor:
        """Return R, a scalar. The determinant of size B equals that of size D, and B is small."""
        share = self.dim / (z_VBD.shape[1] * self.precision**2)
        product_VBB = torch.eye(z_VBD.shape[1], device=z_VBD.device) + share * z_VBD @ z_VBD.mT
        return torch.logdet(product_VBB).mean() / 2


METHODS: Mapping[str, type[MoCo]] = {
    "moco": MoCo,
    "cassle": Distilled,
    "cmp": MultiPatches,
    "cla": Aligned,
    "osiris": Osiris,
}
"""Methods by name."""
