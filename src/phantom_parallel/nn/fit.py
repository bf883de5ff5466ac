"""From a dense linear layer to a phantom one, in closed form.

**The closest weights** (`fit_source`). The diagonal blocks are kept: L_i = W_ii. The other blocks of column j, stacked,
are approximated by [D_ij]_i C_j, of rank k; the closest matrix of that rank in the Frobenius norm is the truncated
singular value decomposition. Columns are independent, so the complete fit is optimal. The singular values are split
evenly: D = U sqrt(S), C = sqrt(S) V^T.

**The closest outputs** on inputs of a known covariance (`fit_outputs`), in float64. With S = E[x x^T] and p blocks:

    Sc_j = mean over i != j of S_jj - S_ji S_ii^-1 S_ij     what block i does not know of x_j already
    M_j  = sum over i != j of W_ij^T W_ij
    C_j  = V^T F^-1                                         Sc_j = F F^T, V the leading eigenvectors of F^T M_j F
    [L_i | D_i] = E[y_i z^T] E[z z^T]^-1                    z = [x_i; C_j x_j for all j != i]
    C_j  = A^-1 (sum over i of D_ij^T R_ij) S_jj^-1         A = sum over i of D_ij^T D_ij, R_ij = E[r_i x_j^T]

where r_i is the residual of y_i without source j. The last two alternate while the error falls. Every step needs S
alone. Covariances of real activations are singular to working precision: S is damped once, relative to its mean
diagonal, so that all steps use the same, regular S, and a layer with as many ghosts as a block has features is the
dense layer again.
"""

import warnings
from math import ceil
from typing import NamedTuple

import torch
from torch import Tensor, nn

from phantom_parallel.utils.layout import BlockLayout

DAMPING = 1e-6  # relative to the mean of the diagonal of S
STEPS = 8  # alternating steps, at most
_REL_TOL = 1e-3  # relative fall of the error below which they end
_EIGENVALUE_FLOOR = 1e-12  # relative to the largest; smaller eigenvalues are singular


class SourceFit(NamedTuple):
    """The fit of one source block's weights, with its squared error."""

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
    rank = min(ghosts, s.shape[0])  # with fewer singular values than ghosts, the rest stays zero
    compress = s.new_zeros(ghosts, block_in)
    decompress = s.new_zeros(u.shape[0], ghosts)
    root = s[:rank].sqrt()
    compress[:rank] = root[:, None] * v[:rank]
    decompress[:, :rank] = u[:, :rank] * root
    lost = float(s[rank:].double().square().sum())
    return SourceFit(compress.to(weight.dtype), decompress.view(blocks - 1, block_out, ghosts).to(weight.dtype), lost)


class OutputFit(NamedTuple):
    """Weights as `PhantomLinear` holds them, in float64, and the squared error of each output, E (W x - W' x)^2."""

    local: Tensor
    compress: Tensor
    decompress: Tensor
    errors: Tensor  # (n_out,)

    @property
    def squared_error(self) -> float:
        return float(self.errors.sum())


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
    return (right @ vectors / _floored(values)) @ vectors.T


def _floored(eigenvalues: Tensor) -> Tensor:
    """Ascending eigenvalues, those of a singular matrix raised to a floor."""
    return eigenvalues.clamp_min(_EIGENVALUE_FLOOR * float(eigenvalues[-1].clamp_min(1e-300)))


def ghost_spectrum(s: Tensor, weight: Tensor, *, blocks: int) -> list[tuple[Tensor, Tensor]]:
    """For each source j, how much each ghost lowers the squared error at most, in descending order (m_in,), and the
    ghosts themselves, the rows of a (m_in, m_in). ``s`` is the damped covariance.
    """
    m = len(s) // blocks
    ss = s.view(blocks, m, blocks, m)
    ws = weight.view(blocks, -1, blocks, m)
    spectrum = []
    for j in range(blocks):
        others = [i for i in range(blocks) if i != j]
        conditional = torch.zeros(m, m, dtype=s.dtype, device=s.device)
        for i in others:
            conditional += ss[j, :, j] - solve(ss[i, :, i], ss[j, :, i]) @ ss[i, :, j]
        values, vectors = torch.linalg.eigh((conditional + conditional.T) / (2 * len(others)))
        roots = _floored(values).sqrt()
        f, inverse = vectors * roots, (vectors / roots).T
        half = ws[others, :, j].reshape(-1, m) @ f
        gains, directions = torch.linalg.eigh(half.T @ half)
        spectrum.append((gains.flip(0).clamp_min(0), directions.flip(1).T @ inverse))
    return spectrum


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
    alternating = _AlternatingFit(s, weight, blocks, compress)
    best = alternating.refit()
    for _ in range(steps if ghosts < len(s) // blocks else 0):
        alternating.improve_ghosts()
        fit = alternating.refit()
        converged = fit.squared_error > (1 - _REL_TOL) * best.squared_error
        best = min(best, fit, key=lambda candidate: candidate.squared_error)
        if converged:
            break
    errors = best.errors / scale.squeeze(1).square()
    return balanced(OutputFit(best.local / scale, best.compress, best.decompress / scale, errors), blocks)


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


class _AlternatingFit:
    """L and D for given ghosts, and ghosts for given L and D, from products with S that both steps share."""

    def __init__(self, s: Tensor, weight: Tensor, blocks: int, compress: Tensor) -> None:
        self.p, self.m = blocks, len(s) // blocks
        self.s = s.view(blocks, self.m, blocks, self.m)
        self.target = (weight @ s).view(blocks, -1, blocks, self.m)  # E[y_i x_j^T]
        self.power = (weight @ s * weight).sum(1)  # E y^2 of each output
        self.compress = compress  # (p, k, m)
        self.local: list[Tensor] = []
        self.decompress: list[dict[int, Tensor]] = []

    def refit(self) -> OutputFit:
        """L and D together, for the current ghosts."""
        p, k = self.p, self.compress.shape[1]
        ghosts_inputs = torch.einsum("jkm,jmin->jkin", self.compress, self.s)  # E[g_j x_i^T]
        ghosts_ghosts = torch.einsum("jkin,iln->jkil", ghosts_inputs, self.compress)  # E[g_j g_i^T]
        outputs_ghosts = torch.einsum("iojm,jkm->iojk", self.target, self.compress)  # E[y_i g_j^T]
        self.local, self.decompress = [], []
        explained: list[Tensor] = []
        for i in range(p):
            ring = [(i + step) % p for step in range(1, p)]
            gx = ghosts_inputs[ring, :, i].reshape(-1, self.m)  # E[g x_i^T]
            gg = ghosts_ghosts[ring][:, :, ring].reshape(len(gx), len(gx))
            zz = torch.cat([torch.cat([self.s[i, :, i], gx.T], 1), torch.cat([gx, gg], 1)])
            yz = torch.cat([self.target[i, :, i], outputs_ghosts[i][:, ring].flatten(1)], 1)
            weights = solve((zz + zz.T) / 2, yz)
            explained.append((2 * weights * yz).sum(1) - (weights @ zz * weights).sum(1))
            self.local.append(weights[:, : self.m])
            self.decompress.append(dict(zip(ring, weights[:, self.m :].split(k, 1), strict=True)))
        stacked = [torch.cat(list(of_receiver.values()), 1) for of_receiver in self.decompress]
        errors = self.power - torch.cat(explained)
        return OutputFit(torch.cat(self.local), self.compress.flatten(0, 1).clone(), torch.cat(stacked), errors)

    def improve_ghosts(self) -> None:
        """C of one source after the other, for the current L and D."""
        p = self.p
        for j in range(p):
            square = self.compress.new_zeros(self.compress.shape[1], self.compress.shape[1])
            right = torch.zeros_like(self.compress[j])
            for i in range(p):
                if i == j:
                    continue
                residual = self.target[i, :, j] - self.local[i] @ self.s[i, :, j]
                for other, weights in self.decompress[i].items():
                    if other != j:
                        residual = residual - weights @ (self.compress[other] @ self.s[other, :, j])
                own = self.decompress[i][j]
                square += own.T @ own
                right += own.T @ residual
            self.compress[j] = solve(self.s[j, :, j], solve(square, right.T).T)


def keep_modes(linear: nn.Linear, layer: nn.Module) -> None:
    """Copy the training mode and ``requires_grad`` from the dense layer to the layer that was made from it."""
    layer.train(linear.training)
    for name, parameter in layer.named_parameters():
        like = linear.bias if name == "bias" else linear.weight
        parameter.requires_grad_(like is None or like.requires_grad)


def warn_about_size(layout: BlockLayout) -> None:
    """Issue a UserWarning if a phantom layer is not smaller than the dense one that it replaces."""
    dense = layout.in_features * layout.out_features
    if layout.weights >= dense:
        warnings.warn(
            f"the phantom layer is not smaller than the dense one: {layout.in_features} -> {layout.out_features} "
            f"features with blocks={layout.blocks} and ghosts={layout.ghosts} have {layout.weights} weights, a dense "
            f"layer has {dense}: use fewer than {ceil(layout.break_even)} ghosts",
            UserWarning,
            stacklevel=3,
        )
