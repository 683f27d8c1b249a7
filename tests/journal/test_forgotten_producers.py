"""A journal forgets a producer after a long idle time. A change of the clock has no effect."""

import time
from contextlib import closing

import msgpack
import pytest
from journal_entries import entry

from stream_ssl.journal.journal import Journal
from stream_ssl.journal.producer_states import FORGET_SECONDS
from stream_ssl.journal.segment import JournalEntry, ProducerState, list_segments

MIB = 1 << 20


def test_a_trim_of_all_records_after_a_restart_forgets_no_producer(tmp_path):
    """Otherwise the producer would send acknowledged samples again."""
    with closing(Journal(tmp_path)) as journal:
        journal.append([entry(1)])
    for _ in range(2):
        with closing(Journal(tmp_path)) as journal:
            journal.trim(2)
            assert journal.state("robot/1") == ProducerState(1, ["file", 1])


def test_a_change_of_the_clock_makes_no_producer_idle(tmp_path, monkeypatch):
    """A machine may start in 1970 and learn the time once it has a network."""
    clock = [1000.0]
    monkeypatch.setattr(time, "time", lambda: clock[0])
    with closing(Journal(tmp_path, budget=MIB)) as journal:
        journal.append([entry(1, producer="camera")])
        clock[0] = 1.7e9
        while len(list_segments(tmp_path)) < 3:
            sequence = journal.state("robot").sequence + 1
            journal.append([JournalEntry("robot", sequence, None, 1.5, b"header", bytes(9000))])
        assert journal.state("camera").sequence == 1
    with closing(Journal(tmp_path, budget=MIB)) as journal:
        journal.append([JournalEntry("robot", sequence + 1, None, 1.5, b"header", bytes(9000))])
        assert set(journal.producers()) == {"camera", "robot"}


@pytest.mark.parametrize("jump", [40 * 86_400.0, -40 * 86_400.0])
def test_restarts_after_a_change_of_the_clock_forget_no_producer(tmp_path, monkeypatch, jump):
    wall = [1.8e9]
    monkeypatch.setattr(time, "time", lambda: wall[0])
    with closing(Journal(tmp_path)) as journal:
        journal.append([entry(7, producer="camera")])
    for sequence in (1, 2):
        wall[0] += jump
        with closing(Journal(tmp_path)) as journal:
            journal.append([entry(sequence, producer="robot")])
            assert journal.state("camera") == ProducerState(7, ["file", 7])


def test_a_journal_keeps_producers_of_format_2_whose_idle_time_is_unknown(tmp_path, monkeypatch):
    monkeypatch.setattr(
        ProducerState, "pack", lambda state, _: msgpack.packb((*pair(state), 1.6e9))
    )
    monkeypatch.setattr("stream_ssl.journal.segment.FORMAT", 2)
    with closing(Journal(tmp_path)) as journal:
        journal.append([entry(7, producer="camera")])
    monkeypatch.undo()
    monkeypatch.setattr("stream_ssl.journal.producer_states.FORGET_SECONDS", 86_400)
    for sequence in (1, 2):
        with closing(Journal(tmp_path)) as journal:
            journal.append([entry(sequence, producer="robot")])
            assert pair(journal.state("camera")) == (7, ["file", 7])
            assert journal.state("camera").written == 1.6e9


def pair(state):
    return state.sequence, state.resume_token


def test_a_new_segment_forgets_a_producer_that_was_idle_for_long(tmp_path, monkeypatch):
    """Idle time adds up over runs of the receiver, and only while the receiver runs."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with closing(Journal(tmp_path)) as journal:
        journal.append([entry(1, producer="old")])
        now[0] += 0.6 * FORGET_SECONDS
        journal.append([entry(1, producer="new")])
    now[0] = 5.0  # the machine was started again
    with closing(Journal(tmp_path)) as journal:
        journal.append([entry(2, producer="new")])
        assert journal.state("old") == ProducerState(1, ["file", 1])
        now[0] += 0.6 * FORGET_SECONDS
        journal.skip_to(100)
        journal.append([entry(3, producer="new")])
        assert set(journal.producers()) == {"new"}
    with closing(Journal(tmp_path)) as journal:  # an older segment still has it
        assert set(journal.producers()) == {"new"}
        journal.append([entry(7, producer="old")])
        assert journal.state("old").sequence == 7


def test_a_connected_producer_is_not_forgotten(tmp_path, monkeypatch):
    """A camera may send an image only when something moves."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with closing(Journal(tmp_path)) as journal:
        journal.append([entry(1, producer="camera"), entry(1, producer="gone")])
        now[0] += 1.5 * FORGET_SECONDS
        journal.connected["camera"] = now[0]
        now[0] += 0.5 * FORGET_SECONDS  # it is away for half of the time
        journal.skip_to(100)
        journal.append([entry(1, producer="other")])
        assert set(journal.producers()) == {"camera", "other"}
    with closing(Journal(tmp_path)) as journal:
        assert journal.state("camera") == ProducerState(1, ["file", 1])
        now[0] += 0.6 * FORGET_SECONDS
        journal.append([entry(2, producer="other")])
        assert set(journal.producers()) == {"other"}
