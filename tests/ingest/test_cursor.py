"""The consumer's marks: atomic, and never worth dying for."""

import json
import threading

import pytest

from stream_ssl.ingest.cursor import Cursor, CursorState


def test_without_a_file_everything_is_still_needed(tmp_path):
    assert Cursor(tmp_path / "none").load() == CursorState(read=1, durable=1)


def test_what_is_published_is_loaded_by_others(tmp_path):
    reader = Cursor(tmp_path / "run")
    writer = Cursor(tmp_path / "run")
    for read, durable in ((1, 1), (9, 4), (9, 9), (3, 2)):  # a resumed learner goes back
        writer.publish(read, durable)
        assert reader.load() == writer.load() == CursorState(read, durable)


@pytest.mark.parametrize(("read", "durable"), [(0, 0), (5, 0), (4, 5), (-1, -2)])
def test_marks_that_make_no_sense_are_refused(tmp_path, read, durable):
    with pytest.raises(ValueError, match="1 <= durable <= read"):
        Cursor(tmp_path).publish(read, durable)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", ["", "{", "[]", '{"read": 5}', '{"read": 2, "durable": 7}'])
def test_a_damaged_file_leaves_the_marks_as_they_were(tmp_path, content, caplog):
    cursor = Cursor(tmp_path)
    cursor.publish(7, 5)
    assert cursor.load() == CursorState(7, 5)
    cursor.path.write_text(content + " " * 50)
    assert cursor.load() == CursorState(7, 5)
    assert "cannot be read" in caplog.text
    cursor.publish(8, 5)
    assert cursor.load() == CursorState(8, 5)


def test_a_reader_never_sees_half_a_file(tmp_path):
    writer, done = Cursor(tmp_path), threading.Event()
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
    assert Cursor(tmp_path).load() == CursorState(499, 499)
    assert [path.name for path in tmp_path.iterdir()] == ["cursor.json"]


def test_the_receiver_tells_that_the_journal_is_full(tmp_path):
    receiver, learner = Cursor(tmp_path), Cursor(tmp_path)
    assert not learner.full
    receiver.tell_full(True)
    assert learner.full
    receiver.tell_full(True)
    receiver.tell_full(False)
    assert not learner.full
    receiver.tell_full(False)
    assert Cursor(tmp_path / "gone").full is False
    Cursor(tmp_path / "gone").tell_full(True)  # logged, and tried again later
