"""The examples of docs/evaluation.md run, and the page names every command and metric."""

from __future__ import annotations

import io
import json
import re
import tarfile
from pathlib import Path

import pytest
import yaml
from evaluation_run import SETTINGS
from forked import Forked, run_script

from stream_ssl.app.commands.evaluate import evaluate_parser
from stream_ssl.config import options
from stream_ssl.evaluation.linear import PROBES
from stream_ssl.observe.catalogue import CATALOGUE, CLASSIFIERS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "evaluation.md").read_text()


def test_the_snippet_of_the_page_runs(tmp_path: Path) -> None:
    _, code = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    script = tmp_path / "page.py"
    script.write_text("import torch; torch.manual_seed(0)\n" + code + "assert knn.accuracy > 0.9\n")
    output = tmp_path / "output.log"
    assert Forked(run_script, script, output=output).wait(120) == 0, output.read_text()


def test_labels_in_a_table_become_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, _ = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    Path("labels.csv").write_text("name,label\n000000000,hall\n000000002,yard\n000000003,hall\n")
    Path("kept").mkdir()
    with tarfile.open("kept/originals-000000.tar", "w") as tar:
        for number in range(4):
            for name in (f"{number:09d}.jpg", f"{number:09d}.json"):
                info = tarfile.TarInfo(name)
                info.size = len(name)
                tar.addfile(info, io.BytesIO(name.encode()))
    exec(code, {})
    found = {str(path.relative_to("labelled")) for path in Path("labelled").rglob("*.*")}
    assert found == {"hall/000000000.jpg", "hall/000000003.jpg", "yard/000000002.jpg"}
    assert Path("labelled/yard/000000002.jpg").read_bytes() == b"000000002.jpg"


def test_the_learner_accepts_the_config_section_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    folder = tmp_path / "data" / "cifar10"
    folder.mkdir(parents=True)
    (folder / "test_batch.bin").write_bytes(bytes(3 * 3073))
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "config.yaml"
    file.write_text(json.dumps(SETTINGS | yaml.safe_load(text)))
    parser = options.learner_parser()
    settings = parser.instantiate(options.read(parser, [str(file)]))
    held = settings.observe.held_out
    assert (held.every, held.k, len(held.source)) == (500, 20, 3)


def test_the_page_names_existing_options_and_all_probes_and_metrics() -> None:
    options = {option for action in evaluate_parser()._actions for option in action.option_strings}
    named = set(re.findall(r"(?<![\w-])--[a-z_]+\b(?![.\w])", PAGE))
    named -= {"--run", "--name", "--memory"}  # of produce and export
    assert named <= options
    assert {"--references", "--of", "--stages", "--decorrelated", "--untrained"} <= named
    for name in PROBES:
        assert f"linear probe, {name}" in PAGE
    for name in CLASSIFIERS:
        assert f"| `{name}` |" in PAGE
    for spec in (spec for spec in CATALOGUE if spec.name.startswith(("prequential_", "held_out_"))):
        assert spec.name.endswith("_total") or f"`{spec.name}`" in PAGE
