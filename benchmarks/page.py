"""The cost of the web page in processor time of the learner's thread, and its speed for a viewer.

`python -m benchmarks page`. The memory has 65,536 slots. One viewer requests everything that the
page shows, again and again without a pause, which is more often than a browser does. The times of
answers are those over HTTP, from a learner that computes steps, with 1,000 producers.
"""

from __future__ import annotations

import threading
import time
import urllib.request
from collections.abc import Callable
from typing import Any

import torch
from prometheus_client import CollectorRegistry

from benchmarks.learner import LARGE, filled, steps_of
from stream_ssl.observe.health import Health
from stream_ssl.observe.metrics import LearnerMetrics, ReceiverMetrics
from stream_ssl.observe.page.api import Sources
from stream_ssl.observe.page.memory import MemoryView
from stream_ssl.observe.page.producers import ProducersView
from stream_ssl.observe.page.step_jobs import Busy
from stream_ssl.observe.server import Server
from stream_ssl.receiver.sessions import ProducerTable

WARM_UP = 5  # steps
SECONDS = 20.0  # seconds of the thread's processor time
MOST_PERCENT = 2.0
WHO = ("nobody looks", "one looks")
PRODUCERS = 1000
TIMES = 10  # each request is timed so often, and the slowest counts
PAUSE = 3.0  # seconds for which a person looks at a slot before opening the next one
MOST_SECONDS = {"first answers": 1.0, "a slot with its neighbours": 0.5, "table of producers": 1.0}


def run() -> list[dict[str, Any]]:
    """Return rows with the percentage of the learner's thread that the page uses."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # this thread's time must include the whole step
    try:
        subject = filled(LARGE, None)
        view, records = MemoryView(subject.memory, subject.origins), steps_of(subject)
        rows = []
        for who in WHO:
            over = threading.Event()
            viewer = threading.Thread(target=look, args=(view, over), daemon=True)
            if who == "one looks":
                viewer.start()
            share, steps = measure(view, records)
            over.set()
            rows.append(
                {
                    "what": f"% of the learner's thread, {LARGE:,} slots, {who}",
                    "value": share,
                    "steps": steps,
                    "target": f"<= {MOST_PERCENT} %",
                    "met": share <= MOST_PERCENT,
                }
            )
        rows += waits(view, records)
        view.jobs.close()
        return rows
    finally:
        torch.set_num_threads(threads)


def measure(view: MemoryView, records: Any) -> tuple[float, int]:
    """Return the percentage of this thread's time that the view uses, and the number of steps."""
    for _ in range(WARM_UP):  # the first answers are not typical
        view.consume(next(records))
    began, spent, steps = time.thread_time(), 0.0, 0
    while (total := time.thread_time() - began) < SECONDS:
        record = next(records)
        before = time.thread_time()
        view.consume(record)
        spent += time.thread_time() - before
        steps += 1
    return 100 * spent / total, steps


def waits(view: MemoryView, records: Any) -> list[dict[str, Any]]:
    """Return rows with the longest time that a viewer waits for an answer over HTTP.

    A question about the memory waits for the end of a step, so it takes as long as a step.
    """
    table, producers = ProducerTable(limit=4 * PRODUCERS), ProducersView()
    for number in range(PRODUCERS):
        table.opened(f"camera-{number}", None, "agent", time.time())
    addresses: dict[str, str] = {}
    sources = (
        Sources(memory=view, peer=addresses.get),
        Sources(producers=producers, peer=addresses.get),
    )
    metrics = LearnerMetrics(CollectorRegistry()), ReceiverMetrics(CollectorRegistry())
    with (
        Server(metrics[0].registry, Health(), "learner", sources=sources[0]) as learner,
        Server(metrics[1].registry, Health(), "receiver", sources=sources[1]) as receiver,
    ):
        addresses |= {"learner": learner.address, "receiver": receiver.address}
        found: dict[str, list[float]] = {what: [] for what in MOST_SECONDS}
        viewer = threading.Thread(target=ask_all, args=(learner.address, found), daemon=True)
        viewer.start()
        while viewer.is_alive():
            view.consume(next(records))
            producers.offer(table.copy)
    return [
        {
            "what": f"s until the page has {what}, {LARGE:,} slots, {PRODUCERS:,} producers",
            "value": max(found[what]),
            "target": f"<= {most} s",
            "met": max(found[what]) <= most,
        }
        for what, most in MOST_SECONDS.items()
    ]


def ask_all(address: str, found: dict[str, list[float]]) -> None:
    """Request TIMES what a viewer waits for, and add the seconds of each request."""

    def get(question: str) -> Any:
        with urllib.request.urlopen(f"{address}/{question}", timeout=60) as answer:
            return answer.read()

    asked: dict[str, Callable[[int], object]] = {
        "first answers": lambda _: (get(""), get("api/run")),
        "a slot with its neighbours": lambda number: get(f"api/learner/memory/slot?slot={number}"),
        "table of producers": lambda _: get("api/receiver/producers?limit=1000"),
    }
    for number in range(TIMES):
        time.sleep(PAUSE)
        for what, request in asked.items():
            began = time.perf_counter()
            request(997 * number)
            found[what].append(time.perf_counter() - began)


def look(view: MemoryView, over: threading.Event) -> None:
    """Request everything that the page shows, until `over` is set."""
    while not over.is_set():
        try:
            view.summary()
            rows = view.listing("duplicates", 0, 64)["slots"]
            slots = [row["slot"] for row in rows]
            view.pictures(slots[: view.reader.most_pictures])
            view.slot(slots[0])
            view.map()
            view.evictions.newest(50)
        except Busy:
            continue
