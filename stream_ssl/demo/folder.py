"""The files of the demo's folder, and its preparation for another run."""

from __future__ import annotations

import shutil
from pathlib import Path

from stream_ssl.process.failures import Failure, check_writable

CONFIG = "demo.yaml"
QUEUE_CONFIG = "queue.yaml"
QUEUE = "queue"
STREAM = "stream.json"
IMAGES = "images"
HISTORY = "history.jsonl"
SUMMARY = "summary.json"
REPORT = "report.html"
MARK = ".stream-ssl-demo"
OURS = (
    *(CONFIG, QUEUE_CONFIG, QUEUE, STREAM, IMAGES, HISTORY, SUMMARY, REPORT, "logs"),
    *("journal", "checkpoints", "quarantine", "cursor.json", "endpoints.json", "ranks.json"),
    "held_out.json",
)


def claim(out: Path) -> None:
    """Create the folder, or accept one that an earlier demo created.

    Raises:
        Failure: the folder holds other files.
        ValueError: the folder cannot be written.
    """
    check_writable(out, "folder", "give another folder with --out")
    if out.is_dir() and any(out.iterdir()) and not (out / MARK).exists():
        raise Failure(
            f"{out} contains files that no demo has written, and the demo would replace "
            "them; give an empty or a new folder with --out (with make: DEMO_OUT=...)"
        )
    out.mkdir(parents=True, exist_ok=True)
    (out / MARK).touch()


def clear(out: Path) -> None:
    """Remove the files of an earlier demo, and nothing else."""
    for name in OURS:
        path = out / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
