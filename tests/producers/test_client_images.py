"""The images and fields that send() accepts, and the samples that it makes of them."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from client_peer import Peer, image
from PIL import Image
from table import table

from stream_ssl.producers import Producer, Sample
from stream_ssl.producers._images import as_sample

PIXELS = np.arange(4 * 5 * 3, dtype=np.uint8).reshape(4, 5, 3)
CLOSED = Image.new("RGB", (2, 2))
CLOSED.close()


def encoded(codec: str) -> bytes:
    file = io.BytesIO()
    Image.fromarray(PIXELS).save(file, codec)
    return file.getvalue()


@pytest.fixture
def producer() -> Iterator[Producer]:
    with Peer() as peer, peer.serving(), Producer(peer.address, name="camera") as producer:
        yield producer


@table("codec", ["jpeg", "png", "webp"])
@table("kind", ["bytes", "bytearray", "memoryview", "Path", "str"])
def test_the_bytes_of_an_encoded_image_determine_its_codec(
    codec: str, kind: str, tmp_path: Path
) -> None:
    data = encoded(codec)
    path = tmp_path / "misnamed.txt"
    path.write_bytes(data)
    kinds: dict[str, Any] = {
        "bytes": data,
        "bytearray": bytearray(data),
        "memoryview": memoryview(data),
        "Path": path,
        "str": str(path),
    }
    sample = as_sample(kinds[kind], "x")
    assert (sample.codec, sample.data, sample.shape) == (codec, data, None)


@table(
    ("given", "shape"),
    [
        (PIXELS, (4, 5, 3)),
        (PIXELS[..., 0], (4, 5, 1)),
        (PIXELS[::2, ::-1], (2, 5, 3)),
        (Image.fromarray(PIXELS), (4, 5, 3)),
        (Image.fromarray(PIXELS).convert("L"), (4, 5, 1)),
        (Image.fromarray(PIXELS).convert("RGBA"), (4, 5, 4)),
        (Image.fromarray(PIXELS).convert("1"), (4, 5, 1)),
        (Image.fromarray(PIXELS).convert("P"), (4, 5, 3)),
        (Image.fromarray(PIXELS).convert("CMYK"), (4, 5, 3)),
        (Image.fromarray(PIXELS).convert("LA"), (4, 5, 4)),
    ],
)
def test_arrays_and_pil_images_become_raw_samples(given: Any, shape: tuple[int, ...]) -> None:
    sample = as_sample(given, "x")
    assert (sample.codec, sample.shape) == ("raw", shape)
    if isinstance(given, np.ndarray):
        assert sample.data == given.tobytes()
    elif given.mode in ("L", "RGB", "RGBA"):
        assert sample.data == np.asarray(given).tobytes()


def test_a_file_of_another_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.gif").write_bytes(b"GIF89a")
    with pytest.raises(ValueError, match=r"b'GIF89a'.*convert the picture to one of these$"):
        as_sample(tmp_path / "a.gif", "x")


def test_raw_bytes_need_their_shape() -> None:
    assert as_sample(bytes(12), "x", shape=(2, 2, 3)).codec == "raw"
    assert as_sample(memoryview(PIXELS), "x", codec="raw", shape=(4, 5, 3)).data == PIXELS.tobytes()
    with pytest.raises(ValueError, match=r"no JPEG, PNG or WebP: convert .*Raw pixels .*shape"):
        as_sample(bytes(12), "x")


@pytest.mark.parametrize("given", [None, 5, 1.5, [1, 2], {"a": 1}, (1,), object(), Path])
def test_send_refuses_objects_that_are_no_image(given: Any, producer: Producer) -> None:
    with pytest.raises(TypeError, match=rf"a PIL image or a path, not {type(given).__name__}"):
        producer.send(given)
    assert producer.stats.accepted.samples == 0


def test_send_names_a_missing_file_and_a_folder(producer: Producer, tmp_path: Path) -> None:
    (tmp_path / "frames").mkdir()
    with pytest.raises(FileNotFoundError, match=r"missing\.png"):
        producer.send(tmp_path / "missing.png", codec="png")
    with pytest.raises(IsADirectoryError, match=r"one image is needed: .*folder: '.*frames'"):
        producer.send(tmp_path / "frames")


@table(
    ("given", "fields", "match"),
    [
        (PIXELS, {"codec": "png"}, "codec 'png': this array is 'raw'; pass an encoded image"),
        (np.ones(3, np.float32), {"codec": "raw"}, "this array is 'vector'"),
        (PIXELS, {"shape": (4, 5, 3)}, "shape (4, 5, 3): an array has its own shape; pass None"),
        (PIXELS, {"time": np.datetime64("9999-01-01")}, "not in seconds since the Unix epoch"),
        (PIXELS.astype(float), {}, "must be uint8"),
        (
            np.ma.masked_less(PIXELS, 3),
            {},
            "array has masked values; choose a value for them: .filled(",
        ),
        (
            np.ma.masked_equal(np.ones(3, np.float32), 1),
            {},
            "array has masked values; choose a value",
        ),
        (PIXELS.ravel(), {}, "1 dimensions are no H x W x C image"),
        (Image.new("I;16", (2, 2)), {}, "mode 'I;16' has more than 8 bits"),
        (Image.new("F", (2, 2)), {}, "mode 'F' has more than 8 bits"),
        (CLOSED, {}, "PIL image of mode 'RGB' cannot be read (Operation on closed image); send it"),
        (PIXELS, {"meta": [1]}, "meta: must be a mapping of names to values, not list"),
        (PIXELS, {"meta": {"a": [1]}}, "meta 'a': list"),
        (PIXELS, {"time": "now"}, "time 'now' is not a finite number"),
        (PIXELS, {"time": True}, "time True is not a finite number"),
    ],
)
def test_the_error_names_the_rule_that_a_sample_breaks(
    given: Any, fields: dict[str, Any], match: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(match)):
        as_sample(given, "x", **fields)


@table(
    ("time", "seconds"),
    [
        (5, 5.0),
        (np.float32(2.5), 2.5),
        (np.int64(7), 7.0),
        (datetime(2020, 1, 1, tzinfo=UTC), 1577836800.0),
        (datetime(2020, 1, 1), datetime(2020, 1, 1).timestamp()),  # noqa: DTZ001, RUF100
        (np.datetime64("2020-01-01T00:00:00.5"), 1577836800.5),
        (np.datetime64("1500-01-01"), datetime(1500, 1, 1, tzinfo=UTC).timestamp()),
        (np.datetime64("2020", "Y"), 1577836800.0),
    ],
)
def test_numbers_and_dates_become_seconds_since_the_epoch(time: Any, seconds: float) -> None:
    assert float(as_sample(PIXELS, "x", time=time).time) == seconds


def test_numpy_scalars_and_dates_in_meta_become_plain_values() -> None:
    meta = {
        "gain": np.float32(1.5),
        "count": np.int64(3),
        "on": np.bool_(True),
        "name": np.str_("left"),
        "when": datetime(2020, 1, 1, tzinfo=UTC),
        "day": np.datetime64("2020-01-02"),
        "plain": "text",
    }
    made = as_sample(PIXELS, "x", meta=meta).meta
    assert made == {
        "gain": 1.5,
        "count": 3,
        "on": True,
        "name": "left",
        "when": "2020-01-01T00:00:00+00:00",
        "day": "2020-01-02",
        "plain": "text",
    }
    assert {type(value) for value in made.values()} == {float, int, bool, str}


def test_the_receiver_acknowledges_a_file_and_a_pil_image_with_fields(
    producer: Producer, tmp_path: Path
) -> None:
    path = tmp_path / "x.png"
    path.write_bytes(encoded("png"))
    producer.send(path, id="path", codec="png", label=np.int64(3), source="left", time=1.0)
    producer.send(Image.fromarray(PIXELS), id="pillow", meta={"gain": np.float32(2)})
    producer.flush()
    assert producer.stats.acked.samples == 2


def test_an_error_names_the_users_call_and_argument(producer: Producer) -> None:
    with pytest.raises(TypeError) as caught:
        producer.send(image(), lable=3)  # type: ignore[call-arg]
    assert "Producer.send()" in str(caught.value)
    with pytest.raises(TypeError, match="lable: no such argument; a sample has label, codec"):
        producer.submit(image(), lable=3)
    with pytest.raises(ValueError, match="must be 1 to 255 bytes") as long:
        producer.send(image(), id="x" * 5000)
    assert len(str(long.value)) < 200
    with pytest.raises(ValueError, match="pass it alone"):
        producer.send(Sample.from_array(image(), "x"), codec="raw")


@table(
    ("error", "match", "given"),
    [
        (ValueError, "producer name None: must be 1 to 128", {"name": None}),
        (ValueError, "give either the receiver's address", {"address": None}),
        (TypeError, "on_state is 3: pass a function of one argument", {"on_state": 3}),
    ],
)
def test_a_producer_refuses_arguments_of_the_wrong_kind(
    error: type, match: str, given: dict[str, Any]
) -> None:
    with pytest.raises(error, match=match):
        Producer(**({"address": "tcp://127.0.0.1:5557", "name": "n"} | given))


def test_send_names_a_file_that_is_no_picture(producer: Producer, tmp_path: Path) -> None:
    for content, why in ((b"<html>404</html>", "are no JPEG, PNG or WebP"), (b"", "is empty")):
        (tmp_path / "a.jpg").write_bytes(content)
        with pytest.raises(ValueError, match=rf"{tmp_path}/a\.jpg: .*{why}"):
            producer.send(tmp_path / "a.jpg")


def test_send_refuses_impossible_times_and_channels_that_come_first(producer: Producer) -> None:
    with pytest.raises(ValueError, match="time NaT: there is no such moment"):
        producer.send(image(), time=np.datetime64("NaT", "s"))
    with pytest.raises(ValueError, match="sample 'x': time 0001-01-01T00:00:00 has no seconds"):
        producer.send(image(), id="x", time=datetime(1, 1, 1))  # noqa: DTZ001, RUF100
    with pytest.raises(ValueError, match=r"shape \(3, 64, 64\) must be \(H, W, C\).*come last"):
        producer.send(np.zeros((3, 64, 64), np.uint8))
