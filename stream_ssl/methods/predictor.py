"""The head that guesses one view's embedding from another's.

Shapes: B rows, D embedding.
"""

from __future__ import annotations

from torch import Tensor, nn

from stream_ssl.methods.norm import BatchNorm1d


class Predictor(nn.Module):
    """Embeddings [B, D] to guesses [B, D]: one hidden layer with BatchNorm and ReLU.

    Args:
        dim: D.
        hidden: of the hidden layer.

    Raises:
        ValueError: no hidden layer.
    """

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        if hidden < 1:
            raise ValueError(f"predictor_hidden is {hidden}: the hidden layer needs at least 1")
        self.layers = nn.Sequential(
            nn.Linear(dim, hidden, bias=False),
            BatchNorm1d(hidden),
            nn.ReLU(inplace=True),
            nn.Linear(hidden, dim),
        )

    def forward(self, z_BD: Tensor) -> Tensor:
        guess_BD: Tensor = self.layers(z_BD)
        return guess_BD
