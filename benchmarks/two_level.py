"""Two levels of ranks against one, on emulated hosts: ``python -m benchmarks.two_level [--out FILE] [--turns N]``.

A training step (forward, backward, SGD) of two layers on the same rows, with links like another machine's inside and
between the hosts:

    two-level phantom    a block on each host, shared by its ranks; only ghosts cross between hosts
    flat phantom         a block on each rank
    tensor, megatron     over all ranks
    megatron + FSDP2     Megatron inside hosts and fully sharded data parallelism between them, a part of the rows each

All have the same width and the same number of rows. Phantom models have the same ghosts, and are smaller than the dense
model that the others compute. Each rank has one thread, and the contestants take turns in one run.
"""

import argparse
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.layers import megatron_pair, read
from benchmarks.timing import about, interleave, measured_on_ranks, shown, write
from phantom_parallel import PhantomLinear, TensorLinear
from phantom_parallel.cost.calibrate import network_of
from phantom_parallel.cost.ledger import Ledger

TWO_LEVEL = "two-level phantom"


def training_step(model: nn.Module, rows: int, features: int) -> Callable[[], None]:
    """Forward, backward and SGD on one batch, without a gradient of its rows, as in the first layers of a model."""
    x, d = torch.randn(rows, features), torch.randn(rows, features)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

    def step() -> None:
        z = model(x)
        read(z)
        z.backward(d)
        optimizer.step()
        optimizer.zero_grad()

    return step


def contestants(mesh: DeviceMesh, hosts: int, width: int, batch: int, ghosts: int) -> dict[str, Callable[[], None]]:
    """The step of each, by name."""
    ranks = mesh.size()
    levels = init_device_mesh(mesh.device_type, (hosts, ranks // hosts), mesh_dim_names=("blocks", "inside"))
    nodes = init_device_mesh(mesh.device_type, (hosts, ranks // hosts), mesh_dim_names=("dp", "tp"))

    def phantom(blocks: int, over: DeviceMesh) -> nn.Module:
        layer = {"blocks": blocks, "ghosts": ghosts, "mesh": over}
        return nn.Sequential(*(PhantomLinear(width, width, **layer) for _ in range(2)))  # type: ignore[arg-type]

    sharded = megatron_pair(width, nodes["tp"])
    for layer in sharded.children():
        fully_shard(layer, mesh=nodes["dp"])
    fully_shard(sharded, mesh=nodes["dp"])
    tensor = nn.Sequential(*(TensorLinear(width, width, mesh=mesh) for _ in range(2)))
    share = width // ranks
    return {
        TWO_LEVEL: training_step(phantom(hosts, levels), batch, share),
        "flat phantom": training_step(phantom(ranks, mesh), batch, share),
        "tensor": training_step(tensor, batch, share),
        "megatron": training_step(megatron_pair(width, mesh), batch, width),
        "megatron + FSDP2": training_step(sharded, batch // hosts, width),
    }


def compare(mesh: DeviceMesh, hosts: int, width: int, batch: int, ghosts: int, turns: int) -> dict[str, Any]:
    """Times of all contestants, and what a rank of each computes and sends in a step."""
    torch.manual_seed(0)
    steps = contestants(mesh, hosts, width, batch, ghosts)
    counted = {}
    for name, step in steps.items():
        with Ledger() as ledger:
            step()
        inside = ledger.moved_of(near=mesh.size() // hosts)
        counted[name] = {"flops": ledger.flops, "bytes inside": inside, "bytes between": ledger.moved_bytes - inside}
    times = interleave(steps, turns=turns)
    return {
        "ranks": mesh.size(),
        "width": width,
        "milliseconds": {name: timing.milliseconds for name, timing in times.items()},
        "two-level phantom of": {
            name: times[TWO_LEVEL].ratio_to(timing) for name, timing in times.items() if name != TWO_LEVEL
        },
        "of a rank": counted,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=Path("out/two-level.json"), help="where the figures are written (%(default)s)"
    )
    parser.add_argument("--turns", type=int, default=21, help="turns each contestant gets (default: %(default)s)")
    parser.add_argument("--hosts", type=int, default=4, help="emulated hosts (default: %(default)s)")
    parser.add_argument("--inside", type=int, default=2, help="ranks on each host (default: %(default)s)")
    parser.add_argument("--widths", type=int, nargs="+", default=[2048, 4096], help="widths (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=256, help="rows of a step (default: %(default)s)")
    parser.add_argument("--ghosts", type=int, default=16, help="ghosts of a block (default: %(default)s)")
    parser.add_argument(
        "--link", default="like:frontier-mi250x", help="links, as phantom train has them (default: %(default)s)"
    )
    options = parser.parse_args()
    if options.turns < 2:
        parser.error(f"--turns must be at least 2, got {options.turns}")
    if options.batch % options.hosts:
        parser.error(f"--batch must be a multiple of {options.hosts} hosts, got {options.batch}")

    ranks = options.hosts * options.inside
    network = network_of(options.hosts, options.link, ranks)
    assert network is not None
    settings = {"layers": 2, "batch": options.batch, "ghosts": options.ghosts, "hosts": options.hosts}
    results: dict[str, Any] = {
        **about(f"python -m benchmarks.two_level --turns {options.turns} --hosts {options.hosts}"),
        "settings": settings | {"ranks of a host": options.inside, "network": asdict(network)},
        "step": [],
    }
    print(f"two layers, batch {options.batch}, {options.ghosts} ghosts, {options.hosts} hosts, {network}")
    for width in options.widths:
        sizes = (options.hosts, width, options.batch, options.ghosts, options.turns)
        row = measured_on_ranks(ranks, compare, *sizes, network=network)
        results["step"].append(row)
        for name, taken in row["milliseconds"].items():
            ratio = row["two-level phantom of"].get(name)
            print(f"width {width}, {name}: {shown(taken)} ms", end="")
            print("" if ratio is None else f"; two-level phantom {shown(ratio)} of it", flush=True)
    write(results, options.out)


if __name__ == "__main__":
    main()
