"""Tests of the architecture: which part may import which other part or library."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from table import table

ROOT = Path(__file__).parent.parent
LINKED = ("memory", "producers")
"""Folders at the top of the repository that `stream_ssl/` links to."""
SHARED = {
    *("background", "batch", "bit_depth", "decode_cost", "durable", "originals", "pictures"),
    *("rate_limited_logger", "tensor_file"),
}
"""Small modules that every part except memory may import."""

# The other parts that each part of stream_ssl may import ...
MAY: dict[str, set[str]] = {
    **{part: set() for part in (*SHARED, "bounded_files", "renamed")},
    "wire": set(),
    "conformance": {"wire"},
    "producers": {"wire"},
    "receiver": {"wire", "journal"},
    "journal": {"wire"},
    "feed": {"wire", "journal"},
    "memory": set(),
    "losses": set(),
    "methods": {"losses", "memory"},
    "encoder": {"methods"},
    "learning": {"memory", "losses", "methods", "encoder", "feed"},
    "evaluation": {"feed", "wire", "memory", "producers"},
    "curation": {"memory", "encoder", "feed", "producers", "wire"},
    "observe": {"evaluation", "learning", "feed", "receiver", "journal", "wire", "memory"},
    "process": {"learning", "producers"},  # types of arguments
    "buckets": {"process", "learning", "observe"},
}
MAY["config"] = MAY.keys() - {"curation", "conformance"}
MAY["trained"] = MAY["config"] - {"buckets", "losses", "receiver"} | {"config"}
MAY["daemon"] = MAY["config"] | {"config", "trained"}
MAY["demo"] = MAY["daemon"] | {"daemon"}
# ... and the parts that may import each heavy library.
LIBRARIES = {
    "jinja2": {"curation", "observe", "demo", "trained"},
    "zmq": {"producers", "wire", "receiver", "conformance"},
    "lmdb": {"journal"},
    "prometheus_client": {"observe", "daemon"},
    "starlette": {"observe"},
    "uvicorn": {"observe"},
    "torch": {
        *("memory", "losses", "methods", "encoder", "learning", "evaluation", "observe"),
        *("app", "config", "curation", "daemon", "demo", "trained"),
        *("feed", "tensor_file"),  # feed scales pixels
    },
    "matplotlib": {"evaluation", "demo"},
}


def part_of(module: str) -> str | None:
    """Return the part of stream_ssl that contains a module."""
    first, _, rest = module.partition(".")
    part = rest.partition(".")[0]
    return part if first == "stream_ssl" and (part in MAY or part == "app") else None


@cache
def imports_of(file: Path) -> set[str]:
    """Return the modules that a file imports, at any depth, including those for type checking."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            names.add(node.module or "")
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


FILES = sorted(
    file
    for package in (*LINKED, "stream_ssl")
    for file in (ROOT / package).rglob("*.py")
    if "__pycache__" not in file.parts
)


def module_of(file: Path) -> str:
    """Return the module name of a file, under the one name that is installed."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts if parts[0] == "stream_ssl" else ("stream_ssl", *parts))


def wrong_imports(file: Path) -> Iterator[str]:
    """Yield one line for each import that the file may not have."""
    path, here = file.relative_to(ROOT), part_of(module_of(file))
    for name in sorted(imports_of(file)):
        part, library = part_of(name), name.partition(".")[0]
        if library in LINKED:
            yield f"{path}: {name} is installed as stream_ssl.{name} alone"
        if here in MAY and part not in {None, here}:
            shared = SHARED | {"bounded_files"} if here != "memory" else set()
            if part not in MAY[here] | shared:
                yield f"{path}: {here} may not import {name}"
        if library in LIBRARIES and here not in LIBRARIES[library]:
            yield f"{path}: {here} may not import {library}"


def test_each_part_imports_only_the_parts_and_libraries_that_it_may() -> None:
    assert len(FILES) > 100
    assert [line for file in FILES for line in wrong_imports(file)] == []


def test_the_wheel_installs_only_the_name_stream_ssl() -> None:
    built = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    wheel = built["targets"]["wheel"]
    assert wheel["packages"] == ["stream_ssl"]
    for name in LINKED:
        assert wheel["force-include"][name] == f"stream_ssl/{name}"
        assert (ROOT / "stream_ssl" / name).resolve() == ROOT / name


def test_stream_ssl_replaces_no_module_named_memory_or_producers(tmp_path: Path) -> None:
    for name in LINKED:
        (tmp_path / f"{name}.py").write_text(f"MINE = {name!r}\n")
    code = "import memory, producers, stream_ssl.memory as ours, stream_ssl.producers; "
    code += "print(memory.MINE, producers.MINE, ours.WorkingMemory.__module__)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "memory producers stream_ssl.memory.memory\n", done.stderr


def test_faiss_is_imported_in_one_file() -> None:
    users = [
        file.relative_to(ROOT)
        for file in FILES
        if any(name.split(".")[0] == "faiss" for name in imports_of(file))
    ]
    assert len(users) <= 1, f"faiss is imported in {users}"


PROBE = """
import os, sys
import {first}
for module, heavy in {cases!r}:
    if (process := os.fork()) == 0:
        __import__(module)
        print(module, *(name for name in heavy if name in sys.modules), flush=True)
        os._exit(0)
    os.waitpid(process, 0)
"""
LIGHT = {
    "stream_ssl.app.cli": ("torch", "numpy", "zmq", "jsonargparse", "rich"),
    "stream_ssl.receiver.receiver": ("torch", "torchvision", "matplotlib", "PIL"),
    "stream_ssl.producers": ("torch", "PIL", "lmdb", "prometheus_client", "jsonargparse"),
}
WITH_TORCH = {
    "stream_ssl.memory": ("torchvision", "faiss", "zmq", "lmdb", "prometheus_client", "river"),
    "stream_ssl.daemon.learn": (
        *("torchvision", "torch._dynamo", "sympy", "river", "sklearn", "scipy.optimize"),
    ),
    "stream_ssl.trained.hub": ("torchvision", "torch._dynamo", "transformers"),
}


@table(("first", "heavy"), [("sys", LIGHT), ("torch", WITH_TORCH)])
def test_a_module_does_not_load_heavy_libraries(
    first: str, heavy: dict[str, tuple[str, ...]]
) -> None:
    """The modules are imported one by one, in forks of a process that has loaded only `first`."""
    probe = PROBE.format(first=first, cases=list(heavy.items()))
    done = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.splitlines() == list(heavy), done.stderr


def test_a_check_of_a_configuration_does_not_load_the_compiler(tmp_path: Path) -> None:
    """An optimiser loads torch._dynamo, which doubles the time of a start."""
    arguments = ["check", str(ROOT / "deploy/configs/laptop.yaml"), "--run", str(tmp_path)]
    probe = (
        "import sys; from stream_ssl.app.cli import main; "
        f"assert main({arguments}) == 0; assert 'torch' in sys.modules; "
        "print('torch._dynamo' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.splitlines()[-1] == "False"


@table(
    ("arguments", "message"),
    [
        (["export", "run"], "nothing to export"),
        (["search", "run", "photo.jpg", "--k", "0"], "--k 0: must be at least 1"),
    ],
)
def test_a_command_refuses_a_wrong_option_before_it_loads_torch(
    arguments: list[str], message: str
) -> None:
    probe = (
        "import sys; from stream_ssl.app.cli import main; "
        f"assert main({arguments}) == 2; print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.strip() == "False"
    assert message in done.stderr
