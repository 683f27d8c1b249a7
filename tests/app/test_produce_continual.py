"""Continual, parked, stalling and other streams by the command line of `stream-ssl produce`."""

from __future__ import annotations

from dataclasses import fields

import pytest
from table import table

from stream_ssl.app.commands import produce
from stream_ssl.producers.shaping import Continual, Parked, Popularity, Shift, Stalls, Video
from stream_ssl.producers.shaping.continual import Widths
from stream_ssl.producers.shaping.shaped import Repeats
from stream_ssl.producers.sources import Source, Synthetic
from stream_ssl.producers.sources.nats_consumer import TlsFiles
from stream_ssl.producers.sources.synthetic import Pictures
from stream_ssl.producers.sources.web.fetch import Patience

BASE = ["--to", "tcp://127.0.0.1:1", "--name", "robot"]


def streamed(source: Source, *words: str) -> Source:
    """Return the stream of a source with these options."""
    parser = produce.source_parser("synthetic")
    given = parser.parse_args([*BASE, *words], defaults=False)
    return produce.stream(source, parser.parse_args([*BASE, *words]), given)


def test_the_options_of_a_continual_stream_build_this_stream() -> None:
    more = ["--continual.kind", "blocks", "--continual.tasks", "2", "--continual.block", "5"]
    stream = streamed(Synthetic(count=60, size=4, shift=0), *more)
    assert isinstance(stream, Continual)
    task = [sample.label // 5 for sample, _ in stream.samples() if sample.label is not None]
    assert len(task) == 60
    assert task[:5] == [task[0]] * 5
    assert task[5:10] == [1 - task[0]] * 5


def test_a_source_stays_unwrapped_without_options_of_a_stream() -> None:
    source = Synthetic(count=3)
    assert streamed(source) is source
    assert isinstance(streamed(source, "--continual.imbalance", "9"), Continual)


@table("option", ["--continual.tasks=2", "--continual.block=5"])
def test_an_option_of_tasks_needs_tasks(option: str) -> None:
    with pytest.raises(ValueError, match=r"--continual\..* has no effect without --continual.kind"):
        streamed(Synthetic(count=3), option)


def test_a_parked_stream_may_wrap_a_continual_stream() -> None:
    parked = ["--parked.share", "0.8", "--parked.scenes", "3", "--parked.stretch", "6"]
    source = Synthetic(count=60, size=4, shift=0)
    stream = streamed(source, *parked)
    assert isinstance(stream, Parked)
    assert stream.source is source
    scenes = {(sample.meta or {}).get("scene", -1) for sample, _ in stream.samples()}
    assert scenes == {-1, 0, 1, 2}
    stream = streamed(source, *parked, "--continual.kind", "incremental")
    assert isinstance(stream, Parked)
    assert isinstance(stream.source, Continual)


@table(
    ("section", "wrapper", "option", "more"),
    [
        ("stalls", Stalls, "--stalls.rate=0.5", "--stalls.longest=9"),
        ("video", Video, "--video.frames=3", "--video.zoom=0.1"),
        ("popularity", Popularity, "--popularity.images=8", "--popularity.exponent=0.5"),
        ("shift", Shift, "--shift.period=20", "--shift.bias=3"),
        ("parked", Parked, "--parked.share=0.5", "--parked.scenes=4"),
    ],
)
def test_a_wrapper_is_on_only_if_its_first_option_is_given(
    section: str, wrapper: type, option: str, more: str
) -> None:
    source = Synthetic(count=60, size=4, shift=0)
    stream = streamed(source, option, more)
    assert isinstance(stream, wrapper)
    samples = stream.samples()
    assert len([next(samples) for _ in range(10)]) == 10
    with pytest.raises(ValueError, match=rf"--{section}\..* has no effect without --{section}"):
        streamed(source, more)


def test_wrappers_apply_in_a_fixed_order() -> None:
    words = ["--parked.share=0.5", "--stalls.rate=0.1", "--video.frames=2"]
    stream = streamed(Synthetic(count=60, size=4, shift=0), *words)
    kinds = []
    while not isinstance(stream, Synthetic):
        kinds.append(type(stream))
        stream = stream.source
    assert kinds == [Parked, Stalls, Video]


def test_produce_refuses_invalid_options_of_shaped_streams(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert produce.main(["synthetic", *BASE, "--continual.kind", "incremental"]) == 2
    assert produce.main(["synthetic", *BASE, "--parked.share", "1.5"]) == 2
    assert "share 1.5: must lie in [0.001, 0.999]" in caplog.text
    assert "never ends, so its first task would not" in caplog.text


@table(
    ("source", "section", "group"),
    [
        ("nats", "source", TlsFiles),
        ("crawl", "source", Patience),
        ("synthetic", "source", Pictures),
        ("synthetic", "shape", Repeats),
        ("synthetic", "continual", Widths),
    ],
)
def test_every_argument_of_a_group_is_an_option(source: str, section: str, group: type) -> None:
    """A constructor takes a group as keyword arguments, and jsonargparse has to find its class."""
    told = produce.source_parser(source).format_help()
    for field in fields(group):
        assert f"--{section}.{field.name} " in told, field.name
