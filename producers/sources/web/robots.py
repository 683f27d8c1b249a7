"""Reads the rules of robots.txt and of X-Robots-Tag."""

from __future__ import annotations

import codecs
import re

OPT_OUTS = {"noai", "noimageai"}
VALUED = {"max-snippet", "max-image-preview", "max-video-preview", "unavailable_after"}
"""Rules of X-Robots-Tag with a value after a colon, where other colons follow an agent's name."""
CONTROL = re.compile(r"[\0-\x08\x0e-\x1f]")  # not allowed in a text by RFC 9309
PADDING = "\0\x1a"  # that some programs append to a text
PRODUCT = re.compile(r"(?:mozilla/\S*\s+\(compatible;\s*)?([^\s/;()]+)", re.IGNORECASE)
"""The name of a crawler in its User-Agent, also behind that of a browser."""
VERSION = re.compile(
    r"^(\s*user[- ]?agent\s*:\s*[\w-]+)[ \t/][^\r\n]*", re.IGNORECASE | re.MULTILINE
)
USER_AGENT = re.compile(r"^\s*user[- ]?agent\s*:", re.IGNORECASE | re.MULTILINE)


def product_token(agent: str) -> str:
    """Return the name that stands for this agent in a robots.txt (RFC 9309, section 2.2.1).

    The rest of a User-Agent, such as a contact address, may contain the names of others.
    """
    found = PRODUCT.match(agent.strip())
    return (found[1] if found else agent).lower()


def robots_text(data: bytes) -> str:
    """Return the text of a robots.txt: UTF-8, or UTF-16 if it begins with a byte-order mark.

    Crawlers' names are without versions ("name/1.0"), because they apply to all versions.
    """
    wide = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    text = data.decode("utf-16" if wide else "utf-8", errors="replace")
    text = text.replace("\ufeff", "")  # concatenated files contain several marks
    return VERSION.sub(r"\1", text)


def is_robots_text(text: str) -> bool:
    """Return whether `text` is text, and not an undeclared coding such as Brotli.

    A text in Latin-1 contains some undecodable characters, but its rules can be read.
    """
    if CONTROL.search(text.rstrip(PADDING)):
        return False
    return 8 * text.count("\ufffd") <= len(text) or USER_AGENT.search(text) is not None


def opted_out(headers: list[tuple[str, str]], agent: str) -> str:
    """Return the X-Robots-Tag that forbids all agents, or this agent, to learn from the image.

    The result is empty if there is no such header.
    """
    for name, value in headers:
        if name != "x-robots-tag":
            continue
        whom = ""
        for rule in value.lower().split(","):
            before, colon, after = (part.strip() for part in rule.partition(":"))
            if colon and before not in VALUED and " " not in before:  # dates contain spaces
                whom = before
            if (after if colon else before) in OPT_OUTS and whom in ("", "*", agent):
                return value[:200]
    return ""
