"""The synthetic source: its classes, duplicates and drift follow its arguments."""

import itertools

import numpy as np
import pytest
from table import table

from stream_ssl.producers.sources import Synthetic


def draw(source, count, start=0):
    stream = itertools.islice(source.samples(), start, start + count)
    return [sample for sample, _ in stream]


def pixels_of(samples):
    return np.array([np.frombuffer(s.data, np.uint8).reshape(s.shape) for s in samples], float)


def nearest(samples, prototypes):
    flat = pixels_of(samples).reshape(len(samples), -1)
    flat -= flat.mean(axis=1, keepdims=True)
    centres = prototypes - prototypes.mean(axis=1, keepdims=True)
    return np.argmax(flat @ (centres / np.linalg.norm(centres, axis=1)[:, None]).T, axis=1)


def centres_of(samples, classes):
    flat, label = pixels_of(samples).reshape(len(samples), -1), [s.label for s in samples]
    return np.array([flat[np.equal(label, c)].mean(axis=0) for c in range(classes)])


def test_equal_seeds_give_equal_streams_and_other_seeds_give_other_streams():
    one, same, other = (draw(Synthetic(seed=seed), 20) for seed in (1, 1, 2))
    assert [s.data for s in one] == [s.data for s in same]
    assert not {s.data for s in one} & {s.data for s in other}
    assert not {s.id for s in one} & {s.id for s in other}


@table(("size", "channels"), [(32, 3), (28, 1), (7, 3), (96, 3)])
def test_images_have_the_requested_shape(size, channels):
    image = pixels_of(draw(Synthetic(size=size, channels=channels), 300))
    assert image.shape == (300, size, size, channels)
    assert image.std() > 20
    assert image.max() <= 255


def test_the_nearest_centre_identifies_the_class_of_most_images():
    samples = draw(Synthetic(seed=3), 3000)
    guess = nearest(samples[2000:], centres_of(samples[:2000], 10))
    assert np.mean(guess == [s.label for s in samples[2000:]]) > 0.8


def test_classes_are_equally_frequent():
    counts = np.bincount([s.label for s in draw(Synthetic(size=2, shift=0), 20_000)], minlength=10)
    assert np.abs(counts - 2000).max() < 5 * np.sqrt(20_000 * 0.1 * 0.9)


def test_the_mix_of_classes_changes_by_the_documented_law():
    source = Synthetic(size=2, shift=0, mix_period=20_000)
    samples = draw(source, 20_000)
    for start in range(0, 20_000, 5_000):
        counts = np.bincount([s.label for s in samples[start : start + 5000]], minlength=10)
        law = sum(source.class_shares(n) for n in range(start, start + 5000))
        assert np.abs(counts - law).max() < 5 * np.sqrt(law.max())
    shares = source.class_shares(0)
    assert np.argmax(shares) == 0
    assert shares.sum() == pytest.approx(1)
    assert shares.max() / shares.min() == pytest.approx(np.exp(4))


def test_prototypes_move_away():
    still, moving = Synthetic(size=8), Synthetic(size=8, prototype_period=4096)
    for source, low, high in ((still, 0.9, 1.0), (moving, -0.6, 0.6)):
        early, late = draw(source, 512), draw(source, 512, start=8192)
        a, b = (centres_of(samples, 10) for samples in (early, late))
        a, b = (c - c.mean() for c in (a, b))
        assert low <= np.sum(a * b) / np.sqrt(np.sum(a * a) * np.sum(b * b)) <= high


def test_prototypes_move_smoothly():
    centres = [
        centres_of(draw(Synthetic(size=8, prototype_period=25_600), 2048, start), 10)
        for start in (0, 2560, 12_800)
    ]
    near, far = (np.abs(c - centres[0]).mean() for c in centres[1:])
    assert near < far / 3


def test_duplicates_have_the_given_shares_and_name_their_originals():
    source = Synthetic(size=8, duplicates=0.3, near=0.4, seed=5)
    samples = draw(source, 20_000)
    by_id = {s.id: s for s in samples}
    assert len(by_id) == 20_000
    repeated = [s for s in samples if s.meta]
    near = [s for s in repeated if s.meta["duplicate"] == "near"]
    assert len(repeated) / 20_000 == pytest.approx(0.3, abs=5 * np.sqrt(0.21 / 20_000))
    assert len(near) / len(repeated) == pytest.approx(0.4, abs=5 * np.sqrt(0.24 / 6_000))
    for sample in repeated:
        original = by_id[sample.meta["duplicate_of"]]
        assert original.meta is None
        assert 0 < int(sample.id[2:]) - int(original.id[2:]) < 256
        assert sample.label == original.label
        distance = np.abs(pixels_of([sample]) - pixels_of([original]))
        assert (distance.max() == 0) == (sample.meta["duplicate"] == "exact")
        assert distance.max() <= 8
    originals = [s for s in samples if not s.meta]
    assert len({s.data for s in originals}) == len(originals)


def test_samples_of_a_class_differ_far_more_than_near_duplicates():
    samples = draw(Synthetic(classes=1), 200)
    image = pixels_of(samples)
    distance = np.abs(image[:100] - image[100:]).mean(axis=(1, 2, 3))
    assert distance.min() > 8


@table(
    ("arguments", "message"),
    [
        ({"channels": 2}, "channels 2: must be 1 or 3"),
        ({"duplicates": 0.95}, r"duplicates 0.95: must lie in \[0, 0.9\]"),
        ({"noise": 65}, "noise 65"),
        ({"prototype_period": 10}, "prototype_period 10"),
        ({"classes": 0}, "classes 0"),
        ({"seed": -1}, "seed -1"),
        ({"count": 0}, "count 0"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        Synthetic(**arguments)


def test_a_stream_ends_after_exactly_count_samples():
    for count in (1, 255, 256, 257, 600):
        assert len(list(Synthetic(count=count, size=2, shift=0).samples())) == count
