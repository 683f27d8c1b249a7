"""The table of a run's ranks on the page."""

from __future__ import annotations

import httpx
import pytest
from page_world import serving

from stream_ssl.batch import Offset
from stream_ssl.learning.ranks import Work
from stream_ssl.observe.page.api import Sources
from stream_ssl.observe.page.group import WINDOW, GroupView, Member

OFFSETS = [Offset(11, 0), Offset(5, 3)]


def test_rates_cover_the_last_seconds_and_the_busiest_rank_counts_as_the_slowest() -> None:
    now = 0.0
    view = GroupView(
        [Member("north", "a1"), Member("south", "b2")], ["c3"], capacity=64, clock=lambda: now
    )
    assert view.summary() == {"ranks": [], "parked": ["c3"], "slowest": None}
    view.consume(0, [Work(), Work()], [0, 0], OFFSETS)
    assert view.summary()["slowest"] is None, "no step yet"
    view.consume(10, [Work(90.0, 0.0, 900, 900), Work(1.0, 89.0, 900, 900)], [0, 0], OFFSETS)
    now = WINDOW
    view.consume(10, [Work(90.0, 0.0, 900, 900), Work(1.0, 89.0, 900, 900)], [21, 20], OFFSETS)
    now = 2 * WINDOW  # work before the last ten seconds does not count
    view.consume(30, [Work(91.0, 9.0, 5900, 940), Work(9.0, 91.0, 2900, 900)], [21, 20], OFFSETS)
    with serving(None, sources=Sources(group=view)) as (server, _):
        told = httpx.get(
            f"{server.address}/api/learner/ranks", trust_env=False, verify=False
        ).json()
    first, second = told["ranks"]
    assert first == {
        "rank": 0,
        "host": "north",
        "samples_per_second": 4.0,
        "busy_per_step": 0.05,
        "waited_per_step": 0.45,
        "sent_bytes_per_step": 250.0,
        "slots": 21,
        "capacity": 32,
        "journal": "a1",
        "record": 11,
    }
    assert (second["slots"], second["samples_per_second"], second["record"]) == (20, 0.0, 5)
    assert second["busy_per_step"] == pytest.approx(0.4)
    assert (told["slowest"], told["parked"], told["steps_per_second"]) == (1, ["c3"], 2.0)


def test_a_run_of_one_process_lists_no_ranks() -> None:
    with serving(None) as (server, _):
        told = httpx.get(
            f"{server.address}/api/learner/ranks", trust_env=False, verify=False
        ).json()
    assert told == {"ranks": [], "parked": []}
