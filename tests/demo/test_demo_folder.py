"""The demo's folder, its child processes, and what it refuses."""

import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from table import table

from stream_ssl.demo import folder, stream
from stream_ssl.demo.children import DemoProcess
from stream_ssl.demo.run import FAILED, USAGE, run
from stream_ssl.process.failures import Failure


def child(code: str, tmp_path: Path) -> DemoProcess:
    return DemoProcess("helper", [sys.executable, "-u", "-c", code], tmp_path / "helper.log")


def wait_for(text: str, log: Path) -> None:
    deadline = time.monotonic() + 60
    while text not in log.read_text():
        assert time.monotonic() < deadline, f"{text!r} never came: {log.read_text()!r}"
        time.sleep(0.02)


def wait_for_end(one: DemoProcess) -> None:
    deadline = time.monotonic() + 60
    while one.status is None:
        assert time.monotonic() < deadline, "it never ended"
        time.sleep(0.02)


def test_the_error_about_a_failed_child_shows_the_end_of_its_log(tmp_path):
    one = child("print('\\n'.join(map(str, range(40)))); raise SystemExit(3)", tmp_path)
    wait_for_end(one)
    with pytest.raises(Failure, match=r"(?s)helper ended with status 3.*helper\.log.*39") as told:
        one.check()
    assert "  25\n" in str(told.value)
    assert "  24\n" not in str(told.value)


def test_a_child_that_ends_on_sigterm_is_stopped_without_an_error(tmp_path):
    one = child(
        "import signal, sys; signal.signal(15, lambda *_: sys.exit(0)); print('up'); "
        "signal.pause()",
        tmp_path,
    )
    wait_for("up", one.log)
    one.check()
    one.stop(30)
    assert one.status == 0


def test_a_child_that_ignores_sigterm_is_killed(tmp_path):
    one = child(
        "import signal; signal.signal(15, signal.SIG_IGN); print('up')\nwhile 1: signal.pause()",
        tmp_path,
    )
    wait_for("up", one.log)
    with pytest.raises(Failure, match="did not stop within 0 s of SIGTERM"):
        one.stop(0.1)
    assert one.status == -signal.SIGKILL
    one.end()


def test_a_child_knows_the_process_id_of_its_parent(tmp_path):
    one = child("import os; print(os.environ['STREAM_SSL_PARENT'])", tmp_path)
    wait_for_end(one)
    one.stop(30)  # one that has ended well is no failure
    assert one.log.read_text().strip() == str(os.getpid())


def test_the_demo_refuses_a_folder_with_other_files(tmp_path, capsys):
    (tmp_path / "thesis.tex").write_text("years of work")
    assert run(20, tmp_path) == FAILED
    assert "contains files that no demo has written" in " ".join(capsys.readouterr().out.split())
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_clear_leaves_files_that_the_demo_did_not_write(tmp_path):
    folder.claim(tmp_path / "out")
    (tmp_path / "out" / "notes.txt").write_text("mine")
    (tmp_path / "out" / "journal").mkdir()
    (tmp_path / "out" / "journal" / "data").write_text("old")
    (tmp_path / "out" / folder.REPORT).write_text("old")
    folder.claim(tmp_path / "out")
    folder.clear(tmp_path / "out")
    left = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert left == [folder.MARK, "notes.txt"]


@table("seconds", [0, 14.9, float("nan")])
def test_the_demo_refuses_a_duration_that_is_too_short(tmp_path, capsys, seconds):
    assert run(seconds, tmp_path / "out") == USAGE
    assert "give --seconds 15 or more" in " ".join(capsys.readouterr().out.split())
    assert not (tmp_path / "out").exists()


def test_damaged_data_stop_the_demo(tmp_path, capsys, monkeypatch):
    def damaged():
        raise Failure("t10k is damaged")

    monkeypatch.setattr("stream_ssl.demo.data.check", damaged)
    assert run(20, tmp_path / "out") == FAILED
    assert "t10k is damaged" in capsys.readouterr().out


def test_the_stream_shows_a_few_scenes_often_and_is_reproducible(tmp_path):
    stream.write_images(tmp_path / "images")
    one, again = (stream.replay(tmp_path / "images", 12_000, 1500) for _ in range(2))
    assert (one.newest_KHW == again.newest_KHW).all()
    assert one.newest_KHW.shape == (1500, 28, 28)
    shown = Counter(one.originals.values())
    assert len(one.originals) == 12_000
    assert len(shown) == pytest.approx((1 - stream.SHARE) * 12_000, rel=0.5)
    assert sum(count > 1 for count in shown.values()) == stream.SCENES
    assert one.newest_originals == list(one.originals.values())[-1500:]


def test_the_stream_never_contains_a_held_out_image(tmp_path):
    import itertools

    from stream_ssl.demo import data
    from stream_ssl.producers.sources import IdxDataset

    stream.write_images(tmp_path / "images")
    image_NHW, label_N = data.load()
    parts = data.split(label_N)
    allowed = {image_NHW[row].tobytes() for row in parts.streamed}
    source = IdxDataset(**stream.settings(tmp_path / "images")["source"])
    sent = [bytes(one.data) for one, _ in itertools.islice(source.samples(), 7000)]
    assert set(sent) == allowed
    assert len(sent) == 7000
