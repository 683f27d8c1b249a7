"""What a method is: views and a memory in, a loss and keys for the memory out.

Shapes: V views, B samples, C channels, H height, W width, D embedding, F features, b images encoded
at a time, M = V - 1 positives, A = V B anchors where each view is one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stream_ssl.batch import Batch
from stream_ssl.losses import Loss, LossOutput
from stream_ssl.losses.base import check_choice
from stream_ssl.methods.norm import Statistics, keep_frozen, normalising_by

if TYPE_CHECKING:
    from stream_ssl.memory import WorkingMemory

Transform = Callable[[Tensor], Tensor]
"""uint8 images [b, C, H, W] of the memory to what the encoder takes."""


def repeated(batch: Batch[Tensor], times: int) -> Batch[Tensor]:
    """Ids, hashes and labels of a batch, repeated as a whole."""
    return Batch(
        batch.ids_B.repeat(times),
        None if batch.hashes_B is None else batch.hashes_B.repeat(times),
        None if batch.labels_B is None else batch.labels_B.repeat(times),
    )


@dataclass(frozen=True, slots=True)
class MethodOutput:
    """`keys_BD`: detached unit rows in float32, which the memory stores for these samples."""

    loss: LossOutput
    keys_BD: Tensor


class Method(nn.Module, ABC):
    """A way of learning. The learner does not know which it runs.

    Args:
        encoder: images to features.
        projector: features to embeddings; states its `dim`.
        loss: what is minimised.
        views: augmented views of each sample that `forward` takes: an anchor and its positives.
        key_statistics: what BatchNorm uses where images are encoded for the memory alone: the
            statistics of their "batch", as anchors have them, or the running "average".

    Raises:
        ValueError: an argument outside its range, or a loss or projector that does not fit.
    """

    contrasts: ClassVar[bool] = True
    """Whether anchors are pushed away from negatives; then the loss must use them, else it must
    not."""
    needs_images: ClassVar[bool] = False
    """Whether the memory must keep images."""

    def __init__(
        self,
        encoder: nn.Module,
        projector: nn.Module,
        loss: Loss,
        views: int = 2,
        key_statistics: Statistics = "batch",
    ) -> None:
        super().__init__()
        if views < 2:
            raise ValueError(f"views is {views}: an anchor and at least one positive need 2")
        dim = getattr(projector, "dim", None)
        if not isinstance(dim, int):
            raise ValueError(f"{type(projector).__name__} has no `dim`: a projector states its own")
        check_choice("key_statistics", key_statistics, ("batch", "average"))
        self._check_loss(loss)
        self.encoder, self.projector, self.loss = encoder, projector, loss
        self.views, self.key_statistics = views, key_statistics
        self.dim = dim
        """D, which the memory must share."""
        Method.train(self)

    @abstractmethod
    def forward(
        self, view_VBCHW: Sequence[Tensor], samples: Batch[Tensor], memory: WorkingMemory
    ) -> MethodOutput:
        """Loss of a batch. The memory is only read; see `prepare` for what may change it."""

    @property
    def key_networks(self) -> tuple[nn.Module, nn.Module]:
        """The encoder and the projector of keys."""
        return self.encoder, self.projector

    @torch.no_grad()
    def encode_keys(self, image_BCHW: Tensor) -> Tensor:
        """Detached unit rows [B, D] as the memory holds them; changes no state."""
        encoder, projector = self.key_networks
        with normalising_by(self.key_statistics, encoder, projector):
            return unit(projector(encoder(image_BCHW)))

    @torch.no_grad()
    def features(self, image_BCHW: Tensor) -> Tensor:
        """The encoder's features [B, F] for evaluation: no gradient, running statistics."""
        was_training = self.encoder.training
        self.encoder.eval()
        try:
            feature_BF: Tensor = self.encoder(image_BCHW)
        finally:
            self.encoder.train(was_training)
            keep_frozen(self.encoder)
        return feature_BF.float()

    def train(self, mode: bool = True) -> Self:
        """As for any module, but frozen stages stay in evaluation mode."""
        super().train(mode)
        keep_frozen(self)
        return self

    @property
    def trained(self) -> Iterable[nn.Parameter]:
        """The parameters that the optimiser updates."""
        return [parameter for parameter in self.parameters() if parameter.requires_grad]

    @property
    def needs_labels(self) -> bool:
        """Whether the loss reads labels: an oracle, for experiments."""
        return self.loss.needs_labels

    def begin(self, step: int) -> None:
        """Called before each update with the learner's step: schedules are functions of it alone,
        so that a resumed run repeats."""
        self.loss.begin(step)

    def prepare(self, memory: WorkingMemory, transform: Transform) -> None:
        """Called before each `forward`, for methods that encode the memory again.

        Args:
            memory: its embeddings may be refreshed.
            transform: makes the memory's images what the encoder takes.
        """
        del memory, transform

    def after_update(self) -> None:
        """Called after each optimiser step; a momentum encoder follows here."""

    def check(self, memory: WorkingMemory, batch: int | None = None) -> None:
        """ValueError unless the method can work with this memory, and batches of so many samples
        where that is known. Called before anything starts."""
        del batch
        if self.dim != memory.dim:
            raise ValueError(
                f"the method embeds in {self.dim} dimensions, the memory holds {memory.dim}: "
                "give both the same dim"
            )
        if self.needs_images and memory.images is None:
            raise ValueError(
                f"{type(self).__name__} encodes the memory's images at each step, and this one "
                "keeps none: give it image_shape"
            )

    def check_views(self, view_VBCHW: Sequence[Tensor]) -> None:
        """ValueError unless there are as many as this method takes."""
        if len(view_VBCHW) != self.views:
            raise ValueError(f"got {len(view_VBCHW)} views: this method wants {self.views}")

    def _check_loss(self, loss: Loss) -> None:
        chosen, name = type(loss).__name__, type(self).__name__
        if self.contrasts and not loss.uses_negatives:
            raise ValueError(
                f"{chosen} uses no negatives, and without them {name} collapses to one point: "
                "choose a contrastive loss such as InfoNCE, or the method BYOL or SimSiam"
            )
        if not self.contrasts and loss.uses_negatives:
            raise ValueError(
                f"{chosen} needs negatives, and {name} has none: choose NegativeCosine, or a "
                "contrastive method such as MoCo or SimCLR"
            )


def others(z_AD: Tensor, views: int) -> Tensor:
    """The other views of each anchor's sample, [A, M, D]; anchors are ordered view by view."""
    z_VBD = z_AD.view(views, -1, z_AD.shape[1])
    shifted = [z_VBD.roll(-shift, dims=0).flatten(0, 1) for shift in range(1, views)]
    return torch.stack(shifted, dim=1)


def unit(z_BD: Tensor) -> Tensor:
    """Rows of unit norm."""
    # In float32 whatever autocast computed: the memory refuses rows that are off unit norm.
    return F.normalize(z_BD.float(), dim=1)
