"""The checks of deploy/ by linters and schemas, for `make manifests`."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.manifests

DEPLOY = Path(__file__).parents[2] / "deploy"
BIN = Path(sys.executable).parent
KUBERNETES = ("1.28", "1.31", "1.34")
MONITORING = "\ncomponents: [../../components/monitoring]\n"


def run(*words: object, cwd: Path | None = None) -> str:
    done = subprocess.run(
        [str(word) for word in words], cwd=cwd, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_hadolint_accepts_the_containerfile() -> None:
    run(BIN / "hadolint", DEPLOY / "containers" / "Containerfile")


def test_the_compose_files_match_their_schema() -> None:
    files = [DEPLOY / "compose" / name for name in ("compose.yaml", "gpu.yaml")]
    run(BIN / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", *files)


def test_the_types_of_grafana_keep_every_field_of_the_dashboards() -> None:
    """Grafana's types drop unknown fields, so a dashboard must come back unchanged."""
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.models.dashboard import Dashboard

    for name in ("stream-ssl.json", "fleet.json"):
        made = json.loads((DEPLOY / "grafana" / name).read_text())
        back = json.loads(JSONEncoder().encode(Dashboard.from_json(made)))
        assert missing(made, back) == [], name


def missing(given: Any, found: Any, path: str = "") -> list[str]:
    """Return the paths whose given values `found` lacks. Other values in it are defaults."""
    if isinstance(given, dict) and isinstance(found, dict):
        return [w for k, v in given.items() for w in missing(v, found.get(k), f"{path}/{k}")]
    if isinstance(given, list) and isinstance(found, list) and len(given) == len(found):
        pairs = enumerate(zip(given, found, strict=True))
        return [w for n, (one, other) in pairs for w in missing(one, other, f"{path}/{n}")]
    return [] if given == found else [f"{path}: {given!r} became {found!r}"]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not here")
def test_promtool_accepts_the_configuration_of_prometheus(tmp_path: Path) -> None:
    for name in ("alerts.yml", "watchdog.yml"):
        shutil.copy(DEPLOY / "prometheus" / name, tmp_path)
    text = (DEPLOY / "compose" / "prometheus.yml").read_text()
    token = tmp_path / "http.token"
    token.write_text("x")
    (tmp_path / "prometheus.yml").write_text(
        text.replace("/etc/stream-ssl/keys/http.token", str(token))
    )
    run("promtool", "check", "config", tmp_path / "prometheus.yml")


@pytest.mark.skipif(shutil.which("amtool") is None, reason="amtool is not here")
@pytest.mark.parametrize(
    ("labels", "receiver"),
    [
        ({"alertname": "StreamSslDown", "severity": "critical"}, "people"),
        ({"alertname": "StreamSslLag", "severity": "warning"}, "people"),
        ({"alertname": "StreamSslWatchdog", "severity": "none"}, "watchdog"),
    ],
)
def test_alertmanager_sends_each_alert_to_its_receiver(
    labels: dict[str, str], receiver: str, tmp_path: Path
) -> None:
    """The addresses in the comments are tried, too."""
    text = (DEPLOY / "compose" / "alertmanager.yml").read_text()
    filled = re.sub(r"^    # (\w+_configs: )", r"    \1", text, flags=re.MULTILINE)
    assert filled.count("_configs:") == 3
    for number, content in enumerate((text, filled)):
        file = tmp_path / f"{number}.yml"
        file.write_text(content)
        run("amtool", "check-config", file)
        pairs = [f"{name}={value}" for name, value in labels.items()]
        found = run("amtool", "config", "routes", "test", f"--config.file={file}", *pairs)
        assert found.strip() == receiver


def test_the_release_workflow_matches_its_schema() -> None:
    file = DEPLOY.parent / ".github" / "workflows" / "release.yml"
    run(BIN / "check-jsonschema", "--builtin-schema", "vendor.github-workflows", file)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not here")
@pytest.mark.parametrize(("overlay", "kinds"), [("cpu", 11), ("gpu", 11), ("ranks", 8)])
def test_the_manifests_of_kustomize_match_the_schemas_of_kubernetes(
    overlay: str, kinds: int, tmp_path: Path
) -> None:
    shutil.copytree(DEPLOY / "kubernetes", tmp_path / "k")
    folder = tmp_path / "k" / "overlays" / overlay
    with (folder / "kustomization.yaml").open("a") as file:
        file.write(MONITORING)
    made = run("kubectl", "kustomize", folder)
    assert made.count("\nkind: ") == kinds
    assert made.count("app.kubernetes.io/name: prometheus") == (1 if overlay == "ranks" else 2)
    (tmp_path / "made.yaml").write_text(made)
    for version in KUBERNETES:
        said = run(BIN / "kubernetes-validate", "--strict", "-k", version, tmp_path / "made.yaml")
        assert said.count("WARN") == 2, "of the operator's kinds there is no schema"
