"""D-MoCo: momentum contrast against a working memory.

Shapes: V views, B samples, C channels, H height, W width, D embedding, F features, M positives,
K memory slots, n of them drawn, N = B + n negatives.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stream_ssl.losses import Loss
from stream_ssl.methods.base import Method, MethodOutput

if TYPE_CHECKING:
    from memory import WorkingMemory
    from memory.draws import Negatives


class MoCo(Method):
    """Anchors from the trained encoder, keys and memory from a slow average of it.

    DUEL, Algorithm 2, line 8: the negatives of anchor b are the other keys of the batch and the
    memory. Left out are entries of the same sample id or the same content hash (0: unknown).

    BatchNorm: the trained encoder normalises with the statistics of its batch. What the key
    encoder does is `key_statistics`. "batch": it normalises with the statistics of the batch of
    keys and keeps none, so that keys are sound from the first step on; what a key knows of its
    batch can leak to its anchor. "average": it runs on buffers that follow the trained encoder's
    by the same momentum as the weights (as in EMAN, Cai et al. 2021). A key is then a function of
    its own image alone and nothing leaks, but the buffers start far from the truth: for runs of
    many times 1 / (1 - momentum) updates.

    Args:
        encoder: images to features; copied for the keys.
        projector: features to embeddings; states its `dim`.
        loss: of anchors, positives and negatives.
        momentum: share of the key encoder that each update keeps, in [0, 1).
        views: an anchor, and views - 1 positives; the first of these goes to the memory.
        key_statistics: what the key encoder's BatchNorm uses, "batch" or "average", see above.
        negatives: n, slots of the memory that an anchor is compared with; null: all.
        negatives_by: how n are chosen: "uniform"; "hardest", for each anchor those most similar to
            it; "stratified", from each k-means cell as many as from any other. Drawn by torch's
            global generator. The hardest are another set for each anchor: B x N x D numbers.

    Raises:
        ValueError: an argument outside its range.
    """

    def __init__(
        self,
        encoder: nn.Module,
        projector: nn.Module,
        loss: Loss,
        momentum: float = 0.99,
        views: int = 2,
        key_statistics: Literal["average", "batch"] = "batch",
        negatives: int | None = None,
        negatives_by: Literal["uniform", "hardest", "stratified"] = "uniform",
    ) -> None:
        super().__init__()
        _check_negatives(negatives, negatives_by)
        self.negatives, self.negatives_by = negatives, negatives_by
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum is {momentum}: the key encoder follows only within [0, 1)")
        if views < 2:
            raise ValueError(f"views is {views}: an anchor and at least one positive need 2")
        self.encoder, self.projector, self.loss = encoder, projector, loss
        self.momentum, self.views = momentum, views
        dim = getattr(projector, "dim", None)
        if not isinstance(dim, int):
            raise ValueError(f"{type(projector).__name__} has no `dim`: a projector states its own")
        if key_statistics not in ("average", "batch"):
            raise ValueError(f'key_statistics is {key_statistics!r}: choose "average" or "batch"')
        self._dim = dim
        self.key_encoder = copy.deepcopy(encoder).requires_grad_(False)
        self.key_projector = copy.deepcopy(projector).requires_grad_(False)
        if key_statistics == "batch":
            _forget_statistics(self.key_encoder)
            _forget_statistics(self.key_projector)
        self.train()

    def forward(
        self,
        view_VBCHW: Sequence[Tensor],
        ids_B: Tensor,
        hashes_B: Tensor | None,
        memory: WorkingMemory,
    ) -> MethodOutput:
        if len(view_VBCHW) != self.views:
            raise ValueError(f"got {len(view_VBCHW)} views: this method wants {self.views}")
        z_BD = _unit(self.projector(self.encoder(view_VBCHW[0])))
        positive_BMD = torch.stack([self.encode_keys(view) for view in view_VBCHW[1:]], dim=1)
        key_BD = positive_BMD[:, 0]
        held = self._held(z_BD, ids_B, hashes_B, memory)
        z_nD = held.z_ND.to(key_BD)
        other_BD = key_BD.expand(len(z_nD), -1, -1) if z_nD.ndim == 3 else key_BD
        negative = torch.cat([other_BD, z_nD], dim=-2)
        mask_BN = torch.cat(
            [_same(ids_B, hashes_B), memory.mask(ids_B, hashes_B, held).to(ids_B.device)], dim=1
        )
        return MethodOutput(self.loss(z_BD, positive_BMD, negative, mask_BN), key_BD)

    def _held(
        self, z_BD: Tensor, ids_B: Tensor, hashes_B: Tensor | None, memory: WorkingMemory
    ) -> Negatives:
        """Of the memory, what the anchors are compared with."""
        if self.negatives is None:
            return memory.negatives()
        if self.negatives_by == "hardest":
            return memory.negatives(
                self.negatives,
                how="hardest",
                anchors=z_BD.detach(),
                ids_B=ids_B,
                hashes_B=hashes_B,
                each=True,
            )
        # Not by the memory's own generator: a forward pass leaves the memory as it is.
        drawn_by = torch.default_generator
        return memory.negatives(self.negatives, drawn_by, how=self.negatives_by)

    @torch.no_grad()
    def encode_keys(self, image_BCHW: Tensor) -> Tensor:
        return _unit(self.key_projector(self.key_encoder(image_BCHW)))

    @torch.no_grad()
    def features(self, image_BCHW: Tensor) -> Tensor:
        was_training = self.encoder.training
        self.encoder.eval()
        try:
            feature_BF: Tensor = self.encoder(image_BCHW)
        finally:
            self.encoder.train(was_training)
        return feature_BF.float()

    @torch.no_grad()
    def after_update(self) -> None:
        share = 1 - self.momentum
        for followed, follower in (
            (self.encoder, self.key_encoder),
            (self.projector, self.key_projector),
        ):
            weights: list[Tensor] = list(follower.parameters())
            if weights:
                sources: list[Tensor] = list(followed.parameters())
                torch._foreach_lerp_(weights, sources, share)
            sources_by_name = dict(followed.named_buffers())
            for name, buffer in follower.named_buffers():
                if buffer.is_floating_point():
                    buffer.lerp_(sources_by_name[name], share)
                else:
                    buffer.copy_(sources_by_name[name])

    def train(self, mode: bool = True) -> MoCo:
        """As for any module, but the key encoder stays in evaluation mode."""
        super().train(mode)
        self.key_encoder.eval()
        self.key_projector.eval()
        return self

    @property
    def trained(self) -> Iterable[nn.Parameter]:
        return [*self.encoder.parameters(), *self.projector.parameters()]

    @property
    def dim(self) -> int:
        return self._dim


def _check_negatives(negatives: int | None, negatives_by: str) -> None:
    if negatives is not None and negatives < 1:
        raise ValueError(f"negatives is {negatives}: at least 1 of the memory, or null for all")
    if negatives_by not in ("uniform", "hardest", "stratified"):
        raise ValueError(
            f'negatives_by is {negatives_by!r}: choose "uniform", "hardest" or "stratified"'
        )
    if negatives is None and negatives_by != "uniform":
        raise ValueError(
            f"negatives_by={negatives_by!r} chooses among the memory, and all of it is taken: say "
            "how many with negatives"
        )


def _unit(z_BD: Tensor) -> Tensor:
    # In float32 whatever autocast computed: the memory refuses rows that are off unit norm.
    return F.normalize(z_BD.float(), dim=1)


def _same(ids_B: Tensor, hashes_B: Tensor | None) -> Tensor:
    """[B, B], True on the diagonal and where two rows show the same sample or content."""
    same_BB = ids_B.unsqueeze(1) == ids_B
    if hashes_B is not None:
        same_BB |= (hashes_B.unsqueeze(1) == hashes_B) & (hashes_B != 0)
    return same_BB


def _forget_statistics(module: nn.Module) -> None:
    """Let every BatchNorm use the statistics of its batch, in evaluation mode too."""
    for layer in module.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            layer.track_running_stats = False
            layer.running_mean = layer.running_var = layer.num_batches_tracked = None
