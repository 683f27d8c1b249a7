"""Settings of the tests of the application."""

from functools import cache

import pytest

from stream_ssl.app import config


@pytest.fixture
def parsers_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Build each parser of configurations once in a test with many configurations."""
    for name in ("receiver_parser", "learner_parser"):
        monkeypatch.setattr(config, name, cache(getattr(config, name)))
