"""Build the learner's objects from the settings. The functions follow the path of a sample."""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from jsonargparse import Namespace
from torch import Tensor, nn

from stream_ssl.batch import START, Offset
from stream_ssl.buckets.folders import Bucket
from stream_ssl.config.trust import DOWNLOADERS, without_downloads
from stream_ssl.encoder.network import (
    Model,
    Projector,
    ResNet,
    called,
    freeze_stages,
    load_weights,
)
from stream_ssl.evaluation import sets
from stream_ssl.evaluation.labelled import Labelled
from stream_ssl.feed.batches import Batches
from stream_ssl.feed.decode import Decoder, VectorDecoder
from stream_ssl.feed.journal_tasks import JournalShare
from stream_ssl.feed.originals import KeptOriginals
from stream_ssl.feed.quarantine import Quarantine, quarantine_folder
from stream_ssl.journal.reader import JournalReader
from stream_ssl.learning import randomness
from stream_ssl.learning.checkpoint import Checkpointer
from stream_ssl.learning.checkpoint_layout import FOLDER
from stream_ssl.learning.compatibility import check_batch, check_labels
from stream_ssl.learning.learner import Learner, Stream
from stream_ssl.learning.optimiser import OptimiserSettings
from stream_ssl.learning.pace import Pace
from stream_ssl.learning.ranks import Ranks
from stream_ssl.learning.settings import LearnerSettings
from stream_ssl.learning.vectors import MLP, Vectors, VectorViews
from stream_ssl.learning.views import Views
from stream_ssl.memory import WorkingMemory
from stream_ssl.memory.checks import check_seed
from stream_ssl.memory.descriptors import Embedding, Vector
from stream_ssl.memory.eviction import Policy
from stream_ssl.memory.process_group import SINGLE_PROCESS, RankGroup
from stream_ssl.methods import Method
from stream_ssl.observe.catalogue import WORKING
from stream_ssl.observe.held_out import HeldOut, HeldOutProbe
from stream_ssl.observe.logger_process import Deadline, LoggerProcess
from stream_ssl.observe.loggers import Logger, TensorBoard
from stream_ssl.observe.page.picture_search import PictureSearch
from stream_ssl.observe.shadow import Shadow, StepDescriptor
from stream_ssl.process.failures import first_line, section
from stream_ssl.process.limits import main_memory
from stream_ssl.producers._images import as_sample


def method(settings: Namespace) -> Method:
    """Return the method, with weights drawn from `learner.seed`.

    `settings` must come from `parser.instantiate`, as for all functions of this module.
    """
    with section("learner"):
        randomness.seed_everything(check_seed(settings.learner.seed))
    encoder = backbone(settings)
    if settings.memory.descriptor is not None:
        settings.memory.descriptor.fit(encoder.dim)
    with section("projector"):
        projector = Projector(encoder.dim, **settings.projector)
    module, _, name = settings.method.class_path.rpartition(".")
    chosen: type[Method] = getattr(importlib.import_module(module), name)
    return chosen(encoder, projector, settings.loss, **settings.method.init_args)


def backbone(settings: Namespace) -> ResNet | MLP | Model:
    """Return the encoder, with the weights of `encoder.weights` loaded and its frozen stages set.

    Raises:
        ValueError: the network does not fit the images, or the weights do not fit the network.
    """
    if (found := vectors(settings)) is not None and found.dim is not None:
        return MLP(found.dim, found.widths)
    own = settings.encoder.as_dict()
    model, head, weights, frozen = (own.pop(n) for n in ("model", "head", "weights", "frozen"))
    encoder: ResNet | Model
    if model is None:
        if head is not None:
            raise ValueError(f"encoder.head {head!r} is a layer of encoder.model, which is null")
        with section("encoder"):
            encoder = ResNet(channels=settings.decoder.channels, **own)
    else:
        network = _network(model)
        encoder = Model(network, image_shape(settings), head)
    if weights is not None:
        load_weights(encoder, weights, head)
    freeze_stages(encoder, frozen)
    return encoder


def _network(model: Any) -> nn.Module:
    """Return the network that `encoder.model` names."""
    with section("encoder.model"):
        try:
            network: nn.Module = called(model)
        except (ValueError, ImportError, OSError, MemoryError):
            raise
        except Exception as error:  # a user's network may raise any exception
            raise ValueError(
                f"{model['class_path']} cannot be made ({type(error).__name__}: {error}); change "
                "its init_args or dict_kwargs"
            ) from error
    return network


def forget_first_weights(settings: Namespace) -> None:
    """Keep the encoder from reading initial weights, because a checkpoint holds all weights."""
    settings.encoder.weights = None
    if settings.encoder.model is not None:
        packages = (*DOWNLOADERS, "stream_ssl")
        settings.encoder.model = without_downloads(settings.encoder.model.as_dict(), packages)


def vectors(settings: Namespace) -> Vectors | None:
    """Return the settings of a run on vectors; None for a run on images."""
    with section("vectors"):
        found = Vectors(**settings.vectors)
    return None if found.dim is None else found


def decoder(settings: Namespace) -> Decoder | VectorDecoder:
    """Return the decoder of payloads: to pixels, or to the bytes of vectors."""
    found = vectors(settings)
    if found is None:
        options = settings.decoder.as_dict()
        own = options.pop("subclass")
        if own is None:
            with section("decoder"):
                return Decoder(**options)
        if options["fit"] == "crop":
            del options["fit"]  # a user's own decoder may support cropping alone
        made: Decoder = called(own, **options)
        return made
    assert found.dim is not None
    return VectorDecoder(found.dim, found.dtype)


def decodes_in_processes(settings: Namespace) -> bool:
    """Return whether images are decoded in processes: with a GPU, whose step is bound by Python."""
    return settings.learner.device != "cpu" and vectors(settings) is None


def _check_pickles(decoder: Decoder | VectorDecoder) -> None:
    try:
        ForkingPickler.dumps(decoder)
    except Exception as error:
        raise ValueError(
            f"decoder.subclass: {type(decoder).__name__} cannot be copied to the processes that "
            f"decode for a GPU: {error}. Keep open files, locks and functions without a name out "
            "of its attributes"
        ) from error


def views(settings: Namespace) -> Views | VectorViews:
    """Return the augmentation: of images, or of vectors."""
    if (found := vectors(settings)) is not None:
        return VectorViews(found)
    with section("views"):
        return Views(settings.decoder.size, settings.decoder.channels, **settings.views)


def memory(settings: Namespace, dim: int, group: RankGroup = SINGLE_PROCESS) -> WorkingMemory:
    """Return the working memory, with images. With several ranks, it is the shard of this rank."""
    with section("memory"):
        return WorkingMemory(
            dim=dim,
            image_shape=image_shape(settings),
            device=settings.learner.device,
            group=group,
            seed=settings.learner.seed,
            **settings.memory,
        )


def image_shape(settings: Namespace) -> tuple[int, int, int]:
    """Return (C, H, W) of the images that the learner reads, or of the bytes of vectors."""
    if (found := vectors(settings)) is not None:
        return found.shape
    return settings.decoder.channels, settings.decoder.size, settings.decoder.size


def shadows(settings: Namespace, dim: int) -> list[Shadow]:
    """Return memories of the same size under other policies, without images.

    A shadow counts duplicates on the working memory's descriptor. If its policy has no score of its
    own, it uses the working memory's score: counts under different scores cannot be compared.

    Raises:
        ValueError: a shadow has the name of the working memory.
    """
    if WORKING in settings.shadows:
        raise ValueError(
            f"shadows.{WORKING}: in the metrics, this is the name of the working memory; "
            "choose another name"
        )
    working, descriptor = settings.memory.eviction, settings.memory.descriptor
    if descriptor is not None and (descriptor.needs_images or descriptor.needs_features):
        descriptor = StepDescriptor(descriptor, image_shape(settings))

    def beside(policy: Policy) -> WorkingMemory:
        if working is not None and "score" not in vars(policy):
            policy.score = working.score
        return WorkingMemory(
            settings.memory.capacity,
            dim,
            eviction=policy,
            device=settings.learner.device,
            seed=settings.learner.seed,
            descriptor=descriptor,
        )

    return [Shadow(name, beside(policy)) for name, policy in settings.shadows.items()]


def batches(
    settings: Namespace,
    reader: JournalReader,
    start: Offset,
    share: JournalShare | None = None,
    rank: int = 0,
    ranks: int = 1,
    originals: KeptOriginals | None = None,
) -> Batches:
    """Return the journal's samples as batches; with several ranks, the part of this rank.

    Args:
        share: the records that this rank reads, among the ranks that read the same journal.
        rank, ranks: number of this rank, and the number of ranks that divide a batch.
        originals: keeps the bytes of samples as they were sent.

    Raises:
        ValueError: the ranks cannot divide a batch, this machine cannot hold one, or processes
            decode, and a decoder of the user's own cannot be pickled.
    """
    options, total = dict(settings.batches), settings.batches["batch_size"]
    if total % ranks:
        lower = max(1, total // ranks) * ranks
        raise ValueError(
            f"batches.batch_size {total} cannot be divided by {ranks} ranks: choose "
            f"{lower} or {lower + ranks}, or another number of ranks"
        )
    options["batch_size"] = total // ranks
    room, where = main_memory()
    if (needed := total // ranks * math.prod(image_shape(settings))) > room:
        raise ValueError(
            f"batches.batch_size {total} takes {needed / 1e9:,.1f} GB for the samples of one batch "
            f"alone, and {where} {room / 1e9:,.1f} GB: lower batches.batch_size"
        )
    with section("quarantine"):
        rejected = Quarantine(quarantine_folder(settings.run, rank))
    found = decoder(settings)
    if decodes_in_processes(settings):
        _check_pickles(found)
    with section("batches"):
        return Batches(
            reader,
            found,
            rejected,
            start=start,
            share=replace(share or JournalShare(), joint=ranks > 1),
            originals=originals,
            processes=decodes_in_processes(settings),
            **options,
        )


def originals(
    settings: Namespace, ranks: int = 1, held: Iterable[str] = ()
) -> KeptOriginals | None:
    """Return what keeps the bytes of samples as they were sent; None without a budget.

    Args:
        held: names of the files that the newest checkpoint holds.

    Raises:
        ValueError: the budget is out of range, or there are several ranks.
    """
    if settings.originals.budget is None:
        return None
    if ranks > 1:
        raise ValueError(
            f"originals.budget is {settings.originals.budget}, and {ranks} ranks learn: originals "
            "are kept by a run with one rank. Set originals.budget to null, or use one rank"
        )
    shape = decoder(settings).shape_HWC
    with section("originals"):
        return KeptOriginals(settings.run / "originals", shape, settings.originals.budget, held)


def learner(
    settings: Namespace, stream: Stream, start: Offset, group: RankGroup = SINGLE_PROCESS
) -> Learner:
    """Return a learner that has read no samples yet.

    Raises:
        ValueError: the sections contradict each other, or `classes` is negative.
    """
    check_device(settings.learner.device, "--learner.device")
    check_descriptor(settings)
    network = method(settings)
    check_memory(settings, network.dim)
    working = memory(settings, network.dim, group)
    with section("pace"):
        pace = Pace(**settings.pace)
    with section("optimiser"):
        optimiser = OptimiserSettings(**settings.optimiser)
    if settings.classes < 0:
        raise ValueError(f"classes is {settings.classes}: must be at least 0, and 0 if unknown")
    check_labels(network, settings.classes > 0)
    batch = settings.batches.batch_size // group.size
    options = settings.learner.as_dict()
    if vectors(settings) is not None and options["novelty"] == "auto":
        options["novelty"] = None  # the test compares pictures
    check_batch(network, working, pace, settings.learner.anchors, batch)
    augmented = views(settings)
    with section("learner"):
        return Learner(
            network,
            working,
            augmented,
            stream,
            LearnerSettings(**options),
            optimiser,
            settings.schedule,
            pace,
            start,
        )


def checkpointer(settings: Namespace, ranks: Ranks | None = None) -> Checkpointer:
    """Return the writer and reader of the run's checkpoints."""
    with section("checkpoints"):
        return Checkpointer(settings.run / FOLDER, **settings.checkpoints, ranks=ranks)


def held_out(settings: Namespace, learner: Learner) -> HeldOutProbe | None:
    """Read the held-out set and return its probe; None if the settings name no set."""
    chosen = settings.observe.held_out
    if chosen is None:
        return None
    if isinstance(chosen, str):
        chosen = HeldOut(_labelled(chosen))

    def features(image_BCHW: Tensor) -> Tensor:
        plain_BCHW = learner.views.plain(image_BCHW.to(learner.device))
        return learner.method.features(plain_BCHW)

    return HeldOutProbe(chosen, decoder(settings), features)


def _labelled(spec: str) -> Labelled:
    """Return the source of NAME:PLACE, with its test images if it separates them."""
    try:
        source: Labelled = sets.make(*sets.source_of(spec), seed=None)
    except (ValueError, FileNotFoundError) as error:
        raise ValueError(f"observe.held_out: {error}") from error
    return source


def picture_search(settings: Namespace, learner: Learner) -> PictureSearch | None:
    """Return the search of the memory for pictures; None for a memory without pictures."""

    def encode(image_BCHW: Tensor) -> tuple[Tensor, Tensor]:
        plain_BCHW = learner.views.plain(image_BCHW.to(learner.device))
        return learner.method.encode_newcomers(plain_BCHW)

    def decode(data: bytes) -> Tensor:
        pixels_HWC = decoder_of_run.decode(as_sample(data, id="picture"))
        return torch.from_numpy(np.array(pixels_HWC.transpose(2, 0, 1), order="C"))

    decoder_of_run = decoder(settings)
    if learner.memory.image_shape is None or isinstance(decoder_of_run, VectorDecoder):
        return None
    return PictureSearch(learner.memory, decode, encode)


def loggers(
    settings: Namespace, config: Mapping[str, Any], deadline: Deadline
) -> dict[str, Callable[[int], Logger]]:
    """Return a function for each logger that opens it at a step.

    Args:
        config: the resolved configuration, as plain values.
        deadline: the time by which the processes of loggers must end.

    Raises:
        ModuleNotFoundError: a logger is not installed.
        ValueError: no server for MLflow is known.
    """
    if "mlflow" in settings.loggers and not os.environ.get("MLFLOW_TRACKING_URI"):
        raise ValueError(
            "loggers: mlflow needs the environment variable MLFLOW_TRACKING_URI, and it is not "
            "set: set it to the address of the server, such as http://127.0.0.1:5000"
        )

    shown = in_utf8(config)

    def opened(name: str, step: int) -> Logger:
        if (place := str(settings.run.absolute())) != in_utf8(place):
            raise OSError(
                f"{place!r} is not UTF-8, and {name} needs a folder whose whole path is: rename it"
            )
        if name == "tensorboard":
            return TensorBoard(settings.run / "tensorboard", shown, step)
        return LoggerProcess(name, settings.run, shown, deadline)  # it keeps rows of later steps

    for name in settings.loggers:
        if name == "tensorboard":
            importlib.import_module("torch.utils.tensorboard")
        elif importlib.util.find_spec(name) is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    return {name: partial(opened, name) for name in settings.loggers}


def in_utf8(value: Any) -> Any:
    """Return plain values whose texts have "?" in place of bytes of a path that are not UTF-8."""
    if isinstance(value, Mapping):
        return {name: in_utf8(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [in_utf8(one) for one in value]
    return value.encode(errors="replace").decode() if isinstance(value, str) else value


def check_device(device: str, option: str = "--device") -> None:
    """Raise ValueError if this machine cannot use the device."""
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        reason = first_line(error)
        raise ValueError(f"device {device!r} cannot be used ({reason}); try {option} cpu") from None


def check_descriptor(settings: Namespace) -> None:
    """Raise ValueError if `memory.descriptor` needs pictures and a run has vectors, or reversed."""
    found, descriptor = vectors(settings), settings.memory.descriptor or Embedding()
    if found is not None and descriptor.needs_images and not isinstance(descriptor, Vector):
        raise ValueError(
            f"memory.descriptor {descriptor!r} describes pictures, and vectors.dim is {found.dim}: "
            "choose memory.descriptor: Vector, or Embedding"
        )
    if not isinstance(descriptor, Vector):
        return
    if found is None or found.dtype != descriptor.dtype:
        kept = "images" if found is None else f"vectors of {found.dtype}"
        raise ValueError(
            f"memory.descriptor {descriptor!r}: the memory keeps {kept}; see vectors.dim and dtype"
        )


def check_memory(settings: Namespace, dim: int) -> None:
    """Raise ValueError if this machine or its GPU cannot hold the memory and the shadows."""
    memory = settings.memory
    descriptor = memory.descriptor or Embedding()
    apart = 0
    if not isinstance(descriptor, Embedding):
        apart = descriptor.dim(dim, image_shape(settings))
    device = torch.device(settings.learner.device)
    rows = memory.capacity * 4 * (dim + apart) * (1 + len(settings.shadows))
    images = memory.capacity * math.prod(image_shape(settings))
    here = rows + images if device.type == "cpu" else 0
    if device.type == "cuda":
        on_host = images if memory.images_on == "host" else 0
        here, there = on_host, rows + images - on_host
        room = torch.cuda.get_device_properties(device).total_memory
        _check_room(memory.capacity, dim, apart, there, room, f"{device} has")
    _check_room(memory.capacity, dim, apart, here, *main_memory())


def _check_room(capacity: int, dim: int, apart: int, needed: int, room: int, where: str) -> None:
    if needed > room:
        descriptor = f", {apart:,} numbers of memory.descriptor" if apart else ""
        raise ValueError(
            f"memory.capacity {capacity} takes {needed / 1e9:,.1f} GB, shadows included, "
            f"and {where} {room / 1e9:,.1f} GB; a slot has {dim:,} numbers of "
            f"embedding{descriptor} and its image: lower memory.capacity, or the largest "
            "of these parts"
        )


class EmptyStream:
    """A stream that never has a batch."""

    def next(self, timeout: float) -> None:
        """Return no batch."""

    def lag(self) -> float:
        """Return 0."""
        return 0.0


class Planned(RankGroup):
    """The first rank of a planned group. It never meets the others; it serves to check settings."""

    def __init__(self, ranks: int) -> None:
        self.size = ranks


def dry_run(settings: Namespace, ranks: int = 1) -> Learner:
    """Build the objects of a learner's process, in a temporary folder. Return its learner.

    Args:
        ranks: the number of ranks of the run. Only the first rank is built.

    Raises:
        ValueError: the settings cannot work.
    """
    with ExitStack() as stack:
        settings = settings.clone()
        settings.run = Path(stack.enter_context(TemporaryDirectory()))
        checkpointer(settings)
        reader = stack.enter_context(closing(JournalReader(settings.run / "journal")))
        kept = originals(settings, ranks)
        stack.enter_context(batches(settings, reader, START, ranks=ranks, originals=kept))
        built = learner(settings, EmptyStream(), START, Planned(ranks))
        shadows(settings, built.method.dim)
        held_out(settings, built)
        loggers(settings, {}, Deadline())
        if settings.copies.to is not None:
            Bucket(settings.copies.to)
    return built
