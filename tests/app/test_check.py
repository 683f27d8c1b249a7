"""`stream-ssl check` refuses invalid configurations with the reason and the remedy, accepts unusual
valid ones, and touches no run."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from config_files import config_file, refused
from harness import BATCH, TINY, processes, stop, until
from jsonargparse import Namespace
from sealed import sealed_checkpoint
from table import table
from torch import Tensor

from stream_ssl.app.commands import check
from stream_ssl.config import build, options
from stream_ssl.learning.checkpoint_layout import FOLDER, FORMAT, LATEST, file_of
from stream_ssl.memory import WorkingMemory
from stream_ssl.memory.columns import Image, Rows
from stream_ssl.memory.descriptors import Descriptor, images_of, shape_of
from stream_ssl.memory.eviction import Duel, MostDuplicated, Policy
from stream_ssl.memory.scores import VonMisesFisher
from stream_ssl.process.failures import USAGE
from stream_ssl.producers import Producer
from stream_ssl.wire.keys import Keys

CONFIGS = Path(__file__).parents[2] / "deploy" / "configs"

EVICTION, SCORES = "memory.eviction.", "memory.scores."


HELD_OUT = {
    "k": 999,
    "references_per_class": 12,
    "source": {
        "class_path": "stream_ssl.producers.sources.Synthetic",
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


class Mean(Descriptor):
    """A descriptor from outside: the mean of each channel. It has no repr of its own."""

    def dim(self, embedding_dim: int, image_shape: Image | None) -> int:
        return shape_of(self, image_shape)[0]

    def __call__(self, z_BD: Tensor, image_BCHW: Tensor | None) -> Tensor:
        mean_BC = images_of(self, image_BCHW).to(z_BD).mean((2, 3))
        return torch.nn.functional.normalize(mean_BC + 1, dim=1)


class Median(Mean):
    """Another descriptor of the same size."""


def called(path: str, **arguments: Any) -> dict[str, Any]:
    """Return a constructor's call in the form of a config file."""
    return {"class_path": path, "init_args": arguments}


def method(name: str, **arguments: Any) -> dict[str, Any]:
    return called(f"stream_ssl.methods.{name}", **arguments)


def loss(name: str, **arguments: Any) -> dict[str, Any]:
    return called(f"stream_ssl.losses.{name}", **arguments)


def most_duplicated(**arguments: Any) -> dict[str, Any]:
    score = called(SCORES + "VonMisesFisher", kappa=0.1)
    return called(EVICTION + "MostDuplicated", **{"score": score, **arguments})


def configured(folder: Path, **memory: Any) -> str:
    """Write a config file whose memory has these options."""
    return config_file(folder, memory={"capacity": 64, **memory})


def settled(folder: Path) -> tuple[str, Namespace, dict[str, Any]]:
    """Return a config file, its settings, and the settings that a checkpoint stores."""
    file, parser = configured(folder), options.learner_parser()
    settings = options.read(parser, [str(file)])
    return file, settings, options.resolved(parser, settings)


def outcome(
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    *arguments: str,
) -> tuple[int, str]:
    """Return the exit status and the whole output of `check`."""
    status = refused(check.main, *arguments)
    out, err = capfd.readouterr()
    return status, out + err + caplog.text


SECTIONS: list[tuple[str, Any, str]] = [
    ("memory", {"capacity": 0}, "capacity 0"),
    ("memory", {"capcity": 5}, "capcity"),
    ("memory", {"capacity": "many"}, "many"),
    ("memory", {"capacity": 8, "eviction": {"class_path": "memory.NoSuch"}}, "memory.NoSuch"),
    ("loss", {"class_path": "stream_ssl.losses.InfoNCE", "init_args": {"temperature": 0}}, "0"),
    ("http", {"receiver": "0.0.0.0:0", "learner": "127.0.0.1:0"}, "not loopback"),
    ("http", {"receiver": "nowhere", "learner": "127.0.0.1:0"}, "HOST:PORT"),
    ("http", {"receiver": "*:0", "learner": "127.0.0.1:0"}, "0.0.0.0:9108 for all addresses"),
    ("receiver", {"bind": "tcp://0.0.0.0:0"}, "only on loopback"),
    (
        "http",
        {"receiver": "127.0.0.1:9100", "learner": "127.0.0.1:9100"},
        "both 127.0.0.1:9100",
    ),
    ("access", {"keys": "missing.json", "allow": "allow.json"}, "stream-ssl keys"),
    ("decoder", {"size": 16, "channels": 2}, "channels"),
    ("encoder", {"width": 0}, "encoder: width is 0"),
    ("learner", {"precision": "float8"}, "float8"),
    ("nonsense", {"a": 1}, "nonsense"),
    ("batches", {"batch_size": 0}, "batches: batch_size=0"),
    ("batches", {"batch_size": BATCH, "workers": 0}, "workers=0"),
    ("batches", {"batch_size": 10**15}, "lower batches.batch_size"),
    ("classes", -3, "classes is -3: must be at least 0"),
    ("journal", {"budget": 1000}, "journal.budget 1000"),
    (
        "receiver",
        {"bind": "tcp://127.0.0.1:0", "max_names": 0},
        "receiver: max_names 0: must be at least 1",
    ),
    ("checkpoints", {"keep": 0}, "checkpoints: keep is 0"),
    ("checkpoints", {"every_seconds": -1}, "every_seconds is -1"),
    ("checkpoints", {"every_seconds": 0}, "every_seconds is 0"),
    ("memory", {"capacity": 10**12}, "memory.capacity 1000000000000 takes 416,000.0 GB"),
    ("learner", {"device": "gpu"}, "device 'gpu' cannot be used"),
    ("observe", {"held_out": HELD_OUT}, "references of source 'synthetic' are fewer"),
]
MEMORY: list[tuple[dict[str, Any], str]] = [
    (
        {"eviction": most_duplicated(score=called(SCORES + "VonMisesFisher", kappa=0))},
        "stream_ssl.memory.scores.VonMisesFisher: kappa is 0.0: must be a finite number above 0",
    ),
    ({"eviction": called(OUTSIDE, slot=-3)}, f"{OUTSIDE}: slot is -3: must be at least 0"),
    ({"eviction": most_duplicated(index="hnsw")}, "'exact', 'ivf', 'auto'"),
    ({"eviction": most_duplicated(sharp=1)}, "Option 'sharp' is not accepted"),
    ({"eviction": called(f"{__name__}.configured")}, "configured"),
    ({"eviction": called("nobody_has.This")}, "No module named 'nobody_has'"),
]
TOGETHER: dict[str, tuple[dict[str, Any], list[str]]] = {
    "temperature": (
        {"loss": loss("Debiased", temperature=-0.5)},
        ["temperature is -0.5", "positive", "0.05 to 1"],
    ),
    "tau+ that rises too far": (
        {"loss": loss("Debiased", prior=loss("Ramp", last=1.0, steps=10))},
        ["prior is", "[0, 1)"],
    ),
    **{
        f"labels for {name}": (
            {"loss": loss(name, **arguments), "classes": 0},
            ["reads labels", "`classes`", "choose a loss without an oracle"],
        )
        for name, arguments in (
            ("SupervisedContrastive", {}),
            ("InfoNCE", {"false_negatives": "exclude"}),
            ("Debiased", {"prior": "labels"}),
        )
    },
    "a memory below the batch": (
        {"learner": {"anchors": "memory"}, "memory": {"capacity": BATCH - 1}},
        [f"{BATCH - 1} slots are fewer than the {BATCH} samples", "raise its capacity"],
    ),
    "more negatives than slots": (
        {"method": method("MoCo", negatives=65)},
        ["negatives is 65", "the memory holds 64", "null for all"],
    ),
    "positive-debiased with the memory": (
        {"loss": loss("PositiveDebiased")},
        ["made for batch-sized N", f"Set negatives to {BATCH}"],
    ),
    "positive-debiased with much of it": (
        {"loss": loss("PositiveDebiased"), "method": method("DSimCLR", negatives=2 * BATCH + 1)},
        ["made for batch-sized N", f"at most {2 * BATCH} of the memory"],
    ),
    "negatives for SimSiam": (
        {"method": method("SimSiam")},
        ["SimSiam has none", "NegativeCosine"],
    ),
    "none for MoCo": ({"loss": loss("NegativeCosine")}, ["collapses", "BYOL or SimSiam"]),
    "a loss that cannot mix": (
        {"method": method("SelfLabelingMoCo")},
        ["labels no mixed images", "choose SelfLabeling"],
    ),
    "no hidden layer to normalise": (
        {"projector": {"dim": 16, "batchnorm": "hidden"}},
        ['batchnorm="hidden"', "give its size"],
    ),
    "a predictor without layer": (
        {"method": method("BYOL", predictor_hidden=0), "loss": loss("NegativeCosine")},
        ["predictor_hidden is 0"],
    ),
    "momentum of one": ({"method": method("MoCo", momentum=1.0)}, ["momentum is 1.0", "[0, 1)"]),
    "no such option": ({"method": method("SimCLR", momentum=0.9)}, ["momentum", "not accepted"]),
    "no such method": ({"method": method("Barlow")}, ["Barlow"]),
}
REFUSED: dict[str, tuple[dict[str, Any], list[str]]] = {
    **{f"{section} {value}"[:40]: ({section: value}, [text]) for section, value, text in SECTIONS},
    **{text[:40]: ({"memory": {"capacity": 64, **memory}}, [text]) for memory, text in MEMORY},
    **TOGETHER,
}


@table("name", REFUSED)
def test_check_refuses_an_invalid_configuration_and_names_the_reason(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    name: str,
) -> None:
    sections, messages = REFUSED[name]
    status, said = outcome(capfd, caplog, config_file(tmp_path, **sections))
    assert status == USAGE, said
    for message in messages:
        assert message in said
    for noise in ("Union subtypes", "NoneType", "Namespace", "Traceback"):
        assert noise not in said
    assert not (tmp_path / "run").exists()


TAKEN: dict[str, dict[str, Any]] = {
    "an oracle with labels": {"loss": loss("SupervisedContrastive"), "classes": 10},
    "a batch of negatives": {
        "loss": loss("PositiveDebiased", prior=0.1),
        "method": method("MoCo", negatives=BATCH),
    },
    "a prior of the memory": {"loss": loss("Debiased", prior="memory")},
    "a prior that rises": {"loss": loss("Debiased", prior=loss("Ramp", last=0.1, steps=1000))},
    "many views": {"method": method("SimCLR", views=4)},
    "short names": {"method": {"class_path": "BYOL"}, "loss": {"class_path": "NegativeCosine"}},
}
OPTIONS: list[dict[str, Any]] = [
    {"eviction": most_duplicated(compete=True), "images_on": "host"},
    {"eviction": most_duplicated(index="ivf")},
    {"eviction": most_duplicated(index="auto")},
    {"eviction": called("MostDuplicated", score=called(SCORES + "Threshold", cosine=0.8))},
    {"eviction": called(EVICTION + "MinimumRedundancy")},
    {"eviction": called(OUTSIDE, slot=3), "shares": None},
]


@pytest.mark.parametrize("sections", [*TAKEN.values(), *({"memory": o} for o in OPTIONS)], ids=repr)
def test_check_accepts_unusual_valid_configurations(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    sections: dict[str, Any],
) -> None:
    memory = {"capacity": 64} | sections.get("memory", {})
    file = config_file(tmp_path, **sections | {"memory": memory})
    status, said = outcome(capfd, caplog, file)
    assert status == 0, said
    assert "configuration OK" in said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["laptop.yaml", "gpu.yaml"])
def test_check_accepts_the_shipped_configurations(
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
    extra += ["--run", str(tmp_path / "run")]
    status, said = outcome(capfd, caplog, str(CONFIGS / name), *extra)
    assert status == 0, said
    assert "configuration OK" in said
    assert not (tmp_path / "run").exists()


@table(
    "option, value, told",
    [
        (
            "optimiser.learning_rate",
            "nan",
            "optimiser.learning_rate is nan: it must be a finite number above 0",
        ),
        (
            "optimiser.learning_rate",
            ".inf",
            "optimiser.learning_rate is inf: it must be a finite number above 0",
        ),
        ("optimiser.clip", "-inf", "optimiser.clip is -inf: it must be a finite number above 0"),
        ("optimiser.clip", ".nan", "optimiser.clip is nan: it must be a finite number above 0"),
        (
            "optimiser.weight_decay",
            ".nan",
            "optimiser.weight_decay is nan: it must be a finite number",
        ),
        ("loss.temperature", "nan", "temperature is nan: it must be a finite number above 0"),
        ("learner.novelty", "NaN", "learner.novelty is NaN: it must be a finite number"),
        ("views.crop", "[.nan,1.0]", "views.crop is nan: it must be a finite number"),
        ("views.crop", "[nan,1.0]", "views.crop is nan: it must be a finite number"),
        ("memory.shares", '{"a":.inf}', "memory.shares.a is inf: it must be a finite number"),
    ],
)
def test_a_number_that_is_not_finite_is_refused_with_the_name_of_its_option(
    option: str, value: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    needed = ["--memory.capacity", "16", "--batches.batch_size", "4"]
    with pytest.raises(SystemExit):
        options.read(options.learner_parser(), [*needed, f"--{option}={value}"])
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ports", "ranks", "receivers", "error"),
    [
        ((9108, 9109), 4, 1, ""),
        ((0, 0), 4, 1, ""),
        ((9109, 9109), 1, 1, "http.receiver and http.learner are both 127.0.0.1:9109"),
        ((9110, 9109), 1, 1, ""),
        ((9110, 9109), 2, 1, "http.receiver 127.0.0.1:9110: a rank's page has this address"),
        ((9110, 9109), 2, 2, ""),
    ],
)
def test_the_pages_of_a_run_need_different_addresses(
    ports: tuple[int, int], ranks: int, receivers: int, error: str
) -> None:
    receiver, learner = (f"127.0.0.1:{port}" for port in ports)
    settings = Namespace(http=Namespace(receiver=receiver, learner=learner))
    with pytest.raises(ValueError, match=re.escape(error)) if error else nullcontext():
        check.check_pages(settings, ranks, receivers)


def test_check_ignores_a_segment_that_is_trimmed_meanwhile(tmp_path: Path) -> None:
    (tmp_path / "journal").mkdir()
    (tmp_path / "journal" / "gone").symlink_to("nowhere")  # it is listed, and then it is not there
    check.check_receiver(options.read(options.receiver_parser(), [f"--run={tmp_path}"]))


def test_check_shows_the_part_of_each_rank_and_warns_of_a_small_disk(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    run, budget = tmp_path / "run", 1 << 50
    file = config_file(tmp_path, journal={"budget": budget})
    status, said = outcome(capfd, caplog, file, "--ranks", "4")
    assert status == 0, said
    assert f"journal.budget is {budget / 1e6:,.0f} MB, and the disk of {run} has room for" in said
    assert f"rank r reads one of every 4 records of {tmp_path}/run/journal, from record r" in said
    assert f"{BATCH // 4} samples of each batch, 16 slots" in said
    status, said = outcome(capfd, caplog, str(file), "--ranks", "4", "--receivers", "2")
    assert status == 0, said
    assert f"{run}/receiver-1" in said
    status, said = outcome(capfd, caplog, str(file), "--ranks", "3")
    assert status == USAGE
    assert "batches.batch_size 16 cannot be divided by 3 ranks: choose 15 or 18" in said
    status, said = outcome(capfd, caplog, str(file), "--ranks", "2", "--loss", "self-labeling")
    assert status == USAGE
    assert "SelfLabeling compares with the negatives of one process" in said
    status, said = outcome(capfd, caplog, str(file), "--ranks", "2", "--from", str(tmp_path))
    assert status == USAGE
    assert "--from begins a run in one process" in said
    assert "Traceback" not in said


def test_the_settings_of_a_checkpoint_build_the_same_memory(tmp_path: Path) -> None:
    file = configured(
        tmp_path,
        eviction=called(OUTSIDE, slot=3),
        shares=None,
        descriptor="Embedding",
    )
    parser = options.learner_parser()
    settings = options.read(parser, [str(file)])
    stored = json.loads(json.dumps(options.resolved(parser, settings)))
    z_BD = torch.nn.functional.normalize(
        torch.randn(300, 4, generator=torch.Generator().manual_seed(1)), dim=1
    )
    outcomes = []
    for read in (settings, parser.parse_object(stored)):
        memory = build.memory(parser.instantiate(read), dim=4)
        images = torch.zeros(300, 1, 16, 16, dtype=torch.uint8)
        memory.add(torch.arange(300), z_BD, images)
        outcomes.append(memory.ids.tolist())
    assert outcomes[0] == outcomes[1]
    assert outcomes[0] != list(range(64))


def test_check_names_damaged_checkpoints_and_where_a_start_begins(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    file, settings, stored = settled(tmp_path)
    made = [sealed_checkpoint(settings.run, step, stored) for step in (10, 20)]
    _, said = outcome(capfd, caplog, str(file))
    assert "start        from step-000000020" in said
    assert "damaged in" not in said
    begins = "continues from step-000000010", "begins with new weights at step 0"
    for number, (folder, begin) in enumerate(zip(reversed(made), begins, strict=True), 1):
        with (folder / file_of("model")).open("ab") as model:
            model.write(b"x")
        caplog.clear()
        status, said = outcome(capfd, caplog, str(file))
        assert status == 0, said
        assert f"{folder.name} (model.safetensors has" in said
        assert f"A start renames them to damaged-*, and {begin}" in said
        assert said.count("model.safetensors has") == number
    assert "start        with new weights, because no checkpoint is whole" in said
    assert sorted(one.name for one in made[0].parent.iterdir()) == [one.name for one in made]


@table(
    ("changed", "message"),
    [
        ({}, None),
        (
            {"descriptor": Median()},
            "was saved under descriptor Median, this memory has descriptor Mean: build the memory",
        ),
        ({"capacity": 32}, "the state is of capacity 32, this memory of 64: build the memory"),
        ({"image_shape": (1, 8, 8)}, "images in the state are torch.uint8 "),
    ],
)
def test_check_refuses_a_saved_memory_that_the_run_cannot_load(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    changed: dict[str, Any],
    message: str | None,
) -> None:
    file = configured(tmp_path, descriptor=called(f"{__name__}.Mean"))
    parser = options.learner_parser()
    settings = options.read(parser, [str(file)])
    made: dict[str, Any] = {"capacity": 64, "dim": 16, "eviction": Duel()}
    made |= {"image_shape": (1, 16, 16), "descriptor": Mean(), **changed}
    stored = options.resolved(parser, settings)
    sealed_checkpoint(settings.run, 10, stored, memory=WorkingMemory(**made))
    status, said = outcome(capfd, caplog, str(file))
    assert status == (0 if message is None else USAGE), said
    assert (message or "duplicates   counted on Mean\n") in said


def test_check_does_not_compare_an_index_whose_choice_depends_on_the_gpu(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for index, expected in (("auto", 0), ("exact", USAGE)):
        folder = tmp_path / index
        folder.mkdir()
        file, parser = (
            configured(folder, eviction=most_duplicated(index=index)),
            options.learner_parser(),
        )
        settings = options.read(parser, [str(file), "--learner.device", "cuda"])
        score = VonMisesFisher(0.1)
        memory = WorkingMemory(64, 16, MostDuplicated(score, index="ivf"), (1, 16, 16))
        stored = options.resolved(parser, settings)
        sealed_checkpoint(settings.run, 10, stored, memory=memory)
        status, said = outcome(capfd, caplog, str(file), "--learner.device", "cuda")
        assert status == expected, said
    assert "was saved under index ivf, this memory has index exact" in said


def test_a_run_with_a_descriptor_from_outside_resumes(tmp_path: Path) -> None:
    memory = {**TINY["memory"], "descriptor": called(f"{__name__}.Mean")}
    settings = {**TINY, "memory": memory}
    with processes(tmp_path / "run", settings) as run:
        run.role("receiver")
        learner = run.role("learner")
        with Producer(run.address, name="robot") as producer:
            for number in range(4 * BATCH):
                producer.send(np.full((16, 16, 1), number % 256, np.uint8), id=f"frame-{number}")
            producer.flush(60)
        until(lambda: (run.folder / FOLDER / LATEST).exists(), lambda: run.log("learner"))
        assert stop(learner) == 0
        again = run.role("learner")
        until(lambda: "continuing at step" in run.log("learner"), lambda: run.log("learner"))
        assert stop(again) == 0


def test_check_refuses_a_run_of_a_newer_version(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    file, settings, stored = settled(tmp_path)
    for version, expected in ((FORMAT, 0), (FORMAT + 1, USAGE)):
        sealed_checkpoint(settings.run, version, stored, version=version)
        status, said = outcome(capfd, caplog, str(file))
        assert status == expected, said
    assert f"has format {FORMAT + 1}, this program reads up to {FORMAT}: upgrade" in said


def test_an_oracle_on_an_unlabelled_stream_ends_the_learner_as_misconfigured(
    tmp_path: Path,
) -> None:
    settings = {**TINY, "loss": loss("SupervisedContrastive")}
    with processes(tmp_path / "run", settings) as run:
        run.role("receiver")
        learner = run.role("learner")
        with Producer(run.address, name="robot") as producer:
            for number in range(BATCH):
                producer.send(np.full((16, 16, 1), number, np.uint8), id=f"frame-{number}")
        assert learner.wait(90) == USAGE, run.log("learner")
    assert "reads labels" in run.log("learner")
    assert "Traceback" not in run.log("learner")
