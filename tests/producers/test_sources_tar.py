"""Tar archives of other programs and of attackers."""

from __future__ import annotations

import bz2
import gzip
import lzma
import random
import shutil
import subprocess
import tarfile
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from source_files import encoded, named, pixels, shard_members, write_tar
from table import table

from stream_ssl.producers.sources import WebDataset
from stream_ssl.producers.sources.base import BrokenFileError
from stream_ssl.producers.sources.tar import BLOCK, MAX_HEADER, read_members

PNG = encoded(pixels(1, 6, 5, 3)[0])
WHOLE = [f"{n:06d}" for n in range(4)]


def header(name: str, size: int, kind: bytes = b"0", link: str = "") -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.type, info.linkname = size, kind, link
    return info.tobuf(tarfile.GNU_FORMAT)


def member(name: str, data: bytes, kind: bytes = b"0") -> bytes:
    return header(name, len(data), kind) + data + bytes(-len(data) % 512)


def pax(**records: str) -> bytes:
    body = b""
    for key, value in records.items():
        rest = f" {key}={value}\n".encode()
        body += f"{len(rest) + 2 + (len(rest) > 97)}".encode() + rest
    return member("pax", body, b"x")


END = bytes(1024)
FOLDER = "x" * 99 + "/"  # fills the name of a header


def keys(path: Path) -> tuple[list[str], dict[str, int]]:
    """Return the keys of the samples that are sent, and the counts of the others."""
    source = WebDataset(str(path))
    try:
        sent = [named(sample).partition("/")[2] for sample, _ in source.samples()]
    except ValueError:  # not one sample
        sent = []
    return sent, dict(source.skipped.by_reason)


def told(path: Path, position: Any = None) -> list[tuple[str, bytes, Any]]:
    """Return the id, content and position of each sample."""
    stream = WebDataset(str(path)).samples(position)
    return [(named(sample), bytes(sample.data), at) for sample, at in stream]


def of(*parts: bytes) -> bytes:
    """Return an archive with a whole sample before and after the parts."""
    return b"".join([member("a.png", PNG), *parts, member("z.png", PNG), END])


BOMBS = {
    "pax 2^62": (header("pax", 2**62, b"x") + member("b.png", PNG), ["a", "z"], "damaged"),
    "long name 2^62": (header("l", 2**62, b"L") + member("b.png", PNG), ["a", "z"], "damaged"),
    "long link 2^62": (header("l", 2**62, b"K") + member("b.png", PNG), ["a", "z"], "damaged"),
    "member 2^62": (header("b.png", 2**62), ["a", "z"], "damaged"),
    "size in pax 2^62": (pax(size=str(2**62)) + member("b.png", PNG), ["a", "z"], "damaged"),
    "size in pax -1": (pax(size="-1") + member("b.png", PNG), ["a", "z"], "damaged"),
    "size in pax before a long name": (
        pax(size=str(3 * BLOCK))
        + member("l", b"b.png\0", b"L")
        + header("short", 0)
        + PNG.ljust(3 * BLOCK, b"\0"),
        ["a", "b", "z"],
        None,
    ),
    "long name that is cut behind a slash": (
        member("l", FOLDER.encode() + b"b.png\0", b"L") + member(FOLDER, PNG, b"\0"),
        ["a", f"{FOLDER}b", "z"],
        None,
    ),
    "pax name that is cut behind a slash": (
        pax(path=f"{FOLDER}b.png") + member(FOLDER, PNG, b"\0"),
        ["a", f"{FOLDER}b", "z"],
        None,
    ),
    "large pax": (
        member("p", bytes(MAX_HEADER + 1), b"x") + member("b.png", PNG),
        ["a", "z"],
        "damaged",
    ),
    "damaged pax": (member("p", b"99 path=b", b"x") + member("b.png", PNG), ["a", "z"], "damaged"),
    "chain of pax": (pax(path="b.png") * 2000 + member("b", PNG), ["a", "b", "z"], None),
    "label": (member("b.png", PNG) + member("b.cls", bytes(5000)), ["a", "b", "z"], "bad label"),
    "label before its image": (
        member("b.cls", bytes(5000)) + member("b.png", PNG),
        ["a", "b", "z"],
        "bad label",
    ),
    "hard link": (header("b.png", 0, b"1", "a.png"), ["a", "z"], "link"),
    "symbolic link": (header("b.png", 0, b"2", "a.png"), ["a", "z"], "link"),
    "label behind a linked image": (
        header("b.png", 0, b"2", "a.png") + member("b.cls", b"1"),
        ["a", "z"],
        "link",
    ),
    "linked label": (
        member("b.png", PNG) + header("b.cls", 0, b"2", "x"),
        ["a", "b", "z"],
        "bad label",
    ),
    "link of another kind": (header("b.txt", 0, b"2", "x"), ["a", "z"], None),
    "twice": (member("b.png", b"old") + member("b.png", PNG), ["a", "b", "z"], "twice"),
    "bmp": (member("b.bmp", b"BM"), ["a", "z"], "malformed"),
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", BOMBS)
def test_a_bad_member_costs_no_other_sample(name: str, packed: bool, tmp_path: Path) -> None:
    body, sent, reason = BOMBS[name]
    path = tmp_path / "s.tar"
    path.write_bytes(gzip.compress(of(body)) if packed else of(body))
    tracemalloc.start()
    found = keys(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found == (sent, {reason: 1} if reason else {})
    assert peak < 8 * 2**20


def test_many_members_of_one_key_do_not_fill_memory(tmp_path: Path) -> None:
    """The shard has a few kilobytes of packed zeros. All its names belong to one sample."""
    zeros = PNG + bytes(2**21)
    path = tmp_path / "s.tar"
    names = [f"b.{n}.png" for n in range(16)]
    names += ["b.png", "b.jpg", "b.webp", "b.png", "b.jpeg"]
    path.write_bytes(gzip.compress(of(*(member(name, zeros) for name in names)), 1))
    tracemalloc.start()
    sent, counted = keys(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (sent, counted) == (["a", "z"], {"twice": 1, "malformed": 1})
    assert peak < 6 * len(zeros)


def test_a_shard_that_unpacks_to_far_more_than_its_size_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stream_ssl.producers.sources.packed.SLACK", 2**20)
    path = tmp_path / "s.tar"
    path.write_bytes(bz2.compress(of(member("b.txt", bytes(2**25)))))
    assert keys(path) == (["a"], {"damaged": 1})
    whole = [member("b.png", PNG), member("b.cls", b"1")]
    for bomb in ("c.txt", "c.png"):  # the bomb costs no earlier sample
        path.write_bytes(gzip.compress(of(*whole, member(bomb, bytes(2**25)))))
        assert keys(path) == (["a", "b"], {"damaged": 1})


@table("name", ["c.txt", "c.png"])
def test_a_sample_before_a_bomb_is_sent(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("stream_ssl.producers.sources.packed.SLACK", 2**20)
    # The tail hides the bomb: the whole shard unpacks to less than 100 times its size.
    tail = member("d.txt", random.Random(1).randbytes(2**20))
    members = member("b.png", PNG), member("b.cls", b"1"), member(name, bytes(2**25)), tail
    path = tmp_path / "s.tar"
    path.write_bytes(gzip.compress(of(*members)))
    caplog.clear()
    assert keys(path) == (["a", "b"], {"damaged": 1})
    assert f"left out sample c and the rest of {path}" in caplog.text


def test_a_dictionary_larger_than_memory_is_refused(tmp_path: Path) -> None:
    chain = [{"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": 2**28}]
    path = tmp_path / "s.tar"
    path.write_bytes(lzma.compress(of(), filters=chain))
    assert keys(path) == ([], {"damaged": 1})


@table("mode", ["w", "w:gz", "w:bz2", "w:xz"])
def test_a_shard_of_each_standard_compression_resumes_after_every_sample(
    mode: str, tmp_path: Path
) -> None:
    path = tmp_path / "data.tar"
    write_tar(path, shard_members(0, 4), mode)
    stream = told(path)
    assert [name for name, _, _ in stream] == [f"data/{key}" for key in WHOLE]
    for at in range(4):
        assert told(path, stream[at][2]) == stream[at + 1 :]


@table(
    ("magic", "says"),
    [
        (b"\x28\xb5\x2f\xfd", "zstd -d"),
        (b"\x04\x22\x4d\x18", "lz4 -d"),
        (b"PK\x03\x04", "pack its files with tar"),
        (b"7z\xbc\xaf\x27\x1c", "pack its files with tar"),
    ],
)
def test_the_refusal_of_another_compression_names_the_remedy(
    magic: bytes, says: str, tmp_path: Path
) -> None:
    path = tmp_path / "s.tar"
    path.write_bytes(magic + bytes(2000))
    with pytest.raises(BrokenFileError, match=says):
        list(read_members(path, 0, {}))


@table("packed", [False, True])
def test_all_archives_in_a_concatenated_file_are_read(packed: bool, tmp_path: Path) -> None:
    path, parts = tmp_path / "s.tar", []
    for first in (0, 2):
        write_tar(tmp_path / "part.tar", shard_members(first, 2))
        part = (tmp_path / "part.tar").read_bytes()
        parts.append(gzip.compress(part) if packed else part)
    path.write_bytes(b"".join(parts))
    stream = told(path)
    assert [name for name, _, _ in stream] == [f"s/{key}" for key in WHOLE]
    for at in range(4):
        assert told(path, stream[at][2]) == stream[at + 1 :]


def test_an_archive_without_its_end_is_counted_as_damaged(tmp_path: Path) -> None:
    path = tmp_path / "s.tar"
    path.write_bytes(of()[: -len(END)])
    assert keys(path) == (["a"], {"damaged": 1})  # the last one may lack members
    path.write_bytes(member("a.png", PNG) + header("pax", 2**62, b"x") + END)
    assert keys(path) == ([], {"damaged": 1})


def test_the_log_shows_names_of_members_without_control_characters(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "s.tar"
    path.write_bytes(of(member("b\x1b[2J\nfake.png", b"no image")))
    assert keys(path) == (["a", "z"], {"malformed": 1})
    assert "b?[2J?fake" in caplog.text
    assert "\x1b" not in caplog.text


LONG = "x" * 120 + "/" + "y" * 80


@pytest.mark.parametrize("form", ["ustar", "gnu", "pax", "v7", "oldgnu", "bsd ustar", "bsd pax"])
def test_archives_of_other_programs_are_read(form: str, tmp_path: Path) -> None:
    bsd, form = form.startswith("bsd "), form.removeprefix("bsd ")
    if bsd and shutil.which("bsdtar") is None:
        bsd = False  # GNU tar writes the same formats
    names = ["a.png", "deep/er/b.left.png", "deep/er/b.png", "deep/er/b.cls", "ü.png"]
    names += [] if form == "v7" else [f"{LONG}.png"]
    for name in names:
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_bytes(b"7" if name.endswith("cls") else PNG)
    program = ["bsdtar" if bsd else "tar", f"--format={form}", "-cf", "../s.tar"]
    subprocess.run([*program, *names], cwd=tmp_path / "in", check=True)
    stream = [sample for sample, _ in WebDataset(str(tmp_path / "s.tar")).samples()]
    assert [sample.label for sample in stream] == [None, 7, *[None] * (len(names) - 4)]
    assert [named(sample) for sample in stream][:3] == ["s/a", "s/deep/er/b", "s/ü"]
    assert {bytes(sample.data) for sample in stream} == {PNG}
    assert len(stream) == len(names) - 2


@pytest.mark.parametrize("form", ["gnu", "pax"])
def test_sparse_files_are_counted_and_left_out(form: str, tmp_path: Path) -> None:
    for name in ("a.png", "b.png", "c.png"):
        (tmp_path / name).write_bytes(PNG)
    with (tmp_path / "b.png").open("r+b") as file:
        for at in range(1, 200):  # more holes than one header lists
            file.seek(at * 2**17)
            file.write(b"x" * 4096)
    command = ["tar", f"--format={form}", "--sparse", "--hole-detection=raw", "-cf", "s.tar"]
    subprocess.run([*command, "a.png", "b.png", "c.png"], cwd=tmp_path, check=True)
    assert keys(tmp_path / "s.tar") == (["a", "c"], {"sparse": 1})


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:xz"])
def test_a_shard_with_flipped_or_missing_bytes_ends_within_time_and_memory(
    mode: str, tmp_path: Path
) -> None:
    path, rng = tmp_path / "data.tar", random.Random(5)
    write_tar(path, [*shard_members(0, 3), (f"{LONG}.png", PNG)], mode)
    data = path.read_bytes()
    began = time.perf_counter()
    for _ in range(50):
        hostile = bytearray(data[: rng.randrange(len(data))] if rng.random() < 0.3 else data)
        for _ in range(rng.randint(1, 4)):
            if hostile:
                hostile[rng.randrange(len(hostile))] = rng.randrange(256)
        path.write_bytes(hostile)
        tracemalloc.start()
        sent, counted = keys(path)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 16 * 2**20
        assert sent == sorted(set(sent))
        assert len(sent) == 4 or counted
    assert time.perf_counter() - began < 30


@pytest.mark.parametrize("kind", [b"M", b"Z", b"3"])
def test_a_picture_that_is_no_plain_file_is_counted(tmp_path, kind):
    """GNU tar continues a file in its next volume under the type M."""
    size = 0 if kind == b"3" else len(PNG)
    path = tmp_path / "s.tar"
    path.write_bytes(member("a.png", PNG[:size], kind) + member("b.png", PNG) + END)
    assert keys(path) == (["b"], {"kind": 1})


def test_a_folder_with_the_name_of_a_picture_is_ignored(tmp_path):
    path = tmp_path / "s.tar"
    path.write_bytes(header("a.png", 0, b"5") + member("a.png/b.png", PNG) + END)
    assert keys(path) == (["a.png/b"], {})
