"""Tests of streams of vectors: from the wire through journal, batches and memory to an encoder."""

from __future__ import annotations

import io
import json
import tarfile
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from evaluation_run import write_run
from harness import TINY
from learning_world import steps
from torch import Tensor

from stream_ssl import load_encoder
from stream_ssl.app import cli
from stream_ssl.batch import START
from stream_ssl.config import build, options
from stream_ssl.feed.decode import BadSample, Decoder, VectorDecoder, checked
from stream_ssl.journal.journal import Journal
from stream_ssl.journal.reader import JournalReader
from stream_ssl.journal.segment import JournalEntry
from stream_ssl.learning.saved import memory_of
from stream_ssl.learning.vectors import Vectors, VectorViews
from stream_ssl.memory.descriptors import Vector
from stream_ssl.memory.state import part
from stream_ssl.producers import Producer
from stream_ssl.wire import Data, Sample, sample_of

DIM = 24


def bytes_of(value_BD: Tensor) -> Tensor:
    """Return the bytes of vectors as batches carry them, uint8 [B, bytes, 1, 1]."""
    return value_BD.view(torch.uint8)[:, :, None, None]


def row_of(sample: Sample) -> dict[str, object]:
    return Data.pack(1, [sample]).fields["samples"][0]


def clustered(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return vectors [N, DIM] of four classes, a sign pattern with much noise, and labels [N]."""
    rng = np.random.default_rng(seed)
    centre_CD = np.sign(np.random.default_rng(9).normal(size=(4, DIM)))
    label_N = rng.integers(0, 4, count)
    value_ND = centre_CD[label_N] + 2.5 * rng.normal(size=(count, DIM))
    return value_ND.astype(np.float32), label_N


def test_vector_samples_keep_their_values_and_wrong_vectors_are_refused() -> None:
    value_D = np.linspace(-1, 1, DIM, dtype=np.float16)
    sample = Sample.from_vector(value_D, "v", source="s", time=1.0)
    again = sample_of("s", row_of(sample), sample.data)
    assert (again.codec, again.dtype, again.shape) == ("vector", "float16", (DIM,))
    assert np.array_equal(np.frombuffer(again.data, "<f2"), value_D)
    for wrong, why in (
        (np.ones(3), "float64 of shape"),
        (np.ones((2, 2), np.float32), "of shape \\(2, 2\\)"),
        (np.array([1, np.nan], np.float32), "not finite"),
    ):
        with pytest.raises(ValueError, match=why):
            Sample.from_vector(wrong, "v")
    for fields, why in (
        ({"shape": (3,), "dtype": "float32"}, "8 bytes do not fill float32 of shape \\(3,\\)"),
        ({"shape": (1, 2, 1), "dtype": "float32"}, "needs shape \\(D,\\)"),
        ({"shape": (2,), "dtype": "int8"}, "one of float16, float32"),
    ):
        with pytest.raises(ValueError, match=why):
            Sample("v", bytes(8), "vector", **fields)
    with pytest.raises(ValueError, match="dtype is a vector's"):
        Sample("i", bytes(4), "raw", (2, 2, 1), dtype="float32")


def test_the_vector_decoder_keeps_one_dtype_and_gives_reasons_for_bad_samples() -> None:
    value_D = np.linspace(-1, 1, DIM, dtype=np.float32)
    sample = Sample.from_vector(value_D, "v")
    for dtype in ("float32", "float16"):
        decoder = VectorDecoder(DIM, dtype)
        kept = decoder.decode(checked(row_of(sample), sample.data, "s"))
        assert kept.shape == decoder.shape_HWC
        assert np.array_equal(kept.ravel().view(dtype), value_D.astype(dtype))
        whole = decoder.block([row_of(sample)] * 2, sample.data * 2)
        assert (whole is None) == (dtype == "float16")
        assert whole is None or np.array_equal(whole[1], kept)
    image = Sample("i", bytes(12), "raw", (2, 2, 3))
    short = Sample.from_vector(value_D[1:], "v")
    large = Sample.from_vector(1e6 * value_D, "v")
    huge = Sample.from_vector(1e30 * value_D, "v")  # its standard deviation is infinite
    lost = np.full(DIM, np.nan, np.float32).tobytes()
    for decoder, of, data, reason in (
        (VectorDecoder(DIM), image, image.data, "format"),
        (VectorDecoder(DIM), short, short.data, "shape"),
        (VectorDecoder(DIM), sample, lost, "damaged"),
        (VectorDecoder(DIM, "float16"), large, large.data, "damaged"),
        (VectorDecoder(DIM), huge, huge.data, "damaged"),
        (Decoder(8), sample, sample.data, "format"),
    ):
        with pytest.raises(BadSample) as refused:
            decoder.decode(checked(row_of(of), data, "s"))
        assert refused.value.reason == reason
    for data in (lost, huge.data):
        assert VectorDecoder(DIM).block([row_of(sample)], data) is None


def test_views_change_vectors_by_the_configured_strengths(monkeypatch: pytest.MonkeyPatch) -> None:
    value_BD = 7 * torch.randn(400, 300, generator=torch.Generator().manual_seed(0)) + 3
    plain_BD = VectorViews(Vectors(300)).plain(bytes_of(value_BD))
    assert torch.allclose(plain_BD.mean(1), torch.zeros(400), atol=1e-5)
    assert torch.allclose(plain_BD.std(1), torch.ones(400), atol=1e-5)
    torch.manual_seed(0)

    def views(noise: float = 0.0, dropout: float = 0.0, mix: float = 0.0) -> Tensor:
        monkeypatch.setattr("stream_ssl.learning.vectors.DROPOUT", dropout)
        monkeypatch.setattr("stream_ssl.learning.vectors.MOST_MIX", mix)
        return VectorViews(Vectors(300, noise=noise))(bytes_of(value_BD))

    assert torch.equal(views(), plain_BD)
    assert float((views(noise=0.3) - plain_BD).std()) == pytest.approx(0.3, rel=0.01)
    dropped_BD = views(dropout=0.25)
    assert float((dropped_BD == 0).float().mean()) == pytest.approx(0.25, abs=0.01)
    assert torch.equal(dropped_BD[dropped_BD != 0], plain_BD[dropped_BD != 0])
    own_B = (views(mix=0.4) * plain_BD).mean(1)  # 1 - weight, because other vectors are dissimilar
    assert float(own_B.mean()) == pytest.approx(1 - 0.2, abs=0.02)
    assert float(own_B.min()) > 1 - 0.4 - 0.2


def test_wrong_settings_of_vectors_are_refused() -> None:
    for wrong, why in (
        ({"dim": 1}, "at least 2"),
        ({"widths": ()}, "at least one width"),
        ({"noise": -0.1}, "noise is -0.1"),
    ):
        with pytest.raises(ValueError, match=why):
            Vectors(**{"dim": DIM, **wrong})
    with pytest.raises(ValueError, match="keeps images of shape"):
        Vector().dim(8, (3, 32, 32))


def settings_in(folder: Path, **sections: object) -> object:
    file = folder / "config.yaml"  # JSON is YAML
    file.write_text(json.dumps({**TINY, "run": str(folder), **sections}))
    parser = options.learner_parser()
    return parser.instantiate(options.read(parser, [str(file)]))


def test_a_descriptor_of_pictures_is_refused_for_vectors_and_vice_versa(tmp_path: Path) -> None:
    thumbnails = {"capacity": 64, "descriptor": {"class_path": "Thumbnail"}}
    pictures = settings_in(tmp_path, vectors={"dim": DIM}, memory=thumbnails)
    with pytest.raises(ValueError, match=r"describes pictures, and vectors\.dim is 24: choose"):
        build.dry_run(pictures)
    descriptor = {"class_path": "Vector"}
    for vectors, why in (({}, "keeps images"), ({"dim": DIM, "dtype": "float16"}, "of float16")):
        memory = {"capacity": 64, "descriptor": descriptor}
        wrong = settings_in(tmp_path, vectors=vectors, memory=memory)
        with pytest.raises(ValueError, match=why):
            build.dry_run(wrong)


def knn(encode: object, rows: tuple, queries: tuple) -> float:
    """Return the accuracy of 15 nearest neighbours by cosine."""
    with torch.no_grad():
        row_ND, query_QD = (
            torch.nn.functional.normalize(encode(torch.from_numpy(part[0])), dim=1)
            for part in (rows, queries)
        )
    near_QK = (query_QD @ row_ND.T).topk(15, dim=1).indices
    guess_Q = torch.from_numpy(rows[1])[near_QK].mode(dim=1).values
    return float((guess_Q == torch.from_numpy(queries[1])).float().mean())


def test_a_stream_of_vectors_trains_an_encoder(tmp_path: Path) -> None:
    """Batches come from a journal, and the memory counts duplicates on the vectors."""
    stream, queries = clustered(6400, 1), clustered(1000, 2)
    journal = Journal(tmp_path / "journal", budget=64 << 20)
    for number in range(100):
        rows = slice(64 * number, 64 * number + 64)
        samples = [
            Sample.from_vector(value_D, str(n), label=int(label))
            for n, (value_D, label) in enumerate(zip(stream[0][rows], stream[1][rows], strict=True))
        ]
        data = Data.pack(number + 1, samples)
        entry = JournalEntry("robot", number + 1, header=data.header, payload=data.payload)
        journal.append([entry])
    journal.close()
    parts: dict[str, Any] = {
        "vectors": {"dim": DIM, "widths": [64, 64]},
        "batches": {"batch_size": 64},
        "memory": {"capacity": 256, "descriptor": {"class_path": "Vector"}},
    }
    settings = settings_in(tmp_path, **parts)
    assert not build.decodes_in_processes(
        settings_in(tmp_path, learner={"device": "cuda"}, **parts)
    )
    reader = JournalReader(tmp_path / "journal")
    with closing(reader), build.batches(settings, reader, START) as batches:
        learner = build.learner(settings, batches, START)

        def encode(value_BD: Tensor) -> Tensor:
            learner.method.eval()
            feature_BF = learner.method.features(learner.views.plain(bytes_of(value_BD)))
            learner.method.train()
            return feature_BF

        rows = (stream[0][:2000], stream[1][:2000])
        before = knn(encode, rows, queries)
        record = steps(learner, 100)[-1]
        after = knn(encode, rows, queries)
    assert record.samples == 6400
    assert len(learner.memory) == 256
    kept_BD = learner.memory.images_of(torch.arange(4)).flatten(1).contiguous()
    sent = {value_D.tobytes() for value_D in stream[0]}
    assert {bytes(row.numpy()) for row in kept_BD} <= sent
    assert after > before + 0.05, (before, after)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_run_on_vectors_is_exported(dtype: str, tmp_path: Path) -> None:
    vectors, memory = {"dim": DIM, "widths": [16, 8], "dtype": dtype}, {"capacity": 32}
    memory |= {"descriptor": {"class_path": "Vector", "init_args": {"dtype": dtype}}}
    (checkpoint,) = write_run(tmp_path / "run", vectors=vectors, memory=memory, held=20)
    arguments = ["--encoder", str(tmp_path / "encoder"), "--memory", str(tmp_path / "memory")]
    assert cli.main(["export", str(tmp_path / "run"), *arguments]) == 0
    run, exported = (load_encoder(place) for place in (tmp_path / "run", tmp_path / "encoder"))
    value_BD = torch.randn(5, DIM)
    feature_BF = run(value_BD)
    assert feature_BF.shape == (5, 8)
    assert torch.equal(exported(value_BD), feature_BF)
    kept_BD = value_BD.to(getattr(torch, dtype))
    assert torch.equal(run(kept_BD.view(torch.uint8)[:, :, None, None]), feature_BF)
    torch.manual_seed(0)
    view_BF = run.view(value_BD)
    torch.manual_seed(0)
    assert torch.equal(run.view(kept_BD.view(torch.uint8)[:, :, None, None]), view_BF)
    assert not torch.equal(view_BF, feature_BF)
    with pytest.raises(ValueError, match="must be a float tensor"):
        run.view(value_BD[:, 1:])
    session = onnxruntime.InferenceSession(tmp_path / "encoder" / "encoder.onnx")
    (answer_BF,) = session.run(None, {"vectors": value_BD.numpy()})
    assert np.abs(answer_BF - feature_BF.numpy()).max() <= 1e-4 * feature_BF.abs().max()

    image_KCHW = part(memory_of(checkpoint), "columns")["images"]
    with tarfile.open(tmp_path / "memory" / "memory-000000.tar") as tar:
        members = {name: tar.extractfile(name).read() for name in tar.getnames()}
    assert len(members) >= 2 * 20
    for number in range(20):
        found_D = np.load(io.BytesIO(members[f"{number:09d}.npy"]))
        assert (found_D.dtype, found_D.shape) == (np.dtype(dtype), (DIM,))
        assert found_D.tobytes() == bytes(image_KCHW[number].flatten().numpy())


def test_the_producer_sends_an_array_of_floats_as_a_vector(tmp_path: Path) -> None:
    from receiver_peer import Running

    value_D = np.linspace(-1, 1, DIM, dtype=np.float32)
    with Running(tmp_path) as running, Producer(running.endpoint, "robot") as producer:
        assert producer.send(value_D, id="v")
        producer.flush()
        reader = JournalReader(tmp_path / "journal")
        (record,) = reader.read(1)
        reader.close()
        (sample,) = Data(1, record.header, record.payload).samples()
    assert (sample.id, sample.dtype, sample.shape) == ("v", "float32", (DIM,))
    assert bytes(sample.data) == value_D.tobytes()
