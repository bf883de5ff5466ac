"""A simulated accelerator: the device type ``simulated``, whose memory is the host's, with a process group of its own.

``environment(devices)`` has the variables with which a new process, and every rank that it launches, has such devices:
torch loads them by the entry point that a folder on the path declares. The library is built from ``accelerator.cpp`` by
g++ once for each version of it and of torch.
"""

import hashlib
import os
import subprocess
import sysconfig
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent.parent
SOURCE = Path(__file__).with_name("accelerator.cpp")
WAITS = ("reads", "blocking copies", "dynamic shapes", "synchronizations")


def environment(devices: int) -> dict[str, str]:
    """Variables of a process that has ``devices`` simulated devices."""
    library = build()
    paths = f"{library.parent}:{ROOT}:{ROOT / 'src'}"
    return os.environ | {"PYTHONPATH": paths, "SIMULATED_LIBRARY": str(library), "SIMULATED_DEVICES": str(devices)}


def build() -> Path:
    """The library, beside the entry point that torch looks for."""
    text = f"{torch.__version__} {SOURCE.read_text()}"
    folder = Path(tempfile.gettempdir()) / f"simulated-{os.getuid()}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    library = folder / "libsimulated.so"
    if library.is_file():
        return library
    from torch.utils import cpp_extension

    folder.mkdir(mode=0o700, exist_ok=True)
    entry = folder / "simulated-0.dist-info"
    entry.mkdir(exist_ok=True)
    (entry / "METADATA").write_text("Metadata-Version: 2.1\nName: simulated\nVersion: 0\n")
    (entry / "entry_points.txt").write_text("[torch.backends]\nsimulated = tests.device.backend:load\n")
    includes = [f"-I{path}" for path in (*cpp_extension.include_paths(), sysconfig.get_paths()["include"])]
    libraries = [f"-L{Path(torch.__file__).parent / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10"]
    unfinished = folder / f"{os.getpid()}.so"
    command = ["g++", "-std=c++20", "-O0", "-w", "-shared", "-fPIC", str(SOURCE), *includes, *libraries]
    subprocess.run([*command, "-o", str(unfinished)], check=True)
    os.replace(unfinished, library)
    return library


def waits() -> dict[str, int]:
    """How often the host of this process has waited for a device, by kind."""
    return dict(zip(WAITS, torch.ops.simulated.waits(), strict=True))
