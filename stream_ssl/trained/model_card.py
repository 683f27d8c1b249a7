"""Write the model card of an encoder, with its accuracy on the labelled slots of its memory.

Shapes: K labelled slots, Q queries, F features.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stream_ssl import __version__
from stream_ssl.evaluation.neighbours import knn_classify
from stream_ssl.evaluation.scores import score
from stream_ssl.feed.decode import Decoder
from stream_ssl.learning.checkpoint_layout import made_by
from stream_ssl.rate_limited_logger import printable
from stream_ssl.trained.encoder import Encoder

NEIGHBOURS = 20
MOST_LABELLED = 4000
"""The accuracy is measured on at most this number of labelled slots."""
NAMED = 10
"""The most sources that a model card names."""


class MemoryAccuracy(NamedTuple):
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


def accuracy_on_memory(encoder: Encoder, columns: Mapping[str, Tensor]) -> MemoryAccuracy:
    """Return the kNN accuracy on the labelled slots of a memory with these columns."""
    row_K = (columns["labels"] >= 0).nonzero().flatten()
    order = torch.randperm(len(row_K), generator=torch.Generator().manual_seed(0))
    row_K = row_K[order][:MOST_LABELLED]
    label_K = columns["labels"][row_K]
    classes = len(set(label_K.tolist()))
    half = len(row_K) // 2
    if classes < 2 or half < NEIGHBOURS or "images" not in columns:
        return MemoryAccuracy(None, len(row_K), classes, math.nan)
    image_KCHW = columns["images"][row_K]
    feature_KF = torch.cat([encoder(image_bCHW) for image_bCHW in torch.split(image_KCHW, 256)])
    told_Q = knn_classify(feature_KF[:half], feature_KF[half:], label_K[half:], NEIGHBOURS)
    majority = int(torch.unique(label_K[:half], return_counts=True)[1].max()) / half
    return MemoryAccuracy(score(told_Q, label_K[:half]).accuracy, len(row_K), classes, majority)


def _sentence(found: MemoryAccuracy) -> str:
    if found.accuracy is None:
        return "Not measured, because too few samples of the stream have labels."
    return (
        f"{found.accuracy:.1%} of {found.labelled // 2} labelled pictures were recognised among "
        f"{found.classes} classes by a vote of {NEIGHBOURS} nearest neighbours. Guessing the most "
        f"frequent class would recognise {found.majority:.1%}. Pictures and neighbours are two "
        "halves of the run's memory, which the encoder may have learned from."
    )


def card(
    stored: Mapping[str, Any],
    encoder: Encoder,
    sources: Counter[str],
    found: MemoryAccuracy,
    native: bool,
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
    whole, files_too = ("", files_too) if crops(encoder) else (whole, "")
    named = [
        f"- `{printable(name).replace('`', '?')}`: {count} of the memory's samples"
        for name, count in sources.most_common(NAMED)
    ]
    lines = "\n".join(named) or "- not known"
    mean, std = (per_channel(encoder, name) for name in ("mean", "std"))
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

{_sentence(found)}

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


def per_channel(encoder: Encoder, name: str) -> list[float]:
    """Return the `mean` or the `std` that images are normalised with, for each channel."""
    value: Tensor = getattr(encoder.views, name)
    return [round(one, 6) for one in value.flatten().expand(encoder.channels).tolist()]


def crops(encoder: Encoder) -> bool:
    """Return whether the run cut squares from images, and added no bars beside them."""
    return not (isinstance(encoder.decoder, Decoder) and encoder.decoder.fit == "letterbox")
