"""Export a checkpoint's encoder as a folder that Hugging Face's transformers loads.

Shapes: B images, C H W image, F features.
"""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn

from stream_ssl.durable import write_json
from stream_ssl.encoder.network import Model, ResNet
from stream_ssl.feed.decode import VectorDecoder
from stream_ssl.learning.origins import Origins
from stream_ssl.learning.saved import memory_of, origins_of
from stream_ssl.memory.state import columns_of, upgraded
from stream_ssl.tensor_file import unshared
from stream_ssl.trained.encoder import Encoder, facts, load_encoder
from stream_ssl.trained.export import examples, replacing
from stream_ssl.trained.model_card import (
    MemoryAccuracy,
    accuracy_on_memory,
    card,
    crops,
    per_channel,
)

CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "README.md"
CODE = "modeling_stream_ssl.py"
PREPROCESSOR = "preprocessor_config.json"

OTHERS = "use --encoder, which writes safetensors and ONNX of any network"

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


def export_hub(checkpoint: Path, folder: Path, trust_code: bool = False) -> MemoryAccuracy:
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
    found = accuracy_on_memory(encoder, columns)
    with replacing(folder) as scratch:
        if native:
            weights = {_renamed(name): value for name, value in weights.items()}
        else:
            shutil.copyfile(str(files("stream_ssl.trained") / "data" / CODE), scratch / CODE)
        content = safetensors.torch.save(weights, {"format": "pt"})
        (scratch / WEIGHTS).write_bytes(content)
        write_json(scratch / CONFIG, _native(shape) if native else _own(shape))
        if crops(encoder):
            write_json(scratch / PREPROCESSOR, _preprocessor(encoder))
        sources = _sources(checkpoint, columns["ids"].tolist())
        text = card(stored, encoder, sources, found, native)
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
        "image_mean": per_channel(encoder, "mean"),
        "image_std": per_channel(encoder, "std"),
    }


def _sources(checkpoint: Path, ids: list[int]) -> Counter[str]:
    """Return the number of the memory's samples from each source, with its producer."""
    origins = Origins()
    origins.load(origins_of(checkpoint), ids)
    known = (origin.known() for origin in origins.of(ids) if origin is not None)
    return Counter(f"{one['producer']}/{one['source']}" for one in known)
