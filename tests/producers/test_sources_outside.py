"""Sources of other packages: the example of the docs, and classes that are no sources."""

from __future__ import annotations

import http.server
import os
import re
import sqlite3
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from harness import TINY, processes
from source_files import encoded
from table import table
from video_files import numbered

from stream_ssl.app.commands import produce
from stream_ssl.producers.sources import SOURCES
from stream_ssl.producers.sources.base import SourceError
from stream_ssl.producers.sources.outside import build_source, find_source, listed

PAGE = Path(__file__).parents[2] / "docs" / "own-source.md"


def package(folder: Path) -> Path:
    """Install the page's package in a folder, with its entry point."""
    text = PAGE.read_text()
    code, live = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (entry,) = re.findall(r"^table = \"(.*)\"$", text, re.MULTILINE)
    assert len(code.splitlines()) <= 34
    (folder / "my_package").mkdir(parents=True)
    (folder / "my_package" / "sources.py").write_text(code)
    (folder / "my_package" / "snapshots.py").write_text(live)
    info = folder / "my_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[stream_ssl.sources]\ntable = {entry}\n")
    return folder


def insert(file: Path, *rows: int) -> None:
    with closing(sqlite3.connect(file)) as database, database:
        database.execute("CREATE TABLE IF NOT EXISTS images (id INTEGER, time REAL, jpeg BLOB)")
        for row in rows:
            values = row, time.time(), encoded(numbered(row), "JPEG")
            database.execute("INSERT INTO images VALUES (?, ?, ?)", values)


@pytest.fixture
def on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(package(tmp_path / "site"))
    yield tmp_path / "site"
    for name in [name for name in sys.modules if name.startswith(("my_package", "outside_"))]:
        del sys.modules[name]


def test_the_live_source_of_the_page_reconnects_after_a_failure(on_path: Path) -> None:
    answers = [(200, encoded(numbered(1), "JPEG")), (503, b""), (200, b"")]

    class Camera(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = answers.pop(0) if answers else (200, encoded(numbered(2), "JPEG"))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Camera) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        found = find_source("my_package.snapshots.Snapshots")
        source = found(url=url, seconds=0.01)
        samples = source.samples()
        got = [next(samples)[0] for _ in range(2)]
        source.stop()
        server.shutdown()
    assert [sample.data for sample in got] == [
        encoded(numbered(number), "JPEG") for number in (1, 2)
    ]
    assert len({sample.id.rpartition("-")[0] for sample in got}) == 2  # two connections


def test_the_source_of_the_page_counts_an_empty_row_and_continues(
    on_path: Path, tmp_path: Path
) -> None:
    insert(tmp_path / "frames.db", 0, 1, 2)
    with closing(sqlite3.connect(tmp_path / "frames.db")) as database, database:
        database.execute("UPDATE images SET jpeg = x'' WHERE id = 1")
    source = find_source("my_package.sources.Table")(file=tmp_path / "frames.db")
    assert [sample.id for sample, _ in source.samples()] == ["table-0", "table-2"]
    assert source.skipped.by_reason == {"no sample": 1}


def test_the_source_of_the_page_runs_by_path_and_by_name_and_resumes(tmp_path: Path) -> None:
    site, file = package(tmp_path / "site"), tmp_path / "frames.db"
    insert(file, *range(6))
    settings = {key: value for key, value in TINY.items() if key != "access"}  # requires keys
    with processes(tmp_path / "run", settings) as run:
        run.role("receiver")
        run.environment = {**os.environ, "PYTHONPATH": str(site)}

        def send(source: str, log: str, *more: str) -> str:
            words = ["--run", str(run.folder), "--name", "table-1", "--source.file", str(file)]
            process = run.start("produce", source, *words, *more, log=log)
            assert process.wait(120) == 0, run.log(log)
            return run.log(log)

        assert "6 on the receiver's disk" in send("my_package.sources.Table", "first")
        insert(file, *range(7, 11))
        assert "4 on the receiver's disk" in send("table", "second")
        shaped = ("--name", "table-2", "--shape.duplicates", "0.5", "--shape.limit", "14")
        assert "14 on the receiver's disk" in send("table", "third", *shaped)
        assert run.metric("received_samples_total") == 24


def test_a_class_without_arguments_is_a_source(on_path: Path) -> None:
    (on_path / "outside_plain.py").write_text(PLAIN)
    source = build_source(find_source("outside_plain.Camera"), {})
    assert [sample.id for sample, _ in source.samples(1)] == ["1", "2"]


def test_the_help_lists_entry_points_and_their_options(
    on_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        produce.main(["--help"])
    assert "table       my_package.sources:Table" in capsys.readouterr().out
    assert "my_package.sources" not in sys.modules  # a list of names runs no foreign code
    with pytest.raises(SystemExit):
        produce.main(["table", "--help"])
    told = capsys.readouterr().out
    assert "JPEG files in the table" in told
    assert "--source.file" in told
    assert "the SQLite file; the table has the columns" in told


def test_built_in_names_come_before_entry_points(on_path: Path) -> None:
    info = on_path / "my_package-1.0.dist-info" / "entry_points.txt"
    info.write_text("[stream_ssl.sources]\nimages = my_package.sources:Table\n")
    assert "images" not in listed()
    assert find_source("images") is SOURCES["images"]


PLAIN = '''
from stream_ssl.wire.sample import Sample
class Camera:
    """A class without arguments."""
    name = "plain"
    def samples(self, position=None):
        for number in range(position or 0, 3):
            yield Sample(str(number), b"abcd", shape=(2, 2, 1), source="plain"), number + 1
'''

BAD = '''
import abc
from stream_ssl.wire.sample import Sample
number = 3
class NoSamples:
    """Nothing."""
    name = "x"
class NoPosition:
    name = "x"
    def samples(self): yield
class Untyped:
    name = "x"
    def __init__(self, file): ...
    def samples(self, position=None): yield
class Abstract(abc.ABC):
    name = "x"
    def samples(self, position=None): yield
    @abc.abstractmethod
    def read(self): ...
class NoName:
    def samples(self, position=None): yield
class Yields:
    name = "x"
    def __init__(self, *what): self.what = what
    def samples(self, position=None): return iter(self.what)
class Returns(Yields):
    def samples(self, position=None): return None
class Positions(Yields):
    def samples(self, position=None):
        for one in self.what:
            yield Sample("1", b"abcd", shape=(2, 2, 1), source="x"), one
class Fails(Yields):
    def samples(self, position=None):
        yield Sample("1", b"abcd", shape=(2, 2, 1), source="x"), 1
        raise self.what[0]
class NoStart:
    name = "x"
    def __init__(self): raise OSError("no camera")
    def samples(self, position=None): yield
'''


@pytest.fixture
def bad(on_path: Path) -> str:
    (on_path / "outside_bad.py").write_text(BAD)
    (on_path / "outside_broken.py").write_text("1 / 0")
    (on_path / "outside_lacks.py").write_text("import no_such_library")
    return "outside_bad"


def test_names_that_are_no_source_are_refused(
    bad: str, capsys: pytest.CaptureFixture[str], subtests: pytest.Subtests
) -> None:
    refused = {
        "imagess": "source 'imagess': must be one of camera, .*, table, or a class path",
        "no_package.sources.Mine": "there is no module 'no_package' on the Python path; install",
        "outside_bad.inner.Mine": "there is no module 'outside_bad.inner'",
        "outside_bad.Mine": "the module 'outside_bad' has no class 'Mine'",
        "outside_bad.number": "has no class 'number'",
        "outside_broken.Mine": "cannot be imported: ZeroDivisionError: division by zero",
        "outside_lacks.Mine": "its module needs 'no_such_library', which is not installed",
        "outside_bad.NoSamples": r"has no method samples\(self, position=None\)",
        "outside_bad.NoPosition": r"samples\(self\) must accept a position",
        "outside_bad.Untyped": "the argument 'file' has no type, .* annotate it",
        "outside_bad.Abstract": "the class is abstract; it lacks read",
    }
    for name, message in refused.items():
        with subtests.test(name):
            with pytest.raises(ValueError, match=message):
                find_source(name)
            with pytest.raises(SystemExit) as exited:
                produce.main([name, "--to", "tcp://127.0.0.1:9", "--name", "robot"])
            assert exited.value.code == 2
            assert name in capsys.readouterr().err


def test_a_source_without_a_name_is_refused(bad: str) -> None:
    with pytest.raises(ValueError, match=r"outside_bad\.NoName has no name: set the attribute"):
        build_source(find_source("outside_bad.NoName"), {})


@table(
    ("name", "what", "message"),
    [
        ("Returns", (), r"samples\(\) returned None; it must yield \(Sample, position\)"),
        ("Yields", (3,), r"samples\(\) yielded 3; it must yield a tuple"),
        ("Yields", ((1, 2),), r"yielded \(1, 2\)"),
        ("Yields", (np.zeros((9, 9)),), r"yielded array\(\[\[0., .* \(Sample"),
        (
            "Fails",
            (KeyError("a"),),
            r"samples\(\) at sample 2 failed \(.*bad.py, line \d+\): KeyError",
        ),
        ("Fails", (OSError("no\ncamera"),), "OSError: no camera. Handle this error there"),
        ("Positions", ({1: 2},), "as a position: .*use text keys"),
        ("Positions", (b"bytes",), "as a position: .*bytes is not JSON serializable"),
        ("Positions", ({"at": {1, 2}},), "as a position"),
        ("Positions", (float("nan"),), "position nan does not survive JSON"),
        ("Positions", (object(),), "as a position"),
        ("Positions", ({"at": 0}, [0] * 200_000), "as a position: .*at most"),
    ],
)
def test_pairs_that_break_the_contract_end_the_source(
    name: str, what: tuple[object, ...], message: str, bad: str
) -> None:
    source = find_source(f"outside_bad.{name}")(*what)
    with pytest.raises(SourceError, match=rf"source outside_bad.{name}: .*{message}"):
        list(source.samples())


def test_the_error_names_a_constructor_that_fails(bad: str) -> None:
    with pytest.raises(
        ValueError, match=r"source outside_bad.NoStart: its constructor failed \(.*no camera"
    ):
        build_source(find_source("outside_bad.NoStart"), {})


def test_good_positions_pass_unchanged(bad: str) -> None:
    good = (None, 7, "a", [1, (2, 3)], {"at": [1.5, None, True]})
    source = find_source("outside_bad.Positions")(*good)
    assert [position for _, position in source.samples()] == list(good)
