"""Keys and addresses in the folder of a run; the receiver writes them, local producers read them.

RUN/endpoints.json             the address and public key of the receiver
RUN/keys/receiver.secret.json  the key pair of the receiver
RUN/keys/producer.secret.json  a key pair that local producers may use under any name
RUN/keys/allow.json            the allow-list, with the public key of local producers as "*"
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stream_ssl import bounded_files, durable
from stream_ssl.wire.address import check_address, receiver_of
from stream_ssl.wire.keys import Keys, check_key, make_secret

log = logging.getLogger(__name__)

ENDPOINTS = "endpoints.json"
KEYS = "keys"
START_SECONDS = 60.0
"""Seconds that a producer waits for the receiver of a run that is starting."""
DEAD_SECONDS = 15.0
"""Least age in seconds of an ended supervisor's lock; a living one touches it every 5 seconds."""
MOST_BYTES = 16 << 20
"""Most bytes of an allow-list; 100,000 producers take less."""
ANY_NAME = "*"
"""Name of the allow-list entry whose key may send for every producer."""


def make_keys(run: Path) -> tuple[Path, Path]:
    """Create the missing keys of a run; return the paths of the receiver's secret and allow-list.

    An existing secret is never overwritten. A new secret replaces the file of its public key.

    Raises:
        ValueError: a key file is malformed, a secret is readable by everybody, or the folder of
            the keys is a link.
        OSError: a file cannot be written.
    """
    folder = run / KEYS
    bounded_files.check_folder(folder)
    durable.make_folder(folder, 0o700)
    allow = folder / "allow.json"
    for name in ("receiver", "producer"):
        keys = make_secret(folder, name)
        public = folder / f"{name}.public.json"
        before = _public_in(public)
        if name == "producer":
            _allow_any_name(allow, before, keys.public)
        if before == keys.public:
            continue
        keys.save_public(folder)  # last: after a power cut, the next start must know the old key
        if before is not None:
            log.warning(
                "%s has a new key, because the secret beside it is new; give the file to those who "
                "have the old one",
                public,
            )
    return folder / "receiver.secret.json", allow


def _public_in(path: Path) -> str | None:
    """Return the key in NAME.public.json, or None if the file is missing or damaged."""
    try:
        return Keys.load(path).public
    except ValueError:
        return None


def _allow_any_name(allow: Path, before: str | None, public: str) -> None:
    """Create the allow-list, or replace the key of local producers, `before`, by `public`."""
    if not allow.exists():
        durable.write(allow, json.dumps({ANY_NAME: public}, indent=1) + "\n")
        return
    if before == public:
        return
    try:
        names = bounded_files.read_json(allow, MOST_BYTES, links=True)
    except (OSError, ValueError):
        return  # the receiver reports the error when it reads the list
    listed = names.get(ANY_NAME) if isinstance(names, dict) else None
    if listed in (None, public):
        return
    if listed == before:
        durable.write(allow, json.dumps({**names, ANY_NAME: public}, indent=1) + "\n")
        log.warning("%s: the entry %r has the new key of local producers", allow, ANY_NAME)
        return
    log.warning(
        "%s: the entry %r has another key than local producers, which are refused; set it to %r",
        allow,
        ANY_NAME,
        public,
    )


@dataclass(frozen=True, slots=True)
class LocalReceiver:
    """The address and keys with which a local producer connects to the receiver of a run.

    Args:
        address: the address to connect to.
        server_key: the public key of the receiver; None if it accepts plain text.
        key: the secret file for local producers; None if this user cannot read it.
    """

    address: str
    server_key: str | None
    key: Path | None


def find_receiver(run: str | Path, name: str) -> LocalReceiver:
    """Return the receiver of a run that a producer uses; block while the run is starting.

    If the run has several receivers, `receiver_of` selects one by the name of the producer. So all
    of them must have started: with fewer, it would select another receiver than after a restart.

    Raises:
        ValueError: a receiver of the run has not started, its file is malformed, or the folder is a
            copy whose addresses are those of the original run.
    """
    run = Path(run)
    deadline, logged = time.monotonic() + START_SECONDS, False
    while (awaited := _awaited(run)) and time.monotonic() < deadline:
        if not logged:
            log.info("run %s: waiting for the receiver, at most %.0f s", run, START_SECONDS)
        logged = True
        time.sleep(0.2)
    found = _entries(run)
    if awaited or not found:
        raise ValueError(
            f"run {run}: {awaited or 'no receiver'} has started there; if one was started, its log "
            f"says why it ended. Start it with `stream-ssl run CONFIG --run {run}`, or give the "
            "receiver's address instead"
        )
    by_address = {_reachable(str(entry["data"])): entry for entry in found}
    address = receiver_of(name, list(by_address))
    server_key = by_address[address].get("server_key")
    key = run / KEYS / "producer.secret.json"
    return LocalReceiver(address, server_key, key if os.access(key, os.R_OK) else None)


def original_of(run: Path, entry: Mapping[str, Any]) -> Path | None:
    """Return the run folder of the process that wrote an entry of endpoints.json, if not this one.

    This folder is then a copy. In a container, the same folder may have another path, which then
    does not exist here. A folder that was renamed keeps its inode.
    """
    folder, record = entry.get("folder"), entry.get("record")
    if isinstance(folder, str):
        original = Path(folder)
    elif isinstance(record, str):
        original = Path(record).parent
    else:
        return None
    with suppress(OSError):  # this user may not look there
        renamed = str(run.stat().st_ino) == entry.get("inode")
        if original.is_dir() and not original.samefile(run) and not renamed:
            return original
    return None


def _awaited(run: Path) -> str:
    """Return which receiver a supervisor is starting now, as the beginning of an error."""
    try:
        touched = (run / "supervisor.lock").stat().st_mtime
    except OSError:
        return ""
    if time.time() - touched > DEAD_SECONDS or _entry(run):
        return ""
    folders = sorted(run.glob("receiver-*"))
    names = [folder.name for folder in folders if not (folder / ENDPOINTS).exists()]
    if names:
        return f"not yet {names[0]}, which may be this producer's,"
    return "" if any(map(_entry, folders)) else "no receiver"


def _entries(run: Path) -> list[dict[str, Any]]:
    """Return the entries of the run's receivers; raise ValueError if they are of another folder."""
    entry = _entry(run)
    # `stream-ssl run --receivers N` gives each receiver a folder below the folder of the run.
    folders = [run] if entry else sorted(run.glob("receiver-*"))
    found = [(folder, one) for folder in folders if (one := _entry(folder))]
    for folder, one in found:
        if (original := original_of(folder, one)) is not None:
            raise ValueError(
                f"{folder} is a copy of {original}, whose receiver has the address in it: start "
                f"the copy with `stream-ssl run CONFIG --run {run}`, or give the original folder"
            )
    return [one for _, one in found]


def _entry(folder: Path) -> dict[str, Any] | None:
    """Return the entry of the receiver in a folder's endpoints.json, or None."""
    path = folder / ENDPOINTS
    try:
        entry = bounded_files.read_map(path).get("receiver")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; run the producer as the run's user") from None
    except ValueError as error:
        raise ValueError(f"{error}: damaged; restart the receiver") from None
    if entry is None:
        return None
    try:
        if not isinstance(entry, dict) or not isinstance(entry.get("data"), str):
            raise ValueError("it names no address")
        check_address(entry["data"])
        if entry.get("server_key") is not None:
            check_key("server", entry["server_key"])
    except ValueError as error:
        raise ValueError(f"{path}: damaged ({error}); restart the receiver") from None
    return entry


def _reachable(address: str) -> str:
    """Return the address to connect to; replace "all interfaces" by the loopback address."""
    return address.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
