"""Plain English: no sentence of the docs, the code or its texts has the forms that this refuses."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("stream_ssl", "memory", "producers", "docs", "benchmarks", "deploy")
"""The folders whose sentences are checked, besides the pages at the top of the repository.

Dated reports are left out, because they keep the words of their day."""

BEGINNINGS = re.compile(r"(?:Of|What|Where|Who|That which)\b(?! [A-Z])")
BANNED = re.compile(
    r"\b(?:near-cop(?:y|ies)|turn(?:s|ed|ing)? away|let(?:s|ting)? in|(?:is|are|be) sound"
    r"|hears?|heard|told|tells? of)\b",
    re.IGNORECASE,
)
"""Words that stand for near-duplicate, drop, admit, OK, receive and report."""
MOST_WORDS = 36
"""The most words of a sentence in the docs. The rule is 25; this limit may only fall."""

EXCEPTIONS = {
    "Keys are sound from the first step": "an invariant of the keys, in the sense of logic",
}
"""Sentences that are allowed, by their beginning, with the reason."""


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a text. A blank line, a list's item and a table's cell end one."""
    for block in re.split(r"\n\s*\n|\n\s*(?:[-*]|\d+\.)\s|\||; ", text):
        yield from re.split(r"(?<=[.!?])\**\s+(?=[A-Z`\"*])", " ".join(block.split()))


def faults(text: str, most: int | None = None) -> Iterator[str]:
    """Yield the reasons why sentences of a text are refused."""
    for sentence in sentences(text):
        plain = sentence.lstrip("*`\"'#( ")
        if any(plain.startswith(allowed) for allowed in EXCEPTIONS):
            continue
        if BEGINNINGS.match(plain) and not plain.rstrip("*`\"' ").endswith("?"):
            yield f"begins with {plain.split()[0]!r}: {plain[:70]}"
        if found := BANNED.search(re.sub(r"`[^`]*`", "", plain)):
            yield f"says {found[0]!r}: {plain[:70]}"
        if most is not None and len(plain.split()) > most:
            yield f"has {len(plain.split())} words: {plain[:70]}"


def texts_of(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, text) for each docstring, string and block of comments in Python source."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
        elif isinstance(node, ast.JoinedStr):
            parts = (v.value if isinstance(v, ast.Constant) else "X" for v in node.values)
            yield node.lineno, "".join(map(str, parts))
    block: list[str] = []
    last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        if block and token.start[0] != last + 1:
            yield last, "\n".join(block)
            block = []
        block.append(token.string.lstrip("#: "))
        last = token.start[0]
    if block:
        yield last, "\n".join(block)


def comments_of(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line, text) for each block of comments after "#", "//" or "/*", as far as one goes."""
    block: list[str] = []
    for number, line in enumerate([*text.split("\n"), ""], 1):
        found = re.search(r"(?:^|\s)(?:#+|//|/\*+)\s(.*?)(?:\*/)?$", line)
        alone = found is not None and not line[: found.start()].strip()
        if block and not alone:
            yield number - 1, "\n".join(block)
            block = []
        if found is not None and alone:
            block.append(found[1])
        elif found is not None:
            yield number, found[1]


def prose_of(page: str) -> str:
    """Return a Markdown page without its code, tables' rules and links' addresses."""
    page = re.sub(r"```.*?```|<!--.*?-->", "\n\n", page, flags=re.DOTALL)
    page = re.sub(r"^(?: {4}|\t).*$", "", page, flags=re.MULTILINE)
    page = re.sub(r"^#+ .*$", "\n", page, flags=re.MULTILINE)
    return re.sub(r"\]\([^)]*\)", "]", page)


def files(pattern: str) -> list[Path]:
    """Return the project's files of a pattern, without caches and vendored files."""
    found = [*ROOT.glob(pattern), *(f for one in FOLDERS for f in (ROOT / one).rglob(pattern))]
    return sorted({path.resolve() for path in found if not {"vendor", "reports"} & set(path.parts)})


def commented() -> Iterator[Path]:
    """Yield the files in other languages than Python whose comments a user or an owner reads."""
    yield from (ROOT / name for name in ("Makefile", "pyproject.toml", "mkdocs.yml", ".ci/run"))
    yield ROOT / "deploy/containers/Containerfile"
    for pattern in ("*.yaml", "*.yml", "*.js", "*.css", "*.service", "*.toml"):
        yield from files(pattern)


def test_planted_sentences_are_refused() -> None:
    refused = (
        "Of the journal that is read by now.",
        "It ends. What is not new costs nothing.",
        "- one\n- Where one waits, it ends.",
        "Who is not on the list waits.",
        "That which is new is kept.",
        "A sample is Turned away.",
        "The configuration is sound.",
        "It drops near-copies.",
    )
    assert [len(list(faults(text))) for text in refused] == [1] * len(refused)
    assert list(faults("A long sentence " + "of words " * 20 + "ends.", 25))
    code = "x = f\"Of {n} samples\"\n# What one\n# needs.\ndef f():\n    '''Who.'''\n"
    assert sum(len(list(faults(text))) for _, text in texts_of(code)) == 3
    code = "# One\n# thing. Of two.\na: 1  # What one needs\n/** Who waits. */\nb = 'x'; // told\n"
    assert [len(list(faults(text))) for _, text in comments_of(code)] == [1, 1, 1, 1]


def test_plain_sentences_and_questions_pass() -> None:
    plain = "What is dropped? A near-duplicate. **Where does it go?** Nowhere: see RFC 9110."
    assert not list(faults(plain, 25))
    assert not list(faults(prose_of("# What a heading says\n\n    Of code\n\nA [page](Of it).")))


def test_python_is_in_plain_english() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {why}"
        for path in files("*.py")
        for line, text in texts_of(path.read_text())
        if " " in text  # one word is a name
        for why in faults(text)
    ]
    assert not found, "\n".join(found)


def test_docs_are_in_plain_english() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {why}"
        for path in files("*.md")
        for why in faults(prose_of(path.read_text()), MOST_WORDS)
    ]
    assert not found, "\n".join(found)


def test_comments_in_other_languages_are_in_plain_english() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {why}"
        for path in dict.fromkeys(commented())
        for line, text in comments_of(path.read_text())
        for why in faults(text, MOST_WORDS)
    ]
    assert not found, "\n".join(found)
