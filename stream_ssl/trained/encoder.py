"""Load the trained encoder of a run, of a checkpoint or of an export.

Shapes: B samples, C channels, H height, W width, F features or dimensions of the embedding.
"""

from __future__ import annotations

import logging
from argparse import ArgumentError
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, get_args

import numpy as np
import torch
from jsonargparse import ArgumentParser, Namespace
from torch import Tensor, nn

from stream_ssl.bounded_files import read_map
from stream_ssl.config import build, options
from stream_ssl.config.removed import without
from stream_ssl.config.trust import asks_for_download, only_known_classes, without_downloads
from stream_ssl.durable import damage
from stream_ssl.encoder.network import Projector
from stream_ssl.feed.decode import BadSample, Decoder, VectorDecoder
from stream_ssl.feed.large_pictures import for_own_files
from stream_ssl.journal.consumer_offsets import ConsumerOffsets
from stream_ssl.learning.checkpoint_layout import (
    FOLDER,
    LATEST,
    STATE,
    facts_in,
    made_by,
    steps_in,
    unreadable_format,
)
from stream_ssl.learning.randomness import OwnRandomness
from stream_ssl.learning.saved import checkpoint_damage, model_of
from stream_ssl.learning.vectors import VectorViews
from stream_ssl.learning.views import Views
from stream_ssl.memory.compute import on_host
from stream_ssl.methods import Method
from stream_ssl.methods.base import unit
from stream_ssl.methods.norm import Statistics, forget_statistics
from stream_ssl.process.failures import unreadable, unreadable_folder
from stream_ssl.producers._images import as_sample
from stream_ssl.tensor_file import as_state, load_file

if TYPE_CHECKING:
    from stream_ssl.producers.client import Image

log = logging.getLogger("stream_ssl.encoder")

T = TypeVar("T")

Of = Literal["features", "embeddings"]

ENCODER = "encoder.json"
WEIGHTS = "encoder.safetensors"
EXPORT_FORMAT = 2  # increased when older programs cannot read the new format

SECTIONS = (
    "vectors",
    "decoder",
    "batches",
    "encoder",
    "projector",
    "views",
    "loss",
    "method",
    "learner",
)
"""Sections of a run's configuration on which its network depends. Other sections may name files or
classes that no longer exist.
"""


PARTS = ("vectors", "decoder", "encoder", "projector", "views")
"""The sections among SECTIONS on which an exported encoder depends."""


class Encoder(nn.Module):
    """A module that encodes uint8 images [B, C, H, W] to float32 features or embeddings [B, F].

    The encoder of a run on vectors takes float vectors [B, D], or their bytes.

    The module is in evaluation mode and frozen, also within a model that trains.
    `encoder.requires_grad_().train()` makes it trainable, and `encoder.half()` computes in half
    precision. With `statistics` "batch", the embedding of an image depends on the other images of
    its batch.

    Args:
        backbone: maps normalised images to features.
        projector: maps features to embeddings, which are scaled to unit norm. None: the encoder
            returns features.
        views: the run's augmentation and normalisation.
        decoder: the run's decoder, which `preprocess` uses.
        statistics: the statistics of BatchNorm in evaluation mode: the running "average", or those
            of the "batch".

    Attributes:
        dim: F, the number of features or of dimensions of the embedding.
        size: H and W of an image; 1 for vectors.
        channels: C of an image; the number of bytes of a vector.
        of: "features" or "embeddings".
        kind: "image" or "vector", which the encoder takes.
    """

    def __init__(
        self,
        backbone: nn.Module,
        projector: nn.Module | None,
        views: Views | VectorViews,
        decoder: Decoder | VectorDecoder,
        statistics: Statistics = "average",
    ) -> None:
        super().__init__()
        self.backbone, self.projector, self.views = backbone, projector, views
        (self.size, _, self.channels), self.decoder = decoder.shape_HWC, decoder
        self._numbers = decoder.dim if isinstance(decoder, VectorDecoder) else None  # of a vector
        self.of: Of = "features" if projector is None else "embeddings"
        self.kind = "image" if self._numbers is None else "vector"
        self.dim = int((projector or backbone).dim)  # type: ignore[arg-type]
        self.statistics = statistics
        if statistics == "batch":
            forget_statistics(self)
        self.requires_grad_(False).eval()

    def forward(self, image_BCHW: Tensor) -> Tensor:
        if (value_BD := self._standardised(image_BCHW)) is not None:
            return self._encode(value_BD)
        return self._encode(self.views.plain(self._checked(image_BCHW)))

    def train(self, mode: bool = True) -> Self:
        """Set the training mode, as for any module, but keep a frozen encoder in evaluation mode.

        Otherwise the training of a model that owns the encoder would change BatchNorm's averages.
        """
        return super().train(mode and any(weight.requires_grad for weight in self.parameters()))

    def view(self, image_BCHW: Tensor) -> Tensor:
        """Encode one augmented view of each image or vector.

        The run's own augmentation makes the views. The arguments are those of a call.
        """
        if (value_BD := self._standardised(image_BCHW)) is not None:
            assert isinstance(self.views, VectorViews)
            return self._encode(self.views.augmented(value_BD))
        view_BCHW: Tensor = self.views(self._checked(image_BCHW))
        return self._encode(view_BCHW)

    def _standardised(self, value_BD: Tensor) -> Tensor | None:
        """Return vectors [B, D] as the network takes them, or None if these are no vectors."""
        if isinstance(self.views, VectorViews) and _is_rows(value_BD, self._numbers):
            return self.views.standardised(value_BD.to(self.views.mean.device))
        return None

    def _checked(self, image_BCHW: Tensor) -> Tensor:
        """Return images on the encoder's device in one memory layout, or raise ValueError."""
        is_tensor = isinstance(image_BCHW, Tensor)
        if not is_tensor or image_BCHW.ndim != 4 or image_BCHW.shape[1] != self.channels:
            found = f"{type(image_BCHW).__name__} {tuple(getattr(image_BCHW, 'shape', ()))}"
            due = f"float tensor [B, {self._numbers}]"
            if self._numbers is None:
                due = f"uint8 tensor [B, {self.channels}, H, W]"
            raise ValueError(
                f"{self.kind}s are a {found}: must be a {due}, such as torch.stack"
                f"([encoder.preprocess({self.kind}) for {self.kind} in {self.kind}s])"
            )
        # A grey image is contiguous in two memory layouts, in which convolutions round differently.
        return image_BCHW.to(self.views.mean.device).clone(memory_format=torch.contiguous_format)

    @property
    def networks(self) -> nn.ModuleDict:
        """The modules that have weights."""
        parts = {"backbone": self.backbone, "projector": self.projector}
        return nn.ModuleDict({name: part for name, part in parts.items() if part is not None})

    def preprocess(self, image: Image) -> Tensor:
        """Return the uint8 pixels [C, H, W] on which the learner would train for this image.

        For a vector, the result holds its bytes.

        Args:
            image: a path; the bytes of a JPEG, PNG or WebP file; a PIL image; a uint8 array [H, W]
                or [H, W, C]; or a vector, a float array [D].

        Raises:
            TypeError: the argument is no image.
            ValueError: the image cannot be decoded.
            OSError: the file cannot be read.
        """
        try:
            pixels_HWC = for_own_files(self.decoder).decode(as_sample(image, id="image"))
        except ValueError as error:
            why = str(error)
            if isinstance(error, BadSample) and error.reason == "damaged":
                why = f"the picture is damaged ({why}): copy or fetch it again"
            elif isinstance(error, BadSample) and error.reason == "expensive":
                why += ": scale the picture down"
            raise ValueError(f"{image}: {why}" if isinstance(image, str | Path) else why) from error
        return torch.from_numpy(np.array(pixels_HWC.transpose(2, 0, 1), order="C"))

    def _encode(self, view_BCHW: Tensor) -> Tensor:
        weight = next(self.backbone.parameters(), view_BCHW)  # `half()` casts weights, not views
        feature_BF: Tensor = self.backbone(view_BCHW.to(weight.dtype))
        if self.projector is None:
            return feature_BF.float()
        weight = next(self.projector.parameters())  # networks of users give float32 features
        return unit(self.projector(feature_BF.to(weight.dtype)))

    def extra_repr(self) -> str:
        return f"of={self.of}, dim={self.dim}, size={self.size}, channels={self.channels}"


def _is_rows(value: object, dim: int | None) -> bool:
    """Return whether a value is a float tensor [B, dim]."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.shape[1:] == (dim,)


@contextmanager
def _in_float32() -> Iterator[None]:
    """Let torch make weights in float32, whatever `torch.set_default_dtype` says."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@torch.inference_mode(False)  # in this mode torch makes weights that can never train
@on_host
@_in_float32()
def load_encoder(
    place: Path | str, of: Of | None = None, device: str = "cpu", trust_code: bool = False
) -> Encoder:
    """Load an encoder; see `stream_ssl.load_encoder`."""
    place = Path(place)
    if of not in (None, "features", "embeddings"):
        raise ValueError(f'of is {of!r}: choose "features" or "embeddings"')
    build.check_device(device, "device")
    if is_export(place):
        return _exported(place, of, trust_code).to(device)

    def load(checkpoint: Path) -> Encoder:
        stored = facts(checkpoint)
        if made_by(stored) == 0:
            log.warning(
                "checkpoint %s of step %d was written before the first update: the run "
                "has not trained this encoder. Take a later checkpoint once the run has "
                "made updates (stream-ssl status RUN shows its step)",
                *(checkpoint, stored["step"]),
            )
        return run_encoder(
            stored_settings(stored["config"], trust_code=trust_code),
            of or "features",
            lambda network: _fill(network, model_of(checkpoint), checkpoint),
        )

    return read_newest(place, load).to(device)


def fresh_encoder(
    stored: Mapping[str, Any],
    of: Of = "features",
    device: str = "cpu",
    trust_code: bool = False,
) -> Encoder:
    """Return the encoder of a checkpoint's configuration as it was before its first update.

    Nothing is downloaded. If the run began with downloaded weights, this encoder has random
    weights, and a warning says so.
    """
    if asks_for_download((stored.get("encoder") or {}).get("model")):
        log.warning(
            "the run began with weights that encoder.model downloaded, and this command "
            "downloads nothing: the untrained encoder has random weights instead"
        )
    return run_encoder(stored_settings(stored, trust_code=trust_code), of).to(device)


def run_encoder(
    settings: Namespace, of: Of, load: Callable[[Method], object] | None = None
) -> Encoder:
    """Return the encoder of a run's network, with weights that `load` puts into it.

    Args:
        settings: the result of `stored_settings`.
        of: "features" of the trained encoder, or "embeddings" of the key networks.
        load: puts weights into the network. None: the network keeps the weights from before the
            first update.
    """
    if load is not None:
        build.forget_first_weights(settings)  # the file that held them may no longer exist
    with OwnRandomness(0, torch.device("cpu")):  # the caller's generators stay as they are
        network = build.method(settings)
    if load is not None:
        load(network)
    decoder, views = build.decoder(settings), build.views(settings)
    if of == "features":
        return Encoder(network.encoder, None, views, decoder)
    return Encoder(*network.key_networks, views, decoder, network.key_statistics)


def stored_settings(
    stored: Mapping[str, Any], *of_memory: str, trust_code: bool = False
) -> Namespace:
    """Return SECTIONS of a checkpoint's configuration in the form that `build` takes.

    Args:
        of_memory: options of the memory to return beside its capacity.
        trust_code: import every class that the configuration names.

    Raises:
        ValueError: another version of this program wrote the configuration, or it names a class
            that is not trusted.
    """
    kept = {section: stored[section] for section in SECTIONS if section in stored}
    if not isinstance(memory := stored.get("memory"), Mapping):
        raise ValueError(
            f"the checkpoint's configuration cannot be read: memory is {memory!r:.80}, and must be "
            "a map"
        )
    wanted = {name: memory.get(name) for name in ("capacity", *of_memory)}
    return _settings(kept | {"memory": wanted}, "the checkpoint's", trust_code)


def _settings(sections: Mapping[str, Any], whose: str, trust_code: bool) -> Namespace:
    parser = _parser()
    whose, sections = f"{whose} configuration", without_downloads(without(sections)[0])
    needed = {"batches": {"batch_size": 1}, "memory": {"capacity": 1}}  # have no defaults
    try:
        with nullcontext() if trust_code else only_known_classes(whose, sections):
            settings: Namespace = parser.instantiate(parser.parse_object(needed | dict(sections)))
    except ArgumentError as error:
        raise ValueError(f"{whose} cannot be read: {error}") from error
    return settings


@cache
def _parser() -> ArgumentParser:
    """Return one parser for all calls, because it takes longer to build a parser than to use it."""
    parser: ArgumentParser = options.learner_parser()
    parser.exit_on_error = False
    return parser


def _exported(folder: Path, of: Of | None, trust_code: bool) -> Encoder:
    if (reason := damage(folder, links=True)) is not None:
        raise ValueError(f"the encoder in {folder} is damaged ({reason}); export it again")
    found = _described(folder)
    if found["format"] > EXPORT_FORMAT:
        raise ValueError(
            f"{folder} has format {found['format']}, and this program reads formats up to "
            f"{EXPORT_FORMAT}: upgrade stream-ssl"
        )
    if of not in (None, found["of"]):
        raise ValueError(
            f"of is {of!r}, and {folder} was exported with --of {found['of']}: export the run "
            f"with --of {of}, or leave `of` out"
        )
    sections = {name: found[name] for name in PARTS if found.get(name)}
    sections["views"] = found["views"] | found["normalisation"]
    settings = _settings(sections, f"{folder}: its", trust_code)
    build.forget_first_weights(settings)
    decoder, views = build.decoder(settings), build.views(settings)
    weights = load_file(folder / WEIGHTS)

    def made() -> Encoder:
        backbone = build.backbone(settings)
        projector = Projector(backbone.dim, **settings.projector) if found["projector"] else None
        return Encoder(backbone, projector, views, decoder, found["statistics"])

    with torch.random.fork_rng(devices=[]):
        if settings.encoder.model is None:  # some other networks cannot be built on "meta"
            with torch.device("meta"):  # takes no memory, because encoder.json may claim any size
                _fill(made().networks, weights, folder, assign=True)
        encoder = made()
    _fill(encoder.networks, weights, folder)
    return encoder


def _fill(
    network: nn.Module, weights: Mapping[str, Tensor], place: Path, assign: bool = False
) -> None:
    """Load weights into the network that the configuration beside them describes.

    Args:
        assign: put the weights in the place of the network's own, in place of a copy.

    Raises:
        ValueError: a weight is NaN or infinite, the code of the network has changed since, or the
            files do not belong together.
    """
    if wrong := next((name for name, one in weights.items() if not one.isfinite().all()), None):
        raise ValueError(
            f"{place}: the weights {wrong} are not finite, because training has diverged: give an "
            "earlier checkpoint"
        )
    try:
        network.load_state_dict(as_state(weights, network), assign=assign)
    except RuntimeError as error:
        first = " ".join(str(error).split("\n\t")[:2])  # a line for each weight follows
        raise ValueError(
            f"the weights in {place} do not fit the network of its configuration ({first:.500}): "
            "use the versions of the network's code and of its libraries that the run used"
        ) from error


def _described(folder: Path) -> dict[str, Any]:
    """Return the content of an export's encoder.json, or raise ValueError if a value is wrong."""
    found = {"projector": None, "vectors": None} | read_map(folder / ENCODER, links=True)
    sections = ("views", "normalisation", "decoder", "encoder")
    due = dict.fromkeys(sections, dict) | {"format": int, "of": str, "statistics": str}
    due |= {name: dict for name in ("projector", "vectors") if found[name] is not None}
    for name, kind in due.items():
        value = found.get(name)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ValueError(
                f"{folder / ENCODER}: {name} is {value!r:.80}, and must be of type "
                f"{kind.__name__}; export the encoder again"
            )
    if found["statistics"] not in get_args(Statistics):
        raise ValueError(
            f"{folder / ENCODER}: statistics is {found['statistics']!r:.80}, and must be one of "
            f"{', '.join(get_args(Statistics))}; export the encoder again"
        )
    return found


def is_export(place: Path) -> bool:
    """Return whether the folder is an export of an encoder, and not a run or a checkpoint.

    Raises:
        PermissionError: this user may not read the folder.
    """
    check_readable(place)
    return (place / ENCODER).is_file()


def check_readable(folder: Path) -> None:
    """Raise PermissionError if this user may not read the folder, which need not exist."""
    if (why := unreadable_folder(folder)) is not None:
        raise PermissionError(why)


def read_newest(place: Path, read: Callable[[Path], T]) -> T:
    """Return the result of `read` for the checkpoint that `find` returns.

    A running learner keeps a few checkpoints (`checkpoints.keep`), and may remove this one during
    the read. The newest checkpoint of that moment is then read instead.

    Raises:
        FileNotFoundError: there is no checkpoint, or it lacks a file.
        PermissionError: this user may not read the folder.
    """
    checkpoint = find(place)
    while True:
        try:
            return read(checkpoint)
        except FileNotFoundError:
            if (newer := find(place)) == checkpoint:
                raise
            checkpoint = newer


def find(path: Path) -> Path:
    """Return the checkpoint folder at a path: the path itself, or the newest whole one of a run.

    Raises:
        FileNotFoundError: there is no checkpoint.
        PermissionError: this user may not read the folder.
        ValueError: the checkpoint is damaged, or a newer version wrote it.
    """
    for folder in (path, path / FOLDER):
        check_readable(folder)
    own = (path / STATE).is_file()
    found = [path.resolve()] if own else _checkpoints(path)
    if not found:
        missing = (
            "is not a folder" if not path.is_dir() else f"contains neither {STATE} nor {LATEST}"
        )
        if (path / "journal").is_dir():
            missing = "is a run that has written none yet, which its first update brings"
            if step := ConsumerOffsets(path).load().step:
                missing = f"is a run that had one at step {step}: mount the disk of {path / FOLDER}"
        raise FileNotFoundError(
            f"no checkpoint at {path}: it {missing}. Give the folder of a run that has "
            "written its first checkpoint (the folder that contains checkpoints/), or the "
            "folder of a checkpoint (step-...)"
        )
    faults = []
    for folder in found:
        try:
            if (reason := checkpoint_damage(folder)) is None:
                break
        except PermissionError as error:
            raise PermissionError(unreadable(Path(error.filename))) from error
        if not own and _checkpoints(path)[:1] != found[:1]:  # a learner has removed it since
            return find(path)
        faults.append(f"checkpoint {folder} is damaged ({reason})")
        log.warning("%s", faults[-1])
    else:
        remedy = "give an earlier checkpoint"
        if not own:
            remedy = f"no other checkpoint at {path} is whole: restore one from a backup"
        raise ValueError(f"{faults[0]}; {remedy}")
    if (why := unreadable_format(folder, facts_in(folder))) is not None:
        raise ValueError(why)
    return folder


def _checkpoints(run: Path) -> list[Path]:
    """Return the checkpoints in a run's folder or in its checkpoints/ folder, the newest first."""
    for folder in (run, run / FOLDER):
        found = steps_in(folder.resolve())[::-1]
        if (folder / LATEST / STATE).is_file():
            latest = (folder / LATEST).resolve()
            return [latest, *(path for path in found if path.name < latest.name)]
        if found:  # the newest checkpoint lost its state file, or was moved
            return found
    return []


def facts(checkpoint: Path) -> Mapping[str, Any]:
    """Return a checkpoint's state: step, samples, created, and config without removed options."""
    found = facts_in(checkpoint)
    return found | {"config": without(found["config"])[0]} if "config" in found else found
