"""Rotary positions: a token's place turns its queries and keys, so that products depend on distances alone."""

from torch import Tensor, nn

from sage_ref.prologue import rotate


class Rotation(nn.Module):
    """Turn each pair of features (x_i, x_(i + D/2)) of token n by angle[n, i].

    angle: float [tokens, D/2], in radians. forward(x [..., N, D]) -> [..., N, D], N at most `tokens`.
    """

    def __init__(self, angle: Tensor):
        super().__init__()
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return rotate(x, self.cos[: x.shape[-2]], self.sin[: x.shape[-2]])
