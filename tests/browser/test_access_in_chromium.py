"""The page behind a proxy, by keyboard, on a phone, and under axe-core, in a real Chromium."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from chromium_page import HOSTILE, SECRET, Visit, run, until

from stream_ssl.observe.http_access import Token

axe = pytest.importorskip("axe_playwright_python.base")

pytestmark = [pytest.mark.browser, pytest.mark.timeout(180)]
PREFIX = "/robots/one"
DOCUMENTED = Path(__file__).parents[2] / "docs" / "page.md"
TEMPORARY = ("proxy", "fastcgi", "uwsgi", "scgi")


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
            photo = bearer | {"content-type": "application/octet-stream"}
            answer = prometheus.post(
                "api/learner/memory/search", content=bytes(5 << 20), headers=photo
            )
            assert "error" in answer.json()  # of the learner, and not of nginx
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


def test_the_keyboard_alone_operates_the_mosaic_and_the_map(chromium: Any) -> None:
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


def test_a_phone_shows_the_first_answer_and_the_whole_menu(chromium: Any) -> None:
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
        page.evaluate("document.querySelector('h1').textContent = 'warehouse-north'")
        assert page.locator("h1").bounding_box()["height"] < 40  # in one line


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_of_a_thousand_producers_fits_a_phone(chromium: Any, scheme: str) -> None:
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
            page.wait_for_selector("#producers-note >> text=1,001 since the receiver started")
            page.click("#producers-more")
            page.wait_for_selector("#producers-table bdi >> nth=299")
            wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
            assert page.evaluate(wide) <= 0
            tables = "Math.max(...[...document.querySelectorAll('table')].map(t => t.scrollWidth))"
            assert page.evaluate(tables) <= 360
            label = "getComputedStyle(document.querySelector('td[data-title=slots]'), '::before')"
            assert page.evaluate(f"{label}.flexShrink") == "0"  # a long value does not break it
            assert page.locator("#answers li").count() == 5
            assert page.evaluate("document.querySelector('#answers').offsetHeight") < 3 * 740
            for name in ("--text", "--muted", "--good", "--bad", "--accent"):
                assert contrast(page, name, "--card") >= 4.5, (scheme, name)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_axe_finds_no_serious_fault(chromium: Any, scheme: str, width: int) -> None:
    """On the whole page, in each dialog, on the log-in form and in a runbook."""
    options = {"viewport": {"width": width, "height": 800}, "color_scheme": scheme}
    with run(token=Token(SECRET)) as (url, learner, _), Visit(chromium, url, **options) as visit:
        page = visit.page
        assert serious(page) == [], "\n".join(serious(page))
        page.fill("#token", SECRET)
        page.press("#token", "Enter")
        page.wait_for_selector("#verdict.ok")
        assert serious(page) == [], "before charts are drawn"
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
    """Return the serious and critical findings of axe-core, which the package contains."""
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


def contrast(page: Any, one: str, other: str) -> float:
    """Return the contrast of two colours of the page's style, as WCAG 2 defines it."""
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
