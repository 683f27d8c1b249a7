"""Compares send() of the Python client with a minimal client in C (client.c), on one receiver.

Both clients in turn send 32 x 32 x 3 raw samples in packets of 64, as fast as they can. The
receiver calls fsync before each acknowledgement. The C client is compiled here, with the headers of
libzmq and zlib. Without a compiler or a header, its row gives the reason.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.ingest import receiver, small, throughput
from stream_ssl.producers import Producer

SECONDS = 3.0
ROUNDS = 5
PACKET_SAMPLES = 64
MIN_SHARE = 0.8  # share of the C client's rate
SOURCE = Path(__file__).with_name("client.c")
WHAT = "32x32x3 raw, packets of 64"


def run(seconds: float = SECONDS, rounds: int = ROUNDS) -> list[dict[str, Any]]:
    """Return a row per client, with medians over rounds in which the clients take turns."""
    with tempfile.TemporaryDirectory(prefix="stream-ssl-") as name:
        program, why = compiled(Path(name))
        pairs: dict[str, list[tuple[float, float]]] = {"C": [], "Python, send()": []}
        with receiver(Path(name), False) as (endpoint, _):
            for number in range(rounds):
                if program is not None:
                    pairs["C"].append(of_c(program, endpoint, f"c-{number}", seconds))
                pairs["Python, send()"].append(of_python(endpoint, f"py-{number}", seconds))
    if program is None:
        pairs.pop("C")
    rates = {client: median(rate for rate, _ in of) for client, of in pairs.items()}
    rows: list[dict[str, Any]] = [
        {
            "client": client,
            "samples": WHAT,
            "samples/s": round(rates[client]),
            "CPU us a sample": round(1e6 * median(cpu for _, cpu in of), 2),
        }
        for client, of in pairs.items()
    ]
    if program is None:
        return [{"client": "C", "samples": f"not compiled: {why}"}, *rows]
    share = median(p[0] / c[0] for p, c in zip(pairs["Python, send()"], pairs["C"], strict=True))
    target = {"target": f">= {MIN_SHARE:g} of C's rate", "met": share >= MIN_SHARE}
    rows[-1] |= {"of C's rate": round(share, 2), **target}
    return rows


def compiled(folder: Path) -> tuple[Path | None, str]:
    """Compile the C client; return its path, or None and the reason."""
    compiler = shutil.which("cc")
    if compiler is None:
        return None, "no cc here"
    program = folder / "client"
    libraries = ["-lzmq", "-l:libz.so.1"]
    command = [compiler, "-O2", "-o", str(program), str(SOURCE), *libraries]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = done.stderr.splitlines()[0].replace(f"{SOURCE.parent}/", "")
        return None, f"{reason} (it needs libzmq3-dev and zlib1g)"
    return program, ""


def of_c(program: Path, endpoint: str, name: str, seconds: float) -> tuple[float, float]:
    """Return the acknowledged samples per second and the processor seconds per sample."""
    command = [str(program), endpoint, name, str(seconds)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.strip())
    rate, cpu = done.stdout.split()
    return float(rate), float(cpu)


def of_python(endpoint: str, name: str, seconds: float) -> tuple[float, float]:
    """Return the same numbers for Python; the processor time includes the warm-up."""
    with Producer(endpoint, name, packet_samples=PACKET_SAMPLES) as producer:
        producer.connect()
        samples, cpu = small(), time.process_time()
        rate, _ = throughput(producer, samples, seconds)
        cpu = time.process_time() - cpu
        return rate, cpu / producer.stats.acked.samples
