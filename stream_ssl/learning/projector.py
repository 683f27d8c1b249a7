"""From the encoder's features to the space that the loss sees.

Shapes: B samples, F features, D embedding.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from stream_ssl.methods.norm import BatchNorm1d


class Projector(nn.Module):
    """Features [B, F] to embeddings [B, D]; the method scales them to unit norm.

    Contrastive methods do without BatchNorm here: it would tell an anchor about its batch. Those
    without negatives need it.

    Args:
        features: F.
        dim: D.
        hidden: 0 is the one linear layer of the DUEL paper; else the size of one hidden layer with
            a ReLU, as in SimCLR and MoCo v2.
        batchnorm: "none"; after the "hidden" layer, as in BYOL; or after "all", as in SimSiam,
            where the last has no scale and shift.

    Raises:
        ValueError: an argument outside its range.
    """

    def __init__(
        self,
        features: int,
        dim: int = 128,
        hidden: int = 0,
        batchnorm: Literal["none", "hidden", "all"] = "none",
    ) -> None:
        super().__init__()
        if min(features, dim) < 1 or hidden < 0:
            raise ValueError(
                f"features={features}, dim={dim}, hidden={hidden}: the first two must be positive, "
                "hidden 0 (linear) or the size of the hidden layer"
            )
        _check(batchnorm, hidden)
        self.dim = dim
        self.layers: nn.Module = nn.Linear(features, dim)
        if hidden or batchnorm != "none":
            parts: list[nn.Module] = []
            if hidden:
                parts.append(nn.Linear(features, hidden))
                if batchnorm != "none":
                    parts.append(BatchNorm1d(hidden))
                parts.append(nn.ReLU(inplace=True))
            parts.append(nn.Linear(hidden or features, dim))
            if batchnorm == "all":
                parts.append(BatchNorm1d(dim, affine=False))
            self.layers = nn.Sequential(*parts)

    def forward(self, feature_BF: Tensor) -> Tensor:
        z_BD: Tensor = self.layers(feature_BF)
        return z_BD


def _check(batchnorm: str, hidden: int) -> None:
    if batchnorm not in ("none", "hidden", "all"):
        raise ValueError(f'batchnorm is {batchnorm!r}: choose "none", "hidden" or "all"')
    if batchnorm == "hidden" and not hidden:
        raise ValueError(
            'batchnorm="hidden" normalises a hidden layer, and hidden is 0: give its size'
        )
