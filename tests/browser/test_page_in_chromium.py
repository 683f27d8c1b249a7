"""The page in a real Chromium: `make browser`. Screenshots go to $STREAM_SSL_SCREENSHOTS."""

from __future__ import annotations

import io
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chromium_page import HOSTILE, Visit, run, until
from page_world import receiving
from PIL import Image
from test_observe_picture_search import png

from stream_ssl.feed.decode import BadSample, Decoder
from stream_ssl.feed.quarantine import Quarantine
from stream_ssl.observe.conditions import CONDITIONS, PresentCondition
from stream_ssl.observe.facts import Facts
from stream_ssl.observe.held_out import HeldOut, HeldOutProbe
from stream_ssl.observe.page.held_out import HeldOutView
from stream_ssl.producers.sources import Synthetic
from stream_ssl.receiver.sessions import ProducerTable

pytestmark = [pytest.mark.browser, pytest.mark.timeout(180)]


def test_the_page_shows_a_map_by_umap_and_pictures_of_evicted_samples(chromium: Any) -> None:
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
        legend = "[...document.querySelectorAll('#map-legend span')].map((one) => one.textContent)"
        assert page.evaluate(legend)[0] == "no duplicate"
        page.select_option("#map-colour", "labels")
        assert page.evaluate(legend) == [f"class {number}" for number in range(4)]
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


def test_the_legend_of_the_map_fits_the_number_of_slots(chromium: Any) -> None:
    told: dict[str, Any] = {"at": 0, "by": "pca", "labels": None, "share": [0.5, 0.5]}
    columns = ("slots", "ids", "x", "y", "duplicates")
    legend = "document.querySelector('#map-legend').innerText"
    with run() as (url, _, _r), Visit(chromium, url) as visit:
        page = visit.page
        page.route("**/memory/map?*", lambda route: route.fulfill(json=told))
        for slots, shown in (([], ""), ([0, 1], "no duplicate\n1 duplicate or more")):
            told |= dict.fromkeys(columns, slots)
            page.reload()
            page.locator("#map").scroll_into_view_if_needed()
            note = "2 slots" if slots else "too few slots"
            page.wait_for_selector(f"#map-note >> text={note}")
            assert page.evaluate(legend) == shown


def test_slots_that_were_replaced_after_the_listing_show_pictures(chromium: Any) -> None:
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


def test_the_page_loads_the_pictures_again_after_a_restart_of_the_learner(chromium: Any) -> None:
    """The dropped samples of each process of the learner are numbered from 0."""
    with run() as (url, _, _r), Visit(chromium, url) as visit:
        page = visit.page
        page.wait_for_selector("#memory[data-known=yes]")

        def restarted(route: Any) -> None:
            told = route.fetch().json()
            told["states"]["learner"]["started"] += 60
            route.fulfill(json=told)

        with page.expect_request("**/memory/pictures?*"):
            page.route("**/api/run", restarted)
        until(page, "document.querySelector('#mosaic .tile').style.backgroundImage")


def test_a_failed_condition_shows_its_reason(chromium: Any) -> None:
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


def test_the_page_says_that_answers_are_old_after_all_processes_ended(chromium: Any) -> None:
    """Otherwise a phone shows "healthy" answers, and the reason is far below."""
    with run() as (url, learner, receiver), Visit(chromium, url) as visit:
        page = visit.page
        page.wait_for_selector("#answers-list .good >> text=None of")
        learner.close()
        receiver.close()
        page.wait_for_selector("#verdict.bad >> text=no answer")
        page.wait_for_selector("#no-answer .bad >> text=or the network is away")
        said = page.inner_text("#no-answer")
        assert re.search(r"answers below are from \d+/\d+/\d{4}, \d", said), "a tab stays for days"
        assert page.title().startswith("▲ no answer — ")
        visit.picture("gone")
        assert all("ERR_CONNECTION_REFUSED" in one for one in visit.wrong)
        visit.wrong.clear()


def test_the_title_of_a_tab_in_the_background_is_up_to_date(chromium: Any) -> None:
    """A user sees only the title of such a tab."""
    with run() as (url, learner, _r), Visit(chromium, url) as visit:
        page = visit.page
        page.wait_for_selector("#verdict.ok >> text=healthy")
        page.evaluate("Object.defineProperty(document, 'hidden', { value: true })")
        with page.expect_request_finished(lambda one: one.url.endswith("/api/run")):
            pass  # a request may have been on its way
        learner.health.set("journal", False, "cannot be read")
        until(page, "document.title.startsWith('▲ 1 condition')")


def test_a_process_that_hangs_is_not_called_healthy(chromium: Any) -> None:
    """The kernel takes the request of a stopped process, and no answer ever comes."""
    with run() as (url, _, _r), Visit(chromium, url) as visit:
        page = visit.page
        page.wait_for_selector("#verdict.ok >> text=healthy")
        page.evaluate("AbortSignal.usual = AbortSignal.timeout")
        page.evaluate("AbortSignal.timeout = (ms) => AbortSignal.usual(ms / 100)")
        page.route("**/api/run", lambda _: None)
        page.wait_for_selector("#verdict.bad >> text=no answer")
        page.wait_for_selector("#no-answer .bad >> text=does not answer")


def test_a_page_of_a_proxy_counts_as_no_answer(chromium: Any) -> None:
    """A proxy whose session has ended sends its own page, with status 200."""
    proxy = {"status": 200, "content_type": "text/html", "body": "<h1>Log in"}
    with run() as (url, _, _r), Visit(chromium, url) as visit:
        page = visit.page
        page.wait_for_selector("#verdict.ok >> text=healthy")
        page.route("**/api/run", lambda route: route.fulfill(**proxy))
        page.wait_for_selector("#verdict.bad >> text=no answer")
        page.wait_for_selector("#no-answer .bad >> text=The answer is not JSON (status 200)")
        page.unroute("**/api/run")
        page.wait_for_selector("#verdict.ok >> text=healthy")
        page.route("**/api/run", lambda route: route.fulfill(**proxy | {"status": 502}))
        page.wait_for_selector("#no-answer .bad >> text=has stopped or is restarting")
        visit.wrong.clear()


def test_ages_are_computed_with_the_clock_of_the_learner(chromium: Any) -> None:
    """A robot without a network may have a wrong clock, and all its times are wrong alike."""

    def two_hours_ahead(route: Any) -> None:
        told = route.fetch().json()
        told["states"]["learner"]["now"] += 7200
        route.fulfill(json=told)

    with run() as (url, _, _r), Visit(chromium, url) as visit:
        page = visit.page
        page.route("**/api/run", two_hours_ahead)
        page.click("#evicted summary")
        page.wait_for_selector("#evicted tbody td >> text=2.0 h ago")


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
        until(
            visit.page,
            "document.title === '▲ worth a look — parked on ' + document.body.dataset.host",
        )


def test_each_condition_is_shown_once_and_in_one_colour(chromium: Any) -> None:
    """A warning is amber in the pill, the answer and the list. Links open the list."""
    with run() as (url, learner, _), Visit(chromium, url) as visit:
        page = visit.page
        page.wait_for_selector("#verdict.ok")
        lag = CONDITIONS["lag"]
        late = PresentCondition(
            lag, "", "the learner is 37 min behind the stream", time.time(), lag.remedy
        )
        learner.health.conditions = (late,)
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


def test_producers_with_the_same_fault_share_a_line(chromium: Any) -> None:
    with run() as (url, learner, _), Visit(chromium, url) as visit:
        page, one, began = visit.page, CONDITIONS["bad-samples"], time.time()
        page.wait_for_selector("#verdict.ok")
        assert not page.is_visible("#marks-note")
        learner.health.conditions = tuple(
            PresentCondition(one, f"kiosk-{n}", f"kiosk-{n} is broken", began, "Read /q.", "/q")
            for n in range(7)
        )
        page.wait_for_selector("#answers >> text=The same condition holds for kiosk-1, kiosk-2")
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
def test_the_page_of_a_receiver_alone_says_why_other_parts_are_missing(
    chromium: Any, width: int
) -> None:
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


def test_the_page_marks_the_slots_of_a_learner_that_has_ended_as_old(chromium: Any) -> None:
    with run() as (_, learner, receiver), Visit(chromium, receiver.address + "/") as visit:
        page = visit.page
        page.locator("#memory").scroll_into_view_if_needed()
        page.wait_for_selector("#memory[data-known=yes]")  # with the pictures, which come last
        page.wait_for_selector("#memory-note >> text=300 of 300 slots")
        learner.close()
        page.wait_for_selector(
            "#memory-note >> text=are no longer updated, because the learner does"
        )
        assert page.is_visible("#mosaic")
        assert page.eval_on_selector("#mosaic", "e => getComputedStyle(e).opacity") == "0.5"


def test_the_page_of_a_learner_alone_shows_the_producers_that_it_knows(chromium: Any) -> None:
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


def test_the_names_of_producers_are_shown_as_text(chromium: Any) -> None:
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
        until(page, "document.title === '● healthy — parked on ' + document.body.dataset.host")


def test_the_dialog_of_a_producer_has_its_own_address(chromium: Any) -> None:
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


def test_the_dialog_of_a_producer_sends_no_request_while_the_tab_is_hidden(chromium: Any) -> None:
    """Each request takes some of the learner's time."""
    with run() as (url, _, _r), Visit(chromium, f"{url}#producer/camera-0000") as visit:
        page, asked = visit.page, []
        page.wait_for_selector("#producer[open] #producer-facts dd")
        page.evaluate("Object.defineProperty(document, 'hidden', { value: true })")
        for number in range(4):  # two seconds each; the dialog would ask every three
            with page.expect_request("**/api/run"):
                pass
            if not number:  # other requests may have been on their way
                page.on("request", lambda one: asked.append(one.url))
        assert {one.rpartition("/api/")[2] for one in asked} == {"run"}


def test_a_user_can_search_for_a_picture(chromium: Any, tmp_path: Path) -> None:
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


OVERHANG = """new Promise((done) => {
    const table = document.querySelector("#held-out-table"), [body] = table.tBodies;
    document.querySelector("#held-out-before").textContent = "59 min ago";
    body.append(body.firstChild);  // a change, at which the cells get the titles of the columns
    setTimeout(() => done(Math.max(...[...body.querySelectorAll(".row")].map(
        (row) => row.getBoundingClientRect().right)) - table.getBoundingClientRect().right));
})"""
"""The pixels by which the longest row of pictures overhangs the table."""


def test_the_evaluation_shows_confused_classes_and_neighbours(chromium: Any) -> None:
    def features(image_BCHW: torch.Tensor) -> torch.Tensor:
        return image_BCHW.flatten(1).float()[:, :2]  # two values do not distinguish ten classes

    source = Synthetic(count=400, size=16, shift=0)
    settings = HeldOut(source, k=5, references_per_class=12, queries_per_class=6)
    probe = HeldOutProbe(settings, Decoder(16), features)
    probe.probe(1)
    probe.probe(2)
    with run(held_out=HeldOutView(probe)) as (url, _, _r), Visit(chromium, url) as visit:
        page = visit.page
        page.get_by_role("link", name="Evaluation").click()
        until(page, "document.querySelectorAll('#confused .track').length === 12")
        assert "class 0" in page.inner_text("#confused")
        rows = page.locator("#held-out-table tbody tr")
        assert rows.count() == 10
        assert re.search(r"\d of 5", rows.first.inner_text())
        assert rows.first.locator("td").nth(1).locator(".tile").count() == 5
        assert "blob:" in rows.first.locator(".tile").first.get_attribute("style")
        visit.picture("evaluation")
        page.set_viewport_size({"width": 390, "height": 844})
        assert page.evaluate(OVERHANG) <= 0


def test_a_run_without_held_out_images_has_no_empty_section(chromium: Any) -> None:
    """Each answer has the status 200, because a browser logs others as errors."""
    with run() as (url, _, _r), Visit(chromium, url) as visit:
        until(visit.page, "document.querySelector('#answers-list li')")
        with visit.page.expect_response("**/api/learner/held_out") as asked:
            visit.page.reload()
        assert asked.value.status == 200
        assert not visit.page.is_visible("#held-out")
        assert visit.page.get_by_role("link", name="Evaluation").count() == 0


def photo(form: str) -> bytes:
    """Return the file of a picture of 96 x 48 pixels, with several kilobytes."""
    pixels_HWC = np.random.default_rng(0).integers(0, 256, (48, 96, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels_HWC).save(file, form)
    return file.getvalue()


def test_the_dialog_of_a_slot_shows_the_original_file(chromium: Any) -> None:
    with run(originals={"sent": photo("WEBP")}) as (url, _, _r), Visit(chromium, url) as visit:
        until(visit.page, "document.querySelector('#mosaic .tile')")
        visit.page.click("#mosaic .tile")
        until(visit.page, "document.querySelector('#slot-original').naturalWidth === 96")
        assert visit.page.is_visible("#slot-original")
        visit.picture("original")


def test_the_dialog_of_a_slot_opens_before_the_learner_answers(chromium: Any) -> None:
    """The learner answers the first question late, when another slot is shown."""
    late: list[Any] = []
    with run() as (url, _, _r), Visit(chromium, url) as visit:
        page = visit.page
        until(page, "document.querySelectorAll('#mosaic .tile').length > 1")
        until(page, "document.querySelector('#mosaic .tile').style.backgroundImage")
        page.route("**/memory/slot?*", lambda route: late.append(route), times=1)
        page.click("#mosaic .tile")
        until(page, "document.querySelector('#slot').open")
        first = page.inner_text("#slot-facts")
        assert "frame-" in first
        assert page.evaluate("document.querySelector('#slot-picture').style.backgroundImage")
        assert "Waiting" in page.inner_text("#slot-near")
        page.click("#slot-close")
        page.click("#mosaic .tile >> nth=1")
        until(page, "document.querySelector('#slot-near .tile')")
        title, facts = page.inner_text("#slot-title"), page.inner_text("#slot-facts")
        with page.expect_response("**/memory/slot?*"):
            late[0].continue_()
        page.wait_for_timeout(300)
        assert (page.inner_text("#slot-title"), page.inner_text("#slot-facts")) == (title, facts)
        assert facts != first


def test_an_answer_of_an_unknown_form_replaces_the_old_verdict(chromium: Any) -> None:
    """A page that is open during an upgrade may not know the answers of the new version."""
    with run() as (url, _, _r), Visit(chromium, url) as visit:
        page = visit.page
        page.wait_for_selector("#verdict.ok")
        page.route("**/api/run", lambda route: route.fulfill(json={"states": {}}))
        page.wait_for_selector("#verdict.bad")
        assert page.inner_text("#verdict") == "no answer"
        assert "Reload the page" in page.inner_text("#no-answer")


def test_the_tooltip_of_a_name_shows_the_whole_name(chromium: Any) -> None:
    cut = "[...document.querySelectorAll('#evicted td.name')].filter((one) => one.textContent)"
    with run(slots=64) as (url, _, _r), Visit(chromium, url) as visit:
        page = visit.page
        page.click("#evicted summary")
        until(page, f"{cut}.length")
        assert page.evaluate(f"{cut}.every((one) => one.title === one.textContent)")


def test_a_phone_lists_only_columns_that_can_be_sorted(chromium: Any) -> None:
    phone = {"viewport": {"width": 390, "height": 844}}
    with run() as (url, _, _r), Visit(chromium, url, **phone) as visit:
        page = visit.page
        page.locator("#producers-table thead").scroll_into_view_if_needed()
        assert page.is_visible("#producers-table th button >> text=last seen")
        for title in ("newest", "may send"):
            assert not page.is_visible(f"#producers-table thead th >> text={title}")


def test_a_column_of_the_learner_sorts_all_producers(chromium: Any) -> None:
    """The receiver does not know the column, so it sends a page of producers in order of names."""
    uses = {"camera-0070": {"slots": 99}, "camera-0003": {"slots": 7}}
    fates = {"occupied": 106, "offered": 106, "producers": {}, "uses": uses}
    names = "[...document.querySelectorAll('#producers-table bdi')].map((one) => one.textContent)"
    with run(producers=80) as (url, _, _r), Visit(chromium, url) as visit:
        page = visit.page
        page.route("**/learner/memory/producers", lambda route: route.fulfill(json=fates))
        page.reload()
        page.locator("#producers").scroll_into_view_if_needed()
        until(page, f"{names}.length === 50")
        page.click("#producers-table th button >> text=slots")
        until(page, f"{names}[0] === 'camera-0070' && {names}[1] === 'camera-0003'")
        assert len(page.evaluate(names)) == 50


def test_parts_without_an_answer_say_that_they_wait(chromium: Any) -> None:
    """A stopped process gives no answer for a while, and an empty frame looks like no data."""
    with run() as (url, _, _r), Visit(chromium, url) as visit:
        page = visit.page
        for question in ("learner/memory*", "learner/memory/map*", "*/checkpoints", "*/producers*"):
            page.route(f"**/api/{question}", lambda _: None)
        page.reload()
        until(page, "document.querySelector('#answers-list li')")
        for part in ("memory", "map", "producers"):
            page.locator(f"#{part}").scroll_into_view_if_needed()
            assert page.inner_text(f"#{part}-note").startswith("Waiting for the ")
        assert page.inner_text("#checkpoints-table tbody") == "Waiting for the learner …"
        page.unroute_all()
        page.reload()
        for part in ("memory", "map", "producers"):
            page.locator(f"#{part}").scroll_into_view_if_needed()
            until(page, f"!document.querySelector('#{part}-note').textContent.includes('Waiting')")


def test_the_table_of_producers_is_shown_before_the_learner_answers(chromium: Any) -> None:
    late: list[Any] = []
    busy = {"status": 503, "body": '{"error": "the learner did not answer within 20 s"}'}
    with run() as (url, _, _r), Visit(chromium, url) as visit:
        page = visit.page
        page.route("**/learner/memory/producers*", lambda route: late.append(route))
        page.route("**/memory/pictures?*", lambda route: route.fulfill(**busy))
        page.reload()
        rows = "document.querySelectorAll('#producers-table tbody tr').length"
        page.evaluate("document.querySelector('#producers').scrollIntoView()")
        until(page, f"{rows} > 3")
        assert "the learner has not answered yet" in page.inner_text("#producers-note")
        page.unroute("**/learner/memory/producers*")
        late[0].continue_()
        until(page, "document.querySelector('#producers-note').textContent.endsWith('connected')")
        page.wait_for_timeout(300)  # in which the pictures are refused
        assert "no longer" not in page.inner_text("#producers-note")


def test_the_page_shows_quarantined_samples_with_their_reason(
    chromium: Any, tmp_path: Path
) -> None:
    quarantine = Quarantine(tmp_path)
    packet = {"source": "lens", "producer": HOSTILE, "sequence": 7, "received": 100.0}
    error = BadSample("corrupt", "the JPEG ends early")
    quarantine.put(error, {"id": "frame-8", "codec": "jpeg"}, b"\xff\xd8", index=0, **packet)
    cut = photo("JPEG")[:-2000]
    quarantine.put(error, {"id": "frame-9", "codec": "jpeg"}, cut, index=1, **packet)
    (tmp_path / "notes.json").write_text("{}")  # of another program
    with run() as (url, learner, _), Visit(chromium, url) as visit:
        learner.health.folders = {"quarantine": tmp_path}
        page = visit.page
        page.click("#quarantined summary")
        until(page, "document.querySelectorAll('#quarantined td').length === 12")
        until(page, "document.querySelector('#quarantined img').naturalWidth === 64")
        assert page.evaluate("document.querySelectorAll('#quarantined img').length") == 1
        visit.picture("quarantined")
        row = page.inner_text("#quarantined tbody")
        assert f"{HOSTILE} / lens / frame-9" in row
        assert "the JPEG ends early" in row
        assert str(tmp_path) in page.inner_text("#quarantined > p")


def test_each_column_tile_and_legend_is_explained(chromium: Any) -> None:
    bare = """[...document.querySelectorAll("th, .tiles dt, .chart figcaption .keys > span:has(i)")]
        .filter((one) => !one.title && !one.querySelector("[title]")).map((one) => one.outerHTML)"""
    links = """[...document.querySelectorAll(".tiles dt, .chart .keys > span:has(i:not(.dashed))")]
        .filter((one) => !one.querySelector("a[href^='docs/metrics#stream_ssl_']"))
        .map((one) => one.outerHTML)"""
    draw = """import('./static/charts.js').then(({ Charts }) => {
        const parent = document.querySelector("#charts"), charts = new Charts(parent);
        const time = [0, 2];
        const all = new Proxy({ time, epoch: 0 }, { get: (rows, name) => rows[name] ?? [1, 2] });
        charts.tables = { receiver: all, learner: all };
        charts.limits = new Proxy({}, { get: () => 1 });
        charts.draw();
        return document.querySelectorAll(".chart .keys i.dashed").length;
    })"""
    with run() as (url, _, _r), Visit(chromium, url) as visit:
        until(visit.page, "document.querySelectorAll('.tiles dt').length > 3")
        assert visit.page.evaluate(draw) > 5
        assert visit.page.evaluate(bare) == []
        assert visit.page.evaluate(links) == []
