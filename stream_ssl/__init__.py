"""stream-ssl: learn an image encoder from an endless, uncurated stream."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from stream_ssl.trained.encoder import Encoder

__version__ = "0.1.0"

__all__ = ["load_encoder"]

_checkout = Path(__file__).parents[1]
if not (Path(__path__[0]) / "memory").is_dir() and (_checkout / "memory").is_dir():
    # Source archives, and git where links are switched off, lack the links to these folders.
    __path__.append(str(_checkout))


def load_encoder(
    place: Path | str,
    of: Literal["features", "embeddings"] | None = None,
    device: str = "cpu",
    trust_code: bool = False,
) -> Encoder:
    """Load a trained encoder as a `torch.nn.Module`, frozen and in evaluation mode.

    `encoder(images)` accepts uint8 [B, C, H, W], 0 to 255, and returns float32 [B, F] on the
    encoder's device. `encoder.preprocess(image)` converts a path, bytes, a PIL image or a uint8
    array into a uint8 image [C, H, W]. `encoder.dim` is F, `encoder.size` is H and W, and
    `encoder.channels` is C.

    Args:
        place: the folder of a run, of a checkpoint, or of a `stream-ssl export`. For a run, the
            newest complete checkpoint is loaded.
        of: "features" returns the output of the backbone. "embeddings" returns the output of the
            projector, as unit rows, which is what the memory stores. None: "features", or for an
            exported folder the kind that was exported.
        device: "cpu", "cuda" or "cuda:1".
        trust_code: import any class that the files name, which runs the code of that class. If
            False, only networks of stream_ssl, torch.nn, torchvision and timm are loaded.

    Raises:
        FileNotFoundError: the folder has no checkpoint.
        PermissionError: this user may not read the folder.
        ValueError: the checkpoint is damaged or of a newer version, it names a class that needs
            `trust_code`, or an argument is outside its range.
        ModuleNotFoundError: the extra `learner` is not installed.
    """
    from stream_ssl.process.failures import missing_extra

    try:
        from stream_ssl.trained import encoder
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(missing_extra(error), name=error.name) from error
    return encoder.load_encoder(place, of, device, trust_code)
