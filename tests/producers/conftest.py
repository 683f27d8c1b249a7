"""Settings of the tests of producers."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from client_peer import Peer
from crawling import image, robots
from web import Web, web

from stream_ssl.producers._spool import Spool


@pytest.fixture(scope="session", autouse=True)
def trust() -> Iterator[None]:
    """Read the certificates of public authorities once: this takes longer than most crawls."""
    import httpcore

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(httpcore, "default_ssl_context", cache(httpcore.default_ssl_context))
        yield


@pytest.fixture
def peer() -> Iterator[Peer]:
    """A receiver that the test controls."""
    with Peer() as peer:
        yield peer


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    """An empty spool of producer "a"."""
    return Spool(tmp_path / "spool", "a", 1 << 20)


@pytest.fixture
def served() -> Iterator[Web]:
    """A web on loopback that serves images and allows crawls."""
    with web() as running:
        running.answers["good.test/*"] = image
        running.answers["/robots.txt"] = robots("")
        yield running
