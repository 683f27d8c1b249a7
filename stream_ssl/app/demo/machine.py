"""What a measurement was made on: hardware and versions."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

PACKAGES = ("torch", "numpy", "pyzmq", "faiss-cpu", "faiss-gpu", "kornia", "lmdb", "pillow")


def hardware() -> dict[str, str]:
    """Processor, cores that this process may use, memory, system."""
    gigabytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    return {
        "processor": processor(),
        "cores": str(cores()),
        "memory": f"{gigabytes:.0f} GB",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }


def processor() -> str:
    """The processor's model name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # no Linux
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def versions() -> dict[str, str]:
    """Versions of Python, of stream-ssl and of what the figures depend on."""
    found = {"Python": platform.python_version()}
    for package in ("stream-ssl", *PACKAGES):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
