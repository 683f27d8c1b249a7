"""Tar shards: their samples, and the effects of damage."""

import io
import json
import logging
import os

import numpy as np
import pytest
from going_on import check_goes_on
from source_files import encoded, named, pixels, shard_members, write_tar
from table import table

from stream_ssl.producers.sources import WebDataset
from stream_ssl.producers.sources.tar import read_members
from stream_ssl.producers.sources.webdataset import LIMITS

PNG = encoded(pixels(1, 6, 5, 3)[0])


def npy(value, **how) -> bytes:
    out = io.BytesIO()
    np.save(out, value, **how)
    return out.getvalue()


ROW = np.array([0.5, -2.0, 3.0], np.float16)


def ids(source):
    return [named(sample) for sample, _ in source.samples()]


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_a_shard_sends_its_images_labels_and_facts_in_order(tmp_path, mode):
    members = shard_members(10, 4)
    write_tar(tmp_path / "data-007.tar", members, mode)
    source = WebDataset(str(tmp_path / "data-007.tar"))
    stream = [sample for sample, _ in source.samples()]
    assert [named(sample) for sample in stream] == [f"data-007/{n:06d}" for n in range(10, 14)]
    assert [sample.label for sample in stream] == [n % 3 for n in range(10, 14)]
    assert [sample.meta for sample in stream] == [{"n": n} for n in range(10, 14)]
    assert [sample.data for sample in stream] == [members[3 * n][1] for n in range(4)]
    assert source.skipped.by_reason == {}


def test_a_resumed_shard_reads_no_earlier_member(tmp_path):
    path = tmp_path / "data.tar"
    write_tar(path, shard_members(0, 6))
    stream = list(WebDataset(str(path)).samples())
    _, position = stream[3]
    # This damage would end a shard that is read from the start.
    path.write_bytes(b"\xff" * 1024 + path.read_bytes()[1024:])
    source = WebDataset(str(path))
    assert [named(sample) for sample, _ in source.samples(position)] == [
        "data/000004",
        "data/000005",
    ]
    assert source.skipped.by_reason == {}


def test_members_group_by_folder_and_name_up_to_the_first_dot(tmp_path):
    members = [
        ("x/a.left.png", PNG),  # an image of another name than the sample's
        ("x/a.png", PNG),
        ("x/a.cls", b"4\n"),
        ("y/a.PNG", PNG),
        ("y/a.txt", b"not wanted"),
        ("__meta__.json", b"not a sample"),
        ("._b.png", b"not a sample"),
        ("c.jpg", PNG),
    ]
    write_tar(tmp_path / "data.tar", members)
    stream = [sample for sample, _ in WebDataset(str(tmp_path / "data.tar")).samples()]
    assert [(named(s), s.label, s.codec) for s in stream] == [
        ("data/x/a", 4, "png"),
        ("data/y/a", None, "png"),
        ("data/c", None, "png"),
    ]


def test_a_sample_whose_name_begins_with_underscores_is_sent(tmp_path):
    names = ["_a", "__x94e2r3Z0s_17", "__b", "_c__"]  # such as the ids of videos
    members = [
        (f"x/{name}{end}", what) for name in names for end, what in ((".cls", b"4"), (".png", PNG))
    ]
    write_tar(tmp_path / "data.tar", [*members, ("x/__meta__.cls", b"no sample")])
    source = WebDataset(str(tmp_path / "data.tar"))
    stream = [(named(sample), sample.label) for sample, _ in source.samples()]
    assert stream == [(f"data/x/{name}", 4) for name in names]
    assert source.skipped.by_reason == {}


@pytest.mark.parametrize("hidden", ["x/._a.cls", "._a.cls", "__meta__.json", "x/.DS_Store"])
def test_a_hidden_member_between_two_parts_does_not_divide_a_sample(tmp_path, hidden):
    parts = [("x/a.png", PNG), (hidden, b"not a sample"), ("x/a.cls", b"4")]
    write_tar(tmp_path / "data.tar", [*parts, (hidden, b"not a sample"), ("x/b.png", PNG)])
    source = WebDataset(str(tmp_path / "data.tar"))
    stream = list(source.samples())
    assert [(named(sample), sample.label) for sample, _ in stream] == [
        ("data/x/a", 4),
        ("data/x/b", None),
    ]
    assert source.skipped.by_reason == {}
    _, position = stream[0]
    assert [named(sample) for sample, _ in source.samples(position)] == ["data/x/b"]


def test_the_only_image_of_a_sample_may_have_a_longer_extension(tmp_path, caplog):
    members = [
        *[("a.left.PNG", PNG), ("a.cls", b"4")],
        ("b.v1.2.png", PNG),
        *[("c.left.png", PNG), ("c.right.png", PNG)],
        *[("d.seg.png", PNG), ("d.tif", b"II*\0")],
        ("e.left.png", bytes(2**26 + 1)),
        ("f.left.txt", b"no image"),
        *[("g.npy", npy(ROW)), ("g.preview.png", PNG), ("g.depth.npy", npy(ROW))],
    ]
    write_tar(tmp_path / "data.tar", members)
    source = WebDataset(str(tmp_path / "data.tar"))
    stream = [sample for sample, _ in source.samples()]
    assert [(named(s), s.label, s.codec) for s in stream] == [
        ("data/a", 4, "png"),
        ("data/b", None, "png"),
        ("data/g", None, "vector"),
    ]
    assert source.skipped.by_reason == {"malformed": 3, "too large": 1}
    assert "2 images under ['left.png', 'right.png']; must be one" in caplog.text
    assert "0 images under ['seg.png', 'tif']; must be one; convert .tif" in caplog.text
    members_read = list(read_members(tmp_path / "data.tar", 0, LIMITS))
    unread = [one.name for one in members_read if one.name and one.data is None]
    assert unread == ["d.tif", "e.left.png", "f.left.txt", "g.depth.npy"]


@table(
    ("facts", "message"),
    [
        (b"{", "Expecting"),
        (b"[1]", "no object"),
        (b"[" * 100_000, "recursion"),
        (b"\xff", "codec can't decode"),
        (b" " * (2**22 + 1), "4194305 bytes; at most 4194304 are read"),
    ],
)
def test_unreadable_facts_cost_no_sample(tmp_path, caplog, facts, message):
    write_tar(tmp_path / "data.tar", [("a.png", PNG), ("a.json", facts), ("a.cls", b"3")])
    source = WebDataset(str(tmp_path / "data.tar"))
    ((sample, _),) = source.samples()
    assert (sample.data, sample.label, sample.meta) == (PNG, 3, None)
    assert source.skipped.by_reason == {"bad facts": 1}
    assert "left out the .json of data/a (bad facts): " in caplog.text
    assert message in caplog.text


def test_a_fact_that_is_too_long_is_counted_and_costs_no_other_fact(tmp_path, caplog):
    facts = json.dumps({"caption": "a" * 5000, "n": 1}).encode()
    write_tar(tmp_path / "data.tar", [("a.png", PNG), ("a.json", facts)])
    source = WebDataset(str(tmp_path / "data.tar"))
    assert [sample.meta for sample, _ in source.samples()] == [{"n": 1}]
    assert source.skipped.by_reason == {"bad facts": 1}
    assert "'caption' of data/a (bad facts): too long" in caplog.text


@table(
    ("broken", "message"),
    [
        ([("b.cls", b"1")], "0 images under ['cls']; must be one; the members of a sample must"),
        ([("b.png", PNG), ("b.webp", PNG)], "2 images under"),
        ([("b.0.png", PNG), ("b.1.png", PNG)], "one; the name of a sample ends at its first dot"),
        ([("b.png", b"no image")], "neither JPEG"),
        ([("b.png", b"")], "empty: it has 0 bytes"),
        ([("b.npy", b"\x93NUMPY\1\0nothing")], "the .npy is no array of NumPy"),
        ([("b.npy", b"")], "the .npy is no array of NumPy"),
        ([("b.npy", npy(ROW).replace(b"(3,)", b"(9,)"))], "claims 9 numbers, and ends before them"),
        ([("b.npy", npy(ROW).replace(b"(3,), }   ", b"(-1,), }  "))], "claims -1 numbers"),
        ([("b.npy", npy(ROW).replace(b"(3,), }      ", b"(3000000,), }"))], "claims 3000000"),
        ([("b.npy", npy(ROW[None]))], "float16 of shape (1, 3): a vector is floats of shape [D]"),
        ([("b.npy", npy(np.arange(3)))], "int64 of shape (3,): a vector is floats of shape [D]"),
        ([("b.npy", npy(np.array([{}, 1, 2]), allow_pickle=True))], "object of shape (3,)"),
        ([("b.npy", npy(np.array([1.0, 1e300])))], "not finite"),
        ([("b.npy", npy(np.zeros(0, np.float32)))], "D lies in"),
    ],
)
def test_a_malformed_sample_is_counted_and_left_out(tmp_path, caplog, broken, message):
    write_tar(tmp_path / "data.tar", [("a.png", PNG), *broken, ("c.png", PNG)])
    source = WebDataset(str(tmp_path / "data.tar"))
    with caplog.at_level(logging.WARNING):
        assert ids(source) == ["data/a", "data/c"]
    assert source.skipped.by_reason == {"malformed": 1}
    assert "left out data/b" in caplog.text
    assert message in caplog.text


@table(
    ("written", "label"),
    [
        *[(b"3", 3), (b" 3\n", 3), (b"3.0", 3), (b"2147483647", 2**31 - 1)],
        *[(b"-1", None), (b"", None), (b"\n", None), (b"nan", None)],
    ],
)
def test_a_label_is_a_whole_number_or_none(tmp_path, written, label):
    write_tar(tmp_path / "data.tar", [("a.png", PNG), ("a.cls", written)])
    source = WebDataset(str(tmp_path / "data.tar"))
    assert [sample.label for sample, _ in source.samples()] == [label]
    assert source.skipped.by_reason == {}


@table("written", [b"cat", b"1.5", b"-2", b"\xff", b"inf", b"9" * 999, b"2147483648"])
def test_a_bad_label_costs_no_sample(tmp_path, written, caplog):
    write_tar(tmp_path / "data.tar", [("a.png", PNG), ("a.cls", written)])
    source = WebDataset(str(tmp_path / "data.tar"))
    assert [sample.label for sample, _ in source.samples()] == [None]
    assert source.skipped.by_reason == {"bad label": 1}
    assert "left out the label of data/a (bad label)" in caplog.text
    assert "is no whole number from 0 to 2147483647" in caplog.text


def test_a_vector_is_a_sample_only_without_an_image(tmp_path, caplog):
    members = [
        *[("a.npy", npy(ROW)), ("a.json", b'{"n": 1}'), ("a.cls", b"7")],
        ("b.npy", npy(ROW.astype(">f8"))),
        *[("c.npy", npy(np.zeros((4, 4)))), ("c.png", PNG)],  # such as a depth map
        *[("d.png", PNG), ("d.npy", bytes(2**24 + 1))],
        ("e.npy", bytes(2**24 + 1)),
        *[("f.npy", npy(ROW)), ("f.tif", b"II*\0")],  # an embedding beside an image
    ]
    write_tar(tmp_path / "data.tar", members)
    source = WebDataset(str(tmp_path / "data.tar"))
    stream = [sample for sample, _ in source.samples()]
    assert [(named(s), s.codec, s.dtype) for s in stream] == [
        ("data/a", "vector", "float16"),
        ("data/b", "vector", "float32"),
        ("data/c", "png", None),
        ("data/d", "png", None),
    ]
    assert (stream[0].label, stream[0].meta, stream[0].shape) == (7, {"n": 1}, (3,))
    assert np.frombuffer(stream[0].data, "<f2").tolist() == ROW.tolist()
    assert np.frombuffer(stream[1].data, "<f4").tolist() == ROW.tolist()
    assert source.skipped.by_reason == {"too large": 1, "malformed": 1}
    assert "0 images under ['npy', 'tif']; must be one; convert .tif to PNG" in caplog.text
    assert "left out data/e" in caplog.text


def test_facts_that_the_wire_cannot_carry_are_dropped(tmp_path):
    facts = b'{"a": 1, "big": %d, "long": "%s", "list": [1], "none": null, "b": true}'
    long = b"x" * 5000
    write_tar(tmp_path / "data.tar", [("a.png", PNG), ("a.json", facts % (2**70, b"y"))])
    write_tar(tmp_path / "long.tar", [("a.png", PNG), ("a.json", facts % (2, long))])
    ((sample, _),) = WebDataset(str(tmp_path / "data.tar")).samples()
    assert sample.meta == {"a": 1, "long": "y", "b": True}
    ((sample, _),) = WebDataset(str(tmp_path / "long.tar")).samples()
    assert sample.meta == {"a": 1, "big": 2, "b": True}


@table("mode", ["w", "w:gz"])
@table("share", [0.2, 0.5, 0.7])
def test_a_truncated_shard_sends_its_whole_samples_and_the_next_shard_follows(
    tmp_path, caplog, mode, share
):
    write_tar(tmp_path / "a.tar", shard_members(0, 8), mode)
    write_tar(tmp_path / "b.tar", shard_members(8, 2))
    whole = ids(WebDataset(str(tmp_path / "a.tar")))
    data = (tmp_path / "a.tar").read_bytes()
    (tmp_path / "a.tar").write_bytes(data[: int(len(data) * share) | 1])
    source = WebDataset([str(tmp_path / "a.tar"), str(tmp_path / "b.tar")])
    with caplog.at_level(logging.WARNING):
        *rest, first, second = ids(source)
    assert rest == whole[: len(rest)]
    assert [first, second] == ["b/000008", "b/000009"]
    assert len(rest) < 8
    assert source.skipped.by_reason == {"damaged": 1}
    assert "unreadable from byte" in caplog.text or "no header at byte" in caplog.text


def test_a_damaged_header_does_not_end_the_shard(tmp_path, caplog):
    path = tmp_path / "data.tar"
    write_tar(path, shard_members(0, 6))
    starts = [member.start for member in read_members(path, 0, {})]
    data = bytearray(path.read_bytes())
    data[starts[9] : starts[9] + 512] = b"\xff" * 512
    path.write_bytes(data)
    source = WebDataset(str(path))
    with caplog.at_level(logging.WARNING):
        # The samples on both sides of the damage may lack members.
        assert ids(source) == [f"data/{n:06d}" for n in (0, 1, 4, 5)]
    assert source.skipped.by_reason == {"damaged": 2}
    assert f"no header at byte {starts[9]}" in caplog.text


@pytest.mark.parametrize("data", [b"", b"no tar at all" * 100])
def test_a_file_that_is_no_tar_costs_no_other_shard(tmp_path, data):
    (tmp_path / "a.tar").write_bytes(data)
    write_tar(tmp_path / "b.tar", shard_members(0, 2))
    source = WebDataset(str(tmp_path / "*.tar"))
    assert ids(source) == ["b/000000", "b/000001"]
    assert source.skipped.by_reason == {"damaged": 1}


@pytest.mark.parametrize("members", [[], [("__meta__.json", b"{}")]])
def test_the_error_for_an_empty_shard_says_that_the_files_hold_no_sample(tmp_path, members):
    write_tar(tmp_path / "a.tar", members)
    with pytest.raises(ValueError, match=r"source 'webdataset': its files hold no sample; give"):
        next(WebDataset(str(tmp_path / "a.tar")).samples())


def test_a_position_stays_valid_when_a_shard_is_added_at_the_end(tmp_path):
    write_tar(tmp_path / "a.tar", shard_members(0, 3))
    (*_, (_, position)) = WebDataset(str(tmp_path / "*.tar")).samples()
    write_tar(tmp_path / "b.tar", shard_members(3, 2))
    source = WebDataset(str(tmp_path / "*.tar"))
    assert [named(sample) for sample, _ in source.samples(position)] == ["b/000003", "b/000004"]


def test_a_shard_whose_name_is_not_unicode_resumes_exactly(tmp_path):
    path = tmp_path / os.fsdecode(b"caf\xe9.tar")
    write_tar(path, shard_members(0, 3))
    assert len(check_goes_on(lambda: WebDataset(str(path)))) == 3


def test_a_position_of_other_shards_is_refused(tmp_path):
    for name in ("b", "c"):
        write_tar(tmp_path / f"{name}.tar", shard_members(0, 3))
    (*_, (_, position)) = WebDataset(str(tmp_path / "*.tar")).samples()
    with pytest.raises(ValueError, match="shard 1 is none of 1"):
        WebDataset(str(tmp_path / "b.tar")).samples(position)
    write_tar(tmp_path / "a.tar", shard_members(0, 3))
    with pytest.raises(ValueError, match=r"file was 'c\.tar' and is 'b\.tar'"):
        WebDataset(str(tmp_path / "*.tar")).samples(position)
    write_tar(tmp_path / "c.tar", shard_members(0, 40))
    with pytest.raises(ValueError, match="bytes was"):
        WebDataset([str(tmp_path / "b.tar"), str(tmp_path / "c.tar")]).samples(position)


def test_an_epoch_count_below_1_is_refused(tmp_path):
    write_tar(tmp_path / "d-0.tar", shard_members(0, 1))
    with pytest.raises(ValueError, match="epochs 0"):
        WebDataset(str(tmp_path / "d-0.tar"), epochs=0)
