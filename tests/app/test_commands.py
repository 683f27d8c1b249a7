"""The commands that need no daemon: their output, their files and their exit statuses."""

from __future__ import annotations

import errno
import json
import os
import shlex
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from table import table

from stream_ssl import __version__
from stream_ssl.app import cli
from stream_ssl.app.commands import keys, produce, receiver, status
from stream_ssl.config import options
from stream_ssl.process.failures import USAGE, reported
from stream_ssl.receiver.allow_list import AllowList
from stream_ssl.wire.keys import Keys


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Restore pytest's signal handlers, which commands replace."""
    held = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in held.items():
        signal.signal(number, handler)


def output_of(code: str, **environment: str) -> str:
    """Run Python code in a new process, which must end with status 0, and return its output."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_help_names_every_command_and_loads_no_heavy_module() -> None:
    probe = (
        "import sys\n"
        "from stream_ssl.app.cli import main\n"
        "try:\n    main(['--help'])\n"
        "except SystemExit as end:\n    assert not end.code\n"
        "heavy = {'torch', 'numpy', 'zmq', 'jsonargparse', 'rich', 'lmdb'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    output = output_of(probe)
    for name, line in cli.COMMANDS.items():
        assert name in output
        assert line.split(":")[0] in " ".join(output.split())


def test_a_command_resets_the_signals_that_it_inherits() -> None:
    probe = (
        "import signal, subprocess, sys\n"
        "from stream_ssl.app.cli import main\n"
        "signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1})\n"
        "main(['init', 'laptop'])\n"
        "child = subprocess.Popen([sys.executable, '-c', 'raise SystemExit(3)'])\n"
        "assert child.wait() == 3\n"
        "blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())\n"
        "assert not blocked, blocked\n"
    )
    output_of(probe)


class Replaced(Exception):
    """The program would be replaced here."""


def test_a_locale_of_another_encoding_gets_utf8_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[object] = []

    def execv(*program: object) -> None:
        begun.extend(program)
        raise Replaced

    monkeypatch.setattr(os, "execv", execv)
    monkeypatch.setattr(sys, "argv", ["stream-ssl", "init"])
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "stream_ssl", "init"])
    monkeypatch.setattr(sys, "getfilesystemencoding", lambda: "iso8859-1")
    monkeypatch.delenv("PYTHONUTF8", raising=False)
    with pytest.raises(Replaced):
        cli.main()
    assert begun == [sys.executable, [sys.executable, "-m", "stream_ssl", "init"]]
    assert os.environ["PYTHONUTF8"] == "1"
    assert cli.main() == 0  # the program does not start itself for ever
    assert len(begun) == 2


@pytest.mark.parametrize(
    ("encoding", "shown"), [("ascii", b"??"), ("utf-8:strict", "\xb7".encode() + b"\xe9")]
)
def test_output_replaces_the_characters_that_its_encoding_lacks(
    encoding: str, shown: bytes
) -> None:
    program = (
        "from stream_ssl.app import cli; from stream_ssl.app.commands import init; "
        "init.main = lambda _: print('\\xb7\\udce9') or 0; cli.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "init"],
        env=os.environ | {"PYTHONIOENCODING": encoding},
        capture_output=True,
        timeout=60,
    )
    assert (done.stdout, done.stderr) == (shown + b"\n", b"")


def test_a_terminal_without_a_size_still_shows_tables(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def main(_: list[str]) -> int:
        status.console().print(status.answers_table("runs/laptop"))
        return 0

    monkeypatch.setenv("COLUMNS", "0")
    monkeypatch.setenv("LINES", "0")
    monkeypatch.setattr(status, "main", main)
    assert cli.main(["status", "runs/laptop"]) == 0
    assert "runs/laptop" in capsys.readouterr().out


def test_variables_of_other_programs_change_neither_metrics_nor_plots(tmp_path: Path) -> None:
    """A web server with several processes, or a notebook, sets such variables."""
    code = (
        "from stream_ssl.app import cli\n"
        "cli.main(['init'])\n"
        "import matplotlib, prometheus_client\n"
        "prometheus_client.Counter('a', 'b')\n"
        "print('backend', matplotlib.get_backend())\n"
    )
    others = {"MPLBACKEND": "module://of_a_notebook", "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    assert "backend agg" in output_of(code, **others).lower()
    assert not list(tmp_path.iterdir())


def test_the_error_names_a_library_that_does_not_fit_into_memory(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def main(arguments: list[str]) -> int:
        def work() -> None:
            raise ImportError(arguments[0])

        return reported(work)

    monkeypatch.setattr(status, "main", main)
    assert cli.main(["status", "libtorch.so: failed to map segment from shared object"]) == USAGE
    assert "too little memory (libtorch.so: failed to map" in capsys.readouterr().err
    with pytest.raises(ImportError, match="cannot import name"):
        cli.main(["status", "cannot import name 'a' from 'torch'"])


def test_the_option_version_prints_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["--version"])
    assert end.value.code == 0
    assert __version__ in capsys.readouterr().out


def test_an_unknown_command_is_refused_with_the_known_commands(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["rnu"])
    assert end.value.code == 2
    told = capsys.readouterr().err
    assert "learner" in told
    assert "; did you mean run?" in told


def test_a_command_names_a_deleted_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    with pytest.raises(SystemExit) as ended:
        cli.main(["check"])
    assert ended.value.code == 2
    assert "the working folder no longer exists: change to another" in capsys.readouterr().err


def test_python_m_names_a_deleted_working_folder(tmp_path: Path) -> None:
    started = f"mkdir gone && cd gone && rmdir ../gone && {sys.executable} -m stream_ssl check"
    path = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        ["sh", "-c", started],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 2
    assert "the working folder no longer exists" in done.stderr
    assert "Traceback" not in done.stderr


def test_every_command_and_every_source_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    sources = [("produce", source) for source in produce.SOURCES]
    for words in [*((command,) for command in cli.COMMANDS), *sources]:
        with pytest.raises(SystemExit) as end:
            cli.main([*words, "--help"])
        assert not end.value.code, words
        said = capsys.readouterr().out
        assert f"stream-ssl {words[0]}" in said
        if words in sources:
            assert "--shape.bias" in said, words
            assert "--to" in said, words


def test_the_help_of_commands_names_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    for words, named in (
        ("evaluate --data idx", ("kNN probe (default: 20 200)", "views (default: 0)")),
        ("embed", ("file is replaced (default: features.npz)", "encoder (default: 256)")),
        ("export", ("compare it with torch (default: True)",)),
        ("search", ("number of samples to print (default: 10)",)),
    ):
        with pytest.raises(SystemExit):
            cli.main([*words.split(), "--help"])
        said = " ".join(capsys.readouterr().out.split())
        assert [one for one in named if one not in said] == [], words
        assert not [one for one in ("None", "False", "[]", "SUPPRESS") if f": {one})" in said]


def test_the_learner_s_help_is_short_current_and_needs_no_torch() -> None:
    blocked = (
        "import sys\nsys.modules['torch'] = None\nfrom stream_ssl.app.cli import main\n"
        "main(['learner', '--help'])"
    )
    done = subprocess.run([sys.executable, "-c", blocked], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) <= 400
    made = options.learner_parser().format_help()
    assert done.stdout.split() == made.split(), "run `make docs`"
    named = [action.dest for action in options.learner_parser()._actions if "." in action.dest]
    assert [name for name in named if not name.endswith(".help") and name not in done.stdout] == []


def test_keys_are_made_once_and_entered_in_the_allow_list(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    allow = tmp_path / "allow.json"
    arguments = ["robot-1", "--folder", str(tmp_path), "--allow", str(allow)]
    assert keys.main(arguments) == 0
    secret = tmp_path / "robot-1.secret.json"
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    public = json.loads((tmp_path / "robot-1.public.json").read_text())["public"]
    assert Keys.load(secret).public == public
    assert AllowList(allow).name_of(public) == "robot-1"
    assert keys.main(arguments) == 1
    assert "Remove it first" in capsys.readouterr().err
    assert Keys.load(secret).public == public


def test_an_interrupt_ends_a_command_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(status, "main", interrupted)
    assert cli.main(["status", "run"]) == 130
    assert capsys.readouterr().err == "stream-ssl status: interrupted\n"


@pytest.mark.parametrize("words", [["init"], ["init", "gpu"]])
def test_a_command_with_a_closed_pipe_ends_without_a_traceback(words: list[str]) -> None:
    """`stream-ssl init | head -1`, with a pipe whose reader has ended before the first line."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as pipe:
        done = subprocess.run(
            [sys.executable, "-m", "stream_ssl", *words],
            stdout=pipe,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=60,
        )
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has /dev/full")
def test_output_to_a_full_disk_ends_with_one_line() -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "stream_ssl", "init", "laptop"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=60,
        )
    told = "stream-ssl init: the output cannot be written (No space left on device): free space"
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert done.stderr.startswith(told)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has /dev/full")
def test_a_command_keeps_its_status_if_its_error_cannot_be_written(tmp_path: Path) -> None:
    """A supervisor restarts a command that ends with another status than 2."""
    wrong = ("keys", "a b", "--folder", str(tmp_path / "keys"))
    unknown = ("receiver", "--no-such-option", "1")
    reader, closed = os.pipe()
    os.close(reader)
    with Path("/dev/full").open("wb") as full, os.fdopen(closed, "wb") as pipe:
        for output in (full, pipe):
            for command in (wrong, unknown):
                done = subprocess.run(
                    [sys.executable, "-m", "stream_ssl", *command],
                    stderr=output,
                    check=False,
                    timeout=60,
                )
                assert done.returncode == USAGE, command


def test_the_error_of_a_long_output_to_a_full_disk_names_the_remedy(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A short output fails at the end of the command, and a long one within it."""

    def work() -> None:
        with Path("/dev/full").open("w") as full:
            print("row\n" * 10_000, file=full)

    assert reported(work) == 1
    assert "No space left on device: free space where the output or" in caplog.text


def test_the_error_of_a_lack_of_threads_names_the_limits(caplog: pytest.LogCaptureFixture) -> None:
    def work() -> None:
        raise RuntimeError("can't start new thread")  # Python's text

    assert reported(work) == 1
    (line,) = caplog.records
    assert line.getMessage().startswith("can't start new thread: raise the limit of processes")
    assert not line.exc_info


def test_a_lack_of_threads_for_the_first_one_names_the_limits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(_: list[str]) -> int:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(receiver, "main", refused)
    assert cli._run("receiver", ["laptop.yaml"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("stream-ssl receiver: can't start new thread: raise the limit of")


def test_a_command_without_an_output_ends_without_a_traceback() -> None:
    """`stream-ssl init >&-` is such a command."""
    command = f"{shlex.quote(sys.executable)} -m stream_ssl init laptop >&-"
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")


def test_watch_without_an_output_asks_for_a_terminal(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "stream_ssl", "watch", str(tmp_path)]
    command = f"{' '.join(map(shlex.quote, words))} >&-"
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, check=False, timeout=60)
    assert done.returncode == USAGE
    assert done.stderr.startswith(b"the output is not a terminal"), done.stderr


def test_a_file_does_not_take_the_number_of_a_closed_output(tmp_path: Path) -> None:
    """A script may start a daemon with `<&- >&- 2>&-`, and a crash writes its stacks to 2."""
    file = tmp_path / "other"
    code = (
        "import os, signal, sys; from stream_ssl.app import cli; cli.main(['init']);"
        "other = open(sys.argv[1], 'w'); os.kill(os.getpid(), signal.SIGUSR1);"
        "other.write(str(other.fileno()))"
    )
    started = " ".join(map(shlex.quote, (sys.executable, "-c", code, str(file))))
    subprocess.run(["sh", "-c", f"{started} <&- >&- 2>&-"], check=True, timeout=60)
    assert file.read_text() == "3"


def test_the_error_of_a_missing_temporary_folder_names_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A container with a read-only file system may have no such folder."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(tmp_path / "none")])
    assert reported(lambda: bool(tempfile.gettempdir())) == 1
    assert "No usable temporary directory" in caplog.text
    assert "set TMPDIR to a folder that this user may write" in caplog.text


def test_a_broken_pipe_is_an_error_of_a_daemon_and_ends_other_commands(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def work() -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    with pytest.raises(BrokenPipeError):
        reported(work)
    monkeypatch.setattr(receiver, "main", lambda _: reported(work))
    assert cli.main(["receiver"]) == 1
    assert "Broken pipe" in caplog.text


def test_status_says_that_no_run_has_started_in_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status.main([str(tmp_path)]) == 1
    assert "no run has started here" in " ".join(capsys.readouterr().out.split())


def test_produce_says_why_it_cannot_connect(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    arguments = ["--to", "tcp://127.0.0.1:1", "--name", "robot", "--connect_seconds", "0.5"]
    assert produce.main(["synthetic", *arguments]) == 1
    told = "no connection within 0.5 s: nobody listens at tcp://127.0.0.1:1"
    assert f"producer 'robot': {told}" in caplog.text


@table(
    ("arguments", "message"),
    [
        (["--source.size", "0"], "size"),
        (["--shape.bias", "0.5"], "bias"),
        (["--to", "tcp://192.0.2.1:5557"], "loopback"),
        (
            ["--key", "nowhere.secret.json", "--server_key", "nowhere.public.json"],
            "stream-ssl keys",
        ),
    ],
)
def test_produce_refuses_invalid_arguments(
    arguments: list[str], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    base = ["--to", "tcp://127.0.0.1:1", "--name", "robot"]
    assert produce.main(["synthetic", *base, *arguments]) == 2
    assert message in caplog.text


def test_every_option_of_a_config_file_is_explained() -> None:
    actions = [*options.receiver_parser()._actions, *options.learner_parser()._actions]
    silent = [
        action.dest
        for action in actions
        if "." in action.dest and not (action.help or "").split("(type:")[0].strip()
    ]
    assert silent == []


def test_the_keys_command_refuses_a_name_with_a_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert keys.main(["../elsewhere", "--folder", str(tmp_path)]) == 2
    assert "../elsewhere" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
