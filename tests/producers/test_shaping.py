"""Shaped streams follow the laws that their arguments name."""

import io
import itertools
import sys
import zlib

import numpy as np
import pytest
from PIL import Image
from shaped_streams import draw, pixels_of, sigmas
from source_files import encoded, pixels, write_idx, write_images
from table import table

from stream_ssl.producers.shaping import (
    Continual,
    Parked,
    Popularity,
    Shaped,
    Shift,
    Stalls,
    Video,
)
from stream_ssl.producers.shaping.repeat import jitter, repeat
from stream_ssl.producers.sources import IdxDataset, ImageFolder, Synthetic, WatchedFolder
from stream_ssl.wire.sample import MAX_ID_BYTES, Sample


@pytest.fixture
def balanced(tmp_path):
    """An endless source of ten classes in equal parts, 8 x 8 grey, with the index in the id."""
    write_idx(tmp_path, "train", pixels(1000, 8, 8), np.arange(1000) % 10, packed=False)
    return IdxDataset(tmp_path, epochs=None)


def labels(samples):
    return np.array([sample.label for sample in samples])


@table("bias", [1, 9])
def test_the_dominant_class_is_bias_times_as_frequent_as_each_other_class(balanced, bias):
    count = 4000
    label = labels(draw(Shaped(balanced, bias=bias, dominant=4), count))
    share = np.bincount(label, minlength=10) / count
    assert sigmas(share[4], bias / (bias + 9), count) < 5
    for other in set(range(10)) - {4}:
        assert sigmas(share[other], 1 / (bias + 9), count) < 5


def test_a_biased_epoch_contains_no_sample_twice(tmp_path):
    write_idx(tmp_path, "train", pixels(1000, 8, 8), np.arange(1000) % 10, packed=False)
    shaped = Shaped(IdxDataset(tmp_path, epochs=1), bias=3, window=100)
    ids = [sample.id for sample, _ in shaped.samples()]
    assert len(set(ids)) == len(ids)
    assert 100 + 9 * 25 < len(ids) < 100 + 9 * 42


def test_iid_permutes_samples_only_within_each_window(balanced):
    plain = [sample.id for sample in draw(balanced, 400)]
    mixed = [sample.id for sample in draw(Shaped(balanced, order="iid", window=100), 400)]
    for start in range(0, 400, 100):
        assert plain[start : start + 100] != mixed[start : start + 100]
        assert set(plain[start : start + 100]) == set(mixed[start : start + 100])


def test_iid_neighbours_are_independent():
    source = Synthetic(classes=4, size=2, shift=0)
    label = labels(draw(Shaped(source, order="iid"), 20_000))
    assert sigmas(np.mean(label[1:] == label[:-1]), 0.25, 20_000) < 5


def test_sequential_sorts_each_window_by_class(balanced):
    shaped = Shaped(balanced, order="sequential", window=200)
    label = labels(draw(shaped, 1000)).reshape(5, 200)
    assert np.array_equal(label, np.sort(label, axis=1))
    # Five windows are one epoch of the source, so nothing is lost or made up.
    assert np.bincount(label.ravel()).tolist() == [100] * 10


def test_blurred_mixes_classes_only_at_their_borders(balanced):
    window, blur = 1000, 30
    shaped = Shaped(balanced, order="blurred", blur=blur, window=window)
    label = labels(draw(shaped, window))
    border = np.arange(window) % 100
    away = (border >= blur) & (border < 100 - blur)
    expected = np.arange(window) // 100
    assert np.array_equal(label[away], expected[away])
    mixed = np.mean(label[~away] != expected[~away])
    assert 0.05 < mixed < 0.4
    places = np.array([np.flatnonzero(label == c).mean() for c in range(10)])
    assert np.abs(places - (np.arange(10) * 100 + 49.5)).max() < blur


def test_keep_sends_each_sample_before_the_next_is_read(tmp_path):
    """A live source's sample goes out before the next has come."""
    taken = []

    class Live:
        name = "live"

        def samples(self, position=None):
            for number in itertools.count():
                taken.append(number)
                yield Sample(str(number), b"x", "raw", (1, 1, 1), source="live"), [number]

    stream = Shaped(Live(), duplicates=0.2, near=0).samples()
    for _ in range(20):
        sample, _ = next(stream)
        assert int(sample.id.partition("~")[0]) <= taken[-1]
        if not sample.meta:
            assert int(sample.id) == taken[-1]


@pytest.mark.parametrize(("duplicates", "near"), [(0.2, 1.0), (0.5, 0.25), (0.9, 0.0)])
def test_duplicates_and_near_duplicates_have_the_given_shares(duplicates, near):
    source, count = Synthetic(size=4, shift=0), 12_000
    samples = draw(Shaped(source, duplicates=duplicates, near=near, order="iid"), count)
    repeated = [sample for sample in samples if sample.meta]
    assert sigmas(len(repeated) / count, duplicates, count) < 5
    kinds = np.array([sample.meta["duplicate"] == "near" for sample in repeated])
    if 0 < near < 1:
        assert sigmas(kinds.mean(), near, len(kinds)) < 5
    else:
        assert kinds.mean() == near
    # Independent draws: a repetition follows a repetition no more often than an original.
    follows = np.array([bool(sample.meta) for sample in samples])
    after = follows[1:][follows[:-1]]
    assert sigmas(after.mean(), duplicates, len(after)) < 5


def test_each_duplicate_names_a_recent_original_and_resembles_that_original():
    samples = draw(Shaped(Synthetic(size=16), duplicates=0.4, near=0.5, recent=20), 3000)
    assert len({sample.id for sample in samples}) == 3000
    originals, last = {}, []
    for sample in samples:
        if not sample.meta:
            originals[sample.id] = sample
            last = [*last[-19:], sample.id]
            continue
        assert sample.meta["duplicate_of"] in last
        original = originals[sample.meta["duplicate_of"]]
        assert (sample.label, sample.shape) == (original.label, original.shape)
        distance = np.abs(pixels_of(sample) - pixels_of(original)).mean()
        if sample.meta["duplicate"] == "exact":
            assert distance == 0
        else:
            assert 0 < distance < 40  # noise of neighbours is 48 levels, and a shift moves it


def test_a_jitter_changes_every_image_and_a_smooth_one_only_a_little():
    rng = np.random.default_rng(0)
    ramp = np.repeat(np.arange(0, 256, 8, dtype=np.uint8)[None, :, None], 32, axis=0)
    for _ in range(200):
        distance = np.abs(jitter(ramp, rng).astype(int) - ramp)
        assert 0 < distance.mean() <= 8 + 6 + 4
        assert distance.max() <= 8 + 6 + 4
    one = Sample("a", b"\x00", "raw", (1, 1, 1))
    for number in range(200):
        assert repeat(one, str(number), "jitter", rng).data != one.data


@table("channels", [1, 3, 4])
def test_raw_images_can_pass_through_jpeg(channels):
    ramp = np.linspace(0, 255, 24 * 24 * channels).reshape(24, 24, channels).astype(np.uint8)
    original = Sample.from_array(ramp, "a")
    rng = np.random.default_rng(1)
    copies = [repeat(original, str(number), "jpeg", rng) for number in range(20)]
    assert len({copy.data for copy in copies}) > 5
    for copy in copies:
        assert (copy.codec, copy.shape) == ("raw", original.shape)
        assert 0 < np.abs(pixels_of(copy) - ramp).mean() < 12
        if channels == 4:
            assert np.array_equal(pixels_of(copy)[..., 3], ramp[..., 3])


@table("kind", ["PNG", "JPEG", "WEBP"])
def test_near_duplicates_of_encoded_images_are_new_jpegs_of_the_same_size(tmp_path, kind):
    write_images(tmp_path / "ant", 5, kind)
    samples = draw(Shaped(ImageFolder(tmp_path), duplicates=0.8), 60)
    originals = {
        sample.id: sample for sample in samples if not (sample.meta or {}).get("duplicate")
    }
    copies = [sample for sample in samples if sample.id not in originals]
    assert len(copies) > 5
    for copy in copies:
        original = originals[copy.meta["duplicate_of"]]
        assert copy.meta == {
            "duplicate_of": original.id,
            "duplicate": "near",
            "class": "ant",
        }
        assert copy.codec == "jpeg"
        assert copy.data != original.data
        before, after = (np.asarray(Image.open(io.BytesIO(s.data))) for s in (original, copy))
        assert before.shape == after.shape


def test_a_near_duplicate_of_a_rotated_jpeg_is_stored_upright():
    turned = Image.fromarray(np.zeros((4, 8, 3), np.uint8))
    file = io.BytesIO()
    exif = turned.getexif()
    exif[0x0112] = 6  # a quarter turn
    turned.save(file, "JPEG", exif=exif)
    copy = repeat(Sample("a", file.getvalue(), "jpeg"), "0", "jitter", np.random.default_rng(0))
    with Image.open(io.BytesIO(copy.data)) as image:
        assert image.size == (4, 8)
        assert 0x0112 not in image.getexif()


def test_an_image_that_cannot_be_decoded_is_repeated_unchanged():
    whole = encoded(pixels(1, 9, 9, 3)[0])
    colour_type = whole[:25] + b"\x03" + whole[26:]  # numbers of colours, without a palette
    coloured = colour_type[:29] + zlib.crc32(colour_type[12:29]).to_bytes(4, "big") + whole[33:]
    for data in (whole[:40], coloured):
        broken = Sample("a", data, "png")
        copy = repeat(broken, "0", "jitter", np.random.default_rng(0))
        assert copy.data == broken.data
        assert copy.meta == {"duplicate_of": "a", "duplicate": "exact"}


def test_duplicates_of_samples_with_long_ids_and_meta_keep_to_the_wires_limits():
    original = Sample("i" * MAX_ID_BYTES, b"x", shape=(1, 1, 1), meta={"long": "y" * 4080})
    first, second = (repeat(original, number, None, np.random.default_rng(0)) for number in "12")
    assert len(first.id) <= MAX_ID_BYTES
    assert first.id != second.id
    assert first.meta["duplicate_of"] == original.id


def test_the_error_about_missing_pillow_contains_the_command_to_install_pillow(monkeypatch):
    sample = Sample("a", encoded(pixels(1, 9, 9, 3)[0]), "png")
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ImportError, match=r"pip install 'stream-ssl\[images\]'"):
        repeat(sample, "0", "jitter", np.random.default_rng(0))
    raw = Sample("a", b"x", shape=(1, 1, 1))
    assert repeat(raw, "0", "jitter", np.random.default_rng(0)).data != b"x"


@table(
    ("cls", "settings", "remedy"),
    [
        (Shaped, {"bias": 2}, "set bias to 1"),
        (Shaped, {"order": "sequential"}, "set bias to 1"),
        (Shaped, {"order": "blurred"}, "set bias to 1"),
        (Continual, {"kind": "incremental"}, "give a labelled source"),
        (Shift, {}, "give a labelled source"),
    ],
)
def test_streams_by_class_refuse_a_source_without_labels(tmp_path, cls, settings, remedy):
    write_images(tmp_path, 2)
    watched = WatchedFolder(tmp_path, settle_seconds=0, idle_seconds=0)
    with pytest.raises(ValueError, match=rf"sample '000.png#.*carries no label.*{remedy}"):
        next(cls(watched, **settings).samples())


def test_the_limit_counts_from_the_start_of_the_stream(balanced):
    shaped = Shaped(balanced, limit=25, duplicates=0.3)
    stream = list(shaped.samples())
    assert len(stream) == 25
    assert len(list(shaped.samples(stream[9][1]))) == 15
    assert list(shaped.samples(stream[-1][1])) == []
    longer = Shaped(balanced, limit=40, duplicates=0.3)
    assert len(list(longer.samples(stream[-1][1]))) == 15


def test_a_position_of_other_settings_is_refused(balanced):
    _, position = next(Shaped(balanced, bias=3, seed=1).samples())
    with pytest.raises(ValueError, match="bias was 3 and is 9; seed was 1 and is 2"):
        Shaped(balanced, bias=9, seed=2).samples(position)
    balanced.name = "other"
    with pytest.raises(ValueError, match="source was"):
        Shaped(balanced, bias=3, seed=1).samples(position)


def test_a_position_of_another_inner_source_is_refused_at_once(balanced, tmp_path):
    shaped = Shaped(balanced, window=2)
    *_, (_, position) = itertools.islice(shaped.samples(), 5)
    reseeded = Shaped(IdxDataset(tmp_path, epochs=None, seed=7), window=2)
    with pytest.raises(ValueError, match="seed was 0 and is 7"):
        reseeded.samples(position)


OUT_OF_RANGE = {
    Shaped: (
        *("bias 0.5", "duplicates 1.0", "near -0.1", "window 0", "blur 0", "recent 0", "rate 0"),
        "limit -1",
    ),
    Parked: ("share 0.0", "share 1.0", "scenes 0", "stretch 0", "shift -1", "brightness 1.5"),
    Popularity: ("images 0", "exponent -1.0", "exponent nan", "shift -1", "noise 300"),
    Shift: ("classes 0", "period 0", "bias 0.5"),
    Stalls: ("rate 1.5", "alpha 0.0", "alpha nan", "longest 1"),
    Video: ("frames 0", "zoom 1.0", "noise 256"),
    Continual: ("classes 0", "tasks 11", "per_task 0", "blur 0", "block 0", "imbalance 0.5"),
}


@table("cls", OUT_OF_RANGE)
def test_every_shape_names_an_argument_that_is_out_of_range(balanced, cls):
    for one in (*OUT_OF_RANGE[cls], "seed -1"):
        name, _, value = one.partition(" ")
        number = float(value) if "." in value or value == "nan" else int(value)
        with pytest.raises(ValueError, match=f"^{one}: must (lie in|be above)"):
            cls(balanced, **{name: number})


@table(
    ("cls", "arguments", "message"),
    [
        (Parked, {"stretch": 10}, r"stretch 10: at a share of 0.95 drives .* raise it to 19"),
        (
            Continual,
            {"kind": "concurrent", "tasks": 3, "concurrent": 4},
            r"concurrent 4: must lie in \[1, 3\]",
        ),
        (Continual, {"kind": "mixed"}, "choose one of keep, incremental"),
        (Continual, {"profile": "step"}, '"one" or "tail"'),
    ],
)
def test_wrong_arguments_are_named(balanced, cls, arguments, message):
    with pytest.raises(ValueError, match=message):
        cls(balanced, **arguments)


def test_a_near_duplicate_of_large_half_floats_stays_finite():
    largest = float(np.finfo(np.float16).max)
    sample = Sample.from_vector(np.array([largest, -largest, 1.0], np.float16), "v")
    for seed in range(8):
        again = repeat(sample, "0", "jitter", np.random.default_rng(seed))
        assert np.isfinite(np.frombuffer(again.data, np.float16)).all()
