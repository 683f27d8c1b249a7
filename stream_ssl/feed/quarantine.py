"""A bounded folder of the samples that could not be decoded, each with the reason."""

from __future__ import annotations

import json
import logging
import math
import re
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

from stream_ssl.bounded_files import check_folder, read_map
from stream_ssl.durable import write
from stream_ssl.feed.decode import BadSample
from stream_ssl.rate_limited_logger import RateLimitedLogger, printable
from stream_ssl.wire import CODECS

log = logging.getLogger(__name__)

_OWN = re.compile(r"[A-Za-z0-9_-]{1,40}\.[0-9a-f]{8}\.[0-9]{12,}\.[0-9]{4,}\.[a-z]{1,5}(\.part)?")
_MAX_TEXT = 1024  # most characters of a text that a producer chose
_MOST_NAMES = 256  # producers with a count of their own; the samples of others count as OTHER
OTHER = "other"


class Quarantine:
    """A bounded folder of rejected samples, each a payload and a JSON file with the reason.

    The oldest samples are deleted to keep the folder within its limits, also after a restart. The
    file name identifies the sample, so a replay adds no files. At most one sample per reason and
    minute is logged.

    Only the constructor raises errors. Samples that are not on disk are counted in `unkept`. Not
    thread-safe.

    Args:
        folder: the folder, created with the first sample. It must not be a link, so that no other
            folder is changed.
        max_bytes: most bytes of all files together.
        max_files: most files; each sample has two.
        rate: samples written per second in the long run, after a first burst that may fill the
            folder. The limit keeps a stream of only bad samples from using the whole disk
            bandwidth. Further samples are only counted.
        clock: returns seconds, as `time.monotonic`.

    Attributes:
        counts: rejected samples by reason and producer. The 257th and all later producers count
            as "other".
        unkept: rejected samples that are not on disk, by reason: "rate" or "disk".

    Raises:
        ValueError: a limit is too small for a sample, or the folder is a link.
    """

    def __init__(
        self,
        folder: Path | str,
        max_bytes: int = 64 << 20,
        max_files: int = 1000,
        rate: float = 50.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if max_bytes < 1 or max_files < 2 or rate < 0:
            raise ValueError(
                f"{max_bytes=}, {max_files=}, {rate=}: need at least 1 byte, 2 files, rate 0"
            )
        self.folder, self.max_bytes, self.max_files = Path(folder), max_bytes, max_files
        self.counts: Counter[tuple[str, str]] = Counter()
        self._names: set[str] = set()
        self.unkept: Counter[str] = Counter()
        self.bytes = 0
        self._limited_log = RateLimitedLogger(log, seconds=60.0)
        self._rate, self._clock, self._refilled = rate, clock, clock()
        self._tokens = self._burst = max_files / 2  # a token bucket, one token a sample
        self._files: OrderedDict[str, dict[str, int]] = OrderedDict()  # stem -> name -> bytes
        self._scan()
        self._make_room(0, 0)

    @property
    def files(self) -> int:
        """The number of files in the folder that belong to the quarantine."""
        return sum(map(len, self._files.values()))

    def label(self, producer: str) -> str:
        """Return the name under which a producer is counted; "other" after 256 other names."""
        if len(self._names) < _MOST_NAMES:
            self._names.add(producer)
        return producer if producer in self._names else OTHER

    def put(
        self,
        error: BadSample,
        row: Mapping[str, Any],
        data: bytes | memoryview,
        *,
        source: str,
        producer: str,
        sequence: int,
        index: int,
        received: float,
    ) -> None:
        """Store sample `index` of a producer's packet `sequence`; never raises."""
        self.counts[error.reason, self.label(producer)] += 1
        try:
            stem = _stem(producer, sequence, index)
            if f"{stem}.json" in self._files.get(stem, ()):
                return
            what = printable(f"{row.get('id')!r} of {producer} ({error.reason}: {error})", 300)
            self._limited_log.warning(
                error.reason, f"sample {what} cannot be learned from; see {self.folder}"
            )
            facts = {
                "reason": error.reason,
                "message": str(error),
                "producer": producer,
                "sequence": sequence,
                "index": index,
                "source": source,
                "received": received,
                **{name: row.get(name) for name in ("id", "time", "codec", "shape", "size")},
            }
            codec = row.get("codec")
            note = json.dumps({name: _json_value(value) for name, value in facts.items()}, indent=1)
            suffix = codec if codec in CODECS else "bin"
            self._write(stem, {f"{stem}.{suffix}": data, f"{stem}.json": note.encode()})
        except Exception as failure:  # an error here must not stop the stream
            self._count_unkept(failure)

    def _write(self, stem: str, parts: dict[str, bytes | memoryview]) -> None:
        size = sum(map(len, parts.values()))
        if size > self.max_bytes:  # write only the JSON file
            parts = {name: part for name, part in parts.items() if name.endswith(".json")}
            size = sum(map(len, parts.values()))
        check_folder(self.folder)  # another user may have replaced it by a link
        if not self._take_token():
            self.unkept["rate"] += 1
            return
        if not self._make_room(size, len(parts)):
            self.unkept["disk"] += 1
            return
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # images may be private
        for name, part in parts.items():
            write(self.folder / name, part, mode=0o600, wait=False)
            self._add_file(stem, name, len(part))

    def _take_token(self) -> bool:
        now = self._clock()
        refilled = self._tokens + (now - self._refilled) * self._rate
        self._tokens, self._refilled = min(self._burst, refilled), now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True

    def _make_room(self, size: int, files: int) -> bool:
        """Delete the oldest samples until `size` bytes in `files` files fit; return whether."""
        while self.bytes + size > self.max_bytes or self.files + files > self.max_files:
            if not self._files:
                return False
            stem = next(iter(self._files))
            for name in list(self._files[stem]):
                try:
                    (self.folder / name).unlink(missing_ok=True)
                except OSError as failure:
                    text = f"quarantine: cannot delete {name}: {failure}"
                    self._limited_log.warning("delete", text)
                    return False
                self.bytes -= self._files[stem].pop(name)
            del self._files[stem]
        return True

    def _add_file(self, stem: str, name: str, size: int) -> None:
        files = self._files.setdefault(stem, {})
        self.bytes += size - files.get(name, 0)
        files[name] = size

    def _scan(self) -> None:
        found = []
        try:
            check_folder(self.folder, 0o700)
            for path in self.folder.iterdir() if self.folder.is_dir() else ():
                if not _OWN.fullmatch(path.name):
                    continue  # a foreign file is neither counted nor deleted
                if path.suffix == ".part":
                    path.unlink()
                    continue
                stat = path.stat()
                found.append((stat.st_mtime_ns, path.name, stat.st_size))
        except OSError as failure:
            log.warning("quarantine: cannot read %s: %s", self.folder, failure)
        for _, name, size in sorted(found):
            self._add_file(name.rpartition(".")[0], name, size)

    def _count_unkept(self, failure: Exception) -> None:
        self.unkept["disk"] += 1
        if (count := self.unkept["disk"]) & (count - 1) == 0:  # the 1st, 2nd, 4th, 8th...
            log.warning("quarantine: %d samples not written, the last: %s", count, failure)


def quarantine_folder(run: Path, rank: int = 0) -> Path:
    """Return the quarantine of a rank in the folder of a run."""
    return run / (f"quarantine-{rank}" if rank else "quarantine")


def newest(folder: Path, limit: int) -> list[dict[str, Any]]:
    """Return the notes on the newest samples in a quarantine, the last first.

    Files that cannot be read, or that another program wrote, are left out.
    """
    times: list[tuple[float, Path]] = []
    for path in folder.glob("*.json"):
        with suppress(OSError):  # the learner may have deleted it meanwhile
            if _OWN.fullmatch(path.name):
                times.append((path.stat().st_mtime, path))
    notes = []
    for written, path in sorted(times, reverse=True)[:limit]:
        with suppress(OSError, ValueError, LookupError):
            saved = read_map(path)
            names = "reason", "message", "producer", "source", "id"
            texts = {name: str(saved[name]).encode(errors="replace").decode() for name in names}
            notes.append({"at": written, "file": path.name, **texts})
    return notes


def _stem(producer: str, sequence: int, index: int) -> str:
    """Return the name of a sample's files without a suffix, in safe characters.

    The name of the producer is shortened, so a digest of the whole name keeps producers apart.
    """
    clean = re.sub(r"[^A-Za-z0-9_-]", "_", producer)[:40] or "_"
    digest = blake2b(producer.encode(errors="surrogatepass"), digest_size=4).hexdigest()
    return f"{clean}.{digest}.{sequence:012d}.{index:04d}"


def _json_value(value: Any) -> Any:
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    if isinstance(value, list | tuple) and len(value) <= 8:
        return [_json_value(item) for item in value]
    return str(value)[:_MAX_TEXT]
