"""Keys in files, and the addresses that need none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stream_ssl.wire import Keys, is_loopback, require_loopback
from stream_ssl.wire.address import check_address
from stream_ssl.wire.keys import public_key

PAIR, OTHER = Keys.generate("camera-1"), Keys.generate("other")


def test_files(tmp_path: Path) -> None:
    public, secret = PAIR.save(tmp_path / "keys")
    assert (public.name, secret.name) == ("camera-1.public.json", "camera-1.secret.json")
    assert secret.stat().st_mode & 0o777 == 0o600
    assert sorted(path.name for path in public.parent.iterdir()) == [public.name, secret.name]
    assert json.loads(public.read_text()) == {"name": "camera-1", "public": PAIR.public}
    assert json.loads(secret.read_text()) == {
        "name": "camera-1",
        "public": PAIR.public,
        "secret": PAIR.secret,
    }
    assert Keys.load(secret) == PAIR
    assert Keys.load(str(public)) == PAIR.public_only()


def test_a_secret_shows_nowhere(tmp_path: Path) -> None:
    assert PAIR.secret is not None
    assert PAIR.secret not in repr(PAIR)
    path = tmp_path / "a.secret.json"
    path.write_text(json.dumps({"name": "a", "public": PAIR.public, "secret": PAIR.secret + "x"}))
    path.chmod(0o600)
    with pytest.raises(ValueError, match="secret key: must be 40") as caught:
        Keys.load(path)
    assert PAIR.secret not in str(caught.value)


def test_keys_are_not_overwritten(tmp_path: Path) -> None:
    PAIR.save(tmp_path)
    with pytest.raises(ValueError, match=r"camera-1\.public\.json: exists"):
        Keys.generate("camera-1").save(tmp_path)
    renewed = Keys.generate("camera-1")
    assert Keys.load(renewed.save(tmp_path, overwrite=True)[1]) == renewed
    with pytest.raises(ValueError, match="public half"):
        PAIR.public_only().save(tmp_path)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (None, "No such file"),
        ("{", "is not JSON"),
        ("[]", '"name", "public"'),
        ('{"name": "a"}', '"name", "public"'),
        ('{"name": "a", "public": "short"}', "public key 'short': must be 40"),
        (json.dumps({"name": "../a", "public": PAIR.public}), "key name '../a'"),
        (json.dumps({"name": 5, "public": PAIR.public}), "key name 5"),
        (
            json.dumps({"name": "a", "public": OTHER.public, "secret": PAIR.secret}),
            "does not belong",
        ),
    ],
    ids=[
        *("none", "no JSON", "a list", "no public key", "short key", "bad name", "name no text"),
        "another's secret",
    ],
)
def test_errors_name_the_command_that_mends(
    content: str | None, match: str, tmp_path: Path
) -> None:
    path = tmp_path / "robot.secret.json"
    if content is not None:
        path.write_text(content)
        path.chmod(0o600)
    with pytest.raises(ValueError, match=match) as caught:
        Keys.load(path)
    assert "stream-ssl keys robot" in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_secret_that_everybody_may_read_is_refused(tmp_path: Path) -> None:
    _, secret = PAIR.save(tmp_path)
    secret.chmod(0o644)
    with pytest.raises(ValueError, match=r"mode 0644.*chmod 600"):
        Keys.load(secret)


def test_a_public_key_has_many_forms(tmp_path: Path) -> None:
    public, _ = PAIR.save(tmp_path)
    for form in (PAIR, PAIR.public, public, str(public)):
        assert public_key(form) == PAIR.public
    with pytest.raises(ValueError, match="No such file"):
        public_key("nothing")


@pytest.mark.parametrize(
    "address",
    [
        "tcp://127.0.0.1:5557",
        "tcp://127.8.9.10:0",
        "tcp://[::1]:5555",
        "tcp://[::ffff:127.0.0.1]:5555",
        "tcp://localhost:5555",
        "ipc:///run/stream-ssl",
        "inproc://a",
    ],
)
def test_loopback(address: str) -> None:
    assert is_loopback(address)
    require_loopback(address, "")


@pytest.mark.parametrize(
    "address",
    [
        "tcp://0.0.0.0:5555",
        "tcp://*:5555",
        "tcp://192.168.1.2:5555",
        "tcp://[::]:5555",
        "tcp://[::ffff:192.168.1.2]:5555",
        "tcp://127.0.0.1.example.org:5555",
        "tcp://localhost.example.org:5555",
        "tcp://eth0;127.0.0.1:5557",
        "udp://127.0.0.1:5557",
        "127.0.0.1:5557",
        "",
    ],
)
def test_not_loopback(address: str) -> None:
    assert not is_loopback(address)
    with pytest.raises(ValueError, match=r"only on loopback.*; make keys"):
        require_loopback(address, "make keys")


@pytest.mark.parametrize(
    "address", ["tcp://robot.example:1", "tcp://[fe80::1%eth0]:65535", "ipc:///run/a"]
)
def test_addresses_to_connect_to(address: str) -> None:
    assert check_address(address) == address


@pytest.mark.parametrize(
    "address", ["", "tcp://", "tcp://host", "tcp://host:", "tcp://*:5", "tcp://host:0", "ipc://"]
)
def test_no_addresses_to_connect_to(address: str) -> None:
    with pytest.raises(ValueError, match="tcp://HOST:PORT"):
        check_address(address)
