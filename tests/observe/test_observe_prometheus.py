"""Every question of the dashboard, asked of a real Prometheus that holds a real run.

Without Prometheus (Debian's package `prometheus`) there is nobody to ask; `make prometheus` then
fails.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from record import EVERY, plain, told
from test_observe_deploy import expressions

NEVER = ("stream_ssl_gpu_memory_bytes", "stream_ssl_rank_", "stream_ssl_parked_", "process_")
"""Metrics that neither recorded run exports: each is one process on a CPU."""
NEWER = (
    *("stream_ssl_held_out_", "stream_ssl_condition", "stream_ssl_producer_admitted_"),
    *("stream_ssl_dropped_samples_", "stream_ssl_producer_slots"),
    "stream_ssl_producer_guaranteed_",
)
"""Metrics that are newer than the recording `covered`, or that need a held-out set."""
ABSENT = {"covered": NEVER + NEWER, "broken": NEVER}
"""The metrics that each recording lacks."""

START = 1_700_000_000

pytestmark = pytest.mark.skipif(shutil.which("prometheus") is None, reason="no prometheus here")


@pytest.fixture(params=sorted(ABSENT))
def recording(request: pytest.FixtureRequest) -> str:
    """The name of a recording."""
    return str(request.param)


@pytest.fixture
def address(recording: str, tmp_path: Path) -> Iterator[str]:
    """The address of a Prometheus that holds the recording."""
    folder, found = tmp_path, told(recording)
    lines = [
        f"{name} {value} {START + EVERY * scrape}"
        for name, values in found["series"].items()
        for scrape, value in enumerate(plain(values))
        if value is not None
    ]
    (folder / "run.om").write_text("\n".join([*lines, "# EOF", ""]))
    (folder / "prometheus.yml").write_text("{}")
    made = subprocess.run(
        ["promtool", "tsdb", "create-blocks-from", "openmetrics", "run.om", "data"],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert made.returncode == 0, made.stdout + made.stderr
    server = subprocess.Popen(
        [
            "prometheus",
            "--config.file=prometheus.yml",
            "--storage.tsdb.path=data",
            "--storage.tsdb.retention.time=100y",
            "--web.listen-address=127.0.0.1:0",
        ],
        cwd=folder,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stderr is not None
        where, ready = None, False
        for line in server.stderr:
            where = re.search(r"address=(127\.0\.0\.1:[1-9]\d*)", line) or where
            ready = ready or "ready to receive web requests" in line
            if where and ready:
                break
        assert where is not None
        yield f"http://{where[1]}"
    finally:
        server.terminate()
        server.communicate(timeout=20)


def test_a_real_prometheus_answers_every_question_of_the_dashboards(
    recording: str, address: str
) -> None:
    end = START + EVERY * (told(recording)["scrapes"] - 1)
    unanswered = []
    for title, expression in expressions():
        asked = re.sub(r"\$(cluster|instance|producer)", ".*", expression)
        asked = asked.replace("$__rate_interval", "2m").replace("$job", "stream-ssl")
        query = urllib.parse.urlencode({"query": asked, "time": end})
        with urllib.request.urlopen(f"{address}/api/v1/query?{query}", timeout=20) as answer:
            found = json.load(answer)
        assert found["status"] == "success", f"{title}: {asked}: {found}"
        empty = asked.endswith("> 0") or any(name in asked for name in ABSENT[recording])
        if title != "alert" and not empty:
            unanswered += [] if found["data"]["result"] else [f"{title}: {asked}"]
    assert unanswered == []
