"""`stream-ssl watch`: its view in terminals of any size, and its end."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import shlex
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from observe_records import step
from prometheus_client import CollectorRegistry

from stream_ssl.app.commands import status, watch
from stream_ssl.daemon import run_states
from stream_ssl.daemon.endpoints import FILE
from stream_ssl.daemon.run_states import Reading, RunFolder, RunPage, address_in, run_at
from stream_ssl.observe.answer import Answer
from stream_ssl.observe.health import Health
from stream_ssl.observe.http_access import Token
from stream_ssl.observe.metrics import LearnerMetrics, ReceiverMetrics
from stream_ssl.observe.page.api import Sources
from stream_ssl.observe.server import Server
from stream_ssl.receiver.records import ReceiverRecord

QUESTIONS = ("Learning", "Health", "Producers", "Memory", "To do")
LONG = "the journal has room for 3 more samples of the producer at the north gate. " * 6


def a_look(says: str = "46 % of held-out images. ", producers: int = 40) -> watch.Look:
    answers = [Answer(question, "good", says, []) for question in QUESTIONS]
    figures = {"slots": 900.0, "capacity": 1024.0, "near_duplicates": 0.021, "loss": 4.25}
    states = {
        "receiver-0": {"figures": {"received": 30.0}},
        "receiver-1": {"figures": {"received": 12.0}},
        "learner": {"figures": {**figures, "trained": 3.0, "replayed": 4.0, "lag": 0.4}},
    }
    rows = [
        {
            "name": f"camera-{number:04d}\x1b[2J万万万",
            "rate": 5.0,
            "silent": 2.0,
            "connected": number > 0,
            "rejected": {"oversize": number},
        }
        for number in range(producers)
    ]
    uses = {
        str(row["name"]): {"admitted": 512, "dropped": {"near_duplicate": 7}, "slots": 44}
        for row in rows[:1]
    }
    return watch.Look(Reading(states, answers), rows, uses)


def shown(view: watch.View, width: int = 80, height: int = 24) -> list[str]:
    lines = view.lines(width, height)
    assert len(lines) <= height
    assert max(line.cell_len for line in lines) <= width
    return [line.plain for line in lines]


@pytest.mark.parametrize("size", [(80, 24), (40, 16), (200, 60), (20, 12)])
@pytest.mark.parametrize("says", ["46 % of held-out images.", LONG, ""])
@pytest.mark.parametrize("producers", [0, 40])
def test_the_view_has_the_five_answers_at_every_size(
    size: tuple[int, int], says: str, producers: int
) -> None:
    view = watch.View("runs/yard")
    view.take(lambda: a_look(says, producers))
    lines = shown(view, *size)
    marked = [line for line in lines if line.startswith(tuple(status.MARKS.values()))]
    starts = [line[2:].split("  ")[0] for line in marked]
    assert starts == [*QUESTIONS]
    assert "\x1b" not in "".join(lines)
    if size[0] >= 40:
        assert [line[13:].split()[0] for line in marked] == ["good:"] * 4 + ["nothing:"]
    if size[1] >= 24 and producers:
        at = next(n for n, line in enumerate(lines) if line.startswith("  producers"))
        assert len(lines) - 2 - at >= watch.LEAST_PRODUCERS - 1
        first = lines[at + 1].split()
        assert first[1:] == ["5.0/s", "512", "7", "0", "44", "2.0", "s,", "away"]


def test_the_view_shows_the_figures_of_all_processes() -> None:
    view = watch.View("runs/yard")
    view.take(a_look)
    lines = {line.split()[0]: line.split()[1:] for line in shown(view)}
    assert lines["received"][0] == "42/s"  # of both receivers
    assert lines["trained"][:4] == ["3.0/s", "new,", "4.0/s", "again"]
    assert lines["loss"][0] == "4.250"
    assert "900 of 1,024 slots, 2.1 % near-duplicates" in " ".join(lines["memory"])


def test_the_view_sums_the_parts_of_all_ranks() -> None:
    """Each rank trains on its part of the samples, and holds its shard of the memory."""
    look, rank = a_look(), {"trained": 5.0, "replayed": 1.0, "slots": 90.0, "capacity": 1024.0}
    states = {**look.reading.states, "learner-1": {"figures": {**rank, "lag": 9.0, "loss": 7.0}}}
    view = watch.View("runs/yard")
    view.take(lambda: watch.Look(Reading(states, look.reading.answers)))
    lines = {line.split()[0]: line.split()[1:] for line in shown(view)}
    assert lines["trained"][:4] == ["8.0/s", "new,", "5.0/s", "again"]
    assert lines["lag"][:2] == ["9.0", "s"]
    assert lines["loss"][0] == "4.250"
    assert "990 of 2,048 slots" in " ".join(lines["memory"])


class TwoRanks:
    """A run of two ranks that have dropped and admitted different samples."""

    title = "runs/yard"

    def read(self) -> Reading:
        return a_look().reading

    def ask(self, role: str, question: str, **arguments: object) -> list[dict[str, Any]]:
        del arguments
        if role == "receiver":
            return []
        assert question in run_states.OF_EACH_RANK
        first = {"admitted": 3.0, "slots": 2.0, "dropped": {"near_duplicate": 1.0}, "bad": {}}
        second = {"admitted": 4.0, "slots": 1.0, "dropped": {}, "bad": {"damaged": 2.0}}
        return [{"uses": {"gate": first}}, {"uses": {"gate": second, "yard": first}}]


def test_each_rank_of_the_present_group_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["learner", *(f"learner-{rank}" for rank in (1, 2, 10))]
    (tmp_path / FILE).write_text(json.dumps({name: {"http": name} for name in names}))

    def answer(address: str, path: str, token: str | None) -> dict[str, Any]:
        del token
        return {"ranks": [0, 1, 2]} if path.endswith("/ranks") else {"from": address}

    monkeypatch.setattr(run_states, "ask_json", answer)
    run = RunFolder(tmp_path)
    found = [one["from"] for one in run.ask("learner", "memory/producers")]
    assert found == ["learner", "learner-1", "learner-2"]  # the last is of an earlier start
    assert [one["from"] for one in run.ask("learner", "history")] == ["learner"]


def test_the_view_sums_the_use_of_producers_over_all_ranks() -> None:
    uses = watch.Asker(TwoRanks()).look().uses
    kinds = {"dropped": {"near_duplicate": 1.0}, "bad": {"damaged": 2.0}}
    assert uses["gate"] == {"admitted": 7.0, "slots": 3.0, **kinds}
    assert uses["yard"]["admitted"] == 3.0


@pytest.mark.parametrize(
    ("values", "drawn"),
    [([], ""), ([0.0, 0.0], "▁▁"), ([1.0, float("nan"), 8.0], "▂ █"), ([-1.0, 4.0], "▁█")],
)
def test_bars_draw_values_from_0_to_the_largest_value(values: list[float], drawn: str) -> None:
    assert watch.bars(values) == drawn


@contextmanager
def processes(run: Path, *roles: str, token: Token | None = None) -> Iterator[dict[str, Server]]:
    """Servers of real metrics, and the file with their addresses."""
    receiver, learner = ReceiverMetrics(CollectorRegistry()), LearnerMetrics(CollectorRegistry())
    receiver.consume(ReceiverRecord(samples=8, producers=1, producer_samples={"cam": 8}))
    learner.consume(step(loss=4.0))
    registries = {"receiver": receiver.registry, "learner": learner.registry}
    servers: dict[str, Server] = {}
    sources = Sources(run=run, token=token, peer=lambda role: servers[role].address)
    made = {role: Server(registries[role], Health(), role, sources=sources) for role in roles}  # type: ignore[arg-type]
    servers.update(made)
    told = {role: {"http": server.address} for role, server in servers.items()}
    (run / FILE).write_text(json.dumps(told))
    for server in servers.values():
        server.start()
    try:
        yield servers
    finally:
        for server in servers.values():
            server.close()


def test_the_view_finds_a_learner_that_comes_back_at_a_new_address(tmp_path: Path) -> None:
    """The view shows that the learner is away, and asks the new address afterwards."""
    view, asker = watch.View(str(tmp_path)), watch.Asker(RunFolder(tmp_path))
    with processes(tmp_path, "receiver") as alone:
        gone = {"http": "http://127.0.0.1:1"}
        here = {"http": alone["receiver"].address}
        (tmp_path / FILE).write_text(json.dumps({"receiver": here, "learner": gone}))
        view.take(asker.look)
        said = " ".join(" ".join(shown(view, 120, 40)).split())
        assert "The learner does not answer." in said
        assert "lag -" in said
    with processes(tmp_path, "receiver", "learner"):
        view.take(asker.look)
        said = " ".join(" ".join(shown(view, 120, 40)).split())
        assert "does not answer" not in said
        assert "loss 4.000" in said


def test_rank_0_answers_for_the_learner(tmp_path: Path) -> None:
    """An earlier start of the group had more ranks, and rank 1 wrote its address first."""
    with processes(tmp_path, "receiver", "learner") as servers:
        told = {"learner-1": "http://127.0.0.1:1", "learner": servers["learner"].address}
        entries = {role: {"http": address} for role, address in told.items()}
        (tmp_path / FILE).write_text(json.dumps(entries))
        (history,) = RunFolder(tmp_path).ask("learner", "history", track="whole")
    assert "loss" in history


def test_the_view_keeps_the_last_values_of_a_run_that_does_not_answer(tmp_path: Path) -> None:
    view = watch.View("http://127.0.0.1:1")

    def fails() -> watch.Look:
        return watch.Asker(RunPage("http://127.0.0.1:1")).look()

    view.take(fails)
    assert "http://127.0.0.1:1 does not answer" in " ".join(shown(view))
    view.take(a_look)
    view.take(fails)
    said = " ".join(shown(view))
    assert "does not answer" in said
    assert "old" in said
    assert "46 % of held-out images" in said


def test_a_page_gives_the_answers_of_its_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run is given by folder and by address, with a token, to `status` and to `watch`."""
    file = tmp_path / "token"
    file.write_text("0123456789abcdef-secret")
    file.chmod(0o600)
    with processes(tmp_path, "receiver", "learner", token=Token.load(file)) as servers:
        address = Path(servers["receiver"].address)
        by_folder = json.loads((tmp_path / FILE).read_text())
        by_folder["learner"]["token_file"] = str(file)
        (tmp_path / FILE).write_text(json.dumps(by_folder))
        read = [run_at(place, file).read() for place in (tmp_path, address)]
        says = [[(one.question, one.level, one.says) for one in one_.answers] for one_ in read]
        assert [question for question, _, _ in says[0]] == [*QUESTIONS]
        assert [words[:2] for words in says[0]] == [words[:2] for words in says[1]]
        assert status.main([str(address), "--token_file", str(file)]) == 0
        assert f"{status.MARKS[says[1][0][1]]} Learning" in capsys.readouterr().out
        assert status.main([str(address)]) == 1
        assert "requires a token: give its file with --token_file FILE" in capsys.readouterr().err
        for place in (str(tmp_path), str(address)):
            assert status.main([place, "--history", "true", "--token_file", str(file)]) == 0
            history: dict[str, Any] = json.loads(capsys.readouterr().out)
            assert set(history) == {"run", "receiver", "learner"}
            assert history["run"] == tmp_path.name
            assert len(history["learner"]["loss"]) == len(history["learner"]["time"]) >= 1
            assert history["learner"]["loss"][-1] == 4.0


@pytest.mark.parametrize(
    ("place", "address"),
    [
        ("http://127.0.0.1:9109/", "http://127.0.0.1:9109"),
        ("https://host/robots/one/", "https://host/robots/one"),
        ("HTTP://127.0.0.1:9109", "http://127.0.0.1:9109"),
        ("runs/http", None),
        ("http", None),
    ],
)
def test_address_in_distinguishes_an_address_from_a_folder(place: str, address: str | None) -> None:
    assert address_in(Path(place)) == address


def test_an_address_without_the_page_of_a_run_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        processes(tmp_path, "receiver", "learner") as servers,
        pytest.raises(ValueError, match="is not the page of a run"),
    ):
        RunPage(servers["receiver"].address + "/metrics").read()
    for address in ("http://", "http://[::1"):
        with pytest.raises(ValueError, match="is not the address of a page"):
            RunPage(address)
    answer = '{"question": "Learning", "level": "%s", "says": "up"}'
    for answers, states in (
        ("3", "{}"),
        (answer % "superb", "{}"),
        (answer % "good", "[]"),
        (answer % "good", '{"learner": 3}'),
        (answer % "good", '{"learner": {"figures": {"loss": "low"}}}'),
    ):
        other = f'{{"answers": [{answers}], "states": {states}}}'
        monkeypatch.setattr(run_states, "ask", lambda *_, body=other: (200, body.encode()))
        with pytest.raises(ValueError, match="is not the page of a run: it has no answers"):
            RunPage("http://127.0.0.1:3000").read()
    monkeypatch.setattr(run_states, "ask", lambda *_: (200, b"[" * 100_000))
    with pytest.raises(ValueError, match="is not the page of a run: it sends no JSON"):
        RunPage("http://127.0.0.1:3000").read()
    for code in (401, 502):  # of a proxy that asks for a password, or does not reach the page
        monkeypatch.setattr(run_states, "ask", lambda *_, code=code: (code, b"<html></html>"))
        with pytest.raises(ValueError, match=f":3000 is not .*: it answers with status {code}$"):
            RunPage("http://127.0.0.1:3000").read()
    with pytest.raises(ValueError, match="contains a user or a password") as told:
        RunPage("http://me:secret@robots.example")
    assert "secret" not in str(told.value)


class Terminal:
    """A `stream-ssl watch` in a terminal of its own."""

    def __init__(self, run: Path, shell: bool = False) -> None:
        self.master, slave = pty.openpty()
        self.resize(24, 80)
        self.before = termios.tcgetattr(self.master)
        command = [sys.executable, "-m", "stream_ssl", "watch", str(run), "--seconds", "0.2"]
        command = ["sh", "-mc", f"{shlex.join(command)}; printf stopped; fg"] if shell else command
        environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            env={**environment, "TERM": "xterm-256color"},
        )
        os.close(slave)
        self.text = ""

    def resize(self, lines: int, columns: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def until(self, words: str, seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        os.set_blocking(self.master, False)
        while words not in self.text:
            assert time.monotonic() < deadline, (words, self.text[-3000:])
            assert self.process.poll() is None, self.text[-3000:]
            try:
                self.text += os.read(self.master, 65536).decode(errors="replace")
            except BlockingIOError:
                time.sleep(0.02)
        self.text = self.text.partition(words)[2]

    def type(self, keys: bytes) -> None:
        os.write(self.master, keys)

    def end(self) -> int:
        os.set_blocking(self.master, False)
        deadline = time.monotonic() + 30
        while self.process.poll() is None:
            assert time.monotonic() < deadline, "it does not end"
            try:
                os.read(self.master, 65536)
            except (BlockingIOError, OSError):
                time.sleep(0.02)
        return self.process.returncode


@pytest.mark.parametrize("end", ["q", "ctrl-c", "terminate"])
def test_watch_restores_the_terminal_at_each_kind_of_end(tmp_path: Path, end: str) -> None:
    with processes(tmp_path, "receiver", "learner"):
        terminal = Terminal(tmp_path)
        try:
            for question in QUESTIONS:
                terminal.until(question)
            terminal.resize(30, 100)
            terminal.until("ends the view")
            if end == "terminate":
                terminal.process.send_signal(signal.SIGTERM)
            else:
                terminal.type(b"q" if end == "q" else b"\x03")
            assert terminal.end() == 0
            assert termios.tcgetattr(terminal.master)[3] == terminal.before[3]  # echo, lines
        finally:
            terminal.process.kill()
            terminal.process.wait()
            os.close(terminal.master)


def test_ctrl_z_gives_the_terminal_back_until_fg(tmp_path: Path) -> None:
    with processes(tmp_path, "receiver", "learner"):
        terminal = Terminal(tmp_path, shell=True)
        try:
            terminal.until(QUESTIONS[-1])
            terminal.type(b"\x1a")
            terminal.until("\x1b[?1049l")  # the screen of the shell
            terminal.until("stopped")
            terminal.until("\x1b[?1049h")
            terminal.until(QUESTIONS[-1])
            assert not termios.tcgetattr(terminal.master)[3] & (termios.ECHO | termios.ICANON)
            terminal.type(b"q")
            assert terminal.end() == 0
        finally:
            terminal.process.kill()
            terminal.process.wait()
            os.close(terminal.master)


def test_watch_refuses_to_start_without_a_terminal_or_with_invalid_arguments(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert watch.main([str(tmp_path)]) == 2
    assert re.search(r"not a terminal.*`stream-ssl status`", capsys.readouterr().err)
    with monkeypatch.context() as patched:  # a terminal, such as a shell within an editor
        patched.setenv("TERM", "dumb")
        patched.setattr(sys.stdout, "isatty", lambda: True)
        patched.setattr(watch, "Live", None)
        assert watch.main([str(tmp_path)]) == 2
    assert "TERM" in capsys.readouterr().err
    assert watch.main([str(tmp_path), "--seconds", "0.1"]) == 2
    assert "at least 0.2" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert watch.main([str(tmp_path / "file")]) == 2
