"""The API of the page, without a browser: figures, memory, producers, checkpoints, errors."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import socket
import threading
import time
from base64 import b64decode
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from page_world import SIDE, Feed, receiving, serving
from PIL import Image
from prometheus_client import CollectorRegistry
from table import table

from stream_ssl.batch import Origin
from stream_ssl.learning.records import DroppedSample
from stream_ssl.memory.descriptors import Embedding, Features, Weighted
from stream_ssl.observe.conditions import CONDITIONS
from stream_ssl.observe.metrics import LearnerMetrics, ReceiverMetrics
from stream_ssl.observe.page import api, memory_reader, runbooks
from stream_ssl.observe.page import checkpoints as checkpoints_page
from stream_ssl.observe.page import memory as memory_page
from stream_ssl.observe.page.api import Sources
from stream_ssl.observe.page.checkpoints import checkpoints
from stream_ssl.observe.page.history import HELP, SERIES, FigureHistory, Track
from stream_ssl.observe.page.memory import MemoryView
from stream_ssl.observe.page.producers import PAST, PAST_EVERY, ProducersView
from stream_ssl.observe.page.umap_plane import UmapPlane
from stream_ssl.observe.server import Server
from stream_ssl.receiver.sessions import ProducerTable


def ask(server: Server, question: str, **arguments: object) -> Any:
    reply = httpx.get(
        f"{server.address}/api/{question}",
        params=arguments,
        timeout=20,
        trust_env=False,
        verify=False,
    )
    assert reply.headers["cache-control"] == "no-store"
    assert reply.status_code == 200, reply.text
    return reply.json()


def refused(server: Server, question: str) -> tuple[int, str]:
    reply = httpx.get(f"{server.address}/api/{question}", timeout=20, trust_env=False, verify=False)
    return reply.status_code, reply.json()["error"]


@pytest.fixture
def feed() -> Feed:
    return Feed()


def fill(feed: Feed, view: MemoryView | None, steps: int = 12) -> None:
    """Make steps before the page asks, without the thread of a learner."""
    assert view is not None
    for _ in range(steps):
        view.slots.consume(feed.step())


def test_the_page_shows_the_slots_and_the_statistics_of_the_memory(feed: Feed) -> None:
    with serving(feed) as (server, view):
        fill(feed, view)
        summary = ask(server, "learner/memory")
        assert (summary["occupied"], summary["added"]) == (32, feed.number)
        assert summary["descriptor"] == "embedding"
        assert dict(summary["balance"]["slots"]) == {
            str(label): count
            for label, count in enumerate(np.bincount(feed.memory.labels.numpy()).tolist())
            if count
        }
        assert sum(summary["histograms"]["ages"]["counts"]) == 32
        assert summary["near_duplicates"] is None, "not measured yet"
        listed = ask(server, "learner/memory/slots", sort="duplicates", limit=512)["slots"]
        counts = feed.memory.counts().tolist()
        assert [row["duplicates"] for row in listed] == pytest.approx(
            sorted(counts, reverse=True), abs=1e-3
        )
        for row in listed:
            number = int(feed.memory.ids[row["slot"]])
            assert row["id"] == str(number)
            assert row["origin"]["id"] == f"frame-{number}"
        page = ask(server, "learner/memory/slots", sort="oldest", offset=30, limit=8)
        assert [row["slot"] for row in page["slots"]] == feed.memory.born.argsort()[30:].tolist()


def test_the_page_of_a_slot_shows_its_neighbours(feed: Feed) -> None:
    with serving(feed) as (server, view):
        fill(feed, view)
        told = ask(server, "learner/memory/slot", slot=5, near=3)
        z = feed.memory.embeddings
        cosine = (z @ z[5]).index_fill(0, z.new_tensor([5]).long(), -2.0)
        nearest = cosine.topk(3)
        assert list(told["near"]) == ["embedding"], "the descriptors are the embeddings"
        assert [row["slot"] for row in told["near"]["embedding"]] == nearest.indices.tolist()
        assert told["near"]["embedding"][0]["cosine"] == pytest.approx(
            float(nearest.values[0]), abs=1e-4
        )
        shown = [told["id"], *(row["id"] for row in told["near"]["embedding"])]
        assert told["pictures"]["ids"] == shown, "one wait for the learner is enough"


def test_the_sheet_of_pictures_shows_the_images_of_the_slots(feed: Feed) -> None:
    with serving(feed) as (server, view):
        fill(feed, view)
        told = ask(server, "learner/memory/pictures", slots="3,1,30,99")
        assert told["ids"] == [*(str(int(feed.memory.ids[s])) for s in (3, 1, 30)), None]
        sheet = Image.open(io.BytesIO(b64decode(told["sheet"].partition(",")[2])))
        assert told["tile"] == SIDE
        pixels = np.asarray(sheet).astype(int)
        images = feed.memory.images
        assert images is not None
        for at, slot in enumerate((3, 1, 30)):
            x, y = SIDE * (at % told["columns"]), SIDE * (at // told["columns"])
            tile = pixels[y : y + SIDE, x : x + SIDE]
            difference = np.abs(tile - images[slot].permute(1, 2, 0).numpy())
            assert difference.mean() < 12  # of noise, through JPEG; another picture has 85


def test_a_weighted_descriptor_is_named_by_its_parts() -> None:
    descriptor = Weighted([Embedding(), Features(dims=8)])
    assert memory_page._in_words(descriptor) == "embedding and features"


def test_the_map_keeps_its_axes_while_the_memory_is_the_same(feed: Feed) -> None:
    with serving(feed) as (server, view):
        fill(feed, view)
        first = ask(server, "learner/memory/map")
        assert first["slots"] == list(range(32))
        z = feed.memory.embeddings.numpy()
        centred = z - z.mean(axis=0)
        variance = np.linalg.svd(centred, compute_uv=False) ** 2
        assert first["share"] == pytest.approx((variance / variance.sum())[:2].tolist(), abs=1e-3)
        assert view is not None
        view._snapshot = None
        again = ask(server, "learner/memory/map")
        assert (again["x"], again["y"]) == (first["x"], first["y"])  # signs of axes are kept


def test_a_map_by_umap_of_too_few_slots_falls_back_to_pca(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(UmapPlane, "installed", lambda *_: True)
    feed = Feed(slots=3)
    with serving(feed) as (server, view):
        fill(feed, view)
        told = ask(server, "learner/memory/map", by="umap")
        assert (told["by"], told["note"]) == ("pca", "UMAP needs at least 4 slots")


def test_the_map_of_one_producer_keeps_the_places_of_its_slots(feed: Feed) -> None:
    with serving(feed) as (server, view):
        fill(feed, view, steps=2)
        feed.producer = "yard"
        fill(feed, view, steps=2)
        whole = ask(server, "learner/memory/map")
        origins = feed.origins.of(feed.memory.ids.tolist())
        for name in ("yard", "camera", "nobody"):
            part = ask(server, "learner/memory/map", producer=name)
            at = [n for n, one in enumerate(origins) if one is not None and one.producer == name]
            assert part["slots"] == at
            assert bool(at) == (name != "nobody")
            for column in ("ids", "x", "y", "labels", "duplicates"):
                assert part[column] == [whole[column][n] for n in at]


def test_a_clock_that_is_set_back_does_not_freeze_the_page(
    feed: Feed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_page, "FRESH", 0.0)
    with serving(feed) as (server, view):
        fill(feed, view)
        assert view is not None
        added = ask(server, "learner/memory")["added"]
        set_back = SimpleNamespace(**vars(time) | {"time": lambda: 0.0})
        monkeypatch.setattr(memory_reader, "time", set_back)
        fill(feed, view)
        until = time.monotonic() + 60.0
        while ask(server, "learner/memory")["added"] == added:
            assert time.monotonic() < until


def test_the_page_shows_the_slots_and_the_offers_of_each_producer(feed: Feed) -> None:
    with serving(feed) as (server, view):
        for name, steps in (("parked", 9), ("walking", 3)):
            feed.producer = name
            fill(feed, view, steps)
        told = ask(server, "learner/memory/producers")
        assert (told["occupied"], told["offered"]) == (32, 96)
        offered = {name: row["offered"] for name, row in told["producers"].items()}
        assert offered == {"parked": 72, "walking": 24}
        came_late = int((feed.memory.ids >= 72).sum())
        held = {name: row["held"] for name, row in told["producers"].items()}
        assert held == {"parked": 32 - came_late, "walking": came_late}
        assert told["producers"]["walking"]["near_duplicates"] == 3  # the copy in each batch
        assert view is not None
        view.slots.fates.clear()  # as in a process that went on from a checkpoint
        again = ask(server, "learner/memory/producers")["producers"]
        assert {name: (row["held"], row["offered"]) for name, row in again.items()} == {
            name: (slots, 0) for name, slots in held.items() if slots
        }


def test_the_page_lists_the_slots_and_evictions_of_one_producer(feed: Feed) -> None:
    """Two producers send in turn. A third name has no slots and no evictions."""
    with serving(feed) as (server, view):
        assert view is not None
        for number in range(24):
            feed.producer = f"cam-{number % 2}"
            view.slots.consume(feed.step())
        told = ask(server, "learner/memory/producers")["producers"]
        everything = ask(server, "learner/memory/slots", limit=512)["slots"]
        for name in ("cam-0", "cam-1"):
            own = ask(server, "learner/memory/slots", limit=512, sort="newest", producer=name)
            of_loop = {one["slot"] for one in everything if one["origin"]["producer"] == name}
            assert {one["slot"] for one in own["slots"]} == of_loop
            assert own["total"] == len(of_loop) == told[name]["held"]
            youngest = min(one["age"] for one in own["slots"])
            newest = told[name]["newest"]
            assert {one["slot"]: one["age"] for one in own["slots"]}[newest["slot"]] == youngest
            gone = ask(server, "learner/memory/evictions", producer=name, limit=256)["evictions"]
            assert gone
            assert all(
                name in (one["origin"]["producer"], (one["by"] or one["origin"])["producer"])
                for one in gone
            )
        assert ask(server, "learner/memory/slots", producer="nobody")["total"] == 0
        assert ask(server, "learner/memory/evictions", producer="nobody")["evictions"] == []


def test_the_page_shows_the_last_dropped_samples_with_their_pictures(feed: Feed) -> None:
    picture_BCHW = torch.randint(0, 256, (30, 3, SIDE, SIDE), dtype=torch.uint8)
    origin = Origin("yard", "lens", "17", 100.0)
    dropped = [
        DroppedSample(origin, 0.125, 3, number - 1, one_CHW, one_CHW.flip(2) if number else None)
        for number, one_CHW in enumerate(picture_BCHW)
    ]
    with serving(feed) as (server, view):
        assert view is not None
        assert ask(server, "learner/memory/dropped") == {"dropped": [], "pictures": None}
        view.jobs.ask(lambda: view.consume(replace(feed.step(), dropped=dropped)))
        told = ask(server, "learner/memory/dropped", limit=24)
        assert [one["twin_label"] for one in told["dropped"]] == list(range(28, 4, -1))
        first = told["dropped"][0]
        assert (first["distance"], first["label"]) == (0.125, 3)
        assert first["origin"]["producer"] == "yard"
        assert first["pictures"] == told["pictures"]["ids"][:2]
        assert len(set(told["pictures"]["ids"])) == 48
        assert len(ask(server, "learner/memory/dropped", limit=1)["pictures"]["ids"]) == 2


def test_the_page_lists_the_newest_evictions_first(feed: Feed) -> None:
    with serving(feed) as (server, view):
        fill(feed, view)
        assert view is not None
        told = ask(server, "learner/memory/evictions", limit=3)["evictions"]
        assert [one["id"] for one in told] == [
            str(one.id) for one in list(view.slots.evictions)[:-4:-1]
        ]
        answer = ask(server, "learner/memory/evictions", limit=256)
        pictures = answer["pictures"]
        assert pictures["tile"] == SIDE
        held = dict(enumerate(map(str, feed.memory.ids.tolist())))
        replaced = [one for one in answer["evictions"] if one["by_id"] is not None]
        assert len(replaced) > 3
        for one in replaced:
            assert held[one["slot"]] == one["by_id"]
            assert one["by"]["id"] == f"frame-{one['by_id']}"
        gone = {str(one.id) for one in view.slots.evictions}
        assert set(pictures["ids"]) == gone | {one["by_id"] for one in replaced}
        left = [one for one in answer["evictions"] if one["by"] and one["by_id"] is None]
        assert all(one["by"]["id"] != f"frame-{held[one['slot']]}" for one in left)


def test_the_page_shows_evicted_grey_images_whose_successors_left_too() -> None:
    feed = Feed(channels=1)
    with serving(feed) as (server, view):
        fill(feed, view)
        assert view is not None
        feed.origins.load({}, [])  # no eviction knows who took its slot
        answer = ask(server, "learner/memory/evictions", limit=256)
        assert {one["by_id"] for one in answer["evictions"]} == {None}
        gone = {str(one.id) for one in view.slots.evictions}
        assert set(answer["pictures"]["ids"]) == gone


@table(
    ("question", "status", "why"),
    [
        ("learner/nothing", 404, "unknown question 'nothing': must be one of state"),
        ("pilot/state", 404, "no process has the role 'pilot'"),
        ("learner/state?x=1", 400, "this question has no argument 'x'"),
        ("learner/history?track=past", 400, "track is 'past': must be one of recent, whole"),
        ("learner/history?since=nan", 400, "since is 'nan': must be a finite number"),
        ("learner/memory/slots?limit=513", 400, "limit is '513': must be a whole number, 1 to 512"),
        ("learner/memory/slots?offset=-1", 400, "offset is '-1'"),
        ("learner/memory/slots?sort=%3Cb%3E", 400, "sort is '<b>': must be one of duplicates"),
        ("learner/memory/slot", 400, "slot is missing: must be a whole number"),
        ("learner/memory/slot?slot=0x5", 400, "slot is '0x5'"),
        ("learner/memory/slot?slot=32", 404, "slot 32: the memory has slots 0 to 31"),
        ("learner/memory/pictures?slots=1,,2", 400, "slots is ''"),
        ("learner/memory/pictures?slots=" + ",".join("1" * 257), 400, "slots has 257 numbers"),
        ("learner/producers", 404, "only the receiver has the table of producers"),
        ("receiver/producers", 502, "no receiver has started in this run folder"),
    ],
)
def test_the_error_of_a_wrong_question_names_the_reason(
    question: str, status: int, why: str
) -> None:
    feed = Feed()
    with serving(feed) as (server, view):
        fill(feed, view)
        got, error = refused(server, question)
        assert got == status, error
        assert why in error


def test_a_starting_learner_and_a_busy_learner_say_why_they_cannot_answer(feed: Feed) -> None:
    with serving(None) as (server, _):
        assert refused(server, "learner/memory") == (
            503,
            "no memory here: this process is still starting, and has no memory yet",
        )
        server.sources.memory = MemoryView(feed.memory, feed.origins)
        server.sources.memory.jobs._jobs.maxsize = -1
        server.sources.memory.jobs.submit = _busy  # type: ignore[method-assign]
        status, error = refused(server, "learner/memory")
        assert (status, error) == (503, "no time; try again")


def _busy(*_: object, **__: object) -> Any:
    from stream_ssl.observe.page.step_jobs import Busy

    raise Busy("no time")


def test_the_list_of_producers_can_be_sorted_and_searched() -> None:
    table, now = ProducerTable(limit=3000), 1000.0
    for number in range(1500):
        record = table.opened(f"camera-{number:04d}", None, "agent", now - number)
        record.samples = number
    table.opened("<b>&", "key-1", "agent", now).reject("oversize", 3)
    with receiving(table) as server:
        told = ask(server, "receiver/producers", sort="samples", limit=2)
        assert (told["total"], told["connected"], told["found"]) == (1501, 1501, 1501)
        assert [row["name"] for row in told["producers"]] == ["camera-1499", "camera-1498"]
        silent = ask(server, "receiver/producers", limit=1)["producers"]
        assert [row["name"] for row in silent] == ["camera-1499"]  # heard of longest ago
        found = ask(server, "receiver/producers", find="CAMERA-00", limit=1000)
        assert found["found"] == len(found["producers"]) == 100
        worst = ask(server, "receiver/producers", sort="rejected", limit=1)["producers"][0]
        assert (worst["name"], worst["rejected"]) == ("<b>&", {"oversize": 3})


def test_a_full_table_forgets_the_producer_that_is_silent_longest() -> None:
    table = ProducerTable(limit=2)
    first = table.opened("a", None, "", 1.0)
    table.opened("b", None, "", 2.0)
    table.heard(first, 3.0)
    table.opened("c", None, "", 4.0)
    assert [record.name for record in table.copy()] == ["a", "c"]
    for number in range(100):
        first.reject(f"reason {number}", 1)
    assert len(first.rejected) <= 33
    assert first.rejected["other"] == 68


def test_the_past_of_a_thousand_producers_has_a_bounded_size() -> None:
    """Ten minutes of each producer: exact rates, 100 B of memory, 600 B of an answer."""
    clock = [1000.0]
    table, view = ProducerTable(limit=4096), ProducersView(lambda: clock[0])
    records = [table.opened(f"camera-{n:04d}", None, "agent", clock[0]) for n in range(1000)]
    sent: list[list[int]] = [[] for _ in records]
    for turn in range(50):  # 25 minutes, while nobody watches
        for number, record in enumerate(records):
            rise = (number + turn) % 7 * 30
            record.samples += rise
            sent[number].append(rise)
        for _ in range(3):  # only one of these copies the table
            view.offer(table.copy)
        clock[0] += PAST_EVERY
    threading.Timer(0.2, lambda: view.offer(table.copy)).start()
    told = view.listing("name", "", 0, 1000)
    for number, row in enumerate(told["producers"]):
        assert len(row["past"]) == PAST
        latest = sent[number][-len(row["past"]) + 1 :]
        assert row["past"][:-1] == [rise / PAST_EVERY for rise in latest]
    assert len(json.dumps(told)) < 600_000
    assert sum(counts.nbytes for _, _, counts in view._past) <= (PAST + 1) * 8 * 1000
    only = view.listing("name", "", 0, 10, name="camera-0001")["producers"]
    assert [row["name"] for row in only] == ["camera-0001"]


def test_each_process_answers_for_the_other(feed: Feed) -> None:
    table = ProducerTable(limit=10)
    table.opened("camera", None, "", 0.0)
    addresses: dict[str, str] = {}
    sources = Sources(run=Path("runs/x"), peer=addresses.get)
    with receiving(table, sources=sources) as receiver:
        other = Sources(run=Path("runs/x"), peer=addresses.get)
        with serving(feed, sources=other) as (learner, _):
            addresses |= {"receiver": receiver.address, "learner": learner.address}
            for server in (receiver, learner):
                for role in ("receiver", "learner"):
                    assert ask(server, f"{role}/state")["role"] == role
                run = ask(server, "run")
                assert {name: state["role"] for name, state in run["states"].items()} == {
                    "receiver": "receiver",
                    "learner": "learner",
                }
                assert len(run["answers"]) == 5
                assert run["problems"] == []
            assert ask(learner, "receiver/producers")["total"] == 1
            assert refused(learner, "receiver/producers?limit=0")[0] == 400
            addresses["receiver"] = learner.address  # an endpoints.json that is out of date
            assert refused(learner, "receiver/state") == (
                502,
                "this is the learner: endpoints.json is out of date",
            )
        addresses["learner"] = "http://127.0.0.1:1"
        status, error = refused(receiver, "learner/state")
        assert status == 502
        assert error.endswith(
            "at http://127.0.0.1:1: nothing listens there, so the process has stopped"
        )
        run = ask(receiver, "run")
        assert run["problems"][0]["says"] == run["states"]["learner"]["error"] == error
        assert [one["level"] for one in run["answers"]].count("bad") == 2
        assert [one["word"] for one in run["answers"]].count("unknown") == 2


def test_the_page_does_not_wait_for_a_hung_process(feed: Feed) -> None:
    """The question has a time limit, and is not sent to a process that is known to hang."""
    with socket.create_server(("127.0.0.1", 0)) as deaf, pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "STATE_SECONDS", 0.2)
        address = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        sources = Sources(run=Path("runs/x"), peer=lambda _: address)
        with serving(feed, sources=sources) as (learner, _):
            status, error = refused(learner, "receiver/state")
            assert (status, "does not answer" in error) == (502, True)
            sources.hung = {address: "the receiver (pid 7) exists"}.__getitem__
            status, error = refused(learner, "receiver/producers")
            assert (status, error) == (502, "the receiver (pid 7) exists")
            run = ask(learner, "run")
            assert [one["name"] for one in run["problems"]] == ["process-hung"]
            assert "First, process-hung: `kill -USR1 7` writes" in run["answers"][-1]["says"]


@pytest.mark.parametrize(
    "body", [b"[1, 2]", b"[" * 100_000, b"\xff", b'{"ok": true}', b'{"role": "learner"}']
)
def test_the_page_names_another_program_at_the_address_of_a_process(
    feed: Feed, monkeypatch: pytest.MonkeyPatch, body: bytes
) -> None:
    monkeypatch.setattr(api, "ask", lambda *_: (200, body))
    sources = Sources(run=Path("runs/x"), peer=lambda _: "http://127.0.0.1:1")
    with serving(feed, sources=sources) as (learner, _):
        problem = ask(learner, "run")["problems"][0]
    assert problem["says"] == "another program than the receiver answers at its address"


def test_the_page_shows_why_a_process_gives_no_state(
    feed: Feed, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = Sources(run=Path("runs/x"), peer=lambda _: "http://127.0.0.1:1")
    refused = b'{"error": "the learner is starting"}'
    for body, why in ((refused, "the learner is starting"), (b"", "status 503")):
        monkeypatch.setattr(api, "ask", lambda *_, body=body: (503, body))
        with serving(feed, sources=sources) as (learner, _):
            problem = ask(learner, "run")["problems"][0]
        assert problem["says"].startswith(f"the receiver at its address gives no state: {why}")


def test_the_page_names_a_process_with_another_token_and_needs_no_new_log_in(
    feed: Feed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """http.token_file was changed, and only the learner was restarted."""
    sources = Sources(run=Path("runs/x"), peer=lambda _: "http://127.0.0.1:1")
    monkeypatch.setattr(api, "ask", lambda *_: (401, b'{"error": "a token is required"}'))
    with serving(feed, sources=sources) as (learner, _):
        problem = ask(learner, "run")["problems"][0]
        told = "the receiver rejects the token in http.token_file"
        assert problem["says"].startswith(told)
        reply = httpx.get(f"{learner.address}/api/receiver/history?track=recent", trust_env=False)
    assert (reply.status_code, reply.json()["error"].startswith(told)) == (502, True)


def test_the_page_serves_the_runbook_of_each_condition() -> None:
    with serving(None) as (server, _):
        for name in ("down", *CONDITIONS):
            reply = httpx.get(f"{server.address}/runbooks/{name}", trust_env=False, verify=False)
            assert reply.status_code == 200
            assert "<h2>Act</h2>" in reply.text
        reply = httpx.get(
            f"{server.address}/runbooks/..%2F..%2FREADME", trust_env=False, verify=False
        )
        assert reply.status_code == 404


def test_the_page_lists_checkpoints_and_names_damage(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    for number in (1, 2):
        path = folder / f"step-{number:09d}"
        path.mkdir(parents=True)
        facts = {"step": number, "samples": 8 * number, "created": 5.0, "other": None}
        (path / "state.json").write_text(json.dumps(facts) if number == 2 else "{")
    (folder / "latest").symlink_to("step-000000002")
    with serving(None, sources=Sources(run=tmp_path)) as (server, _):
        newest, damaged = ask(server, "learner/checkpoints")["checkpoints"]
    assert (newest["step"], newest["samples"], newest["latest"]) == (2, 16, True)
    assert "is not JSON" in damaged["error"]


def test_the_page_reads_a_rewritten_or_unreadable_checkpoint_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "step-000000001"

    def write(samples: int) -> None:
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        (path / "state.json").write_text(json.dumps({"step": 1, "samples": samples, "created": 5}))
        os.utime(path, ns=(samples, samples))

    def full(_: Path) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    write(8)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints_page, "facts_in", full)
        assert "Too many open files" in checkpoints(tmp_path)[0]["error"]
    assert checkpoints(tmp_path)[0]["samples"] == 8
    write(9)  # after a restart from the checkpoint before
    assert checkpoints(tmp_path)[0]["samples"] == 9


def test_the_series_of_the_page_use_existing_metrics() -> None:
    roles = {"receiver": ReceiverMetrics, "learner": LearnerMetrics}
    for role, make in roles.items():
        families = make(CollectorRegistry()).registry.collect()
        exported = {family.name + "_total" * (family.type == "counter") for family in families}
        for series in SERIES[role].values():  # type: ignore[index]
            assert f"stream_ssl_{series.metric}" in exported


def test_the_history_gives_values_rates_and_only_new_rows() -> None:
    now = [100.0]
    metrics = LearnerMetrics(CollectorRegistry())
    wall = [9000.0]
    history = FigureHistory(metrics.registry, "learner", lambda: now[0], wall=lambda: wall[0])
    for turn in range(5):
        metrics._families.set("loss", float(turn))
        history.sample()
        metrics._families.add("trained_samples_total", 20)
        now[0] += 2.0
    read = history.read("recent")
    assert read["time"] == [100.0, 102.0, 104.0, 106.0, 108.0]
    assert read["loss"] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert read["trained"] == [None, 10.0, 10.0, 10.0, 10.0]
    assert read["collisions_true"] == [None] * 5  # absent without labels
    later = history.read("recent", since=104.0)
    assert (later["time"], later["trained"]) == ([106.0, 108.0], [10.0, 10.0])
    assert history.latest()["trained"] == 10.0
    assert read["epoch"] == 9000.0 - 110.0
    wall[0] = 60.0  # set back: rows stay in order, at times of what it says now
    assert history.read("recent")["time"] == read["time"]
    assert history.read("recent")["epoch"] == 60.0 - 110.0


def test_the_track_of_the_whole_run_ends_with_the_newest_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise, after weeks, charts show values of half an hour ago as the newest."""
    monkeypatch.setattr("stream_ssl.observe.page.history.POINTS", 8)
    now = [0.0]
    metrics = LearnerMetrics(CollectorRegistry())
    history = FigureHistory(metrics.registry, "learner", lambda: now[0])
    for turn in range(101):
        now[0] = 100.0 + 2.0 * turn
        metrics._families.set("loss", float(turn))
        history.sample()
        whole = history.read("whole")
        assert whole["time"][-1] == now[0]  # type: ignore[index]
        assert whole["loss"][-1] == turn  # type: ignore[index]
    assert len(whole["time"]) <= 9  # type: ignore[arg-type]


def test_rates_cover_ten_seconds() -> None:
    """A learner with an update every six seconds does not look as if it paused."""
    now = [100.0]
    metrics = LearnerMetrics(CollectorRegistry())
    history = FigureHistory(metrics.registry, "learner", lambda: now[0])
    for turn in range(20):
        metrics._families.add("trained_samples_total", 60 * (turn % 3 == 0))
        history.sample()
        now[0] += 2.0
    trained = history.read("recent", since=110.0)["trained"]
    assert len(trained) == 14  # type: ignore[arg-type]
    assert set(trained) <= {6.0, 12.0}  # type: ignore[call-overload]


def test_each_series_is_explained() -> None:
    """Each series has a sentence, and an anchor on the page of metrics."""
    page = runbooks.render_metrics()
    for role, by_name in SERIES.items():
        for name in by_name:
            metric, sentence = HELP[f"{role}/{name}"]
            assert f'<p id="{metric}">' in page
            assert sentence.endswith(".")
    assert 'href="../' not in page


def test_a_track_keeps_the_whole_run_or_its_end() -> None:
    whole, last = Track(8, 1.0, whole=True), Track(8, 1.0, whole=False)
    for second in range(100):
        for track in (whole, last):
            track.append(float(second), (second,))
    assert [at for at, _ in last.rows(0.0)] == list(range(92, 100))
    kept = [at for at, _ in whole.rows(-1.0)]
    assert kept[0] == 0.0
    assert 4 <= len(kept) <= 8
    assert {b - a for a, b in pairwise(kept)} == {whole.every} == {16.0}
