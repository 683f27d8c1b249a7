"""Crawls of a small web on loopback: the URLs that are fetched, and resumed crawls."""

import datetime
import gc
import io
import json
import logging
import time
from decimal import Decimal

import pyarrow
import pytest
from crawling import PNG, crawl, crawl_of, gives_nothing, good, image, paths, slow
from going_on import check_stop_ends
from pyarrow import parquet
from table import table

from stream_ssl.producers.shaping import Shaped
from stream_ssl.producers.sources import Crawl
from stream_ssl.producers.sources.base import SourceError


def test_a_crawl_fetches_every_url_once(served, tmp_path, caplog):
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
def test_a_resumed_crawl_fetches_exactly_the_remaining_urls(served, tmp_path, concurrency):
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


def test_csv_json_and_parquet_lists_give_urls_labels_and_kept_columns(served, tmp_path):
    url = f"http://good.test:{served.port}/"
    rows = [{"url": f"{url}{n}.png", "class": n % 3, "caption": f"no. {n}"} for n in range(4)]
    (tmp_path / "a.csv").write_text(
        "caption,class,url\n" + "".join(f"{r['caption']},{r['class']},{r['url']}\n" for r in rows)
    )
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "c.parquet")
    for name in ("a.csv", "b.jsonl", "c.parquet"):
        listed = crawl_of(tmp_path / name, label="class", keep=["caption"])
        samples = sorted((sample for sample, _ in listed.samples()), key=lambda one: one.id)
        assert [sample.label for sample in samples] == [0, 1, 2, 0]
        assert samples[3].meta == {"caption": "no. 3"}
        if name != "b.jsonl":
            with pytest.raises(ValueError, match=r"no column 'link'; it has .*: set column"):
                Crawl(str(tmp_path / name), column="link")


@pytest.mark.parametrize(("name", "text"), [("a.txt", ""), ("a.csv", "url\n")])
def test_a_list_without_a_row_is_refused(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    with pytest.raises(SourceError, match="the lists of URLs hold no row"):
        list(Crawl(str(tmp_path / name)).samples())


def test_rows_without_a_class_are_sent_without_a_label(served, tmp_path):
    """pandas writes such a table when values are missing."""
    url = f"http://good.test:{served.port}/"
    cells = ["1.0", "", "nan", "-1", "1.5", "cat"]
    lines = [f"{url}{number}.png,{cell}\n" for number, cell in enumerate(cells)]
    (tmp_path / "a.csv").write_text("url,class\n" + "".join(lines))
    listed = crawl_of(tmp_path / "a.csv", label="class")
    labels = [str(sample.label) for sample, _ in listed.samples()]  # in order of arrival
    assert sorted(labels) == ["1", *["None"] * 5]
    assert listed.skipped.by_reason == {"bad label": 2}
    gone = crawl_of(tmp_path / "a.csv", label="kind")
    assert [sample.label for sample, _ in gone.samples()] == [None] * 6
    assert gone.skipped.by_reason == {"bad label": 6}


def test_a_kept_column_that_cannot_be_sent_is_counted(served, tmp_path):
    times = {"when": datetime.datetime(2024, 1, 2, 3, 4), "day": datetime.date(2024, 1, 2)}
    row = {
        "url": f"http://good.test:{served.port}/1.png",
        "price": Decimal("1.50"),
        "n": 3,
        **times,
    }
    row |= {"tags": ["a"], "empty": None, "long": "a" * 5000}
    parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "a.parquet")
    kept = ["when", "tags", "day", "price", "empty", "long", "n", "captoin"]
    source = crawl_of(tmp_path / "a.parquet", keep=kept)
    ((sample, _),) = source.samples()
    sent = {"when": "2024-01-02T03:04:00", "day": "2024-01-02", "price": "1.50", "n": 3}
    assert sample.meta == sent
    assert source.skipped.by_reason == {"bad facts": 3}  # tags, long and captoin


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
    "short rows": ("a.csv", lambda a, b: f"c,url\n1,{a}\n2\n\n3,{b},,\n", {"bad URL": 1}),
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
def test_the_rows_beside_a_bad_row_are_crawled(served, tmp_path, kind):
    name, content, left_out = BAD_LISTS[kind]
    data = content(*(url.replace("PORT", str(served.port)) for url in good(2)))
    (tmp_path / name).write_bytes(data if isinstance(data, bytes) else data.encode())
    listed = crawl_of(tmp_path / name)
    if left_out is None:
        gives_nothing(listed)
    else:
        assert sorted(paths(listed.samples())) == ["0.png", "1.png"]
    assert listed.skipped.by_reason == ({"bad URL": 2} if left_out is None else left_out)


def test_a_csv_list_whose_first_line_is_too_long_is_refused(tmp_path):
    (tmp_path / "a.csv").write_text("x" * 200_000 + ",url\n")
    with pytest.raises(SourceError, match=r"a\.csv cannot be read: field larger than"):
        Crawl(str(tmp_path / "a.csv"))


def test_the_error_names_a_damaged_parquet_list(served, tmp_path):
    urls = [{"url": url.replace("PORT", str(served.port))} for url in good(6)]
    whole, path = parquet_bytes(urls), tmp_path / "a.parquet"
    for data in (b"", b"no Parquet", whole[:-9]):
        path.write_bytes(data)
        with pytest.raises(SourceError, match=r"a\.parquet cannot be read: "):
            Crawl(str(path))
    path.write_bytes(whole)
    crawl(served, tmp_path, good(2, "other.test"))  # writes the first list
    served.answers["other.test/*"] = image
    source = crawl_of(tmp_path / "urls.txt", path)
    hole = whole.index(b"/4.png") - 100  # the third group's head
    path.write_bytes(whole[:hole] + bytes(70) + whole[hole + 70 :])
    stream = source.samples()
    assert sorted(paths([next(stream), next(stream)])) == ["0.png", "1.png"]  # before the damage
    with pytest.raises(SourceError, match=r"source 'crawl': .*a\.parquet cannot be read: "):
        next(stream)


@pytest.mark.parametrize("waits_for", ["good.test/robots.txt", "good.test/*"])
def test_stop_ends_a_crawl_that_waits_for_a_host(served, tmp_path, waits_for, caplog):
    served.answers[waits_for] = slow
    source = crawl(served, tmp_path, good(9), seconds=120)
    asked = 1 if "robots" in waits_for else 2
    check_stop_ends(source, waits=lambda: len(served.asked) >= asked)
    del source
    gc.collect()
    assert not caplog.records  # asyncio logs errors that no code has read


def test_a_crawl_fetches_only_a_bounded_number_of_urls_ahead_of_a_slow_sender(served, tmp_path):
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


def test_a_stopped_crawl_counts_each_loss_once(served, tmp_path):
    async def page(request):
        await request.send(b"<html>gone</html>")

    served.answers["bad.test/*"] = page
    urls = [url for pair in zip(good(20), good(20, "bad.test"), strict=True) for url in pair]
    source = crawl(served, tmp_path, urls, robots=False, per_host=1)
    stream = source.samples()
    _, position = next(stream)
    deadline = time.monotonic() + 60
    while len(served.asked) < len(urls):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    stream.close()
    again = crawl(served, tmp_path, urls, robots=False)
    assert len(list(again.samples(position))) == 19
    counted = source.skipped.by_reason + again.skipped.by_reason
    assert counted == {"no image": 20}


@table(
    ("settings", "message"),
    [
        ({"concurrency": 0}, "concurrency 0"),
        ({"window": 9000}, "window 9000"),
        ({"per_host": 0}, "per_host 0: must be 1 or more"),
        ({"delay": float("nan")}, "delay nan"),
        ({"seconds": 0}, "seconds 0"),
        ({"agent": "a\nb"}, "must be printable ASCII"),
        (
            {"allow_networks": ["10.0.0.1/8"]},
            "allow_networks: 10.0.0.1/8 has host bits set; give networks such as 10.0.0.0/8",
        ),
        ({"authorities": "no.pem"}, "authorities no.pem: No such file .* give a PEM file"),
        ({"authorities": __file__}, "authorities .*py: .*no certificate.* give a PEM file"),
    ],
)
def test_wrong_arguments_are_named(served, tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        crawl(served, tmp_path, [], **settings)


def test_a_crawl_refuses_the_position_of_another_list(served, tmp_path):
    source = crawl(served, tmp_path, good(5))
    (*_, (_, position)) = source.samples()
    with pytest.raises(ValueError, match="source was 'crawl' and is 'another'"):
        crawl(served, tmp_path, good(5), name="another").samples(position)
    with pytest.raises(ValueError, match="content was"):
        crawl(served, tmp_path, good(6)).samples(position)
    for broken in (17, [], {}, position | {"at": [-1, "0"]}, position | {"at": [0, "x"]}):
        with pytest.raises(ValueError, match="position does not fit"):
            crawl(served, tmp_path, good(5)).samples(broken)
