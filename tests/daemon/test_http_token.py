"""A token for HTTP: the answers of a run's processes with and without it, and `status`."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
from harness import TINY, processes, stop, until

from stream_ssl.app.commands import check, status
from stream_ssl.daemon.endpoints import load

SECRET = "0123456789abcdef-secret"

pytestmark = pytest.mark.timeout(300)


def test_a_token_protects_the_pages_of_a_run_and_status_sends_the_token(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    token = tmp_path / "http.token"
    token.write_text(SECRET + "\n")
    token.chmod(0o600)
    settings = {**TINY, "http": {**TINY["http"], "token_file": str(token)}}
    with processes(tmp_path / "run", settings) as run:
        receiver = run.role("receiver")
        entry = load(run.folder)["receiver"]
        assert SECRET not in json.dumps(entry)
        with httpx.Client(base_url=entry["http"], trust_env=False) as client:
            assert client.get("/metrics").status_code == 401
            bearer = {"authorization": f"Bearer {SECRET}"}
            assert "stream_ssl_build_info" in client.get("/metrics", headers=bearer).text
            asked = client.get("/api/learner/state", headers=bearer)
            assert asked.json() == {"error": "no learner has started in this run folder"}

        def received() -> bool:
            status.main([str(run.folder), "--seconds", "0.1", "--json", "true"])
            figures = json.loads(capsys.readouterr().out)
            return bool(figures["up"]["receiver"])

        until(received, lambda: run.log("receiver"))
        assert stop(receiver) == 0


def test_a_token_file_that_other_users_may_read_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    token, config = tmp_path / "http.token", tmp_path / "config.yaml"
    token.write_text(SECRET)
    token.chmod(0o644)
    http = {**TINY["http"], "token_file": str(token)}
    config.write_text(json.dumps({**TINY, "run": str(tmp_path / "run"), "http": http}))
    assert check.main([str(config)]) == 2
    assert "other users may read the file" in caplog.text
