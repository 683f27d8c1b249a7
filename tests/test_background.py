"""The thread that calls a function at regular intervals."""

from __future__ import annotations

import logging
import threading

import pytest

from stream_ssl.background import Background


def test_the_thread_continues_after_a_call_that_fails(caplog: pytest.LogCaptureFixture) -> None:
    calls, third = [], threading.Event()

    def work() -> None:
        calls.append(threading.current_thread().name)
        if len(calls) == 3:
            third.set()
        raise OSError("no descriptors are left")

    with Background("asking", work, 0.001):
        assert third.wait(10.0)
    made = len(calls)
    assert set(calls) == {"asking"}
    assert "asking" not in {thread.name for thread in threading.enumerate()}
    assert len(calls) == made, "close waits for the last call"
    lines = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(lines) == 3, "a failure of each call must not fill the log"
    assert lines[0].getMessage() == "the thread 'asking' failed; it tries again in 0.001 s"
    assert lines[0].exc_info is not None


def test_a_thread_that_was_not_started_can_be_closed() -> None:
    Background("never started", list, 1.0).close()
