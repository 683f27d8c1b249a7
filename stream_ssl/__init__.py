"""stream-ssl: learn an image encoder from an endless, uncurated stream."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from stream_ssl.app.encoder import Encoder

__version__ = "0.1.0"

__all__ = ["load_encoder"]


def load_encoder(
    place: Path | str,
    of: Literal["features", "embeddings"] | None = None,
    device: str = "cpu",
    trust_code: bool = False,
) -> Encoder:
    """A trained encoder: a `torch.nn.Module`, frozen and in evaluation mode.

    `encoder(images)` takes uint8 [B, C, H, W], 0 to 255, and gives float32 [B, F] on the encoder's
    device. `encoder.preprocess(image)` makes a path, bytes, a PIL image or a uint8 array such an
    image [C, H, W]. F, H = W and C are `encoder.dim`, `encoder.size` and `encoder.channels`.

    Args:
        place: a run's folder (its newest whole checkpoint), a checkpoint's, or one that
            `stream-ssl export` wrote.
        of: "features" of the backbone, or the "embeddings" behind the projector, unit rows, that
            the memory holds. None: features, or what the folder was exported as.
        device: "cpu", "cuda" or "cuda:1".
        trust_code: import whatever class the files name, which runs its code. Without it, only
            networks of stream_ssl, torch.nn, torchvision and timm are loaded.

    Raises:
        FileNotFoundError: there is no checkpoint.
        ValueError: it is damaged or of a newer version, it names a class that needs
            `trust_code`, or an argument is outside its range.
        ModuleNotFoundError: the extra `learner` is not installed.
    """
    from stream_ssl.app.failures import missing_extra

    try:
        from stream_ssl.app import encoder
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(missing_extra(error), name=error.name) from error
    return encoder.load_encoder(place, of, device, trust_code)
