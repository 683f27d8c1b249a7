"""Records like those of the loops, with chosen fields, and the metrics that they fill."""

from __future__ import annotations

from typing import Any

import torch
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric

from stream_ssl.batch import Offset
from stream_ssl.learning.records import StepRecord
from stream_ssl.memory import Admission
from stream_ssl.observe.metrics import LearnerMetrics, ReceiverMetrics


def admission(
    inserted: int = 4, evicted: int = 0, refused: int = 0, duplicates: int = 0, merged: int = 0
) -> Admission:
    """Return an admission with these counts."""
    return Admission(
        slots=torch.arange(inserted),
        evicted=torch.arange(evicted),
        ages=torch.zeros(evicted, dtype=torch.int64),
        refused=torch.arange(refused),
        inserted=inserted,
        duplicates=torch.arange(duplicates),
        merged=torch.arange(merged),
        left=torch.arange(evicted),
    )


def step(**fields: Any) -> StepRecord:
    """Return a record of a fresh batch of 4 in 3 dimensions, with changed fields."""
    keys_BD = fields.get("keys_BD", torch.eye(3)[[0, 1, 2, 0]])
    count = len(keys_BD)
    usual: dict[str, Any] = {
        "step": 1,
        "samples": count,
        "batch": count,
        "replay": False,
        "loss": 2.5,
        "grad_norm": 0.5,
        "learning_rate": 0.01,
        "skipped": None,
        "seconds": {"data": 0.1, "forward": 0.2, "backward": 0.3, "memory": 0.05},
        "diagnostics": {},
        "collision_expected": 0.5,
        "collision_true": None,
        "admission": admission(count),
        "keys_BD": keys_BD,
        "ids_B": torch.arange(count),
        "labels_B": torch.full((count,), -1),
        "hashes_B": torch.zeros(count, dtype=torch.int64),
        "lag_seconds": 0.0,
        "offset": Offset(1, 0),
        "new_origins": () if fields.get("replay") else fields.get("origins_B") or (),
    }
    return StepRecord(**{**usual, **fields})


def exported() -> dict[str, Metric]:
    """Return every family that the two roles export, by name; counters end in `_total`."""
    suffix = {"counter": "_total", "info": "_info"}
    return {
        family.name + suffix.get(family.type, ""): family
        for metrics in (ReceiverMetrics(CollectorRegistry()), LearnerMetrics(CollectorRegistry()))
        for family in metrics.registry.collect()
    }
