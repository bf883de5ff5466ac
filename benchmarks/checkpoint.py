"""The memory of a rank while it saves and loads: ``python -m benchmarks.checkpoint``.

A model with AdamW's states, about 400 MiB in all, on 1, 2 and 4 ranks. The system's own mark of the peak (VmHWM in
/proc) is reset before each measurement, so that no peak is missed. Figures are those of the rank that needed most, over
what it held before; when it loads, over what it holds after. *Gathered* is for comparison: copies
of all whole tensors on every rank.
"""

import argparse
import ctypes
import gc
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from benchmarks.timing import about, measured_on_ranks, write
from phantom_parallel import load_model, save_model
from phantom_parallel.checkpoint.shards import storage_group
from phantom_parallel.distributed.objects import all_gather_objects
from phantom_parallel.distributed.process_group import ParallelContext
from phantom_parallel.families.ffn.config import FFNTrainConfig
from phantom_parallel.nn.sharded import full_tensor
from phantom_parallel.train import checkpoint
from phantom_parallel.train.loop import Trainer

WIDTH, DEPTH = 2048, 8
MIB = 2**20
_M_MMAP_THRESHOLD = -3  # of glibc's malloc.h


def resident(field: str) -> int:
    """Bytes of this process's memory, by the name that /proc/self/status has for them."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


def peak(work: Callable[[], Any]) -> dict[str, float]:
    """How far the memory of this process rises above what it was while ``work`` runs, in MiB; and seconds."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted anew
    before, start = resident("VmRSS"), time.perf_counter()
    kept = work()
    seconds = time.perf_counter() - start
    risen = (resident("VmHWM") - before) / MIB
    del kept
    return {"peak": risen, "seconds": seconds}


def measure(mesh: DeviceMesh, folder: str) -> dict[str, Any]:
    """Figures of the rank that needed most memory."""
    torch.manual_seed(0)
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, MIB)  # else glibc keeps some of the tensors that were freed
    config = FFNTrainConfig.of(
        width=WIDTH, depth=DEPTH, strategy="tensor", data="random", samples=64, batch=8, ranks=mesh.size()
    )
    parallel = ParallelContext(tp=mesh if mesh.size() > 1 else None)
    trainer = Trainer(config, parallel, None)
    trainer._step(0)
    parts = checkpoint.parts_of(trainer.optimizer)
    sizes = {name: part.values.numel() * part.values.itemsize for name, part in parts.items()}
    whole = max(4 * parameter.numel() for parameter in trainer.optimizer.parameters.values())
    world = None if mesh.size() == 1 else dist.group.WORLD
    writer, path = checkpoint.BackgroundWriter(world), Path(folder)

    def save() -> None:
        staged = checkpoint.stage(checkpoint.parts_of(trainer.optimizer))
        progress = checkpoint.Progress(1, 0.0)
        writer.start(lambda: checkpoint.write(staged, config, progress, path, writer.group))
        writer.wait()

    def load() -> None:
        checkpoint.load(path / "step-000001", trainer.optimizer, config, storage_group(world))

    def forget() -> None:
        for name in trainer.optimizer.parts:
            trainer.optimizer.state(name).clear()

    def gather() -> list[torch.Tensor]:
        kept = []
        for name, parameter in trainer.optimizer.parameters.items():
            kept.append(full_tensor(parameter).clone())
            for key in ("exp_avg", "exp_avg_sq"):
                state = trainer.optimizer.state(name)[key]
                kept.append(full_tensor(_like(parameter, state)).clone())
        return kept

    save()  # modules that are imported when first needed
    figures = {"save": peak(save), "gathered": peak(gather)}
    figures["save_model"] = peak(lambda: save_model(trainer.task.model, path / "model", overwrite=True))
    del parts
    forget()
    states = sum(size for name, size in sizes.items() if name.startswith("optimizer.")) / MIB
    figures["load"] = peak(load)
    figures["load"]["peak"] -= states
    weights = sum(size for name, size in sizes.items() if name.startswith("model.")) / MIB
    tp = None if mesh.size() == 1 else mesh
    figures["load_model"] = peak(lambda: load_model(path / "model", mesh=tp))
    figures["load_model"]["peak"] -= weights
    gathered = all_gather_objects(figures, mesh)
    return {
        "ranks": mesh.size(),
        "state": sum(sizes.values()) / MIB,
        "tensor": whole / MIB,
        **{
            name: {key: max(figures_of[name][key] for figures_of in gathered) for key in ("peak", "seconds")}
            for name in figures
        },
    }


def _like(parameter: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    if not isinstance(parameter, DTensor):
        return part
    return DTensor.from_local(part, parameter.device_mesh, parameter.placements)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=Path("out/checkpoint.json"), help="where the figures go (default: %(default)s)"
    )
    options = parser.parse_args()
    results: dict[str, Any] = {
        **about("python -m benchmarks.checkpoint"),
        "settings": {"width": WIDTH, "depth": DEPTH, "strategy": "tensor", "optimizer": "adamw"},
        "unit": "MiB over what the rank holds, and seconds",
        "rows": [],
    }
    names = ("save", "gathered", "load", "save_model", "load_model")
    print(f"| ranks | own state | largest tensor | {' | '.join(names)} |")
    print("|---" * (3 + len(names)) + "|")
    for size in (1, 2, 4):
        with tempfile.TemporaryDirectory() as folder:
            row = measured_on_ranks(size, measure, folder)
        results["rows"].append(row)
        figures = " | ".join(f"{row[name]['peak']:.0f} MiB, {row[name]['seconds']:.2f} s" for name in names)
        print(f"| {size} | {row['state']:.0f} MiB | {row['tensor']:.0f} MiB | {figures} |", flush=True)
    write(results, options.out)


if __name__ == "__main__":
    main()
