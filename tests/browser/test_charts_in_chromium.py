"""The charts of the page, and the numbers on them, in a real Chromium."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from chromium_page import HOSTILE, Visit, run, until
from page_world import serving

from stream_ssl.batch import Offset
from stream_ssl.learning.ranks import Work
from stream_ssl.observe.page.api import Sources
from stream_ssl.observe.page.group import GroupView, Member
from stream_ssl.observe.wording import percent

pytestmark = [pytest.mark.browser, pytest.mark.timeout(180)]


def test_the_last_label_of_an_axis_is_not_cut_off(chromium: Any) -> None:
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
    """Return the names of a chart of these values, and the labels of its vertical axis."""
    asked = DRAW.replace("TITLE", title).replace("ROLE", role)
    asked = asked.replace("VALUES", json.dumps(values)).replace("LIMITS", json.dumps(limits))
    names, labels = visit.page.evaluate(asked)
    return names, labels


def test_the_chart_of_accuracy_shows_the_accuracy_at_the_start(chromium: Any) -> None:
    limits = {"held_out_first": 0.68, "held_out_chance": 0.1}
    with run() as (url, _, _r), Visit(chromium, url) as visit:
        accuracy = {"held_out": [0.7, 0.75]}
        names, _ = drawn(visit, "Held-out images, accuracy", "learner", accuracy, limits)
        assert "kNN at the start 68 %" in " ".join(names.split())
        assert "chance 10 %" in " ".join(names.split())


def test_the_page_loads_the_charts_again_after_a_reboot_of_the_machine(chromium: Any) -> None:
    """The processes count seconds anew, so there may be no row newer than those of the page."""
    with run() as (url, _, _r), Visit(chromium, url) as visit:
        page = visit.page
        page.locator("#charts").scroll_into_view_if_needed()
        with page.expect_request(
            lambda one: re.search(r"receiver/history\?.*since=[1-9]", one.url)
        ):
            pass

        def booted(route: Any) -> None:
            told = route.fetch().json()
            told["epoch"] += 86_400
            if not route.request.url.endswith("since=0"):
                told |= {name: [] for name, values in told.items() if isinstance(values, list)}
            route.fulfill(json=told)

        with page.expect_request("**/receiver/history?*since=0"):
            page.route("**/receiver/history?*", booted)


def test_a_late_answer_about_the_whole_run_does_not_change_the_recent_chart(chromium: Any) -> None:
    late: list[Any] = []
    whole = re.compile("learner/history.*track=whole")
    with run() as (url, _, _r), Visit(chromium, url) as visit:
        page = visit.page
        page.locator("#charts").scroll_into_view_if_needed()
        page.route(whole, lambda route: late.append(route))
        with page.expect_request(whole):
            page.check("input[value=whole]", force=True)
        with page.expect_response("**/learner/history?track=recent&since=0"):
            page.check("input[value=recent]", force=True)
        told = late[0].fetch().json()
        rows = {name: [None] for name, values in told.items() if isinstance(values, list)}
        late[0].fulfill(json={**told, **rows, "time": [5.0]})
        with page.expect_request("**/learner/history?track=recent*") as asked:
            pass
        assert "since=5.01" not in asked.value.url


def test_the_page_loads_the_charts_again_after_an_upgrade_changes_the_series(chromium: Any) -> None:
    """The page is open while the learner restarts with another version."""
    with run() as (url, _, _r), Visit(chromium, url) as visit:
        page = visit.page
        page.locator("#charts").scroll_into_view_if_needed()
        with page.expect_request(lambda one: re.search(r"learner/history\?.*since=[1-9]", one.url)):
            pass

        def upgraded(route: Any) -> None:
            told = route.fetch().json()
            told["sharpness"] = [1.0] * len(told["time"])
            del told["lag"]
            route.fulfill(json=told)

        with page.expect_request("**/learner/history?*since=0"):
            page.route("**/learner/history?*", upgraded)
        with page.expect_request(lambda one: re.search(r"learner/history\?.*since=[1-9]", one.url)):
            pass


def test_a_chart_shows_no_newest_value_of_a_process_that_has_ended(chromium: Any) -> None:
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


def test_the_labels_of_an_axis_differ_if_the_values_are_constant(chromium: Any) -> None:
    cases = {
        ("Effective rank", "learner", "memory_rank", 1.0),
        ("Loss", "learner", "loss", 0.0001),
        ("Held-out images, accuracy", "learner", "held_out", 0.999),
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
        group.consume(step, work, [21, 20], [Offset(11, 0), Offset(5, 3)])
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


def test_the_labels_of_ticks_show_their_exact_values(chromium: Any) -> None:
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


def test_a_user_can_choose_a_range_and_compare_another_run(chromium: Any, tmp_path: Path) -> None:
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


def test_shares_are_formatted_as_in_the_terminal(chromium: Any) -> None:
    shares = [0, 0.0004, 0.025, 0.0999, 0.1, 0.46, 0.99, 0.9951, 0.99999, 1]
    with run() as (url, _, _r), Visit(chromium, url) as visit:
        asked = f"import('./static/lib.js').then(l => {shares}.map(v => l.percent(v)))"
        assert visit.page.evaluate(asked) == [percent(share) for share in shares]


def test_events_are_marked_and_named(chromium: Any) -> None:
    ask = """import('./static/charts.js').then(({ happened }) => happened({
        receiver: { time: [0, 2, 4, 6], epoch: 1000, producers: [0, 2, 2, 1] },
        learner: { time: [0, 2, 4, 6], epoch: 1000, checkpoint_step: [null, 0, 0, 90],
            drifts: [0, 0, 1, 1] },
    }, { receiver: 990, learner: 1001 }).map(({ at, name }) => `${at} ${name}`))"""
    with run() as (url, _, _r), Visit(chromium, url) as visit:
        assert visit.page.evaluate(ask) == [
            *("990 the receiver started", "1001 the learner started", "1002 2 producers connected"),
            *("1004 the stream changed", "1006 checkpoint at step 90", "1006 1 producer left"),
        ]
        note = visit.page.inner_text("#events-note")
        assert "Short marks at the bottom are checkpoints" in note


def test_smoothed_returns_a_running_mean_of_the_loss(chromium: Any) -> None:
    ask = """import('./static/charts.js').then(({ smoothed }) =>
        [smoothed([0, 3, 0, null, 3]), smoothed(Array(300).fill(2))])"""
    with run() as (url, _, _r), Visit(chromium, url) as visit:
        some, same = visit.page.evaluate(ask)
        assert some == [0, 1, 1.5, None, 3]
        assert same == [2] * 300
