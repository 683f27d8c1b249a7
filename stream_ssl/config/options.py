"""The options of the daemon: one config file for the receiver and the learner.

Each section of the file holds the arguments of one constructor. The parser of a role knows the
sections of its role, and accepts the sections of the other role without a check: the receiver must
not import torch to skip the learner's settings.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from jsonargparse import ArgumentParser, Namespace

from stream_ssl.config.file_faults import check_files
from stream_ssl.config.help import HelpFormatter
from stream_ssl.config.parser import Parser
from stream_ssl.config.removed import REMOVED, why_refused

RECEIVER_SECTIONS = ("receiver", "journal", "access")
LEARNER_SECTIONS = (
    "vectors",
    "decoder",
    "originals",
    "batches",
    "encoder",
    "projector",
    "views",
    "loss",
    "method",
    "memory",
    "shadows",
    "optimiser",
    "schedule",
    "pace",
    "learner",
    "checkpoints",
    "copies",
    "observe",
    "classes",
    "loggers",
    "ranks",
)


DESCRIPTOR: dict[str, Any] = {
    "class_path": "stream_ssl.memory.descriptors.Weighted",
    "init_args": {
        "parts": [
            {"class_path": "stream_ssl.memory.descriptors.Embedding"},
            {"class_path": "stream_ssl.memory.descriptors.Features", "init_args": {"dims": None}},
        ],
        "weights": None,
    },
}
"""The default of `memory.descriptor` (docs/study.md)."""

EVICTION: dict[str, Any] = {
    "class_path": "stream_ssl.memory.eviction.Duel",
    "init_args": {"kappa": 0.1, "index": "exact"},
}
"""The default of `memory.eviction` (docs/study.md)."""

SHARES = 0.5
"""The default of `memory.shares`: the part of an equal share of the slots that a producer keeps."""

LEARNER = {"novelty": "auto", "anchors": "memory", "draw": "epochs", "plain_keys": True}
"""Defaults of `learner`: near-duplicates are dropped, and draws from the memory are trained on."""


@dataclass
class Http:
    """Addresses at which the processes serve their page, /metrics, /healthz and /readyz.

    Args:
        receiver: HOST:PORT of the receiver. Port 0 chooses a free port (see endpoints.json).
        learner: HOST:PORT of the learner.
        public: allow addresses other than loopback without a token. Everyone who can reach the port
            then sees figures, names of producers and images.
        token_file: file of one line with a token of at least 16 characters, mode 600. The page and
            the metrics then require the token, at any address. Prometheus sends the token as a
            bearer token, and people log in with it.
    """

    receiver: str = "127.0.0.1:9108"
    learner: str = "127.0.0.1:9109"
    public: bool = False
    token_file: Path | None = None

    def __post_init__(self) -> None:
        for role in ("receiver", "learner"):
            split_address(getattr(self, role))


@dataclass
class RanksSettings:
    """Settings of the ranks that torchrun started, and of receivers in other folders.

    Args:
        timeout: seconds that a rank waits for another one before it gives up, so that torchrun
            starts all ranks again. Choose more than a checkpoint takes.
        receivers: the run folders of this host's receivers, if hosts or ranks have journals of
            their own. If there are n, the host's rank l reads folder l modulo n. Other hosts may
            name other folders. A folder of another run is refused. Empty: all ranks read the
            journal of the run.
        lost: ids of parked journals whose disks are lost. `parked_journals` does not count them.
    """

    timeout: float = 120.0
    receivers: list[Path] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not 0 < self.timeout <= 1e9:  # the nanoseconds of more overflow in torch
            raise ValueError(
                f"ranks.timeout is {self.timeout}: must be more than 0 and at most 1e9 seconds"
            )


@dataclass
class AccessFiles:
    """Keys and an allow-list of your own, instead of those that the run makes in its folder.

    Args:
        keys: the receiver's NAME.secret.json, which `stream-ssl keys` writes.
        allow: JSON file {"producer name": "public key", ...}. The receiver reads it again when it
            changes.
    """

    keys: Path
    allow: Path


OWN_PARTS = ("encoder.model", "views.transform", "decoder.subclass")
"""Options that name a class or function by its path, and that `build` calls."""


class _Parser(Parser):
    """A parser of the sections of a config file."""

    def instantiate(self, namespace: Namespace, *arguments: Any, **options: Any) -> Namespace:
        """Instantiate as jsonargparse does, and keep `dict_kwargs` of the parts that `build` calls.

        `dict_kwargs` are arguments that a function accepts without naming them, such as those of
        timm's `create_model`. jsonargparse drops them. Here they join `init_args`.
        """
        built: Namespace = super().instantiate(namespace, *arguments, **options)
        for name in OWN_PARTS:
            for key, value in ((namespace.get(name) or {}).get("dict_kwargs") or {}).items():
                built[f"{name}.init_args.{key}"] = value
        return built


def split_address(address: str) -> tuple[str, int]:
    """Return (host, port) of an address HOST:PORT, or raise ValueError."""
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isdecimal()) or host == "*" or "/" in host:
        raise ValueError(
            f"http address {address!r}: give HOST:PORT, for example 127.0.0.1:9108, or "
            "0.0.0.0:9108 for all addresses"
        )
    if len(port) > 5 or int(port) > 65_535:  # Python reads no number of 5000 digits
        raise ValueError(
            f"http address {address!r}: the port must be 1 to 65535, or 0 for a free one"
        )
    return host.strip("[]"), int(port)


def receiver_parser(command: str = "receiver") -> ArgumentParser:
    """Return the parser of the receiver's sections."""
    parser = _parser(command)
    _add_receiver(parser)
    _carry(parser, LEARNER_SECTIONS, "learner")
    if command == "run":
        parser._option_string_actions["--ranks"].help = (
            "number of processes of this host that learn together, by torchrun "
            "(docs/scale.md), and the section of this name; --receivers N starts N "
            "receivers, each with a journal, in the run's folders receiver-0, receiver-1, "
            "...; several ranks can share one"
        )
    return parser


def learner_parser(command: str = "learner") -> ArgumentParser:
    """Return the parser of the learner's sections."""
    parser = _parser(command)
    _add_learner(parser)
    _carry(parser, RECEIVER_SECTIONS, "receiver")
    return parser


def run_parser(command: str = "run") -> ArgumentParser:
    """Return the parser of the sections of both roles."""
    parser = _parser(command)
    _add_receiver(parser)
    _add_learner(parser)
    return parser


def _add_receiver(parser: ArgumentParser) -> None:
    from stream_ssl.journal.journal import Journal
    from stream_ssl.receiver.receiver import Receiver

    _section(
        parser, Receiver, "receiver", skip={"journal", "offsets", "access", "verdicts", "credit"}
    )
    _section(parser, Journal, "journal", skip={"path", "segment_bytes", "check"})
    parser.add_argument(
        "--access",
        type=AccessFiles | Literal["plain"] | None,
        default=None,
        help=(
            "CURVE keys and allow-list; null: the run makes them in RUN/keys, and local "
            "producers find theirs with --run; plain: no encryption and no keys, only on "
            "loopback"
        ),
    )


def _add_learner(parser: ArgumentParser) -> None:
    import stream_ssl.config.names  # noqa: F401  (from here on options take short names)

    _add_feed(parser)
    _add_training(parser)
    _add_memory(parser)
    _add_course(parser)
    _add_observers(parser)


def _add_feed(parser: ArgumentParser) -> None:
    """Add the options of what makes batches from samples."""
    from stream_ssl.feed.batches import Batches
    from stream_ssl.feed.decode import Decoder
    from stream_ssl.feed.originals import KeptOriginals
    from stream_ssl.learning.vectors import Vectors

    _section(parser, Vectors, "vectors")
    _section(parser, Decoder, "decoder")
    parser.add_subclass_arguments(
        Decoder,
        "decoder.subclass",
        skip={"size", "channels", "max_pixels", "fit"},
        instantiate=False,
        required=False,
        default=None,
        help="class path of your own Decoder, made with the options above and its init_args",
    )
    _section(parser, KeptOriginals, "originals", skip={"folder", "shape", "held"})
    _section(
        parser,
        Batches,
        "batches",
        skip={
            *("reader", "decoder", "quarantine", "start", "clock", "share", "originals"),
            "processes",
        },
    )


def _add_training(parser: ArgumentParser) -> None:
    """Add the options of the networks, the views, the loss and the method."""
    from stream_ssl.config.names import choices
    from stream_ssl.encoder.network import Projector, ResNet
    from stream_ssl.learning.views import Views
    from stream_ssl.losses import Loss
    from stream_ssl.methods import Method

    _section(parser, ResNet, "encoder", skip={"channels"})
    _add_model(parser)
    _section(parser, Projector, "projector", skip={"features"})
    _section(parser, Views, "views", skip={"size", "channels", "colour"})
    parser.add_subclass_arguments(
        Loss, "loss", default={"class_path": "infonce"}, help=choices(Loss)
    )
    parser.add_subclass_arguments(
        Method,
        "method",
        skip={"encoder", "projector", "loss"},
        instantiate=False,
        default={"class_path": "moco"},
        help=choices(Method),
    )


def _add_memory(parser: ArgumentParser) -> None:
    from stream_ssl.memory import WorkingMemory
    from stream_ssl.memory.eviction import Policy

    own = {"dim", "image_shape", "device", "dtype", "group", "seed", "measured_by", "payload"}
    _section(parser, WorkingMemory, "memory", skip={*own, "duplicates"})
    parser.set_defaults(
        {
            "memory.descriptor": DESCRIPTOR,
            "memory.eviction": EVICTION,
            "memory.shares": SHARES,
        }
    )
    parser.add_argument(
        "--shadows",
        type=dict[str, Policy],
        default={},
        help=(
            "memories beside the working memory, which receive the same embeddings under "
            "another policy"
        ),
    )


def _add_course(parser: ArgumentParser) -> None:
    """Add the options of the course of a run: its steps, its checkpoints and its ranks."""
    from stream_ssl.buckets.copies import CopySettings
    from stream_ssl.learning.checkpoint import Checkpointer
    from stream_ssl.learning.optimiser import OptimiserSettings
    from stream_ssl.learning.pace import Pace
    from stream_ssl.learning.schedule import Schedule
    from stream_ssl.learning.settings import LearnerSettings

    _section(parser, OptimiserSettings, "optimiser")
    parser.add_argument(
        "--schedule", type=Schedule, default=None, help="schedule of the learning rate"
    )
    _section(parser, Pace, "pace")
    _section(parser, LearnerSettings, "learner", skip={"write_back"})
    parser.set_defaults({f"learner.{name}": value for name, value in LEARNER.items()})
    _section(parser, Checkpointer, "checkpoints", skip={"folder", "ranks"})
    parser.add_class_arguments(CopySettings, "copies")
    parser.add_class_arguments(RanksSettings, "ranks")


def _add_observers(parser: ArgumentParser) -> None:
    """Add the options of what measures a run and of where its measurements go."""
    from stream_ssl.observe import loggers
    from stream_ssl.observe.held_out import HeldOut

    parser.add_argument(
        "--observe.held_out",
        type=HeldOut | str | None,
        default=None,
        help=(
            "labelled set for a kNN and a linear probe at regular steps: NAME:PLACE, such as "
            "images:FOLDER, or source, every, k, references_per_class, queries_per_class"
        ),
    )
    parser.add_argument(
        "--classes", type=int, default=0, help="number of classes, if labels are known"
    )
    parser.add_argument(
        "--loggers",
        type=list[loggers.Name],
        default=[],
        help="loggers that also get the metrics and pictures of the memory: tensorboard, wandb, "
        "mlflow",
    )


def _add_model(parser: ArgumentParser) -> None:
    from torch.nn import Module

    add = parser.add_argument
    parser.add_subclass_arguments(
        Module,
        "encoder.model",
        instantiate=False,
        required=False,
        default=None,
        help="class path of another network, such as torchvision.models.resnet18, with its "
        "init_args; null: the ResNet of width, depths, stem and block",
    )
    add(
        "--encoder.head",
        type=str | None,
        default=None,
        help=(
            "layer of encoder.model that is removed, so that the model gives features: fc "
            "of torchvision's ResNets"
        ),
    )
    add(
        "--encoder.weights",
        type=Path | None,
        default=None,
        help="safetensors file with the first weights of a new run's encoder",
    )
    add(
        "--encoder.frozen",
        type=list[str],
        default=[],
        help=(
            "stages that are not trained, such as [conv1, bn1, layer1]; their BatchNorm "
            "uses its stored averages"
        ),
    )


def read(parser: ArgumentParser, arguments: Sequence[str]) -> Namespace:
    """Parse the arguments of a command. The config file may stand first, without `--config`.

    A wrong argument exits with status 2 and a message, as in argparse. `--print_config` prints the
    sections of both roles and exits.
    """
    arguments = list(arguments)
    if arguments and not arguments[0].startswith("-"):
        arguments.insert(0, "--config")
    if any(argument.partition("=")[0] == "--print_config" for argument in arguments):
        parser = run_parser(parser.prog.split()[-1])
    check_files(parser, arguments)
    gone = {_variable(option): option for option in REMOVED}
    if lines := [
        f"{variable} is set: {why_refused(option, None)}"
        for variable, option in gone.items()
        if variable in os.environ
    ] or [*_wrong_variables(parser)]:
        parser.error("\n".join(lines))
    if any(action.dest == "observe.held_out" for action in parser._actions):
        from stream_ssl.config.names import with_source

        arguments = with_source(arguments)
    return parser.parse_args(arguments)


def _variable(option: str) -> str:
    """Return the environment variable of an option."""
    return f"STREAM_SSL_{option.replace('.', '__').upper()}"


def _wrong_variables(parser: ArgumentParser) -> Iterator[str]:
    """Yield an error for each environment variable that names no option of the parser's sections.

    Names with single underscores count only if they spell an option. Others are not for the parser,
    such as STREAM_SSL_RECEIVER_PORT, which Kubernetes sets for a Service.
    """
    every = {_variable(action.dest) for action in parser._actions}
    known = {name for name in every if not name.endswith("__HELP")}
    for name in sorted(os.environ.keys() & known):
        yield from _wrong_value(name, os.environ[name])
    single = {name.replace("__", "_"): name for name in known}
    carried = tuple(_variable(one.strip("-")) for one in getattr(parser, "carried", ()))
    for name in sorted(os.environ.keys() - known):
        if name.startswith("STREAM_SSL_") and "__" in name and not name.startswith(carried):
            close = difflib.get_close_matches(name, known, 1)
        else:
            close = [single[name]] if name in single else []
            if not close:
                continue
        meant = f"did you mean {close[0]}?" if close else "remove it"
        for of_class in sorted(one.removesuffix("__HELP") for one in every - known):
            if name.startswith(f"{of_class}__"):  # an argument of the class
                whole = "{class_path: NAME, init_args: {OPTION: VALUE}}"
                whole = "{NAME: POLICY}" if of_class == "STREAM_SSL_SHADOWS" else whole
                meant = f"write all of it in {of_class}, as YAML, such as {whole}"
        yield f"{name} is set, and there is no such option; {meant}"


def _wrong_value(name: str, value: str) -> Iterator[str]:
    """Yield an error if a program has set a variable to other text than its file seems to hold."""
    if value != value.encode(errors="ignore").decode():
        yield f"{name} is {value!r}: is not UTF-8; rename the file or folder, or link to it"
    elif value.endswith("\r"):
        yield (
            f"{name} is {value!r}: must not end with a carriage return; save the file that sets "
            "it with Unix line ends"
        )
    elif len(value) > 1 and value[0] == value[-1] and value[0] in "\"'":
        bare = value[1:-1]
        yield f"{name} is {value}: must have no quotes, which only shells remove; write {bare}"


def resolved(parser: ArgumentParser, settings: Namespace, complete: bool = True) -> dict[str, Any]:
    """Return the settings as plain JSON values: defaults, file, environment, command line.

    Null values are kept. Without them, the options would get their defaults when the result is
    parsed again. Settings that are not `complete` lack required options.
    """
    text = parser.dump(settings, format="json", skip_unset=False, skip_validation=not complete)
    values: dict[str, Any] = json.loads(text)
    return values


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return nested settings as {"memory.capacity": "2048"}, for `config_info` and for logs."""
    items: dict[str, str] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            items |= flat(value, f"{prefix}{name}.")
        else:
            items[prefix + name] = str(value)
    return items


def _parser(command: str) -> Parser:
    parser = _Parser(
        prog=f"stream-ssl {command}",
        usage=f"stream-ssl {command} CONFIG [--SECTION.OPTION VALUE ...]",
        description=(
            "The config file has a section for each part. Each option may also be given "
            "on the command line, or in the environment: "
            "STREAM_SSL_MEMORY__CAPACITY=4096. Some options name a class by a short name "
            "or its path; --loss.help infonce shows that class's options."
        ),
        default_env=True,
        env_prefix="STREAM_SSL",
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--config", action="config", help="config file (YAML)")
    parser.add_argument("--run", type=Path, default=Path("runs/default"), help="the run's folder")
    parser.add_argument(
        "--from",
        type=Path | None,
        default=None,
        metavar="CHECKPOINT",
        help=(
            "begin a new run with the weights of this checkpoint, or of this run's newest "
            "checkpoint, and with its memory if that fits; no effect once the run has "
            "checkpoints of its own"
        ),
    )
    parser.add_class_arguments(Http, "http")
    return parser


def _section(parser: ArgumentParser, cls: type, name: str, skip: set[str] | None = None) -> None:
    parser.add_class_arguments(cls, name, skip=skip or set(), instantiate=False)


def _unchecked(value: Any) -> Any:
    return value


def _carry(parser: Parser, sections: Sequence[str], role: str) -> None:
    """Accept the sections of the other role without a check.

    The parser would import the classes that a section names if its type were a dict. A list has a
    type, with which `--loggers+=NAME` adds to it.
    """
    parser.carried = tuple(f"--{name}." for name in sections)
    for name in sections:
        parser.add_argument(
            f"--{name}",
            type=dict | list[str] | int | str | None if name == "loggers" else _unchecked,
            default=None,
            help=f"a section of the {role}; stream-ssl {role} --help lists its options",
        )
