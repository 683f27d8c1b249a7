"""Keys that a run makes in its folder, and producers that read them there."""

from __future__ import annotations

import json
import os
import shutil
import stat
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from harness import TINY, kill, processes, until

from stream_ssl.app.commands import produce
from stream_ssl.app.commands.run import leave_other_receivers, prepare_receivers, receivers
from stream_ssl.config import options
from stream_ssl.daemon.endpoints import hold_role, place_of, publish
from stream_ssl.daemon.receive import access_of, dry_run, listen_again
from stream_ssl.daemon.run_states import endpoints_of
from stream_ssl.producers import CannotConnectError, Keys, Producer
from stream_ssl.wire import run_folder
from stream_ssl.wire.address import check_bind, receiver_of
from stream_ssl.wire.run_folder import find_receiver, make_keys

KEYED: dict[str, Any] = {name: value for name, value in TINY.items() if name != "access"}


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def announce(folder: Path, address: str, **entry: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "endpoints.json").write_text(json.dumps({"receiver": {"data": address, **entry}}))


def test_a_run_makes_private_keys_once_and_never_replaces_them(tmp_path: Path) -> None:
    secret, allow = make_keys(tmp_path / "run")
    keys = secret.parent
    assert mode(keys) == 0o700
    assert mode(secret) == mode(keys / "producer.secret.json") == 0o600
    assert json.loads(allow.read_text()) == {"*": Keys.load(keys / "producer.secret.json").public}
    (keys / "producer.public.json").unlink()  # as after a power cut between the two files
    allow.write_text("{}")
    before = {path.name: path.read_bytes() for path in keys.iterdir()}
    make_keys(tmp_path / "run")
    after = {path.name: path.read_bytes() for path in keys.iterdir()}
    public = json.loads(after.pop("producer.public.json"))["public"]
    assert after == before
    assert public == Keys.load(keys / "producer.secret.json").public


def test_keys_are_not_written_through_a_link(tmp_path: Path) -> None:
    other = tmp_path / "etc"
    other.mkdir()
    (tmp_path / "keys").symlink_to(other)
    with pytest.raises(ValueError, match="keys: is a link, and links are not followed here"):
        make_keys(tmp_path)
    assert not list(other.iterdir())


@pytest.mark.parametrize("name", ["receiver", "producer"])
def test_a_new_secret_replaces_the_public_half_of_a_removed_secret(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    _, allow = make_keys(tmp_path)
    keys, other = allow.parent, Keys.generate("robot").public
    first = json.loads(allow.read_text())["*"]
    allow.write_text(json.dumps({"robot": other, "*": first}))
    (keys / f"{name}.secret.json").unlink()
    make_keys(tmp_path)
    for one in ("receiver", "producer"):
        pair = Keys.load(keys / f"{one}.secret.json")
        assert Keys.load(keys / f"{one}.public.json").public == pair.public
    assert json.loads(allow.read_text()) == {"robot": other, "*": pair.public}
    assert (pair.public == first) == (name == "receiver")
    assert f"{name}.public.json has a new key" in caplog.text
    caplog.clear()
    make_keys(tmp_path)
    assert not caplog.text


def test_an_entry_of_the_operator_stays_after_a_removed_secret(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, allow = make_keys(tmp_path)
    for content in ({}, {"*": Keys.generate("own").public}):
        allow.write_text(json.dumps(content))
        (allow.parent / "producer.secret.json").unlink()
        make_keys(tmp_path)
        assert json.loads(allow.read_text()) == content
    assert caplog.text.count("has another key than local producers") == 1


def test_the_error_of_a_damaged_secret_advises_to_remove_the_file(tmp_path: Path) -> None:
    secret, _ = make_keys(tmp_path)
    producer = secret.with_name("producer.secret.json")
    announce(tmp_path, "tcp://127.0.0.1:7000", server_key=Keys.load(secret).public)
    for path in (secret, producer):
        path.write_text("{")
    with pytest.raises(ValueError, match=r"receiver\.secret\.json.* remove that file and restart"):
        make_keys(tmp_path)
    with pytest.raises(ValueError, match=r"producer\.secret\.json.* remove that file and restart"):
        Producer(run=tmp_path, name="camera-1")


def test_a_receiver_on_any_port_takes_its_former_port_while_the_port_is_free(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    taken: list[str] = []

    def listen(bind: str) -> str:
        if bind in taken:
            raise OSError("in use")
        return bind

    def again(bind: str) -> str:
        return listen_again(listen, bind, tmp_path)

    assert again("tcp://127.0.0.1:0") == "tcp://127.0.0.1:0"
    publish(tmp_path, "receiver", data="tcp://0.0.0.0:7000", http="http://x")
    assert again("tcp://127.0.0.1:0") == "tcp://127.0.0.1:7000"
    assert again("tcp://*:*") == "tcp://*:7000"
    for bind in ("tcp://127.0.0.1:7001", "ipc:///tmp/a:0"):
        assert again(bind) == bind
    assert not caplog.text
    taken.append("tcp://127.0.0.1:7000")
    assert again("tcp://127.0.0.1:0") == "tcp://127.0.0.1:0"
    assert "the receiver cannot listen on its former port 7000" in caplog.text
    taken.clear()
    place = place_of(tmp_path)
    for moved in ({}, {"folder": "/elsewhere"}, {"inode": "1"}):  # renamed, or restored
        kept = {"data": "tcp://0.0.0.0:7000", "http": "http://x", **place, **moved}
        publish(tmp_path, "receiver", **kept)
        assert again("tcp://127.0.0.1:0") == "tcp://127.0.0.1:7000"
    publish(tmp_path, "receiver", **kept | {"folder": "/elsewhere"})  # of the original
    assert again("tcp://127.0.0.1:0") == "tcp://127.0.0.1:0"
    publish(tmp_path, "receiver", data="ipc:///tmp/a", http="http://x")
    assert again("tcp://127.0.0.1:0") == "tcp://127.0.0.1:0"
    caplog.clear()
    publish(tmp_path, "receiver", data="tcp://0.0.0.0:7000", http="http://x")

    def refuse(_: str) -> str:
        raise ValueError("journal.budget is too small")

    with pytest.raises(ValueError, match="too small"):
        listen_again(refuse, "tcp://127.0.0.1:0", tmp_path)
    assert not caplog.text  # the port is not at fault


def test_a_run_warns_of_receivers_that_it_does_not_start_any_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    several = [tmp_path / f"receiver-{number}" for number in range(2)]
    for folder in (tmp_path, *several):
        (folder / "journal").mkdir(parents=True)
        publish(folder, "receiver", data="tcp://127.0.0.1:7000", http="http://x")
    leave_other_receivers(tmp_path, {"receiver-0", "receiver-1", "learner"})
    assert f"the journals in {tmp_path} stay unread" in caplog.text
    assert endpoints_of(tmp_path).keys() == {"receiver-0", "receiver-1"}
    caplog.clear()
    leave_other_receivers(tmp_path, {"receiver", "learner"})
    assert f"the journals in {several[0]}, {several[1]} stay unread" in caplog.text
    assert endpoints_of(tmp_path) == {}
    with hold_role(several[0], "receiver"):
        publish(several[0], "receiver", data="tcp://127.0.0.1:7000", http="http://x")
        leave_other_receivers(tmp_path, {"receiver", "learner"})
        assert endpoints_of(tmp_path).keys() == {"receiver-0"}, "it runs, for another starter"


def test_a_secret_that_everybody_may_read_is_refused(tmp_path: Path) -> None:
    secret, _ = make_keys(tmp_path)
    secret.chmod(0o644)
    with pytest.raises(ValueError, match=r"run: chmod 600"):
        make_keys(tmp_path)


def test_a_run_accepts_samples_of_producers_with_its_keys(tmp_path: Path) -> None:
    """This also holds after a kill. Other producers are refused with a reason, and counted."""
    with processes(tmp_path / "run", KEYED) as run:
        receiver = run.role("receiver")
        secrets = {path: path.read_bytes() for path in (run.folder / "keys").iterdir()}
        with Producer(run=run.folder, name="camera-1") as producer:
            producer.send(b"\xff\xd8\xff", "a", position=1)
        told = r"pass run=FOLDER \(--run FOLDER"
        with Producer(run.address, "plain") as plain, pytest.raises(CannotConnectError, match=told):
            plain.connect(3.0)
        stranger = Keys.generate("stranger")
        with (
            Producer(run=run.folder, name="stranger", keys=stranger) as other,
            pytest.raises(CannotConnectError, match="is not on the receiver's allow-list"),
        ):
            other.connect(3.0)
        for reason in ("denied", "no-key"):
            key = f'refused_connections_total{{reason="{reason}"}}'
            until(lambda key=key: run.metric(key) >= 1, lambda: run.log("receiver"), 10)
        assert run.metric('producer_samples_total{producer="camera-1"}') == 1
        address = run.address
        kill(receiver)
        run.role("receiver")
        assert run.address == address  # the port is 0 in the configuration
        assert {path: path.read_bytes() for path in (run.folder / "keys").iterdir()} == secrets
        with Producer(run=run.folder, name="camera-1") as producer:
            assert producer.connect().position == 1
        sent = run.start(
            *("produce", "synthetic", "--run", str(run.folder), "--name", "camera-2"),
            *("--source.size", "16", "--source.channels", "1", "--shape.limit", "20"),
        )
        assert sent.wait(60) == 0, run.log("produce")
        assert run.metric("received_samples_total") == 20


def test_several_receivers_share_keys_and_each_producer_finds_its_receiver(tmp_path: Path) -> None:
    arguments = ["--run", str(tmp_path), "--receiver.bind", "tcp://127.0.0.1:7000"]
    settings = options.read(options.receiver_parser("run"), arguments)
    for command in receivers(settings, 2, 2, arguments).values():
        given = options.read(options.receiver_parser(), command[command.index("receiver") + 1 :])
        assert given.access["keys"] == tmp_path / "keys" / "receiver.secret.json"
        assert given.access["allow"] == tmp_path / "keys" / "allow.json"
    make_keys(tmp_path)
    addresses = [f"tcp://127.0.0.1:{port}" for port in (7000, 7001)]
    for number, address in enumerate(addresses):
        announce(tmp_path / f"receiver-{number}", address, server_key="k" * 40)
    names = [f"camera-{number}" for number in range(8)]
    found = [find_receiver(tmp_path, name) for name in names]
    assert [one.address for one in found] == [receiver_of(name, addresses) for name in names]
    assert {one.key for one in found} == {tmp_path / "keys" / "producer.secret.json"}


@pytest.mark.parametrize(
    ("bind", "second"),
    [
        ("tcp://127.0.0.1:7000", "tcp://127.0.0.1:7001"),
        ("tcp://127.0.0.1:0", "tcp://127.0.0.1:0"),
        ("tcp://127.0.0.1:*", "tcp://127.0.0.1:*"),
        ("ipc:///tmp/inbox", "ipc:///tmp/inbox-1"),
    ],
)
def test_each_of_several_receivers_gets_an_address(tmp_path: Path, bind: str, second: str) -> None:
    arguments = ["--run", str(tmp_path), "--receiver.bind", bind]
    settings = options.read(options.receiver_parser("run"), arguments)
    command = receivers(settings, 2, 2, arguments)["receiver-1"]
    given = options.read(options.receiver_parser(), command[command.index("receiver") + 1 :])
    assert check_bind(given.receiver.bind) == second


@pytest.mark.parametrize(
    ("ports", "pages"),
    [
        ((9108, 9109), [9108, 9112, 9113]),
        ((9110, 9200), [9110, 9111, 9112]),
        ((0, 0), [0, 0, 0]),
    ],
)
def test_the_pages_of_receivers_skip_the_ports_of_the_ranks(
    tmp_path: Path, ports: tuple[int, int], pages: list[int]
) -> None:
    addresses = [f"127.0.0.1:{port}" for port in ports]
    arguments = ["--run", str(tmp_path), *("--http.receiver", addresses[0])]
    arguments += ["--http.learner", addresses[1]]
    settings = options.read(options.receiver_parser("run"), arguments)
    found = [
        options.read(options.receiver_parser(), command[command.index("receiver") + 1 :])
        for command in receivers(settings, 3, 3, arguments).values()
    ]
    assert [one.http.receiver for one in found] == [f"127.0.0.1:{page}" for page in pages]


def test_a_producer_finds_a_plain_run_and_refuses_keys_for_this_run(tmp_path: Path) -> None:
    announce(tmp_path, "tcp://0.0.0.0:7000")
    make_keys(tmp_path)  # from a time before `access: plain`
    found = find_receiver(tmp_path, "a")
    assert (found.address, found.server_key) == ("tcp://127.0.0.1:7000", None)
    told = "it speaks plain text .* and takes no key; leave keys="
    with pytest.raises(ValueError, match=told):
        Producer(run=tmp_path, name="a", keys=Keys.generate("a"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "says why it ended. Start it with `stream-ssl run"),
        ('{"learner": {"http": "x"}}', "no receiver has started there"),
        ("[" * 100_000, "damaged"),
        ('{"receiver": {"data": 5}}', r"damaged \(it names no address\); restart"),
        ('{"receiver": {"data": "x"}}', r"damaged \(address 'x': must be tcp.*\); restart"),
        ('{"receiver": {"data": "ipc://x", "server_key": 5}}', r"damaged \(server key 5: must be"),
        ("[]", "damaged"),
    ],
)
def test_the_error_names_why_a_run_folder_has_no_receiver(
    tmp_path: Path, content: str | None, message: str
) -> None:
    if content is not None:
        (tmp_path / "endpoints.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        Producer(run=tmp_path, name="camera-1")


@pytest.mark.parametrize("within", ["", "receiver-0"])
def test_a_copied_folder_does_not_lead_to_the_original_run(tmp_path: Path, within: str) -> None:
    run, copy, moved = (tmp_path / name for name in ("run", "copy", "moved"))
    (run / within).mkdir(parents=True)
    at = {"data": "tcp://127.0.0.1:7000", "http": "http://x", **place_of(run / within)}
    publish(run / within, "receiver", **at)
    assert find_receiver(run, "a").address == at["data"]
    shutil.copytree(run, copy)
    with pytest.raises(ValueError, match=r"copy.* is a copy of .*run.*, or give the original"):
        find_receiver(copy, "a")
    run.rename(moved)
    (run / within).mkdir(parents=True)  # a new run at the former path
    assert find_receiver(moved, "a").address == at["data"]


def test_a_producer_waits_for_the_receiver_of_a_run_that_starts(tmp_path: Path) -> None:
    (tmp_path / "supervisor.lock").touch()
    starting = threading.Timer(0.3, announce, (tmp_path, "tcp://127.0.0.1:7000"))
    starting.start()
    found = find_receiver(tmp_path, "camera-1")
    starting.join()
    assert found.address == "tcp://127.0.0.1:7000"


def test_a_producer_does_not_wait_for_a_supervisor_that_ended(tmp_path: Path) -> None:
    """A living supervisor touches its lock every 5 seconds."""
    (tmp_path / "supervisor.lock").touch()
    long_ago = time.time() - 60
    os.utime(tmp_path / "supervisor.lock", (long_ago, long_ago))
    begun = time.monotonic()
    with pytest.raises(ValueError, match="no receiver has started there"):
        find_receiver(tmp_path, "camera-1")
    assert time.monotonic() - begun < 10


def test_a_producer_waits_for_all_receivers_of_a_run_that_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name of the producer may belong to the last receiver."""
    (tmp_path / "supervisor.lock").touch()
    for number in (0, 1, 2):  # an earlier run had three, and the run after it one
        announce(tmp_path / f"receiver-{number}", "tcp://127.0.0.1:7005")
    (tmp_path / "receiver-3").mkdir()  # it could not start
    leave_other_receivers(tmp_path, {"receiver"})
    prepare_receivers(tmp_path, ["receiver-0", "receiver-1", "learner"])
    addresses = ["tcp://127.0.0.1:7000", "tcp://127.0.0.1:7001"]
    name = next(name for name in "abcdef" if receiver_of(name, addresses) == addresses[1])
    announce(tmp_path / "receiver-0", addresses[0])
    with monkeypatch.context() as patch:
        patch.setattr(run_folder, "START_SECONDS", 0.3)
        with pytest.raises(ValueError, match="not yet receiver-1, which may be this producer's"):
            find_receiver(tmp_path, name)
    starting = threading.Timer(0.3, announce, (tmp_path / "receiver-1", addresses[1]))
    starting.start()
    assert find_receiver(tmp_path, name).address == addresses[1]
    starting.join()


def test_a_producer_that_can_read_no_key_is_asked_for_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The keys are kept elsewhere, or belong to another user."""
    server = Keys.generate("server")
    announce(tmp_path, "tcp://127.0.0.1:7000", server_key=server.public)
    told = r"run the producer as the run's user, or pass a key of its own as keys= \(--key\)"
    with pytest.raises(ValueError, match=told):
        Producer(run=tmp_path, name="camera-1")
    make_keys(tmp_path)
    monkeypatch.setattr("stream_ssl.wire.run_folder.os.access", lambda *_: False)
    told += rf".* --allow {tmp_path}/keys/allow\.json$"
    with pytest.raises(ValueError, match=told):
        Producer(run=tmp_path, name="camera-1")


def test_address_and_run_exclude_each_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match="give either"):
        Producer("tcp://127.0.0.1:1", name="camera-1", run=tmp_path)
    with pytest.raises(ValueError, match="give either"):
        Producer(name="camera-1")
    arguments = ["synthetic", "--name", "a", "--run", str(tmp_path), "--to", "tcp://127.0.0.1:1"]
    with pytest.raises(SystemExit):
        produce.main(arguments)
    assert "give either --run FOLDER" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--access", "plan"], ["--access.keys", "K"]])
def test_the_error_of_a_wrong_access_names_the_valid_forms(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        options.read(options.receiver_parser(), arguments)
    told = "access is `plain`, or two files: --access.keys NAME.secret.json --access.allow LIST"
    assert told in capsys.readouterr().err


def test_a_receiver_uses_plain_text_only_if_access_names_this(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def settings(*arguments: str) -> Any:
        return options.read(options.receiver_parser(), ["--run", str(tmp_path), *arguments])

    assert access_of(settings("--access", "plain"), tmp_path) is None
    with pytest.raises(ValueError, match="leave `access` out: the run then makes keys"):
        access_of(settings("--access", "plain", "--receiver.bind", "tcp://0.0.0.0:0"), tmp_path)
    for access in ([], ["--access", "plain"]):
        with pytest.raises(ValueError, match=r"bind inproc://x: no other process could reach"):
            dry_run(settings("--receiver.bind", "inproc://x", *access))
    assert not (tmp_path / "keys").exists()
    dry_run(settings("--receiver.bind", "tcp://0.0.0.0:0"))
    assert not (tmp_path / "keys").exists()
    (tmp_path / "journal").mkdir()  # a run of before
    assert access_of(settings(), tmp_path) is not None
    assert "set `access: plain` to use plain text" in caplog.text
    caplog.clear()
    assert access_of(settings(), tmp_path) is not None
    assert not caplog.text
