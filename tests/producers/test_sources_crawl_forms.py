"""Real forms of lists, redirects and robots.txt, and addresses that are public."""

import base64
import contextlib
import gzip
import ipaddress
import tracemalloc
import zlib

import pyarrow
import pytest
from crawling import crawl_of, page
from pyarrow import parquet
from source_files import encoded, pixels
from table import table
from web import web

from stream_ssl.producers.sources.base import SourceError
from stream_ssl.producers.sources.web.network import GuardedBackend
from stream_ssl.producers.sources.web.public_addresses import IPV4, IPV6, is_public
from stream_ssl.producers.sources.web.response import retry_after
from stream_ssl.producers.sources.web.skip import Skip

PNG = encoded(pixels(1, 6, 5, 3)[0])


@pytest.fixture
def served():
    with web() as running:
        running.answers["*"] = page(PNG)
        running.answers["/robots.txt"] = page(status=404)
        yield running


def crawled(served, path):
    """The paths that a crawl of a list asks for, and the source."""
    source = crawl_of(path, seconds=60)
    served.asked.clear()
    with contextlib.suppress(SourceError):  # raised after a pass without a sample
        list(source.samples())
    asked = [one.removeprefix("a.test") for one in served.asked]
    return [one for one in asked if not one.endswith("/robots.txt") and "hop" not in one], source


def listed(served, folder, *paths):
    path = folder / "urls.txt"
    path.write_text("".join(f"http://a.test:{served.port}{one}\n" for one in paths))
    return path


def test_a_crawl_requests_each_url_exactly_as_written(served, tmp_path):
    urls = [
        *("/a.jpg;width=400", "/a.jpg;v=2?x=1", "/d;x/a.jpg", "/a.jpg?", "/?", "/;", "/a.jpg;"),
        *("/a%2Fb%3B%20c?d=%2F+e", "/a//b", "/a?b;c=d?e", "/a%zz", "/%E9", "/~u/$!*'(),:@&=+"),
    ]
    asked, source = crawled(served, listed(served, tmp_path, *urls))
    assert sorted(asked) == sorted(urls)
    assert source.skipped.by_reason == {}


@table(
    ("location", "asked"),
    [
        ("/a%2Fb%3Fc%20d;e=1", "/a%2Fb%3Fc%20d;e=1"),
        ("/b?", "/b?"),
        ("c;d?e=%26#f", "/dir/c;d?e=%26"),
        ("/caf\u00e9", "/caf%C3%A9"),  # raw UTF-8
        ("/a%zz b", "/a%zz%20b"),
        ("?x=%2F", "/dir/a?x=%2F"),
        ("//a.test:PORT/x%2Fy;z", "/x%2Fy;z"),
        ("http://a.test:PORT/k;l?m;n", "/k;l?m;n"),
        ("http://b\u00fcro.test:PORT/x", "xn--bro-hoa.test/x"),  # raw UTF-8
        ("http://b%C3%BCro.test:PORT/x", "xn--bro-hoa.test/x"),
        ("http://xn--i-7iq.test:PORT/x", "xn--i-7iq.test/x"),  # a heart
    ],
)
def test_a_crawl_follows_each_redirect_as_written(served, tmp_path, location, asked):
    async def moved(request):
        where = location.replace("PORT", str(served.port)).encode()
        await request.raw(
            b"HTTP/1.1 302 X\r\ncontent-length: 0\r\nlocation: " + where + b"\r\n\r\n"
        )

    served.answers["/dir/a"] = moved
    paths, source = crawled(served, listed(served, tmp_path, "/dir/a"))
    assert paths == ["/dir/a", asked]
    assert source.skipped.by_reason == {}


@table(
    ("location", "known"),
    [
        (None, True),
        ("/b", True),
        ("http://a.test:PORT/b", True),
        ("http://b.test:PORT/b", False),
    ],
)
def test_the_user_and_the_password_of_a_url_reach_only_its_host(served, tmp_path, location, known):
    got = {}

    async def asked(request):
        got[request.path] = request.headers.get("authorization")
        where = str(location).replace("PORT", str(served.port))
        moved = location is not None and request.path == "/a"
        await (request.send(status=302, location=where) if moved else request.send(PNG))

    served.answers |= {"/a": asked, "/b": asked}
    path = tmp_path / "urls.txt"
    path.write_text(f"http://me%40home:p%40ss:w@a.test:{served.port}/a\n")
    crawled(served, path)
    header = f"Basic {base64.b64encode(b'me@home:p@ss:w').decode()}".lower()
    target = {"/b": header if known else None} if location else {}
    assert got == {"/a": header} | target


def test_a_url_without_a_user_sends_no_authorization(served, tmp_path):
    got = []

    async def asked(request):
        got.append("authorization" in request.headers)
        await request.send(PNG)

    served.answers["/a"] = asked
    crawled(served, listed(served, tmp_path, "/a"))
    assert got == [False]


def test_a_crawl_removes_spaces_around_urls_in_every_kind_of_list(served, tmp_path):
    base = f"http://a.test:{served.port}"
    urls = [f" {base}/a", f"{base}/b\t", f"\u00a0{base}/c\r", f"{base}/d"]
    parquet.write_table(pyarrow.table({"url": urls}), tmp_path / "a.parquet")
    binary = [url.encode() for url in urls]
    parquet.write_table(pyarrow.table({"url": binary}), tmp_path / "b.parquet")
    (tmp_path / "a.csv").write_text("n,url\n" + "".join(f'1,"{url}"\n' for url in urls))
    (tmp_path / "a.txt").write_text("\n".join(urls))
    for name in ("a.parquet", "b.parquet", "a.csv", "a.txt"):
        assert sorted(crawled(served, tmp_path / name)[0]) == ["/a", "/b", "/c", "/d"], name


@table("suffix", [".txt", ".jsonl", ".csv"])
def test_a_very_long_line_of_a_list_does_not_fill_memory(served, tmp_path, suffix):
    path = tmp_path / f"urls{suffix}"
    urls = [f"http://a.test:{served.port}/{name}" for name in ("end-of-a-long-line", "b")]
    rows = [f'{{"url": "{url}"}}' if suffix == ".jsonl" else url for url in urls]
    head = "url\n" if suffix == ".csv" else ""
    path.write_bytes(head.encode() + b"x" * (1 << 25) + "\n".join([*rows, ""]).encode())
    tracemalloc.start()
    try:
        assert crawled(served, path)[0] == ["/b"]
        assert tracemalloc.get_traced_memory()[1] < 1 << 24
    finally:
        tracemalloc.stop()


RULES = "User-agent: *\nDisallow: /private;x\n"
ROBOTS = {
    "plain": (RULES.encode(), {}),
    "CRLF": (RULES.replace("\n", "\r\n").encode(), {}),
    "CR": (RULES.replace("\n", "\r").encode(), {}),
    "a mark": (RULES.encode("utf-8-sig"), {}),
    "a mark in the middle": ("\ufeff# none\n\ufeff".encode() + RULES.encode(), {}),
    "UTF-16, little": (("\ufeff" + RULES).encode("utf-16-le"), {}),
    "UTF-16, big": (("\ufeff" + RULES).encode("utf-16-be"), {}),
    "Latin-1": (b"# caf\xe9\n" + RULES.encode(), {}),
    "gzip": (gzip.compress(RULES.encode()), {"content_encoding": "gzip"}),
    "gzip unannounced": (gzip.compress(RULES.encode()), {}),
    "gzip that is none": (RULES.encode(), {"content_encoding": "gzip"}),
    "gzip with a mark": (gzip.compress(RULES.encode("utf-8-sig")), {"content_encoding": "GZIP"}),
    "deflate": (zlib.compress(RULES.encode()), {"content_encoding": "deflate"}),
    "raw deflate": (zlib.compress(RULES.encode(), wbits=-15), {"content_encoding": "deflate"}),
    "zeros behind it": (RULES.encode() + bytes(9), {}),
    "an end mark of DOS": (RULES.encode() + b"\x1a", {}),
    "longer than the limit": (RULES.encode() + b"# more\n" * 100_000, {}),
    "another alphabet": (
        "# \u043f\u0440\u0438\u0432\u0435\u0442 ".encode("cp1251") * 9 + b"\n" + RULES.encode(),
        {},
    ),
    "a gzip bomb": (gzip.compress(RULES.encode() + bytes(1 << 25)), {"content_encoding": "gzip"}),
}


@table("kind", ROBOTS)
def test_a_crawl_obeys_robots_txt_in_every_encoding(served, tmp_path, kind):
    body, headers = ROBOTS[kind]
    served.answers["/robots.txt"] = page(body, **headers)
    asked, source = crawled(served, listed(served, tmp_path, "/private;x/a", "/public;x/a"))
    assert asked == ["/public;x/a"]
    assert source.skipped.by_reason == {"robots.txt": 1}


LONG_RULES = (RULES + "Disallow: /a\n").encode() * 9
CODED = {
    name: pyarrow.Codec(name).compress(LONG_RULES, asbytes=True) for name in ("brotli", "zstd")
}
UNREADABLE = {
    "br": page(CODED["brotli"], content_encoding="br"),
    "br unannounced": page(CODED["brotli"]),
    "br as gzip": page(CODED["brotli"], content_encoding="gzip"),
    "br as identity": page(CODED["brotli"], content_encoding="identity"),
    "br twice": page(CODED["brotli"], content_encoding="identity, br"),
    "zstd": page(CODED["zstd"], content_encoding="zstd"),
    "zstd unannounced": page(CODED["zstd"]),
    "zlib unannounced": page(zlib.compress(LONG_RULES)),
    "UTF-16 without a mark": page(LONG_RULES.decode().encode("utf-16-le")),
    "bytes of no text": page(bytes(range(128, 192))),
    "damaged gzip": page(b"\x1f\x8bx", content_encoding="gzip"),
    "cut gzip": page(gzip.compress(RULES.encode())[:20], content_encoding="gzip"),
    "too many requests": page(status=429),
    "an error": page(status=503),
    "to nowhere": page(status=301),
    "to another scheme": page(status=302, location="ftp://a.test/robots.txt"),
}


@table("kind", UNREADABLE)
def test_a_crawl_fetches_nothing_from_a_host_with_an_unreadable_robots_txt(
    served, tmp_path, kind, caplog
):
    served.answers["/robots.txt"] = UNREADABLE[kind]
    asked, source = crawled(served, listed(served, tmp_path, "/a"))
    assert asked == []
    assert set(source.skipped.by_reason) <= {"no robots.txt", "bad URL"}
    assert source.skipped.by_reason.total() == 1


@table("body", [b"", b"\n", b"<p>Not found</p>", "<p>Page non trouv\u00e9e</p>".encode("latin-1")])
def test_a_crawl_fetches_from_a_host_whose_robots_txt_has_no_rule(served, tmp_path, body):
    served.answers["/robots.txt"] = page(body)
    assert crawled(served, listed(served, tmp_path, "/a"))[0] == ["/a"]


@table("status", [400, 401, 403, 404, 410, 451])
def test_a_crawl_fetches_from_a_host_without_robots_txt(served, tmp_path, status):
    served.answers["/robots.txt"] = page(status=status)
    assert crawled(served, listed(served, tmp_path, "/a"))[0] == ["/a"]


def test_a_crawl_reads_robots_txt_after_five_redirects(served, tmp_path):
    for hop in range(5):
        here = f"/hop{hop}" if hop else "/robots.txt"
        served.answers[here] = page(status=302, location=f"/hop{hop + 1}")
    served.answers["/hop5"] = page(RULES.encode())
    _, source = crawled(served, listed(served, tmp_path, "/private;x", "/a"))
    assert source.skipped.by_reason == {"robots.txt": 1}


@table("coding", ["gzip", "deflate"])
def test_a_compressed_image_is_unpacked_within_the_size_limit(served, tmp_path, coding):
    squeezed = gzip.compress(PNG) if coding == "gzip" else zlib.compress(PNG)
    served.answers["/a"] = page(squeezed, content_encoding=coding)
    served.answers["/cut"] = page(squeezed[:-9], content_encoding=coding)
    bomb = PNG + bytes(1 << 25)
    packed = gzip.compress(bomb) if coding == "gzip" else zlib.compress(bomb)
    served.answers["/bomb"] = page(packed, content_encoding=coding)
    path = listed(served, tmp_path, "/a", "/cut", "/bomb")
    source = crawl_of(path, max_bytes=100_000)
    assert [sample.data for sample, _ in source.samples()] == [PNG]
    assert source.skipped.by_reason == {"no image": 1, "too large": 1}


def ends(block):
    network = ipaddress.ip_network(block)
    return network, [network[0], network[-1], network[network.num_addresses // 2]]


@table("row", [*IPV4, *IPV6])
def test_the_registries_of_iana_decide_which_addresses_are_public(row):
    block, _, reachable = row
    network, addresses = ends(block)
    inner = [
        ipaddress.ip_network(other)
        for other, _, _ in (*IPV4, *IPV6)
        if other != block and ipaddress.ip_network(other).version == network.version
    ]
    for address in addresses:
        more_specific = any(
            address in other and other.prefixlen > network.prefixlen for other in inner
        )
        if more_specific or block in ("64:ff9b::/96", "::ffff:0:0/96"):  # judged by what it embeds
            continue
        assert is_public(address) is reachable, address
        if not reachable:
            with pytest.raises(Skip, match="not of the public internet"):
                GuardedBackend([]).check("a.test", str(address))
            GuardedBackend([block]).check("a.test", str(address))


@table("block", [row[0] for row in IPV4 if not row[2]])
def test_an_address_that_embeds_a_private_address_is_not_public(block):
    for inner in ends(block)[1]:
        if is_public(inner):  # a more specific row allows it
            continue
        low = f"{int(inner) >> 16:x}:{int(inner) & 0xFFFF:x}"
        client = int(inner) ^ 0xFFFFFFFF
        for address in (
            *(f"::ffff:{inner}", f"::{inner}", f"::ffff:0:{inner}", f"64:ff9b::{inner}"),
            *(f"64:ff9b:1::{inner}", f"2002:{low}::1", f"2001:0:{low}::1"),
            f"2001:0:808:808:0:0:{client >> 16:x}:{client & 0xFFFF:x}",
            *(f"2606:4700::5efe:{inner}", f"2606:4700::200:5efe:{inner}"),
        ):
            assert not is_public(ipaddress.ip_address(address)), address


@table(
    ("address", "public"),
    [
        *((one, True) for one in ("8.8.8.8", "93.184.216.34", "2606:4700::1111", "2a00:1450::1")),
        *((one, True) for one in ("::ffff:8.8.8.8", "64:ff9b::8.8.8.8", "2606::5efe:8.8.8.8")),
        *((one, False) for one in ("fec0::1", "::8.8.8.8", "::ffff:0:8.8.8.8", "2002:808:808::1")),
        *((one, False) for one in ("4000::1", "ff02::1", "224.0.0.1", "64:ff9b:1::808:808")),
    ],
)
def test_only_addresses_that_iana_assigned_to_the_internet_are_public(address, public):
    assert is_public(ipaddress.ip_address(address)) is public


def test_a_crawl_ignores_the_proxy_variables_of_the_environment(served, tmp_path, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://10.1.2.3:1")
    assert crawled(served, listed(served, tmp_path, "/a"))[0] == ["/a"]


@table(
    ("value", "seconds"),
    [
        ("7", 7.0),
        ("0", 0.0),
        ("-5", 1.5),
        ("nan", 1.5),
        ("soon", 1.5),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 60.0),
        ("Wed, 21 Oct 2015 07:26:00 GMT", 0.0),
    ],
)
def test_an_unreadable_retry_after_header_gives_the_default_pause(value, seconds):
    assert retry_after(value, 1.5, "Wed, 21 Oct 2015 07:27:00 GMT") == seconds
