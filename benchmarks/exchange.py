"""How ranks best exchange on gloo: ``python -m benchmarks.exchange [--busy 2] [--link 100mbit]``.

The backend's own all-gather and reduce-scatter against the same built from all-to-all, by turns in one run: median
microseconds of each with the barrier that ends a turn, for messages of ghosts and of whole activations. A second table
has an all-gather of 1 KiB from each rank, which a rank polls for before it sleeps: always, by the
policy of `ops.collectives`, and never. ``--busy`` starts so many processes beside that only compute.

``--link`` measures between emulated hosts of one rank each instead: the all-to-all and sends and receives by pairs of
ranks, beside what the bytes of a rank take on the link, in milliseconds.
"""

import argparse
import subprocess
import sys
from collections.abc import Callable

import torch

from benchmarks.timing import interleave, local_mesh
from phantom_parallel.cost.calibrate import network_of
from phantom_parallel.distributed.launch import Report, launch_local
from phantom_parallel.ops import collectives
from phantom_parallel.ops.collectives import RankGroup, finish, rank_group, start_all_gather, start_reduce_scatter

SIZES = ((64, 16), (512, 16), (64, 1024))  # rows, words of a row
RANKS = (2, 4, 8)
HOST_WORDS = (4096, 8192, 32768, 131072)  # from each rank
GATHERS = 20  # of a short message in a turn


def compare(device: torch.device, report: Report) -> None:
    ranks = rank_group(local_mesh(device))
    for rows, words in SIZES:
        x, slices = torch.randn(rows, words), torch.randn(ranks.size, rows, words)
        contestants = {}
        for name, how in (("all_to_all", ranks), ("native", ranks._replace(native=True))):
            contestants[f"gather {name}"] = lambda x=x, how=how: finish(start_all_gather(x, how))
            contestants[f"scatter {name}"] = lambda s=slices, how=how: finish(start_reduce_scatter(s, how))
        times = interleave(contestants, turns=60, warmup=10)
        report((f"{rows}, {words}", {name: 1e6 * timing.median for name, timing in times.items()}))


def compare_pairs(device: torch.device, report: Report) -> None:
    ranks = rank_group(local_mesh(device))
    for words in HOST_WORDS:
        x = torch.randn(64, words // 64)
        contestants = {}
        for name, how in (("all_to_all", ranks._replace(in_pairs=False)), ("pairs", ranks._replace(in_pairs=True))):
            contestants[name] = lambda x=x, how=how: finish(start_all_gather(x, how))
        times = interleave(contestants, turns=20, warmup=2)
        report((f"{words * 4:,}", {name: 1e3 * timing.median for name, timing in times.items()}))


class _Fixed(collectives.PollingPolicy):
    """Poll for every message, or for none."""

    def __init__(self, polls: bool) -> None:
        super().__init__()
        self._polls = polls

    def polls(self) -> bool:
        return self._polls


def compare_polling(device: torch.device, report: Report) -> None:
    ranks = rank_group(local_mesh(device))
    policies = {"always": _Fixed(True), "by policy": collectives.PollingPolicy(), "never": _Fixed(False)}
    times = interleave({name: _short_gather(ranks, policy) for name, policy in policies.items()}, turns=40, warmup=4)
    report(("1 KiB", {name: 1e6 * timing.median / GATHERS for name, timing in times.items()}))


def _short_gather(group: RankGroup, policy: collectives.PollingPolicy) -> Callable[[], object]:
    x = torch.randn(1, 256)  # 1 KiB

    def gather() -> None:
        collectives.polling = policy
        for _ in range(GATHERS):
            finish(start_all_gather(x, group))

    return gather


def _table(titles: tuple[str, ...], names: tuple[str, ...], function: Callable[..., None]) -> None:
    print(f"| {' | '.join(titles)} |\n|{'---|' * len(titles)}")
    for size in RANKS:

        def show(row: tuple[str, dict[str, float]], size: int = size) -> None:
            message, us = row
            print(f"| {size}, {message} | " + " | ".join(f"{us[name]:.0f}" for name in names) + " |", flush=True)

        launch_local(size, function, device_type="cpu", on_report=show)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--busy", type=int, default=0, help="processes that compute beside the ranks (default 0)")
    parser.add_argument("--link", help="rate of the links between emulated hosts, such as 100mbit")
    options = parser.parse_args()
    if options.link is not None:
        print("| hosts, bytes to each | all-to-all | pairs | link |\n|---|---|---|---|")
        for hosts in RANKS[:2]:
            network = network_of(hosts, options.link, hosts)
            assert network is not None
            assert network.rate is not None

            def show(row: tuple[str, dict[str, float]], hosts: int = hosts, rate: float = network.rate) -> None:
                line = 8e3 * (hosts - 1) * int(row[0].replace(",", "")) / rate
                print(f"| {hosts}, {row[0]} | {row[1]['all_to_all']:.1f} | {row[1]['pairs']:.1f} | {line:.1f} |")

            launch_local(hosts, compare_pairs, network=network, on_report=show)
        return
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(options.busy)]
    try:
        names = ("gather native", "gather all_to_all", "scatter native", "scatter all_to_all")
        titles = ("ranks, rows, words", "all-gather", "from all-to-all", "reduce-scatter", "from all-to-all")
        _table(titles, names, compare)
        print()
        policies = ("always", "by policy", "never")
        _table(("ranks, message", *(f"polling: {name}" for name in policies)), policies, compare_polling)
    finally:
        for process in busy:
            process.kill()


if __name__ == "__main__":
    main()
