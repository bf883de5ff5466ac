"""The phantom layer whose outputs are closest to a dense layer's on inputs of a known covariance, in float64.

With S = E[x x^T] and p blocks, in this order:

    Sc_j = mean over i != j of S_jj - S_ji S_ii^-1 S_ij     what block i does not know of x_j already
    M_j  = sum over i != j of W_ij^T W_ij
    C_j  = V^T F^-1                                         Sc_j = F F^T, V the leading eigenvectors of F^T M_j F
    [L_i | D_i] = E[y_i z^T] E[z z^T]^-1                    z = [x_i; C_j x_j for all j != i]
    C_j  = A^-1 (sum over i of D_ij^T R_ij) S_jj^-1         A = sum over i of D_ij^T D_ij, R_ij = E[r_i x_j^T]

where r_i is what is left of y_i without source j. The last two alternate while the error falls. Every step needs S
alone. Covariances of real activations are singular to working precision: S is damped once, relative to its mean
diagonal, so that all steps are about the same, regular S, and a layer with as many ghosts as a block has features is
the dense layer again.
"""

from typing import NamedTuple

import torch
from torch import Tensor

DAMPING = 1e-6  # relative to the mean of the diagonal of S
STEPS = 8  # alternating steps, at most
_FALL = 1e-3  # relative fall of the error below which they end
_FLOOR = 1e-12  # relative eigenvalue below which a matrix is singular


class OutputFit(NamedTuple):
    """Weights as `PhantomLinear` holds them, in float64, and the squared error E |W x - W' x|^2."""

    local: Tensor
    compress: Tensor
    decompress: Tensor
    squared_error: float


def damped(covariance: Tensor, damping: float = DAMPING) -> Tensor:
    """S + damping * mean(diag S) * I, symmetric, in float64."""
    s = covariance.double()
    s = (s + s.T) / 2
    return s + damping * s.diagonal().mean().clamp_min(1e-300) * torch.eye(len(s), dtype=s.dtype, device=s.device)


def solve(matrix: Tensor, right: Tensor) -> Tensor:
    """right matrix^-1 for a symmetric matrix: by Cholesky, and where that fails by eigenvalues with a floor."""
    factor, failed = torch.linalg.cholesky_ex(matrix)
    if not failed:
        return torch.cholesky_solve(right.T, factor).T
    values, vectors = torch.linalg.eigh(matrix)
    values = values.clamp_min(_FLOOR * float(values[-1].clamp_min(1e-300)))
    return (right @ vectors / values) @ vectors.T


def ghost_spectrum(s: Tensor, weight: Tensor, *, blocks: int) -> list[tuple[Tensor, Tensor]]:
    """For each source j, how much each ghost lowers the squared error at most, in descending order (m_in,), and the
    ghosts themselves, the rows of a (m_in, m_in).

    Args:
        s: The damped covariance (n_in, n_in).
        weight: (n_out, n_in).
        blocks: Number of blocks.
    """
    m = len(s) // blocks
    ss = s.view(blocks, m, blocks, m)
    ws = weight.view(blocks, -1, blocks, m)
    found = []
    for j in range(blocks):
        others = [i for i in range(blocks) if i != j]
        conditional = torch.zeros(m, m, dtype=s.dtype, device=s.device)
        for i in others:
            conditional += ss[j, :, j] - solve(ss[i, :, i], ss[j, :, i]) @ ss[i, :, j]
        values, vectors = torch.linalg.eigh((conditional + conditional.T) / (2 * len(others)))
        roots = values.clamp_min(_FLOOR * float(values[-1].clamp_min(1e-300))).sqrt()
        f, inverse = vectors * roots, (vectors / roots).T
        into_others = ws[others, :, j].reshape(-1, m)
        half = into_others @ f
        gains, directions = torch.linalg.eigh(half.T @ half)
        found.append((gains.flip(0).clamp_min(0), directions.flip(1).T @ inverse))
    return found


def fit_outputs(
    covariance: Tensor,
    weight: Tensor,
    *,
    blocks: int,
    ghosts: int,
    steps: int = STEPS,
    importance: Tensor | None = None,
) -> OutputFit:
    """The phantom weights for a dense weight (n_out, n_in) and the damped covariance (n_in, n_in) of its inputs.

    Ghosts are chosen for the squared errors of the outputs times their importance (n_out,), if that is given. L and D
    are the best for every output alone.
    """
    scale = torch.ones(len(weight), 1, dtype=torch.float64, device=weight.device)
    if importance is not None:
        scale = (importance.double() / importance.double().mean()).sqrt().unsqueeze(1)
    weight, s = scale * weight.double(), covariance.double()
    compress = torch.stack([rows[:ghosts] for _, rows in ghost_spectrum(s, weight, blocks=blocks)])  # (p, k, m)
    fit = _Fit(s, weight, blocks, compress)
    best = fit.refit()
    for _ in range(steps if ghosts < len(s) // blocks else 0):
        fit.improve_ghosts()
        found = fit.refit()
        done = found.squared_error > (1 - _FALL) * best.squared_error
        best = min(best, found, key=lambda one: one.squared_error)
        if done:
            break
    return balanced(_unscaled(best, scale), blocks)


def _unscaled(fit: "_WeightedFit", scale: Tensor) -> OutputFit:
    """The fit of the outputs themselves, from one of outputs times ``scale`` (n_out, 1)."""
    error = float((fit.errors / scale.squeeze(1).square()).sum())
    return OutputFit(fit.local / scale, fit.compress, fit.decompress / scale, error)


def balanced(fit: OutputFit, blocks: int) -> OutputFit:
    """The same function with each ghost scaled so that its row of C and its columns of D have the same mean square.

    The fit gives ghosts of unit variance: in a pretrained model, C is then 10 to 1,000 times as large as D, and an
    optimizer that changes all weights by as much, such as Adam, changes D too fast and C hardly.
    """
    p, k = blocks, len(fit.compress) // blocks
    sources = torch.tensor([[(i + step) % p for step in range(1, p)] for i in range(p)], device=fit.compress.device)
    rows = fit.compress.square().mean(1)  # of each ghost: (p k)
    pieces = fit.decompress.unflatten(0, (p, -1)).unflatten(2, (p - 1, k))  # (p, m_out, p-1, k), by receiver
    columns = torch.zeros_like(rows).view(p, k)
    columns.index_add_(0, sources.flatten(), pieces.square().mean(1).flatten(0, 1))
    columns = columns.flatten() / (p - 1)
    used = (rows > 0) & (columns > 0)
    scale = torch.where(used, columns / rows, 1).pow(0.25)  # (p k)
    into = scale.view(p, k)[sources].flatten(1)  # of each receiver's columns: (p, (p-1) k)
    decompress = fit.decompress.unflatten(0, (p, -1)) / into.unsqueeze(1)
    return fit._replace(compress=fit.compress * scale.unsqueeze(1), decompress=decompress.flatten(0, 1))


class _WeightedFit(NamedTuple):
    """Weights, and the squared error of each output (n_out,)."""

    local: Tensor
    compress: Tensor
    decompress: Tensor
    errors: Tensor

    @property
    def squared_error(self) -> float:
        return float(self.errors.sum())


class _Fit:
    """The products with S that both steps share."""

    def __init__(self, s: Tensor, weight: Tensor, blocks: int, compress: Tensor) -> None:
        self.p, self.m = blocks, len(s) // blocks
        self.s = s.view(blocks, self.m, blocks, self.m)
        self.target = (weight @ s).view(blocks, -1, blocks, self.m)  # E[y_i x_j^T]
        self.power = (weight @ s * weight).sum(1)  # E y^2 of each output
        self.compress = compress  # (p, k, m)
        self.local: list[Tensor] = []
        self.decompress: list[dict[int, Tensor]] = []

    def refit(self) -> _WeightedFit:
        """L and D together, for the ghosts at hand."""
        p, k = self.p, self.compress.shape[1]
        seen = torch.einsum("jkm,jmin->jkin", self.compress, self.s)  # E[g_j x_i^T]
        among = torch.einsum("jkin,iln->jkil", seen, self.compress)  # E[g_j g_i^T]
        to_ghosts = torch.einsum("iojm,jkm->iojk", self.target, self.compress)  # E[y_i g_j^T]
        self.local, self.decompress = [], []
        explained: list[Tensor] = []
        for i in range(p):
            ring = [(i + step) % p for step in range(1, p)]
            known = seen[ring, :, i].reshape(-1, self.m)  # E[g x_i^T]
            ghosts = among[ring][:, :, ring].reshape(len(known), len(known))
            zz = torch.cat([torch.cat([self.s[i, :, i], known.T], 1), torch.cat([known, ghosts], 1)])
            yz = torch.cat([self.target[i, :, i], to_ghosts[i][:, ring].flatten(1)], 1)
            weights = solve((zz + zz.T) / 2, yz)
            explained.append((2 * weights * yz).sum(1) - (weights @ zz * weights).sum(1))
            self.local.append(weights[:, : self.m])
            pieces = weights[:, self.m :].split(k, 1)
            self.decompress.append(dict(zip(ring, pieces, strict=True)))
        stacked = [torch.cat(list(of_receiver.values()), 1) for of_receiver in self.decompress]
        errors = self.power - torch.cat(explained)
        return _WeightedFit(torch.cat(self.local), self.compress.flatten(0, 1).clone(), torch.cat(stacked), errors)

    def improve_ghosts(self) -> None:
        """C of one source after the other, for L and D at hand."""
        p = self.p
        for j in range(p):
            square = self.compress.new_zeros(self.compress.shape[1], self.compress.shape[1])
            right = torch.zeros_like(self.compress[j])
            for i in range(p):
                if i == j:
                    continue
                left = self.target[i, :, j] - self.local[i] @ self.s[i, :, j]
                for other, weights in self.decompress[i].items():
                    if other != j:
                        left = left - weights @ (self.compress[other] @ self.s[other, :, j])
                own = self.decompress[i][j]
                square += own.T @ own
                right += own.T @ left
            self.compress[j] = solve(self.s[j, :, j], solve(square, right.T).T)
