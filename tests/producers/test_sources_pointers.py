"""Files that Git LFS or a web server left in place of data, and the remedy that a source names."""

import logging
from pathlib import Path

import pytest
from lerobot_files import write_lerobot
from table import table

from stream_ssl.producers.sources import (
    Crawl,
    ImageFolder,
    LeRobot,
    ParquetFiles,
    VideoFiles,
    WebDataset,
)

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
MAKE = {
    "a.jpg": lambda file: ImageFolder(file.parent),
    "a.tar": lambda file: WebDataset(str(file)),
    "a.mp4": lambda file: VideoFiles(str(file)),
    "a.txt": lambda file: Crawl(str(file)),
    "a.parquet": lambda file: Crawl(str(file)),
    "b.parquet": lambda file: ParquetFiles(str(file)),
}


@pytest.mark.parametrize("name", MAKE)
def test_every_source_names_the_remedy_for_a_pointer_of_git_lfs(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / name).write_bytes(POINTER)
    with pytest.raises(ValueError, match=r"Git LFS|not one sample") as caught:
        list(MAKE[name](tmp_path / name).samples())
    assert "git lfs pull" in caplog.text + str(caught.value)


def test_the_log_names_the_remedy_for_a_lerobot_set_without_its_lfs_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for lost in ("data/**/*.parquet", "videos/**/*.mp4"):
        root = write_lerobot(tmp_path / lost[:4], "v3.0")
        for file in root.glob(lost):
            file.write_bytes(POINTER)
        caplog.clear()
        with pytest.raises(ValueError, match="not one sample"):
            list(LeRobot(root).samples())
        assert "git lfs pull" in caplog.text


def test_the_log_names_a_heif_photo_and_the_remedy(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The file has the brand of a telephone's photo of 10 bits."""
    (tmp_path / "a.jpg").write_bytes(b"\0\0\0\x24ftypheix\0\0\0\0")
    with pytest.raises(ValueError, match="not one sample"):
        list(ImageFolder(tmp_path).samples())
    assert "AVIF or HEIF; convert it" in caplog.text


@table(
    "kind, data",
    [
        ("SVG", b"<svg xmlns='http://www.w3.org/2000/svg'/>"),
        ("SVG", b"<?xml version='1.0'?>\n<svg xmlns='http://www.w3.org/2000/svg'/>"),
        ("SVG", b"<!DOCTYPE svg PUBLIC '-//W3C//DTD SVG 1.1//EN' ''>\n<svg/>"),
        ("PDF", b"%PDF-1.4"),
        ("ICO", b"\0\0\1\0\7\0"),
        ("PSD", b"8BPS\0\1"),
    ],
)
def test_a_drawing_that_was_renamed_jpg_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, data: bytes
) -> None:
    (tmp_path / "a.jpg").write_bytes(data)
    with pytest.raises(ValueError, match="not one sample"):
        list(ImageFolder(tmp_path).samples())
    assert f"first bytes: {kind}; convert it" in caplog.text


@pytest.mark.parametrize("page", [b"<!DOCTYPE html><html>", b"\n <HTML lang=en>"])
def test_the_log_names_a_web_page_in_place_of_an_image(
    page: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    (tmp_path / "a.jpg").write_bytes(page)
    with pytest.raises(ValueError, match="not one sample"):
        list(ImageFolder(tmp_path).samples())
    assert "a web page, and not an image: fetch it again" in caplog.text
