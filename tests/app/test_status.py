"""The report of `stream-ssl status` about processes that answer but have problems."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, Literal

import pytest
from observe_records import step
from prometheus_client import CollectorRegistry
from rich.console import Console

from stream_ssl.app.commands import status
from stream_ssl.daemon import endpoints, run_states
from stream_ssl.daemon.endpoints import FILE, holder, place_of
from stream_ssl.observe.answer import Answer, Level
from stream_ssl.observe.health import STARTING, Health
from stream_ssl.observe.http_access import Token
from stream_ssl.observe.metrics import LearnerMetrics, ReceiverMetrics
from stream_ssl.observe.page.api import Sources
from stream_ssl.observe.scrape import History, Snapshot
from stream_ssl.observe.server import Server
from stream_ssl.receiver.records import ReceiverRecord

LISTS = ("conditions", "not_ready", "starting", "unknown", "hung", "ended", "absent", "silent")
NOTHING: dict[str, Any] = {
    **{name: {} for name in LISTS},
    "up": {"receiver": True, "learner": True},
    **dict.fromkeys(("receiver", "learner", "group")),
}
"""The figures of a run whose processes are up and have no figures yet."""


@contextmanager
def serving(
    folder: Path,
    health: Mapping[str, Health] = MappingProxyType({}),
    /,
    **metrics: LearnerMetrics | ReceiverMetrics,
) -> Iterator[dict[str, str]]:
    """Serve the metrics of roles, and announce them in a run folder. Yield their addresses."""
    with ExitStack() as stack:
        found = {}
        for name, one in metrics.items():
            role: Any = name.partition("-")[0]
            server = Server(one.registry, health.get(name, Health()), role)
            found[name] = stack.enter_context(server).address
        (folder / FILE).write_text(json.dumps({name: {"http": at} for name, at in found.items()}))
        yield found


def started() -> LearnerMetrics:
    """The metrics of a learner that has reached its main loop."""
    metrics = LearnerMetrics(CollectorRegistry())
    metrics.started()
    return metrics


def test_status_shows_why_a_process_is_not_ready(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The receiver has a full disk and a budget with room; the learner has made no step."""
    health = Health()
    health.set("journal", False, "cannot be written [Errno 28]")
    health.set("credit", True)
    receiver = ReceiverMetrics(CollectorRegistry())
    with serving(tmp_path, {"receiver": health}, receiver=receiver, learner=started()):
        assert status.main([str(tmp_path), "--seconds", "0.01", "--json"]) == 0
        figures = json.loads(capsys.readouterr().out)
        assert status.main([str(tmp_path), "--seconds", "0.01"]) == 0
    said = capsys.readouterr().out
    reasons = {"receiver": ["journal: cannot be written [Errno 28]"], "learner": []}
    assert figures["not_ready"] == reasons
    told = " ".join(said.replace("│", "").split())
    assert told.count("journal: cannot be written [Errno 28]. Make room on the disk") == 1
    assert "not ready: journal" not in told, "the condition says it, with its remedy"
    assert (figures["learner"]["loss"], "no update yet" in said) == (None, True)


def test_the_json_of_status_has_no_colours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """CI systems set FORCE_COLOR for all their commands, also for those whose output jq reads."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    with serving(tmp_path, receiver=ReceiverMetrics(CollectorRegistry())) as addresses:
        for run in (tmp_path, tmp_path / "none", addresses["receiver"]):
            status.main([str(run), "--json"])
            assert "answers" in json.loads(capsys.readouterr().out)


def test_status_shows_a_path_unchanged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rich would show `:x:` as a cross, and nobody could copy the path."""
    run = tmp_path / "12:x:30"
    assert status.main([str(run)]) == 1
    run.mkdir()
    with serving(run, receiver=ReceiverMetrics(CollectorRegistry())):
        status.main([str(run), "--seconds", "0.01"])
    told = capsys.readouterr().out.replace("\n", "").replace(" ", "")
    assert told.count("12:x:30") == 3, told


def test_status_shows_the_level_of_the_answer_on_health() -> None:
    levels: dict[Level, str] = {"good": "healthy", "watch": "worth a look"}
    for level, said in levels.items():
        console = Console(record=True, width=100)
        found = [Answer("Health", level, "None of 37 conditions holds.", [])]
        console.print(status.table(Path("runs/one"), {}, NOTHING, found))
        assert re.search(rf"health +│ {said}", console.export_text())


def test_the_lag_of_a_group_is_the_largest_lag_of_its_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ranks may read journals of their own, and the first one's journal may be empty."""
    ranks = {"learner": started(), "learner-1": started()}
    group: Any = SimpleNamespace(size=2, waited=0.0, bytes=0, collectives=0)
    for metrics, lag in zip(ranks.values(), (0.0, 58.7), strict=True):
        metrics._families.set("lag_seconds", lag)
        metrics._families.set("lag_records", lag // 4)
        metrics.observe_ranks([1.0, 1.0], [4, 4], group)
    with serving(tmp_path, **ranks):
        assert "58.7 s, 14 packets" in shown(tmp_path, capsys)


def test_status_names_the_slowest_rank_by_the_rule_of_the_page() -> None:
    """The page names no rank without an update, or if all ranks are about equally busy."""
    for steps, busy, says in (
        (9, (3.0, 6.0), "rank 1 is the slowest: it is busy for 60 % of the time, and the fastest"),
        (9, (3.6, 3.8), "2 ranks; each is busy for at most 38 % of the time"),
        (0, (0.3, 0.6), "2 ranks; each is busy for at most 6.0 % of the time"),
    ):
        history = History()
        for now in (0.0, 10.0):
            values = {"stream_ssl_steps_total": steps * now}
            for rank, worked in enumerate(busy):
                label = f'{{rank="{rank}"}}'
                values[f"stream_ssl_rank_busy_seconds_total{label}"] = worked * now / 10
                values[f"stream_ssl_rank_shard_slots{label}"] = 8.0
            history.append(Snapshot(now, values))
        console = Console(record=True, width=200)
        figures = {**NOTHING, "group": status.group_figures(history)}
        console.print(status.table(Path("runs/one"), {}, figures, []))
        assert says in console.export_text()


def test_status_shows_no_slots_while_the_learner_is_starting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics, health = LearnerMetrics(CollectorRegistry()), Health()
    health.set("started", False, STARTING)
    with serving(tmp_path, {"learner": health}, learner=metrics) as addresses:
        said = shown(tmp_path, capsys)
        assert "of 0 slots" not in said
        assert f"learner starting {addresses['learner']}" in said
        assert "not ready" not in said
        metrics.started()
        health.set("started", True)
        said = shown(tmp_path, capsys)
        assert "0 of 0 slots" in said
        assert f"learner up {addresses['learner']}" in said


def test_the_error_of_a_folder_without_a_run_is_valid_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status.main([str(tmp_path), "--json"]) == 1
    assert "no run has started here" in json.loads(capsys.readouterr().out)["error"]
    (tmp_path / "no-run").mkdir()
    for name in "dabc":
        (tmp_path / name / "journal").mkdir(parents=True)
    assert status.main([str(tmp_path), "--json"]) == 1
    said = json.loads(capsys.readouterr().out)["error"]
    named = "; ".join(str(tmp_path / name) for name in "abc")
    assert said == f"{tmp_path} is no run, but holds {named}: give one of these folders"


def test_status_finds_runs_beside_folders_of_other_accounts(
    unprivileged: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (unprivileged / "closed").mkdir(0)
    (unprivileged / "robot" / "journal").mkdir(parents=True)
    assert status.main([str(unprivileged)]) == 1
    assert f"holds {unprivileged}/robot: give that folder" in capsys.readouterr().out


def test_status_shows_how_to_continue_a_stopped_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(tmp_path, receiver=ReceiverMetrics(CollectorRegistry())):
        pass
    said = shown(tmp_path, capsys)
    assert "does not answer" in said
    assert "continue it with: stream-ssl run CONFIG" in said
    assert status.main([str(tmp_path), "--history", "true"]) == 1
    assert "Prometheus or `loggers: [tensorboard]` keeps figures" in capsys.readouterr().err


def test_status_shows_the_near_duplicates_that_the_learner_dropped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = started()
    metrics._families.add("near_duplicates_total", 3229)
    with serving(tmp_path, learner=metrics):
        assert status.main([str(tmp_path), "--seconds", "0.01"]) == 1  # there is no receiver
    said = capsys.readouterr().out
    assert "3,229 near-duplicates, before they were encoded" in said
    assert "continue it with" not in said


def test_status_sums_the_dropped_samples_of_all_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = [started() for _ in range(2)]
    for rank, metrics in enumerate(ranks):
        metrics._families.add("near_duplicates_total", 300 + rank)
        ranks[0]._families.set("rank_shard_slots", 32, rank=str(rank))
    with serving(tmp_path, **{"learner": ranks[0], "learner-1": ranks[1]}):
        assert "601 near-duplicates, before they were encoded" in shown(tmp_path, capsys)


@contextmanager
def held_by_another(run: Path, role: str) -> Iterator[int]:
    """Start another process that holds a role, and yield its id."""
    words = "import sys; from pathlib import Path\n"
    words += "from stream_ssl.daemon.endpoints import hold_role\n"
    words += "with hold_role(Path(sys.argv[1]), sys.argv[2]): print(flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", words, str(run), role]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"\n"
        yield process.pid  # the end of the block closes its input, which ends it


def shown(run: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the text of `status` for a run whose processes do not all answer."""
    assert status.main([str(run), "--seconds", "0.01"]) == 1
    return " ".join(capsys.readouterr().out.replace("│", "").split())


def test_status_does_not_advise_to_start_a_run_that_is_starting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The folder is first fresh, then of a stopped run, and then without a supervisor."""
    with held_by_another(tmp_path, "supervisor") as pid:
        said = shown(tmp_path, capsys)
        assert said.count(f"starting (pid {pid})") == 2
        assert "health starting: receiver and learner" in said
        assert "stream-ssl run" not in said
        stopped = {"receiver": {"http": "http://127.0.0.1:1", "pid": os.getpid()}}
        (tmp_path / FILE).write_text(json.dumps(stopped))
        said = shown(tmp_path, capsys)
        assert said.count(f"starting (pid {pid})") == 2
        assert "stream-ssl run" not in said
    said = shown(tmp_path, capsys)
    assert "starting" not in said
    assert "receiver does not answer at http://127.0.0.1:1" in said
    assert "learner not started" in said
    assert "health unknown: receiver and learner do not answer" in said


def test_status_shows_a_silent_process_with_an_address_as_hung(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with held_by_another(tmp_path, "supervisor"), held_by_another(tmp_path, "receiver") as pid:
        entry = {"http": "http://127.0.0.1:1", "pid": pid}
        (tmp_path / FILE).write_text(json.dumps({"receiver": entry}))
        said = shown(tmp_path, capsys)
    assert "receiver does not answer at" in said
    assert "health unknown: receiver does not answer" in said
    assert f"process-hung: the receiver (pid {pid}) exists and does not answer" in said
    assert f"`kill -USR1 {pid}` writes the stacks" in said


def test_status_names_a_file_of_addresses_that_cannot_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """This holds while processes run, and after their end."""
    os.mkfifo(tmp_path / FILE)
    with held_by_another(tmp_path, "supervisor"), held_by_another(tmp_path, "receiver"):
        said = shown(tmp_path, capsys)
    assert "starting" not in said
    assert "is a pipe" in said
    assert "health unknown: a running process writes endpoints.json again" in said
    said = shown(tmp_path, capsys)
    assert "nothing has run here" not in said
    assert "is a pipe" in said
    assert status.main([str(tmp_path), "--health", "learner"]) == 1
    assert "is a pipe" in capsys.readouterr().out
    (tmp_path / FILE).unlink()
    (tmp_path / "journal").mkdir()
    assert "no process of the run is running" in shown(tmp_path, capsys)


def test_status_shows_a_receiver_without_a_supervisor_as_starting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with held_by_another(tmp_path, "receiver") as pid:
        assert f"receiver starting (pid {pid})" in shown(tmp_path, capsys)


def test_an_old_lock_file_has_no_holder(tmp_path: Path) -> None:
    assert holder(tmp_path, "receiver") is None
    for content in ("", "no number", "-1", "9" * 30, str(os.getpid())):
        (tmp_path / "receiver.lock").write_text(content)
        assert holder(tmp_path, "receiver") is None, content


def test_status_shows_a_checkpoint_of_step_0(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = started()
    with serving(tmp_path, learner=metrics):
        assert "checkpoint none yet" in shown(tmp_path, capsys)
        metrics.of_checkpoints.resumed(0, time.time())
        assert "checkpoint step 0, 0 s ago" in shown(tmp_path, capsys)


def test_status_shows_the_journal_only_after_its_first_measurement(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = ReceiverMetrics(CollectorRegistry())
    with serving(tmp_path, receiver=metrics):
        assert "budget has room" not in shown(tmp_path, capsys)
        metrics.consume(ReceiverRecord(journal_bytes=2_000_000, room=0))
        assert "2.0 MB; its budget and its disk have room for 0 MB" in shown(tmp_path, capsys)


def test_status_shows_the_share_of_near_duplicates_only_if_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The share is not measured for vectors."""
    metrics = started()
    metrics._families.set("memory_slots", 100, memory="working")
    with serving(tmp_path, learner=metrics):
        told = shown(tmp_path, capsys)
        assert "slots, effective rank" in told
        assert "(stream" not in told  # no new sample since the start
        metrics.observe_collisions(None, 0.25)
        assert "slots, 25 % near-duplicates, effective rank" in shown(tmp_path, capsys)


def test_status_shows_totals_since_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    receiver = ReceiverMetrics(CollectorRegistry())
    learner = started()
    with serving(tmp_path, receiver=receiver, learner=learner):
        receiver.consume(ReceiverRecord(samples=20_000, acked_samples=12_345))
        learner.of_checkpoints.resumed(400, time.time())
        assert status.main([str(tmp_path), "--seconds", "0.01"]) == 0
        said = " ".join(capsys.readouterr().out.replace("│", "").split())
        assert "12,345 samples acknowledged since the receiver started" in said
        assert "0 new samples/s, 0/s again, 0.0 updates/s" in said
        assert "step 400, 0 updates since the start" in said
        learner.consume(step(step=1234))
        assert status.main([str(tmp_path), "--seconds", "0.01", "--json", "true"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["receiver"]["acknowledged_samples"] == 12_345
    assert (figures["learner"]["step"], figures["learner"]["checkpoint_step"]) == (1234, 400)


@pytest.mark.parametrize("role", ["learner", "receiver"])
def test_a_copied_folder_does_not_show_the_original_run(
    role: Literal["learner", "receiver"], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, copy = tmp_path / "run", tmp_path / "copy"
    run.mkdir()
    copy.mkdir()
    with Server(started().registry, Health(), role) as server:
        place = {"learner": {"record": str(run / "learner")}, "receiver": place_of(run)}[role]
        for folder in (run, copy):
            (folder / FILE).write_text(json.dumps({role: {"http": server.address, **place}}))
            (folder / "checkpoints").mkdir()
        status.main([str(run), "--seconds", "0.01"])
        assert "is a copy" not in "".join(capsys.readouterr())
        assert status.main([str(copy), "--seconds", "0.01"]) == 1
    told = " ".join("".join(capsys.readouterr()).split())
    assert "is a copy of the run in" in told
    assert "whose processes answer: give that folder" in told


def test_status_shows_the_five_answers_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The receiver answers, and the learner does not. The output is text, and then JSON."""
    metrics, run = ReceiverMetrics(CollectorRegistry()), tmp_path / "x[bold]y"
    run.mkdir()
    metrics.consume(ReceiverRecord(samples=8, producers=1, producer_samples={"[red]cam": 8}))
    with Server(metrics.registry, Health(), "receiver") as server:
        gone = {"http": "http://127.0.0.1:1"}
        (run / FILE).write_text(json.dumps({"receiver": {"http": server.address}, "learner": gone}))
        said = shown(run, capsys)
        status.main(["--json", str(run), "--seconds", "0.01"])
    found = json.loads(capsys.readouterr().out)["answers"]
    assert [one["question"] for one in found] == [
        *("Learning", "Health", "Producers", "Memory", "To do")
    ]
    assert [one["level"] for one in found] == [*("unknown", "bad", "watch", "unknown", "bad")]
    assert "unknown: The learner does not answer." in said
    assert "down (the learner does not answer at http://127.0.0.1:1)" in said
    assert found[0]["says"] == "The learner does not answer."
    places = [said.index(f"{status.MARKS[one['level']]} {one['question']}") for one in found]
    assert places == sorted(places)
    assert places[-1] < said.index("receiver up")
    assert "docs/runbooks/down.md" in said


@pytest.mark.parametrize("seconds", ["0", "-1", "inf", "nan"])
def test_status_refuses_a_time_that_is_not_finite_and_positive(
    tmp_path: Path, seconds: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = status.main([str(tmp_path), f"--seconds={seconds}"])
    except SystemExit as end:  # the parser takes no such word
        code = int(end.code or 0)
    assert code == 2
    assert "seconds" in capsys.readouterr().err


def test_status_shows_skipped_updates_in_place_of_the_loss(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = started()
    with serving(tmp_path, learner=metrics):
        metrics._families.set("skipped_updates_in_a_row", 3)
        assert "no loss: the last 3 updates were skipped" in shown(tmp_path, capsys)
        metrics._families.set("skipped_updates_in_a_row", 1)
        assert "no loss: the last update was skipped" in shown(tmp_path, capsys)
        metrics._families.set("skipped_updates_in_a_row", 0)  # as after a reload
        metrics._families.add("steps_total", 7)
        assert "no loss: the last updates were skipped" in shown(tmp_path, capsys)


def test_status_of_a_receiver_alone_does_not_refer_to_a_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = ReceiverMetrics(CollectorRegistry())
    with serving(tmp_path, receiver=metrics):
        said = shown(tmp_path, capsys)
    assert "look: 1 condition holds now: down (no learner has started in this run folder)" in said
    assert "A receiver alone only collects samples. To train, run stream-ssl learner CONFIG" in said
    assert "health incomplete: no learner has started here" in said
    assert "log" not in said.replace("stream-ssl · ", "").partition("up http")[0]


def test_status_shows_the_rates_of_the_page_if_the_page_has_them() -> None:
    figures = {
        "receiver": {"samples_per_second": 0.0, "bytes_per_second": 3.0},
        "learner": {
            "samples_per_second": 0.0,
            "replayed_samples_per_second": 5.0,
            "steps_per_second": 0.0,
            "loss": 4.0,
        },
    }
    ranks = {
        "learner": {"figures": {"trained": 32.0, "replayed": 7.0, "steps": 0.5}},
        "learner-1": {"figures": {"trained": 30.0, "replayed": None, "steps": 0.5}},
    }
    found = status.as_on_page(figures, {"receiver": {}, **ranks})
    assert found["receiver"] == figures["receiver"]
    assert found["learner"] == {
        "samples_per_second": 62.0,
        "replayed_samples_per_second": 5.0,
        "steps_per_second": 0.5,
        "loss": 4.0,
    }
    gone = status.as_on_page({"receiver": None, "learner": None}, ranks)
    assert gone == {"receiver": None, "learner": None}


def test_a_narrow_terminal_shows_whole_paths() -> None:
    path = "/var/lib/stream-ssl/run/quarantine"
    shown = status.answers_table("run")
    status.add_answers(shown, [Answer("To do", "watch", f"See {path}.", [])])
    console = Console(width=32)
    with console.capture() as captured:
        console.print(shown)
    assert path in re.sub(r"[^\w./-]|soon", "", captured.get())


def test_the_error_names_another_program_at_the_address_of_a_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for body in (b"<p>", b"[" * 100_000, b'{"role": "receiver", "figures": {}}'):
        monkeypatch.setattr(run_states, "ask", lambda *_, body=body: (200, body))
        state = run_states.ask_state("http://127.0.0.1:1", "learner", None)
        assert state == {"error": "another program than the learner answers at http://127.0.0.1:1"}


def test_status_does_not_call_a_process_with_another_token_hung(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """http.token_file was changed, and the receiver was not restarted."""
    file = tmp_path / "http.token"
    file.touch(mode=0o600)
    file.write_text("the-token-of-today\n")
    sources = Sources(token=Token("the-token-of-yesterday"))
    registry = ReceiverMetrics(CollectorRegistry()).registry
    with (
        Server(registry, Health(), "receiver", sources=sources) as server,
        endpoints.hold_role(tmp_path, "receiver"),
    ):
        endpoints.publish(tmp_path, "receiver", http=server.address, token_file=str(file))
        assert status.main([str(tmp_path), "--seconds", "0.01"]) == 1
    said = " ".join(capsys.readouterr().out.replace("│", "").split())
    assert "receiver rejects the token in http.token_file: restart it" in said
    assert "kill" not in said


def test_status_does_not_call_a_slow_process_hung(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(*_: object) -> Snapshot:
        return Snapshot(0.0, {})

    monkeypatch.setattr(status.Scraper, "scrape", busy)
    registry = ReceiverMetrics(CollectorRegistry()).registry
    with (
        Server(registry, Health(), "receiver") as server,
        endpoints.hold_role(tmp_path, "receiver"),
    ):
        endpoints.publish(tmp_path, "receiver", http=server.address)
        assert status.main([str(tmp_path), "--seconds", "0.01"]) == 1
    said = " ".join(capsys.readouterr().out.replace("│", "").split())
    assert "receiver answers, but is too busy to give its figures in time" in said
    assert "kill" not in said
    assert "Then start the process again" not in said


def test_a_process_that_gives_metrics_and_no_state_is_busy_and_not_down(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_states, "ask_state", lambda *_: None)
    registry = ReceiverMetrics(CollectorRegistry()).registry
    with (
        Server(registry, Health(), "receiver") as server,
        endpoints.hold_role(tmp_path, "receiver"),
    ):
        endpoints.publish(tmp_path, "receiver", http=server.address)
        status.main([str(tmp_path), "--seconds", "0.01"])
    said = " ".join(capsys.readouterr().out.replace("│", "").split())
    assert f"receiver up {server.address}" in said
    assert "receiver answers, but is too busy to give its figures in time" in said
    assert "the receiver does not answer" not in said
    assert "start the process again" not in said


@pytest.mark.parametrize("option", [["--seconds", "2.0"], ["--health", "learner"]])
def test_options_of_a_folder_are_refused_with_an_address(
    option: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert status.main(["http://127.0.0.1:1", *option]) == 2
    error = capsys.readouterr().err
    assert error == f"{' '.join(option)}: needs the run's folder, not an address\n"
