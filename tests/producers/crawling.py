"""Helpers for tests of crawls: a small web on loopback, and crawls of it."""

import asyncio

import pytest
from source_files import encoded, pixels

from stream_ssl.producers.sources import Crawl
from stream_ssl.producers.sources.base import SourceError

PNG = [encoded(image) for image in pixels(12, 6, 5, 3)]


async def image(request):
    await request.send(PNG[int(request.path[1:].partition(".")[0]) % 12])


def robots(text, **headers):
    async def answer(request):
        await request.send(text.encode(), **headers)

    return answer


async def here(_host, _port):
    return ["127.0.0.1"]


def crawl_of(*lists, resolve=here, **settings):
    """Return a crawl of lists of URLs. Every host is on loopback."""
    settings = {"allow_networks": ["127.0.0.0/8"], "retries": 0} | settings
    source = Crawl([str(path) for path in lists], **settings)
    source.fetcher.backend.resolve = resolve
    return source


def crawl(served, folder, urls, resolve=here, **settings):
    """Return a crawl of URLs, in which PORT stands for the web's port."""
    path = folder / "urls.txt"
    path.write_text("".join(f"{url}\n".replace("PORT", str(served.port)) for url in urls))
    return crawl_of(path, resolve=resolve, **settings)


def good(count, host="good.test"):
    return [f"http://{host}:PORT/{n}.png" for n in range(count)]


def paths(samples):
    return [sample.id.rpartition("/")[2] for sample, _ in samples]


def gives_nothing(source):
    """Check that a pass without a readable sample is an error, as for every source."""
    with pytest.raises(SourceError, match="not one sample of a whole pass can be read"):
        next(source.samples())


async def slow(request):
    await request.raw(b"HTTP/1.1 200 X\r\ncontent-length: 1000\r\n\r\n\x89PNG")
    await asyncio.sleep(60)


def page(body=b"", **more):
    async def answer(request):
        await request.send(body, **more)

    return answer
