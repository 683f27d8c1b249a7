"""Removed options, and how old configuration files and run folders that name them are handled."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple


class Gone(NamedTuple):
    """A removed option: the value that now always holds, and a sentence for the user."""

    value: Any
    now: str


REMOVED: dict[str, Gone] = {
    "receiver.max_samples": Gone(1024, "a packet holds at most 1024 samples"),
    "receiver.group_packets": Gone(64, "at most 64 packets are committed together"),
    "receiver.group_seconds": Gone(0.005, "a packet waits at most 5 ms for its commit"),
    "receiver.max_producers": Gone(4096, "4096 producers may be connected at once"),
    "receiver.drain_seconds": Gone(2.0, "the receiver stops within 2 s"),
    "receiver.credit": Gone(16 << 20, "one producer may have 16 MiB unacknowledged, or one packet"),
    "journal.segment_bytes": Gone(None, "journal.budget determines the size of a segment"),
    "journal.forget_days": Gone(30.0, "a producer is forgotten after 30 days without a packet"),
    "journal.check": Gone(True, "the journal is always checked for damage"),
    "quarantine.max_bytes": Gone(64 << 20, "quarantine keeps at most 64 MiB"),
    "quarantine.max_files": Gone(1000, "quarantine keeps at most 1000 files"),
    "quarantine.rate": Gone(50.0, "quarantine writes at most 50 samples a second"),
    "batches.prefetch": Gone(2, "at most 4 batches are prepared ahead"),
    "vectors.dropout": Gone(0.3, "a view replaces 30 % of a vector's numbers"),
    "vectors.mix": Gone(0.1, "a view contains at most 10 % of another vector"),
    "views.brightness": Gone(0.4, "use views.jitter or views.transform"),
    "views.contrast": Gone(0.4, "use views.jitter or views.transform"),
    "views.saturation": Gone(0.4, "use views.jitter or views.transform"),
    "views.hue": Gone(0.1, "use views.jitter or views.transform"),
    "memory.seed": Gone(0, "learner.seed is the seed of all draws"),
    "memory.image_file": Gone(None, "the memory keeps its images; see memory.images_on"),
    "memory.measured_by": Gone(None, "collisions are measured by the score of memory.eviction"),
    "memory.duplicates": Gone(None, "the learner drops near-duplicates; see learner.novelty"),
    "optimiser.momentum": Gone(0.9, "the momentum of sgd is 0.9"),
    "optimiser.betas": Gone([0.9, 0.999], "the betas of adam and adamw are 0.9 and 0.999"),
    "pace.band": Gone(0, "raise pace.updates_per_sample to make more updates"),
    "learner.stream_share": Gone(0.5, "there are no mixed batches; see learner.anchors"),
    "learner.write_back": Gone(True, "fresh keys always replace the older ones"),
    "learner.keys": Gone("before", "the memory keeps the keys from before the update"),
    "checkpoints.behind": Gone(True, "checkpoints are written while the run learns"),
    "checkpoints.history_bytes": Gone(None, "the history uses a quarter of the free space"),
    "copies.keep": Gone(3, "the bucket keeps the newest 3 copies"),
    "observe.prequential.window": Gone(2048, "the probe covers the last 2048 labelled samples"),
    "observe.prequential.k": Gone(20, "the probe uses 20 neighbours"),
    "observe.prequential.rate": Gone(4.0, "the learning rate of the linear probe is 4.0"),
    "http.producers": Gone(True, "the first 256 producers have a label in the metrics"),
}
"""Removed options by name. `value` is the value that a run without the option always had."""

OLD_FITS = ("resize", "refuse")
"""Former values of `decoder.fit`. Runs with "resize" cropped images, as "crop" does now."""

POLICIES = (
    "hybrid",
    "kappa-bandit",
    "stream_ssl.memory.eviction.Hybrid",
    "stream_ssl.memory.eviction.KappaBandit",
)


def why_refused(option: str, value: object) -> str | None:
    """Return the error about a removed option or a removed value; None if neither applies."""
    if option in REMOVED:
        return f"{option} was removed: {REMOVED[option].now}. Delete the option"
    if (option, value) == ("learner.anchors", "mixed"):
        return 'learner.anchors: the value mixed was removed: choose "stream" or "memory"'
    if option == "decoder.fit" and value in OLD_FITS:
        return f'decoder.fit: the value {value} was removed: choose "crop" or "letterbox"'
    if option.startswith(("memory.eviction", "shadows")) and value in POLICIES:
        return (
            f"the eviction policy {value} was removed: choose another policy, or write "
            "your own class (CONTRIBUTING.md, A policy that learns)"
        )
    return None


def without(config: Mapping[str, Any], path: str = "") -> tuple[dict[str, Any], list[str]]:
    """Return a stored configuration without removed options, and the values that are lost.

    The second part has a line "option: the run's value (now: the present rule)" for each option
    whose value differs from the value that now always holds.
    """
    kept: dict[str, Any] = {}
    lost: list[str] = []
    for name, value in config.items():
        option = f"{path}{name}"
        if (gone := REMOVED.get(option)) is not None:
            if value != gone.value:
                lost.append(f"{option}: {json.dumps(value)} (now: {gone.now})")
        elif option == "decoder.fit" and value in OLD_FITS:
            kept[name] = "crop"
            lost += [f'{option}: "refuse" (now: images are cropped)'] * (value == "refuse")
        elif isinstance(value, Mapping):
            inner, more = without(value, f"{option}.")
            if inner or not value:  # a section that has only removed options leaves with them
                kept[name] = inner
            lost += more
        else:
            kept[name] = value
    return kept, lost


def check_run(config: Mapping[str, Any]) -> None:
    """Raise ValueError if a run depends on a removed feature. The message names it."""
    memory = config.get("memory") or {}
    policy = str((memory.get("eviction") or {}).get("class_path"))
    anchors = (config.get("learner") or {}).get("anchors")
    reason = why_refused("learner.anchors", anchors) or why_refused("memory.eviction", policy)
    if memory.get("image_file"):
        reason = "its images are in a file (memory.image_file), which is no longer supported"
    if reason is not None:
        raise ValueError(
            f"this run cannot continue: {reason}. Begin a new run with its weights: --run "
            "FOLDER --from THIS_RUN"
        )
