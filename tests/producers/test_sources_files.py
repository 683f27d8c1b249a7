"""IDX, CIFAR, NumPy files and image folders: samples that are read, and files that are refused."""

import gzip
import io
import logging
import os
import random
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from source_files import (
    encoded,
    idx_bytes,
    named,
    pixels,
    write_cifar,
    write_idx,
    write_images,
)
from table import table

from stream_ssl.producers.sources import (
    CifarBinary,
    IdxDataset,
    ImageFolder,
    NpyVectors,
    WatchedFolder,
    stored_rows,
)
from stream_ssl.producers.sources.base import SourceError
from stream_ssl.producers.sources.cifar import read_records
from stream_ssl.producers.sources.fields import file_name
from stream_ssl.producers.sources.finite import select
from stream_ssl.producers.sources.image_files import MAX_FILE
from stream_ssl.producers.sources.stored_rows import StoredRows
from stream_ssl.wire.sample import check_position

EMBEDDED = Path(__file__).parents[2] / "stream_ssl/demo/data"


def arrays(source):
    return [
        np.frombuffer(sample.data, np.uint8).reshape(sample.shape) for sample, _ in source.samples()
    ]


def labels(source):
    return [sample.label for sample, _ in source.samples()]


@table("packed", [False, True])
@table("split", ["train", "test"])
def test_idx_sends_the_images_and_labels_of_its_files(tmp_path, packed, split):
    image_NHW, label_N = pixels(9, 4, 6), np.arange(9) % 4
    stem = {"train": "train", "test": "t10k"}[split]
    write_idx(tmp_path / "Tiny/raw", stem, image_NHW, label_N, packed)
    for root in (tmp_path, tmp_path / "Tiny", tmp_path / "Tiny/raw"):
        source = IdxDataset(root, split, shuffle=False)
        assert np.array_equal(arrays(source), image_NHW[..., None])
        assert labels(source) == label_N.tolist()
        assert source.name == "Tiny"
        assert next(source.samples())[0].id == f"{stem}/0"


def test_the_embedded_data_are_the_test_images_of_fashion_mnist():
    source = IdxDataset(
        images=EMBEDDED / "t10k-images-idx3-ubyte.gz",
        labels=EMBEDDED / "t10k-labels-idx1-ubyte.gz",
        name="fashion-mnist",
        shuffle=False,
    )
    assert len(source) == 10_000
    assert np.bincount(labels(source)).tolist() == [1000] * 10
    first, _ = next(source.samples())
    assert (first.shape, first.label, first.id) == ((28, 28, 1), 9, "t10k/0")


def test_idx_reads_colour_images_without_labels(tmp_path):
    image_NHWC = pixels(3, 4, 6, 3)
    (tmp_path / "camera-images").write_bytes(idx_bytes(image_NHWC))
    source = IdxDataset(images=tmp_path / "camera-images", shuffle=False)
    assert np.array_equal(arrays(source), image_NHWC)
    assert labels(source) == [None] * 3


@table(
    ("damage", "message"),
    [
        (lambda data: data[:-1], "truncated or damaged"),
        (lambda data: data + b"x", "truncated or damaged"),
        (lambda data: data[:9], "truncated or damaged"),
        (lambda data: b"\x01" + data[1:], "no IDX"),
        (lambda data: data[:2] + b"\x0d" + data[3:], "no IDX"),
        (lambda data: data[:3], "no IDX"),
        (lambda data: b"", "empty"),
        (lambda data: b"\x1f\x8b" + data, "cannot be unpacked"),
        (lambda data: idx_bytes(np.zeros((2, 2))), "are no images"),
        (lambda data: idx_bytes(np.zeros((2, 4, 4, 2))), "are no images"),
        (lambda data: idx_bytes(np.zeros((4, 4, 4))), "one label for each of 4 images"),
    ],
)
def test_damaged_idx_files_are_refused(tmp_path, damage, message):
    write_idx(tmp_path, "train", pixels(5, 4, 4), np.arange(5), packed=False)
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=message):
        IdxDataset(tmp_path)


def test_the_error_of_idx_names_the_missing_file_or_the_conflicting_arguments(tmp_path):
    with pytest.raises(FileNotFoundError, match="t10k-images-idx3-ubyte"):
        IdxDataset(tmp_path, "test")
    with pytest.raises(FileNotFoundError, match="no file"):
        IdxDataset(images=tmp_path / "none")
    with pytest.raises(ValueError, match="one of the two"):
        IdxDataset()
    with pytest.raises(ValueError, match="along with images only"):
        IdxDataset(tmp_path, labels=tmp_path / "labels")
    for name in ("One", "Two"):
        write_idx(tmp_path / name / "raw", "train", pixels(1, 2, 2), np.zeros(1), packed=False)
    with pytest.raises(ValueError, match=r"several data sets.*One.*Two"):
        IdxDataset(tmp_path)


def test_cifar10_sends_the_images_and_labels_of_its_files(tmp_path):
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    image_NHWC, label_N = pixels(9, 32, 32, 3), np.arange(9)
    write_cifar(folder / "data_batch_1.bin", image_NHWC[:4], label_N[:4])
    write_cifar(folder / "data_batch_2.bin", image_NHWC[4:], label_N[4:])
    write_cifar(folder / "test_batch.bin", image_NHWC[::-1], label_N[::-1])
    source = CifarBinary(tmp_path, shuffle=False)
    assert np.array_equal(arrays(source), image_NHWC)
    assert labels(source) == label_N.tolist()
    assert source.name == "cifar10"
    held_out = CifarBinary(folder, "test", shuffle=False)
    assert labels(held_out) == label_N[::-1].tolist()
    assert source.classes is None


def test_cifar_reads_the_names_of_its_classes(tmp_path):
    write_cifar(tmp_path / "data_batch_1.bin", pixels(2, 32, 32, 3), np.arange(2))
    names = [f"kind-{number}" for number in range(10)]
    file = tmp_path / "batches.meta.txt"
    for text, found in (
        ("\n".join([*names, "", ""]), names),
        ("one\ntwo\n", None),
        ("\n".join(names) + "x" * (1 << 20), None),
    ):
        file.write_text(text)
        assert CifarBinary(tmp_path).classes == found


def test_cifar100_sends_one_label_and_keeps_the_other_in_meta(tmp_path):
    image_NHWC, coarse_N, fine_N = pixels(5, 32, 32, 3), np.arange(5), np.arange(95, 100)
    write_cifar(tmp_path / "train.bin", image_NHWC, coarse_N, fine_N)
    fine = CifarBinary(tmp_path, shuffle=False)
    assert labels(fine) == fine_N.tolist()
    assert [sample.meta for sample, _ in fine.samples()] == [{"coarse": n} for n in range(5)]
    coarse = CifarBinary(tmp_path, labels="coarse", shuffle=False)
    assert labels(coarse) == coarse_N.tolist()
    assert next(coarse.samples())[0].meta == {"fine": 95}
    assert np.array_equal(arrays(coarse), image_NHWC)


def test_missing_and_damaged_cifar_files_are_refused(tmp_path):
    path = tmp_path / "data_batch_1.bin"
    with pytest.raises(FileNotFoundError, match=r"no folder .*gone: create it"):
        CifarBinary(tmp_path / "gone")
    with pytest.raises(FileNotFoundError, match=r"data_batch_\*\.bin"):
        CifarBinary(tmp_path)
    write_cifar(path, pixels(3, 32, 32, 3), [1, 2, 11])
    with pytest.raises(ValueError, match=r"label 11 lies outside \[0, 10\)"):
        CifarBinary(tmp_path)
    write_cifar(tmp_path / "train.bin", pixels(2, 32, 32, 3), [1, 20], [2, 99])
    with pytest.raises(ValueError, match=r"label 20 lies outside \[0, 20\)"):
        read_records(tmp_path / "train.bin", 2, 100)
    (tmp_path / "train.bin").unlink()
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(ValueError, match="not a whole number of records of 3073"):
        CifarBinary(tmp_path)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="0 bytes"):
        CifarBinary(tmp_path)
    write_cifar(path, pixels(3, 32, 32, 3), [1, 2, 3])
    write_cifar(tmp_path / "train.bin", pixels(3, 32, 32, 3), [1, 2, 3], [1, 2, 3])
    with pytest.raises(ValueError, match="several data sets"):
        CifarBinary(tmp_path)


def npy_bytes(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


WHOLE = npy_bytes(np.ones((5, 3), np.float32))


@table(
    ("data", "message"),
    [
        (b"", "no array of NumPy"),
        (b"text", "no array of NumPy"),
        (WHOLE[:60], "no array of NumPy"),  # within its header
        (WHOLE[:-1], "no array of NumPy"),
        (WHOLE.replace(b"}", b"("), "no array of NumPy"),
        (WHOLE.replace(b"(5, 3)", b"(9e9,)"), "no array of NumPy"),
        (WHOLE.replace(b"(5, 3), }           ", b"(9999999999999999999999,)}"), "no array of"),
        (b"PK\x03\x04" + bytes(99), "no array of NumPy"),
        (npy_bytes(np.array([{"a": 1}], object)), "no array of NumPy"),  # a pickle
        (npy_bytes(np.ones((5, 3), int)), r"int64 of shape \(5, 3\): vectors are floats"),
        (npy_bytes(np.ones(5)), r"float64 of shape \(5,\): vectors are floats of shape"),
        (
            npy_bytes(np.ones((5, 4, 4, 3), np.uint8)),
            "send its images with Producer.send, one at a",
        ),
    ],
)
def test_damaged_npy_files_are_refused(tmp_path, data, message):
    path = tmp_path / "a.npy"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=rf"a\.npy: .*{message}|{message}"):
        NpyVectors(path)
    np.save(tmp_path / "good.npy", np.ones((5, 3)))
    with pytest.raises(ValueError, match=r"no array of NumPy|the labels of .* are 5 whole numbers"):
        NpyVectors(tmp_path / "good.npy", path)
    with pytest.raises(FileNotFoundError, match=r"no file .*gone\.npy: write an array"):
        NpyVectors(tmp_path / "gone.npy")


@pytest.mark.parametrize("subset", [None, ":5"])
def test_an_array_without_rows_is_refused(tmp_path, subset):
    np.save(tmp_path / "a.npy", np.zeros((0, 8), np.float32))
    with pytest.raises(ValueError, match=r"source 'a': its files hold no sample; give files"):
        NpyVectors(tmp_path / "a.npy", subset=subset)


def test_the_rows_beside_a_bad_vector_are_sent(tmp_path, caplog):
    value_ND, label_N = np.arange(18, dtype=np.float64).reshape(6, 3), np.arange(6)
    value_ND[1, 0], value_ND[2, 2], value_ND[3, 0] = np.nan, np.inf, 1e300
    label_N[4:] = -1, -5  # -1 stands for no label
    np.save(tmp_path / "a.npy", value_ND)
    np.save(tmp_path / "b.npy", label_N)
    source = NpyVectors(tmp_path / "a.npy", tmp_path / "b.npy", shuffle=False)
    name = file_name(tmp_path / "a.npy")
    samples = [sample for sample, _ in source.samples()]
    assert [sample.id for sample in samples] == [f"{name}/{n}" for n in (0, 4, 5)]
    assert [sample.label for sample in samples] == [0, None, None]
    assert source.skipped.by_reason == {"bad vector": 3, "bad label": 1}
    assert f"left out {name}/1 (bad vector): " in caplog.text


def test_image_folder_sends_files_unchanged_with_the_labels_of_their_folders(tmp_path):
    write_images(tmp_path / "bee", 2, "JPEG")
    write_images(tmp_path / "ant/inner", 2, "WEBP")
    write_images(tmp_path / "ant", 1, "PNG")
    write_images(tmp_path, 1, "PNG")
    (tmp_path / "ant/notes.txt").write_text("no image")
    source = ImageFolder(tmp_path, shuffle=False)
    sent = {named(sample): sample for sample, _ in source.samples()}
    assert {name: (s.label, s.codec) for name, s in sent.items()} == {
        "ant/000.png": (0, "png"),
        "ant/inner/000.webp": (0, "webp"),
        "ant/inner/001.webp": (0, "webp"),
        "bee/000.jpg": (1, "jpeg"),
        "bee/001.jpg": (1, "jpeg"),
        "000.png": (None, "png"),
    }
    assert list(sent) == [*sorted(sent)[1:], "000.png"]
    for name, sample in sent.items():
        assert sample.data == (tmp_path / name).read_bytes()
    assert sent["bee/000.jpg"].meta == {"class": "bee"}
    assert not sent["000.png"].meta
    assert source.classes == ["ant", "bee"]


def test_image_folder_trusts_content_over_names_and_counts_unusable_files(tmp_path, caplog):
    first, second, third = write_images(tmp_path / "ant", 3, "PNG")
    first.rename(first.with_suffix(".jpg"))  # a name that lies
    second.write_bytes(b"")
    os.mkfifo(tmp_path / "ant/pipe.png")
    os.truncate(write_images(tmp_path / "bee", 1)[0], MAX_FILE + 1)
    source = ImageFolder(tmp_path, shuffle=False)
    third.unlink()
    with caplog.at_level(logging.INFO):
        assert [(named(s), s.codec) for s, _ in source.samples()] == [("ant/000.jpg", "png")]
    assert "has been read to its end; left out: 3 unreadable, 1 no image" in caplog.text
    assert source.skipped.by_reason == {"no image": 1, "unreadable": 3}
    assert "ant/001.png (no image): empty: it has 0 bytes" in caplog.text
    assert "ant/pipe.png (unreadable): [Errno 22] not a regular file" in caplog.text
    assert "bee/000.png (unreadable): [Errno 27] 268435457 bytes, more than the" in caplog.text


def test_an_endless_source_ends_after_a_whole_pass_without_a_readable_sample(tmp_path):
    paths = write_images(tmp_path / "ant", 3)
    source = ImageFolder(tmp_path, epochs=None)
    _, position = next(source.samples())
    for path in paths:
        path.unlink()
    with pytest.raises(ValueError, match="not one sample of a whole pass"):
        next(source.samples(position))
    assert source.skipped.by_reason == {"unreadable": 2 + 3}


def test_image_folder_without_images_is_refused(tmp_path):
    (tmp_path / "ant").mkdir()
    # After a ValueError, systemd would not start the producer again. The folder may be the mount
    # point of a disk that is mounted later.
    with pytest.raises(FileNotFoundError, match=r"no \.jpg, .* in it or below; mount its disk"):
        ImageFolder(tmp_path)
    with pytest.raises(FileNotFoundError):
        ImageFolder(tmp_path / "none")


def test_image_folder_shortens_long_names_to_valid_ids(tmp_path):
    (path,) = write_images(tmp_path / "ant", 1)
    long = tmp_path / "ant" / ("ü" * 100)
    long.mkdir()
    path.rename(long / ("y" * 200 + ".png"))
    ((sample, _),) = ImageFolder(tmp_path).samples()
    assert len(sample.id.encode()) <= 255


def test_image_folder_escapes_the_name_of_a_class_that_is_not_unicode(tmp_path):
    write_images(tmp_path / os.fsdecode(b"caf\xe9"), 1)
    ((sample, _),) = ImageFolder(tmp_path).samples()
    assert sample.meta == {"class": r"caf\xe9"}


def make(tmp_path, **passes):
    if not (tmp_path / "train-images-idx3-ubyte").exists():
        write_idx(tmp_path, "train", pixels(40, 2, 2), np.arange(40), packed=False)
    return IdxDataset(tmp_path, **passes)


@pytest.mark.parametrize("name", [b"long-" * 30, b"caf\xe9" * 30, "\u00e9".encode() * 40])
def test_the_name_of_a_source_from_a_long_file_name_fits_the_wire(tmp_path, name):
    folder = tmp_path / os.fsdecode(name)
    write_images(folder, 1)
    vectors = folder.with_suffix(".npy")
    np.save(vectors, np.ones((1, 4), np.float32))
    sources = [
        ImageFolder(folder),
        WatchedFolder(folder, settle_seconds=0, idle_seconds=0),
        NpyVectors(vectors),
    ]
    for source in sources:
        ((sample, position),) = source.samples()
        assert sample.source == source.name
        assert source.name.startswith(("long-", r"caf\xe9", "\u00e9"))
        check_position(position)


def test_each_epoch_has_its_own_permutation(tmp_path):
    order = np.reshape(labels(make(tmp_path, epochs=3, seed=5)), (3, 40))
    assert np.array_equal(np.sort(order), np.tile(np.arange(40), (3, 1)))
    assert len({tuple(epoch) for epoch in order.tolist()}) == 3
    assert order[0].tolist() == labels(make(tmp_path, seed=5))
    assert order[0].tolist() != labels(make(tmp_path, seed=6))


def test_subsets_split_the_samples_without_overlap(tmp_path):
    train, held_out = make(tmp_path, subset=":30"), make(tmp_path, subset="30:")
    assert sorted(labels(train)) == list(range(30))
    assert sorted(labels(held_out)) == list(range(30, 40))
    assert labels(make(tmp_path, subset=[7, 3], shuffle=False)) == [7, 3]


@table(
    ("arguments", "message"),
    [
        ({"subset": "5"}, "must be a slice"),
        ({"subset": "a:b"}, "must be a slice"),
        ({"subset": "::0"}, "must be a slice"),
        ({"subset": [40]}, r"index 40 lies outside \[0, 40\)"),
        ({"subset": "40:"}, "is empty"),
        ({"subset": []}, "is empty"),
        ({"epochs": 0}, "epochs 0"),
        ({"seed": -1}, "seed -1"),
    ],
)
def test_wrong_arguments_are_named(tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        make(tmp_path, **arguments)


def test_subsets_follow_the_slices_of_python():
    for text, part in (("::2", slice(None, None, 2)), ("-3:", slice(-3, None))):
        assert select(10, text).tolist() == list(range(10))[part]


def test_a_position_of_a_replaced_file_is_refused(tmp_path):
    _, position = next(make(tmp_path).samples())
    write_idx(tmp_path, "train", pixels(40, 2, 2, seed=9), np.arange(40), packed=False)
    with pytest.raises(ValueError, match="content was"):
        make(tmp_path).samples(position)


def test_linked_class_folders_are_read_once(tmp_path, caplog):
    pool, root = tmp_path / "pool", tmp_path / "root"
    write_images(pool / "ant", 2)
    write_images(root / "cat", 1)
    (root / "bee").symlink_to(pool / "ant")
    (root / "cat" / "round").symlink_to(root)  # a loop
    (root / "feline").symlink_to(root / "cat")
    (root / "gone").symlink_to(tmp_path / "missing")
    (root / "self").symlink_to(root / "self")
    with caplog.at_level(logging.WARNING):
        source = ImageFolder(root, shuffle=False)
        sent = [(named(sample), sample.label) for sample, _ in source.samples()]
    assert sent == [("bee/000.png", 0), ("bee/001.png", 0), ("cat/000.png", 1)]
    assert source.skipped.by_reason == {"link": 4}
    for name in ("cat/round/", "feline/", "gone", "self"):
        assert f"left out {name} (link): a link to" in caplog.text


def test_folders_that_cannot_be_listed_are_counted(tmp_path, monkeypatch):
    write_images(tmp_path / "ant", 1)
    write_images(tmp_path / "bee", 1)
    scandir = os.scandir

    def refuse(folder):
        if Path(folder).name == "bee":
            raise PermissionError(13, "Permission denied", folder)
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", refuse)
    source = ImageFolder(tmp_path)
    assert [named(sample) for sample, _ in source.samples()] == ["ant/000.png"]
    assert source.skipped.by_reason == {"unlisted": 1}


@table("kind", ["BMP", "TIFF", "BigTIFF", "GIF", "PPM"])
def test_images_of_other_formats_are_counted(tmp_path, caplog, kind):
    write_images(tmp_path / "ant", 1)
    image = encoded(pixels(1, 4, 4, 3)[0], kind.removeprefix("Big"))
    if kind == "BigTIFF":
        image = b"II+\0" + image[4:]
    (tmp_path / "ant" / f"b.{kind.removeprefix('Big')}").write_bytes(image)
    (tmp_path / "ant" / "c.tif").write_bytes(encoded(pixels(1, 4, 4, 3)[0]))  # PNG in truth
    source = ImageFolder(tmp_path, shuffle=False)
    with caplog.at_level(logging.WARNING):
        assert [named(s) for s, _ in source.samples()] == ["ant/000.png", "ant/c.tif"]
    assert source.skipped.by_reason == {"no image": 1}
    assert f"first bytes: {kind}; convert it" in caplog.text


def test_a_gzipped_idx_file_is_unpacked_only_to_the_size_in_its_header(tmp_path):
    path = tmp_path / "a-images-idx3-ubyte.gz"
    body = idx_bytes(pixels(2, 4, 4))
    path.write_bytes(gzip.compress(body + bytes(2**26)))
    tracemalloc.start()
    with pytest.raises(ValueError, match="truncated or damaged"):
        IdxDataset(images=path)
    assert tracemalloc.get_traced_memory()[1] < 2**24
    tracemalloc.stop()
    path.write_bytes(gzip.compress(bytes([0, 0, 8, 3]) + b"\x7f\xff\xff\xff" * 3 + bytes(2**27)))
    with pytest.raises(ValueError, match="unpacks to more than 100 times its size"):
        IdxDataset(images=path)


@table("kind", ["npy", "idx", "cifar"])
def test_a_file_that_shrinks_while_the_source_reads_loses_only_the_end(tmp_path, kind, caplog):
    path = tmp_path / "data_batch_1.bin"
    if kind == "npy":
        path.write_bytes(npy_bytes(np.ones((50, 500), np.float32)))
        source = NpyVectors(path, shuffle=False)
    elif kind == "idx":
        path.write_bytes(idx_bytes(pixels(50, 40, 40)))
        source = IdxDataset(images=path, shuffle=False)
    else:
        write_cifar(path, pixels(50, 32, 32, 3), [1] * 50)
        source = CifarBinary(tmp_path, shuffle=False)
    whole = [(sample.id, sample.data) for sample, _ in source.samples()]
    os.truncate(path, path.stat().st_size - 30 * len(whole[0][1]) - (30 if kind == "cifar" else 0))
    assert [(sample.id, sample.data) for sample, _ in source.samples()] == whole[:20]
    assert source.skipped.by_reason == {"unreadable": 30}
    assert "ends before byte" in caplog.text
    assert "restore the file" in caplog.text
    os.truncate(path, 0)
    with pytest.raises(SourceError, match="not one sample of a whole pass"):
        list(source.samples())


def test_vectors_in_fortran_order_are_sent_as_rows(tmp_path):
    value_ND = np.arange(60, dtype=np.float16).reshape(12, 5)
    np.save(tmp_path / "a.npy", np.asfortranarray(value_ND))
    sent = [
        np.frombuffer(sample.data, np.float16)
        for sample, _ in NpyVectors(tmp_path / "a.npy", shuffle=False).samples()
    ]
    assert np.array_equal(sent, value_ND)


def test_vectors_in_fortran_order_are_read_in_blocks(tmp_path, monkeypatch, caplog):
    """Without blocks, each vector takes a read for each of its numbers."""
    value_ND = np.random.default_rng(0).random((3000, 5), np.float32)
    np.save(tmp_path / "a.npy", np.asfortranarray(value_ND))
    monkeypatch.setattr(stored_rows, "BLOCK_BYTES", 20 * 100)
    source, reads = NpyVectors(tmp_path / "a.npy", shuffle=False), []
    read = StoredRows._read
    monkeypatch.setattr(
        StoredRows, "_read", lambda self, at, size: reads.append(size) or read(self, at, size)
    )
    sent = [np.frombuffer(sample.data, np.float32) for sample, _ in source.samples()]
    assert np.array_equal(sent, value_ND)
    assert len(reads) < 5 * (3000 // 100 + 3)
    assert max(reads) <= 4 * 100
    assert not caplog.records[:-1]
    sent = {sample.id: sample.data for sample, _ in NpyVectors(tmp_path / "a.npy").samples()}
    assert [sent[f"{source._prefix}/{n}"] for n in range(3000)] == [
        row.tobytes() for row in value_ND
    ]
    assert "column by column (Fortran order), and reads them slowly" in caplog.text


def test_a_shortened_file_in_fortran_order_loses_only_the_missing_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(stored_rows, "BLOCK_BYTES", 20 * 8)
    value_ND = np.random.default_rng(0).random((30, 5), np.float32)
    np.save(tmp_path / "a.npy", np.asfortranarray(value_ND))
    source = NpyVectors(tmp_path / "a.npy", shuffle=False)
    os.truncate(tmp_path / "a.npy", (tmp_path / "a.npy").stat().st_size - 4 * 10)
    assert [sample.data for sample, _ in source.samples()] == [r.tobytes() for r in value_ND[:20]]
    assert source.skipped.by_reason == {"unreadable": 10}


def test_a_huge_npy_header_and_a_device_are_refused(tmp_path):
    path = tmp_path / "a.npy"
    path.write_bytes(b"\x93NUMPY\x02\x00" + (2**31).to_bytes(4, "little"))
    os.truncate(path, 2**31 + 12)  # with holes
    tracemalloc.start()
    with pytest.raises(ValueError, match="its header claims 2147483648 bytes"):
        NpyVectors(path)
    assert tracemalloc.get_traced_memory()[1] < 2**20, "nothing of the header is read"
    tracemalloc.stop()
    (tmp_path / "b.npy").symlink_to("/dev/zero")
    with pytest.raises(ValueError, match="not a regular file"):
        NpyVectors(tmp_path / "b.npy")


@table("kind", ["npy", "idx", "idx.gz"])
def test_a_data_set_with_flipped_bytes_is_read_or_refused(tmp_path, kind):
    rng = random.Random(3)
    data = npy_bytes(np.ones((5, 3))) if kind == "npy" else idx_bytes(pixels(5, 4, 4))
    data = gzip.compress(data) if kind == "idx.gz" else data
    outcomes = set()
    for _ in range(150):
        hostile = bytearray(data)
        for _ in range(rng.randint(1, 4)):
            hostile[rng.randrange(min(len(data), 100))] = rng.randrange(256)
        path = tmp_path / f"a-images.{kind}"
        path.write_bytes(hostile[: rng.randrange(1, len(data)) if rng.random() < 0.2 else None])
        try:
            list((NpyVectors(path) if kind == "npy" else IdxDataset(images=path)).samples())
            outcomes.add("read")
        except ValueError:
            outcomes.add("refused")
    assert "refused" in outcomes


def test_image_folder_ignores_hidden_files_and_folders(tmp_path):
    write_images(tmp_path / "cat", 2)
    write_images(tmp_path / ".ipynb_checkpoints", 1)
    (tmp_path / "cat" / "._000.png").write_bytes(b"of macOS")
    write_images(tmp_path / "cat" / "@eaDir", 1)  # thumbnails
    write_images(tmp_path / "$RECYCLE.BIN", 1)
    (tmp_path / "__MACOSX").mkdir()
    source = ImageFolder(tmp_path)
    assert (len(source), source.classes) == (2, ["cat"])
    assert {sample.label for sample, _ in source.samples()} == {0}
    assert not source.skipped.by_reason
