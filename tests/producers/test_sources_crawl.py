"""Crawls of a small web on loopback: what is fetched, what is respected, what is refused."""

import asyncio
import contextlib
import gc
import io
import itertools
import json
import logging
import math
import socket
import threading
import time

import pyarrow
import pytest
from pyarrow import parquet
from source_files import encoded, pixels
from table import table
from web import web

from stream_ssl.producers.shaping import Shaped
from stream_ssl.producers.sources import Crawl
from stream_ssl.producers.sources.base import SourceError
from stream_ssl.producers.sources.fields import url_id
from stream_ssl.producers.sources.web import fetch, network, outage
from stream_ssl.producers.sources.web.skip import Skip

PNG = [encoded(image) for image in pixels(12, 6, 5, 3)]


async def image(request):
    await request.send(PNG[int(request.path[1:].partition(".")[0]) % 12])


def robots(text, **headers):
    async def answer(request):
        await request.send(text.encode(), **headers)

    return answer


def crawl(served, folder, urls, resolve=None, **settings):
    """A crawl of URLs in which PORT is the web's; every host is on loopback."""
    path = folder / "urls.txt"
    path.write_text("".join(f"{url}\n".replace("PORT", str(served.port)) for url in urls))
    settings = {"allow_networks": ["127.0.0.0/8"], "retries": 0} | settings
    source = Crawl(str(path), **settings)

    async def here(_host, _port):
        return ["127.0.0.1"]

    source.fetcher.backend.resolve = resolve or here
    return source


def good(count, host="good.test"):
    return [f"http://{host}:PORT/{n}.png" for n in range(count)]


def paths(samples):
    return [sample.id.rpartition("/")[2] for sample, _ in samples]


@pytest.fixture
def served():
    with web() as running:
        running.answers["good.test/*"] = image
        running.answers["/robots.txt"] = robots("")
        yield running


def test_every_url_is_fetched_once(served, tmp_path, caplog):
    urls = [*good(40), "# a comment", "", *good(5, "other.test")]
    served.answers["other.test/*"] = image
    source = crawl(served, tmp_path, urls, agent="mine/2 (+https://me.example)", per_host=8)
    with caplog.at_level(logging.INFO):
        samples = [sample for sample, _ in source.samples()]
    assert len(samples) == 45
    assert len({sample.id for sample in samples}) == 45
    for sample in samples:
        assert sample.data == PNG[int(sample.id.rpartition("/")[2].removesuffix(".png")) % 12]
        assert sample.codec == "png"
    assert sorted(served.asked) == sorted(
        [f"good.test/{n}.png" for n in range(40)]
        + [f"other.test/{n}.png" for n in range(5)]
        + ["good.test/robots.txt", "other.test/robots.txt"]
    )
    assert served.agents == {"mine/2 (+https://me.example)"}
    assert "has done 45 URLs; left out: nothing" in caplog.text
    assert len(list(source.samples())) == 45  # and in another pass once more


@pytest.mark.parametrize("concurrency", [1, 16])
def test_going_on_fetches_what_is_not_done(served, tmp_path, concurrency):
    urls = [url for n, url in enumerate(good(60)) if n % 7] + [
        f"http://gone.test:PORT/{n}" for n in range(9)
    ]
    settings = {"concurrency": concurrency, "window": 24, "per_host": 16}
    stream = list(Shaped(crawl(served, tmp_path, urls, **settings), rate=1e6).samples())
    assert len(stream) == 51
    for at in (0, 7, 20, 49, 50):
        position = json.loads(json.dumps(stream[at][1]))
        again = Shaped(crawl(served, tmp_path, urls, **settings)).samples(position)
        rest = [sample.id for sample, _ in again]
        before = [sample.id for sample, _ in stream[: at + 1]]
        assert sorted(before + rest) == sorted(sample.id for sample, _ in stream)


def test_lists_of_every_kind(served, tmp_path):
    url = f"http://good.test:{served.port}/"
    rows = [{"url": f"{url}{n}.png", "class": n % 3, "caption": f"no. {n}"} for n in range(4)]
    (tmp_path / "a.csv").write_text(
        "caption,class,url\n" + "".join(f"{r['caption']},{r['class']},{r['url']}\n" for r in rows)
    )
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "c.parquet")
    for name in ("a.csv", "b.jsonl", "c.parquet"):
        source = crawl(served, tmp_path, [], label="class", keep=["caption"])
        listed = Crawl(
            str(tmp_path / name), label="class", keep=["caption"], allow_networks=["127.0.0.0/8"]
        )
        listed.fetcher.backend.resolve = source.fetcher.backend.resolve
        samples = sorted((sample for sample, _ in listed.samples()), key=lambda one: one.id)
        assert [sample.label for sample in samples] == [0, 1, 2, 0]
        assert samples[3].meta == {"caption": "no. 3"}
        if name != "b.jsonl":
            with pytest.raises(ValueError, match="has no column 'link'; it has "):
                Crawl(str(tmp_path / name), column="link")


def parquet_bytes(rows):
    file = io.BytesIO()
    plain = {"row_group_size": 2, "compression": "none", "use_dictionary": False}
    parquet.write_table(pyarrow.Table.from_pylist(rows), file, **plain)
    return file.getvalue()


BAD_LISTS = {
    "a mark": ("a.csv", lambda a, b: f"\ufeffurl,c\n{a},1\n{b},2\n", {}),
    "a mark in text": ("a.txt", lambda a, b: f"\ufeff{a}\r\n{b}", {}),
    "a long field": (
        "a.csv",
        lambda a, b: f"url\n{a}\n" + "x" * 200_000 + f"\n{b}\n",
        {"bad URL": 1},
    ),
    "short rows": ("a.csv", lambda a, b: f"c,url\n1,{a}\n2\n\n3,{b},4,5\n", {"bad URL": 1}),
    "zeros": ("a.csv", lambda a, b: f"url\n{a}\n\0\0\0\n{b}\n", {"bad URL": 1}),
    "bytes": ("a.txt", lambda a, b: f"{a}\n\xff\xfe\x01\n{b}\n".encode("latin-1"), {"bad URL": 1}),
    "no objects": (
        "a.jsonl",
        lambda a, b: f'{{"url":"{a}"}}\n3\n[]\n{{}}\n{"[" * 99_999}\n{{"url":"{b}"}}\n',
        {"bad URL": 4},
    ),
    "no URLs": ("a.parquet", lambda a, b: parquet_bytes([{"url": [a]}, {"url": None}]), None),
}


@table("kind", BAD_LISTS)
def test_a_bad_row_takes_no_other_with_it(served, tmp_path, kind):
    name, content, left_out = BAD_LISTS[kind]
    data = content(*(url.replace("PORT", str(served.port)) for url in good(2)))
    source = crawl(served, tmp_path, [])
    (tmp_path / name).write_bytes(data if isinstance(data, bytes) else data.encode())
    listed = Crawl(str(tmp_path / name), allow_networks=["127.0.0.0/8"])
    listed.fetcher.backend.resolve = source.fetcher.backend.resolve
    if left_out is None:
        gives_nothing(listed)
    else:
        assert sorted(paths(listed.samples())) == ["0.png", "1.png"]
    assert listed.skipped.by_reason == ({"bad URL": 2} if left_out is None else left_out)


def test_a_csv_whose_first_line_is_too_long_is_named(tmp_path):
    (tmp_path / "a.csv").write_text("x" * 200_000 + ",url\n")
    with pytest.raises(SourceError, match=r"a\.csv cannot be read: field larger than"):
        Crawl(str(tmp_path / "a.csv"))


def test_a_list_that_cannot_be_read_to_its_end_is_named(served, tmp_path):
    urls = [{"url": url.replace("PORT", str(served.port))} for url in good(6)]
    whole, path = parquet_bytes(urls), tmp_path / "a.parquet"
    for data in (b"", b"no Parquet", whole[:-9]):
        path.write_bytes(data)
        with pytest.raises(SourceError, match=r"a\.parquet cannot be read: "):
            Crawl(str(path))
    path.write_bytes(whole)
    first = crawl(served, tmp_path, good(2, "other.test"))
    served.answers["other.test/*"] = image
    source = Crawl([str(tmp_path / "urls.txt"), str(path)], allow_networks=["127.0.0.0/8"])
    source.fetcher.backend.resolve = first.fetcher.backend.resolve
    hole = whole.index(b"/4.png") - 100  # the third group's head
    path.write_bytes(whole[:hole] + bytes(70) + whole[hole + 70 :])
    stream = source.samples()
    assert sorted(paths([next(stream), next(stream)])) == ["0.png", "1.png"]  # before the damage
    with pytest.raises(SourceError, match=r"source 'crawl': .*a\.parquet cannot be read: "):
        next(stream)


def test_robots_txt_is_obeyed(served, tmp_path, caplog):
    served.answers["/robots.txt"] = robots("User-agent: stream-ssl\nDisallow: /3\n")
    served.answers["down.test/robots.txt"] = robots("", status=500)
    source = crawl(served, tmp_path, [*good(5), *good(2, "down.test")])
    assert sorted(paths(source.samples())) == ["0.png", "1.png", "2.png", "4.png"]
    assert source.skipped.by_reason == {"robots.txt": 1, "no robots.txt": 2}
    assert served.asked.count("down.test/robots.txt") == 1
    source = crawl(served, tmp_path, good(5), robots=False)
    assert len(paths(source.samples())) == 5


def test_the_crawl_delay_lies_between_requests(served, tmp_path):
    served.answers["/robots.txt"] = robots("User-agent: *\nCrawl-delay: 0.1\n")
    times = []

    async def timed(request):
        times.append(time.monotonic())
        await image(request)

    served.answers["good.test/*"] = timed
    assert len(paths(crawl(served, tmp_path, good(4)).samples())) == 4
    assert min(b - a for a, b in itertools.pairwise(times)) > 0.05
    assert times[-1] - times[0] > 0.28
    served.answers["/robots.txt"] = robots("User-agent: *\nCrawl-delay: 9999\n")
    source = crawl(served, tmp_path, good(2))
    gives_nothing(source)
    assert source.skipped.by_reason == {"busy": 2}


def gives_nothing(source):
    """As of any source, a pass in which nothing can be read is an error."""
    with pytest.raises(SourceError, match="not one sample of a whole pass can be read"):
        next(source.samples())


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
def test_opt_outs_are_respected(served, tmp_path, tag, sent):
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
def test_a_busy_host_is_waited_for(served, tmp_path, status):
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


def test_a_date_to_retry_after_is_read_by_the_hosts_clock(served, tmp_path):
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


def test_a_dead_host_is_asked_for_its_robots_txt_once_for_all_its_rows(
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
def test_a_bucket_that_fails_for_a_moment_is_asked_again(served, tmp_path, monkeypatch, status):
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


async def slow(request):
    await request.raw(b"HTTP/1.1 200 X\r\ncontent-length: 1000\r\n\r\n\x89PNG")
    await asyncio.sleep(60)


async def endless(request):
    await request.raw(b"HTTP/1.1 200 X\r\n\r\n" + PNG[0])
    while True:
        await request.raw(bytes(65536))


async def cut(request):
    await request.raw(b"HTTP/1.1 200 X\r\ncontent-length: 999999\r\n\r\n" + PNG[0])
    request.writer.close()


async def silent(request):
    request.writer.close()


def page(body=b"", **more):
    async def answer(request):
        await request.send(body, **more)

    return answer


@table("failing", [silent, cut])
def test_a_connection_that_breaks_is_tried_again(served, tmp_path, failing):
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
    "to a private host": (page(status=302, location="http://10.1.2.3/x"), "private address"),
    "to the cloud's metadata": (
        page(status=307, location="http://169.254.169.254/"),
        "private address",
    ),
}


@table("kind", HOSTILE)
def test_a_hostile_host_takes_no_other_with_it(served, tmp_path, caplog, kind):
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


@table(
    "url",
    [
        *("no url", "ftp://good.test/1.png", "http://", "http:///1.png", "http://[::1/x"),
        *("http://a b/", "http://" + "a" * 300 + ".test/", "https://good.test:99999/1"),
    ],
)
def test_a_bad_url_takes_no_other_with_it(served, tmp_path, url):
    source = crawl(served, tmp_path, [*good(1), url], resolve=None)
    assert paths(source.samples()) == ["0.png"]
    assert source.skipped.by_reason.total() == 1


@table(
    "address",
    [
        *("127.0.0.1", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1"),
        *("0.0.0.0", "224.0.0.1", "255.255.255.255", "::1", "::", "fe80::1%eth0", "fc00::1"),
        *("::ffff:127.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::"),
    ],
)
def test_addresses_that_are_not_public_are_refused(served, tmp_path, address):
    async def resolve(_host, _port):
        return ["93.184.216.34", address]  # one bad address is enough

    source = crawl(served, tmp_path, good(1), resolve, allow_networks=[], robots=False)
    gives_nothing(source)
    assert source.skipped.by_reason == {"private address": 1}
    assert served.asked == []


@table("host", ["localhost", "127.0.0.1", "2130706433", "0x7f.1", "[::1]"])
def test_names_of_this_machine_are_refused(served, tmp_path, host):
    source = crawl(served, tmp_path, [f"http://{host}:PORT/1.png"], allow_networks=[])
    source.fetcher.backend.resolve = Crawl(str(tmp_path / "urls.txt")).fetcher.backend.resolve
    gives_nothing(source)
    assert source.skipped.by_reason in ({"no robots.txt": 1}, {"private address": 1})
    assert served.asked == []


def test_an_address_that_does_not_answer_gives_way_to_the_next(served, tmp_path):
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


def test_a_name_that_is_rebound_gains_nothing(served, tmp_path):
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


@pytest.mark.parametrize("waits_for", ["good.test/robots.txt", "good.test/*"])
def test_stop_ends_a_crawl_that_waits(served, tmp_path, waits_for, caplog):
    served.answers[waits_for] = slow
    source = crawl(served, tmp_path, good(9), seconds=120)
    ended = threading.Thread(target=list, args=(source.samples(),))
    ended.start()
    deadline = time.monotonic() + 60
    while len(served.asked) < (1 if "robots" in waits_for else 2):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    source.stop()
    ended.join(60)
    assert not ended.is_alive()
    del source, ended
    gc.collect()
    assert not caplog.records  # asyncio tells of errors that nobody looked at


def test_a_slow_sender_holds_the_crawl_back(served, tmp_path):
    source = crawl(served, tmp_path, good(400), concurrency=8, per_host=8, robots=False)
    stream = source.samples()
    next(stream)
    deadline, before = time.monotonic() + 60, -1
    while len(served.asked) != before:  # until nothing more is asked for
        before = len(served.asked)
        assert time.monotonic() < deadline
        time.sleep(0.3)
    assert before <= 64 + 2 * 8 + 1
    assert len(list(stream)) == 399


@table(
    ("settings", "message"),
    [
        ({"concurrency": 0}, "concurrency 0"),
        ({"window": 9000}, "window 9000"),
        ({"per_host": 0}, "per_host 0"),
        ({"seconds": 0}, "seconds 0"),
        ({"agent": "a\nb"}, "must be printable ASCII"),
        ({"allow_networks": ["10.0.0.1/8"]}, "host bits set"),
    ],
)
def test_wrong_arguments_are_named(served, tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        crawl(served, tmp_path, [], **settings)


def test_another_lists_position_is_refused(served, tmp_path):
    source = crawl(served, tmp_path, good(5))
    (*_, (_, position)) = source.samples()
    with pytest.raises(ValueError, match="source was 'crawl' and is 'another'"):
        crawl(served, tmp_path, good(5), name="another").samples(position)
    with pytest.raises(ValueError, match="content was"):
        crawl(served, tmp_path, good(6)).samples(position)
    for broken in (17, [], {}, position | {"at": [-1, "0"]}, position | {"at": [0, "x"]}):
        with pytest.raises(ValueError, match="position does not fit"):
            crawl(served, tmp_path, good(5)).samples(broken)


SECRETS = [
    "?X-Amz-Credential=AKIA/x&X-Amz-Expires=9&X-Amz-Signature=s3cr3t",
    "?sv=2024&sig=s3cr3t%2Fx",
    "?a=1&access_token=s3cr3t",
    "?token=s3cr3t",
    "?AWSAccessKeyId=s3cr3t&Signature=s3cr3t",
    "?x%2Damz%2Dsecurity%2Dtoken=s3cr3t",
]


@table("query", SECRETS)
def test_no_secret_of_a_url_is_logged_or_sent(served, tmp_path, caplog, query):
    async def redirecting(request):
        await request.send(status=302, location=f"/2.png{query}")

    async def missing(request):
        await request.send(status=404)

    served.answers |= {f"/1.png{query}": redirecting, f"/2.png{query}": redirecting}
    served.answers[f"/3.png{query}"] = missing
    urls = [f"{url}{query}" for url in good(4)]
    urls += ["http://me:s3cr3t@good.test:PORT/0.png", f"http://good.test:port/{query}"]
    urls += [f"{urls[0]}2"]  # another secret
    source = crawl(served, tmp_path, urls, redirects=2)
    samples = [sample for sample, _ in source.samples()]
    plain = f"http://good.test:{served.port}/0.png"
    assert len(samples) == 3
    assert {sample.id for sample in samples} <= {plain, f"{plain}?a=1"}
    assert source.skipped.by_reason == {"redirects": 2, "HTTP 404": 1, "bad URL": 1}
    assert "s3cr3t" not in caplog.text + "".join(sample.id for sample in samples)
    assert f"good.test/0.png{query}" in served.asked


@table(
    ("url", "named"),
    [
        ("/k/1?X-Amz-Date=1&X-Amz-Expires={0}&X-Amz-Signature={0}&versionId=7", "/k/1?versionId=7"),
        ("/k/1?x-goog-date={0}&x-goog-signature={0}", "/k/1"),
        ("/k/1?GoogleAccessId=a&Expires={0}&Signature={0}", "/k/1"),
        ("/k/1?AWSAccessKeyId=a&w=2&Expires={0}&Signature={0}#x", "/k/1?w=2#x"),
        ("/k/1?OSSAccessKeyId={0}&Expires=1&Signature={0}", "/k/1"),
        ("/k/1?Expires={0}&Signature={0}&Key-Pair-Id=K;v=3", "/k/1?v=3"),
        ("/c/1?sv=2024&se={0}&sr=b&sp=r&sig={0}", "/c/1"),
        ("/1.JPG?token={0}&expires={0}&size=5", "/1.JPG?size=5"),
        ("/1.png?key={0}", "/1.png"),
    ],
)
def test_a_new_signature_gives_no_new_id(url, named):
    host = "https://{0}:{0}@h.test"
    first, second = ((host + url).format(secret) for secret in ("s3cr3t", "an%2Fother"))
    assert url_id(first) == url_id(second) == f"https://h.test{named}"


@table(
    "url",
    [
        "/image?token={0}",
        "/image?key={0}&sig=1",
        "/image?id={0}&X-Amz-Signature=1",
        "/image?expires={0}",
        "/{0}?Signature=1",
    ],
)
def test_what_may_name_a_picture_stays_in_its_id(url):
    first, second = (url_id("https://h.test" + url.format(name)) for name in ("first", "second"))
    assert first != second


def test_a_crawl_continues_with_a_list_that_was_signed_again(served, tmp_path):
    signed = "{}?X-Amz-Expires=9&X-Amz-Signature={}"
    served.answers["*"] = image
    first = crawl(served, tmp_path, [signed.format(url, "s3") for url in good(9)]).samples()
    ids = [next(first) for _ in range(4)]
    position = ids[-1][1]
    first.close()
    again = crawl(served, tmp_path, [signed.format(url, "an%2Fother") for url in good(9)])
    rest = [sample.id for sample, _ in again.samples(position)]
    plain = {url.replace("PORT", str(served.port)) for url in good(9)}
    assert sorted([sample.id for sample, _ in ids] + rest) == sorted(plain)
    others = [signed.format(url, "s3") for url in good(9)[::-1]]
    with pytest.raises(ValueError, match="content was"):
        crawl(served, tmp_path, others).samples(position)


def test_a_url_without_secrets_is_its_own_id(served, tmp_path):
    urls = [f"{url}?size=5&page=2;author=me&keyword=a#token" for url in good(3)]
    ids = {sample.id for sample, _ in crawl(served, tmp_path, urls).samples()}
    assert ids == {url.replace("PORT", str(served.port)) for url in urls}


@pytest.mark.parametrize("begins_offline", [True, False])
def test_an_outage_of_the_own_network_costs_no_row(
    served, tmp_path, monkeypatch, caplog, begins_offline
):
    """Every name, also that of a host that answered before, is unresolved for two seconds."""
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
