"""The work of `stream-ssl evaluate`, step by step.

Shapes: T tasks.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from jsonargparse import Namespace
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from stream_ssl.config import build
from stream_ssl.evaluation import sets
from stream_ssl.evaluation.continual import divide, summarise
from stream_ssl.evaluation.encoding import Encoded, encode
from stream_ssl.evaluation.labelled import Division, Reader, shared_queries
from stream_ssl.evaluation.linear import PROBES
from stream_ssl.evaluation.measures import Measures, check, measure, task_accuracies
from stream_ssl.evaluation.neighbours import knn_accuracy
from stream_ssl.evaluation.report import JSON, ContinualMeasures, Evaluation, table, write
from stream_ssl.feed.large_pictures import for_own_files
from stream_ssl.process.failures import check_writable, configuring, writing
from stream_ssl.process.progress import ShownProgress
from stream_ssl.rate_limited_logger import printable
from stream_ssl.trained import encoder
from stream_ssl.trained.encoder import Encoder

log = logging.getLogger("stream_ssl.evaluate")

STAGE = "stage {}"


def evaluate(settings: Namespace, name: str) -> Evaluation:
    """Evaluate on the source `name` as the command line asks, write the report, print the table."""
    with configuring():
        check_settings(settings)
        sets.check_ends(name, _source_options(settings))
        checkpoint, stored, readers, asked = encoder.read_newest(
            settings.checkpoint, lambda path: _parts(settings, name, path)
        )
    text = TextColumn("{task.description}")
    columns = (text, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with (
        ShownProgress(*columns) as progress,
        configuring("lower --batch, --references_per_class or --queries_per_class"),
    ):
        found = _encode(readers, asked, settings, progress)
        tasks = _tasks(settings, found["trained"])
        measures = _measure(found, settings, progress)
    notes = _notes(readers, found["trained"])
    for note in notes:
        log.warning("%s", note)
    evaluation = Evaluation(
        _facts(settings, checkpoint, stored, found["trained"]),
        measures,
        None if tasks is None else _continual(found, tasks, min(settings.k)),
        notes,
    )
    console = Console(emoji=False)
    console.print(table(evaluation))  # before the files, which a full disk may reject
    names = _names(readers, measures["trained"].classes)
    with writing("--out", settings.out):
        write(settings.out, evaluation, found["trained"], names)
    console.print(f"report and plots: {settings.out / 'report.md'}", soft_wrap=True, markup=False)
    return evaluation


def check_settings(settings: Namespace) -> None:
    """Raise ValueError if the options cannot work, before anything is read."""
    if min(settings.k) < 1:
        raise ValueError(f"--k {min(settings.k)}: must be at least 1")
    for probe in settings.probes:
        if probe not in PROBES:
            raise ValueError(f"--probes {probe}: choose from {', '.join(PROBES)}")
    if settings.batch < 2:
        raise ValueError(f"--batch {settings.batch}: must be at least 2")
    if settings.tasks in (0, []) or (isinstance(settings.tasks, int) and settings.tasks < 0):
        raise ValueError(f"--tasks {settings.tasks}: must be at least 1; or leave it out")
    tasks = len(settings.tasks) if isinstance(settings.tasks, list) else settings.tasks
    if bool(settings.stages) != bool(tasks):
        raise ValueError(
            "--stages and --tasks must be given together: the checkpoints after each "
            "task, and the number of tasks"
        )
    if settings.stages and tasks != len(settings.stages):
        raise ValueError(
            f"{tasks} --tasks and {len(settings.stages)} --stages: give one checkpoint "
            "for each task, in the order of the stream"
        )
    build.check_device(settings.device)
    check_writable(settings.out, "--out", "choose another folder")
    out = settings.out.resolve()
    files = sorted(path.name for path in out.iterdir()) if out.is_dir() else []
    if files and JSON not in files:
        raise ValueError(
            f"--out {settings.out} holds {files[0]} and no earlier evaluation, which would be "
            "replaced: choose a new or an empty folder"
        )


def _parts(
    settings: Namespace, name: str, checkpoint: Path
) -> tuple[Path, Mapping[str, Any], list[Reader], dict[str, Encoder]]:
    """Return a checkpoint, its facts, the readers of the data, and the encoders.

    The readers come first, because they find at once that the data is not there.
    """
    stored = encoder.facts(checkpoint)
    decoder = build.decoder(
        encoder.stored_settings(stored["config"], trust_code=settings.trust_code)
    )
    division = Division(
        settings.query_share, settings.references_per_class, settings.queries_per_class
    )
    readers = sets.readers(
        name,
        _source_options(settings),
        settings.references,
        for_own_files(decoder),
        division,
        settings.batch,
        settings.seed,
    )
    return checkpoint, stored, readers, _encoders(settings, checkpoint)


def _encoders(settings: Namespace, checkpoint: Path) -> dict[str, Encoder]:
    how = settings.of, settings.device, settings.trust_code
    asked = {"trained": encoder.load_encoder(checkpoint, *how)}
    if settings.untrained:
        asked["untrained"] = encoder.fresh_encoder(encoder.facts(checkpoint)["config"], *how)
    if settings.decorrelated is not None:
        other = encoder.find(settings.decorrelated)
        asked["decorrelated"] = encoder.load_encoder(
            _alike(checkpoint, other, settings.trust_code), *how
        )
    for number, path in enumerate(settings.stages or [], start=1):
        stage = _alike(checkpoint, encoder.find(path), settings.trust_code)
        asked[STAGE.format(number)] = encoder.load_encoder(stage, *how)
    return asked


def _alike(checkpoint: Path, other: Path, trust_code: bool) -> Path:
    """Return `other`. Reject it if the two encoders take different samples."""
    first, second = (_samples(path, trust_code) for path in (checkpoint, other))
    if first != second:
        raise ValueError(
            f"{other} was trained on {second}, {checkpoint} on {first}: compare checkpoints of the "
            "same images or vectors"
        )
    return other


def _samples(checkpoint: Path, trust_code: bool) -> str:
    """Return a description of the samples that a checkpoint's encoder takes."""
    config = encoder.facts(checkpoint)["config"]
    settings = encoder.stored_settings(config, trust_code=trust_code)
    if (vectors := build.vectors(settings)) is not None:
        return f"vectors of {vectors.dim} numbers as {vectors.dtype}"
    decoder = settings.decoder.as_dict()
    del decoder["max_pixels"]  # a run may change it
    return f"images of decoder {decoder}"


def _source_options(settings: Namespace) -> dict[str, Any]:
    return settings.source.as_dict() if "source" in settings else {}


def _encode(
    readers: list[Reader],
    asked: Mapping[str, Encoder],
    settings: Namespace,
    progress: Progress,
) -> dict[str, Encoded]:
    lengths = [reader.length for reader in readers]
    known = [length for length in lengths if length is not None]
    total = sum(known) if len(known) == len(lengths) else None
    bar = progress.add_task("reading and encoding", total=total)

    def tell(_images: int) -> None:
        progress.update(bar, completed=sum(reader.seen for reader in readers))

    most = settings.references_per_class, settings.queries_per_class
    log.info(
        "reading %s samples; %s encodes %s references and %s queries per class",
        *("all" if total is None else total, ", ".join(asked)),
        *("all" if one is None else one for one in most),
    )
    try:
        found = encode(readers, asked, settings.seed, tell)
    except ValueError as error:
        if left_out := _left_out(readers):
            raise ValueError(f"{error} ({left_out})") from error
        raise
    progress.update(bar, total=sum(reader.seen for reader in readers))
    check(found["trained"], settings.k)
    return found


def _measure(
    found: Mapping[str, Encoded], settings: Namespace, progress: Progress
) -> dict[str, Measures]:
    measures = {}
    for name in (name for name in ("trained", "untrained", "decorrelated") if name in found):
        bar = progress.add_task(name, total=1)
        log.info("measuring %s: neighbours, linear probes, geometry", name)

        def tell(what: str, done: int, total: int, bar: Any = bar, name: str = name) -> None:
            progress.update(bar, description=f"{name}: {what}", completed=done, total=total)

        measures[name] = measure(found[name], settings.k, settings.probes, settings.device, tell)
        progress.update(bar, completed=1, total=1)
    return measures


def _tasks(settings: Namespace, encoded: Encoded) -> list[list[int]] | None:
    if not settings.stages:
        return None
    if isinstance(settings.tasks, int):
        return divide(torch.unique(encoded.label_Q).tolist(), settings.tasks)
    tasks: list[list[int]] = settings.tasks
    named = [label for task in tasks for label in task]
    if not all(tasks) or len(set(named)) < len(named):
        raise ValueError(
            f"--tasks {tasks}: each task needs a class, and each class may be in only one task"
        )
    task_accuracies(dict.fromkeys(torch.unique(encoded.label_Q).tolist(), 0.0), tasks)
    return tasks


def _continual(found: Mapping[str, Encoded], tasks: list[list[int]], k: int) -> ContinualMeasures:
    def accuracies(encoded: Encoded) -> list[float]:
        result = knn_accuracy(
            encoded.query_QF, encoded.label_Q, encoded.reference_NF, encoded.label_N, k
        )
        return task_accuracies(result.per_class, tasks)

    stages = [accuracies(found[STAGE.format(n + 1)]) for n in range(len(tasks))]
    before = accuracies(found["untrained"]) if "untrained" in found else None
    return ContinualMeasures(tasks, stages, before, k, summarise(stages, before))


def _notes(readers: Sequence[Reader], encoded: Encoded) -> list[str]:
    seen = sum(reader.seen for reader in readers)
    notes = [f"{left_out}."] if (left_out := _left_out(readers)) else []
    if scaled := sum(reader.scaled for reader in readers):
        notes.append(
            f"{scaled:,} of {seen:,} raw images had another size or colour format than "
            "the encoder was trained on, and were converted by the run's decoder."
        )
    shared, queries = shared_queries(readers)
    if shared:
        notes.append(
            f"Queries with the same pixels as a reference: {shared:,} of {queries:,}. So the "
            "accuracies are too high: give two sets without common pictures."
        )
    if untested := sorted(set(encoded.label_N.tolist()) - set(encoded.label_Q.tolist())):
        names = _names(readers, untested)
        named = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        notes.append(
            f"Classes with references and without queries: {named}. No accuracy measures them: "
            "give more samples of them, or without --references a larger --query_share."
        )
    classes = len(torch.unique(encoded.label_Q))
    if len(encoded.label_Q) < 100 * classes:
        notes.append(
            f"{len(encoded.label_Q):,} queries of {classes} classes are few: the standard "
            "errors are large."
        )
    return notes


def _left_out(readers: Sequence[Reader]) -> str:
    """Return a clause with the number of samples that were left out, or ""."""
    if not (refused := sum(reader.refused.total() for reader in readers)):
        return ""
    reasons = ", ".join(sorted({reason for reader in readers for reason in reader.refused}))
    seen = sum(reader.seen for reader in readers)
    return f"{refused:,} of {seen:,} samples were left out ({reasons})"


def _names(readers: Sequence[Reader], classes: Sequence[int]) -> list[str]:
    """Return the names of the classes if the source has them, else their numbers.

    Plots cannot show names of folders that are not UTF-8.
    """
    names = next((found for reader in readers if (found := reader.class_names)), [])
    return [printable(names[c]) if c < len(names) else str(c) for c in classes]


def _facts(
    settings: Namespace, checkpoint: Path, stored: Mapping[str, Any], encoded: Encoded
) -> dict[str, Any]:
    created = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(float(stored["created"])))
    return {
        "checkpoint": str(checkpoint),
        "step": int(stored["step"]),
        "samples": int(stored["samples"]),
        "created": created,
        "data": settings.data,
        "references_from": settings.references,
        "of": settings.of,
        "device": settings.device,
        "seed": settings.seed,
        "references": len(encoded.label_N),
        "queries": len(encoded.label_Q),
        "stages": [str(path) for path in settings.stages or []],
        "decorrelated": None if settings.decorrelated is None else str(settings.decorrelated),
    }
