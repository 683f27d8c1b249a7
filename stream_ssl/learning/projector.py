"""From the encoder's features to the space that the loss sees.

Shapes: B samples, F features, D embedding.
"""

from __future__ import annotations

from torch import Tensor, nn


class Projector(nn.Module):
    """Features [B, F] to embeddings [B, D]; the method scales them to unit norm.

    There is no BatchNorm here: it would tell an anchor about its batch.

    Args:
        features: F.
        dim: D.
        hidden: 0 is the one linear layer of the DUEL paper; else the size of one hidden layer with
            a ReLU, as in MoCo v2.

    Raises:
        ValueError: an argument outside its range.
    """

    def __init__(self, features: int, dim: int = 128, hidden: int = 0) -> None:
        super().__init__()
        if min(features, dim) < 1 or hidden < 0:
            raise ValueError(
                f"features={features}, dim={dim}, hidden={hidden}: the first two must be positive, "
                "hidden 0 (linear) or the size of the hidden layer"
            )
        self.dim = dim
        self.layers: nn.Module = nn.Linear(features, dim)
        if hidden:
            self.layers = nn.Sequential(
                nn.Linear(features, hidden), nn.ReLU(inplace=True), nn.Linear(hidden, dim)
            )

    def forward(self, feature_BF: Tensor) -> Tensor:
        z_BD: Tensor = self.layers(feature_BF)
        return z_BD
