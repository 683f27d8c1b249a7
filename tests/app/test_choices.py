"""The errors about options whose values are none of their choices, or of another type."""

from __future__ import annotations

from pathlib import Path

import pytest
from table import table

from stream_ssl.app.cli import main
from stream_ssl.config.options import learner_parser


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
def test_an_invalid_value_is_refused_with_the_name_of_its_option(
    option: str, value: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        learner_parser().parse_args(["--run", str(tmp_path), f"--{option}", value])
    told = capsys.readouterr().err
    assert f'"{option}"' in told
    assert message in told
    assert "Literal" not in told


@table(
    ("words", "message"),
    [
        ("export RUN --encoder DIR --of foo", "'foo': must be one of 'features', 'embeddings'"),
        ("search RUN FILE --k foo", "'foo': must be a whole number"),
        ("status RUN --seconds foo", "'foo': must be a number"),
        ("watch RUN --seconds foo", "'foo': must be a number"),
        ("run none.yaml", "none.yaml'; `stream-ssl init laptop > laptop.yaml` writes a config"),
        ("demo --seconds foo", "'foo': must be a number"),
        ("status RUN --json maybe", "'maybe': must be true or false"),
        (
            "produce images --name a --to tcp://h:1 --shape.limit foo",
            "'foo': must be a whole number",
        ),
    ],
)
def test_every_command_names_a_wrong_value_and_the_rule(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert message in told
    assert "Expected" not in told
