"""From what a user passes to what travels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from producers._connection import Curve
from stream_ssl.wire import Keys, Sample
from stream_ssl.wire.address import require_loopback
from stream_ssl.wire.keys import public_key


def as_sample(
    image: NDArray[np.uint8] | Sample | bytes,
    name: str | None,
    label: int | None,
    fields: dict[str, Any],
) -> Sample:
    """A sample whose payload nobody can overwrite any more.

    Raises:
        ValueError: the sample breaks a rule, or bytes come without their codec.
    """
    if isinstance(image, Sample):
        if isinstance(image.data, bytes):
            return image
        return Sample(**{**_fields(image), "data": bytes(image.data)})
    assert name is not None
    if isinstance(image, np.ndarray):
        return Sample.from_array(image, name, label=label, **fields)
    if "codec" not in fields:
        raise ValueError(f'sample {name!r}: say what the bytes are, as codec="jpeg"')
    return Sample(name, bytes(image), label=label, **fields)


def curve_of(
    address: str, keys: Keys | str | Path | None, server_key: Keys | str | Path | None
) -> Curve | None:
    """What a CURVE connection needs; None: plain text, which only loopback addresses allow.

    Raises:
        ValueError: plain text beyond loopback, one of the two missing, or a bad key file.
    """
    if keys is None and server_key is None:
        require_loopback(address, "pass keys= and server_key=, made with: stream-ssl keys NAME")
        return None
    if keys is None or server_key is None:
        raise ValueError("keys and server_key belong together: pass both, or neither on loopback")
    pair = keys if isinstance(keys, Keys) else Keys.load(keys)
    if pair.secret is None:
        raise ValueError(
            f"keys {pair.name!r}: only the public half; pass {pair.name}.secret.json, "
            f"made with: stream-ssl keys {pair.name}"
        )
    return Curve(pair.public, pair.secret, public_key(server_key))


def _fields(sample: Sample) -> dict[str, Any]:
    return {name: getattr(sample, name) for name in Sample.__dataclass_fields__}
