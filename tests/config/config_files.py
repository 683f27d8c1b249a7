"""A small configuration as a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from harness import TINY


def config_file(folder: Path, text: str | bytes | None = None, **sections: Any) -> str:
    file = folder / "config.yaml"  # JSON is YAML
    settings = TINY | {"run": str(folder / "run")} | sections
    content = json.dumps(settings) if text is None else text
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(file)
