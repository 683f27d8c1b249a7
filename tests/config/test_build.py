"""The objects that the sections of a config file are built into."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from config_files import config_file

from stream_ssl.config import build, options
from stream_ssl.memory.scores import Gaussian, Score, VonMisesFisher

SHARP = {"class_path": "stream_ssl.memory.scores.VonMisesFisher", "init_args": {"kappa": 0.1}}
WIDE = {"class_path": "stream_ssl.memory.scores.Gaussian", "init_args": {"tau": 1.0}}


def most_duplicated(score: dict[str, Any]) -> dict[str, Any]:
    return {
        "class_path": "stream_ssl.memory.eviction.MostDuplicated",
        "init_args": {"score": score},
    }


@pytest.mark.parametrize(
    ("working", "score"),
    [(most_duplicated(SHARP), VonMisesFisher(0.1)), (None, VonMisesFisher(0.1))],
    ids=["sharp", "default"],
)
def test_shadows_without_a_score_use_the_score_of_the_working_memory(
    tmp_path: Path, working: dict[str, Any] | None, score: Score
) -> None:
    memory = {
        "capacity": 8,
        "descriptor": {"class_path": "stream_ssl.memory.descriptors.Embedding"},
        **({"eviction": working} if working else {}),
    }
    shadows = {
        "queue": {"class_path": "stream_ssl.memory.eviction.Oldest"},
        "minred": {"class_path": "stream_ssl.memory.eviction.MinimumRedundancy"},
        "wide": most_duplicated(WIDE),
    }
    file = config_file(tmp_path, memory=memory, shadows=shadows)
    parser = options.learner_parser()
    built = parser.instantiate(options.read(parser, [file]))
    z_BD = torch.nn.functional.normalize(
        torch.randn(20, 4, generator=torch.Generator().manual_seed(0)), dim=1
    )
    built.shadows["working"] = built.shadows["queue"]
    with pytest.raises(ValueError, match=r"shadows.working: .* choose another name"):
        build.shadows(built, dim=4)
    del built.shadows["working"]
    asked = {"queue": score, "minred": score, "wide": Gaussian(1.0)}
    for shadow in build.shadows(built, dim=4):
        shadow.memory.add(torch.arange(20), z_BD)
        held_kD = shadow.memory.embeddings.double()
        expected = asked[shadow.name].counts(held_kD).mean() / 7
        assert shadow.memory.stats().expected_collisions == pytest.approx(
            float(expected), rel=1e-5, abs=1e-6
        )


def test_the_seed_of_the_learner_determines_random_evictions(tmp_path: Path) -> None:
    memory = {
        "capacity": 8,
        "eviction": {"class_path": "stream_ssl.memory.eviction.Random"},
        "descriptor": {"class_path": "stream_ssl.memory.descriptors.Embedding"},
    }
    file = config_file(tmp_path, memory=memory)
    parser = options.learner_parser()

    def kept(seed: int) -> list[int]:
        built = parser.instantiate(options.read(parser, [file, f"--learner.seed={seed}"]))
        memory = build.memory(built, dim=4)
        z_BD = torch.nn.functional.normalize(torch.ones(40, 4), dim=1)
        image_BCHW = torch.zeros(40, *build.image_shape(built), dtype=torch.uint8)
        memory.add(torch.arange(40), z_BD, images=image_BCHW)
        return sorted(memory.ids.tolist())

    assert kept(1) == kept(1)
    assert kept(1) != kept(2)
