"""The ports of pages of several ranks."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from jsonargparse import Namespace

from stream_ssl.daemon import page


@pytest.mark.parametrize(
    ("role", "port", "found"),
    [("learner", 9109, 9112), ("learner", 0, 0), ("receiver", 9108, 9108)],
)
def test_the_pages_of_ranks_on_one_host_have_consecutive_ports(
    role: Any, port: int, found: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third pod of 8 ranks each begins at the same port as the first one."""
    monkeypatch.setenv("WORLD_SIZE", "24")
    monkeypatch.setenv("RANK", "19")
    monkeypatch.setenv("LOCAL_RANK", "3")
    ports: list[int] = []

    class Listens:
        address = "http://127.0.0.1"

        def __init__(self, *given: Any) -> None:
            ports.append(given[4])

        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(page, "Server", Listens)
    monkeypatch.setattr(page, "Background", lambda *_: ExitStack())
    monkeypatch.setattr(page, "Watch", lambda *_: SimpleNamespace(try_look=None))
    http = Namespace(public=False, **{role: f"127.0.0.1:{port}"})
    parts: Any = SimpleNamespace(registry=None, set_conditions=None)
    with ExitStack() as stack:
        settings = Namespace(http=http, run=tmp_path)
        page.serve_page(settings, role, parts, parts, parts, parts, stack, rank=19)
    assert ports == [found]
