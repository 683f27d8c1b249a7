"""The units with their own command lines, the socket of systemd, and its watchdog."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import shlex
import shutil
import socket
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from forked import Forked
from harness import TINY, stop, until

from stream_ssl.app import cli
from stream_ssl.daemon.notify import Notifier
from stream_ssl.observe.health import Health

UNITS = Path(__file__).parents[2] / "deploy" / "systemd"
SERVICES = sorted(UNITS.glob("*.service"))


class Listener:
    """The socket of systemd. A thread collects the messages that arrive."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._heard: queue.Queue[str] = queue.Queue()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind("\0" + path[1:] if path.startswith("@") else path)
        self._socket.settimeout(0.1)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def _listen(self) -> None:
        while not self._over.is_set():
            with contextlib.suppress(TimeoutError):
                self._heard.put(self._socket.recv(4096).decode())

    def next(self) -> str:
        return self._heard.get(timeout=120)

    def wait_for(self, line: str) -> str:
        while True:
            message = self.next()
            if line in message.splitlines():
                return message

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        self._socket.close()


def test_a_missing_socket_does_not_fill_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A container may inherit NOTIFY_SOCKET without the socket, and run for weeks."""
    with Notifier(Health(), {"NOTIFY_SOCKET": str(tmp_path / "gone")}) as notifier:
        for _ in range(20):
            notifier._tell()
    assert len(caplog.records) == 3


@pytest.mark.parametrize("abstract", [False, True])
def test_a_hung_loop_sends_no_watchdog_message(tmp_path: Path, abstract: bool) -> None:
    now, health = 0.0, Health(lambda: now)
    health.expect("learner", 10.0)
    health.set("journal", False, "cannot be written")
    path = f"@stream-ssl-{os.getpid()}" if abstract else str(tmp_path / "notify")
    environment = {"NOTIFY_SOCKET": path, "WATCHDOG_USEC": "30000"}
    with contextlib.closing(Listener(path)) as systemd:
        with Notifier(health, environment):
            assert systemd.next() == "READY=1"
            told = systemd.wait_for("WATCHDOG=1")
            assert told.startswith("STATUS=journal: cannot be written\n")
            now = 11.0
            until(lambda: "WATCHDOG" not in systemd.next(), lambda: "still fed")
            now = 0.0
            systemd.wait_for("WATCHDOG=1")
        systemd.wait_for("STOPPING=1")


def test_a_status_with_odd_bytes_is_sent_on_one_line(tmp_path: Path) -> None:
    health, path = Health(), str(tmp_path / "notify")
    health.set("journal", False, "/data/\udcff is full\nWATCHDOG=trigger")
    with contextlib.closing(Listener(path)) as systemd, Notifier(health, {"NOTIFY_SOCKET": path}):
        assert systemd.next() == "READY=1"
        told = "STATUS=journal: /data/? is full WATCHDOG=trigger"
        assert systemd.next().splitlines() == [told, "WATCHDOG=1"]


def test_a_notifier_sends_nothing_without_systemd_and_survives_a_missing_socket(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Notifier(Health(), {}):
        pass
    assert not caplog.records, "a message without an address would fail, and be logged"
    with Notifier(Health(), {"NOTIFY_SOCKET": str(tmp_path / "nobody")}):
        pass
    assert "cannot send 'READY=1' to systemd" in caplog.text


def options(unit: str) -> dict[str, list[str]]:
    """Return the settings of a unit's service."""
    found: dict[str, list[str]] = {}
    for line in (UNITS / unit).read_text().splitlines():
        name, is_setting, value = line.partition("=")
        if is_setting and not line.startswith("#"):
            found.setdefault(name, []).append(value)
    return found


def at_root(words: Sequence[str], environment: dict[str, str]) -> int:
    """Run a command in the root folder, with the variables of systemd."""
    os.chdir("/")
    os.environ.update(environment)
    return cli.main(words)


class Machine:
    """The files that deploy/README.md asks for, in a folder that the units use."""

    def __init__(self, folder: Path) -> None:
        self.etc, self.folder = folder / "etc", folder
        self.etc.mkdir()
        keys = ["keys", "receiver", "--folder", str(self.etc)]
        front = [
            "keys",
            "front",
            "--folder",
            str(self.etc),
            "--allow",
            str(self.etc / "allow.json"),
        ]
        for words in (keys, front):
            assert cli.main(words) == 0
        settings = {name: value for name, value in TINY.items() if name != "access"}
        (self.etc / "config.yaml").write_text(json.dumps(settings))
        producers = self.etc / "producers"
        producers.mkdir()
        (self.etc / "front.secret.json").rename(producers / "front.secret.json")
        source = {"size": 16, "channels": 1}
        (producers / "front.yaml").write_text(
            json.dumps({"source": source, "shape": {"limit": 80}})
        )

    def start(self, unit: str, listener: Listener, **variables: str) -> Forked:
        """Start a unit's command with its credentials and the variables of systemd."""
        found = options(unit)
        credentials = self.folder / unit
        credentials.mkdir()
        for entry in found.get("LoadCredential", []):
            name, _, source = self._here(entry).partition(":")
            shutil.copy(source, credentials / name)
        words = self.words(unit, CREDENTIALS_DIRECTORY=str(credentials), **variables)
        told = {"NOTIFY_SOCKET": listener.path, "WATCHDOG_USEC": "1500000"}
        return Forked(at_root, words, told, output=self.folder / f"{unit}.log")

    def words(self, unit: str, **variables: str) -> list[str]:
        """Return a unit's command. The given variables replace those of the unit's file."""
        found = options(unit)
        pairs = [pair for entry in found["Environment"] for pair in shlex.split(entry)]
        own = dict(pair.split("=", 1) for pair in pairs)
        line = found["ExecStart"][0]
        for name, value in {**own, **variables}.items():
            line = line.replace(f"${{{name}}}", value).replace(f"${name}", value)
        program, *words = shlex.split(self._here(line))
        assert program == "/opt/stream-ssl/bin/stream-ssl"
        return words

    def _here(self, text: str) -> str:
        text = text.replace("/etc/stream-ssl", str(self.etc)).replace("%i", "front")
        return text.replace("/var/lib/stream-ssl", str(self.folder)).replace("%S", str(self.folder))


def test_the_units_receive_samples_train_and_stop(tmp_path: Path) -> None:
    machine, started = Machine(tmp_path), []
    with contextlib.ExitStack() as stack:
        names = ("receiver", "learner", "producer")
        heard = {
            n: stack.enter_context(contextlib.closing(Listener(str(tmp_path / f"{n}.socket"))))
            for n in names
        }
        stack.callback(lambda: [p.kill() or p.wait() for p in started if p.poll() is None])
        for name in ("receiver", "learner"):
            started.append(machine.start(f"stream-ssl-{name}.service", heard[name]))
            assert heard[name].next() == "READY=1", (
                tmp_path / f"stream-ssl-{name}.service.log"
            ).read_text()
            heard[name].wait_for("WATCHDOG=1")
        run = tmp_path / "run"
        address = json.loads((run / "endpoints.json").read_text())["receiver"]["data"]
        unit = "stream-ssl-producer@.service"
        producer = machine.start(unit, heard["producer"], SOURCE="synthetic", TO=address)
        started.append(producer)
        assert producer.wait(60) == 0, (tmp_path / f"{unit}.log").read_text()
        until(lambda: list((run / "checkpoints").glob("step-*5")), lambda: "no checkpoint")
        for name, process in zip(("receiver", "learner"), started, strict=False):
            assert stop(process) == 0
            heard[name].wait_for("STOPPING=1")


def test_the_producer_unit_spools_unless_its_options_are_empty(tmp_path: Path) -> None:
    machine, unit = Machine(tmp_path), "stream-ssl-producer@.service"
    camera = machine.words(unit, SOURCE="camera", TO="tcp://base:5557")
    spool = str(tmp_path / "stream-ssl-producer" / "front" / "spool")
    assert camera[-4:] == ["--producer.on_full", "spool", "--producer.spool", spool]
    assert machine.words(unit, SOURCE="kafka", TO="tcp://base:5557", OPTIONS="") == [
        *("produce", "kafka"),
        *camera[2:-4],
    ]


def test_each_unit_is_restricted_and_allows_enough_time_for_a_stop() -> None:
    assert len(SERVICES) == 3
    for path in SERVICES:
        found = options(path.name)
        for name, value in (
            ("NoNewPrivileges", "yes"),
            ("ProtectSystem", "strict"),
            ("CapabilityBoundingSet", ""),
            ("RestartPreventExitStatus", "2"),
            ("StartLimitIntervalSec", "0"),
        ):
            assert found[name] == [value], f"{path.name}: {name}"
        assert "MALLOC_ARENA_MAX=2" in " ".join(found["Environment"])
        assert re.fullmatch(r"\d+(G|%)", *found["MemoryMax"]), path.name
    learner = options("stream-ssl-learner.service")
    assert learner["TimeoutStopSec"] == ["10min"]
    assert "ProcSubset" not in learner, "torch reads /proc/cpuinfo to choose its kernels"
    receiver = options("stream-ssl-receiver.service")
    assert "ProcSubset" not in receiver, "the metrics of the process need /proc/stat"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not here")
@pytest.mark.parametrize("path", SERVICES, ids=lambda path: path.stem)
def test_systemd_accepts_each_unit_with_an_exposure_of_at_most_2(
    path: Path, tmp_path: Path
) -> None:
    copy = tmp_path / path.name  # its program is not installed here
    copy.write_text(path.read_text().replace("/opt/stream-ssl/bin/stream-ssl", "/bin/true"))
    for words in (["verify"], ["security", "--offline=yes", "--threshold=20"]):
        done = subprocess.run(
            ["systemd-analyze", *words, str(copy)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout[-300:] + done.stderr
        assert path.name not in done.stderr, done.stderr
