"""The answers to HELLO: which producers get a session, and from which sequence they go on."""

from __future__ import annotations

import logging
import math
import time

from stream_ssl.rate_limited_logger import RateLimitedLogger, printable
from stream_ssl.receiver.access import Access
from stream_ssl.receiver.allow_list import belongs
from stream_ssl.receiver.answers import Answers
from stream_ssl.receiver.credit import Credit, least_served
from stream_ssl.receiver.group_commit import GroupCommit
from stream_ssl.receiver.records import CONNECTED, Counters
from stream_ssl.receiver.sessions import ProducerTable, Session, Sessions
from stream_ssl.wire import CODECS, Hello, Nack, Welcome, WireError
from stream_ssl.wire.run_folder import ANY_NAME

log = logging.getLogger(__name__)

MAX_FIRST = 1 << 62
_AGENT_LENGTH = 80  # most characters of a producer's `agent` in a log line


class Greeter:
    """Opens sessions; the arguments are parts of a `ReceiverProtocol`, and its limits."""

    def __init__(
        self,
        access: Access | None,
        group: GroupCommit,
        sessions: Sessions,
        producers: ProducerTable,
        credit: Credit,
        answers: Answers,
        counters: Counters,
        max_samples: int,
        max_names: int,
    ) -> None:
        self._access = access
        self._group, self._journal = group, group.journal
        self._sessions, self._producers = sessions, producers
        self._credit, self._answers, self._counters = credit, answers, counters
        self._max_samples, self._max_names = max_samples, max_names
        self._epoch = time.time_ns()
        self._log = RateLimitedLogger(log)
        self._hello_log = RateLimitedLogger(log, lines=20)
        # HELLOs that wait for a commit, by producer.
        self._waiting: dict[str, tuple[bytes, str | None, Hello]] = {}

    def take_waiting(self) -> list[tuple[bytes, str | None, Hello]]:
        """Return the HELLOs that waited for a commit, to be handled again."""
        waiting, self._waiting = self._waiting, {}
        return list(waiting.values())

    def hello(
        self, route: bytes, user: str | None, hello: Hello, now: float, wait: bool = True
    ) -> None:
        """Answer a HELLO, which may wait for the next commit if `wait` is True.

        Raises:
            WireError: the producer gets no session.
        """
        name = hello.producer
        if self._access is not None and not self._access.permits(user, name):
            raise WireError("unauthorised", f"this key may not speak for producer {name!r}")
        if hello.first > MAX_FIRST:
            raise WireError("malformed", f"HELLO: first {hello.first} is beyond {MAX_FIRST}")
        if self._credit.closing or self._waits(route, user, hello, wait):
            return
        other = self._sessions.by_producer(name)
        if other is not None and other.route != route and self._loses_to(other, hello, now):
            ago = now - (other.record.connected or now)
            detail = f"the other {name!r} connected {ago:,.0f} s ago ({other.record.agent})"
            raise WireError("superseded", detail)
        if not self._journal.state(name).sequence:
            self._check_names(user, name)
        # Epoch 0 asks whether the name is free; HELLO with the real epoch follows.
        again = other is not None and other.route == route and other.epoch in (0, hello.epoch)
        session = self._open_session(route, user, hello, now, again)
        policy = self._credit.policy
        if policy.share(len(self._sessions), self._credit.room) >= policy.max_packet:
            self._credit.grant(now, quiet=session)  # otherwise the session waits for a turn
        durable = self._journal.state(name)
        welcome = Welcome(
            durable.sequence,
            durable.resume_token,
            session.credit,
            policy.max_packet,
            self._max_samples,
            CODECS,
            self._epoch,
            durable.written,
        )
        if not again:
            after = f"goes on after packet {durable.sequence}" if durable.sequence else "is new"
            text = f"producer {name} ({printable(hello.agent, _AGENT_LENGTH)}) {after}"
            self._hello_log.log(logging.INFO, "hello", text)
        self._answers.send(route, welcome)

    def _waits(self, route: bytes, user: str | None, hello: Hello, wait: bool) -> bool:
        """Return whether a HELLO must wait for the next commit, and keep it until then.

        WELCOME must have the newest `resume`. If the commit fails, only the epoch that sent the
        waiting packets gets an answer: another epoch would reuse their sequences and take their
        ACK for its own.
        """
        name = hello.producer
        epoch = self._group.batch.epochs.get(name)
        if epoch is None or (epoch == hello.epoch and not wait):
            return False
        self._waiting[name] = (route, user, hello)
        if not wait:
            text = f"producer {name} waits until the packets of its earlier run are on the disk"
            self._log.warning("waits", text)
        return True

    def _open_session(
        self, route: bytes, user: str | None, hello: Hello, now: float, again: bool
    ) -> Session:
        name = hello.producer
        durable = self._journal.state(name).sequence
        expected = max(durable, self._group.batch.last_sequences.get(name, 0)) + 1
        missing = max(0, hello.first - expected)
        if missing and durable and name in self._producers.senders:
            raise WireError(
                "malformed",
                f"HELLO: first {hello.first} of {name!r}, but {expected} is next: the packets "
                f"between were never acknowledged; send from {expected}, or take another name",
            )
        key = self._key_name(user)
        session = Session(
            route,
            user,
            name,
            name if key is None or key == ANY_NAME else key,
            hello.epoch,
            expected + missing,
            durable,
            credit_changed=now,
            last_received=now,
            last_acked=now,
            missing=missing,
            served=least_served(list(self._sessions)),
            record=self._producers.opened(
                name, key, printable(hello.agent, _AGENT_LENGTH), now, again
            ),
            verdicts=hello.verdicts,
        )
        self._sessions.open(session)
        self._counters.producer_finished[session.counted_as] = CONNECTED
        if hello.clock and math.isfinite(hello.clock):
            self._counters.producer_clock[session.counted_as] = hello.clock - time.time()
        self._counters.producer_sporadic[session.counted_as] = float(hello.sporadic)
        return session

    def _check_names(self, user: str | None, name: str) -> None:
        """Reject a new name if its key has the most names, because the journal stores each name.

        Raises:
            WireError: with reason "names".
        """
        batch = self._group.batch
        key = self._key_name(user)
        names = {
            *self._journal.producers(),
            *batch.last_sequences,
            *(session.producer for session in self._sessions),
        }
        used = sum(key is None or belongs(other, key) for other in names - {name})
        if used >= self._max_names:
            raise WireError(
                "names",
                f"{name!r} would be one of more than {self._max_names} producers"
                f"{'' if key is None else f' of the key {key!r}'}: use a name again, or raise "
                "receiver.max_names; a name that is away for 30 days is forgotten",
            )

    def _key_name(self, user: str | None) -> str | None:
        return self._access.allow.name_of(user) if self._access is not None else None

    def _loses_to(self, other: Session, hello: Hello, now: float) -> bool:
        """Return whether a HELLO loses against the producer's other connection.

        Otherwise the other connection is superseded, if its epoch is older.
        """
        if other.epoch > hello.epoch or not hello.epoch:
            # A clock may have gone back, so the other session wins only if it is still connected.
            # It also wins against epoch 0, which only asks whether the name is free.
            self._answers.ack(other, now)
            if self._sessions.by_producer(hello.producer) is other:
                return True
        elif other.epoch < hello.epoch:
            detail = f"a newer {hello.producer!r} has connected (epoch {hello.epoch})"
            self._answers.refuse(other.route, Nack(0, "superseded", detail, permanent=True))
        return False
