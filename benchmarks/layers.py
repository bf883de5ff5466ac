"""How fast the layers are: ``python -m benchmarks.layers [--out FILE] [--turns N]``.

Three questions, each answered by ratios from one interleaved run:

    step      a training step (forward, backward, SGD) of two layers against torch's ColwiseParallel/RowwiseParallel,
              `TensorLinear`, and Megatron-Core's own layers where it is installed
    floor     the same step against its own local matrix products alone, and where the rest goes
    forward   one process without a mesh against ``nn.Linear``, ratio of multiply-adds beside the ratio of times

Each rank has one thread; the forward comparison has all cores. The layers' input needs a gradient, as in the middle of
a network. The floor's products go to buffers made before, so a step also pays for fresh memory: gradients are freed and
made anew each step, and the C library's default gives their pages back in between. The floor is therefore measured both
ways, by default and with freed memory kept; all else runs by default.
"""

import argparse
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from benchmarks.timing import about, interleave, measured_on_ranks, milliseconds, shown, write
from phantom_parallel import PhantomLinear, TensorLinear
from phantom_parallel.ops.collectives import finish, rank_group, start_all_gather, start_reduce_scatter

BATCH, GHOSTS = 64, 16
MORE_BLOCKS = 8  # beside one block a rank, as in the paper: blocks are not ranks


def phantom_pair(width: int, blocks: int, mesh: DeviceMesh | None) -> nn.Sequential:
    return nn.Sequential(*(PhantomLinear(width, width, blocks=blocks, ghosts=GHOSTS, mesh=mesh) for _ in range(2)))


def tensor_pair(width: int, mesh: DeviceMesh) -> nn.Module:
    return nn.Sequential(*(TensorLinear(width, width, mesh=mesh) for _ in range(2)))


def megatron_pair(width: int, mesh: DeviceMesh) -> nn.Module:
    pair = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))
    return parallelize_module(pair, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})


class MegatronCorePair(nn.Module):
    """Megatron-Core's own column and row layers."""

    def __init__(self, width: int, mesh: DeviceMesh) -> None:
        from megatron.core.model_parallel_config import ModelParallelConfig
        from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

        super().__init__()
        config = ModelParallelConfig(tensor_model_parallel_size=mesh.size(), use_cpu_initialization=True)
        settings = {"config": config, "init_method": nn.init.xavier_normal_, "tp_group": mesh.get_group()}
        self.column = ColumnParallelLinear(width, width, gather_output=False, **settings)
        self.row = RowParallelLinear(width, width, bias=True, input_is_parallel=True, skip_bias_add=False, **settings)

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.row(self.column(x)[0])[0]
        return z


def training_step(model: nn.Module, features: int) -> Callable[[], None]:
    """Forward, backward and SGD on one batch."""
    x = torch.randn(BATCH, features, requires_grad=True)
    d = torch.randn(BATCH, features)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

    def step() -> None:
        z = model(x)
        read(z)
        z.backward(d)
        optimizer.step()
        optimizer.zero_grad()
        read(x.grad)
        x.grad = None

    return step


def read(result: Tensor | None) -> None:
    """Torch's own pair leaves the wait for its exchange to whoever reads the result."""
    if isinstance(result, AsyncCollectiveTensor):
        result.wait()


def local_products(width: int, blocks: int, held: int) -> Callable[[], None]:
    """The matrix products of one rank's two phantom layers, forward and backward, into buffers made before: the floor
    under a step.
    """
    m, others = width // blocks, (blocks - 1) * GHOSTS
    x, z = torch.randn(held, BATCH, m), torch.empty(held, BATCH, m)
    g, o = torch.empty(held, BATCH, GHOSTS), torch.randn(held, BATCH, others)
    local, compress, decompress = torch.randn(held, m, m), torch.randn(held, GHOSTS, m), torch.randn(held, m, others)
    grads = [torch.empty_like(weight) for weight in (local, compress, decompress)]
    dx, h = torch.empty_like(x), torch.empty_like(o)
    batched = held > 1

    def product(a: Tensor, b: Tensor, out: Tensor, add: bool = False) -> None:
        if batched:
            torch.baddbmm(out, a, b, out=out) if add else torch.bmm(a, b, out=out)
        else:
            torch.addmm(out[0], a[0], b[0], out=out[0]) if add else torch.mm(a[0], b[0], out=out[0])

    def run() -> None:
        for _ in range(2):
            product(x, compress.mT, g)
            product(x, local.mT, z)
            product(o, decompress.mT, z, add=True)
        for _ in range(2):
            product(z, decompress, h)
            product(z.mT, x, grads[0])
            product(z.mT, o, grads[2])
            product(z, local, dx)
            product(g.mT, x, grads[1])
            product(g, compress, dx, add=True)

    return run


def update_alone(model: nn.Module) -> Callable[[], None]:
    """SGD on gradients that stay: what the update of a step costs."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return lambda: optimizer.step() and None


def exchanges_alone(mesh: DeviceMesh, held: int) -> Callable[[], None]:
    """The exchanges of a step with nothing to overlap them."""
    ranks = rank_group(mesh)
    g, h = torch.randn(BATCH, held * GHOSTS), torch.randn(ranks.size, BATCH, held * GHOSTS)

    def run() -> None:
        for _ in range(2):
            finish(start_all_gather(g, ranks))
        for _ in range(2):
            finish(start_reduce_scatter(h, ranks))

    return run


def compare_steps(mesh: DeviceMesh, width: int, turns: int) -> dict[str, Any]:
    size = mesh.size()
    share = width // size
    phantoms = {f"phantom, {blocks} blocks": phantom_pair(width, blocks, mesh) for blocks in (size, MORE_BLOCKS)}
    contestants = {name: training_step(pair, share) for name, pair in phantoms.items()}
    contestants["tensor"] = training_step(tensor_pair(width, mesh), share)
    contestants["megatron"] = training_step(megatron_pair(width, mesh), width)
    if find_spec("megatron") is not None:
        contestants["megatron-core"] = training_step(MegatronCorePair(width, mesh), width)
    times = interleave(contestants, turns=turns)
    return {
        "ranks": size,
        "width": width,
        "milliseconds": milliseconds(times),
        "phantom": {
            name: {
                "weights": sum(p.numel() for p in pair.parameters() if p.dim() == 2) / (2 * width**2),
                **{f"of {other}": times[name].ratio_to(times[other]) for other in contestants if other not in phantoms},
            }
            for name, pair in phantoms.items()
        },
    }


def compare_floor(mesh: DeviceMesh, width: int, blocks: int, turns: int) -> dict[str, Any]:
    size = mesh.size()
    held = blocks // size
    model = phantom_pair(width, blocks, mesh)
    contestants = {
        "step": training_step(model, width // size),
        "products": local_products(width, blocks, held),
        "update": update_alone(phantom_pair(width, blocks, mesh)),
        "exchanges": exchanges_alone(mesh, held),
    }
    times = interleave(contestants, turns=turns)
    taken = milliseconds(times)
    rest = taken["step"] - taken["products"] - taken["update"] - taken["exchanges"]
    return {
        "ranks": size,
        "width": width,
        "blocks": blocks,
        "milliseconds": {**taken, "rest": rest},
        "step/products": times["step"].ratio_to(times["products"]),
    }


def compare_forward(width: int, blocks: int, batches: tuple[int, ...], turns: int) -> list[dict[str, Any]]:
    phantom = PhantomLinear(width, width, blocks=blocks, ghosts=GHOSTS)
    dense = nn.Linear(width, width)
    weights = sum(p.numel() for p in (phantom.local, phantom.compress, phantom.decompress))
    rows = []
    for batch in batches:
        x = torch.randn(batch, width)
        with torch.no_grad():
            times = interleave({"phantom": lambda x=x: phantom(x), "dense": lambda x=x: dense(x)}, turns=turns)  # type: ignore[misc]
        rows.append(
            {
                "batch": batch,
                "threads": torch.get_num_threads(),
                "milliseconds": milliseconds(times),
                "phantom/dense": times["phantom"].ratio_to(times["dense"]),
                "multiply-adds": weights / dense.weight.numel(),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=Path("out/bench.json"), help="where the figures are written (default: %(default)s)"
    )
    parser.add_argument("--turns", type=int, default=25, help="turns each contestant gets (default: %(default)s)")
    options = parser.parse_args()
    if options.turns < 2:
        parser.error(f"--turns must be at least 2, got {options.turns}")

    results: dict[str, Any] = {
        **about(f"python -m benchmarks.layers --turns {options.turns}"),
        "settings": {"layers": 2, "batch": BATCH, "ghosts": GHOSTS},
    }
    print(f"two layers, batch {BATCH}, ghosts {GHOSTS}; ratios: median (quartiles) of {options.turns} turns")

    results["step"] = []
    for size, width in ((2, 4096), (4, 8192)):
        row = measured_on_ranks(size, compare_steps, width, options.turns)
        results["step"].append(row)
        for name, ratios in row["phantom"].items():
            print(f"step, {size} ranks, width {width}, {name} ({ratios['weights']:.3f} of the multiply-adds):", end=" ")
            print(", ".join(f"{of} {shown(ratios[of])}" for of in ratios if of != "weights"), flush=True)

    results["floor"] = []
    for size, blocks, keep in ((1, 4, False), (1, 4, True), (2, 2, False), (2, 2, True)):
        row = measured_on_ranks(size, compare_floor, 4096, blocks, options.turns, keep_memory=keep)
        results["floor"].append(row | {"freed memory kept": keep})
        parts = ", ".join(f"{name} {value:.1f}" for name, value in row["milliseconds"].items())
        memory = "freed memory kept" if keep else "default allocator"
        print(f"floor, {size} ranks, width 4096, {blocks} blocks, {memory}:", end=" ")
        print(f"step/products {shown(row['step/products'])}; milliseconds: {parts}", flush=True)

    results["forward"] = compare_forward(4096, 8, (1, 8, 64, 512), options.turns)
    for row in results["forward"]:
        print(f"forward, batch {row['batch']} ({row['multiply-adds']:.3f} of the multiply-adds):", end=" ")
        print(f"of nn.Linear {shown(row['phantom/dense'])}")

    write(results, options.out)


if __name__ == "__main__":
    main()
