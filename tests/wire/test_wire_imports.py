"""Robots need no learner: the producer's side loads with pyzmq, numpy and msgpack alone."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import importlib.abc, sys

FORBIDDEN = {
    "torch", "torchvision", "faiss", "PIL", "lmdb", "prometheus_client", "jsonargparse",
    "river", "starlette", "uvicorn", "rich", "safetensors", "matplotlib", "yaml",
}

class Forbid(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in FORBIDDEN:
            raise ModuleNotFoundError(name, name=name)

sys.meta_path.insert(0, Forbid())
import stream_ssl.producers, stream_ssl.wire
loaded = {name.partition(".")[0] for name in sys.modules}
assert not loaded & FORBIDDEN, loaded & FORBIDDEN
assert not any(name.startswith("stream_ssl.memory") for name in sys.modules)
print("fine")
"""


def test_producers_and_wire_import_no_library_of_the_learner() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=60)
    assert done.stdout == "fine\n", done.stderr
