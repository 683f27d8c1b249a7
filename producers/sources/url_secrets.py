"""URLs without the passwords, tokens and signatures in them, for ids and for the log."""

from __future__ import annotations

import re

from stream_ssl.producers.sources.fields import digest, short_id
from stream_ssl.producers.sources.image_files import OTHER_IMAGES, SUFFIXES
from stream_ssl.wire.sample import MAX_ID_BYTES

USER = re.compile(r"(//)([^/?#@\s]+)(?=@)")
PARAMETER = re.compile(r"(?<=[?&;])([^=?&;#\s]*=)([^&;#\s]+)")
FIELD = re.compile(r"[?&;]([^=?&;]*)[^&;]*")
SECRETS = ("sig", "key", "auth", "jwt", "pwd", "pass", "hmac", "policy", "sas")
SECRET_PARTS = ("signature", "token", "secret", "password", "credential", "apikey", "accesskey")
SIGNING = ("xamz", "xgoog", "xoss")
"""Beginnings of the parameters with which Amazon, Google and Alibaba sign URLs."""
GRANTS = ("expires", "expiry", "exp", "keypairid", "googleaccessid", "ossaccesskeyid")
"""Parameters that say for whom, and until when, a signature or a token is valid."""
AZURE = {
    *("sv", "ss", "srt", "sp", "st", "se", "spr", "sip", "sr", "si", "sdd"),
    *("skoid", "sktid", "skt", "ske", "sks", "skv"),
}
"""Parameters beside `sig` in a URL that Azure signed (a shared access signature)."""


def without_secrets(text: str) -> str:
    """Return a text in which digests replace the passwords, tokens and signatures of its URLs.

    Different secrets have different digests, so URLs stay different.
    """

    def hidden(match: re.Match[str]) -> str:
        secret = match[1] == "//" or _secret(_plain(match[1][:-1]))
        return f"{match[1]}~{digest([match[2].encode(errors='replace')])}" if secret else match[0]

    return PARAMETER.sub(hidden, USER.sub(hidden, text))


def url_id(url: str) -> str:
    """Return what identifies a URL's picture: the URL without user, password and signature.

    The same picture often has another signature in the next list. A signature and its expiry never
    name a picture, because they are computed from the rest of the URL. A token or a key may name
    the picture, so a digest of it stays, unless the path ends like an image file.
    """
    whole, mark, fragment = url.partition("#")
    head, *queries = re.split(r"(?=\?)", whole, maxsplit=1)
    query = "".join(queries)
    names = [_plain(match[1]) for match in FIELD.finditer(query)]
    signed = any(name.endswith("signature") or name in ("sig", "hmac") for name in names)
    file = head.lower().endswith((*SUFFIXES, *OTHER_IMAGES))
    granted = signed or (file and any(map(_secret, names)))

    def dropped(name: str) -> bool:
        return granted and (
            name.startswith(SIGNING)
            or name in GRANTS
            or (_secret(name) and (file or name != "key"))
            or (name in AZURE and "sig" in names)
        )

    kept = FIELD.sub(lambda match: "" if dropped(_plain(match[1])) else match[0], query)
    if kept[:1] in ("&", ";"):
        kept = f"?{kept[1:]}"
    head = re.sub(r"//[^/?#@\s]+@", "//", head, count=1)
    return short_id(without_secrets(head + kept + mark + fragment))


def _plain(parameter: str) -> str:
    """Return a parameter's name in small letters, without hyphens and dots."""
    return re.sub(r"[-_.]|%2d|%5f|%2e", "", parameter[:MAX_ID_BYTES].lower())


def _secret(name: str) -> bool:
    """Return whether a plain name is that of a password, a token or a signature."""
    return name in SECRETS or any(part in name for part in SECRET_PARTS)
