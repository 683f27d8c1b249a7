"""Sources whose disk is unmounted while they read it."""

import errno
from pathlib import Path

import pytest
from source_files import shard_members, write_images, write_tar

from stream_ssl.producers.sources import ImageFolder, WebDataset, folders
from stream_ssl.producers.sources.base import SourceError
from stream_ssl.producers.sources.folders import is_away


def test_a_folder_is_away_only_if_its_disk_is_away(tmp_path, monkeypatch):
    disk = tmp_path.stat().st_dev
    assert not is_away(tmp_path, disk)
    assert not is_away(tmp_path / "deleted" / "too", disk)
    assert is_away(tmp_path, disk + 1)  # the mount point of an unmounted disk
    assert is_away(tmp_path / "deleted", disk + 1)
    for number, away in ((errno.EIO, True), (errno.ENOTCONN, True), (errno.EACCES, False)):

        def stat(path, number=number):
            raise OSError(number, "no answer", str(path))

        with monkeypatch.context() as patch:
            patch.setattr(Path, "stat", stat)
            assert is_away(tmp_path, disk) is away


@pytest.fixture
def unmount(monkeypatch):
    """A function that deletes a folder's files, and puts the folder on another disk."""

    def go(folder):
        disk = folder.stat().st_dev
        for path in folder.iterdir():
            path.unlink()
        away = folders.is_away
        for module in ("image_folder", "recordings"):
            name = f"stream_ssl.producers.sources.{module}.is_away"
            monkeypatch.setattr(name, lambda folder, was: away(folder, was + (was == disk)))

    return go


@pytest.mark.parametrize("kind", ["folder", "shards"])
def test_a_source_ends_with_an_error_when_its_disk_is_unmounted(tmp_path, unmount, kind):
    if kind == "folder":
        write_images(tmp_path, 4)
        source = ImageFolder(tmp_path, name="disk", shuffle=False)
    else:
        for number in range(4):
            write_tar(tmp_path / f"{number}.tar", shard_members(number, 1))
        source = WebDataset(str(tmp_path / "{0..3}.tar"), name="disk")
    stream = source.samples()
    next(stream)
    unmount(tmp_path)
    with pytest.raises(SourceError, match=r"disk of .* is away.*mount it, and start"):
        list(stream)


def test_a_source_counts_and_leaves_out_files_that_are_deleted(tmp_path):
    paths = write_images(tmp_path, 4)
    source = ImageFolder(tmp_path, shuffle=False)
    stream = source.samples()
    next(stream)
    paths[1].unlink()
    assert len(list(stream)) == 2
    assert source.skipped.by_reason == {"unreadable": 1}


def test_a_source_in_the_working_folder_leaves_out_a_deleted_file(tmp_path, monkeypatch):
    (tmp_path / "below").mkdir()
    paths = write_images(tmp_path / "below", 3)
    monkeypatch.chdir(tmp_path)
    source = ImageFolder(".", shuffle=False, name="here")
    stream = source.samples()
    next(stream)
    paths[1].unlink()
    assert len(list(stream)) == 1
    assert source.skipped.by_reason == {"unreadable": 1}
