"""A watched folder: the files that are sent, their order, and the files that are left out."""

import errno
import itertools
import logging
import os
import threading
from pathlib import Path

import pytest
from going_on import check_stop_ends
from source_files import age, encoded, pixels, write_images
from waiting import until

from stream_ssl.producers.shaping import Shaped
from stream_ssl.producers.sources import ImageFolder, WatchedFolder, watched


class Clock:
    """A clock that advances only in `sleep`."""

    def __init__(self, now=10_000.0):
        self.now = now
        self.on_sleep = lambda: None

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        assert seconds > 0
        self.now += seconds
        self.on_sleep()


def watch(folder, clock=None, **settings):
    source = WatchedFolder(folder, **({"settle_seconds": 0, "idle_seconds": 1} | settings))
    clock = clock or Clock(2.0**33)  # after any real file
    source.wall = source.monotonic = clock
    source.sleep = clock.sleep
    return source


def add(folder, name, mtime, seed=0):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encoded(pixels(1, 4, 4, 3, seed=seed)[0]))
    age(path, mtime)
    return path


def names(samples):
    return [sample.id.partition("#")[0] for sample, _ in samples]


def test_files_are_sent_by_time_and_then_by_name(tmp_path):
    for name, mtime in (("b.png", 5), ("sub/a.png", 5), ("z.png", 1), ("a.png", 7)):
        add(tmp_path, name, mtime)
    stream = list(watch(tmp_path).samples())
    assert names(stream) == ["z.png", "b.png", "sub/a.png", "a.png"]
    assert [sample.time for sample, _ in stream] == [1, 5, 5, 7]
    assert stream[0][0].data == (tmp_path / "z.png").read_bytes()


def test_a_watch_resumes_by_name_among_files_of_equal_times(tmp_path):
    for name in "dacb":
        add(tmp_path, f"{name}.png", 5)
    stream = list(watch(tmp_path).samples())
    _, after_b = stream[1]
    assert names(watch(tmp_path).samples(after_b)) == ["c.png", "d.png"]


def test_new_files_are_sent_and_older_ones_count_as_late(tmp_path):
    add(tmp_path, "a.png", 1)
    clock = Clock()
    arrivals = iter([("b.png", 3), ("c.png", 2), ("d.png", 4)])
    clock.on_sleep = lambda: add(tmp_path, *next(arrivals, ("d.png", 4)))
    source = watch(tmp_path, clock, settle_seconds=0, idle_seconds=5)
    source.wall = lambda: 2.0**33
    assert names(source.samples()) == ["a.png", "b.png", "d.png"]
    assert source.skipped.by_reason == {"late": 1}  # c.png came after b.png, and is older


def test_the_log_names_late_files_and_the_remedy(tmp_path, caplog):
    add(tmp_path, "new.png", 9)
    clock = Clock(2.0**33)
    clock.on_sleep = lambda: add(tmp_path, "old.png", 3)
    source = watch(tmp_path, clock)
    with caplog.at_level(logging.WARNING):
        assert names(source.samples()) == ["new.png"]
    assert source.skipped.by_reason == {"late": 1}
    assert "old.png (late): its time 3.000 is not after" in caplog.text
    assert 'order="ctime"' in caplog.text


def test_the_order_by_ctime_sends_moved_files_with_an_old_mtime(tmp_path):
    inside, outside = tmp_path / "in", tmp_path / "out"
    add(inside, "new.png", 9)
    moved = add(outside, "old.png", 3)
    clock = Clock(2.0**33)

    def move():
        if moved.exists():
            moved.rename(inside / "old.png")

    clock.on_sleep = move
    source = watch(inside, clock, order="ctime")
    assert names(source.samples()) == ["new.png", "old.png"]
    assert not source.skipped.by_reason["late"]


def test_the_log_says_why_files_of_a_moved_folder_are_late(tmp_path, caplog):
    inside, outside = tmp_path / "in", tmp_path / "out"
    rested = add(outside, "old.png", 3).stat().st_ctime_ns
    until(lambda: add(inside, "new.png", 9).stat().st_ctime_ns != rested)
    clock = Clock(2.0**33)

    def move():
        if outside.exists():
            outside.rename(inside / "out")  # changes no time of the file in it

    clock.on_sleep = move
    source = watch(inside, clock, order="ctime")
    assert names(source.samples()) == ["new.png"]
    assert source.skipped.by_reason == {"late": 1}
    assert "; its folder was moved here with it: touch it. If the clock" in caplog.text
    (inside / "out" / "old.png").touch()
    clock.on_sleep = lambda: None
    assert names(watch(inside, order="ctime").samples())[-1] == "out/old.png"


def test_a_rewritten_file_is_sent_again_under_another_id(tmp_path):
    add(tmp_path, "a.png", 1, seed=1)
    clock = Clock(2.0**33)
    clock.on_sleep = lambda: add(tmp_path, "a.png", 2, seed=2)
    first, second = (sample for sample, _ in watch(tmp_path, clock).samples())
    assert first.id.startswith("a.png#")
    assert second.id.startswith("a.png#")
    assert first.id != second.id


def test_a_file_is_sent_only_after_settle_seconds_without_a_change(tmp_path):
    changed = add(tmp_path, "a.png", 1).stat().st_ctime
    clock = Clock(changed + 0.25)
    source = watch(tmp_path, clock, settle_seconds=2.0, poll_seconds=0.5, idle_seconds=0)
    assert names(source.samples()) == ["a.png"]
    assert clock.now - changed >= 2.0


def test_a_newer_file_waits_for_an_older_file_that_still_changes(tmp_path):
    newer = add(tmp_path, "newer.png", 2).stat().st_ctime_ns
    until(lambda: add(tmp_path, "older.png", 1).stat().st_ctime_ns != newer)
    clock = Clock(newer * 1e-9 + 2.0)  # newer.png has rested by then, and older.png has not
    source = watch(tmp_path, clock, settle_seconds=2.0, idle_seconds=0)
    assert names(source.samples()) == ["older.png", "newer.png"]
    assert not source.skipped.by_reason["late"]


def test_a_file_that_still_changed_at_the_scan_waits_for_the_next_scan(tmp_path):
    """While a slow sender takes the first file, an older one may come."""
    rested = add(tmp_path, "a.png", 1).stat().st_ctime_ns
    until(lambda: add(tmp_path, "c.png", 3).stat().st_ctime_ns != rested)
    clock = Clock(rested * 1e-9 + 2.0)  # a.png has rested by then, and c.png has not
    source = watch(tmp_path, clock, settle_seconds=2.0, idle_seconds=0)
    stream = source.samples()
    assert names([next(stream)]) == ["a.png"]
    clock.now += 60
    add(tmp_path, "b.png", 2)
    assert names(stream) == ["b.png", "c.png"]
    assert not source.skipped.by_reason["late"]


def test_a_folder_that_is_away_for_a_while_makes_no_file_late(tmp_path, caplog):
    folder, away = tmp_path / "in", tmp_path / "away"
    add(folder, "a.png", 1)
    add(folder, "b/b.png", 2)
    clock = Clock(2.0**33)
    source = watch(folder, clock, idle_seconds=5)
    moves = iter([lambda: folder.rename(away), lambda: away.rename(folder)])
    clock.on_sleep = lambda: next(moves, lambda: None)()
    assert names(source.samples()) == ["a.png", "b/b.png"]
    assert not source.skipped.by_reason["late"]
    assert "is not after that of a file already sent" not in caplog.text


def test_a_disk_that_goes_away_during_a_backlog_loses_no_file(tmp_path, monkeypatch, caplog):
    """The mount point is an empty folder until the disk is mounted again."""
    folder, disk = tmp_path / "in", tmp_path / "disk"
    for number, name in enumerate(("a.png", "b.png", "c.png")):
        add(folder, name, number)
    monkeypatch.setattr(watched, "is_away", lambda folder, disk: not (folder / "a.png").exists())
    clock = Clock(2.0**33)
    source = watch(folder, clock, idle_seconds=5)
    stream = source.samples()
    assert names([next(stream)]) == ["a.png"]
    folder.rename(disk)
    folder.mkdir()
    scans = iter([lambda: None, lambda: None, lambda: disk.rename(folder)])
    clock.on_sleep = lambda: next(scans, lambda: None)()
    assert names(stream) == ["b.png", "c.png"]
    assert not source.skipped.by_reason
    assert "no file is left out: [Errno 19] its disk is away; mount it again" in caplog.text


def test_a_file_dated_in_the_future_waits_for_its_time(tmp_path):
    add(tmp_path, "now.png", 5)
    add(tmp_path, "later.png", 2.0**34)
    source = watch(tmp_path)
    stream = list(source.samples())
    assert names(stream) == ["now.png"]
    assert names(watch(tmp_path, Clock(2.0**35)).samples(stream[-1][1])) == ["later.png"]


def test_the_log_names_a_file_dated_in_the_future_once_with_the_remedy(tmp_path, caplog):
    add(tmp_path, "now.png", 5)
    add(tmp_path, "later.png", 2.0**33 + 3600)
    add(tmp_path, "much later.png", 2.0**34)
    list(watch(tmp_path, settle_seconds=1, idle_seconds=10).samples())
    (line,) = [record.getMessage() for record in caplog.records]
    assert "later.png is dated 3600 s in the future; it and newer files wait until then" in line
    assert "Set the clock of this machine, or touch the file" in line


def test_files_from_before_a_clock_was_set_back_are_still_sent(tmp_path, caplog):
    """The files changed at a time that is still to come. Only a file that rests is sent."""
    for number in range(5):
        add(tmp_path, f"{number}.png", 5 + number)
    clock = Clock(1000.0)  # in 1970

    def change():
        if clock.now < 1003:
            add(tmp_path, "2.png", 7, seed=int(clock.now))

    clock.on_sleep = change
    source = watch(tmp_path, clock, settle_seconds=2, poll_seconds=0.5, idle_seconds=10)
    times = [(sample.id[:5], clock.now) for sample, _ in source.samples()]
    assert [name for name, _ in times] == [f"{number}.png" for number in range(5)]
    assert times[0][1] == 1002
    assert times[2][1] >= 1004.5
    assert times[4][1] < 1006
    assert not caplog.records


def test_unfinished_hidden_and_special_files_are_ignored(tmp_path):
    kinds = (".a.png", "~b.png", "c.png.part", "d.tmp", "e.txt", ".git/f.png", "@eaDir/g.png")
    for number, name in enumerate((*kinds, "good.png")):
        add(tmp_path, name, number)
    (tmp_path / "folder.png").mkdir()
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "nowhere.png").symlink_to(tmp_path / "missing")
    source = watch(tmp_path)
    assert names(source.samples()) == ["good.png"]
    assert source.skipped.by_reason == {}


def test_a_file_that_is_renamed_when_complete_is_sent(tmp_path):
    part = add(tmp_path, "a.png.part", 1)
    clock = Clock(2.0**33)

    def finish():
        if part.exists():
            part.rename(tmp_path / "a.png")

    clock.on_sleep = finish
    assert names(watch(tmp_path, clock).samples()) == ["a.png"]


def test_a_file_that_is_no_image_is_counted_and_left_out(tmp_path, caplog):
    add(tmp_path, "a.png", 1).write_bytes(b"no image")
    age(tmp_path / "a.png", 1)
    add(tmp_path, "b.png", 2)
    source = watch(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert names(source.samples()) == ["b.png"]
    assert source.skipped.by_reason == {"no image": 1}
    assert "a.png (no image): neither JPEG" in caplog.text


def test_a_file_that_is_deleted_before_its_turn_is_counted(tmp_path):
    for number, name in enumerate(("a.png", "b.png", "c.png")):
        add(tmp_path, name, number)
    source = watch(tmp_path)
    stream = source.samples()
    next(stream)
    (tmp_path / "b.png").unlink()
    assert names(stream) == ["c.png"]
    assert source.skipped.by_reason == {"unreadable": 1}


def test_a_file_that_is_rewritten_before_its_turn_is_sent_at_its_new_time(tmp_path):
    for number, name in enumerate(("a.png", "b.png", "c.png")):
        add(tmp_path, name, number)
    source = watch(tmp_path)
    stream = source.samples()
    next(stream)
    add(tmp_path, "b.png", 50, seed=3)
    assert names(stream) == ["c.png", "b.png"]
    assert source.skipped.by_reason == {}


def test_a_file_whose_mode_changes_before_its_turn_is_sent(tmp_path):
    for seconds, name in enumerate("abcd", 1):
        add(tmp_path, f"{name}.png", seconds)
    stream = watch(tmp_path).samples()
    first = next(stream)  # the others have been listed, and wait
    for path in tmp_path.iterdir():
        path.chmod(0o640)
    assert names([first, *stream]) == ["a.png", "b.png", "c.png", "d.png"]


def test_a_file_that_is_deleted_while_the_source_reads_is_counted(tmp_path, monkeypatch):
    add(tmp_path, "a.png", 1)

    def read(path):
        data = path.read_bytes()
        path.unlink()
        return data

    monkeypatch.setattr(watched, "read_image", read)
    source = watch(tmp_path)
    assert list(source.samples()) == []
    assert source.skipped.by_reason == {"unreadable": 1}


@pytest.mark.parametrize("busy", ["open", "scandir"])
def test_a_lack_of_file_descriptors_loses_no_file(tmp_path, monkeypatch, caplog, busy):
    for number in range(3):
        add(tmp_path, f"sub/{number}.png", number + 1, seed=number)
    whole, failures = {"open": Path.open, "scandir": os.scandir}[busy], iter(range(2))

    def refused(path, *arguments):
        if Path(path) != tmp_path and next(failures, None) is not None:
            raise OSError(errno.EMFILE, "Too many open files", str(path))
        return whole(path, *arguments)

    monkeypatch.setattr(Path if busy == "open" else os, busy, refused)
    source = watch(tmp_path, poll_seconds=0.5, idle_seconds=0.2)
    assert names(source.samples()) == ["sub/0.png", "sub/1.png", "sub/2.png"]
    assert "waiting, no file is left out: [Errno 24] Too many open files" in caplog.text
    assert not source.skipped.by_reason


def test_a_file_whose_name_is_not_unicode_is_sent_once(tmp_path):
    path = tmp_path / os.fsdecode(b"\xff\xfe.png")
    path.write_bytes(encoded(pixels(1, 4, 4, 3)[0]))
    ((sample, position),) = watch(tmp_path).samples()
    assert sample.id.startswith(r"\xff\xfe.png#")
    assert list(watch(tmp_path).samples(position)) == []


def test_a_path_that_exceeds_a_position_costs_no_other_file(tmp_path, caplog):
    add(tmp_path, "a.png", 1)
    add(tmp_path, "/".join(["b" * 200] * 12) + "/b.png", 2)
    add(tmp_path, "c.png", 3)
    source = watch(tmp_path)
    assert names(source.samples()) == ["a.png", "c.png"]
    assert source.skipped.by_reason == {"long path": 1}
    assert "(long path): its path has 2417 bytes, and a position holds 2048; give" in caplog.text


def test_a_watch_ends_after_idle_seconds_without_a_new_file(tmp_path):
    clock = Clock(2.0**33)
    start = clock.now
    arrivals = itertools.count(1)

    def arrive():
        number = next(arrivals)
        if number <= 5:
            add(tmp_path, f"{number}.png", number)

    clock.on_sleep = arrive
    source = watch(tmp_path, clock, poll_seconds=2, idle_seconds=3)
    assert len(list(source.samples())) == 5
    assert clock.now - start == 5 * 2 + 4


def test_files_that_a_thread_writes_during_the_watch_are_each_sent_once(tmp_path):
    """With the real clock, no file is sent twice, cut off or left out."""
    images = [encoded(image) for image in pixels(40, 4, 4, 3)]

    def write():
        for number, data in enumerate(images):
            part = tmp_path / f"{number:02d}.tmp"
            part.write_bytes(data)
            part.rename(tmp_path / f"{number:02d}.png")

    source = WatchedFolder(tmp_path, settle_seconds=0.05, poll_seconds=0.01)
    writer = threading.Thread(target=write)
    writer.start()
    stream = source.samples()
    sent = [next(stream)[0].data for _ in images]
    writer.join()
    assert sorted(sent) == sorted(images)
    threading.Timer(0.3, source.stop).start()
    assert list(stream) == []


def test_a_deleted_folder_is_logged_once(tmp_path, caplog):
    folder = tmp_path / "in"
    add(folder, "a.png", 1).unlink()
    source = watch(folder, idle_seconds=5)
    folder.rmdir()
    with caplog.at_level(logging.WARNING):
        assert list(source.samples()) == []
    assert caplog.text.count("cannot list") == 1


def test_stop_ends_a_watch_that_waits(tmp_path):
    add(tmp_path, "a.png", 1)
    source = WatchedFolder(tmp_path, settle_seconds=0, poll_seconds=3600)
    shaped = Shaped(source, rate=1000)
    stream = shaped.samples()
    assert names([next(stream)]) == ["a.png"]
    check_stop_ends(shaped, stream)


def test_an_unreadable_root_is_refused(tmp_path, monkeypatch):
    """Otherwise the watch would wait for ever. Root may read all folders."""
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    for kind in (WatchedFolder, ImageFolder):
        with pytest.raises(PermissionError, match="may not be read by this user: change its mode"):
            kind(tmp_path)


def test_wrong_arguments_are_named(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"no folder .*none: create it, or give another as the root"
    ):
        WatchedFolder(tmp_path / "none")
    (tmp_path / "a.txt").touch()
    for kind in (WatchedFolder, ImageFolder):
        with pytest.raises(FileNotFoundError, match=r"a\.txt is a file: give its folder"):
            kind(tmp_path / "a.txt")
    for seconds in ({"settle_seconds": float("nan")}, {"settle_seconds": -1}, {"idle_seconds": -1}):
        with pytest.raises(ValueError, match=f"{next(iter(seconds))} .*: must be 0 or more"):
            WatchedFolder(tmp_path, **seconds)
    for poll_seconds in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"poll_seconds .*: must lie in \[0, 86400\]"):
            WatchedFolder(tmp_path, poll_seconds=poll_seconds)
    write_images(tmp_path, 1)
    source = watch(tmp_path)
    ((_, position),) = source.samples()
    with pytest.raises(ValueError, match="order was 'mtime' and is 'ctime'"):
        watch(tmp_path, order="ctime").samples(position)


def test_linked_folders_are_watched_and_loops_are_logged_once(tmp_path, caplog):
    pool, root = tmp_path / "pool", tmp_path / "root"
    add(pool, "ant/a.png", 1)
    add(root, "b.png", 2)
    (root / "linked").symlink_to(pool)
    (pool / "round").symlink_to(root)
    source = watch(root, idle_seconds=5)
    with caplog.at_level(logging.WARNING):
        assert names(source.samples()) == ["linked/ant/a.png", "b.png"]
    assert source.skipped.by_reason == {"link": 1}
    assert caplog.text.count("linked/round/ (link): a link to a folder that is listed already") == 1


def test_images_of_other_formats_are_counted_once(tmp_path, caplog):
    add(tmp_path, "a.png", 1)
    (tmp_path / "b.bmp").write_bytes(encoded(pixels(1, 4, 4, 3)[0], "BMP"))
    source = watch(tmp_path, idle_seconds=5)
    with caplog.at_level(logging.WARNING):
        assert names(source.samples()) == ["a.png"]
    assert source.skipped.by_reason == {"no image": 1}
    assert "BMP; convert it" in caplog.text


def test_many_late_files_are_named_in_few_lines_and_counted_at_the_end(tmp_path, caplog):
    """A backup that is restored into the folder brings such files."""
    add(tmp_path, "new.png", 90)
    clock = Clock(2.0**33)
    clock.on_sleep = lambda: [add(tmp_path, f"old-{n}.png", n) for n in range(50)]
    source = watch(tmp_path, clock)
    with caplog.at_level(logging.INFO):
        assert names(source.samples()) == ["new.png"]
    assert caplog.text.count("is not after that of a file already sent") == 10
    assert caplog.messages[-1].endswith("has been read to its end; left out: 50 late")
