"""No class and no constructor grows beyond what a reader can hold."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
MOST_LINES, MOST_ARGUMENTS = 300, 10
WIDE = {"Producer", "WorkingMemory"}
"""Classes whose constructors are the whole of what their users set."""


@cache
def classes() -> list[tuple[str, ast.ClassDef]]:
    return [
        (f"{path.relative_to(ROOT)}: {node.name}", node)
        for folder in ("stream_ssl", "memory", "producers", "benchmarks")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    ]


def arguments(node: ast.ClassDef) -> int:
    """Return the number of arguments of a class's constructor, without self."""
    made = (one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__")
    return max((len(one.args.args) + len(one.args.kwonlyargs) - 1 for one in made), default=0)


def test_no_class_has_more_than_300_lines() -> None:
    found = {name: node.end_lineno - node.lineno + 1 for name, node in classes() if node.end_lineno}
    assert len(found) > 500
    assert {name: lines for name, lines in found.items() if lines > MOST_LINES} == {}


def test_no_constructor_has_more_than_10_arguments() -> None:
    found = {name: arguments(node) for name, node in classes() if node.name not in WIDE}
    assert max(found.values()) > 5
    assert {name: count for name, count in found.items() if count > MOST_ARGUMENTS} == {}
