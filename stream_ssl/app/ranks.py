"""The ranks of a run that torchrun started: how they meet, and that they are of one run."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Mapping
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from jsonargparse import Namespace
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

import memory
import stream_ssl
from memory.process_group import SINGLE_PROCESS, ProcessGroup
from stream_ssl.app.build import check_device
from stream_ssl.app.config import flat
from stream_ssl.app.failures import Failure, Misconfigured, configuring
from stream_ssl.learning.ranks import Ranks

log = logging.getLogger("stream_ssl.ranks")


def rank() -> int:
    """Of this process, by what torchrun told it."""
    return int(os.environ.get("RANK", 0))


def role() -> str:
    """What this process is called in the run's folder: "learner", and "learner-1" and so on."""
    return f"learner-{rank()}" if rank() else "learner"


def meet(settings: Namespace, stack: ExitStack) -> Ranks:
    """Join the other ranks; a process that torchrun did not start is alone.

    On GPUs each rank of a host takes one, and they talk by NCCL; else by gloo.

    Raises:
        Misconfigured: the device is none, or this rank has no GPU.
        Failure: the others cannot be reached within `ranks.timeout`.
    """
    if not settings.learner.device.startswith("cuda"):
        with configuring():
            check_device(settings.learner.device, "--learner.device")
    device = torch.device(settings.learner.device)
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        return Ranks(SINGLE_PROCESS, device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        if device.index >= torch.cuda.device_count():
            raise Misconfigured(
                f"rank {rank()} is process {device.index} of this host, which has "
                f"{torch.cuda.device_count()} GPUs: start as many with --nproc-per-node"
            )
        torch.cuda.set_device(device)
        settings.learner.device = str(device)
    where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    timeout = timedelta(seconds=settings.ranks.timeout)
    try:
        store, number, size = next(rendezvous("env://", timeout=timeout))
        # torchrun may keep its store over a restart, with the addresses of ranks that are dead.
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
            f"rank {rank()} cannot meet the others at {where} ({str(error).splitlines()[0]}): is "
            "torchrun's --rdzv-endpoint reachable from here, and GLOO_SOCKET_IFNAME (or "
            "NCCL_SOCKET_IFNAME) an interface that the other hosts reach?"
        ) from error
    stack.callback(dist.destroy_process_group)
    ranks = Ranks(ProcessGroup(), device)
    log.info("rank %d of %d, met at %s", ranks.group.rank, ranks.group.size, where)
    return ranks


def check_alike(ranks: Ranks, config: Mapping[str, Any]) -> None:
    """Refuse ranks of other configuration or code.

    Raises:
        Misconfigured: some differ; the message names the first difference, and both values.
    """
    if ranks.alone:
        return
    own = flat(config) | {"the code's hash": code_hash(), "torch": torch.__version__}
    told = ranks.tell(own)
    for number, other in enumerate(told[1:], 1):
        for name in sorted({*told[0], *other}):
            here, there = told[0].get(name), other.get(name)
            if here != there:
                raise Misconfigured(
                    f"{name} is {here!r} on rank 0 and {there!r} on rank {number}: start all ranks "
                    "with the same configuration and code"
                )


def code_hash() -> str:
    """Of every source file of the two packages that learn."""
    digest = hashlib.sha256()
    for package in (stream_ssl, memory):
        root = Path(package.__file__ or "").parent
        for path in sorted(root.rglob("*.py")):
            digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()[:12]
