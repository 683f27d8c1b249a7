"""A learner, built from settings, that reads JPEGs from a journal."""

from __future__ import annotations

import json
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from batches_naive import FakeReader, encoded, picture, record
from harness import BATCH, TINY

from stream_ssl.batch import START
from stream_ssl.config import build, options
from stream_ssl.learning.records import StepRecord

STEPS = 4


def jpegs() -> FakeReader:
    """Return a journal of JPEGs for STEPS batches, with some damaged files among them."""
    rng = np.random.default_rng(4)
    good = [
        ({"codec": "jpeg"}, encoded(picture(rng, 40, 50), "JPEG")) for _ in range(STEPS * BATCH)
    ]
    bad = [({"codec": "jpeg"}, data[:30]) for _, data in good[::10]]
    parts = np.array_split(np.arange(len(good)), 9)
    records = [
        record(number, [*(good[n] for n in part), bad[number % len(bad)]])
        for number, part in enumerate(parts, start=1)
    ]
    return FakeReader(records)


def learned(device: str, folder: Path) -> list[StepRecord]:
    """Return the records of STEPS steps on the journal."""
    file = folder / f"{device.replace(':', '-')}.yaml"  # JSON is YAML
    learner: dict[str, Any] = {**TINY["learner"], "device": device}
    file.write_text(json.dumps({**TINY, "learner": learner, "run": str(folder / file.stem)}))
    parser = options.learner_parser()
    settings = parser.instantiate(options.read(parser, [str(file)]))
    found: list[StepRecord] = []
    stop = threading.Event()
    with closing(build.batches(settings, jpegs(), START)) as batches:  # type: ignore[arg-type]
        for one in build.learner(settings, batches, START).run(stop):
            if isinstance(one, StepRecord):
                found.append(one)
            if len(found) == STEPS:
                stop.set()
    return found
