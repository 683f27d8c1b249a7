"""Methods: how views become a loss. One file and one line each."""

from __future__ import annotations

from stream_ssl.methods.base import Method, MethodOutput
from stream_ssl.methods.moco import MoCo

# One line per method; the contract tests run over this table.
METHODS: dict[str, type[Method]] = {
    "moco": MoCo,
}

__all__ = ["METHODS", "Method", "MethodOutput", "MoCo"]
