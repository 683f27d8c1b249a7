"""A small configuration as a file, and the exit status of a command that refuses one."""

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


def refused(main: Any, *arguments: str) -> int:
    """Return the exit status of a command that returns or exits."""
    try:
        return int(main(arguments))
    except SystemExit as end:  # argparse's own way to refuse
        return int(end.code or 0)
