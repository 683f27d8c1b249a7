"""The hardware and software versions of a measurement."""

from __future__ import annotations

import platform
from importlib import metadata
from pathlib import Path

from stream_ssl.process.limits import main_memory
from stream_ssl.process.threads import cores

PACKAGES = ("torch", "numpy", "pyzmq", "faiss-cpu", "faiss-gpu", "lmdb", "pillow")


def hardware() -> dict[str, str]:
    """Return processor, number of usable cores, main memory and system."""
    gigabytes = main_memory()[0] / 1e9
    return {
        "processor": processor(),
        "cores": str(cores()),
        "memory": f"{gigabytes:.0f} GB",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }


def processor() -> str:
    """Return the processor's model name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not on Linux
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def versions() -> dict[str, str]:
    """Return the versions of Python, stream-ssl and the packages that affect the figures."""
    found = {"Python": platform.python_version()}
    for package in ("stream-ssl", *PACKAGES):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
