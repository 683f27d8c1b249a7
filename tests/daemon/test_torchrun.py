"""Variables of torchrun in the environment of a process that torchrun did not start."""

from __future__ import annotations

from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
from table import table

from stream_ssl.daemon import torchrun
from stream_ssl.daemon.ranks import meet
from stream_ssl.process.failures import Misconfigured

ON_CPU: Any = SimpleNamespace(
    learner=SimpleNamespace(device="cpu"), ranks=SimpleNamespace(timeout=1.0)
)


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    ):
        monkeypatch.delenv(name, raising=False)


@table("size", [None, "", "1"], ids=repr)
def test_a_process_without_a_group_ignores_the_variables_of_a_rank(
    size: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the lock of another rank, a second learner could train in the same run."""
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("LOCAL_RANK", "3")
    if size is not None:
        monkeypatch.setenv("WORLD_SIZE", size)
    assert (torchrun.role(), torchrun.rank(), torchrun.local_rank()) == ("learner", 0, 0)
    with ExitStack() as stack:
        assert meet(ON_CPU, stack).alone


def test_a_rank_of_a_group_reads_its_numbers_from_the_variables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    numbers = {"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    for name, value in numbers.items():
        monkeypatch.setenv(name, value)
    assert (torchrun.ranks(), torchrun.rank(), torchrun.role()) == (4, 3, "learner-3")
    assert (torchrun.local_rank(), torchrun.local_ranks()) == (1, 2)
    for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name)
    assert (torchrun.rank(), torchrun.role()) == (0, "learner")
    assert (torchrun.local_rank(), torchrun.local_ranks()) == (0, 0)


@table(
    "given, message",
    [
        ({"WORLD_SIZE": "2"}, r"WORLD_SIZE is '2', and RANK, MASTER_ADDR, MASTER_PORT are missing"),
        ({"WORLD_SIZE": "two"}, r"WORLD_SIZE is 'two', and must be a whole number: .*unset WORLD"),
        (
            {"WORLD_SIZE": "2", "RANK": "-1", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
            r"RANK is '-1', and must be a whole number",
        ),
    ],
    ids=str,
)
def test_the_error_names_inconsistent_variables_and_the_remedy(
    given: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with ExitStack() as stack, pytest.raises(Misconfigured, match=message) as caught:
        meet(ON_CPU, stack)
    assert "torchrun" in str(caught.value)
