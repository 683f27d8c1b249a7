"""Re-encoding: the slots get new embeddings as the encoder changes.

Shapes: D embedding, A descriptor, F features, R slots refreshed, k occupied slots, b images encoded
at a time, C H W image.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from stream_ssl.memory.checks import Array, Checked, check_count, check_embeddings, check_slots
from stream_ssl.memory.compute import changes_memory
from stream_ssl.memory.descriptors import check_features
from stream_ssl.memory.draws import Strata
from stream_ssl.memory.slots import Slots


class Reencoding(Slots):
    """The part of a memory that replaces the embeddings of its samples by newer ones."""

    _strata: Strata
    _drift: Tensor

    def stalest(self, n: int) -> Tensor:
        """Return the n slots with the oldest embeddings, int64. Ties go to the lowest slot."""
        return torch.argsort(self.encoded, stable=True)[: check_count("n", n, least=0)]

    def on_overwrite(self, watch: Callable[[Tensor], None] | None) -> None:
        """Call `watch` before each batch overwrites slots.

        `watch` receives the slots, int64 on the memory's device, while they still hold the old
        samples. Slots from `len(self)` on are empty. None removes the callback.
        """
        self._columns.on_overwrite = watch

    def images_of(self, slots: Array) -> Tensor:
        """Return copies of the images of these slots, uint8 [R, C, H, W], on the memory's device.

        Raises:
            ValueError: the memory keeps no images, or the slots are not distinct and occupied.
        """
        chosen = check_slots(slots, len(self), self.device)
        if self._columns.images is None:
            raise ValueError("this memory keeps no images: give it image_shape")
        return self._columns.images.read(chosen)

    @changes_memory
    def refresh(self, slots: Array, z: Array) -> Tensor:
        """Replace the embeddings of these slots by new embeddings of the same samples.

        Args:
            slots: int64 [R], distinct and occupied.
            z: the new embeddings, unit rows [R, D].

        Returns:
            The drift: the cosine between the old and the new embedding of each slot, float64 [R].

        Raises:
            ValueError: invalid slots or rows, or different numbers of slots and rows.
        """
        chosen = check_slots(slots, len(self), self.device)
        new_RD = check_embeddings(z, self.dim, self.device).to(self.dtype)
        if len(new_RD) != len(chosen):
            raise ValueError(f"{len(chosen)} slots but {len(new_RD)} embeddings: must be as many")
        before_RD = self._columns.embeddings[chosen]
        before_RA = self._columns.descriptors[chosen]
        new_RA = self.descriptor.refreshed(before_RA, new_RD)
        self._columns.refresh(chosen, new_RD, new_RA, self._totals.added)
        if self.descriptor.moves:
            self.eviction.on_update(chosen, before_RA)
        self._strata.changed(len(chosen))
        drift_R = (before_RD * new_RD).sum(dim=1, dtype=torch.float64).clamp_(-1, 1)
        if len(drift_R):
            self._drift = torch.stack([drift_R.mean(), drift_R.min()])
        return drift_R

    @torch.no_grad()
    def reencode(
        self, encode: Callable[[Tensor], Tensor], slots: Array | None = None, batch: int = 256
    ) -> Tensor:
        """Compute new embeddings from the stored images, and return the drift as `refresh` does.

        D-SimCLR encodes all slots again before each step (DUEL, section 4). It is cheaper to encode
        only the `stalest` slots.

        Args:
            encode: a function from uint8 images [b, C, H, W] on the memory's device to unit rows
                [b, D]. It runs without gradient.
            slots: distinct occupied slots. None means all occupied slots.
            batch: the largest number b of images to encode at a time.

        Raises:
            ValueError: the memory keeps no images, or `encode` did not return unit rows. The memory
                is unchanged.
        """
        check_count("batch", batch, least=1)
        every = Checked(torch.arange(len(self), device=self.device))
        chosen = check_slots(every if slots is None else slots, len(self), self.device)
        new_RD = self.embeddings.new_empty(len(chosen), self.dim)
        for start in range(0, len(chosen), batch):
            image_bCHW = self.images_of(Checked(chosen[start : start + batch]))
            z_bD = check_embeddings(encode(image_bCHW), self.dim, self.device)
            if len(z_bD) != len(image_bCHW):
                raise ValueError(
                    f"encode gave {len(z_bD)} rows for {len(image_bCHW)} images: must be one each"
                )
            new_RD[start : start + batch] = z_bD
        return self.refresh(Checked(chosen), new_RD)

    @torch.no_grad()
    def describe_again(self, features: Callable[[Tensor], Tensor], batch: int = 256) -> None:
        """Compute the descriptors of all slots with the present encoder, and count again.

        Call it from time to time if the descriptor reads features, because the encoder changes. On
        several ranks, all ranks must call it, and each must hold a sample.

        Args:
            features: a function from uint8 images [b, C, H, W] on the memory's device to features
                [b, F]. It runs without gradient.
            batch: the largest number b of images to encode at a time. All calls get about as many.

        Raises:
            ValueError: the descriptor reads no features, the memory keeps no images or is empty, or
                `features` did not return one row for each image. The memory is unchanged.
        """
        if not self.descriptor.needs_features:
            raise ValueError(f"{self.descriptor!r} reads no features: leave it out")
        if not len(self):
            raise ValueError("the memory is empty: add samples before you describe them again")
        every = torch.arange(len(self), device=self.device)
        parts = []
        for slots in every.tensor_split(-(-len(every) // check_count("batch", batch, least=1))):
            image_bCHW = self.images_of(Checked(slots))
            parts.append(check_features(features(image_bCHW), len(slots), self.device))
        self._describe(every, torch.cat(parts))

    @changes_memory
    def _describe(self, every: Tensor, feature_kF: Tensor) -> None:
        """Replace the descriptors of all slots by the descriptors of these features [k, F]."""
        before_kA = self._columns.descriptor_kA.clone()
        row_kA = self.descriptor.redescribed(before_kA, feature_kF, self.group)
        self._columns.descriptor_kA.copy_(row_kA)
        self.eviction.on_update(every, before_kA)
        self._strata.changed(len(every))
