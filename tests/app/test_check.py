"""stream-ssl check tells what is wrong with a configuration, and opens nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import BATCH, TINY
from torch import Tensor

from memory import Duplicates
from memory.columns import Rows
from memory.eviction import Policy
from stream_ssl.app import build, config
from stream_ssl.app.commands import check
from stream_ssl.wire.keys import Keys

CONFIGS = Path(__file__).parents[2] / "deploy" / "configs"

EVICTION, SCORES = "memory.eviction.", "memory.scores."


HELD_OUT = {
    "k": 999,
    "references_per_class": 12,
    "source": {
        "class_path": "producers.sources.Synthetic",
        "init_args": {"count": 400, "size": 16, "channels": 1},
    },
}


class AlwaysSlot(Policy):
    """A policy from outside: each newcomer takes the same slot."""

    name = "always-slot"

    def __init__(self, slot: int = 0) -> None:
        if slot < 0:
            raise ValueError(f"slot is {slot}: must be at least 0")
        self.slot = slot

    def choose(self, rows: Rows) -> Tensor:
        return torch.full((len(rows),), self.slot)


OUTSIDE = f"{__name__}.AlwaysSlot"


def called(path: str, **arguments: Any) -> dict[str, Any]:
    """A constructor's call, as a config file has it."""
    return {"class_path": path, "init_args": arguments}


def most_duplicated(**arguments: Any) -> dict[str, Any]:
    score = called(SCORES + "VonMisesFisher", kappa=0.1)
    return called(EVICTION + "MostDuplicated", **{"score": score, **arguments})


def configured(folder: Path, **memory: Any) -> Path:
    """A config file whose memory has these options."""
    file = folder / "config.yaml"  # JSON is YAML
    settings = TINY | {"memory": {"capacity": 64, **memory}, "run": str(folder / "run")}
    file.write_text(json.dumps(settings))
    return file


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
        ("receiver", {"bind": "tcp://127.0.0.1:99999"}, "port must be 1 to 65535"),
        (
            "http",
            {"receiver": "127.0.0.1:9100", "learner": "127.0.0.1:9100"},
            "both 127.0.0.1:9100",
        ),
        ("access", {"keys": "missing.json", "allow": "allow.json"}, "stream-ssl keys"),
        ("decoder", {"size": 16, "channels": 2}, "channels"),
        ("encoder", {"width": 0}, "width is 0"),
        ("learner", {"precision": "float8"}, "float8"),
        ("nonsense", {"a": 1}, "nonsense"),
        ("batches", {"batch_size": 0}, "batch_size=0"),
        ("batches", {"batch_size": BATCH, "workers": 0}, "workers=0"),
        ("journal", {"budget": 1000}, "journal budget 1000 bytes"),
        ("receiver", {"bind": "tcp://127.0.0.1:0", "group_packets": 0}, "must be at least 1"),
        ("checkpoints", {"keep": 0}, "keep is 0"),
        ("checkpoints", {"every_seconds": -1}, "every_seconds=-1"),
        ("checkpoints", {"every_seconds": 0}, "every_seconds=0"),
        ("quarantine", {"max_files": 1}, "max_files=1"),
        ("memory", {"capacity": 10**12}, "memory.capacity 1000000000000 takes 576,000.0 GB"),
        ("memory", {"capacity": 64, "image_file": "/proc/none/x"}, "there is no folder /proc/none"),
        ("learner", {"device": "gpu"}, "device 'gpu' cannot be used"),
        ("observe", {"held_out": HELD_OUT}, "references of source 'synthetic' are fewer"),
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


@pytest.mark.parametrize(
    "memory",
    [
        {"eviction": most_duplicated(compete=True)},
        {"eviction": most_duplicated(index="ivf")},
        {"eviction": most_duplicated(index="auto")},
        {"eviction": called("MostDuplicated", score=called(SCORES + "Threshold", cosine=0.8))},
        {"eviction": called(EVICTION + "Hybrid", policy=most_duplicated(), age_cap=500, front=8)},
        {"eviction": called(EVICTION + "KappaBandit", kappas=[0.1, 0.2], interval=4)},
        {"eviction": called(EVICTION + "MinimumRedundancy")},
        {"eviction": called(OUTSIDE, slot=3)},
        {"duplicates": {"threshold": 0.9, "action": "merge"}},
        {"images_on": "host"},
    ],
    ids=lambda memory: json.dumps(memory)[:60],
)
def test_every_option_of_the_memory_can_be_written_down(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    memory: dict[str, Any],
) -> None:
    status, said = outcome(capfd, caplog, str(configured(tmp_path, **memory)))
    assert status == 0, said
    assert "the configuration is sound" in said


def test_what_a_checkpoint_stores_builds_the_same_memory(tmp_path: Path) -> None:
    file = configured(
        tmp_path,
        eviction=called(EVICTION + "Hybrid", policy=called(OUTSIDE, slot=3), age_cap=100),
        duplicates={"threshold": 0.98, "action": "refuse"},
    )
    parser = config.learner_parser()
    settings = config.read(parser, [str(file)])
    stored = json.loads(json.dumps(config.resolved(parser, settings)))
    z_BD = torch.nn.functional.normalize(
        torch.randn(300, 4, generator=torch.Generator().manual_seed(1)), dim=1
    )
    outcomes = []
    for read in (settings, parser.parse_object(stored)):
        memory = build.memory(parser.instantiate(read), dim=4)
        assert memory.duplicates == Duplicates(0.98, "refuse")
        images = torch.zeros(300, 1, 16, 16, dtype=torch.uint8)
        memory.add(torch.arange(300), z_BD, images)
        assert memory.stats().refused > 0
        outcomes.append(memory.ids.tolist())
    assert outcomes[0] == outcomes[1]
    assert outcomes[0] != list(range(64))


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        (
            {"eviction": most_duplicated(score=called(SCORES + "VonMisesFisher", kappa=0))},
            "memory.scores.VonMisesFisher: kappa is 0.0: must be a finite number above 0",
        ),
        (
            {"eviction": called(EVICTION + "Hybrid", age_cap=0)},
            "memory.eviction.Hybrid: age_cap is 0: must be at least 1 sample",
        ),
        ({"eviction": called(EVICTION + "Hybrid", front=64)}, "front is 64 of 64 slots"),
        ({"eviction": called(OUTSIDE, slot=-3)}, f"{OUTSIDE}: slot is -3: must be at least 0"),
        ({"eviction": most_duplicated(index="hnsw")}, "'exact', 'ivf', 'auto'"),
        ({"eviction": most_duplicated(sharp=1)}, "Option 'sharp' is not accepted"),
        ({"eviction": called(f"{__name__}.configured")}, "configured"),
        ({"eviction": called("nobody_has.This")}, "No module named 'nobody_has'"),
        ({"duplicates": {"threshold": 2}}, "threshold is 2.0: a cosine above -1 and at most 1"),
        ({"duplicates": {"action": "drop"}}, "'count', 'refuse', 'merge'"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else None,
)
def test_a_wrong_option_of_the_memory_is_named_and_nothing_else(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    memory: dict[str, Any],
    message: str,
) -> None:
    status, said = outcome(capfd, caplog, str(configured(tmp_path, **memory)))
    assert status == 2
    assert message in said
    for noise in ("Union subtypes", "NoneType", "Namespace", "Traceback"):
        assert noise not in said


def test_the_image_file_of_a_run_is_left_alone(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    file = tmp_path / "images.bin"
    config_file = configured(tmp_path, image_file=str(file))
    status, said = outcome(capfd, caplog, str(config_file))
    assert status == 0, said
    assert not file.exists()

    parser = config.learner_parser()
    settings = parser.instantiate(config.read(parser, [str(config_file)]))
    running = build.memory(settings, dim=16)
    assert settings.memory.image_file == file
    status, said = outcome(capfd, caplog, str(config_file))
    assert status == 0, said  # although the other holds the file's lock
    assert len(running) == 0
    assert file.stat().st_size == 64 * 16 * 16
