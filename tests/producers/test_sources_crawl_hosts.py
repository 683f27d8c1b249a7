"""Crawls of hosts with rules, of hosts that fail, and of hostile hosts."""

import asyncio
import itertools
import math
import time

import httpx
import pytest
from crawling import PNG, crawl, gives_nothing, good, image, page, paths, robots, slow
from table import table

from stream_ssl.producers.sources.web import fetch, outage
from stream_ssl.producers.sources.web.skip import Skip


def test_a_crawl_obeys_robots_txt_unless_robots_is_false(served, tmp_path, caplog):
    served.answers["/robots.txt"] = robots("User-agent: stream-ssl\nDisallow: /3\n")
    served.answers["down.test/robots.txt"] = robots("", status=500)
    source = crawl(served, tmp_path, [*good(5), *good(2, "down.test")])
    assert sorted(paths(source.samples())) == ["0.png", "1.png", "2.png", "4.png"]
    assert source.skipped.by_reason == {"robots.txt": 1, "no robots.txt": 2}
    assert served.asked.count("down.test/robots.txt") == 1
    source = crawl(served, tmp_path, good(5), robots=False)
    assert len(paths(source.samples())) == 5


PART = "User-agent: {}\nDisallow: /1\n\nUser-agent: *\nDisallow: /2\n"


@table(
    ("agent", "name", "left_out"),
    [
        ("mine (+https://images.example/bot)", "mine", "1.png"),
        ("mine (+https://images.example/bot)", "images", "2.png"),
        ("mine (+https://images.example/bot)", "bot", "2.png"),
        ("mine/2.1", "Mine", "1.png"),
        ("mine", "Mine/1.0 # old", "1.png"),
        ("mine/2 (+https://me.example)", "mine/1.0 (a crawler)", "1.png"),
        ("mine-too/2", "mine2", "2.png"),
        ("Mozilla/5.0 (compatible; Mine/2; +https://me.example)", "mine", "1.png"),
        ("Mozilla/5.0 (X11; Linux)", "mozilla", "1.png"),
    ],
)
def test_the_agents_name_selects_its_section_of_robots_txt(served, tmp_path, agent, name, left_out):
    served.answers["/robots.txt"] = robots(PART.format(name))
    source = crawl(served, tmp_path, good(3), agent=agent)
    assert sorted(paths(source.samples())) == sorted({"0.png", "1.png", "2.png"} - {left_out})
    assert source.skipped.by_reason == {"robots.txt": 1}


def test_a_crawl_keeps_the_crawl_delay_and_leaves_out_hosts_with_a_huge_one(served, tmp_path):
    served.answers["/robots.txt"] = robots("User-agent: *\nCrawl-delay: 0.1\n")
    times = []

    async def timed(request):
        times.append(time.monotonic())
        await image(request)

    served.answers["good.test/*"] = timed
    assert len(paths(crawl(served, tmp_path, good(4)).samples())) == 4
    assert min(b - a for a, b in itertools.pairwise(times)) > 0.05
    assert times[-1] - times[0] > 0.2  # 0.3, less if the first request was served late
    served.answers["/robots.txt"] = robots("User-agent: *\nCrawl-delay: 9999\n")
    source = crawl(served, tmp_path, good(2))
    gives_nothing(source)
    assert source.skipped.by_reason == {"busy": 2}


@table(
    ("tag", "sent"),
    [
        ("noai", 0),
        ("noindex, noimageai", 0),
        ("stream-ssl: noai", 0),
        ("other: noai", 1),
        ("other: noindex, noai", 1),
        ("noindex", 1),
        ("max-snippet:-1, max-image-preview:large, noai", 0),
        ("unavailable_after: Tuesday, 25 Jun 2030 15:00:00 GMT, noai", 0),
        ("noindex, stream-ssl: max-snippet: 20, noimageai", 0),
        ("other: max-snippet: 20, noai", 1),
        ("other: noai, stream-ssl: noindex", 1),
    ],
)
def test_a_crawl_respects_opt_outs_in_the_x_robots_tag_header(served, tmp_path, tag, sent):
    async def tagged(request):
        await request.send(PNG[0], X_Robots_Tag=tag)

    served.answers["good.test/*"] = tagged
    source = crawl(served, tmp_path, good(1))
    if sent:
        assert paths(source.samples()) == ["0.png"]
    else:
        gives_nothing(source)
    assert source.skipped.by_reason == ({} if sent else {"X-Robots-Tag": 1})


@pytest.mark.parametrize("status", [429, 503])
def test_a_crawl_retries_after_the_pause_that_a_busy_host_names(served, tmp_path, status):
    async def busy(request):
        first = served.asked.count("good.test" + request.path) == 1
        if request.path == "/1.png" and first:
            await request.send(status=status, Retry_After="0.05")
        elif request.path == "/2.png":
            await request.send(status=status, Retry_After="9999")
        else:
            await image(request)

    served.answers["good.test/*"] = busy
    source = crawl(served, tmp_path, good(4), retries=1)
    assert sorted(paths(source.samples())) == ["0.png", "1.png", "3.png"]
    assert source.skipped.by_reason == {"busy": 1}


def test_a_retry_after_date_is_compared_with_the_clock_of_the_host(served, tmp_path):
    """This machine's clock may be wrong by years."""

    async def busy(request):
        if request.path == "/1.png" and served.asked.count("good.test/1.png") == 1:
            dates = [f"Thu, 01 Jan 1998 00:00:0{second} GMT" for second in (1, 2)]
            await request.send(status=503, Date=dates[0], Retry_After=dates[1])
        else:
            await image(request)

    served.answers["good.test/*"] = busy
    began = time.monotonic()
    source = crawl(served, tmp_path, good(2), retries=1, max_wait=2.0)
    assert sorted(paths(source.samples())) == ["0.png", "1.png"]
    assert time.monotonic() - began >= 1.0


def test_all_rows_of_a_dead_host_share_the_attempts_to_read_robots_txt(
    served, tmp_path, monkeypatch
):
    monkeypatch.setattr(fetch, "pause", lambda _attempt: 0.01)
    monkeypatch.setattr(outage, "ANSWER_SECONDS", 0.01)
    served.answers["dead.test/robots.txt"] = silent
    urls = [*good(1), *good(30, "dead.test")]
    source = crawl(served, tmp_path, urls, retries=2, window=4)
    assert paths(source.samples()) == ["0.png"]
    assert source.skipped.by_reason == {"no robots.txt": 30}
    assert served.asked.count("dead.test/robots.txt") == 3


@pytest.mark.parametrize("status", [408, 500, 502, 504])
def test_a_crawl_retries_after_a_temporary_server_error(served, tmp_path, monkeypatch, status):
    monkeypatch.setattr(fetch, "pause", lambda _attempt: 0.01)

    async def failing(request):
        if request.path == "/2.png" or served.asked.count("good.test" + request.path) == 1:
            await request.send(status=status)
        else:
            await image(request)

    served.answers["good.test/*"] = failing
    source = crawl(served, tmp_path, good(4), retries=1)
    assert sorted(paths(source.samples())) == ["0.png", "1.png", "3.png"]
    assert source.skipped.by_reason == {f"HTTP {status}": 1}


async def endless(request):
    await request.raw(b"HTTP/1.1 200 X\r\n\r\n" + PNG[0])
    while True:
        await request.raw(bytes(65536))


async def cut(request):
    await request.raw(b"HTTP/1.1 200 X\r\ncontent-length: 999999\r\n\r\n" + PNG[0])
    request.writer.close()


async def silent(request):
    request.writer.close()


@table("failing", [silent, cut])
def test_a_crawl_retries_after_a_broken_connection(served, tmp_path, failing):
    """A host may close a kept connection at the moment of the next request."""

    async def breaking(request):
        first = served.asked.count("good.test" + request.path) == 1
        await (failing if first else image)(request)

    served.answers["good.test/*"] = breaking
    source = crawl(served, tmp_path, good(3), retries=1)
    assert sorted(paths(source.samples())) == ["0.png", "1.png", "2.png"]
    assert source.skipped.by_reason == {}


async def busy(request):
    await request.send(status=503, Retry_After="0.05")


@table("failing", [silent, busy])
def test_a_robots_txt_that_fails_once_costs_no_url(served, tmp_path, failing):
    async def answer(request):
        first = served.asked.count("good.test/robots.txt") == 1
        await (failing if first else robots("User-agent: *\nDisallow: /1"))(request)

    served.answers["/robots.txt"] = answer
    source = crawl(served, tmp_path, good(3), retries=1)
    assert sorted(paths(source.samples())) == ["0.png", "2.png"]
    assert source.skipped.by_reason == {"robots.txt": 1}


HOSTILE = {
    "slow": (slow, "too slow"),
    "endless": (endless, "too large"),
    "announces too much": (page(b"", content_length="9999999999"), "no HTTP"),
    "cut": (cut, "no HTTP"),
    "silent": (silent, "no HTTP"),
    "no HTTP": (lambda request: request.raw(b"SSH-2.0-x\r\n\r\n"), "no HTTP"),
    "huge headers": (
        lambda request: request.raw(b"HTTP/1.1 200 X\r\n" + b"a: b\r\n" * 99999),
        "no HTTP",
    ),
    "a page that says it is an image": (page(b"<html>" * 99, content_type="image/png"), "no image"),
    "empty": (page(), "no image"),
    "gzip": (page(b"\x1f\x8b" + b"x" * 99, content_encoding="gzip"), "no image"),
    "gone": (page(status=404), "HTTP 404"),
    "a loop": (page(status=302, location="/x"), "redirects"),
    "to a file": (page(status=301, location="file:///etc/passwd"), "bad URL"),
    "to nowhere": (page(status=301), "bad URL"),
    "to no port": (page(status=301, location="http://bad.test:99999/"), "bad URL"),
    "to a private host": (page(status=302, location="http://10.1.2.3/x"), "private address"),
    "to the cloud's metadata": (
        page(status=307, location="http://169.254.169.254/"),
        "private address",
    ),
}


@table("kind", HOSTILE)
def test_the_hosts_beside_a_hostile_host_are_crawled(served, tmp_path, caplog, kind):
    answer, reason = HOSTILE[kind]
    served.answers["/x"] = answer

    async def resolve(host, _port):
        return [host] if host[0].isdigit() else ["127.0.0.1"]

    urls = [*good(2), "http://bad.test:PORT/x", *good(4)[2:]]
    seconds = 4 if reason == "too slow" else 30
    source = crawl(served, tmp_path, urls, resolve, seconds=seconds, max_bytes=100_000, max_wait=0)
    assert sorted(paths(source.samples())) == [f"{n}.png" for n in range(4)]
    assert source.skipped.by_reason == {reason: 1}
    assert f"left out http://bad.test:{served.port}/x ({reason}): " in caplog.text
    assert ("it redirects " in caplog.text) is (kind in ("to a file", "to nowhere", "to no port"))


@pytest.mark.parametrize("begins_offline", [True, False])
def test_an_outage_of_this_machines_network_costs_no_row(
    served, tmp_path, monkeypatch, caplog, begins_offline
):
    """No name can be resolved for two seconds, not even the name of a host that has answered."""
    monkeypatch.setattr(outage, "ANSWER_SECONDS", 0.05)
    monkeypatch.setattr(outage, "REPEAT_SECONDS", 0.2)
    asked = []
    down = [0.0 if begins_offline else math.inf, 2.0]

    async def resolve(host, _port):
        asked.append(host)
        if len(asked) == 30 and not begins_offline:
            down[:] = [time.monotonic(), 2.0]
        if begins_offline and len(asked) == 1:
            down[0] = time.monotonic()
        if down[0] <= time.monotonic() < down[0] + down[1]:
            raise Skip("unreachable", f"{host}: failed", silent=True, offline=True)
        return ["127.0.0.1"]

    served.answers["*"] = image
    urls = [f"http://h{n}.test:PORT/{n}.png" for n in range(80)]
    source = crawl(served, tmp_path, urls, resolve, concurrency=8, window=16)
    began = time.monotonic()
    assert len(list(source.samples())) == 80
    assert source.skipped.by_reason == {}
    assert time.monotonic() - began > 2.0
    assert "the network seems down: " in caplog.text
    assert "The crawl waits and goes on by itself" in caplog.text


def test_a_failure_just_before_the_first_answer_counts_as_the_outage(monkeypatch):
    monkeypatch.setattr(outage, "ANSWER_SECONDS", 0)

    class Backend:
        async def connect_tcp(self, *_):
            return self

        async def aclose(self):
            pass

    async def main():
        returned = []
        watch = outage.Outage(Backend(), lambda: returned.append(time.monotonic()))
        watch._pause = 0.0

        def failure():
            return Skip("unreachable", "a.test: failed", silent=True, offline=True)

        assert await watch.waited(failure(), "crawl")  # nobody has answered yet
        last = failure()
        watch.answered(httpx.URL("http://b.test/"), time.monotonic())
        assert await watch.waited(last, "crawl")
        assert len(returned) == 2, "what failed twice is forgotten twice"
        assert not await watch.waited(failure(), "crawl")

    asyncio.run(main())


def test_dead_hosts_do_not_stop_a_crawl(served, tmp_path, monkeypatch):
    monkeypatch.setattr(outage, "ANSWER_SECONDS", 0.05)

    async def resolve(host, _port):
        if host.startswith("dead"):
            raise Skip("unreachable", f"{host}: failed", silent=True, offline=True)
        return ["127.0.0.1"]

    dead = [f"http://dead{n}.test:PORT/0.png" for n in range(20)]
    source = crawl(served, tmp_path, [*good(1), *dead], resolve, concurrency=4)
    assert paths(source.samples()) == ["0.png"]
    assert source.skipped.by_reason == {"no robots.txt": 20}


def test_the_rules_of_many_hosts_are_bounded(served, tmp_path, monkeypatch):
    monkeypatch.setattr(fetch, "ROBOTS_KEPT", 5000)
    served.answers["*"] = image
    served.answers["/robots.txt"] = robots("User-agent: *\nDisallow: /1" + "\n# no" * 200)
    urls = [f"http://h{n}.test:PORT/{n % 3}.png" for n in range(60)] * 2
    source = crawl(served, tmp_path, urls, window=8)
    assert len(list(source.samples())) == 80
    assert source.skipped.by_reason == {"robots.txt": 40}
    kept = source.fetcher._kept
    assert 1 < len(kept) <= 5
    assert sum(kept.values()) <= 5000
    assert sum(host.robots is not None for host in source.fetcher._hosts.values()) == len(kept)
