"""Tests that every mutation of mutations.yaml still applies: its line and its tests exist."""

from __future__ import annotations

import ast
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
