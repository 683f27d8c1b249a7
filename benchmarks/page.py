"""The cost of the web page in processor time of the learner's thread.

`python -m benchmarks page`. The memory has 65,536 slots. One viewer requests everything that the
page shows, again and again without a pause, which is more often than a browser does.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import torch

from benchmarks.learner import LARGE, filled, steps_of
from stream_ssl.observe.page.memory import MemoryView
from stream_ssl.observe.page.step_jobs import Busy

WARM_UP = 5  # steps
SECONDS = 20.0  # seconds of the thread's processor time
MOST_PERCENT = 2.0
WHO = ("nobody looks", "one looks")


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
            view.evictions(50)
        except Busy:
            continue
