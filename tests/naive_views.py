"""The laws of the views in numpy, one sample and one pixel at a time, in float64.

Shapes: C channels, H height, W width, S side of a view.
"""

from __future__ import annotations

import math

import numpy as np

from stream_ssl.learning.views import LUMA, DrawnViews


def view_of(image_CHW: np.ndarray, drawn: DrawnViews, number: int, size: int) -> np.ndarray:
    """Return the view [C, S, S], in [0, 1], of one image with the random numbers of one sample."""
    of = {name: float(column_B[number]) for name, column_B in vars(drawn).items()}
    view_CSS = cropped(image_CHW.astype(np.float64) / 255, of, size)
    view_CSS = coloured(view_CSS, of)
    return blurred(view_CSS, of["sigma_B"]) if of["sigma_B"] else view_CSS


def cropped(image_CHW: np.ndarray, of: dict[str, float], size: int) -> np.ndarray:
    """Return the crop, resized by bilinear interpolation, and mirrored if this was drawn."""
    channels, height, width = image_CHW.shape
    view_CSS = np.zeros((channels, size, size))
    for row in range(size):
        for column in range(size):
            y = (of["top_B"] + of["height_B"] * (row + 0.5) / size) * height - 0.5
            x = (of["left_B"] + of["width_B"] * (column + 0.5) / size) * width - 0.5
            place = size - 1 - column if of["flipped_B"] else column
            view_CSS[:, row, place] = pixel(image_CHW, y, x)
    return view_CSS


def pixel(image_CHW: np.ndarray, y: float, x: float) -> np.ndarray:
    """Return the value between four pixels. Beyond the edge, the pixels of the edge repeat."""
    _, height, width = image_CHW.shape
    y, x = min(max(y, 0.0), height - 1.0), min(max(x, 0.0), width - 1.0)
    value_C = np.zeros(len(image_CHW))
    for row in (math.floor(y), math.floor(y) + 1):
        for column in (math.floor(x), math.floor(x) + 1):
            weight = (1 - abs(y - row)) * (1 - abs(x - column))
            if weight > 0:
                value_C += weight * image_CHW[:, row, column]
    return value_C


def coloured(image_CHW: np.ndarray, of: dict[str, float]) -> np.ndarray:
    """Change brightness, contrast, saturation and hue, one after the other; then clamp."""
    luma_C = np.array(LUMA if len(image_CHW) == 3 else (1.0,))
    image_CHW = image_CHW * of["brightness_B"]
    mean_grey = np.tensordot(luma_C, image_CHW, 1).mean()
    image_CHW = mean_grey + of["contrast_B"] * (image_CHW - mean_grey)
    if len(image_CHW) == 3:
        grey_HW = np.tensordot(luma_C, image_CHW, 1)
        image_CHW = grey_HW + of["saturation_B"] * (image_CHW - grey_HW)
        image_CHW = np.einsum("cd,dhw->chw", rotation(of["hue_B"]), image_CHW)
    return image_CHW.clip(0, 1)


def rotation(angle: float) -> np.ndarray:
    """Return the rotation by this angle around the grey axis, by Rodrigues' formula."""
    x, y, z = np.full(3, 1 / math.sqrt(3))
    cross_CC = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]])
    return np.eye(3) + math.sin(angle) * cross_CC + (1 - math.cos(angle)) * cross_CC @ cross_CC


def blurred(image_CHW: np.ndarray, sigma: float) -> np.ndarray:
    """Return the image under a Gaussian over a tenth of its side, reflected at the edges."""
    _, height, width = image_CHW.shape
    half = max(1, height // 10 // 2)
    weights = {d: math.exp(-(d**2) / (2 * sigma**2)) for d in range(-half, half + 1)}
    whole = sum(weights.values())
    result_CHW = np.zeros_like(image_CHW)
    for row in range(height):
        for column in range(width):
            for down, a in weights.items():
                for right, b in weights.items():
                    y, x = reflected(row + down, height), reflected(column + right, width)
                    result_CHW[:, row, column] += a * b / whole**2 * image_CHW[:, y, x]
    return result_CHW


def reflected(place: int, size: int) -> int:
    place = abs(place)
    return 2 * (size - 1) - place if place >= size else place
