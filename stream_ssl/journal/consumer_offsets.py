"""The positions of the learner in the journal, which it shares with the receiver in a small file.

A second file tells the learner that the journal is full.
"""

from __future__ import annotations

import errno
import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path

from stream_ssl.bounded_files import open_file, read_map
from stream_ssl.durable import write
from stream_ssl.rate_limited_logger import RateLimitedLogger

log = logging.getLogger(__name__)

FILE_NAME = "cursor.json"
FULL_NAME = "journal.full"
_FILE_BYTES = 256  # size of cursor.json, padded, so that it can be overwritten on a full disk
_MOST_BYTES = 4096
_MOST_CHECKPOINT = 1 << 44  # bytes: 16 TiB
LARGEST_POSITION = (1 << 63) - 1  # the journal stores positions in 64 bits


@dataclass(frozen=True, slots=True)
class Positions:
    """The positions of the learner; records before `checkpointed` may be trimmed."""

    read: int = 1  # the next record to read
    checkpointed: int = 1  # the first record that a restart from a checkpoint would read again
    journal: str | None = None  # id of the journal; None: an earlier release, without ids
    # Bytes of a checkpoint that the learner writes to the disk of the journal; 0: unknown, or the
    # learner writes checkpoints to another disk.
    checkpoint_bytes: int = 0
    step: int = 0  # step of the newest checkpoint; 0: none, or an earlier release


class ConsumerOffsets:
    """The files that tell the receiver what was read, and the learner that the journal is full.

    The learner writes `cursor.json`, and the receiver reads it. The empty file `journal.full`
    exists while the receiver has no room to grant any producer credit.

    Args:
        folder: the folder of the files; `publish` creates it if it is missing.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.path = Path(folder) / FILE_NAME
        self._full_path = self.path.with_name(FULL_NAME)
        self._loaded_stat: tuple[int, int, int] | None = None
        self._positions = Positions()
        self._limited_log = RateLimitedLogger(log)

    def publish(
        self,
        read: int,
        checkpointed: int,
        journal: str | None = None,
        checkpoint_bytes: int = 0,
        step: int = 0,
    ) -> None:
        """Replace the `Positions` atomically; the learner calls this.

        There is no fsync, because the learner calls this twice a second. A power cut that loses the
        newest file only delays trimming.

        Raises:
            ValueError: `1 <= checkpointed <= read` does not hold.
            OSError: the folder cannot be written.
        """
        if not 1 <= checkpointed <= read:
            raise ValueError(
                f"consumer offsets read={read}, checkpointed={checkpointed}: must hold "
                "1 <= checkpointed <= read; a checkpoint holds nothing that was not read"
            )
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fields: dict[str, int | str]  # keys of the file since its first version
        fields = {"read": read, "durable": checkpointed}
        if journal is not None:
            fields["journal"] = journal
        if checkpoint_bytes:
            fields["checkpoint"] = checkpoint_bytes
        if step:
            fields["step"] = step
        content = json.dumps(fields).ljust(_FILE_BYTES).encode()
        try:
            write(self.path, content, wait=False)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            # The receiver must know what it may trim, so overwrite the file's existing bytes.
            try:
                handle = open_file(self.path, os.O_RDWR)
            except FileNotFoundError:
                raise error from None
            with os.fdopen(handle, "r+b") as file:
                file.write(content)

    def load(self) -> Positions:
        """Return the newest positions, or the last valid ones if the file is missing or damaged."""
        try:
            stat = self.path.stat()
            identity = (stat.st_mtime_ns, stat.st_ino, stat.st_size)
            if identity == self._loaded_stat:
                return self._positions
            self._loaded_stat = identity  # set before parsing, so that damage is logged once
            fields = read_map(self.path, _MOST_BYTES)
            read, checkpointed = fields["read"], fields["durable"]
            if type(read) is not int or type(checkpointed) is not int:
                raise ValueError(f"read={read!r}, durable={checkpointed!r}")
            if not 1 <= checkpointed <= read <= LARGEST_POSITION:
                raise ValueError(f"read={read}, durable={checkpointed}")
            journal, checkpoint = fields.get("journal"), fields.get("checkpoint", 0)
            step = fields.get("step", 0)
            if not isinstance(journal, str | None):
                raise ValueError(f"journal={journal!r:.80}")
            if type(checkpoint) is not int or not 0 <= checkpoint <= _MOST_CHECKPOINT:
                raise ValueError(f"checkpoint={checkpoint!r:.80}")
            if type(step) is not int or not 0 <= step <= LARGEST_POSITION:
                raise ValueError(f"step={step!r:.80}")
        except FileNotFoundError:
            return self._positions
        except OSError as error:  # such as no free descriptor; the next call retries
            self._loaded_stat = None
            text = f"{self.path} cannot be read ({error!r}): keeping {self._positions}"
            self._limited_log.warning("load", text)
            return self._positions
        except (ValueError, KeyError, TypeError) as error:
            log.warning("%s cannot be read (%r): keeping %s", self.path, error, self._positions)
            return self._positions
        self._positions = Positions(read, checkpointed, journal, checkpoint, step)
        return self._positions

    @property
    def journal_full(self) -> bool:
        """Whether the receiver can accept nothing until the journal is trimmed.

        False if the folder cannot be read.
        """
        return os.access(self._full_path, os.F_OK)  # Path.exists would raise

    def set_journal_full(self, full: bool) -> None:
        """Create or remove `journal.full`; the receiver calls this. Never raises; logs failures."""
        try:
            if full:
                os.close(open_file(self._full_path, os.O_RDWR | os.O_CREAT, mode=0o644))
            else:
                self._full_path.unlink(missing_ok=True)
        except (OSError, ValueError) as error:  # a full disk may have no room for a file name
            text = f"cannot tell the learner whether the journal is full: {error}"
            self._limited_log.warning("full", text)
