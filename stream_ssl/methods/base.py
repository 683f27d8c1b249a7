"""What a method is: views and a memory in, a loss and keys for the memory out.

Shapes: V views, B samples, C channels, H height, W width, D embedding, F features, b images encoded
at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from stream_ssl.batch import Batch
from stream_ssl.losses import Loss, LossOutput

if TYPE_CHECKING:
    from memory import WorkingMemory

See = Callable[[Tensor], Tensor]
"""uint8 images [b, C, H, W] to what the encoder takes, as the memory's images are to be seen."""


def repeated(batch: Batch[Tensor], times: int) -> Batch[Tensor]:
    """Ids, hashes and labels of a batch so many times, one after the other."""
    return Batch(
        batch.ids_B.repeat(times),
        None if batch.hashes_B is None else batch.hashes_B.repeat(times),
        None if batch.labels_B is None else batch.labels_B.repeat(times),
    )


@dataclass(frozen=True, slots=True)
class MethodOutput:
    """`keys_BD`: detached unit rows in float32, what the memory is given for these samples."""

    loss: LossOutput
    keys_BD: Tensor


class Method(nn.Module, ABC):
    """A way of learning. The learner does not know which it runs.

    Args:
        encoder: images to features.
        projector: features to embeddings; states its `dim`.
        loss: what is minimised.
        views: augmented views of each sample that `forward` wants: an anchor and its positives.

    Raises:
        ValueError: too few views, or a loss or projector that does not fit.
    """

    contrasts: ClassVar[bool] = True
    """Whether anchors are pushed from negatives; then the loss must use them, else it must not."""
    needs_images: ClassVar[bool] = False
    """Whether the memory must keep images."""

    def __init__(self, encoder: nn.Module, projector: nn.Module, loss: Loss, views: int) -> None:
        super().__init__()
        if views < 2:
            raise ValueError(f"views is {views}: an anchor and at least one positive need 2")
        dim = getattr(projector, "dim", None)
        if not isinstance(dim, int):
            raise ValueError(f"{type(projector).__name__} has no `dim`: a projector states its own")
        _check_loss(type(self).__name__, self.contrasts, loss)
        self.encoder, self.projector, self.loss = encoder, projector, loss
        self.views, self._dim = views, dim

    @abstractmethod
    def forward(
        self, view_VBCHW: Sequence[Tensor], samples: Batch[Tensor], memory: WorkingMemory
    ) -> MethodOutput:
        """Loss of a batch. The memory is only read; see `prepare` for what may change it."""

    @abstractmethod
    def encode_keys(self, image_BCHW: Tensor) -> Tensor:
        """Detached unit rows [B, D] as the memory holds them; changes no state."""

    @torch.no_grad()
    def features(self, image_BCHW: Tensor) -> Tensor:
        """The encoder's features [B, F] for evaluation: no gradient, running statistics."""
        was_training = self.encoder.training
        self.encoder.eval()
        try:
            feature_BF: Tensor = self.encoder(image_BCHW)
        finally:
            self.encoder.train(was_training)
        return feature_BF.float()

    @property
    def trained(self) -> Iterable[nn.Parameter]:
        """What the optimiser updates."""
        return [*self.encoder.parameters(), *self.projector.parameters()]

    @property
    def dim(self) -> int:
        """D, which the memory must share."""
        return self._dim

    @property
    def needs_labels(self) -> bool:
        """Whether the loss reads labels: an oracle, for experiments."""
        return self.loss.needs_labels

    def begin(self, step: int) -> None:
        """Called before each update with the learner's step: what follows a schedule is a function
        of it alone, so that a run that resumes repeats itself."""
        self.loss.begin(step)

    def prepare(self, memory: WorkingMemory, see: See) -> None:
        """Called before each `forward`: a method that wants the memory encoded anew does it here.

        Args:
            memory: may be refreshed.
            see: makes the memory's images what the encoder takes.
        """
        del memory, see

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
        """ValueError unless there are as many as this method wants."""
        if len(view_VBCHW) != self.views:
            raise ValueError(f"got {len(view_VBCHW)} views: this method wants {self.views}")


def _check_loss(name: str, contrasts: bool, loss: Loss) -> None:
    given = type(loss).__name__
    if contrasts and not loss.uses_negatives:
        raise ValueError(
            f"{given} uses no negatives, and without them {name} collapses to one point: choose a "
            "contrastive loss such as InfoNCE, or the method BYOL or SimSiam"
        )
    if not contrasts and loss.uses_negatives:
        raise ValueError(
            f"{given} needs negatives, and {name} has none: choose NegativeCosine, or a "
            "contrastive method such as MoCo or SimCLR"
        )
