"""A parked stream follows the laws that its arguments name."""

import io
import itertools
import math

import numpy as np
import pytest
from going_on import check_goes_on
from PIL import Image
from shaped_streams import draw, pixels_of, small
from source_files import encoded, pixels, write_idx, write_images

from stream_ssl.producers.shaping import Parked, Popularity, Shaped, Video, parked, repeat
from stream_ssl.producers.shaping.repeat import seen_again
from stream_ssl.producers.sources import IdxDataset, ImageFolder, Synthetic, WatchedFolder
from stream_ssl.producers.sources.base import SourceError
from stream_ssl.wire.sample import MAX_ID_BYTES, Sample


def scene_of(sample):
    return (sample.meta or {}).get("scene", -1)


@pytest.fixture
def unchanged(monkeypatch):
    """Give parked frames the pixels of their scene, for tests of the order of a long stream."""
    monkeypatch.setattr(parked, "seen_again", lambda image_HWC, *_: image_HWC)


@pytest.mark.parametrize("share", [0.3, 0.95])
@pytest.mark.usefixtures("unchanged")
def test_parked_frames_have_their_share_in_the_long_run(share):
    stretch, count = 20, 20_000
    standing = np.array([scene_of(s) >= 0 for s in draw(Parked(small(), share, 4, stretch), count)])
    # A renewal process: each turn of a stretch and a drive adds independent geometric lengths.
    drive = stretch * (1 - share) / share
    turn = stretch + drive
    variance = (1 - share) ** 2 * stretch * (stretch - 1) + share**2 * drive * (drive - 1)
    error = math.sqrt(variance / turn / count)
    assert abs(standing.mean() - share) < 4.5 * error
    assert 4.5 * error < 0.08  # otherwise the line above could not fail


@pytest.mark.usefixtures("unchanged")
def test_stretches_and_drives_alternate_with_geometric_lengths():
    scenes = np.array([scene_of(s) for s in draw(Parked(small(), 0.75, 3, stretch=12), 20_000)])
    standing = scenes >= 0
    assert standing[0]
    runs = [(key, len(list(run))) for key, run in itertools.groupby(standing.tolist())][:-1]
    for key, mean in ((True, 12.0), (False, 4.0)):
        lengths = np.array([length for kind, length in runs if kind == key])
        # Lengths are geometric from 1 on, so the variance is mean (mean - 1).
        assert abs(lengths.mean() - mean) < 4.5 * math.sqrt(mean * (mean - 1) / len(lengths))
        ones = np.mean(lengths == 1)
        assert abs(ones - 1 / mean) < 4.5 * math.sqrt((1 - 1 / mean) / mean / len(lengths))
    for key, run in itertools.groupby(enumerate(standing.tolist()), key=lambda item: item[1]):
        if key:  # one scene from its first frame to its last
            assert len({int(scenes[at]) for at, _ in run}) == 1


@pytest.mark.usefixtures("unchanged")
def test_each_round_visits_every_scene_once_in_a_new_order():
    scenes = [scene_of(s) for s in draw(Parked(small(), 0.8, 5, stretch=6), 10_000)]
    visits = [scene for scene, _ in itertools.groupby(scenes) if scene >= 0]
    rounds = np.array(visits[: len(visits) // 5 * 5]).reshape(-1, 5)
    assert (np.sort(rounds, axis=1) == np.arange(5)).all()
    assert len({tuple(order) for order in rounds.tolist()}) > 30  # a new order in each
    count = np.bincount([scene for scene in scenes if scene >= 0], minlength=5)
    # Each scene has equally many stretches, of geometric lengths.
    error = math.sqrt(len(rounds) * 6 * 5)
    assert (np.abs(count - count.mean()) < 4.5 * error).all()
    assert error < count.mean() / 10


def test_scenes_repeat_the_first_images_and_drives_send_each_other_image_once():
    source = small(count=400)
    plain = draw(source)
    stream = draw(Parked(source, 0.6, 3, stretch=8))
    assert [s.id for s in stream if scene_of(s) < 0] == [s.id for s in plain[3:]]
    for number, sample in enumerate(stream):
        if scene_of(sample) >= 0:
            scene = plain[scene_of(sample)]
            assert sample.id == f"{scene.id}~{number}"
            assert sample.meta["duplicate_of"] == scene.id
            assert (sample.label, sample.source, sample.shape) == (
                *(scene.label, scene.source, scene.shape),
            )
    assert len({s.id for s in stream}) == len(stream)


def test_a_parked_frame_differs_from_its_scene_within_the_given_bounds():
    # Levels rise by one a pixel, so a move by n pixels changes levels by n, and less at an edge.
    ramp = np.repeat(np.arange(100, 132, dtype=np.uint8)[None, :, None], 32, axis=0)
    rng = np.random.default_rng(0)
    moves, changes, noises = set(), [], []
    for _ in range(400):
        seen = seen_again(ramp, rng, 3, 0.0, 0).astype(int)
        inside = (seen - ramp)[:, 3:-3]
        assert inside.min() == inside.max()
        moves.add(int(inside[0, 0, 0]))
        assert seen[:, 0].min() >= 100  # the edge is drawn out
        assert seen[:, -1].max() <= 131
        changes.append(seen_again(np.full_like(ramp, 100), rng, 2, 0.25, 0)[0, 0, 0] / 100)
        noises.append(seen_again(np.full_like(ramp, 100), rng, 2, 0.0, 8).astype(int) - 100)
    assert moves == set(range(-3, 4))
    assert 0.75 <= min(changes) < 0.77
    assert 1.23 < max(changes) <= 1.25
    noise = np.concatenate([n.ravel() for n in noises])
    count = np.bincount(noise + 8, minlength=17)
    assert len(count) == 17
    assert (np.abs(count / len(noise) - 1 / 17) < 5 * math.sqrt(1 / 17 / len(noise))).all()
    white, black = np.full((4, 4, 1), 255, np.uint8), np.zeros((4, 4, 1), np.uint8)
    for _ in range(50):  # no byte wraps
        assert seen_again(white, rng, 0, 0.0, 8).min() >= 247
        assert seen_again(black, rng, 0, 0.5, 8).max() <= 8


def test_frames_of_one_scene_resemble_each_other_more_than_different_scenes():
    stream = draw(Parked(Synthetic(size=32, noise=8), 0.9, 4, stretch=40), 1500)
    frames = [s for s in stream if scene_of(s) >= 0]
    level = np.stack([pixels_of(s).ravel() for s in frames]).astype(float)
    level -= level.mean(axis=1, keepdims=True)
    level /= np.linalg.norm(level, axis=1, keepdims=True)
    scene = np.array([scene_of(s) for s in frames])
    alike = level @ level.T
    same = scene[:, None] == scene
    assert alike[same].mean() > alike[~same].mean() + 0.3
    assert len({bytes(s.data) for s in frames}) == len(frames)  # near, never exact
    assert {s.meta["duplicate"] for s in frames} == {"near"}


def test_a_still_camera_sends_exact_copies():
    still = Parked(small(), 0.9, 2, stretch=20, shift=0, brightness=0.0, noise=0)
    scenes = draw(small(), 2)
    for sample in draw(still, 300):
        if scene_of(sample) >= 0:
            assert sample.data == scenes[scene_of(sample)].data
            assert sample.meta["duplicate"] == "exact"


def test_parked_frames_of_encoded_images_are_jpegs_of_the_same_size(tmp_path):
    write_images(tmp_path / "a", 6)
    grey = encoded(pixels(1, 6, 5, 1)[0])
    (tmp_path / "a" / "000.png").write_bytes(grey)
    source = ImageFolder(tmp_path, epochs=None, shuffle=False)
    for sample in draw(Parked(source, 0.8, 2, stretch=10), 100):
        if scene_of(sample) < 0:
            assert sample.codec == "png"
            continue
        assert sample.codec == "jpeg"
        with Image.open(io.BytesIO(sample.data)) as image:
            assert (image.size, image.mode) == ((5, 6), "RGB" if scene_of(sample) else "L")


@pytest.mark.parametrize(
    "shaped",
    [
        lambda source: Parked(source, 0.5, 2, stretch=5),
        lambda source: Video(source, frames=3),
        lambda source: Popularity(source, images=2),
    ],
    ids=["parked", "video", "popularity"],
)
@pytest.mark.parametrize("kind", ["damaged", "too large", "too wide"])
def test_an_image_that_cannot_be_changed_is_sent_unchanged(tmp_path, monkeypatch, shaped, kind):
    """An error would end the command there at each start. The learner counts and names it."""
    first, *_ = write_images(tmp_path / "a", 3)
    if kind == "damaged":
        first.write_bytes(first.read_bytes()[:40])
    else:  # no JPEG has a side of more than 65,500 pixels
        sides = (90, 90) if kind == "too large" else (1, 65_501)
        first.write_bytes(encoded(pixels(1, *sides, 3)[0]))
    if kind == "too large":
        monkeypatch.setattr(repeat, "MOST_PIXELS", 90 * 90 - 1)
    sent = draw(shaped(ImageFolder(tmp_path, shuffle=False, epochs=None)), 60)
    broken = [sample for sample in sent if sample.data == first.read_bytes()]
    assert 0 < len(broken) < len(sent)
    assert len({sample.id for sample in broken}) > 1
    assert {sample.codec for sample in broken} == {"png"}
    assert {(sample.meta or {}).get("duplicate") for sample in broken} <= {"exact", None}
    assert {sample.codec for sample in sent} >= {"jpeg"}


@pytest.mark.parametrize("settings", [{}, {"share": 0.5, "scenes": 3, "stretch": 5}])
def test_a_parked_stream_resumes_exactly_after_every_position(settings):
    def build():
        return Parked(small(count=300, duplicates=0.2), **settings, seed=4)

    check_goes_on(build, every=37, starts=700, ahead=60)


def test_a_parked_stream_ends_with_its_source_and_resumes_at_the_end():
    stream = list(Parked(small(count=40), 0.7, 4, stretch=9).samples())
    assert sum(scene_of(s) < 0 for s, _ in stream) == 36
    again = Parked(small(count=40), 0.7, 4, stretch=9)
    # A drive was due, and the source had no image left for it.
    assert list(again.samples(stream[-1][1])) == []


def test_equal_seeds_give_the_same_parked_stream():
    first, again, other = (
        [(s.id, s.data) for s in draw(Parked(small(), 0.9, 4, seed=seed), 500)]
        for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


def test_a_shaped_parked_stream_resumes_after_every_position():
    def build():
        return Shaped(Parked(small(), 0.8, 3, stretch=10), duplicates=0.2, window=16, limit=200)

    assert len(check_goes_on(build, every=77)) == 200


def test_parked_frames_of_images_with_long_ids_have_different_ids():
    class Long:
        name = "long"

        def samples(self, position=None):
            for number in itertools.count(position or 0):
                name = "x" * (MAX_ID_BYTES - 4) + f"{number:04d}"
                yield Sample(name, bytes(4), "raw", (2, 2, 1), source="long"), number + 1

    stream = draw(Parked(Long(), 0.9, 2, stretch=20), 200)
    assert len({s.id for s in stream}) == 200
    assert all(scene_of(s) in (0, 1) or s.meta is None for s in stream)


def test_a_position_of_other_settings_or_other_scenes_is_refused(tmp_path):
    write_idx(tmp_path, "train", pixels(100, 4, 4), np.arange(100) % 10, packed=False)

    def build(**more):
        return Parked(IdxDataset(tmp_path), scenes=2, **more)

    _, position = next(build(share=0.9).samples())
    with pytest.raises(ValueError, match=r"share was 0\.9 and is 0\.8"):
        build(share=0.8).samples(position)
    with pytest.raises(ValueError, match="seed was 0 and is 7"):  # the inner source refuses at once
        Parked(IdxDataset(tmp_path, seed=7), share=0.9, scenes=2).samples(position)
    folder = tmp_path / "in"
    first, *_ = write_images(folder, 5)
    watch = {"settle_seconds": 0, "idle_seconds": 0, "poll_seconds": 0}
    *_, (_, position) = Parked(WatchedFolder(folder, **watch), scenes=2, stretch=30).samples()
    first.unlink()
    gone = Parked(WatchedFolder(folder, **watch), scenes=2, stretch=30)
    with pytest.raises(ValueError, match="first images, which it repeats, have changed"):
        next(gone.samples(position))


def test_a_source_with_fewer_images_than_scenes_is_refused():
    with pytest.raises(ValueError, match="has 5 images, and scenes is 16: set scenes to fewer"):
        draw(Parked(small(count=5)))


def test_the_refusal_of_a_vector_names_the_option_that_repeats_vectors() -> None:
    sample = Sample.from_vector(np.ones(4, np.float32), "a")
    with pytest.raises(SourceError, match=r"is a vector.*--shape\.duplicates"):
        parked.pixels_of(sample)
