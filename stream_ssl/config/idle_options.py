"""The options of a learner that are set and change nothing, for a warning."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from stream_ssl.config.options import LEARNER
from stream_ssl.encoder.network import ResNet
from stream_ssl.learning.pace import Pace
from stream_ssl.learning.settings import LearnerSettings
from stream_ssl.learning.vectors import Vectors
from stream_ssl.learning.views import Chances, Views
from stream_ssl.losses import PositiveDebiased


class Rule(NamedTuple):
    """Options that have no effect while another option has a certain value."""

    idle: bool  # whether they have no effect now
    why: str
    owner: Callable[..., Any]  # its parameters have the defaults
    path: str  # the section, or "loss.init_args"
    options: tuple[str, ...]


def without_effect(config: Mapping[str, Any]) -> list[str]:
    """Return a line for each option of a resolved configuration that is set and changes nothing."""
    return [
        f"{rule.path.partition('.')[0]}.{option} {value!r} has no effect: {rule.why}"
        for rule in _rules(config)
        if rule.idle
        for option, value in _set_options(config, rule)
    ]


def _rules(config: Mapping[str, Any]) -> Iterator[Rule]:
    decoder, learner, loss = config["decoder"], config["learner"], config["loss"]
    dim = (config.get("vectors") or {}).get("dim")
    why = "vectors.dim is null, and the stream consists of images"
    yield Rule(dim is None, why, Vectors, "vectors", ("dtype", "widths", "noise"))

    why = f"vectors.dim is {dim}, and the option applies to images"
    for path, owner in (("views", Views), ("views", Chances), ("encoder", ResNet)):
        yield Rule(dim is not None, why, owner, path, tuple(inspect.signature(owner).parameters))

    model = (config["encoder"].get("model") or {}).get("class_path")
    why = f"encoder.model is {model}"
    yield Rule(model is not None, why, ResNet, "encoder", ("width", "depths", "stem", "block"))

    transform = (config["views"].get("transform") or {}).get("class_path")
    idle, why = transform is not None, f"views.transform is {transform}"
    yield Rule(idle, why, Views, "views", ("crop",))
    yield Rule(idle, why, Chances, "views", ("flip", "jitter", "grey", "blur"))

    why = "images are grey (decoder.channels is 1)"
    yield Rule(decoder["channels"] == 1, why, Chances, "views", ("grey",))

    replays = Pace(**config["pace"]).replays(config["batches"]["batch_size"])
    idle = learner["anchors"] == "stream" and not replays
    why = "nothing is drawn from the memory (learner.anchors is 'stream', without replays)"
    yield Rule(idle, why, LearnerSettings, "learner", ("draw",))

    novelty = None if dim and learner["novelty"] == "auto" else learner["novelty"]
    why = "no sample is dropped as a near-duplicate (learner.novelty is null; auto needs images)"
    yield Rule(novelty is None, why, Pace, "pace", ("counts",))

    mixed = (loss.get("init_args") or {}).get("aggregation") == "mixed"
    idle = loss["class_path"].endswith(".PositiveDebiased") and not mixed
    why = 'loss.aggregation is not "mixed"'
    yield Rule(idle, why, PositiveDebiased, "loss.init_args", ("alpha", "floor"))


def _set_options(config: Mapping[str, Any], rule: Rule) -> Iterator[tuple[str, Any]]:
    """Yield the options of a rule whose values are not the defaults, with their values."""
    values: Any = config
    for name in rule.path.split("."):
        values = values.get(name) or {}
    parameters = inspect.signature(rule.owner).parameters
    for option in rule.options:
        default = parameters[option].default
        default = list(default) if isinstance(default, tuple) else default
        if values.get(option, default) not in (default, LEARNER.get(option, default)):
            yield option, values[option]
