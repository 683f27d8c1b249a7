"""Which frames of a video are sent, and as what."""

from __future__ import annotations

import io
import math
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from stream_ssl.producers.sources.base import Facts

if TYPE_CHECKING:
    from av import VideoFrame

SIDE = 32  # of the thumbnails that are compared
INTRA = 1  # FFmpeg's AV_PICTURE_TYPE_I: a frame that refers to no other
LIMITED = 1  # FFmpeg's AVCOL_RANGE_MPEG: black is 16, white is 235
FULL_RANGE = np.clip((np.arange(256) - 16) * 255 / 219 + 0.5, 0, 255).astype(np.uint8)
"""The grey level from 0 to 255, by the one of limited range. FFmpeg converts colours alone."""
SIDE_DATA_KINDS = 64  # more than FFmpeg has
MATRIX_BYTES = 36
ROUNDING = 1e-6  # of a frame: times of frames are floating-point numbers

Codec = Literal["raw", "jpeg", "webp"]


class Encoder:
    """Pixels as they travel.

    Args:
        codec: "raw", "jpeg" or "webp".
        quality: of JPEG and WebP, 1 to 100.

    Raises:
        ValueError: quality is out of range.
        ModuleNotFoundError: JPEG and WebP need Pillow.
    """

    def __init__(self, codec: Codec, quality: int) -> None:
        if not 1 <= quality <= 100:
            raise ValueError(f"quality {quality}: must lie in [1, 100]")
        self.codec, self.quality = codec, quality
        if codec != "raw":
            from PIL import Image

            self._pillow = Image

    def __call__(self, image_HWC: NDArray[np.uint8]) -> dict[str, Any]:
        """Return a sample's data, codec and shape of H x W x C pixels, C in {1, 3, 4}.

        JPEG has no alpha channel: transparent pixels are laid over white, as the learner does it.
        """
        if self.codec == "raw":
            return {"data": image_HWC.tobytes(), "codec": "raw", "shape": image_HWC.shape}
        grey = image_HWC.shape[2] == 1
        image = self._pillow.fromarray(
            np.ascontiguousarray(image_HWC[..., 0] if grey else image_HWC)
        )
        if self.codec == "jpeg":
            from stream_ssl.pictures import over_white

            image = over_white(image)
        file = io.BytesIO()
        # The fastest of WebP's methods: the others cost up to ten times as much for a tenth.
        image.save(
            file,
            self.codec,
            quality=self.quality,
            **({"method": 0} if self.codec == "webp" else {}),
        )
        return {"data": file.getvalue(), "codec": self.codec}


class Frames:
    """Chooses frames and makes payloads of them; all of it a function of the last one sent.

    Args:
        fps: frames a second of the stream's time, at most; null: all.
        key_frames: only frames that the stream stores whole. Most decoders pass over the others.
        scene_change: send a frame only where it differs from the last one sent by more than this:
            the mean absolute difference of 32 x 32 grey thumbnails, 0 to 1. Noise is below 0.01,
            a cut above 0.1; 0: off.
        size: scale down frames whose shorter side is longer than this; null: as they are.
        codec: "jpeg" and "webp" are encoded anew, "raw" are the pixels.
        quality: of JPEG and WebP, 1 to 100.

    Raises:
        ValueError: an argument lies outside its range.
        ModuleNotFoundError: JPEG and WebP need Pillow.
    """

    def __init__(
        self,
        fps: float | None = None,
        key_frames: bool = False,
        scene_change: float = 0.0,
        size: int | None = None,
        codec: Codec = "jpeg",
        quality: int = 90,
    ) -> None:
        if fps is not None and not 0 < fps < math.inf:
            raise ValueError(f"fps {fps}: must be above 0, or null for all frames")
        if not 0 <= scene_change < 1:
            raise ValueError(f"scene_change {scene_change}: must lie in [0, 1)")
        if size is not None and size < 1:
            raise ValueError(f"size {size}: must be 1 or more, or null for frames as they are")
        self.key_frames = key_frames
        self._fps, self._scene_change, self._size = fps, scene_change, size
        self._encoder = Encoder(codec, quality)
        self.facts: Facts = {
            "fps": fps,
            "key_frames": key_frames,
            "scene_change": scene_change,
            "size": size,
            "codec": codec if codec == "raw" else f"{codec} {quality}",
        }

    def gate(self) -> Gate:
        """A new choice of frames, which has sent none."""
        return Gate(self._fps, self._scene_change)

    def wants(self, frame: VideoFrame) -> bool:
        """Return whether `key_frames` allows this frame."""
        return not self.key_frames or frame.key_frame or int(frame.pict_type) == INTRA

    def payload(self, frame: VideoFrame) -> dict[str, Any]:
        """Return a sample's data, codec and shape, oriented as the stream says."""
        width, height = frame.width, frame.height
        if self._size is not None and min(width, height) > self._size:
            scale = self._size / min(width, height)
            width, height = round(width * scale), round(height * scale)
        clear = any(part.is_alpha for part in frame.format.components)
        kind = "gray" if frame.format.name.startswith("gray") else "rgba" if clear else "rgb24"
        image = converted(frame, width, height, kind).to_ndarray()
        image_HWC: NDArray[np.uint8] = image.reshape(height, width, -1).view(np.uint8)
        if kind == "gray" and frame.color_range == LIMITED:
            image_HWC = FULL_RANGE[image_HWC]
        return self._encoder(oriented(image_HWC, display_matrix(frame)))


class Gate:
    """Lets frames through; see `Frames`."""

    def __init__(self, fps: float | None, scene_change: float) -> None:
        self._fps, self._scene_change = fps, scene_change
        self._slot: int | None = None
        self._seen_HW: NDArray[np.int16] | None = None

    def takes(self, frame: VideoFrame, seconds: float) -> bool:
        """Whether to send the frame of that time, which then counts as sent."""
        slot = None if self._fps is None else math.floor(seconds * self._fps + ROUNDING)
        if slot is not None and slot == self._slot:
            return False
        seen_HW = thumbnail(frame) if self._scene_change else None
        if seen_HW is not None and self._seen_HW is not None:
            difference = float(np.abs(seen_HW - self._seen_HW).mean()) / 255
            if difference <= self._scene_change:
                return False
        self._slot, self._seen_HW = slot, seen_HW
        return True


def display_matrix(frame: VideoFrame) -> tuple[int, int, int, int]:
    """Return a, b, c, d: the pixel (x, y) is shown at (a x + c y, b x + d y), but for a shift.

    Files (QuickTime's matrix), bitstreams (H.264's and H.265's display orientation) and pictures
    (EXIF in Motion JPEG) all arrive here.
    """
    from av.sidedata import sidedata

    kinds: Any = sidedata.Type
    if not hasattr(kinds, "EXIF"):  # PyAV before 19 fails at kinds of side data that it lacks
        for value in range(SIDE_DATA_KINDS):
            if value not in kinds._value2member_map_:
                member = object.__new__(kinds)
                member._name_, member._value_ = f"UNKNOWN_{value}", value
                kinds._value2member_map_[value] = member
    held: Any = frame.side_data
    found = held.get(kinds.DISPLAYMATRIX)
    if found is None or len(bytes(found)) < MATRIX_BYTES:
        return 1, 0, 0, 1
    a, b, _, c, d, *_ = np.frombuffer(bytes(found), np.int32).tolist()
    return a, b, c, d


def oriented(image_HWC: NDArray[np.uint8], matrix: tuple[int, int, int, int]) -> NDArray[np.uint8]:
    """Return the image turned and mirrored as the nearest of the eight orientations asks."""
    a, b, c, d = matrix
    if abs(b) + abs(c) > abs(a) + abs(d):
        image_HWC, a, d = image_HWC.transpose(1, 0, 2), c, b
    return image_HWC[:: -1 if d < 0 else 1, :: -1 if a < 0 else 1]


def converted(frame: VideoFrame, width: int, height: int, kind: str) -> VideoFrame:
    """Return the frame in this size and pixel format.

    One thread converts it. With several, FFmpeg 8 now and then leaves the alpha of the last row
    that a thread converts as it was before.
    """
    how: Any = {"interpolation": "AREA"}
    try:
        return frame.reformat(width, height, kind, threads=1, **how)
    except TypeError:  # an older PyAV has no such option, and converts in one thread
        return frame.reformat(width, height, kind, **how)


def thumbnail(frame: VideoFrame) -> NDArray[np.int16]:
    """Grey levels [32, 32]."""
    return converted(frame, SIDE, SIDE, "gray").to_ndarray().astype(np.int16)
