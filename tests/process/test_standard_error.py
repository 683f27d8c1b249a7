"""Standard error that nobody reads stops no process."""

import fcntl
import logging
import os
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from stream_ssl.process import standard_error
from stream_ssl.process.failures import USAGE
from stream_ssl.process.logs import tell_of_lost_lines
from stream_ssl.process.standard_error import Lossy

ROOM = 4 * 4096
"""The bytes of the smallest pipe in which a part of a long text has room."""


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """Return the two ends of a pipe that takes ROOM bytes."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, ROOM)
    yield reader, writer
    os.close(reader)
    os.close(writer)


def test_a_lossy_file_counts_the_texts_that_nobody_reads(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standard_error, "PATIENCE_SECONDS", 0.05)
    reader, writer = pipe
    file = Lossy(writer)
    long = b"a" * (2 * ROOM) + b"\n"
    assert [file.write(long), file.lost] == [len(long), 1]
    assert [file.write(b"second\n"), file.lost] == [7, 2]
    assert os.read(reader, ROOM) == b"a" * ROOM
    assert [file.write(b"third\n"), file.lost] == [6, 0]
    assert os.read(reader, ROOM) == b"\nthird\n", "the cut line has no end"


def test_only_the_first_text_waits_for_a_reader(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standard_error, "PATIENCE_SECONDS", 0.2)
    file = Lossy(pipe[1])
    file.write(b"a" * ROOM)
    begin = time.monotonic()
    for _ in range(50):
        file.write(b"lost\n")
    assert 0.2 <= time.monotonic() - begin < 5
    assert file.lost == 50


def test_a_stopped_terminal_does_not_block_a_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-S stops the output of a terminal."""
    monkeypatch.setattr(standard_error, "PATIENCE_SECONDS", 0.05)
    master, terminal = os.openpty()
    try:
        termios.tcflow(terminal, termios.TCOOFF)
        file = Lossy(terminal)
        assert [file.write(b"lost\n"), file.lost] == [5, 1]
        termios.tcflow(terminal, termios.TCOON)
        assert [file.write(b"seen\n"), file.lost] == [5, 0]
        assert os.read(master, 100) == b"seen\r\n"
    finally:
        os.close(master)
        os.close(terminal)


def test_a_log_line_says_how_many_lines_were_lost_before(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standard_error, "PATIENCE_SECONDS", 0.0)
    before = os.fdopen(os.dup(pipe[1]), "w")
    monkeypatch.setattr(sys, "stderr", before)
    standard_error.lose_what_cannot_be_written()
    logger = logging.Logger("lost")
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(tell_of_lost_lines)
    logger.addHandler(handler)
    os.write(pipe[1], b"a" * ROOM)
    for number in range(3):
        logger.info("step %d", number)
    os.read(pipe[0], ROOM)
    logger.info("step %d", 3)
    logger.info("step %d", 4)
    told = b"step 3 (before this line, 3 were lost: nobody read the log)\nstep 4\n"
    assert os.read(pipe[0], ROOM) == told
    before.close()


def test_a_command_ends_although_nobody_reads_its_standard_error(
    pipe: tuple[int, int], tmp_path: Path
) -> None:
    os.write(pipe[1], b"a" * ROOM)
    done = subprocess.run(
        [sys.executable, "-m", "stream_ssl", "keys", "a b", "--folder", str(tmp_path / "keys")],
        stderr=pipe[1],
        check=False,
        timeout=60,
    )
    assert done.returncode == USAGE
