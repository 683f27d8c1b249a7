"""The ids of crawled images: without secrets, and the same for a new signature."""

import pytest
from crawling import crawl, good, image
from table import table

from stream_ssl.producers.sources import Crawl
from stream_ssl.producers.sources.url_secrets import url_id

SECRETS = [
    "?X-Amz-Credential=AKIA/x&X-Amz-Expires=9&X-Amz-Signature=s3cr3t",
    "?sv=2024&sig=s3cr3t%2Fx",
    "?a=1&access_token=s3cr3t",
    "?token=s3cr3t",
    "?AWSAccessKeyId=s3cr3t&Signature=s3cr3t",
    "?x%2Damz%2Dsecurity%2Dtoken=s3cr3t",
]


@table("query", SECRETS)
def test_secrets_of_urls_appear_neither_in_the_log_nor_in_ids(served, tmp_path, caplog, query):
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
def test_a_new_signature_of_a_url_does_not_change_the_id(url, named):
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
def test_a_parameter_that_may_name_a_picture_stays_in_the_id(url):
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


def test_a_list_with_a_url_that_is_not_unicode_is_accepted(tmp_path):
    """JSON may hold half of a surrogate pair, which no id can contain."""
    (tmp_path / "a.jsonl").write_text('{"url": "http://a.test/\\ud800.jpg"}\n')
    Crawl(str(tmp_path / "a.jsonl"))
    assert url_id("http://a.test/\ud800.jpg").startswith("http://a.test/.jpg#")
    assert url_id("http://a.test/\ud800.jpg") != url_id("http://a.test/\ud801.jpg")
