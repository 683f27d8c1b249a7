"""Search a checkpoint's memory for samples that look like a picture, for `stream-ssl search`.

Shapes: B images, K occupied slots, k results, F features, X numbers of an embedding, a
descriptor or features, C H W image.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stream_ssl.batch import Origin
from stream_ssl.feed.decode import VectorDecoder
from stream_ssl.learning.origins import Origins
from stream_ssl.learning.saved import memory_of, origins_of
from stream_ssl.memory.descriptors import Descriptor, Embedding, Thumbnail
from stream_ssl.memory.index import nearest
from stream_ssl.memory.state import (
    State,
    columns_of,
    decode,
    part,
    upgraded,
    without_address,
)
from stream_ssl.trained.encoder import Encoder, facts, load_encoder, stored_settings
from stream_ssl.trained.export import images_of

BESIDE: Final = 255
"""Images of the memory that are encoded beside the query, if an embedding depends on its batch."""

AGAIN: Final = 128
"""The slots that are encoded again at a time, with the query, because their embeddings may be old.

At least this number of the nearest slots is encoded again, and as many of those whose images look
most like the picture.
"""

Pixels = NDArray[np.uint8]
By = Literal["embeddings", "descriptors"]


@dataclass(frozen=True)
class Hit:
    """A slot that resembles the query."""

    slot: int
    similarity: float
    label: int | None
    origin: Origin | None
    image_CHW: Pixels

    @property
    def time(self) -> str:
        """The time of capture in UTC; empty if it is unknown, or outside the calendar."""
        try:
            moment = datetime.fromtimestamp(self.origin.time, UTC) if self.origin else None
        except (OverflowError, ValueError, OSError):
            return ""
        return moment.strftime("%Y-%m-%d %H:%M:%S") if moment else ""


@dataclass(frozen=True)
class SearchResult:
    """The result of a search: the query's pixels as the learner would see them, and the best hits.

    The most similar hit comes first.
    """

    checkpoint: Path
    query_CHW: Pixels
    hits: Sequence[Hit]


def search(
    checkpoint: Path, image: Path, k: int, by: By = "embeddings", trust_code: bool = False
) -> SearchResult:
    """Return the k slots of a checkpoint's memory that are most similar to a picture.

    Args:
        k: the number of slots, at least 1.
        by: what is compared: embeddings, or the descriptors on which the memory counts duplicates.
            The memory's embeddings are of different ages. The nearest slots, and those with the
            most similar thumbnails, are therefore encoded again, in batches of AGAIN with the
            query. If a slot holds the query, this slot comes first.
        trust_code: whether to import classes that the checkpoint names; see `load_encoder`.

    Raises:
        ValueError: the file is not a picture that the run would accept, the run learns from
            vectors, or the memory is empty.
        OSError: a file cannot be read.
    """
    encoder = load_encoder(checkpoint, "embeddings", trust_code=trust_code)
    if isinstance(encoder.decoder, VectorDecoder):
        raise ValueError(
            f"{checkpoint} learns from vectors, and this command searches for pictures: export the "
            "memory (stream-ssl export RUN --memory DIR) and search its index.faiss"
        )
    query_CHW = encoder.preprocess(image)
    state = upgraded(memory_of(checkpoint))
    columns = columns_of(state)
    if not len(columns["ids"]):
        raise ValueError(
            f"the memory of {checkpoint} is empty, because the run had not trained on a batch yet: "
            "search again after the run's next checkpoint"
        )
    query_1X, row_KX = _encoded(encoder, query_CHW, columns), columns["embeddings"]
    if by == "descriptors" and "descriptors" in columns:
        backbone = Encoder(
            encoder.backbone, None, encoder.views, encoder.decoder, encoder.statistics
        )
        descriptor = _descriptor_of(checkpoint, state, backbone.dim, trust_code)
        feature_1F = _encoded(backbone, query_CHW, columns)
        query_1X = descriptor.describe(query_1X, query_CHW[None], feature_1F)
        row_KX = columns["descriptors"]
    cosine_1k, slot_1k = nearest(query_1X.to(row_KX.dtype), row_KX, max(k, AGAIN))
    if by == "embeddings":
        cosine_1k, slot_1k = _encoded_again(encoder, query_CHW, columns, slot_1k)
    hits = _hits(checkpoint, columns, cosine_1k[0, :k], slot_1k[0, :k])
    return SearchResult(checkpoint, query_CHW.numpy(), hits)


def _descriptor_of(checkpoint: Path, state: State, features: int, trust_code: bool) -> Descriptor:
    """Return the descriptor of a checkpoint's memory, for an encoder with so many features.

    Raises:
        ValueError: the checkpoint does not hold the weights of the descriptor.
    """
    config = facts(checkpoint)["config"]
    settings = stored_settings(config, "descriptor", trust_code=trust_code)
    descriptor: Descriptor = settings.memory.descriptor or Embedding()
    descriptor.fit(features)
    if without_address(repr(descriptor)) != (due := decode(state)["descriptor"]):
        raise ValueError(
            f"the memory describes pictures by {due}, and here it would be {descriptor!r}, "
            "because its weights are not at hand: use --by embeddings"
        )
    descriptor.load(part(state, "descriptor"))
    return descriptor


def _encoded_again(
    encoder: Encoder, query_CHW: Tensor, columns: dict[str, Tensor], slot_1k: Tensor
) -> tuple[Tensor, Tensor]:
    """Encode these slots again, and the slots whose pictures look like the query.

    Returns:
        The cosines with the query and the slots [1, n], the most similar first.
    """
    near = [*slot_1k[0].tolist(), *_look_alike(query_CHW, columns)]
    slot_1n = torch.tensor([list(dict.fromkeys(near))])
    parts = []
    for slot_1b in torch.split(slot_1n, AGAIN, dim=1):
        new_NX = _encoded(encoder, query_CHW, columns, slot_1b[0].tolist())
        parts.append(new_NX[:1] @ new_NX[1:].T)
    cosine_1n, order_1n = torch.cat(parts, dim=1).sort(descending=True, stable=True)
    return cosine_1n, slot_1n.gather(1, order_1n)


def _hits(
    checkpoint: Path, columns: dict[str, Tensor], cosine_k: Tensor, slot_k: Tensor
) -> list[Hit]:
    """Return slots with their labels, origins and images."""
    origins = Origins()
    origins.load(origins_of(checkpoint), columns["ids"].tolist())
    found = zip(
        slot_k.tolist(),
        cosine_k.tolist(),
        columns["labels"][slot_k].tolist(),
        origins.of(columns["ids"][slot_k].tolist()),
        images_of(columns, slot_k.numpy()),
        strict=True,
    )
    return [
        Hit(slot, similarity, None if label < 0 else label, origin, image_CHW)
        for slot, similarity, label, origin, image_CHW in found
    ]


def _look_alike(query_CHW: Tensor, columns: dict[str, Tensor]) -> list[int]:
    """Return the AGAIN slots whose thumbnails are most similar to that of the query."""
    thumbnail, held = Thumbnail(), np.arange(len(columns["ids"]))
    rows = [
        thumbnail(torch.zeros(len(slots), 1), torch.from_numpy(images_of(columns, slots)))
        for slots in np.array_split(held, -(-len(held) // AGAIN))
    ]
    query_1A = thumbnail(torch.zeros(1, 1), query_CHW[None])
    slots: list[int] = nearest(query_1A, torch.cat(rows), AGAIN)[1][0].tolist()
    return slots


def _encoded(
    encoder: Encoder, query_CHW: Tensor, columns: dict[str, Tensor], slots: Sequence[int] = ()
) -> Tensor:
    """Return the embedding or the features of the query and of N slots, [1 + N, X].

    If BatchNorm uses the statistics of the batch, images from the whole memory join the batch. A
    batch of one image has no statistics. The statistics of similar images alone would hide what
    these images have in common.
    """
    shown = list(slots)
    if encoder.statistics == "batch":
        held = len(columns["ids"])
        shown += torch.linspace(0, held - 1, min(held, BESIDE)).long().tolist()
    image_BCHW = query_CHW[None]
    if shown:
        beside_BCHW = torch.from_numpy(images_of(columns, np.array(shown)))
        image_BCHW = torch.cat([image_BCHW, beside_BCHW])
    with torch.inference_mode():
        row_BX: Tensor = encoder(image_BCHW)
    return row_BX[: 1 + len(slots)].clone()
