"""The log lines of the commands, as text and as JSON."""

from __future__ import annotations

import json
import logging
import math
import subprocess
import sys
from datetime import datetime, timedelta

import pytest

from stream_ssl.process.logs import JsonLines, LibraryLimit, Lines, StepLog, configure
from stream_ssl.rate_limited_logger import RateLimitedLogger


def record(message: str = "%s left", *arguments: object, **extra: object) -> logging.LogRecord:
    made = logging.LogRecord("stream_ssl.x", logging.WARNING, __file__, 1, message, arguments, None)
    vars(made).update(extra)
    return made


def test_the_time_of_a_log_line_has_a_time_zone(monkeypatch: pytest.MonkeyPatch) -> None:
    at = record("%s left", "robot")
    stamp, level, rest = Lines().format(at).split(maxsplit=2)
    told = datetime.fromisoformat(stamp)
    assert told.utcoffset() is not None
    assert abs(told.timestamp() - at.created) <= 0.001
    assert (level, rest) == ("WARNING", "stream_ssl.x: robot left")


def test_log_lines_of_ranks_contain_the_rank() -> None:
    assert "WARNING rank 1 stream_ssl.x: robot left" in Lines("1").format(
        record("%s left", "robot")
    )
    assert json.loads(JsonLines("1").format(record("left")))["rank"] == 1
    assert "rank" not in json.loads(JsonLines(None).format(record("left")))


def test_json_log_lines_write_unsupported_values_as_text() -> None:
    odd = record("left")
    vars(odd).update(loss=math.nan, most=math.inf, sizes={(1, 2): 3}, step=7)
    found = json.loads(JsonLines().format(odd), parse_constant=pytest.fail)
    assert (found["loss"], found["most"], found["sizes"]) == ("nan", "inf", "{(1, 2): 3}")
    assert (found["step"], found["message"]) == (7, odd.getMessage())


def test_a_json_log_object_is_always_one_line() -> None:
    try:
        raise OSError(28, "No space\nleft")
    except OSError:
        error = record("a\n%s", "b", step=7, path=timedelta(1))
        error.exc_info = sys.exc_info()
    line = JsonLines().format(error)
    assert "\n" not in line
    told = json.loads(line)
    assert told["message"] == "a\nb"
    assert (told["step"], told["path"], told["level"]) == (7, "1 day, 0:00:00", "WARNING")
    assert told["exception"].startswith("Traceback")
    assert set(told) == {
        *("time", "level", "logger", "message", "pid", "exception", "step", "path"),
    }


def test_warnings_and_uncaught_errors_are_logged_as_json_objects() -> None:
    script = (
        "import threading, warnings\n"
        "from stream_ssl.process import logs\n"
        "logs.configure()\n"
        "warnings.warn('torn\\nin two', stacklevel=1)\n"
        "for error in (SystemExit, OSError('lost')):\n"
        "    def fail(error=error): raise error\n"
        "    thread = threading.Thread(target=fail, name='writer')\n"
        "    thread.start()\n"
        "    thread.join()\n"
        "raise KeyError('a bug')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={"STREAM_SSL_LOG_FORMAT": "json"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    warned, ended, stopped = (json.loads(line) for line in done.stderr.splitlines())
    assert "UserWarning: torn\nin two" in warned["message"]
    assert ended["message"] == "the thread writer was ended by an uncaught error"
    assert ended["exception"].endswith("OSError: lost")
    assert (stopped["level"], stopped["exception"].splitlines()[-1]) == (
        "CRITICAL",
        "KeyError: 'a bug'",
    )


def test_a_text_log_line_has_no_control_characters_and_a_limited_length() -> None:
    line = Lines().format(record("%s", "a\x1b[2J\x9b31m\r\tb\nc"))
    assert line.endswith("stream_ssl.x: a?[2J?31m?\tb\nc")
    assert len(Lines().format(record("%s", "x" * (1 << 20)))) < 1 << 16


def test_a_rate_limited_message_is_one_short_line(caplog: pytest.LogCaptureFixture) -> None:
    RateLimitedLogger(logging.getLogger("stream_ssl.x")).warning("kind", "a\x1b[2J\nb" + "x" * 9999)
    (made,) = caplog.records
    assert made.getMessage().startswith("a?[2J?bxx")
    assert len(made.getMessage()) < 2100


def test_many_kinds_of_messages_do_not_hide_a_new_kind(caplog: pytest.LogCaptureFixture) -> None:
    limited = RateLimitedLogger(logging.getLogger("stream_ssl.x"))
    for producer in range(300):  # such as the conditions of each producer
        limited.warning(f"silent/{producer}", "silent")
    limited.warning("disk-full", "the disk is full")
    assert len(caplog.records) == 301


def test_a_library_cannot_fill_the_log() -> None:
    now = [0.0]
    limit = LibraryLimit(lines=2, seconds=60.0, clock=lambda: now[0])

    def logged(name: str, text: str, *arguments: object) -> list[str]:
        made = logging.LogRecord(name, logging.WARNING, __file__, 1, text, arguments, None)
        return [made.getMessage()] if limit.filter(made) else []

    told = [line for port in range(500) for line in logged("uvicorn.error", "invalid: %s", port)]
    assert told == ["invalid: 0", "invalid: 1"]
    assert logged("uvicorn.error", "another kind") == ["another kind"]
    now[0] = 61.0
    again = logged("uvicorn.error", "invalid: %s", 7)
    assert again == ["invalid: 7 (498 more of these since the last line)"]
    for at in (61.0, 61.0, 61.0, 122.0):  # a library's wrong arguments must not raise into it
        now[0] = at
        wrong = logging.LogRecord("lib", logging.WARNING, __file__, 1, "%d bytes", ("no",), None)
        limit.filter(wrong)
    assert all(logged("stream_ssl.receiver.access", "ours: %s", each) for each in range(500))
    many = [line for each in range(5000) for line in logged("asyncio", f"{each} in the text")]
    assert len(many) <= 2 * LibraryLimit.KINDS + 2


def test_the_log_line_of_a_step_has_loss_and_rates(caplog: pytest.LogCaptureFixture) -> None:
    from types import SimpleNamespace as Step

    now = [0.0]
    steps = StepLog(logging.getLogger("stream_ssl.learner"), every=60.0, clock=lambda: now[0])
    with caplog.at_level(logging.INFO):
        for number in range(1, 5):
            now[0] += 20.0
            steps.consume(
                Step(step=number, loss=5.25, learning_rate=0.03, replay=number == 2, batch=30,
                     skipped=None, near_duplicates=0, lag_seconds=0.0)  # type: ignore[arg-type]
            )  # fmt: skip
    (line,) = caplog.records
    assert line.getMessage() == (
        "step 3: loss 5.25, learning rate 0.03, 1.0 samples/s of the stream, "
        "0.05 updates/s, lag 0.0 s"
    )
    assert json.loads(JsonLines().format(line))["samples_per_second"] == 1.0


def test_the_environment_chooses_the_format_of_the_log() -> None:
    script = (
        "from stream_ssl.process import logs; import logging; logs.configure();"
        "logging.getLogger('stream_ssl').info('hello')"
    )
    for form, opens in (("json", "{"), ("text", "2"), ("JSON", "{"), ("", "2")):
        done = subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True,
            text=True,
            env={"STREAM_SSL_LOG_FORMAT": form, "STREAM_SSL_LOG": ""},
        )
        assert done.stderr.startswith(opens), done.stderr
    with pytest.raises(ValueError, match="STREAM_SSL_LOG_FORMAT is 'xml': choose one of text, js"):
        configure({"STREAM_SSL_LOG_FORMAT": "xml"})
