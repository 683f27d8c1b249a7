"""stream-ssl check tells what is wrong with a configuration, and opens nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness import TINY

from stream_ssl.app.commands import check
from stream_ssl.wire.keys import Keys

CONFIGS = Path(__file__).parents[2] / "deploy" / "configs"


def outcome(
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    *arguments: str,
) -> tuple[int, str]:
    """Exit status, and all that was said."""
    try:
        status = check.main(arguments)
    except SystemExit as end:  # argparse's own way to refuse
        status = int(end.code or 0)
    out, err = capfd.readouterr()
    return status, out + err + caplog.text


@pytest.mark.parametrize(
    ("section", "value", "message"),
    [
        ("memory", {"capacity": 0}, "capacity 0"),
        ("memory", {"capcity": 5}, "capcity"),
        ("memory", {"capacity": "many"}, "many"),
        ("memory", {"capacity": 8, "eviction": {"class_path": "memory.NoSuch"}}, "memory.NoSuch"),
        ("loss", {"class_path": "stream_ssl.losses.InfoNCE", "init_args": {"temperature": 0}}, "0"),
        ("http", {"receiver": "0.0.0.0:0", "learner": "127.0.0.1:0"}, "not loopback"),
        ("http", {"receiver": "nowhere", "learner": "127.0.0.1:0"}, "HOST:PORT"),
        ("receiver", {"bind": "tcp://0.0.0.0:0"}, "only on loopback"),
        ("access", {"keys": "missing.json", "allow": "allow.json"}, "stream-ssl keys"),
        ("decoder", {"size": 16, "channels": 2}, "channels"),
        ("encoder", {"width": 0}, "width is 0"),
        ("learner", {"precision": "float8"}, "float8"),
        ("nonsense", {"a": 1}, "nonsense"),
    ],
)
def test_what_cannot_work_is_refused_with_its_name(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    section: str,
    value: dict[str, object],
    message: str,
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(json.dumps(TINY | {section: value, "run": str(tmp_path / "run")}))
    status, said = outcome(capfd, caplog, str(file))
    assert status == 2
    assert message in said
    assert "Traceback" not in said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["laptop.yaml", "gpu.yaml"])
def test_the_examples_are_sound(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    name: str,
) -> None:
    keys, allow = tmp_path / "receiver.secret.json", tmp_path / "allow.json"
    Keys.generate("receiver").save(tmp_path)
    allow.write_text(json.dumps({"robot-1": Keys.generate("robot-1").public}))
    access = ["--access.keys", str(keys), "--access.allow", str(allow)]
    small = ["--encoder.depths", "[1,1,1,1]", "--memory.capacity", "512"]
    extra = [*access, *small] if name == "gpu.yaml" else []
    status, said = outcome(capfd, caplog, str(CONFIGS / name), *extra)
    assert status == 0, said
    assert "the configuration is sound" in said
    assert not (tmp_path / "run").exists()
