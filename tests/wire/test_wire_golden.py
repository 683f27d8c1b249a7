"""The wire's bytes do not change, and docs/wire.md shows them as they are."""

from __future__ import annotations

import re
import zlib
from collections import defaultdict
from dataclasses import fields
from pathlib import Path
from typing import get_args

import msgpack
from wire_golden import DATA, GOLDEN

from stream_ssl.wire import REASONS, Data, decode, encode
from stream_ssl.wire.messages import (
    MAX_HEADER_BYTES,
    MAX_ITEMS,
    MAX_LEVELS,
    MAX_MAP_BYTES,
    MAX_NESTED,
    MAX_PAIRS,
    MAX_TEXT,
    MapMessage,
    Verdict,
    Verdicts,
)
from stream_ssl.wire.sample import (
    CODECS,
    MAX_ID_BYTES,
    MAX_META_BYTES,
    MAX_POSITION_BYTES,
    MAX_POSITION_DEPTH,
    MAX_SIDE,
    MAX_SOURCE_BYTES,
    Sample,
)

PAGE = (Path(__file__).parents[2] / "docs" / "wire.md").read_text(encoding="utf-8")


def test_messages_are_encoded_to_the_golden_bytes_and_decoded_back() -> None:
    for name, (message, frames) in GOLDEN.items():
        assert [bytes(frame).hex() for frame in encode(message)] == list(frames), name
        assert decode([bytes.fromhex(frame) for frame in frames]) == message, name


def test_the_page_of_the_wire_shows_the_golden_bytes() -> None:
    for name, (_, frames) in GOLDEN.items():
        block = re.search(rf"```hex\n{name}\n(.*?)```", PAGE, re.DOTALL)
        assert block, f"docs/wire.md has no block ```hex {name}"
        shown = re.split(r"^frame \d+:", block[1], flags=re.MULTILINE)[1:]
        assert tuple(re.sub(r"\s", "", frame) for frame in shown) == frames


def test_the_checksum_covers_the_sequence_the_header_and_the_payload() -> None:
    joined = (42).to_bytes(8, "big") + bytes(DATA.header) + bytes(DATA.payload)
    assert zlib.crc32(joined) == DATA.checksum() == 0x92C6B383


def test_the_page_of_the_wire_names_every_reason_codec_and_limit() -> None:
    for reason in REASONS:
        assert f"| `{reason}` |" in PAGE, reason
    for codec in CODECS:
        assert f"`{codec}`" in PAGE, codec
    limits = (
        MAX_ID_BYTES,
        MAX_SOURCE_BYTES,
        MAX_META_BYTES,
        MAX_POSITION_BYTES,
        MAX_POSITION_DEPTH,
        MAX_SIDE,
        MAX_TEXT,
        MAX_MAP_BYTES,
        MAX_HEADER_BYTES,
        MAX_ITEMS,
        MAX_PAIRS,
        MAX_NESTED,
        MAX_LEVELS,
    )
    table = PAGE.split("## Limits")[1]
    for limit in limits:
        assert re.search(rf"\b{limit}\b", table), limit


def test_packets_with_equal_bytes_are_equal() -> None:
    assert Data(42, memoryview(bytes(DATA.header)), DATA.payload) == DATA


def test_the_golden_bytes_cover_every_field_of_every_message() -> None:
    """A field that is omitted at its default needs a golden message with another value."""
    named: dict[type, set[str]] = defaultdict(set)
    for message, frames in GOLDEN.values():
        if isinstance(message, Data):
            named[Data] |= message.fields.keys()
            named[Sample] |= {name for row in message.fields["samples"] for name in row}
        else:
            named[type(message)] |= msgpack.unpackb(bytes.fromhex(frames[1])).keys()
        if isinstance(message, Verdicts):
            named[Verdict] |= {
                name
                for row in message.rows
                for name in Verdict._fields
                if getattr(row, name) != Verdict._field_defaults.get(name)
            }
    for kind in get_args(MapMessage):
        assert named[kind] == {field.name for field in fields(kind)}, kind
    assert named[Verdict] == set(Verdict._fields)
    assert named[Data] == {"source", "position", "samples"}
    in_header = {field.name for field in fields(Sample)} - {"data", "source"}
    assert named[Sample] == in_header | {"size"}
