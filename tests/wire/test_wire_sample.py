"""The fields of a sample, and the values that are refused."""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np
import pytest
import torch

from stream_ssl.wire import Sample
from stream_ssl.wire.sample import check_position

GREY = {"id": "a", "data": bytes(4), "shape": (2, 2, 1)}
JPEG = {"id": "a", "data": b"x", "codec": "jpeg"}
VECTOR = {"id": "a", "data": bytes(8), "codec": "vector", "shape": (2,), "dtype": "float32"}


def test_an_invalid_sample_raises_an_error_that_names_the_rule() -> None:
    broken: list[tuple[dict[str, Any], str]] = [
        ({**GREY, "id": ""}, "1 to 255 bytes"),
        ({**GREY, "id": "é" * 128}, "1 to 255 bytes"),
        ({**GREY, "id": "\ud800"}, "1 to 255 bytes"),
        ({**GREY, "id": 7}, "must be text, not int"),
        ({**GREY, "source": "s" * 65}, "1 to 64 bytes"),
        ({**GREY, "codec": "tiff"}, "raw, jpeg, png, webp"),
        ({**GREY, "time": float("inf")}, "finite"),
        ({**GREY, "time": 1_764_000_000_000}, "divide milliseconds by 1e3"),
        ({**GREY, "time": -1.7e18}, "nanoseconds by 1e9"),
        ({**GREY, "time": "noon"}, "time 'noon'"),
        ({**GREY, "label": -1}, r"\[0, 2\^31\)"),
        ({**GREY, "label": 2**31}, r"\[0, 2\^31\)"),
        ({**GREY, "label": True}, "label True"),
        ({**GREY, "label": 1.5}, "label 1.5"),
        ({**GREY, "shape": None}, "need shape"),
        ({**GREY, "shape": (4, 1)}, "need shape"),
        ({**GREY, "shape": (2, 2.0, 1)}, "need shape"),
        ({**GREY, "shape": (2, 1, 2)}, "1, 3 or 4 channels"),
        ({**GREY, "shape": (0, 2, 1)}, "sides 1 to 65535"),
        ({**GREY, "shape": (2, 3, 1)}, "4 bytes do not fill.*needs 6"),
        ({**GREY, "data": "text"}, "contiguous buffer, not str"),
        ({**JPEG, "shape": (1, 1, 1)}, "pass None"),
        ({**JPEG, "data": b""}, "empty"),
        ({**VECTOR, "dtype": None}, "dtype None.*one of float16, float32"),
        ({**VECTOR, "dtype": ["float32"]}, "dtype.*one of float16, float32"),
        ({**VECTOR, "dtype": {}}, "dtype.*one of float16, float32"),
        ({**VECTOR, "shape": 2}, "needs shape"),
        ({**JPEG, "meta": "facts"}, "meta must be a map, not str"),
        ({**JPEG, "meta": []}, "meta must be a map, not list"),
        ({**JPEG, "meta": {"a": [1]}}, "meta 'a': list"),
        ({**JPEG, "meta": {1: 1}}, "keys are text"),
        ({**JPEG, "meta": {"a": "x" * 5000}}, "at most 4096"),
        ({**JPEG, "meta": {"a": 2**70}}, "msgpack cannot carry"),
    ]
    for fields, match in broken:
        with pytest.raises(ValueError, match=match):
            Sample(**fields)


def test_a_sample_accepts_numpy_numbers_and_contiguous_buffers() -> None:
    pixels = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
    sample = Sample("a", memoryview(pixels), shape=(2, 2, 3), label=np.int64(3))  # type: ignore[arg-type]
    assert (len(sample.data), sample.label, type(sample.label)) == (12, 3, int)
    with pytest.raises(ValueError, match="contiguous"):
        Sample("a", memoryview(pixels[:, ::2]), shape=(2, 1, 3))


def test_from_array_accepts_uint8_images_and_refuses_other_values() -> None:
    assert Sample.from_array(np.zeros((2, 3), np.uint8), "a").shape == (2, 3, 1)
    turned = np.arange(6, dtype=np.uint8).reshape(2, 3).T
    assert bytes(Sample.from_array(turned, "a").data) == bytes([0, 3, 1, 4, 2, 5])
    with pytest.raises(ValueError, match=r"float32; scale to 0\.\.255"):
        Sample.from_array(np.zeros((2, 2), np.float32), "a")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="4 dimensions"):
        Sample.from_array(np.zeros((1, 2, 2, 3), np.uint8), "a")
    for make in (Sample.from_array, Sample.from_vector):
        for value in ([[0, 1]], torch.zeros(2, 2, dtype=torch.uint8)):
            with pytest.raises(ValueError, match=r"is no NumPy array; use np\.asarray"):
                make(value, "a")  # type: ignore[arg-type]


def test_check_position_accepts_positions_that_msgpack_can_carry() -> None:
    for position in (None, 7, -(2**63), "shard-3.tar", [3, 100], {"a": [1, 2]}):
        check_position(position)


def test_check_position_refuses_deep_large_and_unknown_positions() -> None:
    deep: list[Any] = []
    for _ in range(2000):
        deep = [deep]
    for position, match in (
        (deep, "16 levels"),
        ("x" * 4097, "at most 4096"),
        (2**70, "msgpack cannot carry"),
        ({1, 2}, "msgpack cannot carry"),
        ({1: 2}, "no receiver would read it: int is not allowed for map key"),
        (msgpack.Timestamp(1), "no receiver would read it"),
        (object(), "msgpack cannot carry"),
    ):
        with pytest.raises(ValueError, match=match):
            check_position(position)
