"""Keys in files, and the addresses that need none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stream_ssl.wire import Keys, is_loopback, require_loopback
from stream_ssl.wire.address import check_address
from stream_ssl.wire.keys import public_key

PAIR, OTHER = Keys.generate("camera-1"), Keys.generate("other")


def test_saved_keys_can_be_loaded_and_only_the_owner_can_read_the_secret(tmp_path: Path) -> None:
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
    assert Keys.load(str(public)) == Keys(PAIR.name, PAIR.public)


def test_a_path_that_is_as_long_as_a_key_is_read_as_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    named = "k" * (40 - len(".public.json")) + ".public.json"
    for path in (named, "k" * 40):
        Path(path).write_text(json.dumps({"name": "a", "public": PAIR.public}))
        assert len(path) == 40
        assert public_key(path) == PAIR.public
    Path(named).unlink()
    with pytest.raises(ValueError, match="No such file"):
        public_key(named)
    assert public_key(OTHER.public) == OTHER.public


def test_a_secret_appears_in_no_repr_and_no_error(tmp_path: Path) -> None:
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
    assert Keys.load(tmp_path / "camera-1.secret.json") == PAIR
    with pytest.raises(ValueError, match="public half"):
        Keys(PAIR.name, PAIR.public).save(tmp_path)


def test_errors_about_keys_name_the_file_and_the_command_that_makes_keys(tmp_path: Path) -> None:
    path = tmp_path / "robot.secret.json"
    another = {"name": "a", "public": OTHER.public, "secret": PAIR.secret}
    for content, match in (
        (None, "No such file"),
        ("{", "is not JSON"),
        ("[]", '"name", "public"'),
        ('{"name": "a"}', '"name", "public"'),
        ('{"name": "a", "public": "short"}', "public key 'short': must be 40"),
        (json.dumps({"name": "../a", "public": PAIR.public}), "key name '../a'"),
        (json.dumps({"name": 5, "public": PAIR.public}), "key name 5"),
        (json.dumps(another), "does not belong"),
    ):
        if content is not None:
            path.write_text(content)
            path.chmod(0o600)
        with pytest.raises(ValueError, match=match) as caught:
            Keys.load(path)
        assert "stream-ssl keys robot" in str(caught.value)
        assert str(path) in str(caught.value)


def test_load_refuses_a_secret_that_other_users_may_read(tmp_path: Path) -> None:
    _, secret = PAIR.save(tmp_path)
    secret.chmod(0o644)
    with pytest.raises(ValueError, match=r"mode 0644.*chmod 600.*keeps no modes"):
        Keys.load(secret)


def test_public_key_accepts_keys_text_and_paths(tmp_path: Path) -> None:
    public, _ = PAIR.save(tmp_path)
    for form in (PAIR, PAIR.public, public, str(public)):
        assert public_key(form) == PAIR.public
    with pytest.raises(ValueError, match="No such file"):
        public_key("nothing")


def test_loopback_addresses_need_no_keys() -> None:
    for address in (
        "tcp://127.0.0.1:5557",
        "tcp://127.8.9.10:0",
        "tcp://[::1]:5555",
        "tcp://[::ffff:127.0.0.1]:5555",
        "tcp://localhost:5555",
        "ipc:///run/stream-ssl",
        "inproc://a",
    ):
        assert is_loopback(address), address
        require_loopback(address, "")


def test_addresses_other_than_loopback_need_keys() -> None:
    for address in (
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
        "ipc://",
        "",
    ):
        assert not is_loopback(address), address
        with pytest.raises(ValueError, match=r"only on loopback.*; make keys"):
            require_loopback(address, "make keys")


def test_check_address_accepts_only_complete_tcp_and_ipc_addresses() -> None:
    for address in ("tcp://robot.example:1", "tcp://[fe80::1%eth0]:65535", "ipc:///run/a"):
        assert check_address(address) == address
    for address in (
        *("", "tcp://", "tcp://host", "tcp://host:", "tcp://*:5", "tcp://host:0"),
        *("tcp://host:65536", "ipc://"),
    ):
        with pytest.raises(ValueError, match="tcp://HOST:PORT"):
            check_address(address)
    for host in ("user@host", "bücher.example", "_host", "a/b"):  # ZeroMQ takes none of them
        with pytest.raises(ValueError, match=f"'tcp://{host}:1': the host may consist of"):
            check_address(f"tcp://{host}:1")
    for own in ("eth0:0;10.0.0.1", "a_b.local"):
        assert check_address(f"tcp://{own}:1")
