"""The phantom layer closest to a dense one, in closed form.

The diagonal blocks are kept: L_i = W_ii. The other blocks of column j, stacked, are approximated by [D_ij]_i C_j, of
rank k; the closest matrix of that rank in the Frobenius norm is the truncated singular value decomposition. Columns are
independent, so the complete fit is optimal. The singular values are split evenly: D = U sqrt(S), C = sqrt(S) V^T.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class SourceFit(NamedTuple):
    """The fit of one source block, with its squared error."""

    compress: Tensor  # C_j: (k, m_in)
    decompress: Tensor  # D_ij in ring order of the receivers, i = j+1, j+2, ..., j+p-1: (p-1, m_out, k)
    squared_error: float

    def cpu(self) -> "SourceFit":
        """The same in the host's memory, to be sent to other ranks."""
        return self._replace(compress=self.compress.cpu(), decompress=self.decompress.cpu())


def fit_source(weight: Tensor, source: int, *, blocks: int, ghosts: int) -> SourceFit:
    """The best rank-k ghosts of one source block of a dense weight (n_out, n_in)."""
    block_out, block_in = weight.shape[0] // blocks, weight.shape[1] // blocks
    precise = torch.promote_types(weight.dtype, torch.float32)
    column = weight[:, source * block_in : (source + 1) * block_in].to(precise).view(blocks, block_out, block_in)
    receivers = [(source + step) % blocks for step in range(1, blocks)]
    u, s, v = torch.linalg.svd(column[receivers].reshape(-1, block_in), full_matrices=False)
    kept = min(ghosts, s.shape[0])  # with fewer singular values than ghosts, the rest stays zero
    compress = s.new_zeros(ghosts, block_in)
    decompress = s.new_zeros(u.shape[0], ghosts)
    root = s[:kept].sqrt()
    compress[:kept] = root[:, None] * v[:kept]
    decompress[:, :kept] = u[:, :kept] * root
    lost = float(s[kept:].double().square().sum())
    return SourceFit(compress.to(weight.dtype), decompress.view(blocks - 1, block_out, ghosts).to(weight.dtype), lost)
