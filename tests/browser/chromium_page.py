"""A run whose page a Chromium visits."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

from page_world import Feed, receiving, serving
from test_observe_picture_search import decode, encode

from stream_ssl.memory.descriptors import Thumbnail
from stream_ssl.observe.http_access import Token
from stream_ssl.observe.page.api import Sources
from stream_ssl.observe.page.held_out import HeldOutView
from stream_ssl.observe.page.picture_search import PictureSearch
from stream_ssl.receiver.sessions import ProducerTable

SECRET = "0123456789abcdef-secret"
HOSTILE = '<img src=x onerror="document.title=1">\u202ecam'


class Visit:
    """A tab that collects what must not happen: errors, blocked content, requests elsewhere."""

    def __init__(self, browser: Any, url: str, **options: Any) -> None:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        context.set_default_timeout(30_000)
        self.page, self.wrong, self._url = context.new_page(), [], url
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("console", self._console)
        self.page.on("request", self._request)
        self.page.goto(url)

    def _console(self, message: Any) -> None:
        if message.type == "error" and "status of" not in message.text:
            self.wrong.append(message.text)

    def _request(self, request: Any) -> None:
        here = urlsplit(self._url)
        if not request.url.startswith((f"{here.scheme}://{here.netloc}/", "blob:")):
            self.wrong.append(f"asked for {request.url}")

    def picture(self, name: str) -> None:
        if folder := os.environ.get("STREAM_SSL_SCREENSHOTS"):
            self.page.screenshot(path=str(Path(folder) / f"{name}.png"))

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None:
        self.page.context.close()
        assert self.wrong == []


@contextmanager
def run(
    slots: int = 300,
    producers: int = 3,
    token: Token | None = None,
    labelled: bool = True,
    searches: bool = False,
    held_out: HeldOutView | None = None,
    originals: Mapping[str, bytes] | None = None,
) -> Iterator[tuple[str, Any, Any]]:
    """Both processes of a run: the learner's address, the two servers."""
    table, addresses = ProducerTable(limit=4096), {}
    for number in range(producers):
        table.opened(f"camera-{number:04d}", None, "agent 1", 1000.0 - number)
    table.opened(HOSTILE, "key", "agent", 2000.0).reject("oversize", 3)
    feed = Feed(slots, labelled, HOSTILE, Thumbnail(side=4))
    feed.original = next(iter(originals or {}), None)
    mine = Sources(run=Path("runs/parked"), peer=addresses.get, token=token)
    theirs = Sources(run=mine.run, peer=addresses.get, token=token, held_out=held_out)
    theirs.originals = None if originals is None else SimpleNamespace(read=originals.__getitem__)
    with receiving(table, sources=mine) as receiver, serving(feed, sources=theirs) as (learner, v):
        assert v is not None
        if searches:
            v.search = PictureSearch(feed.memory, decode, encode)
        while len(feed.memory) < slots or feed.number < slots + 64:
            v.slots.consume(feed.step())
        addresses |= {"receiver": receiver.address, "learner": learner.address}
        yield learner.address + "/", learner, receiver


def until(page: Any, expression: str, seconds: float = 30.0) -> None:
    """Wait for a condition. The page's policy forbids Playwright's own way to wait for one."""
    deadline = time.monotonic() + seconds
    while not page.evaluate(expression):
        assert time.monotonic() < deadline, f"not in {seconds:g} s: {expression}"
        page.wait_for_timeout(50)
