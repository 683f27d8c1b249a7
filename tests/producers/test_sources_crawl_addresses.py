"""The addresses that a crawl refuses, and those that it tries in turn."""

import contextlib
import socket

from crawling import PNG, crawl, gives_nothing, good, paths
from table import table

from stream_ssl.producers.sources import Crawl
from stream_ssl.producers.sources.web import network


@table(
    "url",
    [
        *("no url", "ftp://good.test/1.png", "http://", "http:///1.png", "http://[::1/x"),
        *("http://a b/", "http://" + "a" * 300 + ".test/", "https://good.test:99999/1"),
    ],
)
def test_the_urls_beside_a_bad_url_are_crawled(served, tmp_path, url):
    source = crawl(served, tmp_path, [*good(1), url])
    assert paths(source.samples()) == ["0.png"]
    assert source.skipped.by_reason.total() == 1


def test_a_url_whose_bytes_are_not_utf_8_is_left_out(served, tmp_path, caplog):
    source = crawl(served, tmp_path, [*good(1), "http://good.test/caf\ufffd.png"])
    assert paths(source.samples()) == ["0.png"]
    assert source.skipped.by_reason == {"bad URL": 1}
    assert "bytes of it are not UTF-8: save the list as UTF-8" in caplog.text


@table(
    "address",
    [
        *("127.0.0.1", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1"),
        *("0.0.0.0", "224.0.0.1", "255.255.255.255", "::1", "::", "fe80::1%eth0", "fc00::1"),
        *("::ffff:127.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::"),
    ],
)
def test_a_crawl_refuses_addresses_that_are_not_public(served, tmp_path, address):
    async def resolve(_host, _port):
        return ["93.184.216.34", address]  # one bad address is enough

    source = crawl(served, tmp_path, good(1), resolve, allow_networks=[], robots=False)
    gives_nothing(source)
    assert source.skipped.by_reason == {"private address": 1}
    assert served.asked == []


@table("host", ["localhost", "127.0.0.1", "2130706433", "0x7f.1", "[::1]"])
def test_a_crawl_refuses_names_of_this_machine(served, tmp_path, host):
    source = crawl(served, tmp_path, [f"http://{host}:PORT/1.png"], allow_networks=[])
    source.fetcher.backend.resolve = Crawl(str(tmp_path / "urls.txt")).fetcher.backend.resolve
    gives_nothing(source)
    assert source.skipped.by_reason in ({"no robots.txt": 1}, {"private address": 1})
    assert served.asked == []


def test_a_crawl_tries_the_next_address_when_the_first_does_not_answer(served, tmp_path):
    async def resolve(_host, _port):
        return ["127.0.0.2", "127.0.0.1"]

    with contextlib.ExitStack() as full, socket.socket() as deaf:
        deaf.bind(("127.0.0.2", served.port))
        deaf.listen(0)
        for _ in range(3):  # fill its backlog, so that further connections get no answer
            waiting = full.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(("127.0.0.2", served.port))
        source = crawl(served, tmp_path, good(2), resolve, robots=False, seconds=4)
        assert sorted(paths(source.samples())) == ["0.png", "1.png"]


def test_a_name_server_that_fails_for_a_moment_is_asked_again(served, tmp_path, monkeypatch):
    asked = []

    def looked_up(host, *_arguments, **_more):
        asked.append(host)
        if host == "unknown.test" or asked.count(host) == 1:
            why = socket.EAI_NONAME if host == "unknown.test" else socket.EAI_AGAIN
            raise socket.gaierror(why, "failed")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", served.port))]

    urls = [*good(1), *good(1, "unknown.test")]
    source = crawl(served, tmp_path, urls, robots=False, retries=1)
    source.fetcher.backend.resolve = network.resolve
    monkeypatch.setattr(network.socket, "getaddrinfo", looked_up)
    assert paths(source.samples()) == ["0.png"]
    assert source.skipped.by_reason == {"unresolved host": 1}
    assert sorted(asked) == ["good.test", "good.test", "unknown.test"]


def test_a_host_name_that_changes_to_a_private_address_is_refused(served, tmp_path):
    """The second answer of its name server is this machine: the first one was checked."""
    answers = iter([["127.0.0.1"], ["192.168.0.9"], ["127.0.0.1"], ["192.168.0.9"]])

    async def resolve(_host, _port):
        return next(answers)

    async def close(request):
        await request.send(PNG[0], connection="close")
        request.writer.close()

    served.answers["good.test/*"] = close
    source = crawl(served, tmp_path, good(2), resolve, robots=False, concurrency=1, per_host=1)
    assert paths(source.samples()) == ["0.png"]
    assert source.skipped.by_reason == {"private address": 1}
