"""The embedded images and their split."""

import hashlib
from pathlib import Path

import numpy as np
import pytest

from stream_ssl.demo import data
from stream_ssl.process.failures import Failure


@pytest.fixture(scope="module")
def images():
    return data.load()


def test_embedded_images_have_the_released_shapes_and_labels(images):
    image_NHW, label_N = images
    assert image_NHW.shape == (10_000, 28, 28)
    assert image_NHW.dtype == np.uint8
    assert np.bincount(label_N).tolist() == [1000] * 10
    assert label_N[:5].tolist() == [9, 2, 1, 1, 6]  # ankle boot, pullover, trouser, trouser, shirt


def test_split_is_disjoint_complete_and_balanced(images):
    _, label_N = images
    parts = data.split(label_N)
    together = np.concatenate([parts.streamed, parts.reference, parts.query])
    assert np.array_equal(np.sort(together), np.arange(10_000))
    for rows, each in ((parts.streamed, 700), (parts.reference, 200), (parts.query, 100)):
        assert np.bincount(label_N[rows]).tolist() == [each] * 10


def test_split_holds_back_the_first_300_images_of_each_class(images):
    parts = data.split(images[1])
    assert parts.reference[:4].tolist() == [0, 1, 2, 3]
    digest = hashlib.sha256(parts.streamed.astype("<i8").tobytes()).hexdigest()
    assert digest == digest_of_a_loop(images[1])


def digest_of_a_loop(label_N):
    """Return the digest of the streamed images, by a loop over the file."""
    seen = [0] * 10
    streamed = []
    for index, label in enumerate(label_N.tolist()):
        seen[label] += 1
        if seen[label] > 300:
            streamed.append(index)
    return hashlib.sha256(np.array(streamed, "<i8").tobytes()).hexdigest()


def test_no_held_out_image_is_streamed_under_another_index(images):
    image_NHW, label_N = images
    parts = data.split(label_N)
    streamed = {image.tobytes() for image in image_NHW[parts.streamed]}
    held = np.concatenate([parts.reference, parts.query])
    assert not [index for index in held if image_NHW[index].tobytes() in streamed]


def test_check_reports_a_damaged_file_with_its_sha256(tmp_path: Path):
    for name in data.SHA256:
        (tmp_path / name).write_bytes(b"short")
    with pytest.raises(Failure, match="is damaged: its sha256 is"):
        data.check(tmp_path)


def test_check_reports_a_missing_file_with_the_remedy(tmp_path: Path):
    with pytest.raises(Failure, match="is missing; install stream-ssl again"):
        data.check(tmp_path)
