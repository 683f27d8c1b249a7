"""The options that a restart may change, and the options that a run fixes at its beginning.

Each option is in one of two lists, which docs/restart.md repeats for users. A test fails for a new
option that is in neither.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from stream_ssl.config.options import RECEIVER_SECTIONS, resolved
from stream_ssl.config.removed import check_run, without
from stream_ssl.renamed import with_current_names

log = logging.getLogger("stream_ssl.learner")

FIXED = (
    # The samples and their batches.
    *("decoder.size", "decoder.channels", "decoder.fit", "decoder.subclass"),
    "batches.batch_size",
    *("vectors.dim", "vectors.dtype", "vectors.widths", "vectors.noise"),
    # The network: a checkpoint's tensors fit no other.
    *("encoder.width", "encoder.depths", "encoder.stem", "encoder.block"),
    *("encoder.model", "encoder.head", "encoder.weights", "encoder.frozen"),
    *("projector.dim", "projector.hidden", "projector.batchnorm"),
    # The objective.
    *("views.crop", "views.flip", "views.jitter", "views.grey", "views.blur", "views.mean"),
    "views.std",
    "views.transform",
    *("loss", "method", "optimiser.name", "learner.seed", "learner.anchors"),
    *("learner.plain_keys", "learner.draw", "learner.sync_batchnorm"),
    # The memory and its policy.
    *("memory.capacity", "memory.eviction", "memory.descriptor"),
)
"""Options whose values the run keeps. Under other values its checkpoints would have no meaning."""

MAY_CHANGE = (
    *("optimiser.learning_rate", "optimiser.weight_decay", "optimiser.clip", "schedule"),
    *("pace.updates_per_sample", "pace.counts"),
    *("learner.device", "learner.precision", "learner.threads", "learner.reencode"),
    *("learner.novelty", "learner.compile"),
    *("memory.images_on", "memory.shares"),
    *("checkpoints.keep", "checkpoints.every_seconds", "checkpoints.every_steps"),
    *("copies.to", "copies.every_seconds"),
    *("decoder.max_pixels", "batches.workers"),
    *("originals.budget", "shadows", "classes", "loggers"),
    "observe.held_out",
    *("http.receiver", "http.learner", "http.public", "http.token_file"),
    "access",
    "journal.budget",
    *("receiver.bind", "receiver.max_packet", "receiver.total_credit"),
    *("receiver.max_lag_bytes", "receiver.max_names"),
    "ranks.timeout",
    "ranks.receivers",
    "ranks.lost",
)
"""Options whose new values are used from the restart on."""

ABSENT = object()


@dataclass(frozen=True)
class Restart:
    """The configuration with which a run resumes, and its differences.

    Args:
        config: plain values.
        kept: lines "option: the run's value (requested: another)", for options that a run fixes.
        changed: lines "option: the run's value -> the new one", for options that may change.
    """

    config: dict[str, Any]
    kept: list[str]
    changed: list[str]


def merge(
    asked: Mapping[str, Any], run: Mapping[str, Any], defaults: Mapping[str, Any] | None = None
) -> Restart:
    """Return the configuration with which a run resumes.

    Args:
        asked: the configuration of the restart, as plain values.
        run: the configuration stored in the checkpoint. Options that are newer than the checkpoint
            are taken from `asked`.
        defaults: the default of each option, which nobody requested.
    """
    run = _with_memory_defaults(_with_own_parts(_with_named_method(with_current_names(run))))
    config = {name: dict(v) if isinstance(v, Mapping) else v for name, v in asked.items()}
    kept, changed = [], []
    for path in FIXED:
        ours, theirs = _get(run, path), _get(asked, path)
        if ours is not ABSENT:
            section, _, option = path.partition(".")
            if option:
                config[section] = {**(config.get(section) or {}), option: ours}
            else:
                config[section] = ours
            lines = _differences(path, ours, theirs)
            word = "now the default" if theirs == _get(defaults or {}, path) else "requested"
            kept += [f"{where}: {_show(a)} ({word}: {_show(b)})" for where, a, b in lines]
    for path in MAY_CHANGE:
        ours, theirs = _get(run, path), _get(asked, path)
        # A learner knows only those options of the receiver that the file sets.
        if ours is not ABSENT or path.partition(".")[0] in RECEIVER_SECTIONS:
            lines = _differences(path, ours, theirs)
            changed += [f"{where}: {_show(a)} -> {_show(b)}" for where, a, b in lines]
    return Restart(config, kept, changed)


def resume(parser: ArgumentParser, settings: Namespace, run: Mapping[str, Any]) -> Namespace:
    """Return the settings with which to resume from a checkpoint.

    The log says which options are kept, changed or removed.

    Args:
        parser: the parser that returned `settings`.
        run: the configuration stored in the checkpoint.

    Raises:
        ValueError: the run depends on a removed feature.
    """
    check_run(run)
    run, lost = without(run)
    if lost:
        log.warning(
            "%s: the run was configured with options that were removed: %s",
            settings.run,
            "; ".join(lost),
        )
    defaults = resolved(parser, parser.get_defaults(), complete=False)
    found = merge(resolved(parser, settings), run, defaults)
    if found.kept:
        log.warning(
            "%s: the run keeps these settings from its beginning: %s. To use other "
            "settings, begin a new run with --run FOLDER",
            settings.run,
            "; ".join(found.kept),
        )
    for line in found.changed:
        log.info("settings that changed since the last checkpoint, and apply from now on: %s", line)
    merged: Namespace = parser.parse_object(found.config)
    return merged


def _get(config: Mapping[str, Any], path: str) -> Any:
    found: Any = config
    for name in path.split("."):
        if not isinstance(found, Mapping) or name not in found:
            return ABSENT
        found = found[name]
    return found


def _differences(path: str, ours: Any, theirs: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        keys = {*ours, *theirs}
        if "class_path" in keys and ours.get("class_path") != theirs.get("class_path"):
            keys = {"class_path"}  # arguments of different classes are not comparable
        for key in sorted(keys, key=str):
            yield from _differences(f"{path}.{key}", ours.get(key, ABSENT), theirs.get(key, ABSENT))
    elif not _equal(ours, theirs):
        yield path, ours, theirs


def _equal(ours: Any, theirs: Any) -> bool:
    """Return whether two values are equal.

    A learner has the receiver's options as text if they come from the command line.
    """
    if isinstance(ours, str) != isinstance(theirs, str) and ABSENT not in (ours, theirs):
        with suppress(ValueError, RecursionError):
            ours, theirs = (
                json.loads(one) if isinstance(one, str) else one for one in (ours, theirs)
            )
    return bool(_plain(ours) == _plain(theirs))


def _plain(value: Any) -> Any:
    # JSON has no tuples: a stored tuple comes back as a list.
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _show(value: Any) -> str:
    if value is ABSENT:
        return "default"
    if isinstance(value, str):  # a learner has the receiver's options as text
        with suppress(ValueError, RecursionError):
            value = json.loads(value)
    return repr(_plain(value))


def _with_named_method(run: Mapping[str, Any]) -> Mapping[str, Any]:
    """Add the method MoCo to a configuration from before methods could be chosen."""
    method = run.get("method")
    if method is None or "class_path" in method:
        return run
    return {**run, "method": {"class_path": "stream_ssl.methods.MoCo", "init_args": method}}


def _with_own_parts(run: Mapping[str, Any]) -> Mapping[str, Any]:
    """Add the defaults to a configuration from before networks and transforms could be chosen."""
    own: dict[str, dict[str, Any]] = {
        "encoder": {"model": None, "head": None, "weights": None, "frozen": []},
        "views": {"transform": None},
        "decoder": {"subclass": None, "fit": "crop"},
    }
    return {**run, **{name: own[name] | run[name] for name in own if run.get(name)}}


def _with_memory_defaults(run: Mapping[str, Any]) -> Mapping[str, Any]:
    """Add the descriptor to a configuration that has none.

    Before descriptors could be chosen, duplicates were counted on embeddings.
    """
    embedding = {"class_path": "stream_ssl.memory.descriptors.Embedding"}
    return {**run, "memory": {"descriptor": embedding, **run.get("memory", {})}}
