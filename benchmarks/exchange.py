"""How ranks best exchange on gloo: ``python -m benchmarks.exchange``.

The backend's own all-gather and reduce-scatter against the same built from all-to-all, by turns in one run: median
microseconds of each with the barrier that ends a turn, for messages of ghosts and of whole activations.
"""

import torch

from benchmarks.timing import interleave, local_mesh
from phantom_parallel.distributed.launch import Report, launch_local
from phantom_parallel.ops.collectives import (
    finish_all_gather,
    finish_reduce_scatter,
    rank_group,
    start_all_gather,
    start_reduce_scatter,
)

SIZES = ((64, 16), (512, 16), (64, 1024))  # rows, words of a row


def compare(device: torch.device, report: Report) -> None:
    ranks = rank_group(local_mesh(device))
    for rows, words in SIZES:
        x, slices = torch.randn(rows, words), torch.randn(ranks.size, rows, words)
        contestants = {}
        for name, how in (("all_to_all", ranks), ("native", ranks._replace(native=True))):
            contestants[f"gather {name}"] = lambda x=x, how=how: finish_all_gather(start_all_gather(x, how), how)
            contestants[f"scatter {name}"] = lambda s=slices, how=how: finish_reduce_scatter(
                start_reduce_scatter(s, how), how
            )
        times = interleave(contestants, turns=60, warmup=10)
        report((rows, words, {name: 1e6 * timing.median for name, timing in times.items()}))


def main() -> None:
    print("| ranks, rows, words | all-gather | from all-to-all | reduce-scatter | from all-to-all |")
    print("|---|---|---|---|---|")
    for size in (2, 4, 8):

        def show(row: tuple[int, int, dict[str, float]], size: int = size) -> None:
            rows, words, us = row
            names = ("gather native", "gather all_to_all", "scatter native", "scatter all_to_all")
            print(f"| {size}, {rows}, {words} | " + " | ".join(f"{us[name]:.0f}" for name in names) + " |", flush=True)

        launch_local(size, compare, device_type="cpu", on_report=show)


if __name__ == "__main__":
    main()
