"""The wire's bytes do not change, and docs/wire.md shows them as they are."""

from __future__ import annotations

import re
import zlib
from pathlib import Path

from wire_golden import DATA, GOLDEN

from stream_ssl.wire import REASONS, Data, decode, encode
from stream_ssl.wire.messages import (
    MAX_HEADER_BYTES,
    MAX_ITEMS,
    MAX_MAP_BYTES,
    MAX_NESTED,
    MAX_PAIRS,
    MAX_TEXT,
)
from stream_ssl.wire.sample import (
    CODECS,
    MAX_ID_BYTES,
    MAX_META_BYTES,
    MAX_POSITION_BYTES,
    MAX_POSITION_DEPTH,
    MAX_SIDE,
    MAX_SOURCE_BYTES,
)

PAGE = (Path(__file__).parents[2] / "docs" / "wire.md").read_text(encoding="utf-8")


def test_bytes() -> None:
    for name, (message, frames) in GOLDEN.items():
        assert [bytes(frame).hex() for frame in encode(message)] == list(frames), name
        assert decode([bytes.fromhex(frame) for frame in frames]) == message, name


def test_the_page_shows_the_bytes() -> None:
    for name, (_, frames) in GOLDEN.items():
        block = re.search(rf"```hex\n{name}\n(.*?)```", PAGE, re.DOTALL)
        assert block, f"docs/wire.md has no block ```hex {name}"
        shown = re.split(r"^frame \d+:", block[1], flags=re.MULTILINE)[1:]
        assert tuple(re.sub(r"\s", "", frame) for frame in shown) == frames


def test_the_checksum_is_what_the_page_says() -> None:
    joined = (42).to_bytes(8, "big") + bytes(DATA.header) + bytes(DATA.payload)
    assert zlib.crc32(joined) == DATA.checksum() == 0x92C6B383


def test_the_page_names_every_reason_codec_and_limit() -> None:
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
    )
    table = PAGE.split("## Limits")[1]
    for limit in limits:
        assert re.search(rf"\b{limit}\b", table), limit


def test_data_is_compared_by_its_bytes() -> None:
    assert Data(42, memoryview(bytes(DATA.header)), DATA.payload) == DATA
