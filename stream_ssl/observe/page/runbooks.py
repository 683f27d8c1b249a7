"""The runbooks of docs/runbooks, and docs/metrics.md, as HTML that the page links."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from markdown_it import MarkdownIt

from stream_ssl.observe import catalogue_page

HERE = Path(__file__).parent
FOLDERS = (HERE / "docs" / "runbooks", HERE.parents[2] / "docs" / "runbooks")
"""The folder of the runbooks in an installed package, and in a checkout."""

NAMES = frozenset(
    path.stem for folder in FOLDERS if folder.is_dir() for path in folder.glob("*.md")
)


def render(name: str) -> str:
    """Return a runbook as HTML. An unknown name raises LookupError."""
    if name not in NAMES:
        raise LookupError(
            f"unknown runbook {name[:40]!r}: must be one of {', '.join(sorted(NAMES))}"
        )
    folder = next(folder for folder in FOLDERS if (folder / f"{name}.md").is_file())
    text = (folder / f"{name}.md").read_text(encoding="utf-8")
    # A link to another runbook must open the page of that runbook.
    text = text.replace(".md)", ")")
    html: str = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)
    return html


@cache
def render_metrics() -> str:
    """Return docs/metrics.md as HTML. Each metric is an anchor of its name."""
    html: str = MarkdownIt("commonmark", {"html": False}).render(catalogue_page.page())
    html = re.sub(r"<p><strong><code>(\w+)</code>", r'<p id="\1"><strong><code>\1</code>', html)
    return re.sub(r'<a href="\.\./[^"]*">(.*?)</a>', r"\1", html)  # the page has no such files
