"""The examples of docs/losses.md run, and the page names every loss."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from forked import Forked, run_script
from jsonargparse import ArgumentParser

import stream_ssl.config.names  # noqa: F401  (the short names of a config file)
from stream_ssl.losses import LOSSES, Loss

PAGE = (Path(__file__).parents[2] / "docs" / "losses.md").read_text()


def test_the_snippets_of_the_page_run_one_after_the_other(tmp_path: Path) -> None:
    codes = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(codes) == 2
    script = tmp_path / "page.py"
    script.write_text("\n".join(codes))
    output = tmp_path / "output.log"
    assert Forked(run_script, script, output=output).wait(150) == 0, output.read_text()
    shape, prior, *losses = output.read_text().splitlines()
    assert shape.startswith("torch.Size([256])")
    assert float(prior) == pytest.approx(0.05)
    assert len(losses) == 3


def test_the_configuration_of_the_page_builds_its_loss() -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(Loss, "loss")
    loss = parser.instantiate(parser.parse_object(yaml.safe_load(text))).loss
    assert repr(loss) == (
        "Debiased(temperature=0.5, prior=Ramp(0.1, 5000, 0.0, 0, 'linear'), floor='biased')"
    )


def test_the_page_names_every_loss_and_three_diagnostics() -> None:
    assert [name.__name__ for name in LOSSES.values() if f"`{name.__name__}`" not in PAGE] == []
    assert all(f"`{name}`" in PAGE for name in ("clamp_rate", "effective_negatives", "prior"))
