"""Selection of the video frames to send, and their encoding."""

from __future__ import annotations

import io
import math
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from stream_ssl.producers.sources.base import Facts
from stream_ssl.producers.sources.ranges import check_ranges

if TYPE_CHECKING:
    from av import VideoFrame

SIDE = 32  # pixels; height and width of the compared thumbnails
INTRA = 1  # FFmpeg's AV_PICTURE_TYPE_I: a frame that refers to no other frame
LIMITED = 1  # FFmpeg's AVCOL_RANGE_MPEG: black is 16, white is 235
FULL_RANGE = np.clip((np.arange(256) - 16) * 255 / 219 + 0.5, 0, 255).astype(np.uint8)
"""Maps grey levels of limited range to 0..255. FFmpeg converts only colour frames itself."""
SIDE_DATA_KINDS = 64  # more than the kinds that FFmpeg defines
MATRIX_BYTES = 36
ROUNDING = 1e-6  # in frames; frame times are floating-point numbers

Codec = Literal["raw", "jpeg", "webp"]


class FrameEncoder:
    """An encoder of pixels for the wire, with the arguments of `Frames`.

    Attributes:
        fact: identifies codec and quality in a position.

    Raises:
        ValueError: `quality` is out of range.
        ModuleNotFoundError: Pillow, which JPEG and WebP need, is not installed.
    """

    def __init__(self, codec: Codec, quality: int) -> None:
        check_ranges(("quality", quality, 1, 100))
        self.codec, self.quality = codec, quality
        self.fact = codec if codec == "raw" else f"{codec} {quality}"
        if codec != "raw":
            import PIL  # noqa: F401  # fail early if it is not installed

    def __call__(self, image_HWC: NDArray[np.uint8]) -> dict[str, Any]:
        """Return a sample's `data`, `codec` and `shape` for uint8 pixels [H, W, C], C in {1, 3, 4}.

        JPEG has no alpha channel, so transparent pixels are composited over white. The learner does
        the same.
        """
        if self.codec == "raw":
            return {"data": image_HWC.tobytes(), "codec": "raw", "shape": image_HWC.shape}
        from stream_ssl.pictures import image_of, over_white

        image = image_of(image_HWC)
        if self.codec == "jpeg":
            image = over_white(image)
        file = io.BytesIO()
        # The other methods of WebP take up to 10 times as long and save only a tenth of the size.
        image.save(file, self.codec, quality=self.quality, method=0)  # JPEG ignores the method
        return {"data": file.getvalue(), "codec": self.codec}


class Frames:
    """A selector and encoder of frames. Each decision depends only on the frame that was sent last.

    Args:
        fps: the most frames to send per second of stream time, above 0; null: all frames.
        key_frames: send only frames that the stream stores whole. Most decoders then skip the other
            frames.
        scene_change: send a frame only if it differs from the last sent frame by more than this
            value, in [0, 1). The difference is the mean absolute difference of 32 x 32 grey
            thumbnails. Noise is below 0.01, a cut is above 0.1; 0: off.
        size: scale frames down until their shorter side has this many pixels; null: keep the size.
        codec: "jpeg" or "webp" encode the frame; "raw" sends its pixels.
        quality: JPEG or WebP quality, 1 to 100.

    Raises:
        ValueError: an argument is out of range.
        ModuleNotFoundError: Pillow, which JPEG and WebP need, is not installed.
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
        self._encoder = FrameEncoder(codec, quality)
        self.facts: Facts = {
            "fps": fps,
            "key_frames": key_frames,
            "scene_change": scene_change,
            "size": size,
            "codec": self._encoder.fact,
        }

    def gate(self) -> FrameFilter:
        """Return a new `FrameFilter` that has not sent a frame yet."""
        return FrameFilter(self._fps, self._scene_change)

    def wants(self, frame: VideoFrame) -> bool:
        """Return whether `key_frames` allows this frame."""
        return not self.key_frames or frame.key_frame or int(frame.pict_type) == INTRA

    def payload(self, frame: VideoFrame) -> dict[str, Any]:
        """Return a sample's `data`, `codec` and `shape`, in the orientation of the stream."""
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


class FrameFilter:
    """The frame rate and scene change filter of one stream; see `Frames`."""

    def __init__(self, fps: float | None, scene_change: float) -> None:
        self._fps, self._scene_change = fps, scene_change
        self._slot: int | None = None
        self._seen_HW: NDArray[np.int16] | None = None

    def takes(self, frame: VideoFrame, seconds: float) -> bool:
        """Return whether to send the frame at `seconds`. A frame that is taken counts as sent."""
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
    """Return a, b, c, d: pixel (x, y) is shown at (a x + c y, b x + d y), ignoring the shift.

    FFmpeg provides this matrix for files (QuickTime matrix), bitstreams (display orientation of
    H.264 and H.265) and pictures (EXIF in Motion JPEG).
    """
    from av.sidedata import sidedata

    kinds: Any = sidedata.Type
    if not hasattr(kinds, "EXIF"):  # PyAV before 19 fails on kinds that it lacks
        for value in range(SIDE_DATA_KINDS):
            if value not in kinds._value2member_map_:
                member = object.__new__(kinds)
                member._name_, member._value_ = f"UNKNOWN_{value}", value
                kinds._value2member_map_[value] = member
    # A frame whose side data was read refers to itself: it waits for Python's garbage collector,
    # which would let hundreds of frames pile up. So a small copy is read, which has the same data.
    held: Any = converted(frame, 2, 2, "gray", "POINT").side_data
    found = held.get(kinds.DISPLAYMATRIX)
    if found is None or len(bytes(found)) < MATRIX_BYTES:
        return 1, 0, 0, 1
    a, b, _, c, d, *_ = np.frombuffer(bytes(found), np.int32).tolist()
    return a, b, c, d


def oriented(image_HWC: NDArray[np.uint8], matrix: tuple[int, int, int, int]) -> NDArray[np.uint8]:
    """Return the image flipped and transposed to the orientation nearest to `matrix`."""
    a, b, c, d = matrix
    if abs(b) + abs(c) > abs(a) + abs(d):
        image_HWC, a, d = image_HWC.transpose(1, 0, 2), c, b
    return image_HWC[:: -1 if d < 0 else 1, :: -1 if a < 0 else 1]


def converted(
    frame: VideoFrame, width: int, height: int, kind: str, interpolation: str = "AREA"
) -> VideoFrame:
    """Return the frame in the given size and pixel format.

    The conversion uses one thread. With several threads, FFmpeg 8 sometimes does not update the
    alpha of the last row that a thread converts.
    """
    how: Any = {"interpolation": interpolation}
    try:
        return frame.reformat(width, height, kind, threads=1, **how)
    except TypeError:  # an older PyAV lacks `threads` and always converts in one thread
        return frame.reformat(width, height, kind, **how)


def thumbnail(frame: VideoFrame) -> NDArray[np.int16]:
    """Return the grey levels [32, 32] of a frame."""
    return converted(frame, SIDE, SIDE, "gray").to_ndarray().astype(np.int16)
