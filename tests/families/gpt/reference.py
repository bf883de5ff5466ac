"""A decoder-only transformer from its definition, in plain float64 maths that shares no code with the model.

Heads one by one, rotary positions as complex numbers, phantom maps as the dense matrices that they equal. Gradients are
autograd's, with respect to the parameters as the model names and lays them out.
"""

import torch
from torch import Tensor


def draw(model: torch.nn.Module, seed: int = 0) -> dict[str, Tensor]:
    """Float64 weights for every parameter of a model, norms' included; roughly the model's own scale."""
    generator = torch.Generator().manual_seed(seed)
    drawn = {}
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        fan_in = parameter.shape[0 if name.endswith(".down") else -1]  # of a low-rank map, whose V is transposed
        drawn[name] = 1 + 0.3 * noise if name.endswith("norm") else noise * fan_in**-0.5
    return drawn


def tokens(vocab: int, batch: int = 2, length: int = 9) -> tuple[Tensor, Tensor]:
    drawn = torch.randint(vocab, (batch, length + 1), generator=torch.Generator().manual_seed(5))
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def weight(params: dict[str, Tensor], name: str, blocks: int | None) -> Tensor:
    """The dense matrix of a linear map: W_ii = L_i, W_ij = D_ij C_j."""
    if f"{name}.up" in params:
        return params[f"{name}.up"] @ params[f"{name}.down"].T
    if blocks is None:
        return params[f"{name}.weight"]
    L, C = (params[f"{name}.{part}"].chunk(blocks) for part in ("local", "compress"))
    D = [rows.chunk(blocks - 1, 1) for rows in params[f"{name}.decompress"].chunk(blocks)]
    return torch.cat(
        [
            torch.cat([L[i] if i == j else D[i][(j - i) % blocks - 1] @ C[j] for j in range(blocks)], 1)
            for i in range(blocks)
        ]
    )


def norm(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    return scale * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def turn(x: Tensor, base: float) -> Tensor:
    """(batch, t, head_dim), feature i paired with i + head_dim/2."""
    half = x.shape[-1] // 2
    rates = base ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.arange(x.shape[1], dtype=torch.float64)[:, None] * rates
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], -1)


def attention(x: Tensor, W: Tensor, config) -> Tensor:
    """Heads' outputs side by side. Rows of W: for each head of keys and values its queries, the key and the value."""
    t, size = x.shape[1], config.dim // config.heads
    ahead = torch.ones(t, t, dtype=torch.bool).triu(1)
    outputs = []
    for rows in W.chunk(config.kv_heads):
        *queries, key, value = ((x @ part.T) for part in rows.split(size))
        for query in queries:
            scores = turn(query, config.rope_base) @ turn(key, config.rope_base).transpose(1, 2) / size**0.5
            outputs.append(scores.masked_fill(ahead, -torch.inf).softmax(-1) @ value)
    return torch.cat(outputs, -1)


def logits(params: dict[str, Tensor], config, inputs: Tensor) -> Tensor:
    eps = config.norm_eps
    x, late = params["embedding.weight"][inputs], 0
    kinds = (parallel,) if config.parallel_block else (attended, swiglu)
    for kind, i in [(kind, i) for i in range(config.layers) for kind in kinds]:
        added = kind(x, params, f"layers.{i}", config)
        if config.ladder:  # read without what the one before has added
            x, late = x + late, added
        else:
            x = x + added
    x = x + late
    rows = "embedding.weight" if config.tie_embeddings else "head.weight"
    head = params[rows if rows in params else "head.linear.weight"]
    return norm(x, params["head.norm"], eps) @ head.T


def attended(x: Tensor, params: dict[str, Tensor], name: str, config) -> Tensor:
    name, p = f"{name}.attention", config.blocks
    normed = norm(x, params[f"{name}.qkv.norm"], config.norm_eps)
    return attention(normed, weight(params, f"{name}.qkv.linear", p), config) @ weight(params, f"{name}.out", p).T


def swiglu(x: Tensor, params: dict[str, Tensor], name: str, config) -> Tensor:
    name, p = f"{name}.mlp", config.blocks
    both = norm(x, params[f"{name}.gate_up.norm"], config.norm_eps) @ weight(params, f"{name}.gate_up.linear", p).T
    pieces = [piece.chunk(2, -1) for piece in both.chunk(config.hidden_groups, -1)]
    hidden = torch.cat([gate * gate.sigmoid() * up for gate, up in pieces], -1)
    return hidden @ weight(params, f"{name}.down", p).T


def parallel(x: Tensor, params: dict[str, Tensor], name: str, config) -> Tensor:
    """Attention and SwiGLU of one norm, added. The features of a head of keys and values, then its gate and up."""
    y = norm(x, params[f"{name}.qkv_gate_up.norm"], config.norm_eps)
    into = weight(params, f"{name}.qkv_gate_up.linear", config.blocks).chunk(config.kv_heads)
    back = weight(params, f"{name}.out_down", config.blocks).chunk(config.kv_heads, 1)
    size, width = config.dim // config.kv_heads, config.hidden // config.kv_heads
    heads = attention(y, torch.cat([rows[: -2 * width] for rows in into]), config)
    added = heads @ torch.cat([columns[:, :size] for columns in back], 1).T
    for rows, columns in zip(into, back, strict=True):
        gate, up = (y @ rows[-2 * width :].T).chunk(2, -1)
        added = added + (gate * gate.sigmoid() * up) @ columns[:, size:].T
    return added


def expected(params: dict[str, Tensor], config, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Logits, loss, and the loss's gradient for every parameter."""
    leaves = {name: value.clone().requires_grad_() for name, value in params.items()}
    out = logits(leaves, config, inputs)
    loss = -out.log_softmax(-1).gather(-1, targets[..., None]).mean()
    grads = torch.autograd.grad(loss, list(leaves.values()))
    return {"logits": out.detach(), "loss": loss.detach(), **dict(zip(leaves, grads, strict=True))}
