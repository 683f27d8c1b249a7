"""The pages of the API reference, which mkdocstrings fills from docstrings."""

from __future__ import annotations

MODULES = {
    "stream_ssl": "Use an encoder",
    "stream_ssl.producers": "Send samples",
    "stream_ssl.producers.sources": "Sources",
    "stream_ssl.producers.shaping": "Shaping of streams",
    "stream_ssl.memory": "The working memory",
    "stream_ssl.memory.eviction": "Eviction policies",
    "stream_ssl.memory.scores": "Scores of similarity",
    "stream_ssl.memory.descriptors": "Descriptors",
    "stream_ssl.losses": "Losses",
    "stream_ssl.methods": "Methods",
    "stream_ssl.encoder.network": "Networks",
    "stream_ssl.learning.schedule": "Schedules of the learning rate",
    "stream_ssl.evaluation": "Evaluation",
    "stream_ssl.wire": "Messages",
}
"""The public modules, in the order of the navigation, each with its title."""


def pages() -> list[tuple[str, str]]:
    """Return (path in the site, Markdown) of each page, with a list of all pages first."""
    lines = [f"- [{title}]({module}.md): `{module}`" for module, title in MODULES.items()]
    index = "\n".join(
        ["# Overview", "", "All public classes and functions, from their docstrings.", "", *lines]
    )
    made = [("api/index.md", index)]
    for module, title in MODULES.items():
        made.append((f"api/{module}.md", f"# {title}\n\n`{module}`\n\n::: {module}\n"))
    return made
