"""What a method is: views and a memory in, a loss and keys for the memory out.

Shapes: B samples, C channels, H height, W width, D embedding, F features, N negatives.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn

from stream_ssl.losses import LossOutput

if TYPE_CHECKING:
    from memory import WorkingMemory


@dataclass(frozen=True, slots=True)
class MethodOutput:
    """`keys_BD`: detached unit rows in float32, what the memory is given for these samples."""

    loss: LossOutput
    keys_BD: Tensor


class Method(nn.Module, ABC):
    """A way of learning. The learner does not know which it runs.

    `views` is how many augmented views of each sample `forward` wants.
    """

    views: int = 2

    @abstractmethod
    def forward(
        self,
        view_VBCHW: Sequence[Tensor],
        ids_B: Tensor,
        hashes_B: Tensor | None,
        memory: WorkingMemory,
    ) -> MethodOutput:
        """Loss of the batch against its own keys and the memory, which is only read."""

    @abstractmethod
    def encode_keys(self, image_BCHW: Tensor) -> Tensor:
        """Detached unit rows [B, D] as the memory holds them; changes no state."""

    @abstractmethod
    def features(self, image_BCHW: Tensor) -> Tensor:
        """The encoder's features [B, F] for evaluation: no gradient, running statistics."""

    @property
    @abstractmethod
    def trained(self) -> Iterable[nn.Parameter]:
        """What the optimiser updates."""

    @property
    @abstractmethod
    def dim(self) -> int:
        """D, which the memory must share."""

    def after_update(self) -> None:
        """Called after each optimiser step; a momentum encoder follows here."""
