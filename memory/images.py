"""Where the images of the slots lie: on the device, in the host's memory, or in a file.

Shapes: K capacity, k occupied slots, R rows, C H W image.
"""

from __future__ import annotations

import hashlib
import os
import weakref
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

Image = tuple[int, int, int]


class Images:
    """uint8 images of K slots, in memory.

    Args:
        capacity: K.
        shape: (C, H, W).
        device: where the memory computes; the images lie there too unless `host`.
        host: keep them in the host's memory, pinned where the device is a GPU.
    """

    def __init__(self, capacity: int, shape: Image, device: torch.device, host: bool) -> None:
        self.shape, self.device = shape, device
        self._pinned = host and device.type == "cuda"
        self.data_KCHW = torch.zeros(
            capacity,
            *shape,
            dtype=torch.uint8,
            device="cpu" if host else device,
            pin_memory=self._pinned,
        )

    data_KCHW: Tensor

    def read(self, slots: Tensor) -> Tensor:
        """Copies of the images of these slots, uint8 [R, C, H, W], on the memory's device."""
        if not self._pinned:
            return self.data_KCHW[slots.to(self.data_KCHW.device)].to(self.device)
        # Gathered into pinned memory, so that the copy to the GPU need not be waited for.
        chosen = torch.empty((len(slots), *self.shape), dtype=torch.uint8, pin_memory=True)
        torch.index_select(self.data_KCHW, 0, slots.cpu(), out=chosen)
        return chosen.to(self.device, non_blocking=True)

    def write(self, slots: Tensor, image_RCHW: Tensor) -> None:
        """Overwrite these slots, all distinct. `image_RCHW` lies where the images lie."""
        self.data_KCHW[slots.to(self.data_KCHW.device)] = image_RCHW

    def lost(self, occupied: int) -> Tensor | None:
        """bool [k], True where a slot's image is gone; None where all are there."""
        del occupied
        return None

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of one slot's entry in each part of the state."""
        return {"images": self.shape}

    def state(self, occupied: int) -> dict[str, Tensor]:
        """What `load` needs to have the images of the first `occupied` slots again."""
        return {"images": self.data_KCHW[:occupied].clone()}

    def load(self, state: dict[str, Tensor]) -> None:
        """Take over what `state` gave. Slots beyond are cleared."""
        images = state["images"]
        self.data_KCHW.zero_()
        self.data_KCHW[: len(images)] = images.to(self.data_KCHW.device)

    def check(self, occupied: int) -> tuple[bool, str]:
        """Whether the images are those that were written; if not, what is wrong."""
        del occupied
        return True, ""


class ImageFile(Images):
    """uint8 images of K slots in a memory-mapped file, for memories larger than the machine's.

    The file is raw, slot after slot, sparse, of mode 0600 when created, and held under a lock
    while it is in use. Keep room for K images: as with any mapped file, a first write that the disk
    has no room for ends the process (SIGBUS).

    The file is no part of a state, which holds a hash of each image instead. It goes on changing
    after a state was saved, and a crash may lose what was not yet on the disk. So loading a state
    compares every hash; a slot whose image is another one now has *lost* it: the image is cleared,
    and the slot is left out of draws and of re-encoding until a sample with an image takes it over.
    Where a stream is replayed from the state's position, those are the slots that the replay
    overwrites; what is drawn until then differs from a run without the crash.

    Args:
        path: created where there is none, else of the right size.
        capacity: K.
        shape: (C, H, W).
        device: where the memory computes.

    Raises:
        ValueError: the file is of another size, or in use.
    """

    def __init__(self, path: Path, capacity: int, shape: Image, device: torch.device) -> None:
        self.shape, self.device, self.path = shape, device, path
        self._pinned = False
        size = capacity * shape[0] * shape[1] * shape[2]
        self._handle = _open(path, size, shape)
        self._hash_K = torch.zeros(capacity, dtype=torch.int64)
        self._lost_K = torch.zeros(capacity, dtype=torch.bool)
        flat = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
        self.data_KCHW = flat.reshape(capacity, *shape)
        weakref.finalize(self, os.close, self._handle)

    def write(self, slots: Tensor, image_RCHW: Tensor) -> None:
        where = slots.cpu()
        self.data_KCHW[where] = image_RCHW
        self._hash_K[where] = hashes_of(image_RCHW)
        self._lost_K[where] = False

    def lost(self, occupied: int) -> Tensor | None:
        lost_k = self._lost_K[:occupied]
        return lost_k if bool(lost_k.any()) else None

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {"image_hashes": (), "image_lost": ()}

    def state(self, occupied: int) -> dict[str, Tensor]:
        os.fsync(self._handle)  # the file must reach the disk before a state that speaks of it
        return {
            "image_hashes": self._hash_K[:occupied].clone(),
            "image_lost": self._lost_K[:occupied].to(torch.uint8),
        }

    def load(self, state: dict[str, Tensor]) -> None:
        k = len(state["image_hashes"])
        self._hash_K.zero_()
        self._hash_K[:k] = state["image_hashes"].cpu()
        self._lost_K.zero_()
        self._lost_K[:k] = state["image_lost"].cpu().to(torch.bool)
        self._lost_K[:k] |= hashes_of(self.data_KCHW[:k]) != self._hash_K[:k]
        # No one may take the image of another sample for this one's.
        self.data_KCHW[:k][self._lost_K[:k]] = 0

    def check(self, occupied: int) -> tuple[bool, str]:
        other_k = hashes_of(self.data_KCHW[:occupied]) != self._hash_K[:occupied]
        other_k &= ~self._lost_K[:occupied]
        if bool(other_k.any()):
            return False, f"slot {int(other_k.nonzero()[0, 0])}: its image is not the one written"
        return True, ""


def image_column(
    capacity: int,
    shape: Image | None,
    device: torch.device,
    images_on: Literal["device", "host"],
    image_file: Path | str | None,
) -> Images | None:
    """Where a memory built with these arguments keeps its images; None where it keeps none."""
    if images_on not in ("device", "host"):
        raise ValueError(f'images_on is {images_on!r}: choose "device" or "host"')
    if shape is None:
        if image_file is not None:
            raise ValueError(
                f"image_file is {image_file}, but there are no images: give image_shape"
            )
        return None
    if image_file is not None:
        return ImageFile(Path(image_file), capacity, shape, device)
    return Images(capacity, shape, device, host=images_on == "host")


def hashes_of(image_RCHW: Tensor) -> Tensor:
    """64 bits of the BLAKE2b hash of each image, int64 [R], on the CPU."""
    rows = image_RCHW.cpu().flatten(1).contiguous().numpy()
    digests = b"".join(hashlib.blake2b(row, digest_size=8).digest() for row in rows)
    return torch.frombuffer(bytearray(digests) or bytearray(8), dtype=torch.int64)[: len(rows)]


def _open(path: Path, size: int, shape: Image) -> int:
    """A locked handle of the file, which has this size. The lock ends with the handle."""
    import fcntl  # where there is none there are no image files, but all the rest

    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        found = os.fstat(handle).st_size
        if found not in (0, size):
            raise ValueError(
                f"{path} has {found} bytes, images of shape {shape} take {size}: "
                "remove the file, or name another"
            )
        os.ftruncate(handle, size)
    except BlockingIOError as error:
        os.close(handle)
        raise ValueError(
            f"{path} is in use by another memory: give each memory its own image_file"
        ) from error
    except BaseException:
        os.close(handle)
        raise
    return handle
