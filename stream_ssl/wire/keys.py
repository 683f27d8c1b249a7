"""CURVE key pairs in files: share NAME.public.json, and never share NAME.secret.json."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import zmq

from stream_ssl import durable
from stream_ssl.bounded_files import check_private, named, read_json

MOST_BYTES = 16 << 10
"""Most bytes of a key file."""

IN_RUN_REMEDY = "remove that file and restart the run, which makes a new pair"
"""The remedy for a damaged secret that a run created in its own folder."""

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")
_Z85 = re.compile(r"[0-9A-Za-z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")


@dataclass(frozen=True, slots=True)
class Keys:
    """The key pair of one party, or only the public key.

    Args:
        name: the name of the files, 1 to 64 characters of letters, digits and `._-`.
        public: the public key, 40 characters of Z85.
        secret: the secret key, 40 characters of Z85; None if it is unknown.

    Raises:
        ValueError: the name or a key is malformed, or the keys do not belong together.
    """

    name: str
    public: str
    secret: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise ValueError(
                f"key name {self.name!r}: must be 1 to 64 characters of A-Z a-z 0-9 . _ - "
                "and not begin with a dot"
            )
        check_key("public", self.public)
        if self.secret is not None:
            check_key("secret", self.secret)
            if zmq.curve_public(self.secret.encode()).decode() != self.public:
                raise ValueError(
                    f"keys {self.name!r}: the secret does not belong to the public key"
                )

    @classmethod
    def generate(cls, name: str) -> Keys:
        """Return a new key pair."""
        public, secret = zmq.curve_keypair()
        return cls(name, public.decode(), secret.decode())

    @classmethod
    def load(cls, path: str | Path, remedy: str = "") -> Keys:
        """Return the keys in NAME.public.json or NAME.secret.json.

        Args:
            path: the file.
            remedy: the end of the error message for a missing or malformed file. Empty: the message
                ends with the command that makes a pair.

        Raises:
            ValueError: the file is missing or malformed, or holds a secret that other users may
                read.
        """
        path = Path(path)
        name = path.name.removesuffix(".json").removesuffix(".secret").removesuffix(".public")
        remedy = remedy or f"make a pair with: stream-ssl keys {name or 'NAME'}"
        with named("key file", path, remedy):
            fields = read_json(path, MOST_BYTES, links=True)
        if not isinstance(fields, dict) or not {"name", "public"} <= fields.keys():
            raise ValueError(f'key file {path}: must hold {{"name", "public"}}; {remedy}')
        if fields.get("secret") is not None:
            check_private("key file", path)
        try:
            return cls(fields["name"], fields["public"], fields.get("secret"))
        except ValueError as error:
            raise ValueError(f"key file {path}: {error}; {remedy}") from None

    def save(self, folder: str | Path) -> tuple[Path, Path]:
        """Write both files and return their paths (public, secret); the secret has mode 0600.

        Raises:
            ValueError: there is no secret to save, or a file exists.
        """
        if self.secret is None:
            raise ValueError(f"keys {self.name!r}: only the public half is known; nothing to save")
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        public, secret = folder / f"{self.name}.public.json", folder / f"{self.name}.secret.json"
        for path in (public, secret):
            if path.exists():
                raise ValueError(
                    f"key file {path}: exists; everything that trusts it would stop working. "
                    "Remove it first, or choose another name"
                )
        durable.write(secret, _json(asdict(self)), 0o600)
        return self.save_public(folder), secret

    def save_public(self, folder: Path) -> Path:
        """Write NAME.public.json, replacing an existing file, and return its path."""
        public = folder / f"{self.name}.public.json"
        durable.write(public, _json({"name": self.name, "public": self.public}))
        return public


def make_secret(folder: Path, name: str) -> Keys:
    """Return the key pair in a run's NAME.secret.json; create the file if it is missing.

    Raises:
        ValueError: the file is malformed, or other users may read it.
        OSError: the file cannot be written.
    """
    secret = folder / f"{name}.secret.json"
    if secret.exists():
        return Keys.load(secret, IN_RUN_REMEDY)
    keys = Keys.generate(name)
    durable.write(secret, _json(asdict(keys)), 0o600)
    return keys


def check_key(what: str, key: Any) -> str:
    """Return a Z85 key if it is valid.

    Raises:
        ValueError: the key is not 40 characters of Z85. The message never contains a secret.
    """
    if isinstance(key, str) and _Z85.fullmatch(key):
        return key
    shown = "" if what == "secret" else f" {key!r}"
    raise ValueError(f"{what} key{shown}: must be 40 characters of Z85")


def public_key(value: Keys | str | Path) -> str:
    """Return the public key in `value`: keys, the path of a key file, or the key itself.

    Raises:
        ValueError: `value` is none of these, or `Keys.load` rejects the file.
    """
    if isinstance(value, Keys):
        return value.public
    if isinstance(value, str) and _Z85.fullmatch(value) and not _is_file(value):
        return value
    return Keys.load(value).public


def _is_file(value: str) -> bool:
    """Return whether text that looks like a key is the path of a file."""
    return value.endswith(".json") or Path(value).exists()


def _json(fields: dict[str, str]) -> str:
    return json.dumps(fields, indent=1) + "\n"
