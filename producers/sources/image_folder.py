"""A source that reads a folder of image files, in which each subfolder is a class."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from stream_ssl.producers.sources.base import Skipped, SourceError, check_is_damage
from stream_ssl.producers.sources.fields import digest, fitting_meta, source_name, utf8_name
from stream_ssl.producers.sources.finite import Finite
from stream_ssl.producers.sources.folders import away, check_root, is_away, is_hidden, walk
from stream_ssl.producers.sources.image_files import SUFFIXES, image_sample, read_image
from stream_ssl.wire.sample import Sample

HIDDEN = (".",)
"""Beginnings of the names of files and folders that are ignored."""


class ImageFolder(Finite):
    """JPEG, PNG and WebP files in a folder and its subfolders, sent unchanged.

    Each direct subfolder is a class and may contain further folders. Classes are numbered in the
    sorted order of their names. Images directly in the root have no label. Files and folders whose
    names begin with a dot are ignored, such as `.ipynb_checkpoints` and the `._` files of macOS. So
    are folders that a system makes, such as `@eaDir`, `__MACOSX`, `lost+found` and recycle bins.

    Sample ids are PATH#DIGEST: the path below the root and a digest of the content. A file that
    cannot be read or has another image format is logged, counted in `skipped` and left out. The
    source follows links to files and folders. It lists each folder once, even if several links
    point to the folder. The root is listed once, at the start.

    Args:
        root: the folder.
        name: the source's name; null: the name of the folder.

    Raises:
        FileNotFoundError: the folder does not exist or contains no images.
    """

    def __init__(self, root: Path, name: str | None = None, **passes: Any) -> None:
        self._root = Path(root)
        check_root(self._root)
        skipped = Skipped(name or source_name(self._root.absolute().name))
        folders = (entry.name for entry in self._root.iterdir() if entry.is_dir())
        self.classes = sorted(name for name in folders if not is_hidden(name, HIDDEN))
        self._disks: dict[str, int] = {}
        labels = {name: label for label, name in enumerate(self.classes)}
        self._files = sorted(
            (
                (file, labels.get(file.split("/")[0]))
                for file, _ in walk(self._root, skipped.note, HIDDEN, self._disks)
            ),
            key=lambda file: (file[1] is None, file[1], file[0]),
        )
        if not self._files:
            raise FileNotFoundError(
                f"{root}: no {', '.join(SUFFIXES)} in it or below; mount its disk, or give another "
                "folder as the root of the source"
            )
        content = digest(os.fsencode(file) + b"\0" for file, _ in self._files)
        super().__init__(skipped, len(self._files), content, **passes)

    def _sample(self, index: int) -> Sample | None:
        file, label = self._files[index]
        try:
            data = read_image(self._root / file)
        except OSError as error:
            check_is_damage(error, self.name)
            folder = (self._root / file).parent
            if is_away(folder, self._disks[str(folder)]):
                raise SourceError(away(self.name, folder)) from error
            self.skipped.note("unreadable", file, error)
            return None
        meta = None if label is None else fitting_meta({"class": utf8_name(self.classes[label])})
        return image_sample(file, data, self.skipped, label=label, meta=meta)
