"""What the page costs the learner's thread, in processor time of that thread, whoever looks.

`python -m benchmarks page`. A memory of 65,536 slots; one viewer asks for all that the page shows,
again as soon as it is answered, which is oftener than a browser does.
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
SECONDS = 20.0  # of the thread's processor time
MOST_PERCENT = 2.0
WHO = ("nobody looks", "one looks")


def run() -> list[dict[str, Any]]:
    """Rows of: percent of the learner's thread that goes to the page."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so that this thread's time is all of the step's
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
    """Percent of this thread's time within the view's part of a step, and the number of steps."""
    for _ in range(WARM_UP):  # the first answers are no measure of those that follow
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
    """Ask for all that the page shows, until it is over."""
    while not over.is_set():
        try:
            view.summary()
            rows = view.listing("duplicates", 0, 64)["slots"]
            slots = [row["slot"] for row in rows]
            view.pictures(slots[: view.most_pictures])
            view.slot(slots[0])
            view.map()
            view.evictions(50)
        except Busy:
            continue
