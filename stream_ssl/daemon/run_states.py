"""The states of a run's processes, asked over HTTP: by its folder, or by the address of its page.

`stream-ssl status` and `stream-ssl watch` make the five answers from these states.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPException
from itertools import count
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlencode, urlsplit

from stream_ssl.daemon.endings import ending, last_end_of_child
from stream_ssl.daemon.endpoints import fault, holder, load
from stream_ssl.observe.answer import WORDS, Answer
from stream_ssl.observe.answers import answers
from stream_ssl.observe.ask import ask, bearer, map_in, other_token, state_in
from stream_ssl.observe.conditions import hung_remedy
from stream_ssl.observe.http_access import Token
from stream_ssl.observe.metric_spec import ROLES, role_of
from stream_ssl.observe.peers import answers as responds
from stream_ssl.observe.peers import hangs
from stream_ssl.process.failures import unreadable_folder
from stream_ssl.wire.run_folder import original_of

HEALTH_SECONDS = 3.0
"""Time-out in seconds of a question to a process."""
PAGE_SECONDS = 25.0
"""Time-out in seconds of a question that a page may forward, or that waits for the learner."""

OF_EACH_RANK = {"memory/producers"}
"""Questions that each rank answers for its own part of the samples and of the slots."""

State = Mapping[str, Any]


@dataclass(frozen=True)
class Reading:
    """The states of the processes at one moment, by names such as "receiver-1", and the answers."""

    states: Mapping[str, State]
    answers: Sequence[Answer]


class Run(Protocol):
    """A run whose processes answer questions.

    Attributes:
        title: the folder or the address.
    """

    title: str

    def read(self) -> Reading:
        """Return the states and the five answers.

        Raises:
            ValueError: nothing can be asked. The sentence names the reason and the remedy.
        """

    def ask(self, role: str, question: str, **arguments: object) -> list[dict[str, Any]]:
        """Return the answer of each process of a role that answers; see docs/page.md.

        Raises:
            ValueError: nothing can be asked.
        """


class RunFolder:
    """A run on this machine, by its folder. Each question reads the addresses again."""

    def __init__(self, folder: Path) -> None:
        self.title, self._folder = str(folder), folder

    def read(self) -> Reading:
        endpoints, token = self._processes()
        answered: dict[str, State] = {}
        for name, entry in endpoints.items():
            state = ask_state(entry["http"], role_of(name), token)
            if state is not None:
                answered[name] = state
        if answered:
            check_no_copy(self._folder, answered)
        ranks = len(self._ranks(endpoints, token)) if "learner" in answered else 1
        # An earlier start of the group may have had more ranks.
        kept = [name for name in endpoints if rank_of(name) < max(1, ranks)]
        names = [role for role in ROLES if role not in map(role_of, kept)]
        silent = [name for name in (*names, *kept) if name not in answered]
        found = dict(answered) | silence(self._folder, endpoints, silent)
        return Reading(found, answers(found))

    def ask(self, role: str, question: str, **arguments: object) -> list[dict[str, Any]]:
        endpoints, token = self._processes()
        path = f"/api/{role}/{question}?{urlencode(arguments)}"
        names = sorted(name for name in endpoints if role_of(name) == role)
        if role == "learner":
            ranks = 1  # the other ranks have the same learner, or are of an earlier start
            if question in OF_EACH_RANK and "learner" in names:
                ranks = max(1, len(self._ranks(endpoints, token)))
            names = sorted(names, key=rank_of)[:ranks]
        found = (ask_json(endpoints[name]["http"], path, token) for name in names)
        return [one for one in found if one is not None]

    def _processes(self) -> tuple[dict[str, dict[str, Any]], str | None]:
        if why := not_a_folder(self._folder):
            raise ValueError(why)
        endpoints = endpoints_of(self._folder)
        return endpoints, token_of(endpoints)

    def _ranks(self, endpoints: Mapping[str, Mapping[str, Any]], token: str | None) -> list[Any]:
        reply = ask_json(endpoints["learner"]["http"], "/api/learner/ranks", token) or {}
        ranks: list[Any] = reply.get("ranks", [])
        return ranks


class RunPage:
    """A run by the address of its page, such as http://127.0.0.1:9109, also of another machine.

    Args:
        address: the address, as a browser takes it.
        token: the secret of `http.token_file`, or None without one.
    """

    def __init__(self, address: str, token: str | None = None) -> None:
        wrong = f"{address} is not the address of a page, such as {EXAMPLE}"
        try:
            parts = urlsplit(address)
        except ValueError:  # such as half an IPv6 address
            raise ValueError(wrong) from None
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ValueError(wrong)
        if "@" in parts.netloc:  # not shown, because it may be a password
            host = parts.netloc.rpartition("@")[2]
            raise ValueError(
                f"the address at {host} contains a user or a password: leave it out, and reach the "
                "page without the proxy that asks for it"
            )
        self.title, self._token = address, token

    def read(self) -> Reading:
        run = self._ask("/api/run")
        try:
            return _reading(run)
        except (LookupError, TypeError, AttributeError, ValueError):
            raise ValueError(f"{self.title} is not the page of a run: it has no answers") from None

    def ask(self, role: str, question: str, **arguments: object) -> list[dict[str, Any]]:
        return [self._ask(f"/api/{role}/{question}?{urlencode(arguments)}")]

    def _ask(self, path: str) -> dict[str, Any]:
        try:
            status, body = ask(self.title, path, PAGE_SECONDS, bearer(self._token))
        except (OSError, HTTPException) as error:
            why = str(error) or type(error).__name__
            raise ValueError(f"{self.title} does not answer: {why}") from None
        try:
            reply = map_in(body)
        except ValueError:
            # A proxy answers with a page of its own, such as 502 Bad Gateway.
            why = "sends no JSON" if status == HTTPStatus.OK else f"answers with status {status}"
            raise ValueError(f"{self.title} is not the page of a run: it {why}") from None
        if status == HTTPStatus.UNAUTHORIZED:
            raise ValueError(f"{self.title} requires a token: give its file with --token_file FILE")
        if status != HTTPStatus.OK:
            why = reply.get("error", "")
            raise ValueError(f"{self.title} answers with status {status} {why}".rstrip())
        return reply


def _reading(run: Mapping[str, Any]) -> Reading:
    """Check the map that a page gave, and return its states and its answers.

    Raises:
        LookupError, TypeError, AttributeError, ValueError: the map is from another program.
    """
    states = {name: dict(state) for name, state in run["states"].items()}
    for state in states.values():
        for name, value in state.get("figures", {}).items():
            if not isinstance(value, (int, float, type(None))):
                raise TypeError(f"the figure {name} is no number")
    given = []
    for one in run["answers"]:
        if one["level"] not in WORDS:
            raise ValueError("unknown level of an answer")
        given.append(Answer(str(one["question"]), one["level"], str(one["says"]), []))
    return Reading(states, given)


EXAMPLE = "http://127.0.0.1:9109"
HOST_AND_PORT = re.compile(r"[\w.\[\]:-]+:\d{1,5}")


def run_at(place: Path, token_file: Path | None = None) -> Run:
    """Return the run of a folder, or of a page if `place` is an address.

    Args:
        place: a folder or an address. A path has lost one slash of an address.
        token_file: the file of the page's token; a folder names its own.

    Raises:
        ValueError: the token file cannot be used, or the address is no address.
    """
    if (address := address_in(place)) is None:
        return RunFolder(place)
    return RunPage(address, None if token_file is None else Token.load(token_file).secret)


def address_in(place: Path) -> str | None:
    """Return the address that a path was made from, None for a folder."""
    scheme, colon, rest = str(place).partition(":/")
    if not colon or scheme.lower() not in ("http", "https"):
        return None
    return f"{scheme.lower()}://{rest.lstrip('/')}"


def not_a_folder(run: Path) -> str | None:
    """Return a sentence if the path cannot be the folder of a run that this user reads, or None."""
    if (why := unreadable_folder(run)) is None and run.exists() and not run.is_dir():
        return f"{run} is a file: give the run's folder, the option `run` of the config file"
    if why is None and HOST_AND_PORT.fullmatch(str(run)) and not run.exists():
        return f"{run} is no folder: the address of a page begins with http://, as http://{run}"
    return why


# -- Questions


def ask_json(address: str, path: str, token: str | None = None) -> dict[str, Any] | None:
    """Return the answer to a question, or None without one."""
    try:
        status, body = ask(address, path, PAGE_SECONDS, bearer(token))
        return map_in(body) if status == HTTPStatus.OK else None
    except (OSError, HTTPException, ValueError):
        return None


def ask_state(address: str, role: str, token: str | None) -> State | None:
    """Return a process's answer to the question `state`, or an error; None if it is silent."""
    try:
        status, body = ask(address, f"/api/{role}/state", HEALTH_SECONDS, bearer(token))
    except (OSError, HTTPException):
        return None
    try:
        return state_in(role, f"at {address}", status, body)
    except ValueError as error:
        return {"error": str(error)}


def silence(
    run: Path, endpoints: Mapping[str, Mapping[str, Any]], silent: Iterable[str]
) -> dict[str, State]:
    """Return the state of each process that does not answer, for `answers`.

    These keys of a state give the reason:

    - pid: the process starts. If the supervisor starts it again, `before` says how it ended.
    - ended: how it ended.
    - absent: it never started in this folder.
    - hung: the reason why it counts as hung.
    - silent: why it answers and gives no figures.
    - busy: whether the reason is that it is too slow.
    - unknown: why endpoints.json cannot be used, so that its address is unknown.
    """
    broken = broken_file(run)
    found: dict[str, dict[str, Any]] = {}
    for name in silent:
        role, entry = role_of(name), endpoints.get(name)
        place = _held_role(run, name)
        own, last = holder(*place), ending(*place)
        # A silent process that has published its address is no longer starting.
        pid = own if own is not None else holder(run, "supervisor")
        starts = pid is not None and (entry is None or pid != entry.get("pid"))
        if starts and broken:
            why = f"the address of the {name} is unknown: {broken}"
            found[name] = {"error": why, "unknown": broken}
        elif starts:
            found[name] = {"role": role, "starting": True, "pid": pid}
            if last is not None and last.end != "stopped" and last.parent == pid:
                found[name]["before"] = last.state()["error"]
            elif own is None and (before := last_end_of_child(run, name, pid)):
                found[name]["before"] = before
        elif own is None and last is not None:
            found[name] = last.state()
        elif entry is None:
            found[name] = {"error": f"no {name} has started in this run folder", "absent": True}
        elif own is not None and responds(entry["http"]):
            found[name] = _without_figures(name, entry["http"], endpoints)
        elif own is not None:
            why = hangs(name, own, entry["http"])
            found[name] = {"error": why, "hung": f"{why}. {hung_remedy(why)}"}
        else:
            found[name] = {"error": f"the {name} does not answer at {entry['http']}"}
    return dict(found)


def _without_figures(
    name: str, address: str, endpoints: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the state of a process that answers and gives no figures."""
    with suppress(OSError, HTTPException, ValueError):
        headers = bearer(token_of(endpoints))
        if ask(address, "/metrics", HEALTH_SECONDS, headers)[0] == HTTPStatus.UNAUTHORIZED:
            return {"error": other_token(name), "silent": other_token(name)}
    return busy(name)


def busy(name: str) -> dict[str, Any]:
    """Return the state of a process that answers too slowly."""
    why = f"the {name} answers, but is too busy to give its figures in time"
    return {"error": why, "silent": why, "busy": True}


def broken_file(run: Path) -> str | None:
    """Return why an endpoints.json of the run cannot be used, or None."""
    return next((why for one in (run, *receivers_of(run).values()) if (why := fault(one))), None)


def check_no_copy(run: Path, answering: Collection[str]) -> None:
    """Raise ValueError if the processes that answer are those of another folder.

    The folder is then a copy. A receiver's own folder has the learner's address too, but no
    checkpoints.
    """
    for name, entry in load(run).items() if (run / "checkpoints").is_dir() else ():
        if name in answering and (original := original_of(run, entry)) is not None:
            raise ValueError(
                f"{run} is a copy of the run in {original}, whose processes answer: give that "
                "folder"
            )


def _held_role(run: Path, name: str) -> tuple[Path, str]:
    """Return the folder in which a process holds its role, and that role."""
    if isinstance(record := load(run).get(name, {}).get("record"), str):
        return Path(record).parent, Path(record).name
    folder = receivers_of(run).get(name)
    return (run, name) if folder is None else (folder, "receiver")


# -- Processes


def token_of(endpoints: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Return the token that the processes require, or None. Raise ValueError if unreadable."""
    files = {entry["token_file"] for entry in endpoints.values() if "token_file" in entry}
    return Token.load(Path(files.pop())).secret if files else None


def endpoints_of(run: Path) -> dict[str, dict[str, Any]]:
    """Return the endpoints of the run's folder, and of its receivers in other folders."""
    found = load(run)
    for name, folder in receivers_of(run).items():
        if (entry := load(folder).get("receiver")) is not None:
            found[name] = entry
    return found


def receivers_of(run: Path) -> dict[str, Path]:
    """Return the folders of the receivers that are not in the run's folder, by their names.

    Learners name the folders of receivers elsewhere on their host, the option `ranks.receivers`.
    """
    below = receivers_below(run)
    folders = {entry.get("receiver") for entry in load(run).values()}
    elsewhere = sorted(Path(folder) for folder in folders if isinstance(folder, str))
    free = (name for number in count() if (name := f"receiver-{number}") not in below)
    return below | dict(zip(free, elsewhere, strict=False))


def receivers_below(run: Path) -> dict[str, Path]:
    """Return the folders of the receivers that `run --receivers` started, by their names."""
    return {folder.name: folder for folder in sorted(run.glob("receiver-*"))}


def rank_of(name: str) -> int:
    """Return the rank of a learner: 0 for "learner", 1 for "learner-1". A receiver gives -1."""
    role, _, number = name.partition("-")
    return int(number or 0) if role == "learner" else -1
