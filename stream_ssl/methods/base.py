"""The interface of every method: it takes views and a memory, and returns a loss and keys.

Shapes: V views, B samples, C channels, H height, W width, D embedding, F features, b images encoded
at a time, M = V - 1 positives, A = V B anchors if each view is an anchor.
"""

from __future__ import annotations

import warnings
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
"""Converts uint8 images [b, C, H, W] of the memory to the encoder's input."""


ON_CPU = {"layout_optimization": False}
"""The options of torch.compile on a CPU. Layouts stay as the networks chose them, because oneDNN's
kernels for channels last write past their buffers if channels are few.
"""


def repeated(batch: Batch[Tensor], times: int) -> Batch[Tensor]:
    """Return the batch's ids, hashes and labels, repeated `times` times as a whole."""
    return Batch(
        batch.ids_B.repeat(times),
        None if batch.hashes_B is None else batch.hashes_B.repeat(times),
        None if batch.labels_B is None else batch.labels_B.repeat(times),
    )


@dataclass(frozen=True, slots=True)
class MethodOutput:
    """The result of one forward pass.

    Attributes:
        loss: the losses of the anchors.
        keys_BD: detached unit rows in float32, which the memory stores for the samples.
    """

    loss: LossOutput
    keys_BD: Tensor


class Method(nn.Module, ABC):
    """A self-supervised method, which turns views and a memory into a loss and keys.

    The learner uses every method only through this interface.

    Args:
        encoder: network from images to features.
        projector: network from features to embeddings, with the embedding size in its attribute
            `dim`.
        loss: the loss to minimise.
        views: number of augmented views of each sample: an anchor and its positives, at least 2.
        key_statistics: statistics that BatchNorm uses to encode images only for the memory: "batch"
            for the statistics of these images, as for anchors; "average" for the running averages.

    Raises:
        ValueError: an argument is outside its range, or a loss or projector does not fit.
    """

    contrasts: ClassVar[bool] = True
    """Whether the method pushes anchors away from negatives. The loss must then use negatives;
    otherwise it must not.
    """
    needs_images: ClassVar[bool] = False
    """Whether the memory must store images."""

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
        """D, the embedding size; the memory must have the same size."""
        Method.train(self)

    @abstractmethod
    def forward(
        self, view_VBCHW: Sequence[Tensor], samples: Batch[Tensor], memory: WorkingMemory
    ) -> MethodOutput:
        """Return the loss and the keys of a batch. The memory is only read, see `prepare`.

        Args:
            view_VBCHW: V views of the batch's samples.
            samples: ids, hashes and labels of the samples.
            memory: the source of negatives from the past.
        """

    @property
    def key_networks(self) -> tuple[nn.Module, nn.Module]:
        """The encoder and the projector of the keys."""
        return self.encoder, self.projector

    def encode_keys(self, image_BCHW: Tensor) -> Tensor:
        """Return detached unit rows [B, D], as the memory stores them. This changes no state."""
        return self.encode_newcomers(image_BCHW)[0]

    @torch.no_grad()
    def encode_newcomers(self, image_BCHW: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys of `encode_keys`, and the features [B, F] from which they are made."""
        encoder, projector = self.key_networks
        with normalising_by(self.key_statistics, encoder, projector):
            feature_BF: Tensor = encoder(image_BCHW)
            return unit(projector(feature_BF)), feature_BF.float()

    @torch.no_grad()
    def features(self, image_BCHW: Tensor) -> Tensor:
        """Return the encoder's features [B, F] for evaluation, without gradient.

        BatchNorm uses its running statistics.
        """
        was_training = self.encoder.training
        self.encoder.eval()
        try:
            feature_BF: Tensor = self.encoder.forward(image_BCHW)
        finally:
            self.encoder.train(was_training)
            keep_frozen(self.encoder)
        return feature_BF.float()

    def train(self, mode: bool = True) -> Self:
        """Set the training mode, as for any module, but keep frozen stages in evaluation mode."""
        super().train(mode)
        keep_frozen(self)
        return self

    def compile_encoders(self) -> None:
        """Let torch.compile make kernels for the encoders, which happens at their first calls.

        On a GPU they are replayed as CUDA graphs. `features` stays as it is, because its batches
        have many sizes, and each new size would be compiled.

        Raises:
            ValueError: torch cannot compile here.
        """
        device = next(self.encoder.parameters()).device
        check_compiler(device)
        for encoder in {self.encoder, self.key_networks[0]}:
            if device.type == "cpu":
                encoder.compile(options=ON_CPU)
            else:
                encoder.compile(mode="reduce-overhead")

    @property
    def trained(self) -> Iterable[nn.Parameter]:
        """The parameters that the optimiser updates."""
        return [parameter for parameter in self.parameters() if parameter.requires_grad]

    @property
    def needs_labels(self) -> bool:
        """Whether the loss reads labels. Such a loss is an oracle, for experiments."""
        return self.loss.needs_labels

    def begin(self, step: int) -> None:
        """Set the learner's step before an update.

        Schedules depend only on the step, so a resumed run repeats them.
        """
        self.loss.begin(step)

    def prepare(self, memory: WorkingMemory, transform: Transform) -> None:
        """Prepare for the next `forward`; the learner calls this before each one.

        Methods that encode the memory's images again override it.

        Args:
            memory: the memory, whose embeddings may be refreshed.
            transform: converts the memory's images to the encoder's input.
        """
        del memory, transform

    def after_update(self) -> None:
        """Follow an optimiser step; a method with a momentum encoder moves it here."""

    def check(self, memory: WorkingMemory, batch: int | None = None) -> None:
        """Raise ValueError unless the method can work with this memory.

        The learner calls this before it starts anything.

        Args:
            memory: the memory of the run.
            batch: number of samples in a batch, if known.
        """
        del batch
        if self.dim != memory.dim:
            raise ValueError(
                f"the method embeds in {self.dim} dimensions, the memory holds {memory.dim}: "
                "give both the same dim"
            )
        if self.contrasts and memory.group.size > 1:
            self.loss.check_across_ranks()
        if self.needs_images and memory.images is None:
            raise ValueError(
                f"{type(self).__name__} encodes the memory's images at each step, and this one "
                "keeps none: give it image_shape"
            )

    def check_views(
        self, view_VBCHW: Sequence[Tensor], samples: Batch[Tensor] | None = None
    ) -> None:
        """Raise ValueError unless the number of views is the method's.

        Args:
            view_VBCHW: the views.
            samples: the samples, if known. Each view must then show each of them once.
        """
        if len(view_VBCHW) != self.views:
            raise ValueError(f"got {len(view_VBCHW)} views: this method wants {self.views}")
        if samples is None:
            return
        images = {len(view_BCHW) for view_BCHW in view_VBCHW}
        columns = {"ids_B": samples.ids_B, "hashes_B": samples.hashes_B}
        for name, column_B in (columns | {"labels_B": samples.labels_B}).items():
            if column_B is not None and images != {len(column_B)}:
                raise ValueError(
                    f"{name} has {len(column_B)} rows, and the views have "
                    f"{' and '.join(map(str, sorted(images)))} images: give one row for each image"
                )

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


def check_compiler(device: torch.device) -> None:
    """Raise ValueError unless torch.compile works on this device."""
    try:
        with warnings.catch_warnings(action="ignore"):
            torch.compile(lambda value: value.sin() + 1)(torch.ones(8, device=device))
    except Exception as error:  # of torch, of Triton, or of the compiler
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"learner.compile is true, but torch cannot compile for {device}: {reason}. Install a "
            "C++ compiler such as g++, or set learner.compile to false"
        ) from error


def others(z_AD: Tensor, views: int) -> Tensor:
    """Return the other views of each anchor's sample [A, M, D]. Anchors are sorted by view."""
    z_VBD = z_AD.view(views, -1, z_AD.shape[1])
    shifted = [z_VBD.roll(-shift, dims=0).flatten(0, 1) for shift in range(1, views)]
    return torch.stack(shifted, dim=1)


def unit(z_BD: Tensor) -> Tensor:
    """Return the rows scaled to unit norm, in float32."""
    # Half precision is not exact enough: the memory rejects rows whose norm is not 1.
    return F.normalize(z_BD.float(), dim=1)


def is_unit(z_BD: Tensor) -> Tensor:
    """Return a 0-dimensional bool: all rows are finite and of unit norm, as the memory requires.

    A collapsed encoder can give zeros, which stay zeros in `unit`.
    """
    norm_B = torch.linalg.vector_norm(z_BD, dim=1)
    found: Tensor = ((norm_B - 1).abs() < 1e-3).all()
    return found
