"""The base class of sources that wrap another source."""

from __future__ import annotations

from stream_ssl.producers.sources.base import Facts, Source, stop_source


class Shaping:
    """A source that reshapes the samples of another source and has its name.

    Args:
        source: the source to reshape.
        facts: the settings that a position depends on. Other settings make a position invalid.
    """

    def __init__(self, source: Source, **facts: str | int | float | None) -> None:
        self.source, self.name = source, source.name
        self._facts: Facts = {"source": source.name, **facts}

    def stop(self) -> None:
        """Stop a blocked source, if it supports stopping. Any thread may call this."""
        stop_source(self.source)
