"""Keeping embeddings those of the present encoder.

Shapes: D embedding, k occupied slots, R slots refreshed, b images encoded at a time, C H W image.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from memory.admission import Totals
from memory.arguments import check_count
from memory.checks import Array, check_embeddings, check_slots
from memory.drawing import Drawing
from memory.precision import in_full_precision


class Refreshing(Drawing):
    """Embeddings made anew, in their slots, of the samples that are there."""

    _totals: Totals
    _drift: Tensor  # float64 [2]: mean and least drift of the last slots refreshed

    def stalest(self, n: int) -> Tensor:
        """The n slots whose embeddings are oldest, int64; ties go to the lowest slot.

        Slots whose image is lost (memory/images.py) are left out.
        """
        n, there = check_count("n", n, least=0), self._columns.with_images()
        if there is None:
            return torch.argsort(self.encoded, stable=True)[:n]
        return there[torch.argsort(self.encoded[there], stable=True)[:n]]

    def images_of(self, slots: Array) -> Tensor:
        """Copies of the images of these slots, uint8 [R, C, H, W], on the memory's device.

        Raises:
            ValueError: the memory keeps no images, or an image is lost (memory/images.py).
        """
        images = self._columns.images
        if images is None:
            raise ValueError("this memory keeps no images: give it image_shape")
        chosen = check_slots(slots, len(self), self.device)
        lost_k = images.lost(len(self))
        if lost_k is not None and bool(lost_k[chosen.cpu()].any()):
            slot = int(chosen.cpu()[lost_k[chosen.cpu()]][0])
            raise ValueError(f"the image of slot {slot} is lost: leave out `images_lost`")
        return images.read(chosen)

    @in_full_precision
    def refresh(self, slots: Array, z: Array) -> Tensor:
        """Replace embeddings by newly computed ones of the same samples.

        Args:
            slots: int64 [R], distinct and occupied.
            z: unit rows [R, D].

        Returns:
            The drift: cosine of the old and the new embedding, float64 [R].
        """
        chosen = check_slots(slots, len(self), self.device)
        new_RD = check_embeddings(z, self.dim, self.device).to(self.dtype)
        if len(new_RD) != len(chosen):
            raise ValueError(f"{len(chosen)} slots but {len(new_RD)} embeddings: must be as many")
        before_RD = self._columns.embeddings[chosen]
        self._columns.embeddings[chosen] = new_RD
        self._columns.encoded[chosen] = self._totals.added
        self.eviction.refreshed(chosen, before_RD)
        self._strata.changed(len(chosen))
        drift_R = (before_RD * new_RD).sum(dim=1, dtype=torch.float64).clamp_(-1, 1)
        if len(drift_R):
            self._drift = torch.stack([drift_R.mean(), drift_R.min()])
        return drift_R

    @torch.no_grad()
    def reencode(
        self, encode: Callable[[Tensor], Tensor], slots: Array | None = None, batch: int = 256
    ) -> Tensor:
        """Compute embeddings anew from the images: of all slots as D-SimCLR does before each step
        (DUEL, section 4), or of the stalest few. The policy learns of them all at once.

        Args:
            encode: uint8 images [b, C, H, W] on the memory's device to unit rows [b, D]. Called
                without gradient.
            slots: distinct and occupied; all that have their image where not given.
            batch: most images encoded at a time, b.

        Returns:
            The drift of each slot, float64 [R], as `refresh` does.

        Raises:
            ValueError: the memory keeps no images, or `encode` gives anything but unit rows; then
                nothing has changed.
        """
        check_count("batch", batch, least=1)
        all_slots = self.stalest(len(self)).sort().values if slots is None else slots
        chosen = check_slots(all_slots, len(self), self.device)
        new_RD = self.embeddings.new_empty(len(chosen), self.dim)
        for start in range(0, len(chosen), batch):
            image_bCHW = self.images_of(chosen[start : start + batch])
            z_bD = check_embeddings(encode(image_bCHW), self.dim, self.device)
            if len(z_bD) != len(image_bCHW):
                raise ValueError(
                    f"encode gave {len(z_bD)} rows for {len(image_bCHW)} images: must be one each"
                )
            new_RD[start : start + batch] = z_bD
        return self.refresh(chosen, new_RD)
