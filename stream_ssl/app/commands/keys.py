"""stream-ssl keys: create a CURVE key pair, or revoke one."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from stream_ssl.config.parser import run_function
from stream_ssl.process.failures import DONE, FAILED, USAGE, check_writable
from stream_ssl.wire.keys import Keys


def keys(
    name: str,
    folder: Path = Path("keys"),
    allow: Path | None = None,
    revoke: Path | None = None,
) -> int:
    """Create a CURVE key pair: NAME.public.json, and NAME.secret.json that only you can read.

    The receiver needs a pair of its own, and so does each producer. Keep the secret file on the
    machine that created it. Public files may be copied freely.

    Args:
        name: the owner of the keys, for example "receiver" or "camera-1".
        folder: folder of the two files.
        allow: a receiver's allow-list to add the producer to. A missing file is created.
        revoke: a receiver's allow-list to remove the producer from. The command then makes no keys.
    """
    from stream_ssl.receiver.allow_list import AllowList

    if revoke is not None:
        return _revoke(name, revoke, allow)
    try:
        pair = Keys.generate(name)
        check_writable(folder, "--folder", "choose another")
        if allow is not None:  # before keys exist that nobody could use
            check_writable(allow.absolute().parent, "the folder of --allow,", "choose another")
            if allow.exists():
                AllowList(allow)
    except ValueError as error:
        print(error, file=sys.stderr)
        return USAGE
    try:
        public, secret = pair.save(folder)
        if allow is not None:
            AllowList.enter(allow, name, pair.public)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return FAILED
    print(f"public: {public}\nsecret: {secret}")
    if allow is not None:
        print(f"added to {allow}")
    return DONE


def _revoke(name: str, path: Path, allow: Path | None) -> int:
    """Remove a producer from an allow-list."""
    from stream_ssl.receiver.allow_list import AllowList

    if allow is not None:
        print("--allow and --revoke: choose one of them", file=sys.stderr)
        return USAGE
    try:
        AllowList.revoke(path, name)
    except ValueError as error:
        print(error, file=sys.stderr)
        return USAGE
    except OSError as error:
        print(error, file=sys.stderr)
        return FAILED
    print(f"removed {name} from {path}")
    return DONE


def main(arguments: Sequence[str]) -> int:
    return run_function(keys, arguments)
