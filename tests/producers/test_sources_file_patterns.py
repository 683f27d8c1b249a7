"""Paths, globs and braces: the files that they name, and the errors for patterns without a file."""

import os
import re

import pytest

from stream_ssl.producers.sources.file_patterns import expand_braces, find_files


def test_braces_expand_as_in_a_shell():
    assert expand_braces("d-{008..011}.tar") == [f"d-{n:03d}.tar" for n in range(8, 12)]
    assert expand_braces("{2..0}") == ["2", "1", "0"]
    assert expand_braces("{0..10}") == [str(n) for n in range(11)]
    assert expand_braces("{8..010}") == ["008", "009", "010"]
    assert expand_braces("{a,b}/{0..1}") == ["a/0", "a/1", "b/0", "b/1"]
    assert expand_braces("plain*.tar") == ["plain*.tar"]
    with pytest.raises(ValueError, match="must be a range"):
        expand_braces("{x..y}")
    for many in ("{0..999999999999}", "{0..999999}{a,b}", "{a,b}" * 64):
        with pytest.raises(ValueError, match="more than 1,000,000 names: use several patterns"):
            expand_braces(many)


def test_the_error_names_a_pattern_that_matches_no_file(tmp_path):
    (tmp_path / "d-0.tar").touch()
    with pytest.raises(FileNotFoundError, match=r"d-1\.tar \(of .*d-\{0\.\.1\}\.tar\)"):
        find_files(str(tmp_path / "d-{0..1}.tar"), "shard")
    with pytest.raises(FileNotFoundError, match="no shard"):
        find_files(str(tmp_path / "x*.tar"), "shard")
    with pytest.raises(FileNotFoundError, match="pass a path"):
        find_files([], "shard")
    with pytest.raises(FileNotFoundError, match="no shard"):
        find_files("{" + "x" * 5000 + ",y}", "shard")


def test_the_refusal_of_a_folder_suggests_the_pattern_of_its_largest_files(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "0.tar").write_bytes(bytes(5000))
    for number in range(3):
        (tmp_path / f"{number}.json").write_text("{}")
    for folder in (tmp_path, tmp_path / "empty"):
        fault = f"{folder} is a folder, and a file is needed (shard): give a pattern of its files"
        with pytest.raises(ValueError, match=re.escape(fault)):
            find_files(str(folder), "shard")
    with pytest.raises(ValueError, match=r"in quotes: '.*/\*\.tar'"):
        find_files(str(tmp_path), "shard")


def test_a_glob_leaves_folders_out_unless_they_count_as_files(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "d-0.tar").touch()
    assert find_files(str(tmp_path / "*"), "shard") == [tmp_path / "d-0.tar"]
    assert find_files(str(tmp_path / "empty"), "bag", folders=True) == [tmp_path / "empty"]


def test_a_file_whose_name_looks_like_a_pattern_is_found(tmp_path):
    for name in ("a {final}.tar", "b [1].tar", "c{1..2}.tar"):
        (tmp_path / name).touch()
        assert find_files(str(tmp_path / name), "shard") == [tmp_path / name]


def test_a_pipe_is_refused_before_it_blocks_the_source(tmp_path):
    os.mkfifo(tmp_path / "pipe.tar")
    (tmp_path / "link.tar").symlink_to("pipe.tar")
    for name in ("pipe.tar", "link.tar", "*.tar"):
        with pytest.raises(ValueError, match=r"(pipe|link)\.tar is a pipe or a device"):
            find_files(str(tmp_path / name), "shard")


def test_two_stars_stand_for_any_number_of_folders(tmp_path):
    names = ["a.tar", "b/b.tar", "b/c/d/d.tar"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "b/a").symlink_to(tmp_path)  # its files lie behind it again
    found = find_files(str(tmp_path / "**/*.tar"), "shard")
    assert found == [tmp_path / name for name in names]


def test_the_error_names_a_path_without_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        FileNotFoundError, match=rf"no video a\.avi: no file in {tmp_path} has this"
    ):
        find_files("a.avi", "video")
    with pytest.raises(
        FileNotFoundError, match=r"no log .*\*\.bag: no file has this path or match"
    ):
        find_files(str(tmp_path / "*.bag"), "log")


def test_the_error_about_a_url_in_place_of_a_path_asks_for_a_download():
    with pytest.raises(FileNotFoundError, match=r"no shard https://.*: download it, and give"):
        find_files("https://host/a.tar", "shard")
