"""The page of all configuration options, made from the parsers and the pages that name them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stream_ssl.config import options
from stream_ssl.config.restart import FIXED
from stream_ssl.config.schema import Schema, config_schema

INTRODUCTION = """\
# All options

This page has each option of the config file: its type, its default, its meaning, and the pages that
tell when to change it. On the command line, write `--memory.capacity 4096`. In the environment,
write `STREAM_SSL_MEMORY__CAPACITY=4096`. `stream-ssl schema` prints the same for editors
([editors.md](editors.md)). [sources.md](sources.md) describes the options of producers.

A run keeps the options marked *fixed* for its whole life ([restart.md](restart.md)).
"""

CLASSES = {
    "Loss": "Losses",
    "Method": "Methods",
    "Policy": "Eviction policies",
    "Score": "Scores",
    "Descriptor": "Descriptors",
    "Schedule": "Schedules",
    "HeldOut": "Held-out set",
    "Labelled": "Sources of labelled sets",
    "AccessFiles": "Keys and allow-list",
    "OverSteps": "Numbers that change over the steps",
}
"""Kinds of classes that options name, each with the title of its section."""


def page(root: Path) -> str:
    """Return the Markdown of the page."""
    schema = config_schema(options.run_parser(), "options")
    places = mentions(root / "docs")
    lines = [INTRODUCTION, "## General options", ""]
    for name, option in sorted(schema["properties"].items()):
        if "properties" not in option:
            lines += option_lines(name, option, places)
    for name, option in sorted(schema["properties"].items()):
        if "properties" in option:
            lines += ["", f"## {name}", "", option.get("description", ""), ""]
            for path, inner in leaves(name, option):
                lines += option_lines(path, inner, places)
    for kind, title in CLASSES.items():
        lines += ["", f"## {title}", "", schema["$defs"][kind]["description"], ""]
        lines += class_lines(schema["$defs"][kind])
    return "\n".join(lines)


def leaves(path: str, schema: Schema) -> Iterator[tuple[str, Schema]]:
    """Yield (name, schema) of each option of a section."""
    for name, option in schema["properties"].items():
        if "properties" in option:
            yield from leaves(f"{path}.{name}", option)
        else:
            yield f"{path}.{name}", option


def option_lines(name: str, option: Schema, mentioned: dict[str, list[str]]) -> list[str]:
    """Return the lines of one option."""
    facts = [shown_type(option)]
    text = option["description"]
    if text.startswith("Required. "):
        facts.append("required")
        text = text.removeprefix("Required. ")
    else:
        facts.append(f"default {shown_default(option['default'])}")
    if name in FIXED:
        facts.append("*fixed*")
    lines = [f"### `{name}`", "", ", ".join(facts) + "\n{ .option }", "", sentence(text), ""]
    if places := mentioned.get(name):
        lines += [f"When to change it: {', '.join(places)}.", ""]
    return lines


def class_lines(schema: Schema) -> list[str]:
    """Return the lines of the classes that an option may name, with their arguments."""
    parts = [schema, *schema.get("anyOf", [])]
    cases = [case for part in parts for case in part.get("allOf", [])]
    found = [
        (case["if"]["properties"]["class_path"]["enum"], case["then"]["properties"]["init_args"])
        for case in cases
    ]
    if not found:
        found = [([], schema)]
    lines = []
    for names, arguments in found:
        if names:
            short = [name for name in names if "." not in name]
            lines += [
                f"### `{short[0]}`",
                "",
                f"`{names[-1]}`\n{{ .option }}",
                "",
                arguments["description"],
                "",
            ]
        for name, option in leaves("", arguments):
            required = option["description"].startswith("Required. ")
            default = "required" if required else f"default {shown_default(option['default'])}"
            text = sentence(option["description"].removeprefix("Required. "))
            lines.append(f"- `{name.lstrip('.')}` ({shown_type(option)}, {default}): {text}")
        lines.append("")
    return lines


def shown_type(schema: Schema) -> str:
    """Return a type in words."""
    if "$ref" in schema:
        kind = schema["$ref"].rpartition("/")[2]
        title = CLASSES.get(kind)
        if title is None:
            return "a class path"
        return f"[{kind}](#{title.lower().replace(' ', '-')})"
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(shown_type(part) for part in schema["anyOf"]))
    if "enum" in schema:
        return " or ".join(f"`{json.dumps(value)}`" for value in schema["enum"])
    if "type" not in schema:
        return "any value"
    kind = schema["type"]
    if kind == "array" and isinstance(schema.get("items"), dict):
        return f"list of {shown_type(schema['items'])}"
    if kind == "array":
        return f"list ({', '.join(map(shown_type, schema['prefixItems']))})"
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"mapping of names to {shown_type(schema['additionalProperties'])}"
    return f"`{kind}`" if kind == "null" else str(kind)


def shown_default(value: Any) -> str:
    """Return a default as YAML, with the class alone of a class without arguments."""
    if isinstance(value, dict) and [*value] == ["class_path"]:
        value = value["class_path"]
    return f"`{json.dumps(value)}`"


def sentence(text: str) -> str:
    """Return a description that begins with a capital and ends with a full stop."""
    text = text.replace("<", "&lt;").replace("*", "\\*").strip()
    if text[:1].islower() and not re.match(r"[a-z]+[A-Z_.]", text):
        text = text[0].upper() + text[1:]
    return text if text.endswith((".", "?")) else f"{text}."


def mentions(docs: Path) -> dict[str, list[str]]:
    """Return links to the sections that name an option, by the option."""
    found: dict[str, list[str]] = {}
    for file in sorted(docs.rglob("*.md")):
        name = file.relative_to(docs).as_posix()
        if name in ("restart.md", "metrics.md"):  # they list options and say nothing more
            continue
        text = file.read_text()
        title = text.partition("\n")[0].lstrip("# ")
        for option in dict.fromkeys(re.findall(r"`(?:--)?([a-z_]+(?:\.[a-z_]+)+)\b", text)):
            found.setdefault(option, []).append(f"[{title}]({name})")
    return found
