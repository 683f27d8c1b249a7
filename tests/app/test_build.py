"""What the sections of a config file are built into."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import TINY

from memory.scores import Gaussian, Linear, Score, VonMisesFisher
from stream_ssl.app import build, config

SHARP = {"class_path": "memory.scores.VonMisesFisher", "init_args": {"kappa": 0.1}}
WIDE = {"class_path": "memory.scores.Gaussian", "init_args": {"tau": 1.0}}


def most_duplicated(score: dict[str, Any]) -> dict[str, Any]:
    return {"class_path": "memory.eviction.MostDuplicated", "init_args": {"score": score}}


@pytest.mark.parametrize(
    ("working", "score"),
    [(most_duplicated(SHARP), VonMisesFisher(0.1)), (None, Linear())],
    ids=["sharp", "default"],
)
def test_shadows_count_by_the_working_memorys_score(
    tmp_path: Path, working: dict[str, Any] | None, score: Score
) -> None:
    file = tmp_path / "config.yaml"  # JSON is YAML
    settings = TINY | {
        "memory": {
            "capacity": 8,
            "descriptor": {"class_path": "memory.descriptors.Embedding"},
            **({"eviction": working} if working else {}),
        },
        "shadows": {
            "queue": {"class_path": "memory.eviction.Oldest"},
            "minred": {"class_path": "memory.eviction.MinimumRedundancy"},
            "wide": most_duplicated(WIDE),
        },
    }
    file.write_text(json.dumps(settings))
    parser = config.learner_parser()
    built = parser.instantiate(config.read(parser, [str(file)]))
    z_BD = torch.nn.functional.normalize(
        torch.randn(20, 4, generator=torch.Generator().manual_seed(0)), dim=1
    )
    asked = {"queue": score, "minred": score, "wide": Gaussian(1.0)}
    for shadow in build.shadows(built, dim=4):
        shadow.memory.add(torch.arange(20), z_BD)
        held_kD = shadow.memory.embeddings.double()
        expected = asked[shadow.name].counts(held_kD).mean() / 7
        assert shadow.memory.stats().expected_collisions == pytest.approx(float(expected), rel=1e-5)


def test_a_null_is_still_null_after_a_restart(tmp_path: Path) -> None:
    """Defaults would change what is trained (`views.crop`) and when it is saved."""
    file = tmp_path / "config.yaml"
    nulls = {
        "views": {"crop": None},
        "checkpoints": {"every_seconds": None, "every_steps": 5},
    }
    file.write_text(json.dumps(TINY | nulls))
    parser = config.learner_parser()
    began = config.read(parser, [str(file)])
    for _ in range(2):  # each restart stores anew what it went on with
        stored = json.loads(json.dumps(config.resolved(parser, began)))
        merged = build.prefer_run(config.resolved(parser, config.read(parser, [str(file)])), stored)
        began = parser.parse_object(merged)
        assert began.views.crop is None
        assert began.checkpoints.every_seconds is None
        assert parser.instantiate(began).views["crop"] is None


def test_a_run_keeps_its_null_where_the_file_now_has_a_value(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(json.dumps(TINY | {"views": {"crop": None}}))
    parser = config.learner_parser()
    stored = config.resolved(parser, config.read(parser, [str(file)]))
    now = config.resolved(parser, config.read(parser, [str(file), "--views.crop", "[0.5, 1.0]"]))
    assert build.prefer_run(now, stored)["views"]["crop"] is None
