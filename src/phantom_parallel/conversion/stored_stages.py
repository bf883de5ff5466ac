"""What an interrupted conversion has finished, in a folder: the weights of outputs, the ghosts, and stage after stage.

It is used by a conversion with the same settings of the same model and data alone, and only if its bytes are those that
were written.
"""

import json
from collections.abc import Iterable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from phantom_parallel.conversion.sequential import GroupReport
from phantom_parallel.nn.linear import PhantomLinear
from phantom_parallel.utils.files import read_bytes, read_text, write_bytes, write_json

STATE = "conversion.json"
_IMPORTANCE = "importance.safetensors"


def digest_of(tensors: Iterable[Tensor]) -> str:
    """SHA-256 of the dtypes, shapes and bytes of tensors, in their order."""
    digest = sha256()
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


class StoredStages:
    """Finished parts of a conversion; nothing without a folder.

    Args:
        folder: Where they are stored.
        settings: What they depend on: if those in the folder are others, nothing of it is used.
    """

    def __init__(self, folder: Path | None, settings: Mapping[str, Any]) -> None:
        self._folder = folder
        self._about: dict[str, Any] = {"settings": json.loads(json.dumps(settings)), "ghosts": None, "stages": []}
        if folder is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        try:
            found = json.loads(read_text(folder / STATE))
            if found["settings"] == self._about["settings"]:
                self._about |= {name: found[name] for name in ("ghosts", "stages")}
                self._about["importance"] = found.get("importance")
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            pass  # nothing was stored, or a part of it: the conversion starts again

    @property
    def ghosts(self) -> dict[str, int] | None:
        return self._about["ghosts"]

    @property
    def finished(self) -> int:
        """Number of finished stages."""
        return len(self._about["stages"])

    @property
    def importance(self) -> dict[str, Tensor] | None:
        """Weights of the outputs of each map by name."""
        return self._read(_IMPORTANCE, self._about.get("importance"))

    def set_importance(self, importance: dict[str, Tensor]) -> None:
        self._about["importance"] = self._write(_IMPORTANCE, importance)
        self._write_state()

    def set_ghosts(self, ghosts: dict[str, int]) -> None:
        self._about["ghosts"] = ghosts
        self._write_state()

    def stage(self, index: int) -> tuple[list[GroupReport], dict[str, PhantomLinear]] | None:
        """The reports and layers of a finished stage; None if it is to be converted."""
        if self._folder is None or index >= len(self._about["stages"]):
            return None
        try:
            about = self._about["stages"][index]
            groups = [GroupReport(**group | {"maps": tuple(group["maps"])}) for group in about["groups"]]
            tensors = self._read(_file(index), about.get("digest"))
            if tensors is not None:
                return groups, {
                    name: self._layer(name, tensors, group.relative_error) for group in groups for name in group.maps
                }
        except (KeyError, TypeError, ValueError):
            pass
        del self._about["stages"][index:]
        return None

    def add(self, index: int, groups: list[GroupReport], layers: Mapping[str, nn.Module]) -> None:
        """Store a finished stage."""
        tensors = {
            f"{name}.{part}": t.contiguous() for name, one in layers.items() for part, t in one.state_dict().items()
        }
        digest = self._write(_file(index), tensors)
        self._about["stages"].append({"groups": [group.to_dict() for group in groups], "digest": digest})
        self._write_state()

    def _layer(self, name: str, tensors: Mapping[str, Tensor], error: float) -> PhantomLinear:
        local, compress, decompress = (tensors[f"{name}.{part}"] for part in ("local", "compress", "decompress"))
        blocks = self._about["settings"]["blocks"]
        bias = tensors.get(f"{name}.bias")
        return PhantomLinear.from_weights(local, compress, decompress, bias, blocks=blocks, relative_error=error)

    def _write(self, name: str, tensors: dict[str, Tensor]) -> str | None:
        """Write tensors to a file; the digest of its bytes."""
        if self._folder is None:
            return None
        data = save(tensors)
        write_bytes(self._folder / name, data)
        return sha256(data).hexdigest()

    def _read(self, name: str, digest: str | None) -> dict[str, Tensor] | None:
        """The tensors of a file; None if it is not there, or has other bytes than those that were written."""
        if self._folder is None or digest is None:
            return None
        try:
            data = read_bytes(self._folder / name)
        except OSError:
            return None
        return load(data) if sha256(data).hexdigest() == digest else None

    def _write_state(self) -> None:
        if self._folder is not None:
            write_json(self._folder / STATE, self._about)


def _file(index: int) -> str:
    return f"stage-{index:04d}.safetensors"
