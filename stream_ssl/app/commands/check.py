"""stream-ssl check: check a configuration. It opens no port and writes nothing to the run."""

from __future__ import annotations

import logging
import math
import os
import re
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from jsonargparse import ArgumentParser, Namespace

from stream_ssl.app.commands.run import (
    CONFIG_MISSING,
    counts,
    journals_of,
    lacks_config,
    port_after,
)
from stream_ssl.bounded_files import check_folder
from stream_ssl.config import options, restart
from stream_ssl.daemon.endpoints import OTHER_FOLDER
from stream_ssl.daemon.page import page_sources
from stream_ssl.learning.checkpoint_layout import FOLDER, facts_in
from stream_ssl.observe.server import check_public
from stream_ssl.process.failures import check_writable, configuring, existing, of_another, reported
from stream_ssl.wire.run_folder import KEYS

if TYPE_CHECKING:
    from stream_ssl.daemon.start import Start
    from stream_ssl.learning.learner import Learner

log = logging.getLogger("stream_ssl.check")


def main(arguments: Sequence[str]) -> int:
    """Parse the settings of both roles, and build what can be built without touching the run."""
    count, given, arguments = counts("check", arguments)
    # Check first what takes no time: a missing file, an unknown section, the receiver's settings.
    receiver_settings = options.read(options.receiver_parser("check"), arguments)
    if lacks_config(receiver_settings, arguments):
        count.error(CONFIG_MISSING)

    def work() -> None:
        with configuring():
            check_receiver(receiver_settings)
            check_pages(receiver_settings, given.ranks, given.receivers)
        log.info("the receiver's configuration is OK; building the learner")
        # After the check: this import takes seconds.
        from stream_ssl.daemon.start import check_not_lost, start_of

        parser = options.learner_parser("check")
        folders = journals_of(receiver_settings.run, given.receivers)
        learner_settings = options.read(parser, [*arguments, *folders])
        with configuring():
            start = start_of(learner_settings.run)
        if start.damaged:
            log_damage(learner_settings.run, start)
        elif start.checkpoint is None:
            with configuring():
                check_not_lost(learner_settings.run)
        if start.config is not None:
            log.info("%s: checking whether the run can restart from it", start.checkpoint)
            with configuring():
                learner_settings = restart.resume(parser, learner_settings, start.config)
        with configuring():
            learner = check_learner(parser, learner_settings, start.checkpoint, given.ranks)
        print(summary(learner, learner_settings, start, given.ranks))

    return reported(work)


def check_receiver(settings: Namespace) -> None:
    """Raise ValueError if the receiver's folder, settings, keys or access by HTTP cannot work."""
    from stream_ssl.daemon import receive

    for name in ("", "journal", "checkpoints", "quarantine", "originals"):
        check_writable(settings.run / name, "run folder", OTHER_FOLDER)
    for folder in (*settings.run.glob("quarantine*"), settings.run / KEYS):
        check_folder(folder)
    token = page_sources(settings).token
    for role in ("receiver", "learner"):
        host, _ = options.split_address(settings.http[role])
        check_public(host, settings.http.public or token is not None)
    receive.dry_run(settings)
    room = shutil.disk_usage(existing(settings.run)).free
    for file in (settings.run / "journal").rglob("*"):
        with suppress(FileNotFoundError):  # a receiver that runs trims the journal meanwhile
            room += file.stat().st_size
            if not os.access(file, os.R_OK | os.W_OK) and file.exists():
                raise ValueError(of_another(file))
    budget = settings.journal.budget
    if budget > room:
        log.warning(
            f"journal.budget is {budget / 1e6:,.0f} MB, and the disk of {settings.run} "
            f"has room for {room / 1e6:,.0f} MB: free space on the disk, or lower "
            "journal.budget. Producers wait while the disk is full"
        )


def check_pages(settings: Namespace, ranks: int, receivers: int) -> None:
    """Raise ValueError if pages of the receiver and of the ranks have one address."""
    address = settings.http.learner
    if settings.http.receiver == address and not address.endswith(":0"):
        raise ValueError(
            f"http.receiver and http.learner are both {address}: give two different addresses"
        )
    pages = {port_after(address, rank) for rank in range(ranks)} - {address}
    if receivers == 1 and settings.http.receiver in pages:  # several receivers leave them out
        raise ValueError(
            f"http.receiver {settings.http.receiver}: a rank's page has this address, because the "
            f"ranks' ports follow on http.learner {address}; choose another port"
        )


def log_damage(run: Path, start: Start) -> None:
    """Log which checkpoints are damaged, and what a start would do."""
    then = "and begins with new weights at step 0. To keep what the run has learned, put a whole "
    then += "checkpoint from a backup or a bucket into the folder before you start the run"
    if start.checkpoint is not None:
        then = f"and continues from {start.checkpoint.name}"
    names = "; ".join(start.damaged)
    folder = run / FOLDER
    log.warning("damaged in %s: %s. A start renames them to damaged-*, %s", folder, names, then)


def check_learner(
    parser: ArgumentParser, settings: Namespace, checkpoint: Path | None, ranks: int = 1
) -> Learner:
    """Check the learner's settings: build all that one rank would build, and return its learner.

    A run that resumes needs no initial weights: its checkpoint has the weights of its encoder.

    Raises:
        ValueError: the settings cannot work.
    """
    import torch

    from stream_ssl.config import build
    from stream_ssl.config.idle_options import without_effect
    from stream_ssl.daemon.warm_start import check_alone, warm_start
    from stream_ssl.learning.saved import Saved

    device = settings.learner.device
    elsewhere = re.fullmatch(r"cuda(:\d{1,2})?", device) and not torch.cuda.is_available()
    if elsewhere:
        log.warning(
            "learner.device is %r, and this machine has no GPU: checking on the CPU", device
        )
        settings = settings.clone()
        settings.learner.device = "cpu"
    for line in without_effect(options.resolved(parser, settings)):
        log.warning("%s", line)
    built = parser.instantiate(settings)
    if checkpoint is not None:
        build.forget_first_weights(built)
    learner = build.dry_run(built, ranks)
    if checkpoint is not None:
        # The index "auto" depends on the device, so a state of a GPU may not fit here.
        if not (elsewhere and getattr(learner.memory.eviction, "index", "") == "auto"):
            Saved(checkpoint, facts_in(checkpoint)).check_memory(learner.memory, ranks)
    elif settings["from"] is not None:
        check_alone(ranks)
        warm_start(settings, learner)
    return learner


def summary(learner: Learner, settings: Namespace, start: Start, ranks: int = 1) -> str:
    """Return a few lines on what the configuration would run."""
    from stream_ssl.config import build
    from stream_ssl.memory.descriptors import Embedding

    network, counted = learner.method, learner.memory.descriptor
    shape = build.image_shape(settings)
    encoder = sum(p.numel() for p in network.trained) / 1e6
    decoder, memory, vectors = settings.decoder, settings.memory, build.vectors(settings)
    samples = f"images       {decoder.size} x {decoder.size} x {decoder.channels}"
    if vectors is not None:
        samples = f"vectors      {vectors.dim} numbers, kept as {vectors.dtype}"
    rows = network.dim
    if not isinstance(counted, Embedding):
        rows += counted.dim(network.dim, shape)
    begins = "with new weights" + ", because no checkpoint is whole" * bool(start.damaged)
    if start.checkpoint is not None:
        begins = f"from {start.checkpoint.name}"
    elif settings["from"] is not None:
        begins = f"with the weights of {settings['from']}"
    megabytes = memory.capacity * (math.prod(shape) + 4 * rows) / 1e6
    return (
        f"configuration OK\n  run folder   {settings.run}\n  start        {begins}\n  {samples}, "
        f"batches of {settings.batches.batch_size}\n  network      {encoder:.2f} M parameters, "
        f"embeddings of {network.dim}\n  memory       {memory.capacity} slots, "
        f"{megabytes:.1f} MB\n  duplicates   counted on {counted!r}"
        + (rank_lines(settings, ranks, megabytes) if ranks > 1 else "")
    )


def rank_lines(settings: Namespace, ranks: int, megabytes: float) -> str:
    """Return lines on what each of several ranks would do. All slots take `megabytes`."""
    folders = [str(folder) for folder in settings.ranks.receivers]
    reads = f"one of every {ranks} records of {settings.run}/journal, from record r"
    if folders:
        reads = (
            f"the journal of receiver number r mod {len(folders)} of its host: {', '.join(folders)}"
        )
    backend = "NCCL" if settings.learner.device.startswith("cuda") else "gloo"
    return (
        f"\n  ranks        {ranks}, which communicate by {backend}; rank r reads "
        f"{reads}\n  each rank    {settings.batches.batch_size // ranks} samples of each "
        f"batch, {settings.memory.capacity // ranks} slots, {megabytes / ranks:.1f} MB"
    )
