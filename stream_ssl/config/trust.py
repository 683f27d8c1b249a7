"""Restrict the classes that a file of another author may name: an export, or a checkpoint."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, get_type_hints

from jsonargparse import _actions, _typehints, _util

OURS = ("stream_ssl",)
NETWORKS = ("torch.nn", "torchvision", "timm")
"""Packages whose subclasses of `torch.nn.Module` may be named; other classes in them may not."""
BUILDERS = ("torchvision.models", "timm")
"""Packages whose functions may be named, if they are declared to return a network."""
TIMM_FILES = ("checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay")
"""Arguments of `timm.create_model` that name files or addresses, which timm may unpickle."""
DOWNLOADS = ("weights", "weights_backbone", "pretrained")
"""Arguments of torchvision's and timm's builders that start a download."""
DOWNLOADERS = ("torchvision", "timm")

_refused: ContextVar[list[str] | None] = ContextVar("refused", default=None)
_import_object = _util.import_object


@contextmanager
def only_known_classes(whose: str, sections: Any) -> Iterator[None]:
    """Let jsonargparse import only known classes within the block.

    Args:
        whose: the name of the file in the error.
        sections: the content of the file.

    Raises:
        ValueError: the file names another class or function, which was not imported or not used.
    """
    refused: list[str] = []
    token = _refused.set(refused)
    try:
        _check_timm(sections)
        yield
    except Exception as error:
        if not refused:
            raise
        raise _untrusted(whose, refused) from error
    finally:
        _refused.reset(token)
    if refused:  # jsonargparse caught the error and tried another type of the option
        raise _untrusted(whose, refused)


def _untrusted(whose: str, refused: list[str]) -> ValueError:
    return ValueError(
        f"{whose} names {refused[0]}, and loading it would run code of the file's author. "
        "Only networks of stream_ssl, torch.nn, torchvision and timm are loaded by "
        "default. If you trust the author, pass trust_code=True (--trust-code)"
    )


def _guarded(name: str, *arguments: Any, **options: Any) -> Any:
    """Import an object as jsonargparse does; within `only_known_classes`, only a known class."""
    refused = _refused.get()
    if refused is None:
        return _import_object(name, *arguments, **options)
    if not _within(name, (*OURS, *NETWORKS)):
        refused.append(name)
        raise ImportError(f"{name} is not imported")
    try:
        found = _import_object(name, *arguments, **options)
    except (ImportError, AttributeError):  # no such class exists
        raise
    except Exception:  # jsonargparse itself denies some paths
        refused.append(name)
        raise
    if not _known(found):
        refused.append(name)
        raise ImportError(f"{name} is not used")
    return found


def _known(found: Any) -> bool:
    """Return whether a file may name this object. Its defining module and its bases decide.

    An argument without a type may name any class, and jsonargparse makes an object of it. Other
    classes of ours start processes or write files.
    """
    from torch import nn

    from stream_ssl.feed.decode import Decoder
    from stream_ssl.losses import OverSteps
    from stream_ssl.memory.descriptors import Descriptor
    from stream_ssl.memory.eviction import Policy
    from stream_ssl.memory.scores import Score

    home = str(getattr(found, "__module__", ""))
    if isinstance(found, types.FunctionType):
        return _within(home, BUILDERS) and _returns_network(found)
    if not isinstance(found, type):
        return False
    if issubclass(found, nn.Module):
        return _within(home, (*OURS, *NETWORKS))
    parts = Decoder, OverSteps, Descriptor, Policy, Score
    return issubclass(found, parts) and _within(home, OURS)


def _returns_network(function: types.FunctionType) -> bool:
    """Return whether a function is declared to return a network. Others may read a pickle."""
    from torch import nn

    try:
        made = get_type_hints(function).get("return")
    except NameError:  # an annotation names a class that only type checkers import
        return False
    return isinstance(made, type) and issubclass(made, nn.Module)


def without_downloads(value: Any, packages: tuple[str, ...] = DOWNLOADERS) -> Any:
    """Return settings in which no builder of these packages asks for weights.

    A checkpoint and an export hold all weights themselves.
    """
    if isinstance(value, list):
        return [without_downloads(part, packages) for part in value]
    if not isinstance(value, Mapping):
        return value
    kept = {name: without_downloads(part, packages) for name, part in value.items()}
    if _within(str(kept.get("class_path", "")), packages):
        for options in ("init_args", "dict_kwargs"):
            if isinstance(arguments := kept.get(options), dict):
                kept[options] = {k: v for k, v in arguments.items() if k not in DOWNLOADS}
    return kept


def asks_for_download(value: Any) -> bool:
    """Return whether a builder's settings ask for weights that it would download."""
    if not isinstance(value, Mapping):
        return False
    arguments = {**(value.get("init_args") or {}), **(value.get("dict_kwargs") or {})}
    named = _within(str(value.get("class_path", "")), DOWNLOADERS)
    return named and any(arguments.get(name) for name in DOWNLOADS)


def _within(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def _check_timm(value: Any) -> None:
    """Reject arguments that make `timm.create_model` read files or ask a model hub."""
    if isinstance(value, list):
        for part in value:
            _check_timm(part)
    if not isinstance(value, dict):
        return
    if str(value.get("class_path", "")).startswith("timm."):
        arguments = {**(value.get("init_args") or {}), **(value.get("dict_kwargs") or {})}
        named = [name for name in TIMM_FILES if arguments.get(name)]
        if ":" in str(arguments.get("model_name", "")):
            named.append("model_name")
        if named:
            refused = _refused.get()
            assert refused is not None
            refused.append(f"{named[0]} of {value['class_path']}: {arguments[named[0]]!r}")
            raise ImportError(refused[0])
    for part in value.values():
        _check_timm(part)


for _module in (_util, _actions, _typehints):  # each module holds its own reference
    setattr(_module, "import_object", _guarded)  # noqa: B010 - mypy does not know it
