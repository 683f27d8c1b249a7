"""The JSON API of the page: figures, memory, producers and checkpoints.

Each question is a GET under `api/ROLE/`; only a picture to search for is posted. A process forwards
questions for the other role to the other process of the run. `api/run` has the states of both
processes and the five answers.

An error has a reason and one of these statuses:

- 400: an argument is wrong.
- 404: the thing does not exist.
- 413, 415: a picture is too large, or the content type is wrong.
- 502: the other process does not answer.
- 503: the data is not available now.
"""

from __future__ import annotations

import time
from base64 import b64encode
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from http import HTTPStatus
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from stream_ssl.learning.checkpoint_layout import FOLDER
from stream_ssl.observe import conditions
from stream_ssl.observe.answers import answers, as_json
from stream_ssl.observe.ask import ask, bearer, other_token, state_in
from stream_ssl.observe.conditions import conditions_of
from stream_ssl.observe.facts import Facts
from stream_ssl.observe.health import Health
from stream_ssl.observe.http_access import Token
from stream_ssl.observe.json_response import JsonResponse
from stream_ssl.observe.metric_spec import ROLES, Role
from stream_ssl.observe.page.checkpoints import checkpoints
from stream_ssl.observe.page.producers import SORTS as PRODUCER_SORTS
from stream_ssl.observe.page.producers import ProducersView
from stream_ssl.observe.page.questions import Query, Refused
from stream_ssl.observe.page.step_jobs import Busy
from stream_ssl.observe.problems import census, problems_of
from stream_ssl.originals import codec_in
from stream_ssl.version import version

if TYPE_CHECKING:
    from stream_ssl.feed.originals import KeptOriginals
    from stream_ssl.observe.page.group import GroupView
    from stream_ssl.observe.page.held_out import HeldOutView
    from stream_ssl.observe.page.memory import MemoryView

MOST_ROWS = 512
MOST_NAME = 256
"""The maximum length of a producer's name in a question, in characters."""
MOST_PICTURE = 8 << 20
"""The maximum size of a picture that is searched for, in bytes."""
MOST_SEARCHES = 2
"""The most pictures that are read or searched for at once."""
MOST_ORIGINAL = 5 << 20
"""The maximum size of an original that the page shows, in bytes."""
PEER_SECONDS, STATE_SECONDS = 22.0, 4.0
"""Time-outs in seconds for questions to the other process, and for its `state` alone."""
BYTES = "application/octet-stream"
"""The content type of a posted picture."""
ASKED_BY_PEER = "x-stream-ssl-asked-by"
"""The header of a forwarded question, which is not forwarded again."""
LIMITS = {
    "lag": conditions.LAG_SECONDS,
    "collisions": conditions.COLLISION_PROBABILITY,
    "collapsed_rank": conditions.COLLAPSED_RANK,
}
"""The thresholds that the charts draw."""

Peer = Callable[[str], str | None]
"""Returns the HTTP address of the process with a role, or None if there is none."""


class Hung(Refused):
    """The other process exists and does not answer."""


@dataclass
class Sources:
    """The data that a process can show beside its metrics.

    Any thread may set an attribute as soon as the data exists.

    Attributes:
        memory: the view of a learner's memory; None until the memory is built.
        originals: the files of the memory's samples as they were sent; None: none are kept.
        group: the view of a learner's ranks; None until the ranks have connected.
        held_out: the view of a learner's held-out set; None: it has no set.
        peer: returns the address of the other process.
        gone: returns the state of a process that ended, starts or never ran here; {} otherwise.
        hung: returns a sentence if the process at an address hangs, else an empty string.
    """

    run: Path | None = None
    memory: MemoryView | None = None
    originals: KeptOriginals | None = None
    group: GroupView | None = None
    held_out: HeldOutView | None = None
    producers: ProducersView | None = None
    peer: Peer = lambda _: None
    gone: Callable[[str], Mapping[str, Any]] = lambda _: {}
    hung: Callable[[str], str] = lambda _: ""
    token: Token | None = None


class Api:
    """The handler of all questions under `api/`."""

    def __init__(self, role: Role, health: Health, facts: Facts, sources: Sources) -> None:
        self._role, self._health, self._facts = role, health, facts
        self._sources, self._started, self._searches = sources, time.time(), 0
        self._questions: Mapping[str, Callable[[Query], object]] = {
            "state": self._state,
            "history": self._figures,
            "checkpoints": self._checkpoints,
            "producers": self._producers,
            "ranks": self._ranks,
            "held_out": self._held_out,
            "memory": self._memory,
            "memory/slots": self._slots,
            "memory/slot": self._slot,
            "memory/original": self._original,
            "memory/pictures": self._pictures,
            "memory/map": self._map,
            "memory/evictions": self._evictions,
            "memory/dropped": self._dropped,
            "memory/producers": self._fates,
            "quarantine": self._quarantine,
        }

    def routes(self) -> list[Route]:
        """Return the routes. Starlette answers them in a thread pool, because they may block."""
        return [
            Route("/api/run", self.run),
            Route("/api/{role}/memory/search", self.search, methods=["POST"]),
            Route("/api/{role}/{question:path}", self.answer),
        ]

    async def search(self, request: Request) -> Response:
        """Answer which slots look like the picture in the body, or forward it to the learner."""
        if request.path_params["role"] != "learner":
            return _error(404, "only the learner has a memory to search")
        if self._searches >= MOST_SEARCHES:
            return _error(503, f"{MOST_SEARCHES} pictures are being searched for; try again")
        self._searches += 1
        try:
            data = await _picture_in(request)
            like = partial(self._like, data)
            return await run_in_threadpool(self._reply, request, "memory/search", like, data)
        except Refused as refused:
            return _error(refused.status, str(refused))
        finally:
            self._searches -= 1

    def run(self, _: Request) -> Response:
        """Answer with the states of both processes, what needs attention, and the five answers."""
        states: dict[str, Any] = {}
        for role in ROLES:
            try:
                if role == self._role:
                    states[role] = self._state(Query({}))
                else:
                    reply = self._ask_other(role, "state", "")
                    states[role] = state_in(role, "at its address", *reply)
            except (Refused, ValueError) as error:
                silent = {"error": str(error), "hung": isinstance(error, Hung)}
                states[role] = self._sources.gone(role) or silent
                if self._health.starting:  # the processes of a run start together
                    states[role] = {"role": role, "starting": True}
        found, problems = answers(states), problems_of(states)
        return _json(
            {
                "states": states,
                "problems": problems,
                "conditions": asdict(census(states, problems)),
                "answers": as_json(found),
                "limits": LIMITS,
            }
        )

    def answer(self, request: Request) -> Response:
        """Answer one question, or forward it to the other process."""
        role, question = request.path_params["role"], request.path_params["question"]
        if role not in ROLES:
            why = f"no process has the role {role[:40]!r}: must be receiver or learner"
            return _error(404, why)
        if (here := self._questions.get(question)) is None:
            known = ", ".join(self._questions)
            return _error(404, f"unknown question {question[:40]!r}: must be one of {known}")
        return self._reply(request, question, here)

    def _reply(
        self,
        request: Request,
        question: str,
        here: Callable[[Query], object],
        body: bytes | None = None,
    ) -> Response:
        """Answer with `here` if the question is for this process, or else forward it."""
        role = request.path_params["role"]
        try:
            if role == self._role:
                return _json(here(Query(request.query_params)))
            if ASKED_BY_PEER in request.headers:  # no endless forwarding
                raise Refused(502, f"this is the {self._role}: endpoints.json is out of date")
            status, content = self._ask_other(role, question, request.url.query, body)
            return Response(content, status, {"cache-control": "no-store"}, "application/json")
        except Refused as refused:
            return _error(refused.status, str(refused))
        except LookupError as error:
            return _error(404, str(error.args[0] if error.args else error))
        except Busy as error:
            return _error(503, f"{error}; try again")

    # -- The questions

    def _state(self, query: Query) -> object:
        query.end()
        ready = self._health.ready()
        return {
            "role": self._role,
            "version": version(),
            "run": None if self._sources.run is None else self._sources.run.name,
            "now": time.time(),
            "started": self._started,
            "ok": ready.ok,
            "starting": self._health.starting,
            "problems": self._health.problems(),
            "watched": [
                {"name": one.name, "summary": one.summary.replace("{producer}", "a producer")}
                for one in conditions_of(self._role)
            ],
            "figures": self._facts.history.latest(),
            "facts": self._facts.read(),
        }

    def _figures(self, query: Query) -> object:
        track = query.choice("track", ("recent", "whole"))
        since = query.number("since", 0.0)
        query.end()
        return self._facts.history.read(track, since)

    def _checkpoints(self, query: Query) -> object:
        query.end()
        if self._sources.run is None:
            raise Refused(503, "this process has no run folder")
        return {"checkpoints": checkpoints(self._sources.run / FOLDER)}

    def _producers(self, query: Query) -> object:
        sort, find = query.choice("sort", PRODUCER_SORTS), query.text("find", 64)
        offset, limit = query.integer("offset", 0, 0, 1 << 20), query.integer("limit", 100, 1, 1000)
        name = query.text("name", MOST_NAME) or None
        query.end()
        if self._sources.producers is None:
            raise Refused(404, "only the receiver has the table of producers")
        return self._sources.producers.listing(sort, find, offset, limit, name)

    def _ranks(self, query: Query) -> object:
        query.end()
        if self._role != "learner":
            raise Refused(404, "only the learner has the table of ranks")
        group = self._sources.group
        return {"ranks": [], "parked": []} if group is None else group.summary()

    def _quarantine(self, query: Query) -> object:
        limit = query.integer("limit", 24, 1, 100)
        query.end()
        if (folder := self._health.folders.get("quarantine")) is None:
            raise Refused(404, "only the learner has a quarantine")
        # It imports torch, which a receiver lacks.
        from stream_ssl.observe.page.quarantined import quarantined

        return {"folder": str(folder), "samples": quarantined(Path(str(folder)), limit)}

    def _held_out(self, query: Query) -> object:
        query.end()
        if self._role != "learner":
            raise Refused(404, "only the learner evaluates a held-out set")
        held_out = self._sources.held_out
        return {"queries": 0} if held_out is None else held_out.summary()

    @property
    def _view(self) -> MemoryView:
        if self._sources.memory is not None:
            return self._sources.memory
        if self._role != "learner":
            raise Refused(404, "no memory here: this process has none")
        why = "this process is still starting, and has no memory yet"
        raise Refused(503, f"no memory here: {why}")

    def _memory(self, query: Query) -> object:
        query.end()
        found = self._view.summary()
        # The share is the metric of the answers, so that the page has one number.
        return {**found, "near_duplicates": self._facts.history.latest()["near_duplicates"]}

    def _slots(self, query: Query) -> object:
        sort = query.choice("sort", ("duplicates", "drawn", "oldest", "newest", "stalest"))
        offset = query.integer("offset", 0, 0, 1 << 40)
        limit = query.integer("limit", 128, 1, MOST_ROWS)
        producer = query.text("producer", MOST_NAME) or None
        query.end()
        return self._view.listing(sort, offset, limit, producer)

    def _slot(self, query: Query) -> object:
        slot, near = query.integer("slot", None, 0, 1 << 40), query.integer("near", 12, 1, 64)
        query.end()
        return self._view.slot(slot, near)

    def _original(self, query: Query) -> object:
        slot = query.integer("slot", None, 0, 1 << 40)
        query.end()
        name = (self._view.origin(slot) or {}).get("original")
        if name is None or self._sources.originals is None:
            raise Refused(404, f"the original of slot {slot} is not kept; see originals.budget")
        try:
            data = self._sources.originals.read(name)
        except OSError as error:
            raise Refused(404, f"the original of slot {slot} cannot be read: {error}") from None
        if len(data) > MOST_ORIGINAL:
            raise Refused(
                404,
                f"the original of slot {slot} has {len(data)} bytes, and the page "
                f"shows up to {MOST_ORIGINAL}",
            )
        codec = codec_in(data)
        return {"bytes": len(data), "url": f"data:image/{codec};base64,{b64encode(data).decode()}"}

    def _pictures(self, query: Query) -> object:
        slots = query.integers("slots", max(1, self._view.reader.most_pictures))
        query.end()
        return self._view.pictures(slots)

    def _map(self, query: Query) -> object:
        by = query.choice("by", ("pca", "umap"))
        producer = query.text("producer", MOST_NAME) or None
        query.end()
        return self._view.map(by, producer)

    def _evictions(self, query: Query) -> object:
        limit = query.integer("limit", 50, 1, 256)
        producer = query.text("producer", MOST_NAME) or None
        query.end()
        return self._view.evictions.newest(limit, producer)

    def _dropped(self, query: Query) -> object:
        limit = query.integer("limit", 24, 1, 24)
        query.end()
        return self._view.dropped.newest(limit)

    def _fates(self, query: Query) -> object:
        limit = query.integer("limit", 1000, 1, 1000)
        query.end()
        return {**self._view.producers(limit), "uses": self._facts.uses()}

    def _like(self, data: bytes, query: Query) -> object:
        count = query.integer("count", 24, 1, 64)
        query.end()
        try:
            return self._view.like(data, count)
        except ValueError as error:
            raise Refused(400, f"the picture cannot be used: {error}") from None

    def _ask_other(
        self, role: Role, question: str, query: str, body: bytes | None = None
    ) -> tuple[int, bytes]:
        """Return the status and the body of the other process's answer. Post the body, if given."""
        address = self._sources.peer(role)
        if address is None:
            raise Refused(502, f"no {role} has started in this run folder")
        if why := self._sources.hung(address):
            raise Hung(502, why)
        token = self._sources.token
        headers = {ASKED_BY_PEER: self._role, **bearer(None if token is None else token.secret)}
        if body is not None:
            headers["content-type"] = BYTES
        seconds = STATE_SECONDS if question == "state" else PEER_SECONDS
        try:
            reply = ask(address, f"/api/{role}/{question}?{query}", seconds, headers, body)
        except (OSError, HTTPException) as error:
            why = str(error) or type(error).__name__
            if isinstance(error, ConnectionRefusedError):
                why = "nothing listens there, so the process has stopped"
            raise Refused(502, f"the {role} does not answer at {address}: {why}") from None
        if reply[0] == HTTPStatus.UNAUTHORIZED:  # a browser would log in here again, for ever
            raise Refused(502, other_token(role))
        return reply


async def _picture_in(request: Request) -> bytes:
    """Return the body of a request. A browser lets no other website send this content type."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != BYTES:
        raise Refused(415, f"send the bytes of a picture with the content type {BYTES}")
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > MOST_PICTURE:
            raise Refused(
                413, f"the picture has more than {MOST_PICTURE} bytes: send a smaller one"
            )
    if not data:
        raise Refused(400, "the body is empty: must be a JPEG, PNG or WebP file")
    return bytes(data)


def _json(body: object, status: int = 200) -> JsonResponse:
    return JsonResponse(body, status, {"cache-control": "no-store"})


def _error(status: int, why: str) -> JsonResponse:
    return _json({"error": why}, status)
