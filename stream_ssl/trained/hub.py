"""Export a checkpoint's encoder as a folder that Hugging Face's transformers loads.

Shapes: K labelled slots, C H W image, F features.
"""

from __future__ import annotations

import math
import re
import shutil
from collections import Counter
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from torch import Tensor, nn

from stream_ssl import __version__
from stream_ssl.durable import write_json
from stream_ssl.encoder.network import Model, ResNet
from stream_ssl.evaluation.neighbours import knn_classify
from stream_ssl.evaluation.scores import score
from stream_ssl.feed.decode import Decoder, VectorDecoder
from stream_ssl.learning.checkpoint_layout import made_by
from stream_ssl.learning.origins import Origins
from stream_ssl.learning.saved import memory_of, origins_of
from stream_ssl.memory.state import columns_of, upgraded
from stream_ssl.rate_limited_logger import printable
from stream_ssl.tensor_file import unshared
from stream_ssl.trained.encoder import Encoder, facts, load_encoder
from stream_ssl.trained.export import examples, replacing

CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "README.md"
CODE = "modeling_stream_ssl.py"
PREPROCESSOR = "preprocessor_config.json"

NEIGHBOURS = 20
MOST_LABELLED = 4000
"""The accuracy is measured on at most this number of labelled slots."""
OTHERS = "use --encoder, which writes safetensors and ONNX of any network"
NAMED = 10
"""The most sources that a model card names."""

RENAMED = (
    (r"^conv1\.", "embedder.embedder.convolution."),
    (r"^bn1\.", "embedder.embedder.normalization."),
    (r"\.conv(\d)\.", lambda found: f".layer.{int(found[1]) - 1}.convolution."),
    (r"\.bn(\d)\.", lambda found: f".layer.{int(found[1]) - 1}.normalization."),
    (r"\.downsample\.0\.", ".shortcut.convolution."),
    (r"\.downsample\.1\.", ".shortcut.normalization."),
    (r"^layer(\d)\.", lambda found: f"encoder.stages.{int(found[1]) - 1}.layers."),
)
"""From torchvision's names of a ResNet's weights, which are ours, to those of transformers."""


def export_hub(checkpoint: Path, folder: Path, trust_code: bool = False) -> Measured:
    """Write a checkpoint's encoder, its code if transformers has none, and a model card.

    Args:
        folder: the folder to replace.

    Returns:
        The accuracy in the model card.

    Raises:
        ValueError: transformers has no form for this encoder.
    """
    encoder, stored = load_encoder(checkpoint, "features", trust_code=trust_code), facts(checkpoint)
    shape = shape_of(encoder)
    native = shape["stem"] == "imagenet" and all(shape["depths"])
    weights = unshared(_network(encoder).state_dict())
    columns = columns_of(upgraded(memory_of(checkpoint)))
    found = measured(encoder, columns)
    with replacing(folder) as scratch:
        if native:
            weights = {_renamed(name): value for name, value in weights.items()}
        else:
            shutil.copyfile(str(files("stream_ssl.trained") / "data" / CODE), scratch / CODE)
        content = safetensors.torch.save(weights, {"format": "pt"})
        (scratch / WEIGHTS).write_bytes(content)
        write_json(scratch / CONFIG, _native(shape) if native else _own(shape))
        if _crops(encoder):
            write_json(scratch / PREPROCESSOR, _preprocessor(encoder))
        sentence = "" if found.accuracy is None else _accuracy_sentence(found)
        sources = _sources(checkpoint, columns["ids"].tolist())
        text = card(stored, encoder, sources, sentence, native)
        (scratch / CARD).write_text(text, encoding="utf-8")
    return found


def shape_of(encoder: Encoder) -> dict[str, Any]:
    """Return the shape of a ResNet: our own, or torchvision's without its head.

    Raises:
        ValueError: the encoder is another network, or gives other features than such a ResNet.
    """
    import torchvision  # loads torch's compiler, which takes seconds

    network = _network(encoder)
    known = isinstance(network, torchvision.models.ResNet | ResNet)
    if isinstance(encoder.decoder, VectorDecoder) or not known:
        raise ValueError(
            f"--hub writes ResNets, and this run's encoder is a {type(network).__name__}: {OTHERS}"
        )
    stages = [getattr(network, f"layer{number}") for number in range(1, 5)]
    block = stages[0][0]
    convolution = network.get_submodule("conv1")
    assert isinstance(convolution, nn.Conv2d)
    shape: dict[str, Any] = {
        "channels": encoder.channels,
        "width": convolution.out_channels,
        "depths": [len(stage) for stage in stages],
        "stem": "imagenet" if convolution.kernel_size == (7, 7) else "cifar",
        "block": "bottleneck" if hasattr(block, "conv3") else "basic",
    }
    if not _same(encoder, ResNet(**shape)):
        raise ValueError(
            "--hub writes plain ResNets without a head, and this run's ResNet gives other features "
            f"(encoder.model, its init_args, or encoder.head): {OTHERS}"
        )
    return shape


def _same(encoder: Encoder, plain: ResNet) -> bool:
    """Return whether the network accepts the encoder's weights, and then gives its features."""
    try:
        plain.load_state_dict(_network(encoder).state_dict())
    except RuntimeError:
        return False
    image_BCHW = examples(encoder, 2)
    with torch.inference_mode():
        expected_BF = encoder(image_BCHW)
        found_BF = plain.eval()(encoder.views.plain(image_BCHW))
    close = torch.isclose(found_BF, expected_BF, rtol=1e-3, atol=1e-5, equal_nan=True)
    return bool(close.all())


def _network(encoder: Encoder) -> nn.Module:
    backbone = encoder.backbone
    return backbone.module if isinstance(backbone, Model) else backbone


def _renamed(name: str) -> str:
    for pattern, new in RENAMED:
        name = re.sub(pattern, new, name)
    return name


def _native(shape: Mapping[str, Any]) -> dict[str, Any]:
    expansion = 4 if shape["block"] == "bottleneck" else 1
    return {
        "model_type": "resnet",
        "architectures": ["ResNetModel"],
        "num_channels": shape["channels"],
        "embedding_size": shape["width"],
        "hidden_sizes": [(shape["width"] << stage) * expansion for stage in range(4)],
        "depths": shape["depths"],
        "layer_type": shape["block"],
        "hidden_act": "relu",
        "downsample_in_first_stage": False,
        "downsample_in_bottleneck": False,
    }


def _own(shape: Mapping[str, Any]) -> dict[str, Any]:
    module = CODE.removesuffix(".py")
    values = {name: shape[name] for name in ("width", "depths", "stem", "block")}
    return values | {
        "model_type": "stream-ssl-resnet",
        "architectures": ["StreamSslModel"],
        "num_channels": shape["channels"],
        "auto_map": {
            "AutoConfig": f"{module}.StreamSslConfig",
            "AutoModel": f"{module}.StreamSslModel",
        },
    }


def _preprocessor(encoder: Encoder) -> dict[str, Any]:
    """Return what AutoImageProcessor needs. It scales by another method than the run."""
    return {
        "image_processor_type": "CLIPImageProcessor",
        "do_convert_rgb": encoder.channels == 3,
        "do_resize": True,
        "size": {"shortest_edge": encoder.size},
        "resample": 2,  # bilinear
        "do_center_crop": True,
        "crop_size": {"height": encoder.size, "width": encoder.size},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": _per_channel(encoder, "mean"),
        "image_std": _per_channel(encoder, "std"),
    }


def _per_channel(encoder: Encoder, name: str) -> list[float]:
    value: Tensor = getattr(encoder.views, name)
    return [round(one, 6) for one in value.flatten().expand(encoder.channels).tolist()]


def _crops(encoder: Encoder) -> bool:
    return not (isinstance(encoder.decoder, Decoder) and encoder.decoder.fit == "letterbox")


class Measured(NamedTuple):
    """The kNN accuracy of an encoder on the memory's labelled slots.

    Half of the slots are queries and half are references, so no slot finds itself.

    Attributes:
        accuracy: None with fewer than two classes, or fewer references than neighbours.
        labelled: the number of labelled slots that were used.
        classes: the number of their classes.
        majority: the share of the most frequent class among the queries.
    """

    accuracy: float | None
    labelled: int
    classes: int
    majority: float


def measured(encoder: Encoder, columns: Mapping[str, Tensor]) -> Measured:
    """Return the kNN accuracy on the labelled slots of a memory with these columns."""
    row_K = (columns["labels"] >= 0).nonzero().flatten()
    order = torch.randperm(len(row_K), generator=torch.Generator().manual_seed(0))
    row_K = row_K[order][:MOST_LABELLED]
    label_K = columns["labels"][row_K]
    classes = len(set(label_K.tolist()))
    half = len(row_K) // 2
    if classes < 2 or half < NEIGHBOURS or "images" not in columns:
        return Measured(None, len(row_K), classes, math.nan)
    image_KCHW = columns["images"][row_K]
    feature_KF = torch.cat([encoder(image_bCHW) for image_bCHW in torch.split(image_KCHW, 256)])
    told_Q = knn_classify(feature_KF[:half], feature_KF[half:], label_K[half:], NEIGHBOURS)
    majority = int(torch.unique(label_K[:half], return_counts=True)[1].max()) / half
    return Measured(score(told_Q, label_K[:half]).accuracy, len(row_K), classes, majority)


def _accuracy_sentence(found: Measured) -> str:
    return (
        f"{found.accuracy:.1%} of {found.labelled // 2} labelled pictures were recognised among "
        f"{found.classes} classes by a vote of {NEIGHBOURS} nearest neighbours. Guessing the most "
        f"frequent class would recognise {found.majority:.1%}. Pictures and neighbours are two "
        "halves of the run's memory, which the encoder may have learned from."
    )


def _sources(checkpoint: Path, ids: list[int]) -> Counter[str]:
    """Return the number of the memory's samples from each source, with its producer."""
    origins = Origins()
    origins.load(origins_of(checkpoint), ids)
    known = (origin.known() for origin in origins.of(ids) if origin is not None)
    return Counter(f"{one['producer']}/{one['source']}" for one in known)


def card(
    stored: Mapping[str, Any], encoder: Encoder, sources: Counter[str], accuracy: str, native: bool
) -> str:
    """Return the model card."""
    config = stored["config"]
    method, loss = (str(_class(config.get(name))) for name in ("method", "loss"))
    code = "" if native else ", trust_remote_code=True"
    whole = (
        "\nThe run kept whole images, with grey bars (128) beside them. Scale the long side to "
        f"{encoder.size} pixels and fill the square with grey before the code below.\n"
    )
    mode = "RGB" if encoder.channels == 3 else "L"
    files_too = (
        '`AutoImageProcessor.from_pretrained("FOLDER")` prepares images of Pillow. It scales them '
        "by another method than the run, so that pixels and features differ a little. It does not "
        "turn photos upright, as the run does: pass "
        f'`ImageOps.exif_transpose(image).convert("{mode}")`.\n'
    )
    whole, files_too = ("", files_too) if _crops(encoder) else (whole, "")
    named = [
        f"- `{printable(name).replace('`', '?')}`: {count} of the memory's samples"
        for name, count in sources.most_common(NAMED)
    ]
    lines = "\n".join(named) or "- not known"
    mean, std = (_per_channel(encoder, name) for name in ("mean", "std"))
    return f"""---
library_name: transformers
pipeline_tag: image-feature-extraction
tags: [self-supervised, stream-ssl]
---

# An image encoder from a stream

This encoder was trained by stream-ssl {__version__} on a stream of images, without labels.

| | |
|---|---|
| samples read from the stream | {int(stored["samples"]):,} |
| steps, the last one that changed the weights | {int(stored["step"]):,}, {made_by(stored):,} |
| method, loss | {method}, {loss} |
| images | {encoder.size} x {encoder.size}, channels: {encoder.channels} |
| features | {encoder.dim} |

Sources of the stream, by the samples that the memory holds:

{lines}

## Accuracy

{accuracy or "Not measured, because too few samples of the stream have labels."}

## Use
{whole}
```python
import torch
from transformers import AutoModel

model = AutoModel.from_pretrained("FOLDER"{code}).eval()
image = torch.zeros(1, {encoder.channels}, {encoder.size}, {encoder.size})  # levels from 0 to 1
mean, std = torch.tensor({mean}), torch.tensor({std})
pixels = (image - mean.view(1, -1, 1, 1)) / std.view(1, -1, 1, 1)
with torch.inference_mode():
    features = model(pixels).pooler_output.flatten(1)  # [1, {encoder.dim}]
```

{files_too}"""


def _class(spec: object) -> str:
    path = spec.get("class_path", "") if isinstance(spec, Mapping) else str(spec)
    return str(path).rpartition(".")[2]
