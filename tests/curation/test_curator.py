"""Tests of curation: what is kept and dropped, and what a stop or a crash leaves."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from curation_pictures import COUNT, DIFFERENT, Crawl
from PIL import Image

from stream_ssl.curation import Curator
from stream_ssl.curation.curator import BATCH, PAIRS, SEEN, Bad
from stream_ssl.curation.rows import Rows
from stream_ssl.memory import WorkingMemory
from stream_ssl.memory.eviction.oldest import Oldest
from stream_ssl.memory.near_duplicates import NearDuplicates
from stream_ssl.memory.sketches import SIDE
from stream_ssl.producers.sources import ImageFolder
from stream_ssl.producers.sources.base import mark
from stream_ssl.wire.sample import Position, Sample


def originals(curator: Curator, source: Crawl) -> list[int]:
    return [int(source.original_N[int(one.id)]) for one in curator.kept]


def outcome(curator: Curator) -> tuple[object, ...]:
    return list(curator.kept), list(curator.dropped()), list(curator.bad()), curator.progress


def test_each_different_picture_is_kept_once_if_there_is_room(tmp_path: Path) -> None:
    source = Crawl()
    curator = Curator(tmp_path, keep=400)
    counts = list(curator.run(source))
    found = originals(curator, source)
    assert len(found) == len(set(found))
    whole = {int(source.original_N[n]) for n in range(COUNT) if n % 100 != 50}
    assert set(found) == whole
    last = counts[-1]
    assert (last.read, sum(last.bad.values())) == (COUNT, COUNT // 100)
    assert last.kept + last.dropped + sum(last.bad.values()) == COUNT
    bad = [int(one.id) for one in curator.bad()]
    assert bad == [n for n in range(COUNT) if n % 100 == 50]
    assert {(one.reason, one.source) for one in curator.bad()} == {("damaged", "crawl")}
    assert all(one.message and json.loads(one.position) for one in curator.bad())
    for one in curator.dropped():
        assert source.original_N[int(one.id)] == source.original_N[int(one.of_id)]
        assert (one.source, one.of_source) == ("crawl", "crawl")
        assert one.distance < 0.4
    for kept in curator.kept:
        number = int(kept.id)
        assert curator.originals.read(kept.original)[:2] == b"\xff\xd8"
        assert json.loads(kept.position) == mark([number + 1], {})
        assert kept.label == source.original_N[number] % 10
    assert len(curator.pair_P2CHW) == PAIRS
    difference_P = curator.pair_P2CHW.float().mean(dim=2).diff(dim=1).abs().mean(dim=(1, 2, 3))
    assert difference_P.max() < 20  # the same picture, in full size or enlarged


def test_a_full_set_drops_repeated_pictures_and_deletes_the_files_of_evicted_ones(
    tmp_path: Path,
) -> None:
    source = Crawl()
    curator = Curator(tmp_path, keep=50)
    *_, counts = curator.run(source)
    found = originals(curator, source)
    assert len(found) == len(set(found)) == counts.kept == 50
    assert counts.dropped >= COUNT - DIFFERENT - COUNT // 100  # nothing is admitted twice
    files = {one.original for one in curator.kept}
    assert curator.originals.names() == files  # evicted pictures leave no files


def test_the_curator_pairs_a_repeated_png_with_its_original(tmp_path: Path) -> None:
    """The pixels of a PNG are read-only, and torch warns of read-only arrays."""
    pixels_HWC = np.random.default_rng(0).integers(0, 256, (4, 4, 3), np.uint8)
    image = Image.fromarray(pixels_HWC).resize((64, 64))
    for name in ("a", "b"):
        image.save(tmp_path / f"{name}.png")
    curator = Curator(tmp_path / "state", keep=4)
    *_, counts = curator.run(ImageFolder(str(tmp_path)))
    assert (counts.kept, counts.dropped) == (1, 1)
    ((dropped_CHW, twin_CHW),) = curator.pair_P2CHW
    assert torch.equal(dropped_CHW, twin_CHW)
    assert np.array_equal(dropped_CHW.permute(1, 2, 0).numpy(), np.asarray(image))


def test_pictures_in_other_colours_are_kept_in_any_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stream_ssl.curation.curator.BATCH", 1)
    pixels_HWC = np.full((64, 64, 3), (255, 255, 255), np.uint8)
    for number, colour in enumerate([(200, 0, 0), (0, 102, 0), (200, 0, 0)]):  # as bright in grey
        pixels_HWC[16:48, 20:50] = colour
        Image.fromarray(pixels_HWC).save(tmp_path / f"{number}.png")
    curator = Curator(tmp_path / "state", keep=4)
    *_, counts = curator.run(ImageFolder(str(tmp_path)))
    assert (counts.kept, counts.dropped) == (2, 1)


def test_a_pass_continues_that_an_earlier_version_saved_with_grey_thumbnails(
    tmp_path: Path,
) -> None:
    first = Curator(tmp_path, keep=4)
    first._seen = WorkingMemory(SEEN, 1, Oldest(), (1, SIDE, SIDE))
    first._near_seen = NearDuplicates(first._seen)
    image_1CHW = torch.randint(0, 256, (1, 1, SIDE, SIDE), dtype=torch.uint8)
    first._seen.add(torch.tensor([7]), torch.ones(1, 1), image_1CHW)
    first.save()
    second = Curator(tmp_path, keep=4)
    assert torch.equal(second._seen.images_of(torch.tensor([0])), image_1CHW.expand(-1, 3, -1, -1))


@pytest.mark.parametrize("saved", [True, False])
def test_a_stopped_or_killed_pass_continues_to_the_result_of_an_unbroken_pass(
    tmp_path: Path, saved: bool
) -> None:
    whole = Curator(tmp_path / "whole", keep=60)
    list(whole.run(Crawl()))
    first = Curator(tmp_path / "parts", keep=60)
    for number, _ in enumerate(first.run(Crawl(), lambda: saved)):
        if number == 0 and not saved:
            first.save()
        if number == 1:  # a batch after the save: nothing of the batch remains
            break
    second = Curator(tmp_path / "parts", keep=60)
    assert second.progress.read == BATCH
    list(second.run(Crawl()))
    assert outcome(second) == outcome(whole)
    assert second.originals.names() == {one.original for one in whole.kept}


@pytest.mark.parametrize("saved", [True, False])
def test_originals_that_a_power_cut_damaged_are_written_again(tmp_path: Path, saved: bool) -> None:
    folder = tmp_path / "cut"
    curator = Curator(folder, keep=400)
    if saved:
        list(curator.run(Crawl(ends_at=BATCH)))
    held = {one.original for one in curator.kept}
    whole = Curator(tmp_path / "whole", keep=400)
    list(whole.run(Crawl()))
    for name in whole.originals.names() - held:
        path = folder / "originals" / name[:2] / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"")
    curator = Curator(folder, keep=400)
    list(curator.run(Crawl()))
    assert outcome(curator) == outcome(whole)
    for one in curator.kept:
        assert curator.originals.read(one.original) == whole.originals.read(one.original)


def test_a_pass_with_a_damaged_state_begins_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    curator = Curator(tmp_path, keep=60)
    list(curator.run(Crawl()))
    expected = outcome(curator)
    (state,) = tmp_path.glob("state-*")
    (state / "state.json").write_text("{}")
    again = Curator(tmp_path, keep=60)
    assert "is damaged" in caplog.text
    assert again.progress.read == 0
    list(again.run(Crawl()))
    assert outcome(again) == expected


def test_a_state_that_was_half_deleted_at_a_crash_is_deleted(tmp_path: Path) -> None:
    curator = Curator(tmp_path, keep=5)
    list(curator.run(Crawl(ends_at=20)))
    (tmp_path / ".discarded-state-000000").mkdir()  # as a kill within `discard` leaves it
    (tmp_path / "incomplete").mkdir()
    assert Curator(tmp_path, keep=5).progress.read == 20
    names = ["bad.jsonl", "dropped.jsonl", "originals", "state-000001"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_a_seed_may_be_negative(tmp_path: Path) -> None:
    curator = Curator(tmp_path, keep=5, seed=-1)
    list(curator.run(Crawl()))
    assert curator.progress.dropped > PAIRS  # PAIRS of them are drawn


def test_errors_about_the_curator_s_arguments_name_the_value_and_the_rule(tmp_path: Path) -> None:
    for wrong, text in (
        ({"keep": 0}, "keep is 0: must be at least 1"),
        ({"keep": 5, "size": 16}, "size is 16: pictures are compared at 32 x 32"),
        ({"keep": 5, "features": "own"}, "features is 'own': choose"),
    ):
        with pytest.raises(ValueError, match=text):
            Curator(tmp_path, **wrong)  # type: ignore[arg-type]
    curator = Curator(tmp_path, keep=5)
    list(curator.run(Crawl(ends_at=20)))
    with pytest.raises(ValueError, match=r"keep is 6, and the pass in .* was begun with 5"):
        Curator(tmp_path, keep=6)


@pytest.mark.parametrize(("begun", "now"), [("letterbox", "crop"), ("crop", "letterbox")])
def test_a_pass_cannot_continue_with_another_fit(tmp_path: Path, begun: Any, now: Any) -> None:
    list(Curator(tmp_path, keep=5, fit=begun).run(Crawl(ends_at=20)))
    with pytest.raises(ValueError, match=f"fit is '{now}', and the pass in .* with '{begun}'"):
        Curator(tmp_path, keep=5, fit=now)
    assert Curator(tmp_path, keep=5, fit=begun).progress.read == 20


def test_a_batch_of_large_frames_ends_early(tmp_path: Path) -> None:
    frame = np.zeros((2160, 3840, 3), np.uint8).tobytes()
    ahead: list[int] = []

    class Film:
        name = "film"

        def samples(self, position: object = None) -> Iterator[tuple[Sample, Position]]:
            for number in range(8):
                ahead.append(number)
                yield Sample(f"{number}", frame, shape=(2160, 3840, 3)), number + 1

    curator = Curator(tmp_path, keep=2)
    reads = [(counts.read, len(ahead)) for counts in curator.run(Film())]
    assert reads == [(3, 3), (6, 6), (8, 8)]  # three frames of 25 MB reach 64 MiB


def test_a_batch_of_pictures_that_are_compared_at_a_large_size_ends_early(tmp_path: Path) -> None:
    curator = Curator(tmp_path, 10, size=512)
    first = next(curator.run(Crawl(ends_at=60)))
    assert first.read <= 8  # each has 9 MB while the curator compares it in floating point


def test_a_file_of_rows_that_is_shorter_than_saved_is_an_error(tmp_path: Path) -> None:
    rows = Rows(tmp_path / "bad.jsonl")
    rows.go_back(0)
    for number in range(3):
        rows.add(Bad(str(number), "a", None, "0", "damaged", "half a file"))
    rows.write()
    length = rows.sync()
    rows.add(Bad("3", "a", None, "0", "damaged", "half a file"))
    rows.write()
    rows.go_back(length)
    assert [row["id"] for row in rows] == ["0", "1", "2"]
    (tmp_path / "bad.jsonl").unlink()
    with pytest.raises(OSError, match=rf"has 0 bytes, and {length} were saved.*begin again"):
        rows.go_back(length)


@pytest.mark.parametrize(("kind", "side"), [("JPEG", 7000), ("PNG", 5600)])
def test_pictures_of_large_cameras_are_kept(kind: str, side: int, tmp_path: Path) -> None:
    noise_HW = np.random.default_rng(0).integers(0, 256, (100, 100), np.uint8)
    image = Image.fromarray(noise_HW).resize((side, side), Image.Resampling.NEAREST)
    image.save(tmp_path / f"a.{kind.lower()}")
    curator = Curator(tmp_path / "state", keep=4)
    *_, counts = curator.run(ImageFolder(str(tmp_path)))
    assert (counts.kept, counts.bad) == (1, {})


def test_the_error_about_a_picture_that_is_too_large_names_the_remedy(tmp_path: Path) -> None:
    Image.new("L", (8001, 8000)).save(tmp_path / "a.png")
    curator = Curator(tmp_path / "state", keep=4)
    *_, counts = curator.run(ImageFolder(str(tmp_path)))
    assert (counts.kept, counts.bad) == (0, {"pixels": 1})
    (bad,) = curator.bad()
    assert bad.message == "8001 x 8000 pixels; at most 64000000 are decoded: scale it down"
