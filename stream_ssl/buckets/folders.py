"""Sealed folders in buckets, such as s3://bucket/folder, through fsspec."""

from __future__ import annotations

import json
import logging
import posixpath
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePath, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any

from stream_ssl.bounded_files import parse_json
from stream_ssl.durable import MANIFEST
from stream_ssl.process.failures import Failure, existing, first_line, writing

log = logging.getLogger("stream_ssl.export")

PACKAGES = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
"""The extra of this package for each protocol that needs one."""
# A server that does not answer is an error after four tries, which take two minutes.
TIMEOUTS = {"connect_timeout": 10, "read_timeout": 30, "retries": {"max_attempts": 3}}
OPTIONS: dict[str, dict[str, Any]] = {
    "file": {"auto_mkdir": True},
    "local": {"auto_mkdir": True},
    "s3": {"config_kwargs": TIMEOUTS},
    "s3a": {"config_kwargs": TIMEOUTS},
}
MOST_MANIFEST = 1 << 24
"""The most bytes of a manifest that are read."""
BEGUN = "manifest.incomplete.json"
"""The manifest of a copy that has begun and not ended. It also lists the files it replaces."""


def is_url(place: str) -> bool:
    """Return whether a place is an address such as s3://bucket/folder, and no folder."""
    return "://" in place


def resolved(place: str) -> PurePath:
    """Return a folder or an address in one form, which is equal for all names of the place."""
    protocol, _, path = place.rpartition("://")
    if protocol in ("", "file", "local"):
        return Path(path).resolve()
    return PurePosixPath("/", PACKAGES.get(protocol, protocol), *PurePosixPath(path).parts)


class Bucket:
    """A folder of a bucket. No call of this class is bounded in time.

    Args:
        url: PROTOCOL://BUCKET/FOLDER, of any protocol that fsspec knows.

    Raises:
        ValueError: the protocol is unknown, or its package is not installed.
    """

    def __init__(self, url: str) -> None:
        import fsspec

        self.url, protocol = url.rstrip("/"), url.partition("://")[0]
        if not url.partition("://")[2].strip("/"):
            raise ValueError(f"{url} names no bucket: give an address such as s3://bucket/folder")
        if protocol == "memory":
            raise ValueError(f"{url} would end with this process: give an address that lasts")
        try:
            options = OPTIONS.get(protocol, {})
            self._files: Any
            self._files, self._root = fsspec.core.url_to_fs(
                self.url, use_listings_cache=False, skip_instance_cache=True, **options
            )
        except ImportError as error:
            extra = PACKAGES.get(protocol)
            remedy = f"pip install 'stream-ssl[{extra}]'" if extra else str(error)
            raise ValueError(f"{url} needs a package that is not installed: {remedy}") from error
        except ValueError as error:
            raise ValueError(
                f"{url}: {first_line(error)}; give an address such as s3://bucket/folder, "
                "gs://bucket/folder or file:///folder"
            ) from error
        if PACKAGES.get(protocol) == "s3":
            self._files.retries = 1  # botocore repeats, and s3fs would repeat all of its tries

    def disk(self) -> int | None:
        """Return the device of the disk that has the folder; None for a bucket of a server."""
        if self.url.partition("://")[0] not in ("file", "local"):
            return None
        return existing(Path(self._root)).stat().st_dev

    def names(self, folder: str = "") -> set[str]:
        """Return the names of the files and folders in a folder; empty if there is no folder."""
        place = self._place(folder)
        try:
            found = self._files.ls(place, detail=False)
        except FileNotFoundError:
            return set()
        names = {
            posixpath.basename(path.rstrip("/")) for path in found if path.rstrip("/") != place
        }
        return names - {""}

    def listed(self, folder: str = "", manifest: str = MANIFEST) -> set[str]:
        """Return the name of a manifest and of the files that it lists; empty if it is missing."""
        try:
            text = self._files.cat_file(self._place(folder, manifest), end=MOST_MANIFEST)
            entries = parse_json(text.decode())["files"]
            return {manifest} | {name for name, one in entries.items() if "sha256" in one}
        except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
            return set()

    def holds(self, folder: Path, target: str) -> bool:
        """Return whether a folder of the bucket is a whole copy of a sealed folder."""
        try:
            text = self._files.cat_file(self._place(target, MANIFEST), end=MOST_MANIFEST)
        except FileNotFoundError:
            return False
        return bool(text == (folder / MANIFEST).read_bytes())

    def foreign(self, marker: str) -> set[str]:
        """Return the names in the folder that no export has written.

        Args:
            marker: a file that every export of this kind holds.
        """
        sealed, begun = self.listed(), self.listed(manifest=BEGUN)
        ours = set().union(*(names for names in (sealed, begun) if marker in names))
        return self.names() - ours

    def upload(
        self, folder: Path, target: str = "", tell: Callable[[int], object] = lambda _: None
    ) -> None:
        """Copy a sealed folder. The copy is whole once it has a manifest, which is written last.

        The copy replaces or removes the files of an earlier sealed folder. If the copy fails, the
        earlier folder is lost. BEGUN then lists the files of both, and the next copy removes them.

        Args:
            folder: the sealed folder.
            target: the folder in the bucket.
            tell: progress callback: bytes of a file that was copied.
        """
        sealed, begun = self.listed(target), self.listed(target, BEGUN)
        names = sorted(path.name for path in folder.iterdir() if path.name != MANIFEST)
        replaced = (sealed | begun) - {MANIFEST, BEGUN}
        entries = {name: {"sha256": None} for name in sorted(replaced | {*names})}
        self._files.pipe_file(self._place(target, BEGUN), json.dumps({"files": entries}).encode())
        if sealed:
            self._files.rm_file(self._place(target, MANIFEST))
        for name in (*names, MANIFEST):
            self._files.put_file(str(folder / name), self._place(target, name))
            tell((folder / name).stat().st_size)
        for name in sorted((replaced - {*names}) & self.names(target)):
            self._files.rm_file(self._place(target, name))
        self._files.rm_file(self._place(target, BEGUN))

    def remove(self, folder: str) -> None:
        """Remove a sealed folder: first its manifest, so that no reader takes it for whole."""
        names = self.names(folder)
        for name in (MANIFEST, *sorted(names - {MANIFEST})):
            if name in names:
                self._files.rm_file(self._place(folder, name))
        with suppress(Exception):  # file systems keep empty folders, and buckets have none
            self._files.rmdir(self._place(folder))

    def _place(self, *names: str) -> str:
        return "/".join([self._root, *filter(None, names)])


@dataclass(frozen=True)
class Target:
    """A folder to write, and the address to which `publish` copies it.

    Args:
        option: the name of the option in errors.
        folder: the sealed folder, once it is written.
        bucket: the folder of a bucket; None: `folder` is the place itself.
    """

    option: str
    folder: Path
    bucket: Bucket | None = None

    def publish(self) -> None:
        """Copy the folder to its address, if it has one, and show the progress.

        Raises:
            Failure: the bucket does not accept the files.
        """
        if self.bucket is None:
            return
        from stream_ssl.process.progress import ShownProgress

        url, size = self.bucket.url, sum(path.stat().st_size for path in self.folder.iterdir())
        log.info("copying %.1f MB to %s", size / 1e6, url)
        with (
            writing(self.option, url),
            _reaching(self.option, url),
            ShownProgress() as progress,
        ):
            bar = progress.add_task(f"copying to {url}", total=size)
            self.bucket.upload(self.folder, tell=lambda sent: progress.update(bar, advance=sent))


@contextmanager
def target(option: str, place: str, marker: str) -> Iterator[Target]:
    """Yield a target: the place itself, or a temporary folder for an address.

    Args:
        option: the name of the option in errors.
        place: a folder, or the address of one in a bucket.
        marker: a file that every export of this kind holds.

    Raises:
        ValueError: the address cannot be used, or its folder holds files that no export wrote.
        Failure: the bucket cannot be reached.
    """
    if not is_url(place):
        yield Target(option, Path(place))
        return
    bucket = Bucket(place)
    with _reaching(option, place):
        others = sorted(bucket.foreign(marker))
    if others:
        raise ValueError(
            f"{option} {place} contains {others[0]}, which no export has written; choose an "
            "empty or a new folder"
        )
    with TemporaryDirectory() as scratch:
        yield Target(option, Path(scratch) / "export", bucket)


@contextmanager
def _reaching(option: str, place: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # each protocol raises errors of its own
        raise Failure(
            f"{option} {place} cannot be written: {type(error).__name__}: {first_line(error)}; "
            "check the bucket's name, its address (AWS_ENDPOINT_URL) and your credentials"
        ) from error
