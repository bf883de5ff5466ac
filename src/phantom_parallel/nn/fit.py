"""From a dense linear layer to a phantom one, in closed form.

**The closest weights** (`fit_sources`). The diagonal blocks are kept: L_i = W_ii. The others of column j, stacked, are
approximated by [D_ij]_i C_j, of rank k; the closest matrix of that rank in the Frobenius norm is the truncated
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
import torch.nn.functional as F
from torch import Tensor, nn

from phantom_parallel.utils.layout import BlockLayout

DAMPING = 1e-6  # relative to the mean of the diagonal of S
STEPS = 8  # alternating steps, at most
_REL_TOL = 1e-3  # relative fall of the error below which they end
_EIGENVALUE_FLOOR = 1e-12  # relative to the largest; smaller eigenvalues are singular


def ring(blocks: int) -> Tensor:
    """The sources of each block i in ring order, j = i+1, i+2, ..., i+p-1: (p, p-1)."""
    return (torch.arange(blocks)[:, None] + torch.arange(1, blocks)) % blocks


def in_ring_order(decompress: Tensor) -> Tensor:
    """D by receiver and source (p, p, m_out, k) to that of `PhantomLinear`, (p m_out, (p-1) k)."""
    blocks = len(decompress)
    return decompress[torch.arange(blocks)[:, None], ring(blocks)].transpose(1, 2).flatten(2).flatten(0, 1)


def fit_sources(weight: Tensor, sources: range, *, blocks: int, ghosts: int) -> tuple[Tensor, Tensor, float]:
    """The best rank-k ghosts of some source blocks of a dense weight (n_out, n_in): C_j (s, k, m_in), D_ij of all
    receivers (p, s, m_out, k), zero for i = j, and the squared error.
    """
    precise = torch.promote_types(weight.dtype, torch.float32)
    columns = (
        weight.unflatten(0, (blocks, -1)).unflatten(2, (blocks, -1)).permute(2, 0, 1, 3)[list(sources)].to(precise)
    )
    columns[range(len(sources)), list(sources)] = 0  # (s, p, m_out, m_in) without L
    u, s, v = torch.linalg.svd(columns.flatten(1, 2), full_matrices=False)
    more = max(0, ghosts - s.shape[1])  # with fewer singular values than ghosts, the rest is zero
    root, lost = s[:, :ghosts].sqrt(), float(s[:, ghosts:].double().square().sum())
    compress = F.pad(root.unsqueeze(2) * v[:, :ghosts], (0, 0, 0, more))
    decompress = F.pad(u[..., :ghosts] * root.unsqueeze(1), (0, more)).unflatten(1, (blocks, -1)).transpose(0, 1)
    return compress.to(weight.dtype), decompress.to(weight.dtype), lost


class OutputFit(NamedTuple):
    """Weights as `PhantomLinear` holds them, in float64, and the squared error of each output, E (W x - W' x)^2."""

    local: Tensor
    compress: Tensor
    decompress: Tensor
    errors: Tensor  # (n_out,)


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
    power = (weight @ s * weight).sum(1)  # E y^2 of each output
    target = (weight @ s).unflatten(0, (blocks, -1)).unflatten(2, (blocks, -1))  # E[y_i x_j^T]: (p, m_out, p, m)
    s = s.unflatten(0, (blocks, -1)).unflatten(2, (blocks, -1))  # (p, m, p, m)
    best = local, decompress, errors = _fit_local(s, target, power, compress)
    best_ghosts = compress
    for _ in range(steps if ghosts < s.shape[1] else 0):
        compress = _fit_ghosts(s, target, compress, local, decompress)
        local, decompress, errors = _fit_local(s, target, power, compress)
        before, now = float(best[2].sum()), float(errors.sum())
        if now < before:
            best, best_ghosts = (local, decompress, errors), compress
        if now > (1 - _REL_TOL) * before:
            break
    local, decompress, errors = best
    compress, decompress = _balanced(best_ghosts, decompress)
    decompress = in_ring_order(decompress) / scale
    return OutputFit(
        local.flatten(0, 1) / scale, compress.flatten(0, 1), decompress, errors / scale.squeeze(1).square()
    )


def _fit_local(s: Tensor, target: Tensor, power: Tensor, compress: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """L (p, m_out, m), D by receiver and source (p, p, m_out, k) and the squared errors, for given ghosts."""
    p, k, m = compress.shape
    ghosts_inputs = torch.einsum("jkm,jmin->jkin", compress, s)  # E[g_j x_i^T]
    ghosts_ghosts = torch.einsum("jkin,iln->jkil", ghosts_inputs, compress)  # E[g_j g_i^T]
    outputs_ghosts = torch.einsum("iojm,jkm->iojk", target, compress)  # E[y_i g_j^T]
    decompress = target.new_zeros(p, p, target.shape[1], k)
    local, explained = [], []
    for i in range(p):
        others = [j for j in range(p) if j != i]
        gx = ghosts_inputs[others, :, i].reshape(-1, m)  # E[g x_i^T]
        gg = ghosts_ghosts[others][:, :, others].reshape(len(gx), len(gx))
        zz = torch.cat([torch.cat([s[i, :, i], gx.T], 1), torch.cat([gx, gg], 1)])
        yz = torch.cat([target[i, :, i], outputs_ghosts[i][:, others].flatten(1)], 1)
        weights = solve((zz + zz.T) / 2, yz)
        explained.append((2 * weights * yz).sum(1) - (weights @ zz * weights).sum(1))
        local.append(weights[:, :m])
        decompress[i, others] = weights[:, m:].unflatten(1, (p - 1, k)).transpose(0, 1)
    return torch.stack(local), decompress, power - torch.cat(explained)


def _fit_ghosts(s: Tensor, target: Tensor, compress: Tensor, local: Tensor, decompress: Tensor) -> Tensor:
    """C of one source after the other, for given L and D."""
    compress = compress.clone()
    for j in range(len(compress)):
        own = decompress[:, j]  # (p, m_out, k), zero for receiver j
        explained = torch.einsum("iolk,lkm->iom", decompress.transpose(1, 2), compress @ s[:, :, j])
        residual = target[:, :, j] - local @ s[:, :, j] - explained + own @ (compress[j] @ s[j, :, j])
        square = torch.einsum("iok,iol->kl", own, own)
        right = torch.einsum("iok,iom->km", own, residual)
        compress[j] = solve(s[j, :, j], solve(square, right.T).T)
    return compress


def _balanced(compress: Tensor, decompress: Tensor) -> tuple[Tensor, Tensor]:
    """The same function with each ghost scaled so that its row of C and its columns of D have the same mean square:
    otherwise C is 10 to 1,000 times as large as D in a pretrained model, and Adam changes D too fast and C hardly.
    """
    rows, columns = compress.square().mean(2), decompress.square().mean(2).sum(0) / (len(compress) - 1)  # (p, k)
    scale = torch.where((rows > 0) & (columns > 0), columns / rows, 1).pow(0.25)
    return compress * scale.unsqueeze(2), decompress / scale.unsqueeze(1)


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
