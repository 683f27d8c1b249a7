"""`stream-ssl conform` passes good producers and finds the fault of each faulty one."""

import contextlib
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import zmq
from mini_producer import FAULTS, MiniProducer

from stream_ssl.app.cli import main
from stream_ssl.app.commands.conform import starter
from stream_ssl.conformance import RULES, Trial, tried
from stream_ssl.producers import Producer, ProducerError
from stream_ssl.wire.messages import Hello, encode


def python_client(address):
    """Start our client in a thread that continues at its position, and return its end."""
    ended = threading.Event()
    producer = Producer(address, "tried", packet_samples=4, linger=0.02, buffer_bytes=4096)

    def run():
        try:
            number = producer.connect(30.0).position or 0
            while not ended.is_set():
                number += 1
                producer.send(np.zeros((4, 4), np.uint8), id=str(number), position=number)
                ended.wait(0.002)
        except ProducerError:
            pass

    thread = threading.Thread(target=run)
    thread.start()

    def end():
        ended.set()
        with contextlib.suppress(ProducerError):
            producer.close(0.0)
        thread.join()

    return end


def test_good_producers_keep_every_rule_and_each_fault_breaks_one_rule():
    good = [(rule, python_client) for rule in RULES]
    good += [(rule, lambda address: MiniProducer(address).end) for rule in RULES]
    faulty = [
        (rule, lambda address, fault=fault: MiniProducer(address, fault).end)
        for fault, rule in FAULTS.items()
    ]
    assert set(FAULTS.values()) == set(RULES)
    jobs = sorted(good + faulty, key=lambda job: job[0] not in ("silence", "stop"))
    with ThreadPoolExecutor(24) as pool:  # trials wait most of their time
        results = dict(zip(jobs, pool.map(lambda job: tried(*job), jobs), strict=True))
    assert [results[job] for job in good if not results[job].kept] == []
    found = [results[job] for job in faulty]
    kept = [fault for fault, one in zip(FAULTS, found, strict=True) if one.kept is not False]
    assert kept == []
    assert all(one.why for one in found)


def test_the_page_of_the_wire_lists_every_rule_of_conformance():
    page = Path("docs/wire.md").read_text()
    listed = re.findall(r"^ - \[ \] `([a-z-]+)`", page.partition("## Conformance")[2], re.M)
    assert listed == list(RULES)


def test_conform_reports_a_broken_rule_and_fails(capfd, monkeypatch):
    silent = [sys.executable, "-c", "import time; time.sleep(60)", "ADDRESS"]
    monkeypatch.setattr("stream_ssl.conformance.PATIENCE", 0.5)
    assert main(["conform", "--rules", "framing", "--", *silent]) == 1
    said = capfd.readouterr().out
    assert "BROKEN     framing" in said
    assert "0 rules kept, 1 broken, 0 not tested" in said
    assert "what the producer writes, add before --: --output --rules framing" in said


def test_conform_reports_the_exit_status_of_a_producer_that_ended(capfd, monkeypatch):
    crashed = [sys.executable, "-c", "raise SystemExit(7)", "ADDRESS"]
    monkeypatch.setattr("stream_ssl.conformance.PATIENCE", 2.0)
    assert main(["conform", "--rules", "framing", "--", *crashed]) == 1
    assert "no HELLO within 2 s; the producer had ended: status 7" in capfd.readouterr().out


def test_conform_names_a_program_that_does_not_exist(capfd):
    with pytest.raises(SystemExit, match="2"):
        main(["conform", "--rules", "framing", "--", "./no-such-producer", "ADDRESS"])
    assert "./no-such-producer is not a program that can be started" in capfd.readouterr().err


def test_conform_names_a_script_without_an_interpreter(capfd, tmp_path):
    script = tmp_path / "producer"
    script.write_text("echo hello\n")
    script.chmod(0o755)
    with pytest.raises(SystemExit, match="2"):
        main(["conform", "--rules", "framing", "--", str(script), "ADDRESS"])
    assert f"{script} cannot be started: Exec format error" in capfd.readouterr().err


def until(holds, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.01)
    return holds()


def state(pid):
    """Return the state of a process as in /proc: S while it waits, Z once it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "Z"


def script(file):
    """Return a command that starts a producer and waits for it, as a user's script may."""
    return ["sh", "-c", f"sleep 60 & echo $! >{file}.part; mv {file}.part {file}; wait", "ADDRESS"]


def test_the_end_of_a_trial_ends_every_process_of_the_command(tmp_path):
    file = tmp_path / "pid"
    end = starter(script(file), output=False)("tcp://127.0.0.1:1")
    assert until(file.exists)
    end()
    assert until(lambda: state(int(file.read_text())) == "Z", 10.0)


@pytest.fixture
def hangup():
    """Let processes that a test starts end by SIGHUP, which they would ignore under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hangup")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_the_trials_and_the_producer(tmp_path, number):
    file = tmp_path / "pid"
    conform = [sys.executable, "-m", "stream_ssl", "conform", "--rules", "framing", "--"]
    with subprocess.Popen([*conform, *script(file)], stderr=subprocess.DEVNULL) as trials:
        assert until(file.exists)
        assert until(lambda: state(trials.pid) == "S")  # it waits for the producer's HELLO
        trials.send_signal(number)
        assert trials.wait(60) == 130
    assert until(lambda: state(int(file.read_text())) == "Z", 10.0)


def test_waiting_messages_do_not_extend_a_deadline():
    """A producer that sends HELLO without pause would otherwise hold a rule forever."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0

        def start(address):
            socket.connect(address)
            for _ in range(20):
                socket.send_multipart(encode(Hello("tried", 1, 1)))
            return lambda: None

        with Trial(start) as trial:
            assert [type(trial.hear(10.0)) for _ in range(2)] == [Hello, Hello]
            assert trial.hear(0.0) is None
            assert isinstance(trial.hear(10.0), Hello)
