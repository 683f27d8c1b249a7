"""The files of containers, and the program's parts that containers rely on."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry
from table import table

from stream_ssl import __version__
from stream_ssl.app import cli
from stream_ssl.app.commands import status
from stream_ssl.config import options
from stream_ssl.daemon.endpoints import publish
from stream_ssl.observe.health import Health
from stream_ssl.observe.http_access import Token
from stream_ssl.observe.server import Server
from stream_ssl.receiver.access import Access

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "deploy" / "configs"
NAMESPACE = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child")
FIRST = """
import os, signal, sys
from stream_ssl.process.first_process import leave_first_process
leave_first_process()
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
print(os.getpid(), flush=True)
if sys.argv[1] == "wait":
    signal.pause()
os.kill(os.getpid(), signal.SIGKILL)
"""


def namespaces() -> bool:
    """Return whether this user may make a PID namespace."""
    done = subprocess.run([*NAMESPACE, "true"], capture_output=True, check=False)
    return done.returncode == 0


@pytest.mark.skipif(not namespaces(), reason="this user may make no PID namespace")
def test_a_learner_that_is_process_1_takes_another_id() -> None:
    words = [*NAMESPACE, sys.executable, "-c", FIRST]
    with subprocess.Popen([*words, "wait"], stdout=subprocess.PIPE, text=True) as waiting:
        assert waiting.stdout is not None
        assert int(waiting.stdout.readline()) > 1
        children = Path(f"/proc/{waiting.pid}/task/{waiting.pid}/children").read_text()
        os.kill(int(children), signal.SIGTERM)
        assert waiting.wait(30) == 7
    killed = subprocess.run([*words, "die"], capture_output=True, timeout=30)
    assert killed.returncode == 128 + signal.SIGKILL


def test_only_the_learner_and_the_supervisor_leave_process_1(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A receiver stays process 1. In a container of its own, it must not get the learner's id."""
    left: list[str] = []
    for command in cli.DAEMONS:
        monkeypatch.setattr(cli, "leave_first_process", lambda name=command: left.append(name))
        with pytest.raises(SystemExit):
            cli.main([command, "--no-such-option", "1"])
    assert sorted(left) == ["learner", "run"]


def test_the_health_check_fails_for_a_hung_loop(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(tmp_path), "--health", "receiver"]
    assert status.main(arguments) == 1
    assert "the receiver has not started" in capsys.readouterr().out
    now, health = 0.0, Health(lambda: now)
    health.expect("receiver", 10.0)
    with Server(CollectorRegistry(), health, "receiver", "0.0.0.0", 0, public=True) as server:
        assert "0.0.0.0" not in server.address
        publish(tmp_path, "receiver", http=server.address)
        assert status.main(arguments) == 0
        now = 11.0
        assert status.main(arguments) == 1
        assert '"failing":["receiver"]' in capsys.readouterr().out
    assert status.main(arguments) == 1
    assert "does not answer at" in capsys.readouterr().out


NETWORK = ROOT / "deploy" / "containers" / "network.yaml"
CONTAINERS = ROOT / "deploy" / "containers" / "Containerfile"


def stages() -> dict[str, list[tuple[str, str]]]:
    """Return the (instruction, arguments) of each stage by name, after those of its parent."""
    text = re.sub(r"^#.*\n", "", CONTAINERS.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    found: dict[str, list[tuple[str, str]]] = {}
    name = ""
    for line in filter(None, text.splitlines()):
        instruction, _, rest = line.partition(" ")
        if instruction == "FROM":
            parent, _, name = rest.partition(" AS ")
            found[name] = list(found.get(parent, ()))
        elif name:
            found[name].append((instruction, rest.strip()))
    return found


@table("target", ["receiver", "learner", "learner-gpu"])
def test_an_image_has_an_unprivileged_user_and_starts_its_program_without_a_shell(
    target: str,
) -> None:
    last = dict(stages()[target])  # the last of two equal instructions applies
    assert last["USER"] == "65532:65532"
    assert last["STOPSIGNAL"] == "SIGTERM"
    role = target.removesuffix("-gpu")
    entry = [*json.loads(last["ENTRYPOINT"]), *json.loads(last["CMD"])]  # JSON: no shell between
    program, command, *words = entry
    assert (program, command) == ("/opt/stream-ssl/bin/stream-ssl", role)
    parser = {"receiver": options.receiver_parser, "learner": options.learner_parser}[role]()
    assert words[0] == "/etc/stream-ssl/config.yaml"
    given = ["--config", str(CONFIGS / "laptop.yaml"), *words[1:]]
    assert str(parser.parse_args(given).run) == "/var/lib/stream-ssl/run"
    check = json.loads(last["HEALTHCHECK"].partition("CMD ")[2])
    assert check == [program, "status", "/var/lib/stream-ssl/run", "--health", role]


def test_each_image_can_get_further_extras() -> None:
    for name in ("build-receiver", "build-learner", "build-learner-gpu"):
        steps = stages()[name]
        (install,) = (rest for _, rest in steps if " -r pyproject.toml " in rest)
        assert install.endswith(" ${EXTRAS}"), name
        assert ("ARG", "EXTRAS=") in steps[: steps.index(("RUN", install))], name
    arguments = re.findall(r"^ARG (\w+)", CONTAINERS.read_text(), flags=re.MULTILINE)
    rows = re.findall(r"^\| `([A-Z_]+)` \|", CONTAINERS.with_name("README.md").read_text(), re.M)
    assert set(arguments) == set(rows)


def test_the_images_copy_exactly_the_files_that_dockerignore_keeps() -> None:
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if "!" in line}
    copied = {
        source
        for stage in stages().values()
        for instruction, rest in stage
        if instruction == "COPY" and not rest.startswith("--from")
        for source in rest.split()[:-1]
    }
    assert copied == kept
    assert all((ROOT / name).exists() for name in kept)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = set(re.findall(r"--extra (\S+)", CONTAINERS.read_text()))
    assert named == {"receiver", "learner", "cpu", "gpu"}
    assert named <= extras["optional-dependencies"].keys()


def test_compose_mounts_existing_files_and_sets_public_addresses_with_a_token() -> None:
    folder = ROOT / "deploy" / "compose"
    services = yaml.safe_load((folder / "compose.yaml").read_text())["services"]
    mounted = {
        re.sub(r"\$\{\w+:-(.*?)\}", r"\1", volume).split(":")[0]
        for service in services.values()
        for volume in service.get("volumes", ())
    }
    files = {name for name in mounted if name.startswith(".")}
    assert len(files) == 10
    assert all((folder / name).exists() for name in files)
    for role in ("receiver", "learner"):
        program, *words = services[role]["command"]
        assert program == role
        assert services[role]["read_only"]
        assert services[role]["cap_drop"] == ["ALL"]
        here = [
            word.replace("/etc/stream-ssl/config.yaml", str(CONFIGS / "laptop.yaml")).replace(
                "/etc/stream-ssl/network.yaml", str(NETWORK)
            )
            for word in words
        ]
        parser = {"receiver": options.receiver_parser, "learner": options.learner_parser}[role]()
        settings = parser.parse_args(here)
        assert settings.http[role].startswith("0.0.0.0:")
        assert str(settings.http.token_file) == "/etc/stream-ssl/keys/http.token"
    targets = yaml.safe_load((folder / "prometheus.yml").read_text())["scrape_configs"][0]
    assert {t["targets"][0] for t in targets["static_configs"]} == {"receiver:9108", "learner:9109"}


def test_the_setup_of_compose_makes_keys_and_a_token_once(tmp_path: Path) -> None:
    words = [sys.executable, str(ROOT / "deploy" / "compose" / "setup.py"), str(tmp_path)]
    contents = []
    for _ in range(2):
        subprocess.run(words, check=True, timeout=60)
        contents.append({file.name: file.read_bytes() for file in tmp_path.iterdir()})
    assert contents[0] == contents[1]
    assert len(Token.load(tmp_path / "http.token").secret) > 30
    Access(tmp_path / "receiver.secret.json", tmp_path / "allow.json")


def kubernetes(folder: str) -> dict[tuple[str, str], Any]:
    """Return the documents of a folder's YAML files, by kind and name."""
    files = sorted((ROOT / "deploy" / "kubernetes" / folder).glob("*.yaml"))
    documents = [
        document
        for file in files
        if file.name not in ("kustomization.yaml", "config.yaml", "network.yaml")
        for document in yaml.safe_load_all(file.read_text())
    ]
    return {(one["kind"], one["metadata"]["name"]): one for one in documents}


def test_the_copies_for_kubernetes_equal_their_originals() -> None:
    folder = ROOT / "deploy" / "kubernetes"
    for copy, original in (
        ("base/config.yaml", CONFIGS / "laptop.yaml"),
        ("base/network.yaml", NETWORK),
        ("overlays/gpu/config.yaml", CONFIGS / "gpu.yaml"),
    ):
        assert (folder / copy).read_text() == original.read_text(), f"cp {original}"
    rule = kubernetes("components/monitoring")["PrometheusRule", "stream-ssl"]
    alerts = yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yml").read_text())
    assert rule["spec"] == alerts, "make docs"


@pytest.mark.parametrize("role", ["receiver", "learner"])
def test_a_pod_is_restricted_and_refers_to_existing_objects(role: str) -> None:
    made = kubernetes("base")
    spec = made["StatefulSet", f"stream-ssl-{role}"]["spec"]
    assert ("Service", spec["serviceName"]) in made
    assert spec["podManagementPolicy"] == "Parallel", "a pod that is not ready can be updated"
    labels = {"app.kubernetes.io/name": "stream-ssl", "app.kubernetes.io/component": role}
    assert spec["selector"]["matchLabels"] == labels
    pod = spec["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    (container,) = pod["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert mounted == volumes.keys()
    claim = volumes["run"]["persistentVolumeClaim"]["claimName"]
    assert ("PersistentVolumeClaim", claim) in made
    kustomization = (ROOT / "deploy" / "kubernetes" / "base" / "kustomization.yaml").read_text()
    (generated,) = yaml.safe_load(kustomization)["configMapGenerator"]
    assert generated["name"] == volumes["config"]["configMap"]["name"]
    assert {m["subPath"] for m in container["volumeMounts"] if "subPath" in m} == set(
        generated["files"]
    )
    ports = {port["name"] for port in container["ports"]}
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container[probe]["httpGet"]["port"] in ports
    policy = made["NetworkPolicy", f"stream-ssl-{role}"]["spec"]
    assert policy["podSelector"]["matchLabels"] == labels
    asked = [port["port"] for rule in policy["ingress"] for port in rule["ports"]]
    assert set(asked) <= ports
    stopped, stuck = pod["terminationGracePeriodSeconds"], container["livenessProbe"]
    least = {"receiver": 120, "learner": 600}[role]
    assert stopped >= least
    assert stuck["periodSeconds"] * stuck["failureThreshold"] >= least
    assert [word.partition("=")[0] for word in container["args"]] == [
        role,
        *("--config", "--config", "--run"),
    ]


def test_every_manifest_and_page_names_the_version_of_our_images() -> None:
    named = 0
    files = [path for path in (ROOT / "deploy").rglob("*") if path.suffix in (".yaml", ".md")]
    for path in files:
        text = path.read_text()
        tags = re.findall(r"stream-ssl-(?:receiver|learner)(?:-gpu)?:(\S+)|newTag: (\S+)", text)
        for tag in map("".join, tags):
            assert tag.strip('"}') == __version__, f"{path}: {tag}"
            named += 1
        images = re.findall(r"image: (?:&\S+ )?(stream-ssl-\S+)", text)
        if "kubernetes" not in path.parts:  # kustomize adds the tag there
            assert all(":" in image for image in images), f"{path}: {images}"
    assert named >= 14
