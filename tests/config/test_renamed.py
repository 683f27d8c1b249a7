"""Configurations and checkpoints that name classes by their former paths."""

from __future__ import annotations

import pytest

from stream_ssl.config import options
from stream_ssl.config.names import class_path
from stream_ssl.config.restart import merge
from stream_ssl.memory.eviction import Policy
from stream_ssl.renamed import MOVED, current, with_current_names

NEEDED = ("--decoder.size=16", "--batches.batch_size=8", "--memory.capacity=64")


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ("memory.eviction.Oldest", "stream_ssl.memory.eviction.Oldest"),
        ("producers.sources.Synthetic", "stream_ssl.producers.sources.Synthetic"),
        ("stream_ssl.ingest.decode.Decoder", "stream_ssl.feed.decode.Decoder"),
        (
            "stream_ssl.learning.efficientnet_lite.EfficientNetLite0",
            "stream_ssl.encoder.efficientnet_lite.EfficientNetLite0",
        ),
        ("stream_ssl.learning.encoder.ResNet", "stream_ssl.encoder.network.ResNet"),
        ("memory_of_mine.Policy", "memory_of_mine.Policy"),
        ("stream_ssl.losses.Decoupled", "stream_ssl.losses.Decoupled"),
    ],
)
def test_a_former_class_path_leads_to_the_current_class(before: str, now: str) -> None:
    assert current(before) == now
    nested = {"a": [{"class_path": before, "init_args": {"inner": {"class_path": before}}}]}
    expected = {"a": [{"class_path": now, "init_args": {"inner": {"class_path": now}}}]}
    assert with_current_names(nested) == expected


def test_each_moved_module_can_be_imported() -> None:
    import importlib

    for module in MOVED.values():
        assert importlib.import_module(module).__name__ == module


def test_a_users_decoder_finds_its_base_class_at_the_former_name() -> None:
    from stream_ssl.feed import decode
    from stream_ssl.ingest import decode as former

    assert former.Decoder is decode.Decoder
    assert former.VectorDecoder is decode.VectorDecoder


def test_an_option_accepts_a_former_class_path() -> None:
    assert class_path(Policy, "memory.eviction.Oldest") == "stream_ssl.memory.eviction.Oldest"
    parser = options.learner_parser()
    given = ("--memory.eviction=memory.eviction.MostDuplicated",)
    found = options.read(parser, [*given, "--memory.eviction.score=memory.scores.Linear", *NEEDED])
    assert found.memory.eviction.class_path == "stream_ssl.memory.eviction.MostDuplicated"


def test_a_run_with_a_former_class_path_keeps_its_policy() -> None:
    before = {"memory": {"eviction": {"class_path": "memory.eviction.Oldest"}}}
    now = {"memory": {"eviction": {"class_path": "stream_ssl.memory.eviction.Oldest"}}}
    found = merge(now, before)
    assert not [line for line in (*found.kept, *found.changed) if "eviction" in line]
