"""A starting learner answers at once, and says that it is starting."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from harness import TINY

from stream_ssl.config import options
from stream_ssl.daemon import learn
from stream_ssl.daemon.endpoints import load


class ReadingTheCheckpoint(Exception):
    """Raised when the start reads the checkpoint."""


def test_metrics_are_served_before_the_checkpoint_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: dict[str, str] = {}

    def newest(_: object) -> None:
        address = load(tmp_path)["learner"]["http"]
        told["metrics"] = httpx.get(f"{address}/metrics", trust_env=False).text
        told["state"] = httpx.get(f"{address}/api/learner/state", trust_env=False).text
        raise ReadingTheCheckpoint

    monkeypatch.setattr(learn.Checkpointer, "newest", newest)
    file = tmp_path / "config.yaml"
    file.write_text(json.dumps({**TINY, "run": str(tmp_path)}))
    parser = options.learner_parser()
    settings = options.read(parser, [str(file)])
    with ExitStack() as stack, pytest.raises(ReadingTheCheckpoint):
        learn.Process(parser, settings, stack)
    assert "\nstream_ssl_starting 1.0\n" in told["metrics"]
    state = json.loads(told["state"])
    assert (state["starting"], state["problems"]) == (True, [])
