"""Configurations of methods and losses that cannot work are refused, with reason and remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import BATCH, TINY, processes

from producers import Producer
from stream_ssl.app.commands import check
from stream_ssl.app.failures import USAGE


def called(path: str, **arguments: Any) -> dict[str, Any]:
    """A constructor's call, as a config file has it."""
    return {"class_path": path, "init_args": arguments}


def method(name: str, **arguments: Any) -> dict[str, Any]:
    return called(f"stream_ssl.methods.{name}", **arguments)


def loss(name: str, **arguments: Any) -> dict[str, Any]:
    return called(f"stream_ssl.losses.{name}", **arguments)


BAD: dict[str, tuple[dict[str, Any], list[str]]] = {
    **{
        f"temperature of {name}": (
            {"loss": loss(name, temperature=t)},
            [f"temperature is {t:.1f}", "positive", "0.05 to 1"],
        )
        for name, t in (("InfoNCE", 0.0), ("Debiased", -0.5), ("Decoupled", 0.0))
    },
    **{
        f"tau+ of {prior}": (
            {"loss": loss("Debiased", prior=prior)},
            [f"prior is {prior}", "[0, 1)"],
        )
        for prior in (1.0, -0.1)
    },
    "tau+ of nothing": ({"loss": loss("PositiveDebiased", prior=0.0)}, ["prior is 0.0", "above 0"]),
    "tau+ that rises too far": (
        {"loss": loss("Debiased", prior=loss("Ramp", last=1.0, steps=10))},
        ["prior is", "[0, 1)"],
    ),
    **{
        f"one view of {name}": (
            {"method": method(name, views=1), "loss": loss(fits)},
            ["views is 1", "need 2"],
        )
        for name, fits in (("MoCo", "InfoNCE"), ("SimCLR", "InfoNCE"), ("BYOL", "NegativeCosine"))
    },
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
    **{
        f"a memory below the batch for {anchors}": (
            {"learner": {"anchors": anchors}, "memory": {"capacity": BATCH - 1}},
            [f"{BATCH - 1} slots are fewer than the {BATCH} samples", "raise its capacity"],
        )
        for anchors in ("memory", "mixed")
    },
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
    "shares beyond a label": (
        {"loss": loss("SelfLabeling", alpha=0.7, beta=0.7)},
        ["alpha is 0.7 and beta 0.7", "together at most 1"],
    ),
    "a share of nothing": (
        {"learner": {"anchors": "mixed", "stream_share": 1.0}},
        ["stream_share is 1.0", 'anchors "stream" or "memory"'],
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


def said(
    folder: Path,
    settings: dict[str, Any],
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> tuple[int, str]:
    """Exit status, and all that was said."""
    file = folder / "config.yaml"  # JSON is YAML
    file.write_text(json.dumps(TINY | settings | {"run": str(folder / "run")}))
    try:
        status = check.main([str(file)])
    except SystemExit as end:  # argparse's own way to refuse
        status = int(end.code or 0)
    out, err = capfd.readouterr()
    return status, out + err + caplog.text


@pytest.mark.parametrize("name", sorted(BAD))
def test_what_cannot_work_is_refused_before_anything_starts(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    name: str,
) -> None:
    settings, messages = BAD[name]
    status, told = said(tmp_path, settings, capfd, caplog)
    assert status == 2, told
    for message in messages:
        assert message in told
    assert "Traceback" not in told
    assert not (tmp_path / "run").exists()


GOOD: dict[str, dict[str, Any]] = {
    "an oracle with labels": {"loss": loss("SupervisedContrastive"), "classes": 10},
    "a batch of negatives": {
        "loss": loss("PositiveDebiased", prior=0.1),
        "method": method("MoCo", negatives=BATCH),
    },
    "a prior of the memory": {"loss": loss("Debiased", prior="memory")},
    "a prior that rises": {"loss": loss("Debiased", prior=loss("Ramp", last=0.1, steps=1000))},
    "a mix": {"learner": {"anchors": "mixed", "stream_share": 0.25}},
    "many views": {"method": method("SimCLR", views=4)},
    "short names": {"method": {"class_path": "BYOL"}, "loss": {"class_path": "NegativeCosine"}},
}


@pytest.mark.parametrize("name", sorted(GOOD))
def test_what_is_close_to_that_and_works_is_taken(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    name: str,
) -> None:
    status, told = said(tmp_path, GOOD[name], capfd, caplog)
    assert status == 0, told
    assert "the configuration is sound" in told


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
