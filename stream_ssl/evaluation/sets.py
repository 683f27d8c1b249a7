"""Turn NAME:PLACE on the command line into readers of references and queries."""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Mapping, Sequence, Set
from itertools import zip_longest
from typing import Any

from jsonargparse import ArgumentParser

from stream_ssl.evaluation.labelled import Division, Reader
from stream_ssl.feed.large_pictures import OneByOne
from stream_ssl.producers.sources import SOURCES
from stream_ssl.producers.sources.outside import build_source, find_source, listed

LABELLED = tuple(name for name in SOURCES if name != "watch")
"""Names of the sources that end and may carry labels."""

CLASS_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")

FIXED = {"split", "shuffle", "seed", "epochs"}
"""Options of a source that the evaluation sets itself."""

SPLITS = {"train", "training", "test", "testing", "val", "valid", "validation"}
"""Names of folders that separate training from test images, above the folders of the classes."""


def parse(spec: str) -> tuple[str, str | None]:
    """Return a source's name and the place of its data; None if the place is not given.

    Raises:
        ValueError: the source is unknown.

    >>> parse("cifar:data/cifar10")
    ('cifar', 'data/cifar10')
    """
    name, colon, where = spec.partition(":")
    if name not in LABELLED:
        known = f"{spec!r} must begin with one of {', '.join(LABELLED)}, such as cifar:FOLDER"
        if name in SOURCES or not (name in listed() or CLASS_PATH.fullmatch(name)):
            raise ValueError(known)
        try:
            find_source(name)
        except ValueError as error:
            raise ValueError(f"{known}, or with the path of a class of yours: {error}") from error
    if name == "synthetic" and colon:
        raise ValueError(
            f"{spec!r}: the synthetic source has no place: use --data synthetic --source.count 2000"
        )
    if colon and not inspect.signature(find_source(name)).parameters:
        raise ValueError(f"{spec!r}: this source has no place: use --data {name}")
    return name, where if colon else None


def add_source(
    parser: ArgumentParser, arguments: Sequence[str], fixed: Set[str] = frozenset(FIXED)
) -> str | None:
    """Add the options of the source that --data names, under "source". Return the source's name.

    The options are those of `stream-ssl produce`, without the `fixed` ones. Without --data, the
    result is None. An unknown source exits with status 2.
    """
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--data")
    spec = first.parse_known_args(list(arguments))[0].data
    if spec is None:
        return None
    try:
        name, where = parse(spec)
    except ValueError as error:
        parser.error(f"--data {error}")
    # The seed of the synthetic source sets its images, not their order.
    skip = fixed - {"seed"} if name == "synthetic" else fixed
    parser.add_class_arguments(find_source(name), "source", skip=set(skip))
    if where is not None:
        parser.set_defaults({f"source.{place_of(name)}": where})
    return name


def source_of(spec: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the options of the source NAME:PLACE: its test images in stored order.

    Raises:
        ValueError: the source is unknown, or the place is not given.
    """
    name, where = parse(spec)
    if not where:
        raise ValueError(f"{spec!r} names no place; write NAME:PLACE, such as images:FOLDER")
    options: dict[str, Any] = {place_of(name): where}
    if has_splits(name, options):
        options["split"] = "test"
    if "passes" in inspect.signature(find_source(name)).parameters:
        options["shuffle"] = False
    return name, options


def place_of(name: str) -> str:
    """Return the name of a source's first argument, which says where its data is."""
    return next(iter(inspect.signature(find_source(name)).parameters))


def has_splits(name: str, options: Mapping[str, Any]) -> bool:
    """Return whether a source separates training from test images."""
    splits = "split" in inspect.signature(find_source(name)).parameters
    return splits and options.get("images") is None


def check_ends(name: str, options: Mapping[str, Any]) -> None:
    """Raise ValueError for the synthetic source without a count, which never ends."""
    if name == "synthetic" and options.get("count") is None:
        raise ValueError("the synthetic source never ends: limit it with --source.count 2000")


def make(name: str, options: Mapping[str, Any], seed: int | None, **more: Any) -> Any:
    """Return a source that ends, in an order that `seed` shuffles; None: in stored order.

    Shuffling matters because batches of a single class would spoil embeddings that are normalised
    by the statistics of their batch.

    Raises:
        ValueError, FileNotFoundError: raised by the source.
    """
    given = {key: value for key, value in options.items() if value is not None} | more
    if "passes" in inspect.signature(find_source(name)).parameters:
        given |= {"shuffle": seed is not None, "seed": seed or 0, "epochs": 1}
    check_ends(name, given)
    return build_source(find_source(name), given)


def readers(
    name: str,
    options: Mapping[str, Any],
    references: str | None,
    decoder: OneByOne,
    division: Division,
    batch: int,
    seed: int,
) -> list[Reader]:
    """Return readers that yield references and queries.

    A set with splits yields its training images as references and its test images as queries.
    Another set is divided. If `references` names a set, the source yields queries only.

    Args:
        name, options: the source.
        references: NAME:PLACE of a set that is used whole as references; None: use the source.
        decoder: the decoder of the encoder's run.
        batch: images in a batch.
        seed: seed of the order.

    Raises:
        ValueError, FileNotFoundError: a source cannot be built.
    """
    limits = (division.references_per_class, division.queries_per_class)
    all_references, all_queries = Division(0, *limits), Division(1, *limits)
    splits = has_splits(name, options)
    if references is None and not splits:
        whole = Reader(make(name, options, seed), decoder, division, batch)
        _check_no_splits(name, options, whole.class_names or [])
        return [whole]
    if references is None:
        source = make(name, options, seed, split="train")
    else:
        other, where = parse(references)
        place = {} if where is None else {place_of(other): where}
        source = make(
            other, place, seed, **({"split": "train"} if has_splits(other, place) else {})
        )
    test = make(name, options, seed, **({"split": "test"} if splits else {}))
    found = [
        Reader(source, decoder, all_references, batch),
        Reader(test, decoder, all_queries, batch),
    ]
    _check_same_classes(*(reader.class_names for reader in found))
    return found


def _check_no_splits(name: str, options: Mapping[str, Any], folders: Sequence[str]) -> None:
    """Raise an error if the folders of a set are its splits, rather than its classes."""
    if len(folders) > 1 and {folder.lower() for folder in folders} <= SPLITS:
        place = options[place_of(name)]
        train, *others = sorted(folders, key=lambda one: not one.lower().startswith("train"))
        raise ValueError(
            f"{place} contains {', '.join(folders)}, and each folder in it would "
            f"count as a class: use --data {name}:{place}/{others[0]} --references "
            f"{name}:{place}/{train}"
        )


def _check_same_classes(first: Sequence[str] | None, second: Sequence[str] | None) -> None:
    if first is None or second is None or first == second:
        return
    at = next(n for n, (a, b) in enumerate(zip_longest(first, second)) if a != b)
    one, other = (repr(names[at]) if at < len(names) else "none" for names in (first, second))
    raise ValueError(
        f"references and queries have different classes: class {at} is {one} in the references "
        f"and {other} in the queries. Classes are numbered by the sorted names of their "
        "folders, or as a Parquet file names them, so both sets need the same names in the "
        "same order"
    )
