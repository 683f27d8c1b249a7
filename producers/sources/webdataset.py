"""A source that reads samples from tar shards in the WebDataset convention."""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stream_ssl.producers.sources.base import BrokenFileError, Skipped
from stream_ssl.producers.sources.fields import content_id, fitting_meta, label_of, note_too_long
from stream_ssl.producers.sources.image_files import OTHER_IMAGES, SUFFIXES, codec_of, no_image
from stream_ssl.producers.sources.npy import vector_in
from stream_ssl.producers.sources.recordings import CountedPasses
from stream_ssl.producers.sources.tar import ArchiveMember, read_members, split_key
from stream_ssl.wire.sample import Sample

VECTOR, LABEL, FACTS = ".npy", ".cls", ".json"
BESIDE = {LABEL: "bad label", FACTS: "bad facts"}
"""Members that a sample can be sent without, and the counter of those that cannot be read."""
LIMITS = {
    **dict.fromkeys([*SUFFIXES, *(f"*{suffix}" for suffix in SUFFIXES)], 2**26),
    VECTOR: 2**24,
    LABEL: 2**10,
    FACTS: 2**22,
}
"""Maximum size of a member in bytes, by extension. The limits exceed the size of a packet."""
SHOWN = 8  # maximum number of other members' extensions in an error message


@dataclass(slots=True)
class MemberGroup:
    """The members that share a key and form one sample."""

    key: str
    parts: dict[str, bytes] = field(default_factory=dict)  # contents, by extension
    others: list[str] = field(default_factory=list)  # extensions of ignored members
    lost: tuple[str, str] | None = None  # (reason, sentence) if the sample is not sent
    vector_lost: tuple[str, str] | None = None  # the same, unless it has an image
    other_image: bool = False  # whether it has an image in a format that is not supported
    inner: ArchiveMember | None = None  # its only image of a longer extension, such as .left.png
    inner_images: int = 0  # how many images have a longer extension

    @property
    def images(self) -> list[bytes]:
        """The contents of its images."""
        return [self.parts[suffix] for suffix in SUFFIXES if suffix in self.parts]

    @property
    def has_image(self) -> bool:
        """Whether it has an image, in a supported format or not."""
        return bool(self.images) or self.other_image

    def use_inner(self) -> None:
        """Use the only image of a longer extension, if there is no other image and no vector."""
        has_vector = VECTOR in self.parts or self.vector_lost
        if self.inner is not None and not self.has_image and not has_vector:
            self.lost = self.lost or self.inner.lost
            suffix = posixpath.splitext(self.inner.name)[1].lower()
            self.parts[suffix] = self.inner.data or b""

    def content(self) -> tuple[bytes, str]:
        """Return the file of the image or else of the vector, and its codec.

        Raises:
            ValueError: there is neither one image nor a vector, or the image cannot be read.
        """
        if not self.has_image and VECTOR in self.parts:
            return self.parts[VECTOR], "vector"
        if len(self.images) != 1:
            raise ValueError(self._why_no_image())
        (data,) = self.images
        codec = codec_of(data)
        if codec is None:
            raise ValueError(no_image(data))
        return data, codec

    def _why_no_image(self) -> str:
        found = sorted(name[1:] for name in (*self.parts, *self.others))
        other = [name for name in found if f".{name}" in OTHER_IMAGES]
        count = len(self.images) or self.inner_images * (not self.other_image)
        if other and not self.images:
            remedy = f"convert .{other[0]} to PNG"
        elif count:
            remedy = "the name of a sample ends at its first dot"
        else:
            remedy = "the members of a sample must follow each other: tar --sort=name"
        return f"{count} images under {found}; must be one; {remedy}"


class WebDataset(CountedPasses):
    """Samples of tar shards in the WebDataset convention, read in sequence.

    Shards are read member by member and are not unpacked to disk. Consecutive members form one
    sample if their names are equal up to the first "." of the last part. A sample consists of:

    - an image (.jpg, .jpeg, .png or .webp), or else a vector (.npy, floats [D]),
    - optionally a label (.cls, a whole number, or -1 for none),
    - optionally facts (.json), whose scalars are sent as meta.

    A single image of a longer extension, such as .left.png, is used if there is no other image and
    no vector. Other members are ignored, and so is a vector beside an image. Sample ids are
    SHARD/KEY#DIGEST, with a digest of the image or of the vector's file.

    A sample whose image is malformed, a link, sparse, too large or no plain file is logged, counted
    in `skipped` and left out. A label or facts that cannot be read are left out alone. At a damaged
    place, the samples on both sides are left out, because they may lack members. If two members of
    a sample have the same name, the later member is used, as in tar.

    A shard may be compressed with gzip, bzip2 or xz, and may consist of several concatenated
    archives. A position is a byte offset in a shard. To resume, the source seeks in a plain tar,
    and unpacks a compressed shard up to the position. Shards may be added after the shard of a
    position.

    Args:
        shards: paths, globs, or brace expansions such as "data-{000000..000009}.tar".
        epochs: number of passes, 1 or more; null: endless.
        name: the source's name.

    Raises:
        FileNotFoundError: a pattern matches no file.
        ValueError: the braces or `epochs` are invalid.
    """

    def __init__(
        self, shards: list[str] | str, epochs: int | None = 1, name: str = "webdataset"
    ) -> None:
        super().__init__(shards, epochs, Skipped(name), "shard", settings={}, key="shard")

    def _readable(
        self, path: Path, after: tuple[int] | None
    ) -> Iterator[tuple[Sample, tuple[int]]]:
        (start,) = after or (0,)
        stem = re.sub(r"(\.tar)?(\.gz|\.bz2|\.xz)?$", "", path.name)
        group: MemberGroup | None = None
        torn: tuple[str, str] | None = None
        try:
            for member in read_members(path, start, LIMITS, self._stopped.is_set):
                if not member.name and member.lost:
                    self._note_damage(f"a part of {path}", group, member.lost[1])
                    group, torn = None, ("damaged", "the damage before it may have cost a part")
                    continue
                key, extension = split_key(member.name)
                base = posixpath.basename(key)
                about = base.startswith("__") and base.endswith("__")  # about the shard
                if member.name and (about or not base):  # a hidden file has no base
                    continue
                if group is not None and (not member.name or key != group.key):
                    sample = self._sample(stem, group)
                    if sample is not None:
                        yield sample, (member.start,)
                    group = None
                if member.name:
                    group = group or MemberGroup(key, lost=torn)
                    torn = None
                    self._add(stem, group, extension, member)
        except BrokenFileError as error:
            self._note_damage(f"the rest of {path}", group, error)

    def _note_damage(
        self, what: str, group: MemberGroup | None, why: BrokenFileError | str
    ) -> None:
        """Count a place that cannot be read, together with the sample that it interrupts."""
        cut = f"sample {group.key} and " if group else ""
        self.skipped.note_damage(cut + what, why)

    def _add(self, stem: str, group: MemberGroup, extension: str, member: ArchiveMember) -> None:
        if extension not in LIMITS:
            group.other_image |= extension in OTHER_IMAGES
            if posixpath.splitext(extension)[1] in SUFFIXES:
                group.inner_images += 1
                group.inner = member if group.inner_images == 1 else None
            if len(group.others) < SHOWN:
                group.others.append(extension)
            return
        if extension in BESIDE and member.lost:
            what = f"the {extension} of {stem}/{group.key}"
            self.skipped.note(BESIDE[extension], what, member.lost[1])
            return
        if extension == VECTOR and member.lost:
            group.vector_lost = member.lost
            return
        if extension in group.parts:
            what = f"{stem}/{member.name} at an earlier place"
            self.skipped.note("twice", what, "a later member of this name replaces it")
        group.lost = group.lost or member.lost
        group.parts[extension] = member.data or b""

    def _sample(self, stem: str, group: MemberGroup) -> Sample | None:
        group.use_inner()
        what = f"{stem}/{group.key}"
        lost = group.lost or (None if group.has_image else group.vector_lost)
        if lost is not None:
            reason, why = lost
            self.skipped.note(reason, what, why)
            return None
        try:
            content, codec = group.content()
            label = label_of(group.parts.get(LABEL), self.skipped, what)
            facts = facts_in(group.parts.get(FACTS, b"{}"), self.skipped, what)
            fields: dict[str, Any] = {
                "id": content_id(what, content),
                "source": self.name,
                "label": label,
                "meta": fitting_meta(facts, too_long=note_too_long(self.skipped, what)),
            }
            if codec == "vector":
                return Sample.from_vector(vector_in(content), **fields)
            return Sample(data=content, codec=codec, **fields)
        except ValueError as error:
            self.skipped.note("malformed", what, error)
            return None


def facts_in(content: bytes, skipped: Skipped, what: str) -> dict[str, Any]:
    """Return the facts in a .json; none if they cannot be read, which `skipped` counts."""
    try:
        found = json.loads(content)
        if isinstance(found, dict):
            return found
        why: object = "it is no object"
    except (ValueError, RecursionError) as error:  # errors of UTF-8 are ValueErrors, too
        why = error
    skipped.note(BESIDE[FACTS], f"the .json of {what}", why)
    return {}
