"""A JSON Schema (2020-12) of the config file, made from the parsers, for editors and the docs.

Presets are layered over other files, so no option is required, and a class may get `init_args`
without its `class_path`.
"""

from __future__ import annotations

import inspect
import re
import sys
import types
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from jsonargparse import ArgumentParser, Namespace

from stream_ssl.config.help import summary

Schema = dict[str, Any]

BASIC = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    Path: "string",
    dict: "object",
    type(None): "null",
}
ANYWHERE = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)+$"
"""Class paths."""

ELSEWHERE = r"^(?!stream_ssl\.)" + ANYWHERE.removeprefix("^")
"""Class paths outside this package, which only the parser can check."""

NOT_OPTIONS = {"help", "config", "print_config"}


def config_schema(parser: ArgumentParser, title: str) -> Schema:
    """Return the schema of the config files that a parser reads.

    Args:
        parser: a parser with one section for each part.
        title: the title of the schema.
    """
    definitions: dict[str, Schema] = {}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": title,
        **_sections(parser, definitions),
        "$defs": dict(sorted(definitions.items())),
    }


def _sections(parser: ArgumentParser, definitions: dict[str, Schema]) -> Schema:
    """Return an object with a property for each option, and an object for each section."""
    root: Schema = {"type": "object", "additionalProperties": False, "properties": {}}
    groups = parser.groups or {}
    for action in parser._actions:
        carried = f"--{action.dest}." in getattr(parser, "carried", ())  # any value is accepted
        hint = getattr(action, "_typehint", None)
        if hint is None and not carried:
            continue
        if action.dest.rpartition(".")[2] in NOT_OPTIONS:
            continue
        *sections, name = action.dest.split(".")
        place, path = root, ""
        for section in sections:
            path = f"{path}.{section}".lstrip(".")
            group = groups.get(path)
            empty = {"type": "object", "additionalProperties": False, "properties": {}}
            if group is not None and group.title:
                empty = {"description": group.title, **empty}
            place = place["properties"].setdefault(section, empty)
        skipped = getattr(action, "sub_add_kwargs", {}).get("skip", ())
        skip = {one for one in skipped if isinstance(one, str)}
        schema: Schema = {} if carried else _of_type(hint, definitions, skip)
        if action.default is None and not action.required and not _takes_null(schema):
            schema = {"anyOf": [schema, {"type": "null"}]}
        text = re.sub(r"\s+", " ", action.help or "").strip()
        if action.required:
            text = f"Required. {text}"
        else:
            schema["default"] = _plain(action.default)
        place["properties"][name] = {"description": text, **schema}
    return root


def _of_type(hint: Any, definitions: dict[str, Schema], skip: set[str]) -> Schema:
    """Return the schema of the values that a type accepts in YAML."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _any_of([_of_type(part, definitions, skip) for part in parts])
    if origin is Literal:
        return {"enum": list(parts)}
    kind = origin or hint
    if kind in BASIC:
        schema: Schema = {"type": BASIC[kind]}
        if len(parts) == 2:
            schema["additionalProperties"] = _of_type(parts[1], definitions, skip)
        return schema
    if kind is tuple and Ellipsis not in parts:
        items = [_of_type(part, definitions, skip) for part in parts]
        return {"type": "array", "prefixItems": items, "minItems": len(items), "items": False}
    if inspect.isclass(kind) and issubclass(kind, Sequence):
        return {"type": "array", "items": _of_type(parts[0], definitions, skip)}
    if not inspect.isclass(kind) or kind.__module__ == "builtins":
        return {}  # a callable or Any, which only the parser can check
    if kind.__name__ not in definitions:
        definitions[kind.__name__] = {}  # a class may have arguments of its own type
        definitions[kind.__name__] = _of_class(kind, definitions, skip)
    return {"$ref": f"#/$defs/{kind.__name__}"}


def _of_class(cls: type, definitions: dict[str, Schema], skip: set[str]) -> Schema:
    """Return the schema of an option that names a class: a string, or `class_path` and arguments.

    A dataclass is given by its arguments, and a class without subclasses may be.
    """
    if is_dataclass(cls):
        return _arguments(cls, definitions, skip)
    known = classes_of(cls)
    accepted = [{"enum": [name for one in known.values() for name in one]}] if known else []
    pattern = ELSEWHERE if known else ANYWHERE
    path = _any_of([*accepted, {"type": "string", "pattern": pattern}])
    cases = [
        {
            "if": {"properties": {"class_path": {"enum": names}}, "required": ["class_path"]},
            "then": {"properties": {"init_args": _arguments(found, definitions, skip)}},
        }
        for found, names in known.items()
    ]
    by_path: Schema = {
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "class_path": path,
            "init_args": {"type": "object"},
            "dict_kwargs": {"type": "object"},
        },
    }
    if cases:
        by_path["allOf"] = cases
    alone = [_arguments(cls, definitions, skip)] if list(known) == [cls] else []
    return {"description": summary(cls), **_any_of([path, by_path, *alone])}


def _arguments(cls: type, definitions: dict[str, Schema], skip: set[str]) -> Schema:
    """Return an object with the arguments of a class's constructor."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(cls, skip=skip)
    return {"description": summary(cls), **_sections(parser, definitions)}


def table_of(cls: Any) -> Mapping[str, type]:
    """Return our classes with a short name that an option of type `cls` accepts, by that name."""
    names = sys.modules.get("stream_ssl.config.names")  # the learner's parser imports it, and torch
    table: Mapping[str, type] = names.TABLES.get(cls, ("", {}))[1] if names else {}
    return table


def classes_of(cls: type) -> dict[type, list[str]]:
    """Return our classes that an option of type `cls` accepts, each with its names."""
    table = table_of(cls)
    ours = cls.__module__.startswith("stream_ssl.")  # not torch.nn.Module, which any part is
    found = [*table.values(), *(_subclasses(cls) if ours else ())]
    return {
        one: [name for name, other in table.items() if other is one] + _paths(one)
        for one in dict.fromkeys(found)
    }


def _subclasses(cls: type) -> list[type]:
    """Return the public, concrete classes of this package that derive from `cls`, itself included.

    The implementations of a protocol are those of its module.
    """
    if getattr(cls, "_is_protocol", False):
        others = [one for one in vars(inspect.getmodule(cls)).values() if inspect.isclass(one)]
        beside = [one for one in others if one.__module__ == cls.__module__]
        return [one for one in beside if one is not cls and "__call__" in vars(one)]
    children: list[type] = cls.__subclasses__()
    below = [one for child in children for one in _subclasses(child)]
    usable = not inspect.isabstract(cls) and not cls.__name__.startswith("_")
    ours = cls.__module__.startswith("stream_ssl.")  # not a class of the user's, loaded by a test
    return [cls, *below] if usable and ours else below


def _paths(cls: type) -> list[str]:
    """Return the name of a class, and the paths of the packages that export it."""
    module, packages = cls.__module__, [cls.__module__]
    while "." in module:
        module = module.rpartition(".")[0]
        if getattr(sys.modules.get(module), cls.__name__, None) is cls:
            packages.insert(0, module)
    return [cls.__name__, *(f"{package}.{cls.__name__}" for package in packages)]


def _any_of(schemas: Sequence[Schema]) -> Schema:
    """Return the schema that accepts what any of the given ones accepts."""
    flat: list[Schema] = []
    for schema in schemas:
        flat += schema["anyOf"] if [*schema] == ["anyOf"] else [schema]
    return flat[0] if len(flat) == 1 else {"anyOf": flat}


def _takes_null(schema: Schema) -> bool:
    return schema.get("type") == "null" or any(map(_takes_null, schema.get("anyOf", ())))


def _plain(value: object) -> Any:
    """Return a default as JSON can hold it."""
    if isinstance(value, Namespace):
        return _plain(value.as_dict())
    if isinstance(value, Mapping):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return value if isinstance(value, bool | int | float | str | None) else str(value)
