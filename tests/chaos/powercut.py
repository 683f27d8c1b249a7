"""Power cuts: from the log of powercut.c, folders that a power cut could have left.

What counts as durable is what POSIX promises and no more: the data of a file after its fsync, a
name after the fsync of its folder. All else may be there, or not, or be torn at a sector, in any
order.
"""

from __future__ import annotations

import os
import random
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")
SECTOR = 512
_HEAD = struct.Struct("<cIQQ")


def compiled(folder: Path) -> Path:
    """Compile the library for LD_PRELOAD."""
    target = folder / "powercut.so"
    command = ("cc", "-shared", "-fPIC", "-O2", "-o", target, SOURCE, "-ldl", "-lpthread")
    subprocess.run([str(part) for part in command], check=True)
    return target


def environment(
    library: Path, root: Path, log: Path | None = None, fault: Path | None = None
) -> dict[str, str]:
    """Return the environment of a process whose disk below `root` forgets, or fails by `fault`."""
    added = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    added |= {"LD_PRELOAD": str(library), "POWERCUT_ROOT": str(root)}
    added |= {"POWERCUT_LOG": str(log)} if log else {}
    added |= {"POWERCUT_FAULT": str(fault)} if fault else {}
    return os.environ | added


@dataclass(frozen=True, slots=True)
class Change:
    """One record of the log: `kind` as in powercut.c; `end` is where it ends in the log."""

    kind: str
    path: str
    data: bytes
    offset: int
    end: int


def changes(log: Path) -> list[Change]:
    """Return all complete records of the log."""
    content, at, found = log.read_bytes(), 0, []
    while at + _HEAD.size <= len(content):
        kind, length, size, offset = _HEAD.unpack_from(content, at)
        begin = at + _HEAD.size
        held = size if kind in b"wWrl" else 0
        at = begin + length + held
        if at > len(content):
            break
        path = content[begin : begin + length].decode()
        found.append(Change(kind.decode(), path, content[begin + length : at], offset, at))
    return found


@dataclass(slots=True)
class _Write:
    offset: int
    data: bytes | None  # None: truncation to `offset`
    durable: bool = False


@dataclass(slots=True, eq=False)
class _Node:
    """A file, a folder or a link, without its names."""

    folder: bool = False
    link: str | None = None
    writes: list[_Write] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Naming:
    """A change of names that happens completely or not at all."""

    entries: list[tuple[_Node, str, _Node | None]]  # folder, name, what it names from now on
    durable: bool = False
    waits_for: set[int] = field(default_factory=set)  # folders whose fsync it needs


class Disk:
    """The durable and the unsynced changes after the first part of a log."""

    def __init__(self, root: Path, log: list[Change]) -> None:
        self.root = _Node(folder=True)
        self._top = str(root)
        self._names: dict[tuple[_Node, str], _Node | None] = {}  # as processes see them
        self._namings: list[_Naming] = []
        self._by_inode: dict[int, tuple[_Node, tuple[_Node, str]]] = {}  # with where it was made
        for change in log:
            self._apply(change)

    def left_by_a_cut(self, target: Path, draw: random.Random) -> None:
        """Write a folder as a power cut at this moment could leave it."""
        mood = draw.choice(("nothing", "everything", "some", "some", "some"))
        keep = {"nothing": 0.0, "everything": 1.0, "some": draw.random()}[mood]
        names: dict[_Node, dict[str, _Node]] = {self.root: {}}
        for naming in self._namings:
            if naming.durable or draw.random() < keep:
                for folder, name, node in naming.entries:
                    entries = names.setdefault(folder, {})
                    if node is None:
                        entries.pop(name, None)
                    else:
                        entries[name] = node
        self._write(self.root, names, target, draw, keep)

    def _write(self, node, names, target, draw, keep) -> None:
        if node.link is not None:
            target.symlink_to(node.link)
        elif node.folder:
            target.mkdir(parents=True, exist_ok=True)
            for name, child in names.get(node, {}).items():
                self._write(child, names, target / name, draw, keep)
        else:
            target.write_bytes(_content(node, draw, keep))

    def _find(self, path: str) -> tuple[_Node, str] | None:
        """Return (folder, name) of a path as processes see it."""
        parts = path[len(self._top) :].strip("/").split("/")
        folder = self.root
        for part in parts[:-1]:
            following = self._names.get((folder, part))
            if following is None:
                return None
            folder = following
        return folder, parts[-1]

    def _node(self, path: str) -> _Node | None:
        if path == self._top:
            return self.root
        where = self._find(path)
        return self._names.get(where) if where else None

    def _apply(self, change: Change) -> None:
        if change.kind in "cdl":
            where = self._find(change.path)
            if where is not None:
                link = change.data.decode() if change.kind == "l" else None
                node = _Node(change.kind == "d", link)
                self._rename([(*where, node)])
                if change.kind == "c":
                    self._by_inode[change.offset] = node, where
        elif change.kind == "u":
            where = self._find(change.path)
            if where is not None:
                self._rename([(*where, None)])
        elif change.kind == "r":
            old, new = self._find(change.path), self._find(change.data.decode())
            if old is not None and new is not None:
                self._rename([(*old, None), (*new, self._names.get(old))])
        else:
            self._change_file(change)

    def _change_file(self, change: Change) -> None:
        node = self._node(change.path)
        if node is None and change.kind == "s":
            node = self._renamed_unseen(change)
        if node is None:  # deleted meanwhile, and still open
            return
        if change.kind in "wW":
            node.writes.append(_Write(change.offset, change.data, change.kind == "W"))
        elif change.kind == "t":
            node.writes.append(_Write(change.offset, None))
        elif node.folder:
            for naming in self._namings:
                naming.waits_for.discard(id(node))
                naming.durable = naming.durable or not naming.waits_for
        else:
            for write in node.writes:
                write.durable = True

    def _renamed_unseen(self, change: Change) -> _Node | None:
        """A file that has another name than it was made with, by a rename that was not logged."""
        node, made = self._by_inode.get(change.offset, (None, None))
        where = self._find(change.path)
        if node is not None and made is not None and where is not None:
            self._rename([(*made, None), (*where, node)])
        return node

    def _rename(self, entries: list[tuple[_Node, str, _Node | None]]) -> None:
        for folder, name, node in entries:
            self._names[folder, name] = node
        folders = {id(folder) for folder, _, _ in entries}
        self._namings.append(_Naming(entries, waits_for=folders))


def _content(node: _Node, draw: random.Random, keep: float) -> bytes:
    """The bytes of a file: durable writes, and of the others some, some of them torn."""
    content = bytearray()
    # What a barrier covers is there whatever comes later; the rest in any order among itself.
    sure = [write for write in node.writes if write.durable]
    open_ = [write for write in node.writes if not write.durable and draw.random() < keep]
    last_barrier = max((i for i, w in enumerate(node.writes) if w.durable), default=-1)
    later = {id(write) for write in node.writes[last_barrier + 1 :]}
    loose = [write for write in open_ if id(write) in later]
    draw.shuffle(loose)
    for write in (*sure, *loose):
        if write.data is None:
            del content[write.offset :]
            content.extend(bytes(max(0, write.offset - len(content))))
            continue
        data = write.data
        if not write.durable and draw.random() < 0.3:
            data = data[: SECTOR * draw.randint(0, len(data) // SECTOR)]
        content.extend(bytes(max(0, write.offset + len(data) - len(content))))
        content[write.offset : write.offset + len(data)] = data
    return bytes(content)


def cuts(log: list[Change], count: int, draw: random.Random) -> Iterator[int]:
    """So many places in a log, the moments around barriers and renames more often than others."""
    telling = [i for i, change in enumerate(log) if change.kind in "sWrul"]
    for _ in range(count):
        if draw.random() < 0.7 and telling:
            yield min(len(log), max(0, draw.choice(telling) + draw.randint(0, 2)))
        else:
            yield draw.randint(0, len(log))
