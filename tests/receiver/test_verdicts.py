"""Verdicts on samples, from the learner to the receiver, while either side may be absent."""

from __future__ import annotations

import socket
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import msgpack
import pytest
from observe_records import step
from page_world import Feed
from table import table

from stream_ssl.batch import Origin
from stream_ssl.observe.slot_history import SlotHistory
from stream_ssl.observe.verdict_feed import VerdictFeed
from stream_ssl.receiver import verdicts
from stream_ssl.receiver.verdicts import READ, VerdictInbox, VerdictSender
from stream_ssl.wire.messages import MAX_VERDICTS, Verdict, WireError, decode, prefix

NO_ROWS = msgpack.packb(("robot", {}))
KEPT = Verdict("lens", "frame-1", "kept", 0.5)


def test_the_sender_sends_no_verdicts_until_a_receiver_listens(tmp_path: Path) -> None:
    inbox, sender = VerdictInbox(tmp_path), VerdictSender(tmp_path)
    assert not sender.wanted
    sender.send({"robot": [KEPT]})
    assert sender.left_out == 1
    inbox.listen(True)
    assert sender.wanted
    assert list(inbox.read()) == []
    sender.send({"robot": [KEPT] * (MAX_VERDICTS + 3), "other": [KEPT]})
    sizes = [(name, len(rows)) for name, rows in inbox.read()]
    assert sizes == [("robot", MAX_VERDICTS), ("robot", 3), ("other", 1)]
    inbox.listen(False)
    assert not sender.wanted
    sender.close()


def test_the_inbox_bounds_a_flood_and_ignores_foreign_datagrams(tmp_path: Path) -> None:
    inbox, sender = VerdictInbox(tmp_path), VerdictSender(tmp_path)
    inbox.listen(True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        for wrong in (b"", b"\xc1", msgpack.packb(3), msgpack.packb(("robot", [[1]])), NO_ROWS):
            stranger.sendto(wrong, str(tmp_path / "verdicts.sock"))
            assert list(inbox.read()) == []
    for _ in range(100 * READ):  # returns at once, whatever the receiver does
        sender.send({"robot": [KEPT]})
    assert sender.left_out > 0
    assert len(list(inbox.read())) <= READ
    inbox.close()
    sender.close()


def test_a_new_receiver_takes_over_the_socket_of_a_killed_one(tmp_path: Path) -> None:
    first, second, sender = VerdictInbox(tmp_path), VerdictInbox(tmp_path), VerdictSender(tmp_path)
    first.listen(True)
    second.listen(True)
    sender.send({"robot": [KEPT]})
    assert list(second.read()) == [("robot", [KEPT])]
    assert (tmp_path / "verdicts.sock").stat().st_mode & 0o777 == 0o600
    sender.close()
    second.close()
    first.close()


def test_the_inbox_changes_no_mode_through_a_link_that_replaces_its_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim, path = tmp_path / "victim", tmp_path / "verdicts.sock"
    victim.write_text("readable by all")
    victim.chmod(0o644)
    modes = []

    class Replaced(socket.socket):
        """A socket whose file is replaced by a link as soon as it is there."""

        def bind(self, address: str) -> None:
            super().bind(address)
            modes.append(path.stat().st_mode & 0o777)
            path.unlink()
            path.symlink_to(victim)

    monkeypatch.setattr("stream_ssl.receiver.verdicts.socket.socket", Replaced)
    inbox = VerdictInbox(tmp_path)
    inbox.listen(True)
    inbox.close()
    assert modes == [0o600]  # from the first moment
    assert victim.stat().st_mode & 0o777 == 0o644


def test_a_run_folder_with_a_long_path_has_no_feed_and_one_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / ("x" * 90)
    folder.mkdir()
    inbox = VerdictInbox(folder)
    inbox.listen(True)
    inbox.listen(True)
    assert list(inbox.read()) == []
    assert len(caplog.records) == 1
    assert "more than 107 bytes" in caplog.text


def test_a_sender_of_verdicts_survives_a_path_that_is_too_long(tmp_path: Path) -> None:
    with closing(VerdictSender(tmp_path / ("x" * 300))) as sender:
        assert not sender.wanted


def test_the_inbox_opens_its_feed_again_after_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk is such a failure."""
    monkeypatch.setattr(verdicts, "RETRY_SECONDS", 0.0)
    inbox, sender = VerdictInbox(tmp_path / "run"), VerdictSender(tmp_path / "run")
    inbox.listen(True)
    assert not sender.wanted
    (tmp_path / "run").mkdir()
    inbox.listen(True)
    assert sender.wanted
    inbox.close()
    sender.close()


def test_an_open_feed_stays_open_and_a_failed_feed_waits_for_its_retry(tmp_path: Path) -> None:
    """A receiver calls `listen` at every tick. A new socket would lose the waiting verdicts."""
    inbox, sender = VerdictInbox(tmp_path), VerdictSender(tmp_path)
    inbox.listen(True)
    sender.send({"robot": [KEPT]})
    inbox.listen(True)
    assert list(inbox.read()) == [("robot", [KEPT])]
    failed = VerdictInbox(tmp_path / "run")
    failed.listen(True)
    (tmp_path / "run").mkdir()
    failed.listen(True)
    assert list((tmp_path / "run").iterdir()) == []
    inbox.close()
    sender.close()


class Heap:
    """Collects all verdicts."""

    def __init__(self) -> None:
        self.wanted, self.rows = False, dict[str, list[Verdict]]()

    def send(self, verdicts: dict[str, list[Verdict]]) -> None:
        for name, rows in verdicts.items():
            self.rows.setdefault(name, []).extend(rows)


def test_the_feed_sends_one_verdict_when_a_sample_is_kept_and_one_when_it_is_evicted() -> None:
    feed, heap = Feed(slots=20), Heap()
    history = SlotHistory(feed.memory)
    verdicts = VerdictFeed(history, heap)
    gone: list[str] = []
    for turn in range(12):
        heap.wanted = turn > 0
        record = feed.step()
        history.consume(record)
        verdicts.consume(record)
        assert record.admission is not None
        if heap.wanted:
            gone += [f"frame-{number}" for number in record.admission.evicted.tolist()]
    rows = heap.rows["camera"]
    came = [row.id for row in rows if row.what == "kept"]
    assert came == [f"frame-{number}" for number in range(8, feed.number)]
    told = {row.id for row in rows if row.what == "evicted"}
    assert len(told) == sum(row.what == "evicted" for row in rows)
    assert told == set(gone)
    near = [row.id for row in rows if row.near]
    assert near == [f"frame-{number}" for number in range(15, feed.number, 8)]  # the copies
    before = replace(history.fates["camera"])
    away = [Origin("camera", "lens", "again", 0.0), None]  # a batch of near-duplicates only
    record = step(admission=None, batch=0, dropped_origins=away)
    history.consume(record)
    verdicts.consume(record)
    assert heap.rows["camera"][-1] == Verdict("lens", "again", "refused", near=True)
    after = history.fates["camera"]
    assert (after.offered, after.refused) == (before.offered + 1, before.refused + 1)
    assert after.near_duplicates == before.near_duplicates + 1


@table(
    "rows",
    [3, [3], [["a"]], [["a", "b", "sold", None, False, None]], [["a", "b", "kept", "x", False, 1]]],
)
def test_decoding_rejects_malformed_verdicts_and_accepts_later_fields(rows: object) -> None:
    with pytest.raises(WireError, match="VERDICTS: rows is"):
        decode([prefix(7), msgpack.packb({"rows": rows})])
    good = decode([prefix(7), msgpack.packb({"rows": [[*KEPT, "a later field"]]})])
    assert good.rows == (KEPT,)  # type: ignore[union-attr]
