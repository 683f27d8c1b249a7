"""Messages survive encoding and decoding. Invalid bytes raise WireError and no other error."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from wire_golden import DATA, GOLDEN

from stream_ssl.wire import (
    CODECS,
    REASONS,
    Ack,
    Bye,
    Data,
    Hello,
    Nack,
    Sample,
    Welcome,
    WireError,
    decode,
    encode,
    sample_of,
)
from stream_ssl.wire.messages import DATA_HEAD, MAX_ITEMS, unpack_map
from stream_ssl.wire.sample import MAX_TIME

seeded = settings(derandomize=True)

numbers = st.integers(0, 2**64 - 1)
texts = st.text(max_size=40)
names = st.from_regex(r"[A-Za-z0-9._/-]{1,128}", fullmatch=True)
codecs = st.lists(st.sampled_from(CODECS), max_size=4).map(tuple)
positions = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | texts | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
messages = st.one_of(
    st.builds(Hello, names, numbers, numbers, codecs, texts),
    st.builds(Welcome, numbers, positions, numbers, numbers, numbers, codecs, numbers),
    st.builds(Ack, numbers, numbers),
    st.builds(Nack, numbers, st.sampled_from(REASONS), texts, st.booleans()),
    st.builds(Bye, texts),
)


@st.composite
def samples(draw: Any) -> Sample:
    common = {
        "id": draw(st.text(min_size=1, max_size=40)),
        "time": draw(st.floats(-MAX_TIME, MAX_TIME)),
        "source": "somewhere",
        "label": draw(st.none() | st.integers(0, 2**31 - 1)),
        "meta": draw(
            st.none()
            | st.dictionaries(
                texts, texts | st.integers(-(2**63), 2**63) | st.booleans(), min_size=1, max_size=3
            )
        ),
    }
    codec = draw(st.sampled_from(CODECS))
    if codec == "vector":
        dtype, size = draw(st.sampled_from([("float16", 2), ("float32", 4)]))
        dim = draw(st.integers(1, 5))
        data = draw(st.binary(min_size=dim * size, max_size=dim * size))
        return Sample(data=data, codec=codec, shape=(dim,), dtype=dtype, **common)
    if codec != "raw":
        return Sample(data=draw(st.binary(min_size=1, max_size=50)), codec=codec, **common)
    shape = (draw(st.integers(1, 5)), draw(st.integers(1, 5)), draw(st.sampled_from([1, 3, 4])))
    size = shape[0] * shape[1] * shape[2]
    return Sample(data=draw(st.binary(min_size=size, max_size=size)), shape=shape, **common)


@seeded
@given(messages)
def test_a_decoded_message_equals_the_encoded_message(
    message: Hello | Welcome | Ack | Nack | Bye,
) -> None:
    assert decode(encode(message)) == message


@seeded
@given(st.lists(samples(), min_size=1, max_size=5), numbers, positions)
def test_a_decoded_packet_contains_the_samples_that_were_packed(
    sent: list[Sample], sequence: int, position: Any
) -> None:
    data = decode(encode(Data.pack(sequence, sent, position)))
    assert isinstance(data, Data)
    assert (data.sequence, data.position, len(data)) == (sequence, position, len(sent))
    assert list(data.samples()) == sent
    assert data.size == sum(len(frame) for frame in encode(data)[2:])


@seeded
@given(st.lists(st.binary(max_size=60), max_size=5))
@example([b"SS\x01\x03", bytes(12), b"", b""])
@example([b"SS\x01\x01", b"\x80"])
@example([b"SS\x01\x04", b"\x81\xa7through" + b"\x91" * 2000 + b"\x01"])
@example([b"SS\x01\x02", b"\xc7\x05\xff12345"])
def test_decode_raises_only_wire_error_for_random_frames(frames: list[bytes]) -> None:
    with contextlib.suppress(WireError):
        decode(frames)


@seeded
@given(st.sampled_from(sorted(GOLDEN)), st.integers(0, 3), st.data())
def test_decode_raises_only_wire_error_for_damaged_messages(
    name: str, which: int, data: st.DataObject
) -> None:
    frames = [bytearray(bytes.fromhex(frame)) for frame in GOLDEN[name][1]]
    frame = frames[which % len(frames)]
    for _ in range(data.draw(st.integers(1, 3))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(WireError):
        decode([bytes(frame) for frame in frames])


@seeded
@given(
    st.binary(max_size=120)
    | st.recursive(
        st.none() | st.integers(-9, 9) | st.floats() | texts | st.binary(max_size=4),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["source", "position", "samples", "id", "time", "codec", "size"]),
                inner,
            )
        ),
        max_leaves=20,
    ).map(msgpack.packb)
)
def test_a_random_header_raises_only_wire_error_or_value_error(header: bytes) -> None:
    with contextlib.suppress(WireError, ValueError):
        list(Data(1, header, b"").samples())


@seeded
@given(st.data())
def test_a_damaged_header_raises_only_wire_error_or_value_error(data: st.DataObject) -> None:
    header = bytearray(DATA.header)
    for _ in range(data.draw(st.integers(1, 4))):
        header[data.draw(st.integers(0, len(header) - 1))] = data.draw(st.integers(0, 255))
    packet = Data(42, bytes(header), DATA.payload)
    with contextlib.suppress(WireError):
        for fields, payload in packet.rows():
            with contextlib.suppress(ValueError):
                sample_of(packet.fields["source"], fields, payload)


def test_decode_gives_the_reason_why_frames_are_no_message() -> None:
    cases: list[tuple[list[bytes], str, str]] = [
        ([], "malformed", "first frame"),
        ([b"GET / HTTP/1.1\r\n"], "malformed", "first frame b'GET"),
        ([b"SS\x02\x01", b"\x80"], "version", "version 2; this side speaks 1"),
        ([b"SS\x01\x09", b"\x80"], "malformed", "kind 9"),
        ([b"SS\x01\x04"], "malformed", "1 frames"),
        ([b"SS\x01\x04", b"\x80", b""], "malformed", "3 frames"),
        ([b"SS\x01\x04", b"\xc1"], "malformed", "not msgpack"),
        ([b"SS\x01\x04", b"\x90"], "malformed", "map was due, not list"),
        ([b"SS\x01\x04", b"\x80"], "malformed", "ACK: through, credit is missing"),
        ([b"SS\x01\x03", b"short", b"", b""], "malformed", "4 frames"),
        ([b"SS\x01\x03", DATA_HEAD.pack(1, 0), b"", b""], "checksum", "packet 1"),
    ]
    for frames, reason, match in cases:
        with pytest.raises(WireError, match=match) as caught:
            decode(frames)
        assert caught.value.reason == reason


def test_decode_names_a_field_with_an_invalid_value() -> None:
    cases: list[tuple[Any, str, object]] = [
        (Hello("a", 1, 1), "producer", "two words"),
        (Hello("a", 1, 1), "producer", ""),
        (Hello("a", 1, 1), "producer", 7),
        (Hello("a", 1, 1), "epoch", -1),
        (Hello("a", 1, 1), "first", True),
        (Hello("a", 1, 1), "codecs", "raw"),
        (Hello("a", 1, 1), "codecs", ["raw", 5]),
        (Hello("a", 1, 1), "agent", "x" * 5000),
        (Ack(1, 1), "credit", 1.0),
        (Nack(1, "gap", "", permanent=False), "permanent", 0),
        (Bye(), "reason", None),
    ]
    for message, field, value in cases:
        prefix, body = encode(message)
        sent = {**msgpack.unpackb(body), field: value}
        with pytest.raises(WireError, match=field) as caught:
            decode([prefix, msgpack.packb(sent)])
        assert caught.value.reason == "malformed"


def test_decode_ignores_fields_of_later_releases() -> None:
    prefix, body = encode(Ack(3, 4))
    sent = {**msgpack.unpackb(body), "kind": 9, "mood": "good"}
    assert decode([prefix, msgpack.packb(sent)]) == Ack(3, 4)


def row(**fields: Any) -> dict[str, Any]:
    return {"id": "a", "time": 1.0, "codec": "jpeg", "size": 1, **fields}


def test_a_packet_with_an_invalid_header_is_rejected_with_the_reason() -> None:
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({"samples": [row()]}, "malformed", "source"),
        ({"source": "s" * 65, "samples": [row()]}, "malformed", "source"),
        ({"source": "s", "samples": []}, "malformed", "at least one"),
        ({"source": "s", "samples": {}}, "malformed", "at least one"),
        ({"source": "s", "samples": [1]}, "malformed", "no map"),
        ({"source": "s", "samples": [row(size=-1)]}, "malformed", "lacks"),
        ({"source": "s", "samples": [row(size=2)]}, "malformed", "2 bytes, the payload has 1"),
        ({"source": "s", "samples": [row(time="noon")]}, "malformed", "lacks"),
        ({"source": "s", "samples": [row(codec="tiff")]}, "codec", "tiff"),
        ({"source": "s", "samples": [row()], "position": "x" * 5000}, "malformed", "position"),
    ]
    for header, reason, match in cases:
        with pytest.raises(WireError, match=match) as caught:
            _ = Data(1, msgpack.packb(header), b"x").fields
        assert caught.value.reason == reason


def test_bad_samples_do_not_affect_the_good_samples_of_a_packet() -> None:
    bad = [row(label=True), row(shape=[1, 2]), row(meta=[1]), row(time=float("nan"))]
    header = {"source": "s", "samples": [row(), *bad, row(id="z", time=7)]}
    data = Data(1, msgpack.packb(header), b"123456")
    good = []
    for fields, payload in data.rows():
        with contextlib.suppress(ValueError):
            good.append(sample_of("s", fields, payload))
    assert [(sample.id, bytes(sample.data), sample.time) for sample in good] == [
        ("a", b"1", 1.0),
        ("z", b"6", 7.0),
    ]


def test_pack_requires_samples_of_one_source() -> None:
    image = np.zeros((2, 2), np.uint8)
    with pytest.raises(ValueError, match="at least one"):
        Data.pack(1, [])
    with pytest.raises(ValueError, match="one source"):
        Data.pack(1, [Sample.from_array(image, "a", source=s) for s in ("x", "y")])


def _list(count: int) -> bytes:
    return b"\xdd" + count.to_bytes(4, "big")


def test_a_map_beyond_a_limit_is_rejected_quickly() -> None:
    cases = [
        (b"\xc0" * 65_536, "oversize", "a map of 65539 bytes; at most 65536"),
        (_list(5000) + b"\xc0" * 5000, "malformed", "max_array_len"),
        (b"\xde\x0b\xb8" + b"".join(b"\xa2%c%c" % divmod(n, 64) + b"\xc0" for n in range(3000)),
         "malformed", "max_map_len"),
        (_list(10) + (_list(4000) + b"\x80" * 4000) * 10, "malformed", "more than 32768"),
        (b"\xdc\x0f\xff" * 1000, "malformed", "OutOfData"),  # claims 32 MB of lists in 3 KB
        (b"\x91" * 5000 + b"\xc0", "malformed", "StackError"),
        (b"\x91" * 32 + b"\xc0", "malformed", "on more than 32 levels"),
        (b"\x81\xa1b" * 1000 + b"\xc0", "malformed", "on more than 32 levels"),
        (b"\xd6\xff0000", "malformed", "max_ext_len"),
        (b"\xc0\xc0", "malformed", "ExtraData"),
    ]  # fmt: skip
    for value, reason, match in cases:
        began = time.process_time()
        with pytest.raises(WireError, match=match) as caught:
            unpack_map(b"\x81\xa1a" + value)
        assert caught.value.reason == reason
        assert time.process_time() - began < 0.5


def test_a_map_with_the_maximum_number_of_levels_is_read() -> None:
    assert unpack_map(b"\x81\xa1a" + b"\x91" * 31 + b"\xc0")


def test_the_largest_header_within_the_limits_is_read() -> None:
    rows = [
        {"id": str(n), "time": 1.0, "codec": "raw", "size": 1, "shape": [1, 1, 1], "meta": {}}
        for n in range(MAX_ITEMS)
    ]
    header = msgpack.packb({"source": "a", "position": [[]] * 4000, "samples": rows})
    assert len(Data(1, header, bytes(MAX_ITEMS))) == MAX_ITEMS
