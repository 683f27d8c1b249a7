"""Tables and plots of an experiment in a dated report, named by hardware."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stream_ssl.reproduction import plots, tables
from stream_ssl.reproduction.arms import Run
from stream_ssl.reproduction.findings import Found, Verdict, verdicts

RULE = """Verdicts are computed from the runs: *agrees* where the difference is above 0 by more
than two standard errors, *disagrees* where it is below by as much, else *not settled*. The
standard error is paired: that of the mean, over seeds, of the difference between runs that saw the
same data and the same test images; with one seed it is that of the test images. ± is the standard
deviation over seeds. A cell without a run is empty."""


def write(
    found: Found, runs: Sequence[Run], preset: str, settings: Mapping[str, Any], folder: Path
) -> Path:
    """Report and plots, made from stored results alone: redrawn they are the same bytes.

    Args:
        found: at least one run.
        runs: all that were planned.
        preset: its name.
        settings: of the preset, and the data.
        folder: made where it is missing.

    Returns:
        The report.
    """
    made = [result.made for cell in found.results.values() for result in cell.values()]
    days = sorted({one["day"] for one in made})
    machines = sorted({one["machine"] for one in made})
    name = f"{days[-1]}-{found.experiment.name}-{preset}-{slug(machines[-1])}"
    folder.mkdir(parents=True, exist_ok=True)
    plots.draw(found, folder / f"{name}.svg")
    judged = verdicts(found)
    done = sum(len(cell) for cell in found.results.values())
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    command = f"stream-ssl reproduce {found.experiment.name} --preset {preset} --data ..."
    parts = [
        f"# {found.experiment.title}: {preset}\n",
        f"{done} of {len(runs)} planned runs are done ({when}; {'; '.join(machines)}).\n",
        f"`{command}`{' goes on with the rest' if done < len(runs) else ''}.\n",
        found.experiment.says + "\n",
        f"Settings: {_settings(settings)}.\n",
        _summary(judged) + "\n",
        RULE + "\n",
        *(tables.markdown(table) for table in tables.tables(found, judged)),
        f"![plots]({name}.svg)\n",
    ]
    path = folder / f"{name}.md"
    path.write_text("\n".join(parts))
    return path


def slug(text: str) -> str:
    """Small letters, digits and hyphens.

    >>> slug("AMD EPYC, 2 cores")
    'amd-epyc-2-cores'
    """
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _summary(judged: Sequence[Verdict]) -> str:
    words = [verdict.word for verdict in judged]
    parts = [
        f"{words.count(word)} {told}"
        for word, told in (
            ("agrees", "hold here"),
            ("disagrees", "do not"),
            ("not settled", "are not settled"),
            ("not run", "have not been run"),
        )
    ]
    return f"Of {len(words)} claims {', '.join(parts)}."


def _settings(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items())
