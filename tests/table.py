"""A decorator that runs a table of small cases as subtests of one test, with one setup."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest


def table(
    names: str | Sequence[str],
    cases: Iterable[Any],
    ids: Iterable[str] | Callable[[Any], str] | None = None,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run all cases in one test, with arguments like `pytest.mark.parametrize`. Failures name the
    case.

    All cases share the test's fixtures, so use it for tests that only read them. pytest's own
    fixtures are reset for each case (see `anew`). If tables are stacked, the lowest is the
    innermost loop.
    """
    keys = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    rows = [_row(case, len(keys)) for case in cases]
    if callable(ids):
        rows = [("-".join(map(ids, values)), values) for _, values in rows]
    elif ids is not None:
        rows = [(name, values) for name, (_, values) in zip(ids, rows, strict=True)]

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(test)
        nested = "subtests" in signature.parameters

        @functools.wraps(test)
        def run(subtests: pytest.Subtests, **fixtures: Any) -> None:
            for number, (name, values) in enumerate(rows):
                given = dict(zip(keys, values, strict=True))
                if nested:
                    given["subtests"] = subtests
                with subtests.test(name, **given), anew(fixtures, number) as own:
                    test(**own, **given)

        asked = [p for name, p in signature.parameters.items() if name not in {*keys, "subtests"}]
        ours = inspect.Parameter("subtests", inspect.Parameter.KEYWORD_ONLY)
        run.__signature__ = signature.replace(parameters=[*asked, ours])  # type: ignore[attr-defined]
        return run

    return decorate


@contextmanager
def anew(fixtures: dict[str, Any], number: int) -> Iterator[dict[str, Any]]:
    """Yield the fixtures for one case: a new folder under `tmp_path`, and reset patches and
    captures.
    """
    with pytest.MonkeyPatch.context() as monkeypatch:
        own = dict(fixtures)
        if "monkeypatch" in fixtures:
            own["monkeypatch"] = monkeypatch
        if "tmp_path" in fixtures:
            own["tmp_path"] = fixtures["tmp_path"] / str(number)
            own["tmp_path"].mkdir()
        if "caplog" in fixtures:
            fixtures["caplog"].clear()
        for name in fixtures.keys() & {"capsys", "capfd"}:
            fixtures[name].readouterr()
        yield own


def _row(case: Any, width: int) -> tuple[str | None, Sequence[Any]]:
    """Return the id of a case, if it has one, and its values."""
    if hasattr(case, "values") and hasattr(case, "id"):  # a pytest.param
        return case.id, case.values
    return None, (case,) if width == 1 else case
