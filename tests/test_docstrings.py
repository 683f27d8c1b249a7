"""Every example in a docstring runs and gives what the docstring says."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import torch
from table import table

ROOT = Path(__file__).parent.parent
FILES = sorted(
    path.relative_to(ROOT)
    for folder in ("stream_ssl", "memory", "producers")
    for path in (ROOT / folder).rglob("*.py")
    if "data" not in path.parts and "\n    >>> " in path.read_text()
)


@table("file", [str(file) for file in FILES])
def test_the_examples_in_the_docstrings_of_a_module_pass(file: str) -> None:
    parts = Path(file).with_suffix("").parts
    name = ".".join(parts if parts[0] == "stream_ssl" else ("stream_ssl", *parts))
    found = doctest.testmod(
        importlib.import_module(name.removesuffix(".__init__")), extraglobs={"torch": torch}
    )
    assert found.attempted > 0
    assert found.failed == 0


def test_more_than_20_modules_have_examples() -> None:
    assert len(FILES) > 20
