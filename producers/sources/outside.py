"""Sources from other packages: found by class path or entry point, and checked while they run."""

from __future__ import annotations

import importlib
import inspect
import itertools
import json
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import msgpack

from stream_ssl.producers.sources import SOURCES, Source
from stream_ssl.producers.sources.base import SourceError
from stream_ssl.wire.sample import Position, Sample, check_position

GROUP = "stream_ssl.sources"
"""The group of entry points in which installed packages list their sources."""


def listed() -> dict[str, EntryPoint]:
    """Return the entry points of sources, without importing them. Built-in names come first."""
    return {one.name: one for one in entry_points(group=GROUP) if one.name not in SOURCES}


def find_source(name: str, choices: Iterable[str] | None = None) -> type[Source]:
    """Return the class of a source.

    Args:
        name: a name in `SOURCES`, an entry point of the group `stream_ssl.sources`, or a class path
            such as my_package.sources.Mine. The latter two run code of their package.
        choices: the names that the error lists; None: all names.

    Raises:
        ValueError: there is no such source, or its class is no source.
    """
    if name in SOURCES:
        return SOURCES[name]
    if (entry := listed().get(name)) is not None:
        return _source_class(entry.value.partition("[")[0].strip().replace(":", "."))
    if "." not in name:
        known = [*SOURCES, *listed()] if choices is None else choices
        raise ValueError(f"source {name!r}: {must_be_one_of(known)}")
    return _source_class(name)


def must_be_one_of(names: Iterable[str]) -> str:
    """Return the end of an error about the name of a source."""
    return f"must be one of {', '.join(names)}, or a class path such as my_package.sources.Mine"


def build_source(cls: Callable[..., Source], arguments: Mapping[str, Any]) -> Source:
    """Return a source built from its arguments.

    Raises:
        ValueError: an argument is invalid, the constructor of a source from outside fails, or the
            source has no name.
    """
    try:
        source = cls(**arguments)
    except ModuleNotFoundError:
        raise
    except Exception as error:  # code from outside may raise any error
        if cls.__module__.startswith("stream_ssl."):
            raise
        raise ValueError(_failed(_path(cls), "its constructor", error)) from error
    if not isinstance(getattr(source, "name", None), str):
        raise ValueError(
            f"{_path(cls)} has no name: set the attribute `name` of the class or instance to a text"
        )
    return source


def _imported(path: str) -> type[Any]:
    """Return the class that a path such as `my_package.sources.Mine` names."""
    module, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module}.".startswith(f"{error.name}."):
            raise ValueError(
                f"source {path}: there is no module {error.name!r} on the Python path; install its "
                "package, or set PYTHONPATH to the folder that contains it"
            ) from None
        raise ValueError(
            f"source {path}: its module needs {error.name!r}, which is not installed"
        ) from None
    except Exception as error:  # the module's own code may raise any error
        raise ValueError(
            f"source {path}: its module cannot be imported: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(found, type):
        raise ValueError(f"source {path}: the module {module!r} has no class {name!r}")
    return found


def _source_class(path: str) -> type[Source]:
    """Import a class, and return a subclass that checks what `samples` yields."""
    found = _imported(path)
    samples = getattr(found, "samples", None)
    if not callable(samples):
        raise ValueError(
            f"source {path}: the class has no method samples(self, position=None), which yields "
            "each sample with the position after it"
        )
    try:
        inspect.signature(samples).bind(None, None)
    except TypeError:
        raise ValueError(
            f"source {path}: samples{inspect.signature(samples)} must accept a position: "
            "samples(self, position=None)"
        ) from None
    if inspect.isabstract(found):
        missing = ", ".join(sorted(vars(found)["__abstractmethods__"]))
        raise ValueError(f"source {path}: the class is abstract; it lacks {missing}")
    for one in inspect.signature(found).parameters.values():
        if (
            one.annotation is one.empty
            and one.default is one.empty
            and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
        ):
            raise ValueError(
                f"source {path}: the argument {one.name!r} has no type, so it cannot be an option; "
                f"annotate it, as in {one.name}: int"
            )

    def checked(self: Any, position: Position = None) -> Iterator[tuple[Sample, Position]]:
        return _checked(path, samples(self, position))

    members = {"samples": checked, "__doc__": found.__doc__, "__module__": found.__module__}
    return type(found.__name__, (found,), members)


def _checked(path: str, pairs: Any) -> Iterator[tuple[Sample, Position]]:
    """Yield the pairs of a source from outside, and check each of them."""
    if not hasattr(pairs, "__iter__"):
        raise SourceError(
            f"source {path}: samples() returned {_short(pairs)}; it must yield (Sample, position)"
        )
    rows = iter(pairs)
    for count in itertools.count():
        try:
            pair = next(rows)
        except StopIteration:
            return
        except (SourceError, ModuleNotFoundError):
            raise
        except Exception as error:  # code from outside may raise any error
            raise SourceError(_failed(path, f"samples() at sample {count + 1}", error)) from error
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], Sample)):
            raise SourceError(
                f"source {path}: samples() yielded {_short(pair)}; it must yield a tuple "
                "(Sample, position)"
            )
        position = pair[1]
        try:
            check_position(position)
            as_msgpack = msgpack.unpackb(msgpack.packb(position))
            survives = json.loads(json.dumps(position)) == as_msgpack
        except (TypeError, ValueError) as error:
            raise SourceError(f"source {path}: {_short(position)} as a position: {error}") from None
        if not survives:
            raise SourceError(
                f"source {path}: the position {_short(position)} does not survive JSON; build it "
                "from texts, finite numbers, lists, and maps with texts as keys"
            )
        yield pair


def _failed(path: str, what: str, error: Exception) -> str:
    """Return one line about an error in the source's own code, with the number of that line."""
    module = sys.modules.get(path.rpartition(".")[0])
    own = getattr(module, "__file__", None)
    lines = [one for one in traceback.extract_tb(error.__traceback__) if one.filename == own]
    where = f" ({own}, line {lines[-1].lineno})" if lines else ""
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    return (
        f"source {path}: {what} failed{where}: {reason}. Handle this error there, or raise "
        "SourceError with a remedy; STREAM_SSL_LOG=DEBUG shows the traceback"
    )


def _short(value: object) -> str:
    shown = " ".join(repr(value).split())
    return shown if len(shown) <= 80 else f"{shown[:77]}..."


def _path(cls: Callable[..., Source]) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
