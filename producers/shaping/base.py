"""The base of all sources that are made of another one."""

from __future__ import annotations

from stream_ssl.producers.sources.base import Facts, Source, stop_source


class Shaping:
    """A source that reshapes the samples of another one, and has its name.

    Args:
        source: whose samples are reshaped.
        facts: settings that a position holds good for.
    """

    def __init__(self, source: Source, **facts: str | int | float | None) -> None:
        self.source, self.name = source, source.name
        self._facts: Facts = {"source": source.name, **facts}

    def stop(self) -> None:
        """Stop a blocked source, if it supports stopping. Any thread may call this."""
        stop_source(self.source)
