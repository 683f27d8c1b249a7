"""An encoder that a user has loaded: its pixels, training, copies and precision."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from evaluation_run import write_run
from pictures_of_a_run import images
from PIL import Image
from table import table

import stream_ssl
from stream_ssl.feed.decode import Decoder, checked
from stream_ssl.pictures import png


def test_preprocess_returns_the_pixels_that_the_learner_would_see(
    exported: Path, tmp_path: Path
) -> None:
    encoder = stream_ssl.load_encoder(exported)
    colour_HWC = np.random.default_rng(0).integers(0, 256, (30, 20, 3), np.uint8)
    file = tmp_path / "image.png"
    Image.fromarray(colour_HWC).save(file)
    row = {"id": "a", "codec": "png", "time": 0.0}
    expected_HWC = Decoder(12, 1).decode(checked(row, file.read_bytes(), "camera"))
    for image in (file, str(file), file.read_bytes(), Image.open(file), colour_HWC):
        found_CHW = encoder.preprocess(image)
        assert found_CHW.dtype == torch.uint8
        assert np.array_equal(found_CHW.permute(1, 2, 0).numpy(), expected_HWC)
    with pytest.raises(TypeError, match="not int"):
        encoder.preprocess(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no JPEG, PNG or WebP"):
        encoder.preprocess(b"nothing")
    for content in (b"nothing", file.read_bytes()[:200]):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=r"image\.png: "):
            encoder.preprocess(file)
    with pytest.raises(
        ValueError, match=r"image\.png: the picture is damaged \(.*\): copy or fetch"
    ):
        encoder.preprocess(file)
    with pytest.raises(ValueError, match=r"8001 x 8000 pixels; .*: scale it down"):
        encoder.preprocess(png(np.zeros((8000, 8001, 1), np.uint8), level=1))
    with pytest.raises(ValueError, match=r"4000 x 6000 pixels in .*: scale the picture down"):
        encoder.preprocess(png(np.zeros((6000, 4000, 1), np.uint8), level=9))


def test_a_loaded_encoder_trains_and_draws_no_random_numbers(run: Path, exported: Path) -> None:
    torch.manual_seed(123)
    before = torch.get_rng_state()
    for place in (run, exported):
        with torch.inference_mode():  # an evaluation before the training loads the encoder
            encoder = stream_ssl.load_encoder(place)
        encoder.requires_grad_().train()
        encoder(images()).square().sum().backward()
        assert all(weight.grad is not None for weight in encoder.parameters())
    assert torch.equal(torch.get_rng_state(), before)


def test_a_model_that_trains_does_not_change_a_frozen_encoder(run: Path) -> None:
    encoder = stream_ssl.load_encoder(run)
    expected_BF = encoder(images())
    probe = torch.nn.Sequential(encoder, torch.nn.Linear(encoder.dim, 2)).train()
    probe(images(40))
    assert torch.equal(encoder(images()), expected_BF)


def test_torch_saves_and_loads_a_whole_encoder(run: Path) -> None:
    encoder, file = stream_ssl.load_encoder(run), io.BytesIO()
    torch.save(encoder, file)  # noqa: TID251 - as users save their modules
    file.seek(0)
    again = torch.load(file, weights_only=False)  # noqa: TID251 - these bytes are our own
    assert torch.equal(again(images()), encoder(images()))


@table("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("network", ["the shipped ResNet", "encoder.model"])
def test_a_loaded_encoder_computes_in_half_precision(
    network: str, run: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    if network == "encoder.model":
        run = tmp_path / "own"
        write_run(run, encoder={"model": "torch.nn.Flatten"})
    for of in ("features", "embeddings"):
        encoder = stream_ssl.load_encoder(run, of)  # type: ignore[arg-type]
        for part in ("forward", "view"):
            found = []
            for half in (torch.float32, dtype):
                torch.manual_seed(0)
                found.append(getattr(encoder.to(half), part)(images()))
            assert found[1].dtype == torch.float32
            assert (found[1] - found[0]).abs().max() < 0.05 * found[0].abs().max()


def test_the_default_dtype_and_device_of_torch_do_not_change_an_encoder(
    run: Path, exported: Path
) -> None:
    image_BCHW = images()
    for place in (run, exported):
        expected_BF = stream_ssl.load_encoder(place)(image_BCHW)
        torch.set_default_dtype(torch.bfloat16)
        try:
            with torch.device("meta"):  # as `set_default_device("cuda")`, on any machine
                encoder = stream_ssl.load_encoder(place)
            assert torch.equal(encoder(image_BCHW), expected_BF)
        finally:
            torch.set_default_dtype(torch.float32)
