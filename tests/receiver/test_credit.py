"""How credit is shared: the plan by itself, and over TCP."""

import contextlib
import errno
import itertools
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from receiver_peer import DEADLINE, KIB, MIB, Peer, Running, packet
from waiting import until

from stream_ssl.daemon.receive import _journal, _log_end, _why
from stream_ssl.journal.consumer_offsets import ConsumerOffsets
from stream_ssl.journal.errors import JournalError
from stream_ssl.receiver import journal_room
from stream_ssl.receiver.credit import DRAIN_SECONDS, QUIET_SECONDS, CreditPolicy
from stream_ssl.receiver.sessions import TURN_SECONDS
from stream_ssl.receiver.unread_cost import UnreadCost
from stream_ssl.wire import Ack

SMALL = {"max_packet": 64 * KIB, "credit": 256 * KIB, "total_credit": 256 * KIB}


@dataclass
class Holder:
    """The fields of a Session that determine its credit."""

    credit: int = 0
    credit_changed: float = 0.0
    last_received: float = 0.0
    revoked: int = 0
    largest: int = 0
    served: int = 0
    greedy: bool = False
    charge: float = 1.0


def give(holders, grants, now):
    for holder, grant in zip(holders, grants, strict=True):
        if (holder.credit == 0) != (grant == 0):
            holder.revoked = holder.credit if holder.last_received >= holder.credit_changed else 0
            holder.credit_changed = now
        holder.credit = grant


@settings(derandomize=True)
@given(
    max_packet=st.integers(1, 100),
    more=st.integers(0, 300),
    most=st.integers(0, 3000),
    room=st.integers(-50, 5000),
    holders=st.lists(
        st.builds(
            Holder,
            *(st.integers(0, 9), st.floats(0, 9), st.floats(0, 9), st.integers(0, 9)),
            *(st.integers(0, 9), st.integers(0, 999), st.booleans()),
            st.sampled_from([1.0, 1.5, 400.0]),
        ),
        max_size=40,
    ),
    scarce=st.booleans(),
)
def test_grants_stay_within_all_bounds(max_packet, more, most, room, holders, scarce):
    policy = CreditPolicy(max_packet + more, max_packet + more + most, max_packet)
    grants = policy.plan(holders, max(0, room), 9.0, scarce)
    assert len(grants) == len(holders)
    for grant, holder in zip(grants, holders, strict=True):
        assert grant == 0 or min(max_packet, holder.largest or max_packet) <= grant <= policy.each
    assert sum(grants) <= min(policy.total, max(0, room))
    if holders and room >= max_packet and not any(h.credit or h.revoked for h in holders):
        assert any(grants)


def test_producers_share_the_budget_evenly():
    policy = CreditPolicy(each=16, total=40, max_packet=4)
    assert policy.plan([Holder()] * 2, 1000, 0.0) == [16, 16]
    assert policy.plan([Holder()] * 5, 1000, 0.0) == [8] * 5
    assert policy.plan([Holder()] * 5, 20, 0.0) == [4] * 5


def test_more_producers_than_the_credit_allows_take_turns_of_equal_length():
    policy = CreditPolicy(each=4, total=12, max_packet=4)
    holders = [Holder() for _ in range(10)]
    turns, steps = [0] * 10, 10_000
    for step in range(steps):
        now = step * 0.01
        give(holders, policy.plan(holders, 1000, now), now)
        for n, holder in enumerate(holders):
            turns[n] += holder.credit > 0
            holder.served += holder.credit
            holder.last_received = now + 0.001 if holder.credit else holder.last_received
        assert sum(h.credit + h.revoked * (now - h.credit_changed < 0.09) for h in holders) <= 12
    assert sum(turns) > 0.6 * 3 * steps
    assert max(turns) <= 1.1 * min(turns)


def test_greedy_producers_share_scarce_room_evenly_by_bytes():
    """Room comes a little at a time, and the producers are of different speeds."""
    policy = CreditPolicy(each=400, total=4000, max_packet=100)
    holders = [Holder(largest=10, greedy=True) for _ in range(10)]
    camera = Holder(largest=10)  # has a little to send, once a second
    room, now, waits = 0, 0.0, 0
    for step in range(20_000):
        now += 0.01
        room += 20
        everyone = [*holders, camera]
        give(everyone, policy.plan(everyone, room, now, scarce=True), now)
        for speed, holder in enumerate(holders, 1):
            if holder.credit:
                sent = min(10 * speed, holder.credit, room)
                holder.served, holder.last_received, room = holder.served + sent, now, room - sent
        waits += step % 100 == 0
        if waits and camera.credit:
            camera.served, camera.last_received, waits = camera.served + waits, now, 0
    served = [holder.served for holder in holders]
    assert sum(served) > 0.9 * 20 * 20_000
    assert min(served) > 0.97 * max(served)
    assert camera.served > 195


def test_a_producer_that_sends_nothing_has_a_shorter_turn():
    policy = CreditPolicy(each=4, total=4, max_packet=4)
    silent = Holder(credit=4, credit_changed=10.0, last_received=9.0)
    sender = Holder(credit=4, credit_changed=10.0, last_received=10.01)
    for holder, seconds in ((silent, QUIET_SECONDS), (sender, TURN_SECONDS)):
        waiting = Holder(credit_changed=5.0)
        pair = [holder, waiting]
        assert policy.plan(pair, 1000, 10 + 0.9 * seconds) == [4, 0]
        now = 10 + 1.1 * seconds
        give(pair, policy.plan(pair, 1000, now), now)
        assert (holder.credit, waiting.credit) == (0, 0)
        if holder is sender:  # it may have packets under way
            holder.last_received = now + 0.01
            assert policy.plan(pair, 1000, now + DRAIN_SECONDS) == [0, 0]
            now += 0.02 + DRAIN_SECONDS
        assert policy.plan(pair, 1000, now) == [0, 4]


def test_a_policy_with_contradictory_limits_is_refused():
    for each, total, max_packet, says in (
        (4, 8, 5, r"credit 4: must be from max_packet \(5\) to total_credit \(8\)"),
        (8, 4, 2, r"credit 8: must be from max_packet \(2\) to total_credit \(4\)"),
        (4, 8, 0, r"max_packet 0: must be above 0 and at most total_credit \(8\)"),
        (4, 8, 9, r"max_packet 9: .*; lower max_packet, or raise total_credit"),
    ):
        with pytest.raises(ValueError, match=says):
            CreditPolicy(each, total, max_packet)


def test_credit_stops_while_the_learner_lags_and_then_returns(tmp_path):
    size = packet(1).size
    with (
        Running(tmp_path, max_lag_bytes=64 * KIB, **SMALL) as running,
        Peer(running.endpoint) as peer,
    ):
        peer.hello()
        peer.with_credit()
        peer.say(packet(1))
        peer.acked(1)
        while peer.credit:
            peer.hear(Ack)
        assert peer.silent(0.3)
        running.offsets.publish(read=2, checkpointed=1)
        peer.with_credit()
        peer.say(packet(2))
        peer.acked(2)
        until(lambda: running.last.lag_bytes == size)


def fill(running, peer):
    """Send packets whenever there is credit, until the journal is full; return their number."""
    numbers = itertools.count(1)

    def is_full():
        if peer.credit:
            peer.say(packet(number := next(numbers), samples=1, side=200))
            peer.acked(number)
        elif peer.socket.poll(10):
            peer.hear(Ack)
        return running.offsets.journal_full  # a learner that is idle waits for that

    until(is_full)
    return next(numbers) - 1


def test_credit_stops_before_the_journal_is_full_and_comes_back_after_a_checkpoint(
    tmp_path, monkeypatch
):
    touched, touch = [], Path.touch

    def touch_at_last(path):
        touched.append(path)
        if len(touched) < 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        touch(path)

    monkeypatch.setattr(Path, "touch", touch_at_last)
    with (
        Running(tmp_path, budget=2 * MIB, **SMALL) as running,
        Peer(running.endpoint) as peer,
    ):
        peer.hello()
        sequence = fill(running, peer)
        assert sequence > 20
        assert running.total("journal_failures") == 0
        assert running.journal.bytes <= 2 * MIB
        peer.say(packet(sequence + 1, samples=1, side=200))  # against the rules: still no harm
        peer.acked(sequence + 1)

        running.offsets.publish(read=sequence, checkpointed=sequence)
        peer.with_credit()
        until(lambda: running.last.journal_first > 1)
        until(lambda: running.journal.room > MIB)  # it is trimmed in turns


def test_credit_stops_while_the_disk_still_has_room_for_a_checkpoint(tmp_path, monkeypatch, caplog):
    """The disk ends before the journal's budget does."""
    reserve, free = 8 * MIB, [11 * MIB]
    journal = tmp_path / "journal"

    def usage(_):
        used = sum(file.stat().st_size for file in journal.glob("*/data.mdb"))
        return shutil._ntuple_diskusage(1 << 40, used, free[0] - used)

    ConsumerOffsets(tmp_path).publish(1, 1, None, reserve)
    monkeypatch.setattr(shutil, "disk_usage", usage)
    monkeypatch.setattr(journal_room, "_MOST_RESERVE", 1)
    with Running(tmp_path, budget=64 * MIB, **SMALL) as running, Peer(running.endpoint) as peer:
        peer.hello()
        assert fill(running, peer) > 5
        assert usage(journal).free >= reserve
        until(lambda: running.last.disk_full)
        assert "the disk of the journal is full" in _why(running.last)
        (told,) = [line for line in caplog.messages if "producers get no credit below" in line]
        assert "(8 MB are for a checkpoint, the rest is for one packet)" in told
        free[0] += 4 * MIB
        peer.with_credit()


def test_the_receiver_reports_a_journal_folder_that_was_moved(tmp_path):
    away = tmp_path / "away"
    with Running(tmp_path, **SMALL) as running:
        until(lambda: running.records)
        assert _journal(running.last) == (True, "")
        (tmp_path / "journal").rename(away)
        until(lambda: running.last.journal_away)
        well, why = _journal(running.last)
        assert not well
        assert why.startswith("its folder was moved, deleted or replaced; no packet")
        away.rename(tmp_path / "journal")
        until(lambda: not running.last.journal_away)


def test_a_failed_write_of_the_journal_is_named_as_the_reason_for_no_credit(tmp_path, monkeypatch):
    """Linux makes a disk read-only after an error; the learner is not to blame."""

    def refused(*_):
        raise JournalError("journal: Read-only file system")

    with Running(tmp_path, **SMALL) as running, Peer(running.endpoint) as peer:
        peer.hello()
        monkeypatch.setattr(running.journal, "append", refused)
        peer.with_credit()
        peer.say(packet(1))
        until(lambda: running.records and not running.last.ready)
        assert _why(running.last) == "the last write of the journal failed"
        monkeypatch.undo()
        peer.acked(1)


def test_the_last_log_line_counts_received_samples_that_were_not_written(
    tmp_path, monkeypatch, caplog
):
    def refused(*_):
        raise JournalError("journal: Read-only file system")

    with Running(tmp_path, **SMALL) as running, Peer(running.endpoint) as peer:
        peer.hello()
        peer.with_credit()
        peer.say(packet(1, samples=2))
        peer.acked(1)
        assert running.receiver.unwritten == 0
        monkeypatch.setattr(running.journal, "append", refused)
        peer.say(packet(2, samples=3))
        until(lambda: running.records and not running.last.ready)
    assert running.receiver.unwritten == 3
    caplog.set_level("INFO")
    _log_end(0)
    assert "drained: all received samples are in the journal" in caplog.text
    _log_end(3)
    assert "stopped with 3 received samples that are not in the journal" in caplog.text


def test_a_position_beyond_the_end_of_the_journal_deletes_nothing(tmp_path, caplog):
    with Running(tmp_path, budget=MIB, **SMALL) as running, Peer(running.endpoint) as peer:
        peer.hello()
        for sequence in range(1, 9):
            peer.with_credit()
            peer.say(packet(sequence, samples=1, side=200))
            peer.acked(sequence)
        held = running.journal.bytes
        ConsumerOffsets(tmp_path).publish(1 << 40, 1 << 40)
        until(lambda: "says that record 1099511627776 is read next" in caplog.text)
        assert running.journal.bytes == held
        ConsumerOffsets(tmp_path).publish(9, 9)
        until(lambda: running.journal.bytes < held)


def test_a_group_larger_than_the_journal_is_written_as_room_becomes_free(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr("stream_ssl.receiver.receiver.GROUP_SECONDS", 1.0)
    monkeypatch.setattr("stream_ssl.receiver.receiver.GROUP_PACKETS", 10_000)
    flood = {"max_packet": 64 * KIB, "credit": 900 * KIB, "total_credit": 900 * KIB}
    with (
        Running(tmp_path, budget=MIB, **flood) as running,
        Peer(running.endpoint) as peer,
    ):
        peer.hello()
        sequence = total = 0
        while total < 800 * KIB:  # small ones, which take more than twice as much on disk
            sequence += 1
            sent = packet(sequence, samples=1, side=8)
            total += sent.size
            peer.say(sent)
        until(lambda: "are used; it empties behind the learner's checkpoints" in caplog.text)
        peer.acked(1)
        assert running.total("journal_failures") == 0, "the disk works"
        assert running.journal.bytes <= MIB
        assert 0 < running.journal.last < sequence
        until(lambda: running.offsets.journal_full)
        for _ in range(50):  # a learner that reads all that there is, again and again
            last = running.journal.last
            running.offsets.publish(read=last, checkpointed=last)
            if last == sequence:
                break
            until(lambda last=last: running.journal.last > last)
        peer.acked(sequence)
        assert running.journal.last == sequence
        until(lambda: running.last.ready)
        until(lambda: not running.offsets.journal_full)


def test_a_flood_beyond_all_credit_is_bounded_and_harms_nobody(tmp_path, monkeypatch):
    monkeypatch.setattr("stream_ssl.receiver.receiver.GROUP_SECONDS", 0.2)
    monkeypatch.setattr("stream_ssl.receiver.receiver.GROUP_PACKETS", 10_000)
    with (
        Running(tmp_path, **SMALL) as running,
        Peer(running.endpoint) as bad,
        Peer(running.endpoint) as good,
    ):
        bad.hello("bad")
        good.hello("good")
        for sequence in range(1, 201):
            bad.say(packet(sequence, samples=1, side=250))
        good.say(packet(1))
        good.acked(1)
        sent = [sequence for name, sequence in running.journalled() if name == "bad"]
        assert sent == list(range(1, len(sent) + 1))
        assert running.receiver._group.batch.bytes <= SMALL["total_credit"]


@pytest.mark.parametrize(
    ("idle", "side", "share"), [(6, 200, 0.375), (24, 200, 0.2), (24, 20, 0.15)]
)
def test_idle_producers_leave_their_turns_to_an_active_producer(tmp_path, idle, side, share):
    """Four producers can have credit at once, and all but one have nothing to send."""
    with Running(tmp_path, **SMALL) as running, contextlib.ExitStack() as stack:
        for n in range(idle):
            stack.enter_context(Peer(running.endpoint)).hello(f"idle/{n}")
        active = stack.enter_context(Peer(running.endpoint))
        active.hello("active")
        sequence, polls, with_credit = 0, 0, 0
        end = time.monotonic() + DEADLINE
        while (polls < 400 or active.through <= 200 * share) and time.monotonic() < end:
            polls += 1
            while active.socket.poll(0):
                active.hear(Ack)
            with_credit += active.credit > 0
            if active.credit and active.through == sequence:
                sequence += 1
                active.say(packet(sequence, samples=1, side=side))
            time.sleep(0.01)
        assert with_credit > share * polls
        assert active.through > 200 * share


def test_the_receiver_serves_many_greedy_producers_equally(tmp_path):
    """12 producers share credit for 4 packets by turns."""
    with Running(tmp_path, **SMALL) as running:
        peers = [Peer(running.endpoint) for _ in range(12)]
        sent = [0] * len(peers)
        for n, peer in enumerate(peers):
            peer.hello(f"robot/{n}")

        def pump():
            for n, peer in enumerate(peers):
                while peer.socket.poll(0):
                    peer.hear(Ack)
                if peer.credit and sent[n] == peer.through:
                    sent[n] += 1
                    peer.say(packet(sent[n], samples=1, side=200))
            return min(sent) >= 24  # two turns of a dozen packets each

        until(pump)
        until(lambda: running.last.producers == 12)
        assert all(record.credit <= SMALL["total_credit"] for record in running.records)
        assert min(sent) >= 0.5 * max(sent), sent  # none has had two turns more than another
        for peer in peers:
            peer.close()


def test_the_unread_cost_sums_the_records_that_the_reader_has_not_read() -> None:
    unread, costs, draw = UnreadCost(), {}, np.random.default_rng(0)
    unread.most = 10_000
    for last in range(2, 20_001, 2):
        costs[last] = int(draw.integers(0, 3))
        unread.add(last, costs[last])
    assert unread.waiting == sum(costs.values())
    assert len(unread._marks) <= 2000
    for position in range(1, 20_002, 100):
        unread.read(position)
        waiting = sum(cost for last, cost in costs.items() if last >= position)
        assert waiting <= unread.waiting <= waiting + 10  # neighbours count together
    assert (unread.waiting, len(unread._marks)) == (0, 0)
