"""Dense float64 maths that the operators are held against, written from the definition and sharing no code with them.

A phantom map is held here as the paper writes it: L[i], C[j] and D[i][j] for j != i, one tensor each.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Phantom:
    """One phantom layer by its blocks, with an input and an output gradient of the given leading shape."""

    L: list[Tensor]
    C: list[Tensor]
    D: list[list[Tensor | None]]
    bias: Tensor
    x: Tensor
    d: Tensor

    @staticmethod
    def random(
        blocks: int, block_in: int, block_out: int, ghosts: int, rows: tuple[int, ...] = (6,), seed: int = 0
    ) -> "Phantom":
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        return Phantom(
            L=[draw(block_out, block_in) for _ in range(blocks)],
            C=[draw(ghosts, block_in) for _ in range(blocks)],
            D=[[None if j == i else draw(block_out, ghosts) for j in range(blocks)] for i in range(blocks)],
            bias=draw(blocks * block_out),
            x=draw(*rows, blocks * block_in),
            d=draw(*rows, blocks * block_out),
        )

    @property
    def blocks(self) -> int:
        return len(self.L)

    def weight(self) -> Tensor:
        """W with W_ii = L_i and W_ij = D_ij C_j."""
        rows = []
        for i in range(self.blocks):
            rows.append(torch.cat([self.L[i] if j == i else self.D[i][j] @ self.C[j] for j in range(self.blocks)], 1))
        return torch.cat(rows, 0)

    def packed(self) -> dict[str, Tensor]:
        """The parameters as the layer lays them out: blocks stacked, sources of block i in the order i+1, i+2, ... (mod
        p).
        """
        p = self.blocks
        rows = [torch.cat([self.D[i][(i + step) % p] for step in range(1, p)], 1) for i in range(p)]
        return {
            "local": torch.cat(self.L),
            "compress": torch.cat(self.C),
            "decompress": torch.cat(rows),
            "bias": self.bias,
        }

    def expected(self) -> dict[str, Tensor]:
        """Output and gradients of sum(z * d) by the chain rule through the dense weight."""
        p, W = self.blocks, self.weight()
        x, d = self.x.reshape(-1, W.shape[1]), self.d.reshape(-1, W.shape[0])
        dW = d.T @ x
        m_out, m_in = self.L[0].shape

        def part(i: int, j: int) -> Tensor:
            return dW[i * m_out : (i + 1) * m_out, j * m_in : (j + 1) * m_in]

        grads = Phantom(
            L=[part(i, i) for i in range(p)],
            C=[sum(self.D[i][j].T @ part(i, j) for i in range(p) if i != j) for j in range(p)],
            D=[[None if j == i else part(i, j) @ self.C[j].T for j in range(p)] for i in range(p)],
            bias=d.sum(0),
            x=self.x,
            d=self.d,
        )
        z = (x @ W.T + self.bias).view(self.d.shape)
        return {"z": z, "x": (d @ W).view(self.x.shape), **grads.packed()}


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """|actual - expected| / |expected|, in float64."""
    actual, expected = actual.detach().double(), expected.detach().double()
    return float((actual - expected).norm() / expected.norm().clamp_min(1e-300))
