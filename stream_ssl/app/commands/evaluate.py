"""stream-ssl evaluate: measure a checkpoint's encoder on a labelled set."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from stream_ssl.config.parser import Parser, command_parser
from stream_ssl.process.failures import TRUST_CODE, reported
from stream_ssl.process.threads import share_cores

DESCRIPTION = """Evaluates a checkpoint's encoder on a labelled set that it was not trained on:
weighted nearest neighbours, linear probes, retrieval, and the geometry of its features. The test
is balanced: each class has the same number of queries. Writes evaluation.json, report.md and
plots, and prints a table. docs/evaluation.md explains every measure."""

EXAMPLES = """examples:
  stream-ssl evaluate runs/laptop --data cifar:data/cifar10
  stream-ssl evaluate runs/laptop/checkpoints/step-000004000 --data images:held-out --k 5 20
  stream-ssl evaluate runs/bursts --data idx:data --decorrelated runs/shuffled
  stream-ssl evaluate runs/tasks --data cifar:data/cifar10 --tasks 2 --stages STEP-A STEP-B

--help together with --data NAME also lists that source's options."""


def main(arguments: Sequence[str]) -> int:
    """Evaluate an encoder, and return the exit status."""
    share_cores()
    from stream_ssl.evaluation import sets

    parser = evaluate_parser()
    name = sets.add_source(parser, arguments)
    settings = parser.parse_args(list(arguments))

    assert name is not None, "--data is required"

    def work() -> None:
        from stream_ssl.trained.evaluate import evaluate

        evaluate(settings, name)

    return reported(work)


def evaluate_parser() -> Parser:
    """Return the parser of all options except the source's own."""
    parser = command_parser(
        "evaluate CHECKPOINT --data NAME:PLACE [OPTIONS]", DESCRIPTION, EXAMPLES
    )
    add = parser.add_argument
    add("checkpoint", type=Path, help="folder of a run (its newest checkpoint) or of a checkpoint")
    add(
        "--data",
        required=True,
        help=(
            "labelled set, NAME:PLACE with a NAME that `stream-ssl produce` knows: "
            "cifar:FOLDER, idx:FOLDER, images:FOLDER, webdataset:SHARDS, parquet:FILES, synthetic. "
            "cifar and idx: training images are references, and test images are queries; other "
            "sets are divided"
        ),
    )
    add(
        "--references",
        type=str | None,
        default=None,
        help="NAME:PLACE of another set for the references; --data then gives only queries",
    )
    add(
        "--query_share",
        type=float,
        default=0.2,
        help="share of the queries if the set is divided, 0 to 1",
    )
    add(
        "--references_per_class",
        type=int | None,
        default=None,
        help="maximum number of references per class",
    )
    add(
        "--queries_per_class",
        type=int | None,
        default=None,
        help="maximum number of queries per class",
    )
    add("--out", type=Path, default=Path("evaluation"), help="folder for the report")
    add(
        "--of",
        type=Literal["features", "embeddings"],
        default="features",
        help="features of the backbone, or embeddings of the projector, which the memory holds",
    )
    add(
        "--k", type=int, nargs="+", default=[20, 200], help="numbers of neighbours of the kNN probe"
    )
    add(
        "--probes",
        type=str,
        nargs="*",
        default=["duel", "debiased"],
        help=(
            "linear probes with the settings of the duel paper (SGD), the debiased papers "
            "(Adam), or convex (L-BFGS on standardised features: no learning rate)"
        ),
    )
    add("--untrained", type=bool, default=True, help="also evaluate the same network untrained")
    add(
        "--decorrelated",
        type=Path | None,
        default=None,
        help=(
            "run or checkpoint trained on the same samples in random order; prints the "
            "share of its accuracy that this run reaches"
        ),
    )
    add(
        "--tasks",
        type=int | list[list[int]] | None,
        default=None,
        help=(
            "tasks of the stream: their number, with the classes in the order of the "
            "labels; or the classes of each task, as [[4,1],[0,3]]"
        ),
    )
    add(
        "--stages",
        type=Path,
        nargs="*",
        default=[],
        help="one checkpoint after each task; prints average accuracy, forgetting and transfer",
    )
    add("--device", type=str, default="cpu", help='"cpu", "cuda" or "cuda:1"')
    add("--batch", type=int, default=256, help="samples in one pass of the encoder")
    add("--trust-code", action="store_true", help=TRUST_CODE)
    add("--seed", type=int, default=0, help="seed of all draws: order, balance, augmented views")
    return parser
