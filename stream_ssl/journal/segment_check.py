"""Check segments in a separate process: `python segment_check.py SEGMENT_FOLDER...`.

LMDB trusts its pages. On a damaged page it may abort or read outside the file, which ends the
process. The script prints `good N FOLLOWS` after folder N, so that the caller knows which folder
ended the process. FOLLOWS is the first position of the segment before it, or 0. On damage that LMDB
or the script notices, the exit status is DAMAGED. It imports only lmdb, so that it starts quickly.
"""

from __future__ import annotations

import mmap
import os
import signal
import sys

import lmdb

CPU_SECONDS = 60.0
"""Most CPU seconds for one segment, because damaged pages may form a cycle. An intact segment takes
less than one second. Waiting for a slow disk does not count."""
ROOM = 1 << 30
"""More bytes than LMDB maps into memory for an intact segment."""
DAMAGED = 3
"""The exit status for a damaged segment, which the last line on stderr describes."""


def read(folder: str) -> None:
    """Read a segment's file from beginning to end, to load it into the page cache.

    Otherwise `walk` would load the pages one by one, at a tenth of the disk's speed.

    Raises:
        OSError: the disk cannot read the file.
    """
    block = bytearray(1 << 20)
    with open(os.path.join(folder, "data.mdb"), "rb", buffering=0) as file:  # noqa: PTH118, PTH123
        while file.readinto(block):
            pass


def walk(folder: str) -> int:
    """Read every page that a reader could use, except the inner pages of payloads.

    Returns:
        The first position of the previous segment, which this segment stores; 0: none or unknown.

    Raises:
        lmdb.Error, ValueError: LMDB or this check found damage.
    """
    follows = b"0"
    size = os.stat(os.path.join(folder, "data.mdb")).st_size  # noqa: PTH116, PTH118
    with opened(folder) as env:
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
                        value[-1]  # a wrong length must crash here and not in a reader
                    if (name, bytes(key)) == (b"meta", b"follows"):
                        follows = bytes(value)
                    before, count = bytes(key), count + 1
                if count != txn.stat(database)["entries"]:
                    raise ValueError(f"{count} entries where others are due")
    return int(follows)


def opened(folder: str) -> lmdb.Environment:
    """Return the LMDB environment of a segment.

    Raises:
        lmdb.Error: LMDB cannot open the segment.
        ValueError: the segment asks for more memory than any intact segment.
        OSError: this process lacks memory.
    """
    try:
        return lmdb.open(
            folder, max_dbs=3, create=False, readonly=True, lock=False, readahead=False, map_size=0
        )
    except lmdb.MemoryError:
        # Damaged pages can claim any size. If ROOM bytes can be mapped, the memory is not at fault.
        mmap.mmap(-1, ROOM, mmap.MAP_PRIVATE, mmap.PROT_READ).close()
        raise ValueError("its size is damaged") from None


def main(folders: list[str]) -> None:
    for number, folder in enumerate(folders):
        try:
            read(folder)
            signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)  # SIGPROF ends the process
            follows = walk(folder)
        except (OSError, ValueError, lmdb.Error) as error:
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
            sys.exit(DAMAGED)
        os.write(1, f"good {number} {follows}\n".encode())


if __name__ == "__main__":
    main(sys.argv[1:])
