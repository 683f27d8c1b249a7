"""The cores that a process may use, and the threads that commands start for them."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from stream_ssl.app.commands import embed
from stream_ssl.process.threads import cores
from stream_ssl.trained.feature_file import Read


@pytest.fixture
def two_of_many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container that may use two cores of a machine with 64."""
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 4}, raising=False)


@pytest.mark.usefixtures("two_of_many_cores")
def test_cores_counts_only_the_cores_that_this_process_may_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert cores() == 2
    monkeypatch.delattr(os, "sched_getaffinity")  # macOS and Windows lack it
    assert cores() == 64


@pytest.mark.usefixtures("two_of_many_cores")
def test_embed_starts_a_thread_for_each_of_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []

    def pool(threads: int) -> ThreadPoolExecutor:
        started.append(threads)
        return ThreadPoolExecutor(threads)

    monkeypatch.setattr(embed, "ThreadPoolExecutor", pool)
    source: Any = SimpleNamespace(samples=lambda _: iter(()), name="empty")
    decoder: Any = None
    assert list(embed.Rows(source, decoder, Read())) == []
    assert started == [2]
