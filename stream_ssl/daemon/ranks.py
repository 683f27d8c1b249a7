"""The ranks of a run that torchrun started: join the group, and check that all ranks agree."""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from jsonargparse import Namespace
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

import stream_ssl
from stream_ssl import memory
from stream_ssl.config.build import check_device
from stream_ssl.config.options import flat
from stream_ssl.daemon import torchrun
from stream_ssl.durable import make_folder
from stream_ssl.journal.segment import journal_id
from stream_ssl.learning.checkpoint_layout import FOLDER, steps_in
from stream_ssl.learning.ranks import Ranks
from stream_ssl.learning.saved import Saved
from stream_ssl.memory.process_group import SINGLE_PROCESS, ProcessGroup
from stream_ssl.process.failures import Failure, Misconfigured, configuring, first_line

log = logging.getLogger("stream_ssl.ranks")

WAITS, PAUSE = 120, 0.5
"""The number of times that ranks look again for a missing journal, and the seconds between."""


def meet(settings: Namespace, stack: ExitStack) -> Ranks:
    """Join the other ranks. A process that torchrun did not start is alone.

    On GPUs each rank of a host uses one GPU, and the ranks communicate by NCCL; otherwise by gloo.

    Raises:
        Misconfigured: the device does not exist, this rank has no GPU, or torchrun did not start
            this process, and a variable of torchrun is set.
        Failure: the others cannot be reached within `ranks.timeout`.
    """
    if not settings.learner.device.startswith("cuda"):
        with configuring():
            check_device(settings.learner.device, "--learner.device")
    device = torch.device(settings.learner.device)
    if torchrun.ranks() == 1:
        return Ranks(SINGLE_PROCESS, device)
    on_gpu = ["LOCAL_RANK"] if device.type == "cuda" else []
    torchrun.check_complete(["RANK", "MASTER_ADDR", "MASTER_PORT", *on_gpu])
    rank = torchrun.rank()
    if device.type == "cuda":
        device = torch.device("cuda", torchrun.local_rank())
        if device.index >= torch.cuda.device_count():
            raise Misconfigured(
                f"rank {rank} is process {device.index} of this host, which has "
                f"{torch.cuda.device_count()} GPUs: start at most as many ranks with "
                "--nproc-per-node"
            )
        torch.cuda.set_device(device)
        settings.learner.device = str(device)
    where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    timeout = timedelta(seconds=settings.ranks.timeout)
    try:
        store, number, size = next(rendezvous("env://", timeout=timeout))
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            # torchrun's store survives a restart, with addresses of dead ranks, so the restart
            # count prefixes its keys. A rank's own store is new, and hosts may differ in the count.
            store = PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=number,
            world_size=size,
            timeout=timeout,
        )
    except (RuntimeError, ValueError) as error:
        raise Failure(
            f"rank {rank} cannot connect to the other ranks at {where} "
            f"({first_line(error)}): check that torchrun's --rdzv-endpoint is reachable "
            "from here, that the hosts know this name (otherwise give torchrun --local-addr "
            "ADDRESS), and that GLOO_SOCKET_IFNAME (or NCCL_SOCKET_IFNAME) names an "
            "interface that the other hosts reach"
        ) from error
    stack.callback(dist.destroy_process_group)
    ranks = Ranks(ProcessGroup(), device)
    log.info("rank %d of %d, connected at %s", ranks.group.rank, ranks.group.size, where)
    return ranks


@dataclass(frozen=True)
class Part:
    """The journal that a rank reads, and its place among the ranks that read this journal.

    Attributes:
        folder: the receiver's run folder.
        rank, readers: this rank of the run, and all ranks that read the same journal.
        journal: the journal's id; None if one process reads it, which finds the id later.
        apart: whether ranks have journals of their own.
    """

    folder: Path
    rank: int
    readers: Sequence[int]
    journal: str | None
    apart: bool

    @property
    def number(self) -> int:
        """This rank's place among the readers. Reader 0 reports to the receiver how far all are."""
        return self.readers.index(self.rank)


def part_of(settings: Namespace, ranks: Ranks, saved: Saved | None) -> Part:
    """Return the journal that this rank reads.

    Args:
        saved: the checkpoint that the run resumes from. If it holds several journals, the ranks
            have journals of their own, even if the settings name no folders.

    Raises:
        Misconfigured: a host has fewer ranks than receivers, or a folder is of another run.
        Failure: a receiver has not created its journal yet.
    """
    rank, size = ranks.group.rank, ranks.group.size
    folders = [Path(folder) for folder in settings.ranks.receivers]
    if not folders and saved is not None and saved.journals is not None:
        folders = [settings.run]
    if not any(ranks.tell(bool(folders))):
        journal = _one_journal(ranks, settings.run, begun=saved is not None)
        return Part(settings.run, rank, range(size), journal, apart=False)
    local, here = torchrun.local_rank(), torchrun.local_ranks()
    if len(folders) > max(1, here):
        raise Misconfigured(
            f"ranks.receivers names {len(folders)} folders, and {max(1, here)} ranks of "
            "this host would read them: start one rank or more for each folder, or remove "
            "a receiver (its producers first)"
        )
    folder = folders[local % len(folders)] if folders else settings.run
    _check_no_other_run(folder, settings.run)
    journals = _journals(ranks, folder, WAITS)
    journal = journals[rank]
    if None in journals:
        missing = rank if journal is None else journals.index(None)
        raise Failure(
            f"rank {missing} finds no journal in its receiver's folder "
            + (f"{folder}: " if journal is None else "on its host: ")
            + "start that receiver, and add its run folder to ranks.receivers"
        )
    readers = [other for other, read in enumerate(journals) if read == journal]
    return Part(folder, rank, readers, journal, apart=True)


def _check_no_other_run(folder: Path, run: Path) -> None:
    """Reject a receiver's folder in which another learner writes checkpoints.

    This learner would tell the receiver to trim samples that the other learner still needs.
    """
    if steps_in(folder / FOLDER) and not folder.samefile(run):
        raise Misconfigured(
            f"ranks.receivers names {folder}, which holds the checkpoints of another run, and one "
            "journal serves one run: name the folder of a receiver without a learner. If that run "
            f"has ended for good, move {folder / FOLDER} elsewhere"
        )


def _journals(ranks: Ranks, folder: Path, waits: int) -> list[str | None]:
    """Return the id of the journal that each rank finds in its folder, or None.

    Receivers that start at the same time as the ranks make their journals soon.

    Args:
        folder: the run folder of this rank's receiver.
        waits: how often to look again while a rank finds none, PAUSE seconds apart.
    """
    for left in range(waits, -1, -1):
        found: list[str | None] = ranks.tell(journal_id(folder / "journal"))
        if None not in found or not left:
            return found
        if left == waits:
            log.info("rank %d has no journal to read yet, waiting", found.index(None))
        time.sleep(PAUSE)
    raise AssertionError("unreachable")


def _one_journal(ranks: Ranks, run: Path, begun: bool) -> str | None:
    """Return the id of the journal that all ranks read. Check that all see the same one."""
    if ranks.alone:
        return None
    journals = {rank: one for rank, one in enumerate(_journals(ranks, run, WAITS * begun)) if one}
    if begun and len(journals) < ranks.group.size:
        raise Failure(f"{run} has no journal: start its receiver first")
    for rank, one in journals.items():
        if one != (first := min(journals.items()))[1]:
            raise Misconfigured(
                f"{run}/journal is {first[1]} on rank {first[0]} and {one} on rank "
                f"{rank}: if each host has its own receiver and journal, list their run "
                "folders in ranks.receivers; otherwise put the run's folder on a file "
                "system that all ranks share"
            )
    return journals.get(ranks.group.rank)


def check_shared(ranks: Ranks, run: Path) -> None:
    """Reject a run folder that is not the same on all ranks. They write checkpoints together.

    Raises:
        Misconfigured: some ranks do not see a file that rank 0 writes there.
        Failure: rank 0 cannot write there.
    """
    if ranks.alone:
        return
    first, fault = ranks.group.rank == 0, ""
    token = ranks.tell(secrets.token_hex(8) if first else "")[0]
    file = run / FOLDER / f".shared-{token}"
    if first:
        try:
            make_folder(file.parent)
            file.touch()
        except OSError as error:
            fault = f"{file.parent} cannot be written ({error.strerror})"
    try:
        faults = ranks.tell(fault)
        blind = [rank for rank, seen in enumerate(ranks.tell(file.exists())) if not seen]
    finally:
        if first:
            file.unlink(missing_ok=True)
    if faults[0]:
        raise Failure(faults[0])
    if blind:
        raise Misconfigured(
            f"{run} is another folder on rank {', '.join(map(str, blind))} than on rank 0: all "
            "ranks write checkpoints there, so put it on a file system that the hosts share"
        )


def check_alike(ranks: Ranks, config: Mapping[str, Any]) -> None:
    """Raise Misconfigured, with the first difference, if configuration, code or torch differ."""
    if ranks.alone:
        return
    own = flat(config) | {"the code's hash": code_hash(), "torch": torch.__version__}
    by_rank = ranks.tell(own)
    for number, other in enumerate(by_rank[1:], 1):
        for name in sorted({*by_rank[0], *other}):
            here, there = by_rank[0].get(name), other.get(name)
            if here != there:
                raise Misconfigured(
                    f"{name} is {here!r} on rank 0 and {there!r} on rank {number}: start all ranks "
                    "with the same configuration and code"
                )


def code_hash() -> str:
    """Return a hash of all source files of the packages that learn."""
    digest = hashlib.sha256()
    for package in (stream_ssl, memory):
        root = Path(package.__file__ or "").parent
        for path in sorted(root.rglob("*.py")):
            digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()[:12]
