"""The naive twin of Batches, a journal in a list, and packets of good and bad samples."""

from __future__ import annotations

import io
import math
import struct
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from hashlib import blake2b
from typing import Any

import msgpack
import numpy as np
from PIL import Image
from xxhash import xxh3_64_digest

from stream_ssl.batch import COLUMNS, Batch, Offset
from stream_ssl.feed.batches import Batches
from stream_ssl.feed.decode import BadSample, Decoder, checked
from stream_ssl.wire import Data, WireError

SIZE = 8  # side of the images that the tests decode to


@dataclass(frozen=True)
class FakeRecord:
    position: int
    producer: str
    sequence: int
    received: float
    header: bytes
    payload: bytes


@dataclass
class FakeReader:
    """A journal in a list; read() returns at most `chunk` records."""

    records: list[FakeRecord] = field(default_factory=list)
    chunk: int = 3
    error: Exception | None = None
    asked: list[int] = field(default_factory=list)
    id: str | None = None

    @property
    def first(self) -> int:
        return self.records[0].position if self.records else 1

    @property
    def last(self) -> int:
        return self.records[-1].position if self.records else 0

    def read(self, position: int, max_bytes: int = 1 << 20) -> list[FakeRecord]:
        if self.error:
            raise self.error
        self.asked.append(position)
        return [record for record in self.records if record.position >= position][: self.chunk]


def naive_batches(
    records: Sequence[FakeRecord], decoder: Decoder, batch_size: int, start: Offset
) -> Iterator[Batch]:
    """Yield the batches, made sample by sample in one loop."""
    rejected: Counter[str] = Counter()
    taken: list[tuple[Any, ...]] = []
    for record in records:
        data = Data(record.sequence, record.header, record.payload)
        try:
            rows = list(data.rows())
        except WireError:
            if (record.position, 0) >= (start.record, start.sample):
                rejected["packet"] += 1
            continue
        for index, (row, payload) in enumerate(rows):
            if (record.position, index) < (start.record, start.sample):
                continue
            try:
                image = decoder.decode(checked(row, payload, data.fields["source"]))
            except BadSample as error:
                rejected[error.reason] += 1
                continue
            identity = number(f"{data.fields['source']}\0{row['id']}".encode())
            label = row.get("label")
            content = max(1, content_number(image.tobytes())), -1 if label is None else label
            image_CHW = image.transpose(2, 0, 1).copy()
            taken.append((identity, *content, image_CHW, record.received))
            if len(taken) == batch_size:
                whole = index + 1 == len(rows)
                after = (record.position + 1, 0) if whole else (record.position, index + 1)
                columns = [np.array(column) for column in zip(*taken, strict=True)]
                yield Batch(*columns, offset=Offset(*after), rejected=dict(rejected))
                rejected, taken = Counter(), []


def number(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "big") >> 1


def content_number(data: bytes) -> int:
    return int.from_bytes(xxh3_64_digest(data), "big") >> 1


def assert_equal(batch: Batch | None, expected: Batch) -> None:
    assert batch is not None
    for name in COLUMNS:
        np.testing.assert_array_equal(getattr(batch, name), getattr(expected, name), name)
    assert (batch.offset, batch.rejected) == (expected.offset, expected.rejected)


def collect(batches: Batches, count: int) -> list[Batch]:
    found = []
    for _ in range(count):
        batch = batches.next(20)
        assert batch is not None
        found.append(batch)
    return found


# -- payloads


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def picture(rng: np.random.Generator, height: int, width: int, mode: str = "RGB") -> Image.Image:
    channels = {"L": 1, "RGB": 3, "RGBA": 4}[mode]
    pixels = rng.integers(0, 256, (height, width, channels), np.uint8)
    return Image.fromarray(pixels[:, :, 0] if channels == 1 else pixels)


def png_bomb(width: int, height: int) -> bytes:
    """Return a valid PNG header for so many pixels, with hardly any data after it."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return (
            struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(1000)))
    return b"\x89PNG\r\n\x1a\n" + body + chunk(b"IEND", b"")


def raw(rng: np.random.Generator, *shape: int) -> tuple[dict[str, Any], bytes]:
    return {"codec": "raw", "shape": list(shape)}, rng.bytes(math.prod(shape))


@cache
def samples_good() -> list[tuple[dict[str, Any], bytes]]:
    """Return good samples: half are raw of the right shape, the others of all valid kinds."""
    rng = np.random.default_rng(11)
    found = []
    for _ in range(8):
        sides = [int(n) for n in rng.integers(1, 30, 2)]
        row, data = raw(rng, SIZE, SIZE, 3)
        found += [
            ({"codec": "png"}, encoded(picture(rng, *sides), "PNG")),
            ({"codec": "jpeg"}, encoded(picture(rng, *sides, "L"), "JPEG")),
            ({"codec": "webp"}, encoded(picture(rng, *sides, "RGBA"), "WEBP")),
            raw(rng, *sides, int(rng.choice([1, 3, 4]))),
            ({**row, "meta": {"a": 1}}, data),
        ]
        found += [({**row, "label": n}, raw(rng, SIZE, SIZE, 3)[1]) for n in (0, 7, 2**31 - 1)]
        found += [raw(rng, SIZE, SIZE, 3) for _ in range(2)]
    return found


@cache
def samples_bad() -> list[tuple[dict[str, Any], bytes]]:
    """Return samples that must be refused, each for another fault."""
    rng = np.random.default_rng(12)
    row, data = raw(rng, SIZE, SIZE, 3)
    jpeg = encoded(picture(rng, 20, 20), "JPEG")
    return [
        ({"codec": "jpeg"}, jpeg[: len(jpeg) // 2]),
        ({"codec": "png"}, png_bomb(12_000, 12_000)),
        ({"codec": "webp"}, encoded(Image.new("RGB", (1100, 1100)), "WEBP")),
        ({"codec": "jpeg"}, encoded(picture(rng, 9, 9), "GIF")),
        ({"codec": "webp"}, rng.bytes(40)),
        ({"codec": "png"}, b""),
        ({**row, "shape": [SIZE, SIZE + 1, 3]}, data),
        ({**row, "shape": "x"}, data),
        ({**row, "label": -5}, data),
        ({**row, "label": "cat"}, data),
        ({**row, "label": True}, data),
        ({**row, "time": math.nan}, data),
        ({**row, "time": 1.7e18}, data),
        ({**row, "id": ""}, data),
        ({**row, "id": "../" * 200}, data),
        ({**row, "meta": {"m": "x" * 5000}}, data),
        ({**row, "meta": [1]}, data),
    ]


def sample(rng: np.random.Generator, bad: float) -> tuple[dict[str, Any], bytes]:
    """Return a random sample, which must be refused with probability `bad`."""
    pool = samples_bad() if rng.random() < bad else samples_good()
    return pool[rng.integers(len(pool))]


def record(
    position: int, samples: Sequence[tuple[dict[str, Any], bytes]], **facts: Any
) -> FakeRecord:
    rows = [
        {"id": f"{position}-{index}", "time": position + index / 8, "size": len(data), **row}
        for index, (row, data) in enumerate(samples)
    ]
    header = msgpack.packb({"source": facts.pop("source", "cam"), "position": 0, "samples": rows})
    payload = b"".join(data for _, data in samples)
    whole = {"producer": "robot", "sequence": position, "received": 1000.0 + position, **facts}
    return FakeRecord(position=position, header=header, payload=payload, **whole)


def journal(
    rng: np.random.Generator, records: int, bad: float, gaps: float = 0
) -> list[FakeRecord]:
    """Return records of 1 to 12 samples; some are unreadable, and some are missing."""
    made = []
    for position in range(1, records + 1):
        count = int(rng.integers(1, 13))
        made.append(record(position, [sample(rng, bad) for _ in range(count)]))
        if rng.random() < bad / 10:
            made[-1] = FakeRecord(position, "robot", position, 1000.0, b"\xc1", b"x")
    return [each for each in made if rng.random() >= gaps]
