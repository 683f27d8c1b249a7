"""A folder on another disk, in place of one that is mounted."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PLACES = ("/dev/shm", "/tmp", "/var/tmp", "/run", str(Path.home()))


@contextmanager
def on_another_disk(than: Path) -> Iterator[Path]:
    """Make a folder for the time of a test, on another file system than that of `than`."""
    device = than.stat().st_dev
    place = next(
        place for place in map(Path, PLACES) if place.is_dir() and place.stat().st_dev != device
    )
    with tempfile.TemporaryDirectory(dir=place) as folder:
        yield Path(folder)
