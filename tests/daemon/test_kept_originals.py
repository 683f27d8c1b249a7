"""A run that keeps the original samples of its memory: kills, the page, and an export."""

from __future__ import annotations

import io
import json
import tarfile
from base64 import b64decode
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from harness import TINY, kill, processes, stop, until
from PIL import Image

from stream_ssl.app.commands import export
from stream_ssl.batch import START, Origin
from stream_ssl.config import build, options
from stream_ssl.daemon.endpoints import load
from stream_ssl.daemon.saver import Saver
from stream_ssl.feed.originals import KeptOriginals
from stream_ssl.learning.divergence import Divergence
from stream_ssl.learning.saved import originals_of
from stream_ssl.memory.process_group import SINGLE_PROCESS
from stream_ssl.observe.health import Health
from stream_ssl.originals import name_of
from stream_ssl.trained.encoder import find

pytestmark = pytest.mark.timeout(300)

SENT = 320
KEPT = TINY | {"originals": {"budget": 1 << 20}}


def pictures(folder: Path) -> dict[str, str]:
    """Write JPEGs of noise; return their file names by the hash of their content."""
    folder.mkdir()
    names = {}
    rng = np.random.default_rng(0)
    for number in range(SENT):
        file = folder / f"{number:04d}.jpg"
        Image.fromarray(rng.integers(0, 256, (24, 30, 3), np.uint8)).save(file)
        names[name_of(file.read_bytes())] = file.name
    return names


def files(run: Path) -> set[str]:
    return {path.name for path in (run / "originals").glob("*/*")}


def size_of(held: set[str], sent: dict[str, str], folder: Path) -> int:
    return sum((folder / "pictures" / sent[name]).stat().st_size for name in held)


def test_originals_of_the_memory_survive_kills_and_are_shown_and_exported(tmp_path: Path) -> None:
    sent = pictures(tmp_path / "pictures")
    with processes(tmp_path / "run", KEPT) as run:
        run.role("receiver")
        source = ("--source.root", str(tmp_path / "pictures"))
        producer = run.start("produce", "images", "--to", run.address, "--name", "eye", *source)
        learner = run.role("learner")
        until(lambda: run.metric("checkpoint_step") >= 10, lambda: run.log("learner"))
        kill(learner)
        learner = run.role("learner")
        assert producer.wait(60) == 0, run.log("produce")
        until(lambda: run.metric("checkpoint_step") == SENT // 16, lambda: run.log("learner"))
        address = load(run.folder)["learner"]["http"]

        def answer(question: str) -> httpx.Response:
            url = f"{address}/api/learner/memory/{question}"
            return httpx.get(url, timeout=20, trust_env=False)

        for slot in (0, 63):
            origin = answer(f"slot?slot={slot}").json()["origin"]
            told = answer(f"original?slot={slot}").json()
            assert name_of(b64decode(told["url"].partition("base64,")[2])) == origin["original"]
            assert origin["id"].startswith(sent[origin["original"]])
        assert answer("original?slot=64").status_code == 404
        until(
            lambda: run.metric("originals_bytes") == size_of(files(run.folder), sent, tmp_path),
            lambda: run.log("learner"),
        )
        assert stop(learner) == 0, run.log("learner")
        held = originals_of(find(run.folder))
        assert len(held) == 64  # all pictures differ
        assert held <= sent.keys()
        assert held <= files(run.folder)
        learner, kept = run.role("learner"), size_of(held, sent, tmp_path)
        until(lambda: run.metric("originals_bytes") == kept, lambda: run.log("learner"))
        assert stop(learner) == 0, run.log("learner")
        assert files(run.folder) == held  # a start sweeps the others
        out = tmp_path / "out"
        assert export.main([str(run.folder), "--memory", str(out)]) == 0
        with tarfile.open(out / "originals-000000.tar") as tar:
            members = {member.name: tar.extractfile(member) for member in tar}
            content = {name: file.read() for name, file in members.items() if file is not None}
        assert len(content) == 2 * 64
        for number in range(64):
            facts = json.loads(content[f"{number:09d}.json"])
            assert name_of(content[f"{number:09d}.jpg"]) == facts["origin"]["original"]
            with Image.open(io.BytesIO(content[f"{number:09d}.jpg"])) as image:
                assert image.size == (30, 24)


def test_a_run_with_several_ranks_refuses_to_keep_originals(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(json.dumps(KEPT | {"run": str(tmp_path / "run")}))
    parser = options.run_parser()
    settings = parser.instantiate(options.read(parser, [str(file)]))
    build.dry_run(settings)
    with pytest.raises(ValueError, match=r"originals are kept by a run with one rank. Set"):
        build.dry_run(settings, ranks=2)


def test_a_reload_deletes_originals_that_only_the_diverged_memory_held(tmp_path: Path) -> None:
    kept = KeptOriginals(tmp_path, (8, 8, 3), 10_000)
    names = [kept.keep({"codec": "jpeg"}, f"picture {number}".encode()) for number in range(3)]
    kept.arrived([Origin("eye", "left", "1", 0.0, name) for name in names])
    held = [set(names), {names[0]}]  # before and after the reload
    learner: Any = SimpleNamespace(
        step=5,
        offset=START,
        originals=lambda: held[0],
        reload=lambda _: held.pop(0),
        divergence=Divergence(),
        ranks=SimpleNamespace(group=SINGLE_PROCESS),
    )
    saved = SimpleNamespace(capture=lambda *_: None, path=Path("step-000000001"))
    checkpointer: Any = SimpleNamespace(finished=lambda _: None, before=lambda _: saved)
    server: Any = SimpleNamespace(
        metrics=SimpleNamespace(observe_divergence=lambda _: None), health=Health()
    )
    receiver: Any = None
    Saver(learner, checkpointer, {}, None, kept, receiver, server).reload()
    assert {path.name for path in tmp_path.glob("*/*")} == {names[0]}
    assert kept.bytes == len(b"picture 0")
