"""Who may import whom: the architecture, held line by line."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

from table import table

ROOT = Path(__file__).parent.parent
OURS = ("memory", "producers", "stream_ssl")
PARTS = (
    *("wire", "ingest", "losses", "methods", "learning", "evaluation"),
    *("observe", "app", "background", "batch", "durable", "pictures", "rate_limited_logger"),
)
# But in memory, a package of its own.
ANYWHERE = {
    f"stream_ssl.{part}"
    for part in ("background", "batch", "durable", "pictures", "rate_limited_logger")
}

# What each part may import of ours, and which heavy libraries it may touch.
MAY = {
    "producers": {"producers", "stream_ssl.wire"},
    "memory": {"memory"},
    "stream_ssl.wire": {"stream_ssl.wire"},
    "stream_ssl.ingest": {"stream_ssl.ingest", "stream_ssl.wire"},
    "stream_ssl.losses": {"stream_ssl.losses"},
    "stream_ssl.methods": {"stream_ssl.methods", "stream_ssl.losses", "memory"},
    "stream_ssl.learning": {
        "stream_ssl.learning",
        "stream_ssl.methods",
        "stream_ssl.losses",
        "memory",
    },
    "stream_ssl.evaluation": {
        "stream_ssl.evaluation",
        "stream_ssl.ingest",
        "stream_ssl.wire",
        "memory",
    },
    "stream_ssl.observe": {
        "stream_ssl.observe",
        "stream_ssl.evaluation",
        "stream_ssl.learning",
        "stream_ssl.ingest",
        "stream_ssl.wire",
        "memory",
    },
    "stream_ssl.app": {f"stream_ssl.{part}" for part in PARTS} | {"memory", "producers"},
    "stream_ssl.background": set(),
    "stream_ssl.batch": set(),
    "stream_ssl.bounded_files": set(),
    "stream_ssl.durable": set(),
    "stream_ssl.pictures": set(),
    "stream_ssl.rate_limited_logger": set(),
}
LIBRARIES = {
    "zmq": {"producers", "stream_ssl.wire", "stream_ssl.ingest"},
    "lmdb": {"stream_ssl.ingest"},
    "prometheus_client": {"stream_ssl.observe", "stream_ssl.app"},
    "starlette": {"stream_ssl.observe"},
    "uvicorn": {"stream_ssl.observe"},
    "torch": {
        "memory",
        "stream_ssl.ingest",  # to scale pixels; the receiver loads none of it, see below
        "stream_ssl.losses",
        "stream_ssl.methods",
        "stream_ssl.learning",
        "stream_ssl.evaluation",
        "stream_ssl.observe",
        "stream_ssl.app",
    },
    "matplotlib": {"stream_ssl.evaluation", "stream_ssl.app"},
}


def part_of(module: str) -> str:
    pieces = module.split(".")
    if pieces[0] == "stream_ssl" and len(pieces) > 1 and pieces[1] in PARTS:
        return ".".join(pieces[:2])
    return pieces[0]


def imports_of(file: Path) -> set[str]:
    """Modules that a file names in import statements, at any depth, type checking included."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            names.add(node.module or "")
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


FILES = sorted(file for package in OURS for file in (ROOT / package).rglob("*.py"))


def wrong_imports(file: Path) -> Iterator[str]:
    """What a file imports and may not, a line each."""
    path = file.relative_to(ROOT)
    here = part_of(".".join(path.with_suffix("").parts))
    for name in sorted(imports_of(file)):
        part, library = part_of(name), name.split(".")[0]
        may = MAY.get(here, set()) | (set() if here == "memory" else ANYWHERE)
        if part in MAY and here in MAY and part not in may:
            yield f"{path}: {here} may not import {name}"
        if library in LIBRARIES and here not in LIBRARIES[library]:
            yield f"{path}: {here} may not import {library}"


def test_imports_go_one_way() -> None:
    assert len(FILES) > 100
    assert [line for file in FILES for line in wrong_imports(file)] == []


def test_nothing_else_is_installed() -> None:
    built = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    assert sorted(built["targets"]["wheel"]["packages"]) == sorted(OURS)


def test_faiss_is_imported_in_one_file() -> None:
    users = [
        file.relative_to(ROOT)
        for file in FILES
        if any(name.split(".")[0] == "faiss" for name in imports_of(file))
    ]
    assert len(users) <= 1, f"faiss is imported in {users}"


PROBE = """
import sys
import {module}
print(" ".join(name for name in {heavy!r} if name in sys.modules))
"""


@table(
    ("module", "heavy"),
    [
        ("stream_ssl.app.cli", ("torch", "numpy", "zmq", "jsonargparse", "rich")),
        ("stream_ssl.ingest.receiver", ("torch", "torchvision", "matplotlib", "PIL")),
        ("producers", ("torch", "PIL", "lmdb", "prometheus_client", "jsonargparse")),
        ("memory", ("torchvision", "faiss", "zmq", "lmdb", "prometheus_client", "river")),
    ],
)
def test_what_an_import_does_not_load(module: str, heavy: tuple[str, ...]) -> None:
    probe = PROBE.format(module=module, heavy=heavy)
    done = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.strip() == ""
