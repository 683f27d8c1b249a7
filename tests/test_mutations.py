"""Tests that every mutation of mutations.yaml still applies: its line and its tests exist."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import yaml

TESTS = Path(__file__).parent
ROOT = TESTS.parent


def test_every_mutation_applies() -> None:
    mutations = yaml.safe_load((TESTS / "mutations.yaml").read_text())
    assert len(mutations) > 50
    for mutation in mutations:
        where = f"{mutation['file']}: {mutation['line'].strip()}"
        source = (ROOT / mutation["file"]).read_text()
        assert source.count(mutation["line"] + "\n") == 1, f"{where}: must stand there once"
        assert mutation["becomes"] != mutation["line"], where
        ast.parse(source.replace(mutation["line"] + "\n", mutation["becomes"] + "\n"))
        named = shlex.split(mutation["tests"].partition(" -k ")[0])
        for test in named:
            file, _, name = test.partition("::")
            assert (ROOT / file).exists(), f"{where}: {file} is gone"
            wanted = name.rpartition("::")[2].partition("[")[0]
            assert f"def {wanted}(" in (ROOT / file).read_text() if wanted else True, test


def test_every_word_that_selects_tests_of_a_mutation_occurs_in_them() -> None:
    """A renamed test would otherwise leave a `-k` that selects no test."""
    for mutation in yaml.safe_load((TESTS / "mutations.yaml").read_text()):
        named, _, selection = mutation["tests"].partition(" -k ")
        text = ""
        for test in shlex.split(named):
            path = ROOT / test.partition("::")[0]
            helpers = [p for p in path.parent.glob("*.py") if not p.name.startswith("test_")]
            for file in path.rglob("*.py") if path.is_dir() else [path, *helpers]:
                text += file.name + file.read_text()
        for word in set(re.findall(r"\w+", selection)) - {"and", "or", "not"}:
            assert word in text, f"{mutation['file']}: -k {word} selects no test of {named}"
