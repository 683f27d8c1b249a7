"""Errors in a config file that the parser would report badly, or not at all."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence, Set
from pathlib import Path

import yaml
from jsonargparse import ArgumentParser

from stream_ssl.bounded_files import DEPTH, read_bytes
from stream_ssl.config.parser import config_files
from stream_ssl.config.removed import REMOVED, why_refused

MOST_VALUES = 100_000
"""The most values that a config file may hold, with its aliases expanded."""


def check_files(parser: ArgumentParser, arguments: Sequence[str]) -> None:
    """Look for errors that the parser would report badly. Print the first, and exit.

    Args:
        parser: the parser of the command.
        arguments: the arguments of the command, which name the config files.
    """
    known = {action.dest.partition(".")[0] for action in parser._actions}
    for file in config_files(arguments):
        if not file:
            parser.error(
                "the path of the config file (CONFIG, --config or STREAM_SSL_CONFIG) is empty: "
                "give a path, or leave it out"
            )
        if (fault := next(_faults(Path(file), known), None)) is not None:
            parser.error(f"{file}{fault}")


def _faults(file: Path, known: Set[str]) -> Iterator[str]:
    """Yield what is wrong with a config file, each to be read after the file's name."""
    try:
        root = _root(file)
    except (OSError, yaml.YAMLError):  # the parser reports these errors well
        return
    except ValueError as error:
        yield str(error)
        return
    if not isinstance(root, yaml.MappingNode):
        held = "is empty" if root is None else "begins with something else"
        yield f" {held}: must contain options by name, such as\nrun: runs/mine"
        return
    if (fault := _too_much(root)) is not None:
        yield fault
        return
    yield from _wrong_names(root, "", {})
    yield from _odd_numbers(root)
    if gone := [
        f", line {number}: {why}"
        for number, option, value in _scalars(root)
        if (why := why_refused(option, value)) is not None
    ]:
        yield f"\n{file}".join(gone)
    yield from _unknown_sections(root, known)


def _root(file: Path) -> yaml.Node | None:
    """Return the YAML document of a config file, or None if it is empty.

    Raises:
        ValueError: the file is not UTF-8, no YAML, or too large.
        OSError, yaml.YAMLError: other errors.
    """
    try:
        text = read_bytes(file, links=True).decode()
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise ValueError(
            f": byte {error.start} (0x{byte:02x}) is not UTF-8 text; save the file as UTF-8"
        ) from error
    except ValueError as error:  # too large, or no regular file
        raise ValueError(f" cannot be read: {error}") from error
    try:
        return yaml.compose(text, yaml.SafeLoader)
    except (ValueError, OverflowError) as error:  # PyYAML does not say where
        raise ValueError(
            ": an escape such as \\U00110000 in quotes names no character; the last is \\U0010FFFF"
        ) from error
    except RecursionError as error:
        raise ValueError(f" is nested too deeply; must have at most {DEPTH} levels") from error
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        tab = "; use spaces, not tabs" * ("'\\t'" in str(error.problem))
        raise ValueError(f"{line}: not valid YAML: {error.problem}{tab}") from error
    except yaml.reader.ReaderError as error:
        line = f", line {text.count(chr(10), 0, error.position) + 1}"
        raise ValueError(
            f"{line}: the control character {error.character:#04x} is not allowed; remove it"
        ) from error


def _unknown_sections(root: yaml.MappingNode, known: Set[str]) -> Iterator[str]:
    for key, _ in root.value:
        name = str(key.value).partition(".")[0]
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            meant = (
                f"did you mean {close[0]}?"
                if close
                else "there are: " + ", ".join(sorted(known - {"help", "config", "print_config"}))
            )
            yield f", line {key.start_mark.line + 1}: there is no section {name!r}; {meant}"


def _scalars(root: yaml.MappingNode, path: str = "") -> Iterator[tuple[int, str, object]]:
    """Yield (line, option, value) for each option of a YAML document. A list gives None."""
    for key, value in root.value:
        option = f"{path}{key.value}"
        if isinstance(value, yaml.MappingNode) and option not in REMOVED:
            yield from _scalars(value, f"{option}.")
        else:
            scalar = value.value if isinstance(value, yaml.ScalarNode) else None
            yield key.start_mark.line + 1, option, scalar


def _too_much(root: yaml.Node) -> str | None:
    """Return an error if a YAML document is too large once its aliases are expanded, else None.

    A few aliases of aliases ("billion laughs") make a file of some hundred bytes endless.
    """
    sizes: dict[int, int] = {}
    open_nodes: set[int] = set()

    def size(node: yaml.Node, level: int) -> int:
        if level > DEPTH or id(node) in open_nodes:
            raise RecursionError
        if id(node) not in sizes:
            open_nodes.add(id(node))
            parts: list[yaml.Node] = []
            if isinstance(node, yaml.MappingNode):
                parts = [part for pair in node.value for part in pair]
            elif isinstance(node, yaml.SequenceNode):
                parts = node.value
            sizes[id(node)] = 1 + sum(size(part, level + 1) for part in parts)
            open_nodes.remove(id(node))
        return sizes[id(node)]

    try:
        values = size(root, 1)
    except RecursionError:
        return f" is nested too deeply, or contains itself; must have at most {DEPTH} levels"
    if values > MOST_VALUES:
        return (
            f" contains {values:,} values with its aliases expanded; must have at most "
            f"{MOST_VALUES:,}"
        )
    return None


def _wrong_names(node: yaml.Node, path: str, lines: dict[str, int]) -> Iterator[str]:
    """Yield an error for each key that is no text or repeated. YAML silently keeps the last.

    Args:
        path: the beginning of the options in this part, such as "memory.".
        lines: the lines of the options before it. `memory.capacity` may be a key, too.
    """
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            option, line = f"{path}{key.value}", key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                yield f", line {line}: a name is a list or a map; must be text"
            elif key.value != "<<":
                if key.tag != "tag:yaml.org,2002:str":
                    yield f", line {line}: the name {key.value} is no text; put it in quotes"
                if option in lines:
                    before = lines[option]
                    yield f", line {line}: {key.value!r} is in line {before} already; remove one"
                lines[option] = line
            yield from _wrong_names(value, f"{option}.", lines)
    elif isinstance(node, yaml.SequenceNode):
        for number, value in enumerate(node.value):
            yield from _wrong_names(value, f"{path}{number}.", lines)


def _odd_numbers(node: yaml.Node) -> Iterator[str]:
    """Yield an error for each number such as 010 or 1:30, which YAML silently reads as 8 or 90.

    The command line reads 010 as 10. A number such as 05 is the same in both. Unknown tags, such as
    !secret, are errors, too.
    """
    line = f", line {node.start_mark.line + 1}:"
    if node.tag not in {*yaml.SafeLoader.yaml_constructors, "tag:yaml.org,2002:merge"}:
        tag = node.tag.replace("tag:yaml.org,2002:", "!!")
        meant = "put = in quotes" if tag == "!!value" else "remove it"
        yield f"{line} the tag {tag} is unknown; {meant}"
    if isinstance(node, yaml.ScalarNode):
        is_int, digits = node.tag == "tag:yaml.org,2002:int", node.value.replace("_", "")
        if is_int and len(digits) > 640:  # Python may refuse to read it
            yield f"{line} a number has {len(digits)} digits; must be smaller"
        elif is_int and re.fullmatch("[-+]?0[0-7]+", digits):
            octal, number = int(digits, 8), int(digits)
            if octal != number:
                yield (
                    f"{line} YAML takes {node.value} as octal, which is {octal}; write {number}, "
                    f"or {octal}, or put a text in quotes"
                )
        elif (is_int or node.tag == "tag:yaml.org,2002:float") and ":" in digits:
            yield (
                f"{line} YAML takes {node.value} in base 60; write it in base 10, or put a text in "
                "quotes"
            )
    else:
        for part in node.value:
            for inner in part if isinstance(part, tuple) else (part,):
                yield from _odd_numbers(inner)
