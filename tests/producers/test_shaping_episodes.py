"""Stalled and moving cameras follow the laws that their arguments name."""

import itertools
import math

import numpy as np
import pytest
from going_on import check_goes_on
from shaped_streams import draw, small

from stream_ssl.producers.shaping import Shaped, Stalls, Video
from stream_ssl.producers.shaping.episodes import crop_resized


def runs(samples):
    """Return the number of frames of each image."""
    origins = [(sample.meta or {}).get("duplicate_of", sample.id) for sample in samples]
    return [len(list(run)) for _, run in itertools.groupby(origins)]


@pytest.mark.parametrize(("rate", "alpha"), [(1.0, 0.8), (0.2, 1.2)])
def test_the_lengths_of_stalls_follow_a_pareto_law(rate, alpha):
    lengths = np.array([Stalls(small(), rate, alpha, longest=50)._length(n) for n in range(20_000)])
    assert lengths.max() == 50
    stalled = lengths[lengths > 1]
    assert abs(len(stalled) / 20_000 - rate) <= 4.5 * math.sqrt(rate * (1 - rate) / 20_000)
    for least in (3, 5, 10, 30, 50):
        chance = (2 / least) ** alpha
        error = 4.5 * math.sqrt(chance * (1 - chance) / len(stalled))
        assert abs(np.mean(stalled >= least) - chance) < error < 0.05


def test_stalls_of_a_heavy_tail_keep_to_the_longest_length():
    stalls = Stalls(small(), rate=1.0, alpha=0.01, longest=100)
    assert {stalls._length(number) for number in range(1000)} <= set(range(2, 101))


def test_a_stall_repeats_one_image_exactly_and_images_keep_their_order():
    source = small(count=300)
    stream, plain = draw(Stalls(source, 0.3, 1.0, longest=20)), draw(source)
    originals = [sample for sample in stream if "~" not in sample.id]
    assert [(s.id, s.data) for s in originals] == [(s.id, s.data) for s in plain]
    assert runs(stream) == [Stalls(small(), 0.3, 1.0, longest=20)._length(n) for n in range(300)]
    by_id = {sample.id: sample for sample in plain}
    for sample in stream:
        if "~" in sample.id:
            image = by_id[sample.meta["duplicate_of"]]
            assert (sample.data, sample.label, sample.shape) == (
                *(image.data, image.label, image.shape),
            )
            assert sample.meta["duplicate"] == "exact"
    assert len({s.id for s in stream}) == len(stream)


def test_a_video_sends_the_given_number_of_different_frames_of_each_image():
    source = small(count=12)
    stream = draw(Video(source, frames=7))
    assert runs(stream) == [7] * 12
    assert [s.meta["frame"] for s in stream] == list(range(7)) * 12
    assert [s.label for s in stream[::7]] == [s.label for s in draw(source)]
    assert len({s.id for s in stream}) == len({s.data for s in stream}) == 84


def test_a_crop_moves_evenly_and_stays_within_the_image():
    video = Video(small(), frames=9, zoom=0.6)
    for number in range(200):
        crop_F3 = np.array([video._crop(number, step) for step in range(9)])
        assert np.allclose(np.diff(crop_F3, axis=0), np.diff(crop_F3, axis=0)[0])
        top, left, size = crop_F3.T
        assert size.min() >= 0.4
        assert size.max() <= 1
        assert min(top.min(), left.min()) >= 0
        assert max((top + size).max(), (left + size).max()) <= 1 + 1e-12
    assert len({video._crop(number, 0) for number in range(200)}) == 200


def test_a_crop_is_resized_by_interpolation():
    # A plane stays the same plane, seen from nearer.
    down, right = np.mgrid[0:16, 0:20]
    image = (3 * down + 5 * right).astype(np.uint8)[..., None]
    seen = crop_resized(image, 0.25, 0.5, 0.5)[..., 0]
    expected_H = 4 + (np.arange(16) + 0.5) / 2 - 0.5
    expected_W = 10 + (np.arange(20) + 0.5) / 2 - 0.5
    plane = 3 * expected_H[:, None] + 5 * expected_W
    assert np.allclose(seen[:-1, :-1], plane[:-1, :-1], atol=1e-4)
    assert np.array_equal(crop_resized(image, 0.0, 0.0, 1.0), image)


def test_a_video_without_motion_and_noise_repeats_the_image():
    source = small(count=5)
    for sample, image in zip(
        draw(Video(source, frames=3, zoom=0.0, noise=0)),
        itertools.chain.from_iterable(itertools.repeat(image, 3) for image in draw(source)),
        strict=True,
    ):
        assert sample.data == image.data
        assert sample.meta["duplicate"] == "exact"


def test_the_noise_of_a_video_keeps_to_its_bound():
    source = small(count=5)
    noisy = draw(Video(source, frames=4, zoom=0.0, noise=3))
    plain = [image for image in draw(source) for _ in range(4)]
    change = [
        np.frombuffer(a.data, np.uint8).astype(int) - np.frombuffer(b.data, np.uint8)
        for a, b in zip(noisy, plain, strict=True)
    ]
    assert {-3, 3} <= set(np.concatenate(change).tolist()) <= set(range(-3, 4))


@pytest.mark.parametrize(
    "build",
    [
        lambda: Stalls(small(count=200), 0.3, 1.0, longest=20, seed=4),
        lambda: Video(small(count=60), frames=6, seed=4),
    ],
)
def test_stalls_and_videos_resume_exactly_after_every_position(build):
    stream = check_goes_on(build, every=7, ahead=30)
    assert len(stream) > 300
    other = build()
    other._facts = {**other._facts, "seed": 5}
    with pytest.raises(ValueError, match="seed was 4 and is 5"):
        other.samples(stream[9][1])


def test_a_shaped_video_resumes_after_every_position():
    def build():
        return Shaped(Video(small(), frames=5), duplicates=0.2, window=16, limit=100)

    check_goes_on(build, every=43)
