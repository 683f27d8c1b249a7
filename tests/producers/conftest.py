"""Settings of the tests of producers."""

from collections.abc import Iterator
from functools import cache

import pytest


@pytest.fixture(scope="session", autouse=True)
def trust() -> Iterator[None]:
    """Read the certificates of public authorities once: this takes longer than most crawls."""
    import httpcore

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(httpcore, "default_ssl_context", cache(httpcore.default_ssl_context))
        yield
