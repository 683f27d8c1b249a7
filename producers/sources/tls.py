"""The TLS context of a source's connection."""

from __future__ import annotations

import ssl
from pathlib import Path


def tls_context(option: str, authorities: Path | None) -> ssl.SSLContext:
    """Return a TLS context for a client.

    Args:
        option: the option with the file, for the error.
        authorities: PEM file of trusted certificates; None: the system's.

    Raises:
        ValueError: the file cannot be used.
    """
    try:
        return ssl.create_default_context(cafile=authorities)
    except OSError as error:  # includes ssl.SSLError
        why = f"{option} {authorities}: {error.strerror}; give a PEM file of certificates"
        raise ValueError(why) from None
