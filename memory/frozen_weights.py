"""The weights of a frozen encoder: read from a file, and compared by a hash."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from torch import nn


def load_weights(encoder: nn.Module, path: Path) -> None:
    """Load a safetensors file into a module.

    Raises:
        ImportError: safetensors is not installed.
        ValueError: the file does not exist, is not a safetensors file, or belongs to another
            module.
    """
    try:
        from safetensors.torch import load_file
    except ImportError as error:
        raise ImportError(
            "weights are read with safetensors, which is not installed: pip install safetensors"
        ) from error
    try:
        if not path.is_file():  # safetensors would block on a pipe
            raise ValueError("there is no such file, or it is no regular one")
        encoder.load_state_dict(load_file(path), strict=True)
    except Exception as error:
        raise ValueError(
            f"weights {path} do not fit {type(encoder).__name__}: {error}. They must be a "
            "safetensors file of this module's state_dict"
        ) from error


def check_finite(encoder: nn.Module) -> None:
    """Raise ValueError if a weight is NaN or infinite, with which all pictures look alike."""
    for name, weight in encoder.state_dict().items():
        if not bool(torch.isfinite(weight).all()):
            raise ValueError(
                f"the weights {name} of {type(encoder).__name__} are not finite, because their "
                "training has diverged: give an encoder with other weights"
            )


def fingerprint_of(module: nn.Module) -> str:
    """Return 64 bits of the BLAKE2b hash of all tensors of a module, in order of name."""
    digest = hashlib.blake2b(digest_size=8)
    for name, value in sorted(module.state_dict().items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
