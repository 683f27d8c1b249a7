"""Encodes the images of a labelled set once, for all measures.

Shapes: B batch, C channels, H height, W width, N references, Q queries, F features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from stream_ssl.evaluation.labelled import LabelledBatch, balanced


class EncodesImages(Protocol):
    """An encoder to evaluate, in evaluation mode and without gradients."""

    def __call__(self, image_BCHW: Tensor) -> Tensor:
        """Return the features [B, F] of uint8 images without augmentation."""
        ...

    def view(self, image_BCHW: Tensor) -> Tensor:
        """Return the features [B, F] of one augmented view of each image.

        The views are drawn from torch's generator.
        """
        ...


@dataclass(frozen=True)
class Encoded:
    """One encoder's features of a labelled set, in float32 on the CPU.

    Attributes:
        reference_NF: features of the references.
        label_N: classes of the references.
        query_QF: features of the queries, with equally many queries of each class.
        label_Q: classes of the queries.
        view_QF, other_QF: features of two augmented views of each query.
    """

    reference_NF: Tensor
    label_N: Tensor
    query_QF: Tensor
    label_Q: Tensor
    view_QF: Tensor
    other_QF: Tensor


def encode(
    readers: Iterable[Iterable[LabelledBatch]],
    encoders: Mapping[str, EncodesImages],
    seed: int = 0,
    tell: Callable[[int], None] | None = None,
) -> dict[str, Encoded]:
    """Return the features of all images by every encoder. Each image is read once.

    Encoders that augment in the same way encode the same views.

    Args:
        readers: batches of references and queries; see `labelled.Reader`.
        encoders: the encoders by name.
        seed: seed of the views, and of the selection of equally many queries of each class.
        tell: progress callback: (images in the batch).

    Raises:
        ValueError: there are no references or no queries.
    """
    parts: dict[str, dict[str, list[Tensor]]] = {
        name: {"reference": [], "query": [], "view": [], "other": []} for name in encoders
    }
    labels: dict[str, list[Tensor]] = {"reference": [], "query": []}
    # The views use torch's global generators, whose state belongs to the caller.
    devices = list(range(torch.cuda.device_count()))
    with torch.random.fork_rng(devices), torch.inference_mode():
        for number, batch in enumerate(batch for reader in readers for batch in reader):
            image_BCHW = torch.from_numpy(batch.image_BHWC).permute(0, 3, 1, 2)
            labels[batch.part].append(torch.from_numpy(batch.label_B))
            for name, encoder in encoders.items():
                found = parts[name]
                found[batch.part].append(_kept(encoder(image_BCHW)))
                if batch.part == "query":
                    torch.manual_seed(seed + number)
                    found["view"].append(_kept(encoder.view(image_BCHW)))
                    found["other"].append(_kept(encoder.view(image_BCHW)))
            if tell is not None:
                tell(len(batch.label_B))
    return _gathered(parts, labels, seed)


def _gathered(
    parts: Mapping[str, Mapping[str, list[Tensor]]], labels: Mapping[str, list[Tensor]], seed: int
) -> dict[str, Encoded]:
    for part, kind in (("reference", "references"), ("query", "queries")):
        if not labels[part]:
            others = sum(map(len, (*labels["reference"], *labels["query"])))
            raise ValueError(
                f"the labelled set gave no {kind}, and {others} samples of the other kind: both "
                "are needed. Give more samples of each class, or without --references another "
                "--query_share"
            )
    label_N, label_Q = torch.cat(labels["reference"]), torch.cat(labels["query"])
    rows = balanced(label_Q, seed)
    return {
        name: Encoded(
            torch.cat(found["reference"]),
            label_N,
            torch.cat(found["query"])[rows],
            label_Q[rows],
            torch.cat(found["view"])[rows],
            torch.cat(found["other"])[rows],
        )
        for name, found in parts.items()
    }


def _kept(feature_BF: Tensor) -> Tensor:
    return feature_BF.float().cpu()
