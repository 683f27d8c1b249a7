"""Reads segments in a process of its own: `python segment_check.py SEGMENT_FOLDER...`.

LMDB trusts its pages: on a damaged one it may abort or read outside the file, and end the process.
Prints `good N FOLLOWS` after the N-th folder; whoever reads that knows at which one the process
died, and which segment each says that it follows.
Imports only lmdb, so that it starts at once.
"""

from __future__ import annotations

import os
import signal
import sys

import lmdb

CPU_SECONDS = 60.0
"""Most for one segment, which takes less than one: damaged pages may form a cycle. Waiting for a
slow disk does not count."""


def read(folder: str) -> None:
    """Brings a segment's file into memory from its beginning to its end: `walk` would fetch its
    pages one by one, at a tenth of the disk's speed.

    Raises:
        OSError: the disk cannot read it.
    """
    block = bytearray(1 << 20)
    with open(os.path.join(folder, "data.mdb"), "rb", buffering=0) as file:  # noqa: PTH118, PTH123
        while file.readinto(block):
            pass


def walk(folder: str) -> int:
    """Touches every page that a reader could come to, except the insides of records' payloads.
    Returns the first position of the previous segment, as this one tells it; 0: none, or unknown.

    Raises:
        lmdb.Error, ValueError: damage that LMDB or this check notices.
    """
    follows = b"0"
    size = os.stat(os.path.join(folder, "data.mdb")).st_size  # noqa: PTH116, PTH118
    with lmdb.open(
        folder, max_dbs=3, create=False, readonly=True, lock=False, readahead=False, map_size=0
    ) as env:
        if (int(env.info()["last_pgno"]) + 1) * int(env.stat()["psize"]) > size:
            raise ValueError("truncated")
        for name in (b"meta", b"producers", b"records"):
            database = env.open_db(name, create=False)
            with env.begin(db=database, buffers=True) as txn:
                before, count = b"", 0
                for key, value in txn.cursor():
                    if bytes(key) <= before:
                        raise ValueError("keys out of order")
                    if len(value):
                        value[-1]  # a wrong length crashes here, not in a reader
                    if (name, bytes(key)) == (b"meta", b"follows"):
                        follows = bytes(value)
                    before, count = bytes(key), count + 1
                if count != txn.stat(database)["entries"]:
                    raise ValueError(f"{count} entries where others are due")
    return int(follows)


def main(folders: list[str]) -> None:
    for number, folder in enumerate(folders):
        read(folder)
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)  # SIGPROF ends the process
        follows = walk(folder)
        os.write(1, f"good {number} {follows}\n".encode())


if __name__ == "__main__":
    main(sys.argv[1:])
