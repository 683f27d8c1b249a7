"""The file of the allow-list: reloading, faults, and the commands that change it."""

import errno
import json
import os
import threading
import time

import pytest
from receiver_peer import allow
from table import table

from stream_ssl.app.commands.keys import main as keys_command
from stream_ssl.process.failures import DONE, USAGE
from stream_ssl.receiver import allow_list
from stream_ssl.receiver.allow_list import AllowList
from stream_ssl.wire import Keys

ROBOT = Keys.generate("robot")
MALLORY = Keys.generate("mallory")


@pytest.fixture
def listed(tmp_path):
    return allow(tmp_path / "allow.json", robot=ROBOT, mallory=MALLORY)


def test_the_next_reload_reads_a_list_that_could_not_be_opened(listed, monkeypatch):
    """Otherwise, a key that was revoked at that moment would stay in force."""
    monkeypatch.setattr(allow_list, "_RELOAD_SECONDS", 0.0)
    monkeypatch.setattr(allow_list, "_SETTLED_SECONDS", 0.0)
    names = AllowList(listed)
    allow(listed, mallory=MALLORY)

    def no_descriptors(*_, **__):
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr("stream_ssl.bounded_files.os.open", no_descriptors)
        names.reload()
    assert names.name_of(ROBOT.public) == "robot"
    names.reload()
    assert names.name_of(ROBOT.public) is None


def test_a_reload_sees_a_second_change_that_has_the_same_file_time(listed, monkeypatch, caplog):
    """Some file systems keep times in whole seconds. A revoked key would stay in force."""
    monkeypatch.setattr(allow_list, "_RELOAD_SECONDS", 0.0)
    monkeypatch.setattr(allow_list, "_SETTLED_SECONDS", 3600.0)
    caplog.set_level("INFO")
    now = int(time.time())
    os.utime(listed, (now, now))
    names = AllowList(listed)
    names.reload()
    assert "keys" not in caplog.text, "a list without a change is not logged"
    other = Keys.generate("robot").public
    listed.write_text(listed.read_text().replace(ROBOT.public, other))
    os.utime(listed, (now, now))
    names.reload()
    assert (names.name_of(ROBOT.public), names.name_of(other)) == (None, "robot")
    assert caplog.text.count("keys") == 1


def test_a_bad_list_is_refused_at_the_start(tmp_path):
    path = tmp_path / "allow.json"
    for content, message in (
        (None, "stream-ssl keys NAME --allow"),
        ("nonsense", "is not JSON"),
        ("", "is not JSON.*; repair the file, or remove it and enter each producer with"),
        ("[]", "must be"),
        ('{"robot": "short"}', "40 characters"),
        (json.dumps({"ro bot": ROBOT.public}), "producer name"),
        (json.dumps({"a": ROBOT.public, "b": ROBOT.public}), "have one key"),
    ):
        if content is not None:
            path.write_text(content)
        with pytest.raises(ValueError, match=message):
            AllowList(path)


def test_the_error_names_a_list_that_this_user_may_not_read(listed, monkeypatch):
    def denied(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(allow_list, "read_json", denied)
    with pytest.raises(ValueError, match=r"allow.json: Permission denied; let .* read it \(chown"):
        AllowList(listed)


def test_entering_a_key_keeps_the_other_keys_of_the_list(tmp_path):
    path = tmp_path / "new" / "allow.json"
    AllowList.enter(path, "robot", ROBOT.public)
    AllowList.enter(path, "mallory", MALLORY.public)
    assert AllowList(path).name_of(ROBOT.public) == "robot"
    assert AllowList(path).name_of(MALLORY.public) == "mallory"
    with pytest.raises(ValueError, match="have one key"):
        AllowList.enter(path, "third", ROBOT.public)
    assert AllowList(path).name_of(ROBOT.public) == "robot"


def test_revoking_the_last_key_leaves_a_valid_list(tmp_path):
    path = tmp_path / "allow.json"
    for name, keys in (("robot", ROBOT), ("mallory", MALLORY)):
        AllowList.enter(path, name, keys.public)
    path.chmod(0o640)
    with pytest.raises(ValueError, match=r"no key of 'robt'; it names: mallory, robot"):
        AllowList.revoke(path, "robt")
    running = AllowList(path)
    AllowList.revoke(path, "mallory")
    assert json.loads(path.read_text()) == {"robot": ROBOT.public}
    assert path.stat().st_mode & 0o777 == 0o640
    AllowList.revoke(path, "robot")
    running._checked -= 1
    running.reload()
    assert (running.name_of(ROBOT.public), running.broken) == (None, False)
    with pytest.raises(ValueError, match="No such file"):
        AllowList.revoke(tmp_path / "nowhere" / "allow.json", "robot")


def test_the_keys_command_revokes_a_key_or_names_the_error(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    keys = ["robot", "--folder", "keys"]
    assert keys_command([*keys, "--allow", "allow.json"]) == DONE
    capsys.readouterr()
    assert keys_command(["robot", "--revoke", "allow.json", "--allow", "allow.json"]) == USAGE
    assert "choose one of them" in capsys.readouterr().err
    assert keys_command(["other", "--revoke", "allow.json"]) == USAGE
    assert "it names: robot" in capsys.readouterr().err
    assert keys_command(["robot", "--revoke", "allow.json"]) == DONE
    assert capsys.readouterr().out == "removed robot from allow.json\n"
    assert json.loads((tmp_path / "allow.json").read_text()) == {}
    assert sorted(file.name for file in (tmp_path / "keys").iterdir()) == [
        "robot.public.json",
        "robot.secret.json",
    ]


def test_entering_a_key_keeps_the_mode_of_the_list_and_its_link(tmp_path):
    """Otherwise, a receiver of another user cannot read the list, or reads another file."""
    path, link = tmp_path / "allow.json", tmp_path / "link.json"
    AllowList.enter(path, "robot", ROBOT.public)
    path.chmod(0o640)
    link.symlink_to(path)
    earlier = os.umask(0o077)
    try:
        AllowList.enter(link, "mallory", MALLORY.public)
    finally:
        os.umask(earlier)
    assert link.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o640
    assert AllowList(path).name_of(MALLORY.public) == "mallory"


@table("reason", [errno.EPERM, errno.EINVAL])
def test_entering_a_key_keeps_the_group_if_the_owner_cannot_be_kept(tmp_path, monkeypatch, reason):
    """A member of the receiver's group, or a container without the owner's id, cannot set it."""
    path, groups = tmp_path / "allow.json", []
    AllowList.enter(path, "robot", ROBOT.public)

    def fchown(_file, user, group):
        if user != -1:
            raise OSError(reason, os.strerror(reason))
        groups.append(group)

    monkeypatch.setattr(os, "fchown", fchown)
    AllowList.enter(path, "mallory", MALLORY.public)
    assert groups == [path.stat().st_gid]
    assert AllowList(path).name_of(MALLORY.public) == "mallory"


def test_keys_that_are_entered_at_the_same_time_are_all_listed(tmp_path):
    """A script may make the keys of many robots at once."""
    path, start = tmp_path / "allow.json", threading.Barrier(8)

    def enter(name):
        start.wait()
        AllowList.enter(path, name, pairs[name].public)

    pairs = {f"robot-{n}": Keys.generate(f"robot-{n}") for n in range(8)}
    threads = [threading.Thread(target=enter, args=[name]) for name in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert json.loads(path.read_text()).keys() == pairs.keys()
