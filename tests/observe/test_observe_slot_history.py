"""The history of the slots against a naive twin, and its share of the learner's time."""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import page_world
import pytest
import torch
from page_world import Feed
from torch import Tensor

from stream_ssl.batch import Origin
from stream_ssl.daemon.run_states import PAGE_SECONDS
from stream_ssl.observe.page import api, slot_rows
from stream_ssl.observe.page.memory import FIRST_PATIENCE, MemoryView
from stream_ssl.observe.page.step_jobs import MOST_WAITING, Busy, StepJobs
from stream_ssl.observe.slot_history import EVICTIONS, EvictedPictures, SlotHistory
from stream_ssl.observe.verdict_feed import VerdictFeed
from stream_ssl.wire.messages import Verdict


def test_the_history_of_slots_equals_a_naive_dictionary() -> None:
    feed = Feed(slots=20)
    history = SlotHistory(feed.memory)
    origin: dict[int, Origin | None] = {}  # by id, of all that ever came
    held: dict[int, int] = {}  # id by slot
    followed = 0
    for _ in range(40):
        record = feed.step()
        history.consume(record)
        assert record.admission is not None
        assert record.origins_B is not None
        gone = record.admission.evicted.tolist()
        for number, from_where in zip(record.ids_B.tolist(), record.origins_B, strict=True):
            origin[number] = from_where
        before, held = held, dict(enumerate(feed.memory.ids.tolist()))
        assert feed.origins.of(held.values()) == [origin[number] for number in held.values()]
        lately = history.latest
        assert [one.id for one in lately] == gone
        for one in lately:
            assert one.origin == origin[one.id]
            assert before.get(one.slot) == one.id or one.id in record.ids_B  # this batch's own
            assert one.by == origin[held[one.slot]]  # even if several samples took the slot in turn
        followed += len(lately)
    assert followed > 200


def test_producers_get_a_verdict_on_every_eviction_of_a_large_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The page shows only the last evictions."""
    monkeypatch.setattr(page_world, "BATCH", 2 * EVICTIONS)
    feed = Feed(slots=2 * EVICTIONS)
    history = SlotHistory(feed.memory)
    sent: list[Mapping[str, Sequence[Verdict]]] = []
    told = VerdictFeed(history, SimpleNamespace(wanted=True, send=sent.append))  # type: ignore[arg-type]
    for _ in range(2):
        record = feed.step()
        history.consume(record)
        told.consume(record)
    assert record.admission is not None
    gone = [one.id for one in sent[-1]["camera"] if one.what == "evicted"]
    assert gone == [f"frame-{number}" for number in record.admission.evicted.tolist()]
    assert len(gone) > EVICTIONS


def test_the_pictures_of_evicted_samples_are_their_own() -> None:
    feed = Feed(slots=20)
    pictures = EvictedPictures(feed.memory, clock=lambda: 0.0)
    history = SlotHistory(feed.memory, pictures=pictures)
    image: dict[int, Tensor] = {}
    for _ in range(60):
        record = feed.step()
        history.consume(record)
        assert record.images_BCHW is not None
        image |= dict(zip(record.ids_B.tolist(), record.images_BCHW, strict=True))
    gone = [one.id for one in history.evictions]
    assert len(gone) > 50
    found, shown_nCHW = pictures.of([*gone, -1])
    assert found == gone
    for number, shown in zip(found, shown_nCHW, strict=True):
        assert torch.equal(shown, image[number])


def test_keeping_evicted_pictures_takes_a_small_share_of_the_time() -> None:
    feed, clock = Feed(slots=8), iter(range(1000))
    pictures = EvictedPictures(feed.memory, clock=lambda: float(next(clock)))
    history = SlotHistory(feed.memory, pictures=pictures)
    for _ in range(3):
        history.consume(feed.step())  # the first fills the memory
    found = pictures.of(range(24))[0]
    assert found  # from one second to the next the first were taken,
    assert set(found) <= set(range(8))  # and then none in a thousand
    assert {one.id for one in history.evictions} == set(found)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_jobs_keep_to_their_share_of_the_time() -> None:
    clock = Clock()
    jobs = StepJobs(clock=clock, cost=clock)

    def work() -> None:
        clock.now += 0.02

    with ThreadPoolExecutor(MOST_WAITING) as pool:
        asked = []
        while clock.now < 500.0:  # seconds of a learner whose page is asked without end
            while jobs._jobs.qsize() < 4:
                asked.append(pool.submit(jobs.ask, work))
                threading.Event().wait(0)
            jobs.serve()
            clock.now += 0.1
        assert 0.009 * clock.now < jobs.spent < 0.0101 * clock.now + 0.1
        while not all(future.done() for future in asked):
            clock.now += 10.0
            jobs.serve()


def test_a_snapshot_is_made_at_the_end_of_a_step_that_outlasts_the_question(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {"FRESH": 0.0, "SNAPSHOT_SHARE": 1e9, "PATIENCE": 0.01}.items():
        monkeypatch.setattr(f"stream_ssl.observe.page.memory.{name}", value)
    feed = Feed()
    view = MemoryView(feed.memory, feed.origins)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(view.snapshot)
        while not asked.done():
            view.consume(feed.step())
    first = asked.result()
    assert view.snapshot() is first  # the learner is within a step
    assert view.origin(3) == slot_rows.row(first, 3)["origin"]
    view.consume(feed.step())
    assert view.snapshot().added == feed.memory.added > first.added
    view.close()
    assert view.snapshot().added == feed.memory.added


def test_questions_wait_together_for_a_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    """If questions waited in turn, the last would wait for many times the patience."""
    together = threading.Barrier(3)
    monkeypatch.setattr("stream_ssl.observe.page.memory.wait", lambda *_: together.wait(20))
    feed = Feed()
    view = MemoryView(feed.memory, feed.origins)
    with ThreadPoolExecutor(3) as pool:
        for asked in [pool.submit(view.snapshot) for _ in range(3)]:
            assert isinstance(asked.exception(), Busy)
    assert view.jobs._jobs.qsize() == 1


def test_a_question_waits_for_a_long_step_and_its_viewers_wait_longer() -> None:
    waited: list[float | None] = []

    class Slow(Future[int]):
        def result(self, timeout: float | None = None) -> int:
            waited.append(timeout)
            return 1

    assert StepJobs().result(Slow()) == 1
    page = Path(api.__file__).with_name("static") / "lib.js"
    longest = re.search(r"const LONGEST = ([\d_]+);", page.read_text())
    assert longest
    assert waited == [FIRST_PATIENCE]
    assert 20.0 <= FIRST_PATIENCE < api.PEER_SECONDS
    assert int(longest[1]) / 1000 > api.PEER_SECONDS < PAGE_SECONDS, "in a browser and a terminal"


def test_the_cost_of_a_job_excludes_the_time_of_other_programs() -> None:
    clock, cost = Clock(), Clock()
    jobs = StepJobs(clock=clock, cost=cost)

    def work() -> None:
        clock.now += 8.0
        cost.now += 0.001

    asked = jobs.submit(work), jobs.submit(work)
    jobs.serve()
    assert [one.done() for one in asked] == [True, True]
    assert jobs.spent == pytest.approx(0.002)


def test_a_question_about_a_slot_needs_only_one_pause_of_the_learner() -> None:
    feed = Feed(slots=20)
    for _ in range(4):
        feed.step()
    view = MemoryView(feed.memory, feed.origins)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(view.slot, 3, 2)
        while view.jobs._jobs.qsize() < 2:
            assert not asked.done()
        view.jobs.serve()
        told = asked.result(10)
    assert told["id"] == str(feed.memory.ids[3].item())
    assert {len(rows) for rows in told["near"].values()} == {2}


def test_a_question_about_a_missing_slot_does_not_wait_for_a_step() -> None:
    feed = Feed(slots=20)
    feed.step()
    view = MemoryView(feed.memory, feed.origins)
    with pytest.raises(LookupError, match="slot 20: the memory has slots 0 to 19"):
        view.slot(20)
    with pytest.raises(LookupError, match="slot 99: the memory has slots 0 to 19"):
        view.origin(99)
    assert view.jobs._jobs.empty()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(view.slot, 19)
        while not asked.done():
            view.jobs.serve()
        with pytest.raises(LookupError, match="slot 19 is empty: slots 0 to 7 hold a sample"):
            asked.result(10)


def test_a_job_that_cannot_run_raises_the_reason() -> None:
    jobs = StepJobs()
    with pytest.raises(Busy, match=r"did not answer within 0\.01 s"):
        jobs.ask(lambda: 1, timeout=0.01)
    ran: list[int] = []
    for _ in range(MOST_WAITING - 1):
        with pytest.raises(Busy):
            jobs.ask(lambda: ran.append(1), timeout=0.0)
    with pytest.raises(Busy, match="requests already wait for the learner"):
        jobs.ask(lambda: 1)
    jobs.serve()
    assert ran == []  # those that nobody waits for any more are not run

    def fail() -> None:
        raise LookupError("no such slot")

    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(jobs.ask, fail)
        while not asked.done():
            jobs.serve()
        waits = pool.submit(jobs.ask, fail, 60.0)
        while jobs._jobs.empty():
            assert not waits.done()
        jobs.close()
        with pytest.raises(Busy, match="the learner is stopping"):
            waits.result(10)
        with pytest.raises(Busy, match="the learner is stopping"):
            jobs.ask(fail)
    with pytest.raises(LookupError, match="no such slot"):  # with whoever asked, not the learner
        asked.result()
