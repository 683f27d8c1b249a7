"""The learner's positions in a file that is replaced atomically. A failed read raises no error."""

import json
import threading

import pytest

from stream_ssl.journal.consumer_offsets import ConsumerOffsets, Positions


def test_positions_start_at_1_when_the_file_is_missing(tmp_path):
    assert ConsumerOffsets(tmp_path / "none").load() == Positions(read=1, checkpointed=1)


def test_another_object_loads_the_published_positions(tmp_path):
    reader = ConsumerOffsets(tmp_path / "run")
    writer = ConsumerOffsets(tmp_path / "run")
    for read, durable in ((1, 1), (9, 4), (9, 9), (3, 2)):  # a resumed learner goes back
        writer.publish(read, durable)
        assert reader.load() == writer.load() == Positions(read, durable)


def test_publish_refuses_positions_that_are_out_of_order(tmp_path):
    for read, checkpointed in ((0, 0), (5, 0), (4, 5), (-1, -2)):
        with pytest.raises(ValueError, match="1 <= checkpointed <= read"):
            ConsumerOffsets(tmp_path).publish(read, checkpointed)
    assert not list(tmp_path.iterdir())


def test_publish_raises_the_error_of_a_full_disk_when_no_file_exists(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device", "cursor.json.part")

    monkeypatch.setattr("stream_ssl.journal.consumer_offsets.write", full)
    with pytest.raises(OSError, match="No space left on device"):
        ConsumerOffsets(tmp_path).publish(7, 5)


def test_load_reads_the_file_again_after_a_failed_open(tmp_path, monkeypatch, caplog):
    offsets = ConsumerOffsets(tmp_path)
    offsets.publish(7, 5)

    def no_descriptor(*_):
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr("stream_ssl.bounded_files.os.open", no_descriptor)
        for _ in range(20):
            assert offsets.load() == Positions(1, 1)
    assert caplog.text.count("Too many open files") == 1
    assert offsets.load() == Positions(7, 5)


HUGE = '{"read": 8, "durable": 8, "checkpoint": 1e308}'


def test_load_keeps_the_last_positions_when_the_file_is_damaged(tmp_path, caplog):
    offsets = ConsumerOffsets(tmp_path)
    for content in ("", "{", "[]", '{"read": 5}', '{"read": 2, "durable": 7}', HUGE):
        offsets.publish(7, 5)
        assert offsets.load() == Positions(7, 5)
        caplog.clear()
        offsets.path.write_text(content + " " * 50)
        assert offsets.load() == Positions(7, 5)
        assert offsets.load() == Positions(7, 5)
        assert caplog.text.count("cannot be read") == 1
        offsets.publish(8, 5)
        assert offsets.load() == Positions(8, 5)


def test_load_reads_the_file_of_an_earlier_version(tmp_path):
    (tmp_path / "cursor.json").write_text('{"read": 9, "durable": 4}'.ljust(64))
    assert ConsumerOffsets(tmp_path).load() == Positions(read=9, checkpointed=4)


def test_a_reader_never_sees_half_a_file(tmp_path):
    writer, done = ConsumerOffsets(tmp_path), threading.Event()
    writer.publish(1, 1)

    def write():
        for n in range(2, 500):
            writer.publish(n, n)
        done.set()

    thread = threading.Thread(target=write)
    thread.start()
    last = 0
    while not done.is_set():
        fields = json.loads(writer.path.read_text())
        assert fields["read"] == fields["durable"] >= last
        last = fields["read"]
    thread.join()
    assert ConsumerOffsets(tmp_path).load() == Positions(499, 499)
    assert [path.name for path in tmp_path.iterdir()] == ["cursor.json"]


def test_the_receiver_tells_the_learner_that_the_journal_is_full(tmp_path):
    receiver, learner = ConsumerOffsets(tmp_path), ConsumerOffsets(tmp_path)
    assert not learner.journal_full
    receiver.set_journal_full(True)
    assert learner.journal_full
    receiver.set_journal_full(True)
    receiver.set_journal_full(False)
    assert not learner.journal_full
    receiver.set_journal_full(False)
    assert ConsumerOffsets(tmp_path / "gone").journal_full is False
    ConsumerOffsets(tmp_path / "gone").set_journal_full(True)  # logged, and tried again later


def test_a_folder_that_cannot_be_opened_is_logged_and_raises_no_error(tmp_path, caplog):
    """The receiver reads these values several times a second, and must not end."""
    offsets = ConsumerOffsets(tmp_path / ("x" * 300))
    assert not offsets.journal_full
    offsets.set_journal_full(True)
    assert offsets.load() == Positions()
    assert "File name too long" in caplog.text
