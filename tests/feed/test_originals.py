"""Original bytes of samples: a naive twin, threads, kills and a full disk."""

from __future__ import annotations

import errno
import io
import os
import random
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from table import table

from stream_ssl.batch import Origin
from stream_ssl.feed import originals as module
from stream_ssl.feed.originals import KeptOriginals
from stream_ssl.originals import Originals, name_of

SHAPE = (8, 8, 3)


def row(codec: str = "jpeg", shape: Sequence[int] | None = None) -> dict[str, Any]:
    return {"codec": codec, "shape": shape}


def origins(*names: str | None) -> list[Origin | None]:
    return [Origin("robot", "left", str(n), 0.0, name) for n, name in enumerate(names)]


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("*/*")}


def kept(folder: Path, budget: int = 10_000, held: Sequence[str] = ()) -> KeptOriginals:
    return KeptOriginals(folder, SHAPE, budget, held)


def test_the_store_keeps_the_same_files_as_its_naive_twin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the twin, each sample is under way, held or gone, and only gone ones lack a file."""
    monkeypatch.setattr(module, "SWEEP", 3)
    rng = random.Random(0)
    store = kept(tmp_path)
    on_way: list[str] = []
    held: list[str] = []
    saved: set[str] = set()
    saving: set[str] | None = None
    for _ in range(600):
        act = rng.choice(["send", "send", "learn", "evict", "save", "durable"])
        if act == "send":
            name = store.keep(row(), f"picture {rng.randrange(12)}".encode())
            assert name is not None
            on_way.append(name)
        elif act == "learn" and on_way:
            batch, on_way = on_way[:4], on_way[4:]
            store.arrived(origins(*batch))
            admitted = [name for name in batch if rng.random() < 0.5]
            held += admitted
            store.left(origins(*batch), None, held=lambda: {*held})  # noqa: B023
        elif act == "evict" and held:
            gone = [held.pop(rng.randrange(len(held)))]
            store.left((), origins(*gone), held=lambda: {*held})  # noqa: B023
        elif act == "save":
            saving = set(held)
            store.saving(set(held))
        elif act == "durable" and saving is not None:
            saved, saving = saving, None
            store.saved(set(held))
        assert {*on_way, *held, *saved} <= files(tmp_path)
        store.sweep(set(held))
        assert files(tmp_path) == {*on_way, *held, *saved, *(saving or ())}
        assert store.bytes == sum(path.stat().st_size for path in tmp_path.glob("*/*"))
    assert not store.unkept


def test_the_store_returns_the_bytes_that_were_sent(tmp_path: Path) -> None:
    store = kept(tmp_path)
    name = store.keep(row(), memoryview(b"any bytes"))
    assert name is not None
    assert store.read(name) == b"any bytes"
    pixels = np.random.default_rng(0).integers(0, 256, (5, 9, 3), np.uint8)
    name = store.keep(row("raw", [5, 9, 3]), pixels.tobytes())
    assert name is not None
    with Image.open(io.BytesIO(store.read(name))) as image:
        assert image.format == "PNG"
        assert np.array_equal(np.asarray(image), pixels)


@table("sent", [row("raw", [8, 8, 3]), row("vector", [4])])
def test_samples_that_the_memory_holds_entirely_are_not_stored(
    sent: dict[str, Any], tmp_path: Path
) -> None:
    store = kept(tmp_path)
    assert store.keep(sent, b"0" * 192) is None
    assert not files(tmp_path)
    assert not store.unkept


def test_the_budget_bounds_the_files_and_the_log_names_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = kept(tmp_path, budget=250)
    first = store.keep(row(), b"a" * 100)
    assert store.keep(row(), b"b" * 100) is not None
    for _ in range(9):
        assert store.keep(row(), b"c" * 100) is None
    assert store.keep(row(), b"a" * 100) == first  # the same bytes take no more room
    assert (store.bytes, store.unkept) == (200, {"budget": 9})
    assert caplog.text.count("raise originals.budget") == 1
    assert first is not None
    store.arrived(origins(first, first))
    store.left(origins(first), held=set)
    store.sweep(set())
    assert store.keep(row(), b"c" * 100) is not None
    assert sum(path.stat().st_size for path in tmp_path.glob("*/*")) == store.bytes == 200


def test_a_start_deletes_the_files_that_no_checkpoint_holds(tmp_path: Path) -> None:
    """A kill leaves such files, and may also leave half of a file."""
    store = kept(tmp_path)
    names = [store.keep(row(), f"picture {n}".encode()) for n in range(6)]
    half = tmp_path / str(names[0])[:2] / "half.1.part"
    half.write_bytes(b"pic")
    held = [str(name) for name in names[:2]]
    again = kept(tmp_path, held=held)
    assert files(tmp_path) == set(held)
    assert again.bytes == 18
    again.left(origins(*held), held=set)
    again.sweep(set())
    assert files(tmp_path) == set(held)  # a restart would need them
    again.saving(set())
    again.saved(set())
    assert not files(tmp_path)


def test_a_damaged_file_is_not_read(tmp_path: Path) -> None:
    store = kept(tmp_path)
    name = store.keep(row(), b"whole")
    assert name == name_of(b"whole")
    (tmp_path / name[:2] / name).write_bytes(b"")
    with pytest.raises(OSError, match="does not have the content that its name states"):
        store.read(name)
    store.sweep(set())
    with pytest.raises(FileNotFoundError):
        store.read("0" * 32)


def test_a_name_in_a_foreign_checkpoint_leads_to_no_other_file(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    store = kept(tmp_path / "originals")
    for name in (str(victim), "../victim", "/dev/zero", "\0", ""):
        with pytest.raises(OSError, match="is no name of an original"):
            store.read(name)
        store.left(origins(name), held=set)
        store.sweep(set())
    assert victim.read_text() == "precious"


def test_a_read_does_not_wait_for_a_pipe_in_the_place_of_an_original(tmp_path: Path) -> None:
    (tmp_path / "00").mkdir()
    os.mkfifo(tmp_path / "00" / ("0" * 32))
    with pytest.raises(OSError, match="is a pipe"):
        Originals(tmp_path).read("0" * 32)


def test_foreign_files_among_the_originals_stay_and_do_not_count(tmp_path: Path) -> None:
    name = kept(tmp_path).keep(row(), b"whole")
    assert name is not None
    foreign = tmp_path / name[:2] / ".DS_Store", tmp_path / "zz" / name
    foreign[1].parent.mkdir()
    for path in foreign:
        path.write_text("theirs")
    store = kept(tmp_path, held=[name])
    assert (store.bytes, dict(store.unkept)) == (5, {})
    kept(tmp_path)
    assert not (tmp_path / name[:2] / name).exists()
    assert all(path.exists() for path in foreign)


def test_the_store_counts_and_logs_a_full_disk_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = kept(tmp_path)
    with monkeypatch.context() as patch:

        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        patch.setattr(Path, "write_bytes", full)
        assert [store.keep(row(), f"{n}".encode()) for n in range(5)] == [None] * 5
    assert (store.unkept, store.bytes) == ({"disk": 5}, 0)
    assert caplog.text.count("the disk is full") == 1
    assert not list(tmp_path.glob("*/*"))
    assert store.keep(row(), b"0") is not None  # there is room again


def test_the_store_goes_on_without_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    store = kept(tmp_path / "file" / "originals")
    assert store.keep(row(), b"0") is None
    assert store.unkept == {"disk": 2}


def test_threads_store_the_same_bytes_once(tmp_path: Path) -> None:
    store = kept(tmp_path)
    start = threading.Barrier(4)

    def work() -> None:
        start.wait()
        for n in range(50):
            assert store.keep(row(), f"picture {n}".encode()) is not None

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(files(tmp_path)) == 50
    assert store.bytes == sum(len(f"picture {n}") for n in range(50))
    assert {Originals(tmp_path).read(name) for name in files(tmp_path)} == {
        f"picture {n}".encode() for n in range(50)
    }


@table("budget", [0, -1])
def test_a_budget_below_one_byte_is_refused(budget: int, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"budget {budget}: must be at least 1 byte, or null"):
        kept(tmp_path, budget)
