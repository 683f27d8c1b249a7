"""The page in a real Chromium: `make browser`. Screenshots go to $STREAM_SSL_SCREENSHOTS."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import torch
from page_world import Feed, receiving, serving
from test_observe_picture_search import decode, encode, png

from stream_ssl.batch import Offset
from stream_ssl.learning.ranks import Work
from stream_ssl.memory.descriptors import Thumbnail
from stream_ssl.observe.conditions import CONDITIONS, Lit
from stream_ssl.observe.facts import Facts
from stream_ssl.observe.http_access import Token
from stream_ssl.observe.page.api import Sources
from stream_ssl.observe.page.group import GroupView, Member
from stream_ssl.observe.page.picture_search import PictureSearch
from stream_ssl.observe.trends import percent
from stream_ssl.receiver.sessions import ProducerTable

sync_api = pytest.importorskip("playwright.sync_api")
axe = pytest.importorskip("axe_playwright_python.base")

pytestmark = [pytest.mark.browser, pytest.mark.timeout(180)]

SECRET = "0123456789abcdef-secret"
PREFIX = "/robots/one"
DOCUMENTED = Path(__file__).parents[2] / "docs" / "page.md"
TEMPORARY = ("proxy", "fastcgi", "uwsgi", "scgi")
HOSTILE = '<img src=x onerror="document.title=1">\u202ecam'


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")
    assert path, "no Chromium: apt-get install chromium"
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


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
def proxied(address: str, folder: Path) -> Iterator[str]:
    """A real nginx that serves `address` below PREFIX as docs/page.md says, and a 404 beside it."""
    nginx = shutil.which("nginx") or "/usr/sbin/nginx"
    assert os.access(nginx, os.X_OK), "no nginx: apt-get install nginx-light"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    locations = DOCUMENTED.read_text().partition("```nginx\n")[2].partition("```")[0]
    assert PREFIX in locations
    temporary = (f"{kind}_temp_path {folder};" for kind in ("client_body", *TEMPORARY))
    config = folder / "nginx.conf"
    config.write_text(
        f"daemon off; master_process off; pid {folder}/pid; error_log stderr; events {{}}\n"
        f"http {{ access_log off; {' '.join(temporary)}\n"
        f"server {{ listen 127.0.0.1:{port};\n"
        f"{locations.replace('http://127.0.0.1:9109', address)} }} }}\n"
    )
    with subprocess.Popen([nginx, "-p", folder, "-c", config, "-e", "stderr"]) as process:
        try:
            deadline = time.monotonic() + 30
            while not listens(port):
                assert process.poll() is None, "nginx ended"
                assert time.monotonic() < deadline, "nginx does not listen"
                time.sleep(0.05)
            yield f"http://localhost:{port}{PREFIX}/"
        finally:
            process.terminate()


def listens(port: int) -> bool:
    with socket.socket() as asking:
        return asking.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def run(
    slots: int = 300,
    producers: int = 3,
    token: Token | None = None,
    labelled: bool = True,
    searches: bool = False,
) -> Iterator[tuple[str, Any, Any]]:
    """Both processes of a run: the learner's address, the two servers."""
    table, addresses = ProducerTable(limit=4096), {}
    for number in range(producers):
        table.opened(f"camera-{number:04d}", None, "agent 1", 1000.0 - number)
    table.opened(HOSTILE, "key", "agent", 2000.0).reject("oversize", 3)
    feed = Feed(slots, labelled, HOSTILE, Thumbnail(side=4))
    mine = Sources(run=Path("runs/parked"), peer=addresses.get, token=token)
    theirs = Sources(run=Path("runs/parked"), peer=addresses.get, token=token)
    with receiving(table, sources=mine) as receiver, serving(feed, sources=theirs) as (learner, v):
        assert v is not None
        if searches:
            v.search = PictureSearch(feed.memory, decode, encode)
        while len(feed.memory) < slots or feed.number < slots + 64:
            v.slots.consume(feed.step())
        addresses |= {"receiver": receiver.address, "learner": learner.address}
        yield learner.address + "/", learner, receiver


def test_a_person_logs_in_behind_a_proxy_and_finds_a_picture(chromium: Any, tmp_path: Path) -> None:
    with run(token=Token(SECRET)) as (address, _, _r), proxied(address[:-1], tmp_path) as url:
        bearer = {"authorization": f"Bearer {SECRET}"}
        with httpx.Client(base_url=url, trust_env=False) as prometheus:
            assert prometheus.get("metrics").status_code == 401
            assert "stream_ssl_build_info" in prometheus.get("metrics", headers=bearer).text
            assert (
                prometheus.get(url.replace(PREFIX, "") + "metrics", headers=bearer).status_code
                == 404
            )
        with Visit(chromium, url) as visit:
            page = visit.page
            page.fill("#token", "not the token")
            page.press("#token", "Enter")
            page.wait_for_selector(".wrong >> text=This token is wrong.")
            visit.picture("login")
            page.fill("#token", SECRET)
            page.press("#token", "Enter")
            page.wait_for_selector("#verdict.ok >> text=healthy")
            assert page.url == url
            page.wait_for_selector(".chart canvas")
            page.locator("#mosaic").scroll_into_view_if_needed()
            painted = "[...document.querySelectorAll('.tile')].filter(t => t.style.backgroundImage)"
            until(page, f"{painted}.length === 128")
            page.click(".tile >> nth=2")
            page.wait_for_selector("#slot-near .tile >> nth=23")
            assert HOSTILE in page.text_content("#slot-facts")
            visit.picture("slot")
            page.keyboard.press("Escape")
            page.wait_for_selector("#slot", state="hidden")
            page.click("text=Log out")
            page.wait_for_selector("#token")


def test_slots_that_are_replaced_meanwhile_show_their_newer_samples(chromium: Any) -> None:
    """The memory replaces each slot between the listing and the pictures."""

    def newer(route: Any) -> None:
        reply = route.fetch()
        told = reply.json()
        told["ids"] = [f"newer-{one}" for one in told["ids"]]
        route.fulfill(response=reply, json=told)

    with run() as (url, _, _r), Visit(chromium, url) as visit:
        visit.page.route("**/memory/pictures?*", newer)
        visit.page.reload()
        painted = "[...document.querySelectorAll('.tile')].filter(t => t.style.backgroundImage)"
        until(visit.page, f"{painted}.length === 128")


def test_the_keyboard_is_enough(chromium: Any) -> None:
    with run() as (url, _, _r), Visit(chromium, url) as visit:
        page = visit.page
        page.wait_for_selector("#verdict.ok")
        page.locator("#mosaic").scroll_into_view_if_needed()
        page.wait_for_selector(".tile >> nth=127")
        page.focus("#mosaic-file")
        page.keyboard.press("Tab")  # back is off on the first page
        page.keyboard.press("Tab")
        at = "[...document.querySelectorAll('#mosaic .tile')].indexOf(document.activeElement)"
        assert page.evaluate(at) == 0
        for key, where in (("ArrowRight", 1), ("End", 127), ("Home", 0)):
            page.keyboard.press(key)
            assert page.evaluate(at) == where
        page.keyboard.press("ArrowDown")
        below = page.evaluate(at)
        assert below > 3
        page.keyboard.press("Enter")
        page.wait_for_selector("#slot[open] #slot-near .tile")
        page.keyboard.press("Escape")
        assert page.evaluate(at) == below
        page.focus("#map-canvas")
        until(page, "!document.querySelector('#map-note').textContent.includes('…')")
        page.wait_for_selector("#map-note >> text=of the variance")
        page.keyboard.press("ArrowRight")
        page.wait_for_selector("#map-tip >> text=slot")
        page.keyboard.press("Enter")
        page.wait_for_selector("#slot[open]")


def test_the_map_by_umap_and_who_left_with_pictures(chromium: Any) -> None:
    with run(slots=600) as (url, _, _r), Visit(chromium, url) as visit:
        page = visit.page
        page.wait_for_selector("#verdict.ok")
        page.locator("#evicted").scroll_into_view_if_needed()
        page.click("#evicted summary")
        tiles = "[...document.querySelectorAll('#evicted .tile')]"
        until(page, f"{tiles}.some(tile => tile.style.backgroundImage)")
        visit.picture("evicted")
        page.locator("#map").scroll_into_view_if_needed()
        until(page, "!document.querySelector('#map-by option[value=umap]').disabled")
        page.wait_for_selector("#map-note >> text=of the variance")
        page.fill("#map-producer", "nobody")
        page.keyboard.press("Enter")
        page.wait_for_selector("#map-note >> text=no slot of this producer")
        page.fill("#map-producer", HOSTILE)
        page.keyboard.press("Enter")
        page.wait_for_selector("#map-note >> text=600 slots")
        page.select_option("#map-by", "umap")
        page.wait_for_selector("#map-note >> text=UMAP is being computed; until then the axes")
        page.wait_for_selector("#map-note >> text=by UMAP,", timeout=120_000)
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            visit.picture(f"umap-{scheme}")


def test_red_lights_say_why_and_what_to_do(chromium: Any) -> None:
    with run() as (url, learner, receiver), Visit(chromium, url) as visit:
        page = visit.page
        page.wait_for_selector("#verdict.ok")
        receiver.close()
        page.wait_for_selector("#verdict.bad >> text=1 condition needs attention")
        page.click("text=all conditions")
        page.wait_for_selector("#checks .bad >> text=the receiver does not answer at http://127")
        learner.health.set("checkpoint", False, "disk full <b>now</b>")
        page.wait_for_selector("#checks .bad >> text=disk full <b>now</b>")
        visit.picture("red")


def test_a_learner_that_falls_behind_is_not_called_healthy(chromium: Any) -> None:
    with (
        run() as (url, _, _r),
        pytest.MonkeyPatch.context() as patch,
        Visit(chromium, url) as visit,
    ):
        visit.page.wait_for_selector("#verdict.ok >> text=healthy")
        lag = {"value": 90.0, "rise": 50.0, "seconds": 60.0}
        patch.setattr(Facts, "_trend", lambda _, series, *rest: lag if series == "lag" else None)
        visit.page.wait_for_selector("#verdict.warn >> text=worth a look")
        until(visit.page, "document.title === '▲ worth a look — parked'")


def test_each_condition_is_told_once_and_in_one_colour(chromium: Any) -> None:
    """A warning is amber in the pill, the answer and the list; the list opens by its links."""
    with run() as (url, learner, _), Visit(chromium, url) as visit:
        page = visit.page
        page.wait_for_selector("#verdict.ok")
        lag = CONDITIONS["lag"]
        lit = Lit(lag, "", "the learner is 37 min behind the stream", time.time(), lag.remedy)
        learner.health.conditions = (lit,)
        page.wait_for_selector("#verdict.warn >> text=1 condition needs attention")
        page.wait_for_selector("#answers .watch >> text=37 min behind")
        page.wait_for_selector("#marks-note >> text=when a condition began: lag,")
        assert page.locator("text=37 min behind >> visible=true").count() == 1
        told = re.findall(r"\d+", page.inner_text("#conditions summary"))
        assert [int(one) for one in told] == [1, len(CONDITIONS)]
        page.click("nav a[href='#health']")
        page.wait_for_selector("#checks .warning >> text=37 min behind")
        colour = "e => getComputedStyle(e).borderTopColor"
        warn = page.eval_on_selector("#checks .warning", colour)
        assert page.eval_on_selector("#verdict", colour) == warn


def test_producers_with_one_fault_share_a_line(chromium: Any) -> None:
    with run() as (url, learner, _), Visit(chromium, url) as visit:
        page, one, began = visit.page, CONDITIONS["bad-samples"], time.time()
        page.wait_for_selector("#verdict.ok")
        assert not page.is_visible("#marks-note")
        learner.health.conditions = tuple(
            Lit(one, f"kiosk-{n}", f"kiosk-{n} is broken", began, "Read /q.", "/q")
            for n in range(7)
        )
        page.wait_for_selector("#answers >> text=The same holds for kiosk-1, kiosk-2")
        page.wait_for_selector(
            "#answers >> text=(kiosk-0, kiosk-1, kiosk-2, kiosk-3, kiosk-4 and 2 more)"
        )
        page.click("text=all conditions")
        page.wait_for_selector("#checks .warning >> text=kiosk-4 is broken and 2 more. Read /q.")
        assert page.locator("#checks .warning").count() == 1
        page.locator("#charts").scroll_into_view_if_needed()
        page.wait_for_selector("#marks-note >> text=began: bad-samples")
        assert page.inner_text("#marks-note").count("bad-samples") == 1


@pytest.mark.parametrize("width", [1280, 390])
def test_a_receiver_alone_says_why_the_rest_is_missing(chromium: Any, width: int) -> None:
    table = ProducerTable(limit=16)
    table.opened("camera", None, "agent 1", 1000.0)
    viewport = {"viewport": {"width": width, "height": 900}}
    with receiving(table) as receiver, Visit(chromium, receiver.address + "/", **viewport) as visit:
        page, why = visit.page, "because no learner has started in this run folder."
        page.wait_for_selector("#answers .bad")
        for answer in page.locator("#answers li").all():
            assert answer.locator("p").is_visible()
        for part in ("#figures-note", "#memory-note", "#map-note", "#producers-note"):
            page.locator(part).scroll_into_view_if_needed()
            page.wait_for_selector(f"{part} >> text={why}")
        for empty in (
            "#balance",
            "#histograms",
            "#mosaic",
            "#map-canvas",
            "#map-by",
            "#marks-note",
        ):
            assert not page.is_visible(empty), empty
        assert page.locator("#tiles dt").all_inner_texts() == ["received", "producers", "journal"]
        empty = page.locator("#producers-table td.nothing >> visible=true").count()
        assert (empty == 0) == (width == 390), "a phone has no room for empty cells"
        visit.picture(f"receiver-alone-{width}")


def test_a_learner_that_dies_leaves_its_last_slots_marked_as_old(chromium: Any) -> None:
    with run() as (_, learner, receiver), Visit(chromium, receiver.address + "/") as visit:
        page = visit.page
        page.locator("#memory").scroll_into_view_if_needed()
        page.wait_for_selector("#memory-note >> text=300 of 300 slots")
        learner.close()
        page.wait_for_selector(
            "#memory-note >> text=are no longer updated, because the learner does"
        )
        assert page.is_visible("#mosaic")
        assert page.eval_on_selector("#mosaic", "e => getComputedStyle(e).opacity") == "0.5"


def test_a_learner_alone_shows_the_producers_that_it_knows(chromium: Any) -> None:
    with run() as (url, _, receiver):
        receiver.close()
        with Visit(chromium, url) as visit:
            page = visit.page
            page.locator("#producers").scroll_into_view_if_needed()
            page.wait_for_selector("#producers-table tbody >> text=100 % of the memory")
            page.wait_for_selector(
                "#producers-note >> text=rates are not known, because the receiver does not answer."
            )
            assert page.locator("#tiles dt >> text=received").count() == 0


def test_a_phone_shows_what_to_do_and_its_whole_menu(chromium: Any) -> None:
    phone = {"viewport": {"width": 390, "height": 844}}
    with run() as (url, _, _r), Visit(chromium, url, **phone) as visit:
        page = visit.page
        page.wait_for_selector("#answers li >> nth=4")
        assert page.inner_text("#answers li:first-child b") == "To do"
        bottom = "document.querySelector('#answers li').getBoundingClientRect().bottom"
        assert page.evaluate(bottom) < 844
        for link in page.locator("nav a >> visible=true").all():
            box = link.bounding_box()
            assert box["x"] >= 0
            assert box["x"] + box["width"] <= 390, link.inner_text()


def test_the_last_label_of_an_axis_is_whole(chromium: Any) -> None:
    """The label stands in the middle below the last tick, which may be the end of the axis."""
    with run() as (url, _, _r), Visit(chromium, url) as visit:
        page = visit.page
        page.locator("#histograms").scroll_into_view_if_needed()
        page.wait_for_selector("#histograms canvas >> nth=3")
        room = """[...document.querySelectorAll(".chart canvas")].map(c => {
            const over = c.parentElement.querySelector(".u-over").getBoundingClientRect();
            return c.getBoundingClientRect().right - over.right; })"""
        label = """(() => { const pen = document.createElement("canvas").getContext("2d");
            pen.font = "11px system-ui, sans-serif";
            return pen.measureText("10,000").width / 2 })()"""
        assert min(page.evaluate(room)) >= page.evaluate(label)


def test_what_producers_are_called_is_text(chromium: Any) -> None:
    with run() as (url, _, _r), Visit(chromium, url) as visit:
        page = visit.page
        page.locator("#producers").scroll_into_view_if_needed()
        page.wait_for_selector("#producers-table bdi >> nth=3")
        names = page.locator("#producers-table bdi").all_text_contents()
        assert names[0] == "camera-0002"  # silent for longest
        assert HOSTILE in names
        assert "onerror" not in page.evaluate("[...document.images].map(i => i.src).join()")
        page.fill("#producers-find", "CAMERA-0001")
        until(page, "document.querySelectorAll('#producers-table bdi').length === 1")
        until(page, "document.title === '● healthy — parked'")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_phones_and_thousands(chromium: Any, scheme: str) -> None:
    phone = {"viewport": {"width": 360, "height": 740}, "color_scheme": scheme, "has_touch": True}
    with run(slots=65_536 if scheme == "dark" else 500, producers=1000, labelled=False) as world:  # noqa: SIM117
        with Visit(chromium, world[0], **phone) as visit:
            page = visit.page
            page.wait_for_selector("#answers li >> nth=4")
            page.locator("#charts").scroll_into_view_if_needed()
            page.wait_for_selector(".chart canvas")
            page.locator("#mosaic").scroll_into_view_if_needed()
            page.wait_for_selector(".tile >> nth=127")
            visit.picture(f"phone-{scheme}")
            page.locator("#producers").scroll_into_view_if_needed()
            page.wait_for_selector("#producers-note >> text=1,001 known")
            page.click("#producers-more")
            page.wait_for_selector("#producers-table bdi >> nth=299")
            wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
            assert page.evaluate(wide) <= 0
            tables = "Math.max(...[...document.querySelectorAll('table')].map(t => t.scrollWidth))"
            assert page.evaluate(tables) <= 360
            assert page.locator("#answers li").count() == 5
            assert page.evaluate("document.querySelector('#answers').offsetHeight") < 3 * 740
            for name in ("--text", "--muted", "--good", "--bad", "--accent"):
                assert contrast(page, name, "--card") >= 4.5, (scheme, name)


DRAW = """import('./static/charts.js').then(({ Charts }) => {
    const parent = document.createElement("div"), charts = new Charts(parent);
    document.body.append(parent);
    const rows = { time: [0, 2], epoch: 1e9, ...VALUES };
    charts.tables = { ROLE: new Proxy(rows, { get: (of, name) => of[name] ?? [null, null] }) };
    charts.limits = LIMITS;
    charts.draw();
    const card = charts.cards.find(({ title }) => title === "TITLE"), [, y] = card.chart.axes;
    return new Promise((done) => setTimeout(done, 50)).then(
        () => [card.figure.querySelector("figcaption").innerText, y._values]);
})"""


def drawn(visit: Any, title: str, role: str, values: Any, limits: Any) -> tuple[str, list[str]]:
    """The names and the labels of the vertical axis of a chart of these values."""
    asked = DRAW.replace("TITLE", title).replace("ROLE", role)
    asked = asked.replace("VALUES", json.dumps(values)).replace("LIMITS", json.dumps(limits))
    names, labels = visit.page.evaluate(asked)
    return names, labels


def test_the_accuracy_before_the_first_update_is_a_level(chromium: Any) -> None:
    limits = {"held_out_first": 0.68, "held_out_chance": 0.1}
    with run() as (url, _, _r), Visit(chromium, url) as visit:
        accuracy = {"held_out": [0.7, 0.75]}
        names, _ = drawn(visit, "Probes, accuracy", "learner", accuracy, limits)
        assert "held out, at the start 68 %" in " ".join(names.split())
        assert "chance 10 %" in " ".join(names.split())


def test_a_process_that_is_gone_has_no_newest_value(chromium: Any) -> None:
    gone = """import('./static/charts.js').then(({ Charts }) => {
        const parent = document.createElement("div"), charts = new Charts(parent);
        document.body.append(parent);
        const of = (time) => new Proxy({ time, epoch: 0 }, {
            get: (rows, name) => rows[name] ?? time.map(() => 1) });
        charts.tables = { receiver: of([0, 2, 98, 100]), learner: of([0, 2]) };
        charts.draw();
        const loss = charts.cards.find(({ title }) => title === "Loss");
        return [loss.figure.querySelector("figcaption").innerText, loss.whole];
    })"""
    with run() as (url, _, _r), Visit(chromium, url) as visit:
        names, whole = visit.page.evaluate(gone)
        assert names.split() == ["Loss", "loss", "\N{EN DASH}"]
        assert whole == [0, 100], "the line ends before the end of the axis"


def test_constants_have_axes_with_different_labels(chromium: Any) -> None:
    cases = {
        ("Effective rank", "learner", "memory_rank", 1.0),
        ("Loss", "learner", "loss", 0.0001),
        ("Probes, accuracy", "learner", "held_out", 0.999),
        ("Lag", "learner", "lag", 0.0),
        ("Age of slots, samples", "learner", "age_p50", 1.0),
        ("Journal", "receiver", "journal", 1.0),
    }
    with run() as (url, _, _r), Visit(chromium, url) as visit:
        for title, role, name, value in cases:
            _, labels = drawn(visit, title, role, {name: [value, value]}, {})
            shown = [label for label in labels if label]
            assert len(shown) == len(set(shown)) > 1, f"{title}: {labels}"
        _, labels = drawn(visit, "Producers", "receiver", {"producers": [2, 2]}, {})
        assert [label for label in labels if label] == ["0", "1", "2"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_group_shows_the_slowest_rank_and_parked_journals(chromium: Any, scheme: str) -> None:
    members = [Member(HOSTILE, "0123456789abcdef"), Member("south", "fedcba9876543210")]
    group = GroupView(members, ["77777777aaaaaaaa"], capacity=64, clock=iter([0.0, 5.0]).__next__)
    for step, seconds in ((0, 0.0), (10, 1.0)):
        work = [
            Work(0.2 * seconds, seconds, 40_000 * step, 64 * step),
            Work(seconds, 0.2 * seconds),
        ]
        group.consume(step, work, 41, [Offset(11, 0), Offset(5, 3)])
    phone = {"viewport": {"width": 360, "height": 740}, "color_scheme": scheme}
    with serving(None, sources=Sources(run=Path("runs/parked"), group=group)) as (server, _):  # noqa: SIM117
        with Visit(chromium, server.address + "/", **phone) as visit:
            page = visit.page
            page.locator("#group-table tbody tr >> nth=1").scroll_into_view_if_needed()
            visit.picture(f"group-{scheme}")
            rows = [row.split() for row in page.locator("#group-table tbody tr").all_inner_texts()]
            assert rows[1][:3] == ["1", "slowest", "south"]
            assert "slowest" not in rows[0]
            assert page.locator("#group-parked").inner_text().endswith("is back: 77777777")
            wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
            assert page.evaluate(wide) <= 0
    with serving(None) as (server, _), Visit(chromium, server.address + "/") as visit:
        visit.page.wait_for_selector("#verdict:not(.wait)")
        assert not visit.page.locator("#group").is_visible()
        assert not visit.page.locator('a[href="#group"]').is_visible()


def test_ticks_stand_where_their_labels_say(chromium: Any) -> None:
    cases = {
        ("[0, 60, 120, 180]", "SECONDS"): ["0 min", "1 min", "2 min", "3 min"],
        ("[0, 30, 60, 90]", "SECONDS"): ["0 s", "30 s", "60 s", "90 s"],
        ("[0.4, 0.405, 0.41]", "PERCENT"): ["40 %", "40.5 %", "41 %"],
        ("[1000000, 1005000]", "NUMBER"): ["1M", "1.005M"],
        ("[0, 0.0005, 0.001]", "NUMBER"): ["0", "5e-4", "0.001"],
        ("[0, 500000, 1000000]", "BYTES"): ["0 MB", "0.5 MB", "1 MB"],
    }
    cases["[0]", "SECONDS"] = ["0 s"]  # a lag that was never more than some milliseconds
    cases["[0, 5e19, 1e20]", "NUMBER"] = ["0", "5e+19", "1e+20"]
    with run() as (url, _, _r), Visit(chromium, url) as visit:
        for (ticks, name), labels in cases.items():
            asked = f"import('./static/charts.js').then(c => c.labels({ticks}, c.FORMATS.{name}))"
            assert visit.page.evaluate(asked) == labels
        steps = visit.page.evaluate("import('./static/charts.js').then(c => c.MOMENTS)")
        assert steps == sorted(steps)
        assert max(later / sooner for sooner, later in pairwise(steps)) <= 4
        spans = (
            "import('./static/charts.js').then(c => [c.span(0, 2), c.span(-1, 1)].map(s => s[0]))"
        )
        assert visit.page.evaluate(spans) == [0, -1.16]
        flat = "import('./static/charts.js').then(c => c.span(1, 1 + 1e-12))"
        least, most = visit.page.evaluate(flat)
        assert most - least > 0.1, "an axis of rounding errors has equal labels"
        assert 120 in steps, "five minutes need more than one tick"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_axe_finds_nothing_serious(chromium: Any, scheme: str, width: int) -> None:
    """On the whole page, in each dialog, on the log-in form and in a runbook."""
    options = {"viewport": {"width": width, "height": 800}, "color_scheme": scheme}
    with run(token=Token(SECRET)) as (url, learner, _), Visit(chromium, url, **options) as visit:
        page = visit.page
        assert serious(page) == [], "\n".join(serious(page))
        page.fill("#token", SECRET)
        page.press("#token", "Enter")
        page.wait_for_selector("#verdict.ok")
        learner.health.set("checkpoint", False, "the disk is full")
        page.wait_for_selector("#verdict.bad")
        page.locator("#charts").scroll_into_view_if_needed()
        page.wait_for_selector(".chart canvas")
        for place in ("#mosaic", "#evicted", "#map", "#producers", "#checkpoints"):
            page.locator(place).scroll_into_view_if_needed()
            page.wait_for_timeout(200)
        page.click("#evicted summary")
        page.click("#dropped summary")
        page.wait_for_selector(".tile >> nth=127")
        page.wait_for_selector("#producers-table bdi >> nth=3")
        visit.picture(f"axe-{scheme}-{width}")
        assert serious(page) == [], "\n".join(serious(page))
        page.click("#producers-table td.name a >> text=camera-0001")
        page.wait_for_selector("#producer-facts dt >> nth=5")
        visit.picture(f"producer-{scheme}-{width}")
        assert serious(page) == [], "\n".join(serious(page))
        page.keyboard.press("Escape")
        page.click("#mosaic .tile >> nth=3")
        page.wait_for_selector("#slot-near .tile >> nth=20")
        assert serious(page) == [], "\n".join(serious(page))
        for address in ("runbooks/lag", "docs/metrics"):
            page.goto(url + address)
            assert serious(page) == [], "\n".join(serious(page))


def serious(page: Any) -> list[str]:
    """The serious and critical findings of axe-core, which the package brings with it."""
    page.evaluate(axe.AXE_FILE_PATH.read_text())
    found = page.evaluate("axe.run(document, { resultTypes: ['violations'] })")["violations"]
    grave = [one for one in found if one["impact"] in ("serious", "critical")]
    return [f"{one['id']}: {node['html'][:120]}" for one in grave for node in one["nodes"][:4]]


def test_the_keyboard_reaches_every_control(chromium: Any) -> None:
    """Tab alone visits each control that is shown; the grid of pictures counts as one."""
    with run() as (url, _, _r), Visit(chromium, url) as visit:
        page = visit.page
        page.wait_for_selector("#verdict.ok")
        # A part of the page asks for its data while it is in view.
        for place, shown in (
            ("#mosaic", ".tile >> nth=127"),
            ("#map", "#map-canvas"),
            ("#producers", "#producers-table bdi >> nth=3"),
            ("#checkpoints", "#checkpoints"),
        ):
            page.locator(place).scroll_into_view_if_needed()
            page.wait_for_selector(shown)
        named = "(e => e.id || e.getAttribute('href') || e.textContent.trim())"
        controls = f"""
            [...document.querySelectorAll("a[href], button, input, select, summary, canvas")]
            .filter(e => e.checkVisibility() && !e.disabled && !e.closest("#mosaic"))
            .filter(e => e.type !== "radio" || e.checked).map({named})"""
        wanted = set(page.evaluate(controls))
        assert {"mosaic-file", "compare", "range-in", "producers-find", "map-canvas"} <= wanted
        page.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
        seen = set()
        for _ in range(4 * len(wanted)):
            page.keyboard.press("Tab")
            seen.add(page.evaluate(f"{named}(document.activeElement)"))
            if wanted <= seen:
                break
        assert wanted - seen == set()


def test_one_producer_has_an_address(chromium: Any) -> None:
    with run(producers=1000) as (url, _, _r), Visit(chromium, url) as visit:
        page = visit.page
        page.locator("#producers").scroll_into_view_if_needed()
        page.fill("#producers-find", "onerror")
        until(page, "document.querySelectorAll('#producers-table bdi').length === 1")
        until(page, "document.querySelector('#producers-table .tile').style.backgroundImage")
        page.click("#producers-table td.name a")
        page.wait_for_selector("#producer[open] #producer-pictures .tile >> nth=23")
        assert page.inner_text("#producer-title") == HOSTILE
        assert "3 oversize" in page.inner_text("#producer-facts")
        address = page.url
        assert "#producer/" in address
        page.keyboard.press("Escape")
        until(page, "location.hash === '#producers'")
        page.goto(address)  # as a link from elsewhere
        page.reload()
        page.wait_for_selector("#producer[open] #producer-pictures .tile >> nth=23")
        page.click("#producer-evicted")
        until(page, "document.querySelector('#mosaic-producer').value.endsWith('cam')")
        page.wait_for_selector("#evicted[open] tbody tr >> nth=3")
        page.fill("#mosaic-producer", "nobody")
        page.keyboard.press("Enter")
        page.wait_for_selector("#mosaic-where >> text=no slot of this producer")
        page.fill("#mosaic-producer", "")
        page.keyboard.press("Enter")
        page.wait_for_selector("#mosaic .tile >> nth=127")


def test_a_picture_is_searched_for(chromium: Any, tmp_path: Path) -> None:
    good, bad = tmp_path / "<b>good.png", tmp_path / "bad.png"
    good.write_bytes(png(torch.zeros(9, 9, 3, dtype=torch.uint8).numpy()))
    bad.write_bytes(b"not a picture")
    with run(searches=True) as (url, _, _r), Visit(chromium, url) as visit:
        page = visit.page
        page.locator("#mosaic").scroll_into_view_if_needed()
        page.set_input_files("#mosaic-file", str(good))
        page.wait_for_selector("#slot[open] #slot-near .tile >> nth=47")
        assert page.inner_text("#slot-title") == "Slots like <b>good.png"
        until(page, "document.querySelector('#slot-picture').style.backgroundImage")
        visit.picture("search")
        page.keyboard.press("Escape")
        page.set_input_files("#mosaic-file", str(bad))
        page.wait_for_selector("#slot-near >> text=the picture cannot be used")


def test_any_range_and_another_run(chromium: Any, tmp_path: Path) -> None:
    with run() as (url, _, _r), Visit(chromium, url) as visit:
        page = visit.page
        page.wait_for_selector(".chart canvas")
        page.wait_for_timeout(5000)  # a few points of the history
        note = "document.querySelector('#range-note').textContent"
        box = page.locator(".chart .u-over >> nth=0").bounding_box()
        page.mouse.move(box["x"] + 0.3 * box["width"], box["y"] + 40)
        page.mouse.down()
        page.mouse.move(box["x"] + 0.7 * box["width"], box["y"] + 40, steps=5)
        page.mouse.up()
        until(page, f"{note}.includes(' to ')")
        page.focus("#range-reset")
        page.keyboard.press("Enter")
        until(page, f"{note} === ''")
        page.focus("#range-out")
        page.keyboard.press("Enter")  # there is no longer range than all
        assert page.evaluate(note) == ""
        history = {"run": "other <b>run"}
        with httpx.Client(base_url=url, trust_env=False) as client:
            for role in ("receiver", "learner"):
                history[role] = client.get(f"api/{role}/history?track=whole").json()
        file = tmp_path / "history.json"
        file.write_text(json.dumps(history))
        page.set_input_files("#compare", str(file))
        page.wait_for_selector("#compare-note >> text=dashed: other <b>run")
        visit.picture("compared")
        page.click("#compare-end")
        until(page, "document.querySelector('#compare-note').textContent === ''")
        for wrong in ("", "[]", "{}", '{"learner": {"time": [1], "epoch": 0, "loss": []}}'):
            file.write_text(wrong)
            page.set_input_files("#compare", str(file))
            page.wait_for_selector("#compare-note >> text=is not a history from")
            page.evaluate("document.querySelector('#compare-note').textContent = ''")


def test_shares_are_spelled_as_in_the_terminal(chromium: Any) -> None:
    shares = [0, 0.0004, 0.025, 0.0999, 0.1, 0.46, 0.99, 0.9951, 0.99999, 1]
    with run() as (url, _, _r), Visit(chromium, url) as visit:
        asked = f"import('./static/lib.js').then(l => {shares}.map(v => l.percent(v).join(' ')))"
        assert visit.page.evaluate(asked) == [percent(share) for share in shares]


def until(page: Any, expression: str, seconds: float = 30.0) -> None:
    """Wait for it; Playwright's own way to wait for one is against the page's policy."""
    deadline = time.monotonic() + seconds
    while not page.evaluate(expression):
        assert time.monotonic() < deadline, f"not in {seconds:g} s: {expression}"
        page.wait_for_timeout(50)


def contrast(page: Any, one: str, other: str) -> float:
    """Of two colours of the page's style, as WCAG 2 defines it."""
    light = []
    for name in (one, other):
        text = page.evaluate(
            """name => { const i = document.createElement("i"); i.style.color = `var(${name})`;
            document.body.append(i); const c = getComputedStyle(i).color; i.remove(); return c }""",
            name,
        )
        channels = [float(part) / 255 for part in text.strip("rgba()").split(",")[:3]]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        light.append(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2])
    return (max(light) + 0.05) / (min(light) + 0.05)
