"""The error about an option whose value is none of its choices."""

from __future__ import annotations

from pathlib import Path

import pytest
from table import table

from stream_ssl.app.config import learner_parser


@table(
    ("option", "value", "message"),
    [
        ("decoder.fit", "foo", "'foo': must be one of 'crop', 'letterbox'"),
        (
            "loggers",
            "[tensorbord]",
            "'tensorbord': must be one of 'tensorboard', 'wandb'",
        ),
    ],
)
def test_it_names_the_value_and_the_choices(
    option: str, value: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        learner_parser().parse_args(["--run", str(tmp_path), f"--{option}", value])
    told = capsys.readouterr().err
    assert f'"{option}"' in told
    assert message in told
    assert "Literal" not in told
