"""Images appear by the law of their rank."""

import numpy as np
import pytest
from going_on import check_goes_on
from shaped_streams import draw, small
from source_files import pixels, write_idx

from stream_ssl.producers.shaping import Popularity
from stream_ssl.producers.sources import IdxDataset


@pytest.mark.parametrize("exponent", [0.0, 1.2])
def test_images_appear_in_proportion_to_the_power_law_of_their_ranks(exponent):
    images, count = 30, 5_000
    stream = draw(Popularity(small(), images, exponent, noise=0, shift=0), count)
    found = np.bincount([s.meta["rank"] for s in stream], minlength=images + 1)
    assert found[0] == 0
    chance = np.arange(1, images + 1.0) ** -exponent
    chance /= chance.sum()
    error = 4.5 * np.sqrt(count * chance * (1 - chance)) + 1
    assert (np.abs(found[1:] - count * chance) < error).all()
    assert error[0] < count * chance[0]


def test_each_appearance_is_a_near_duplicate_with_an_id_of_its_own():
    source = small(count=20)
    plain = draw(source, 20)
    stream = draw(Popularity(source, 20, shift=0, noise=3), 300)
    assert len({s.id for s in stream}) == 300
    for number, sample in enumerate(stream):
        image = plain[sample.meta["rank"] - 1]
        assert sample.id == f"{image.id}~{number}"
        assert (sample.meta["duplicate_of"], sample.meta["duplicate"]) == (image.id, "near")
        assert (sample.label, sample.shape) == (image.label, image.shape)
        change = np.frombuffer(sample.data, np.uint8).astype(int) - np.frombuffer(
            image.data, np.uint8
        )
        assert np.abs(change).max() <= 3
    exact = draw(Popularity(source, 20, shift=0, noise=0), 50)
    assert {s.meta["duplicate"] for s in exact} == {"exact"}


def test_a_popularity_stream_resumes_exactly_after_every_position():
    stream = check_goes_on(lambda: Popularity(small(), 25, seed=4), 13, starts=150, ahead=40)
    other = [s.data for s in draw(Popularity(small(), 25, seed=5), 100)]
    assert other != [s.data for s, _ in stream[:100]]


def test_a_position_of_other_settings_or_other_images_is_refused(tmp_path):
    def build(seed, images=5):
        write_idx(tmp_path, "train", pixels(9, 4, 4, seed=seed), np.arange(9), packed=False)
        return Popularity(IdxDataset(tmp_path), images)

    _, position = next(build(0).samples())
    with pytest.raises(ValueError, match="images was 5 and is 6"):
        build(0, 6).samples(position)
    with pytest.raises(ValueError, match="first images, which it repeats, have changed"):
        next(build(1).samples(position))
    with pytest.raises(ValueError, match="has 7 images, and images is 1000: set images to fewer"):
        next(Popularity(small(count=7)).samples())
