"""Responses of web servers: how much of a body is read, and what their headers say."""

from __future__ import annotations

import base64
import contextlib
import email.utils
import time
import zlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from urllib.parse import unquote

import httpx

from stream_ssl.producers.sources.image_files import codec_of
from stream_ssl.producers.sources.web.skip import Skip

HEAD_BYTES = 16  # bytes that identify a codec
PLAIN = {"", "identity"}  # values of Content-Encoding
GZIP = b"\x1f\x8b"


@dataclass
class Response:
    """A response, with as much of its body as was read."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes = field(default=b"", repr=False)

    def header(self, name: str) -> str:
        """Return the value of a header, or an empty string."""
        return next((value for key, value in self.headers if key == name), "")


async def body(found: AsyncIterator[bytes], limit: int, image: bool, coding: str) -> bytes:
    """Return a whole image of the parts found, or the first `limit` bytes of another file.

    Raises:
        Skip: the image is too long, or its first bytes are not those of an image.
    """
    parts, size, known = [], 0, not image or coding not in PLAIN
    async for part in found:
        parts.append(part)
        size += len(part)
        if size > limit:
            break
        if not known and size >= HEAD_BYTES:
            known = codec_of(b"".join(parts)) is not None
            if not known:
                break
    whole = b"".join(parts)
    if coding not in PLAIN or (not image and whole.startswith(GZIP)):
        whole = unpacked(whole, coding, limit + 1)
    if not image:
        return whole[:limit]
    if size > limit or len(whole) > limit:
        raise Skip("too large", f"more than {limit} bytes")
    if codec_of(whole) is None:
        raise Skip("no image", f"it begins with {whole[:HEAD_BYTES]!r}: no JPEG, PNG or WebP")
    return whole


def unpacked(data: bytes, coding: str, limit: int) -> bytes:
    """Return up to `limit` bytes of a body that was compressed although identity was requested.

    Raises:
        Skip: the coding is unknown, or the body is damaged.
    """
    if data.startswith(GZIP):
        form = 16 + zlib.MAX_WBITS
    elif coding == "deflate":  # some hosts send deflate with a zlib header, some without
        form = zlib.MAX_WBITS if data[:1] == b"x" else -zlib.MAX_WBITS
    elif coding in ("gzip", "x-gzip"):
        return data[:limit]  # some hosts declare gzip but send plain bytes
    else:
        raise Skip("no image", f"sent as {coding[:80]!r}, though identity was asked for")
    state = zlib.decompressobj(form)
    try:
        plain = state.decompress(data, limit)
    except zlib.error as error:
        raise Skip("no image", f"sent as {coding[:80]!r}, which is damaged: {error}") from error
    if not state.eof and len(plain) < limit:
        raise Skip("no image", f"sent as {coding[:80]!r}, whose end is missing")
    return plain


def parsed(url: str, base: httpx.URL | None = None) -> httpx.URL:
    """Return the URL, relative to `base` if given. Percent-encoded parts stay unchanged.

    Raises:
        Skip: the URL is not a valid http or https URL.
    """
    try:
        found = httpx.URL(url)
        if base is not None:
            empty_query = "?" in url.partition("#")[0] and not found.query
            found = base.join(found)
            if empty_query:  # `join` drops an empty query
                found = found.copy_with(query=b"")
        if "%" in host_of(found):  # some write a name's letters beyond ASCII as in a path
            found = found.copy_with(host=unquote(host_of(found)))
    except (httpx.InvalidURL, ValueError, TypeError) as error:
        raise Skip("bad URL", f"{error}") from error
    if "\ufffd" in url:
        iconv = "`iconv -f LATIN1 -t UTF-8`"
        raise Skip(
            "bad URL", f"bytes of it are not UTF-8: save the list as UTF-8, such as by {iconv}"
        )
    if found.scheme not in ("http", "https") or not host_of(found) or not url:
        raise Skip("bad URL", "must be http://HOST/... or https://HOST/...")
    if found.port is not None and not 0 < found.port < 1 << 16:
        raise Skip("bad URL", f"port {found.port}: must be 1 to 65535")
    return found


def host_of(url: httpx.URL) -> str:
    """Return the host's name in ASCII. httpx fails to spell out some names, such as emoji."""
    return url.raw_host.decode()


def authorization(url: httpx.URL) -> dict[str, str]:
    """Return the header with the user and the password of a URL; empty if it has none."""
    if not url.userinfo:
        return {}
    secret = base64.b64encode(f"{url.username}:{url.password}".encode())
    return {"authorization": f"Basic {secret.decode()}"}


def location(response: Response, base: httpx.URL) -> httpx.URL:
    """Return the target of a redirect. The user and the password go to the same origin alone.

    Raises:
        Skip: the response contains no valid http or https URL.
    """
    # Some hosts send raw UTF-8, so percent-encode its bytes.
    raw = response.header("location").encode("latin-1")
    target = "".join(chr(byte) if byte < 128 else f"%{byte:02X}" for byte in raw)
    try:
        found = parsed(target, base)
    except Skip as skip:
        where = f"to {target[:200]!r}" if target else "without a target"
        raise Skip(skip.reason, f"it redirects {where}: {skip}") from skip
    same = (found.scheme, found.raw_host, found.port) == (base.scheme, base.raw_host, base.port)
    return found.copy_with(userinfo=base.userinfo) if same and not found.userinfo else found


def retry_after(value: str, otherwise: float, date: str = "") -> float:
    """Return the seconds in a Retry-After value (number or date); `otherwise` if it is invalid.

    `date` is the response's own Date, because this machine's clock may be wrong.
    """
    with contextlib.suppress(ValueError, OverflowError):
        seconds = float(value)
        return seconds if seconds >= 0 else otherwise  # also if it is NaN
    until = seconds_of(value)
    if until is None:
        return otherwise
    now = seconds_of(date)
    return max(0.0, until - (time.time() if now is None else now))


def seconds_of(date: str) -> float | None:
    """Return an HTTP date in seconds since the Unix epoch; None if it is invalid."""
    with contextlib.suppress(ValueError, TypeError, OverflowError):
        return email.utils.parsedate_to_datetime(date).timestamp()
    return None
