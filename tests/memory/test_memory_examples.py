"""The examples in the docstrings run."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import memory

MODULES = [info.name for info in pkgutil.walk_packages(memory.__path__, "memory.")]


def test_the_modules_are_found() -> None:
    assert "memory.eviction.most_duplicated" in MODULES


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name: str) -> None:
    module = importlib.import_module(name)
    import torch

    result = doctest.testmod(module, extraglobs={"torch": torch})
    assert result.failed == 0
