"""Pretrained models on disk, as Hugging Face's libraries write them: folders of safetensors files, or GGUF files.

Nothing is unpickled and no code of a model runs. Tensors of safetensors files are read one at a time; a GGUF file is
decoded by ``transformers``, which holds the whole model.
"""

import json
import os
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from phantom_parallel.checkpoint.model import CONFIG
from phantom_parallel.checkpoint.shards import INDEX, WEIGHTS
from phantom_parallel.utils.files import read_json, read_text, write_bytes

TOKENIZER = "tokenizer.json"
CHAT_TEMPLATE = "chat_template.jinja"
TOKENIZER_CONFIG = "tokenizer_config.json"
GENERATION_CONFIG = "generation_config.json"
# Files beside the weights that a model keeps: they are copied in and out without changes.
KEPT_FILES = (TOKENIZER, TOKENIZER_CONFIG, "special_tokens_map.json", GENERATION_CONFIG, CHAT_TEMPLATE)
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_FLOATS = ("F64", "F32", "F16", "BF16")  # dtypes of safetensors


class PretrainedModel:
    """A pretrained model: a folder with ``config.json`` and safetensors files, one with a GGUF file, or a GGUF file.

    ``config`` has its settings as ``config.json`` has them, ``shapes`` the shape of each tensor, all of floating point,
    and ``files`` the contents of those of `KEPT_FILES` that it has. ``load`` returns the whole tensor of a name, in the
    dtype of the file. ValueError if it is not such a model.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.shapes: dict[str, tuple[int, ...]] = {}
        gguf = _gguf_file(self.path)
        if gguf is None:
            self.config = read_json(self.path / CONFIG)
            self.files = read_kept_files(self.path)
            self.load: Callable[[str], Tensor] = self._open_safetensors()
        else:
            self.load = self._decode_gguf(gguf)
        # Special tokens, such as those that end a text, go to the settings of generation where these lack them.
        settings = json.loads(self.files.get(GENERATION_CONFIG, b"{}"))
        missing = {name for name in SPECIAL_TOKENS if settings.get(name) is None and self.config.get(name) is not None}
        if missing:
            settings |= {name: self.config[name] for name in SPECIAL_TOKENS if name in missing}
            self.files[GENERATION_CONFIG] = (json.dumps(settings, indent=2) + "\n").encode()

    def _open_safetensors(self) -> Callable[[str], Tensor]:
        where: dict[str, Path] = {}
        for file in _safetensors_files(self.path):
            try:
                with safe_open(file, framework="pt") as opened:
                    tensors = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 (no dictionary)
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{file} is not a readable safetensors file: {error}") from None
            for name, tensor in tensors.items():
                if (kind := tensor.get_dtype()) not in _FLOATS:
                    raise ValueError(f"{file}: {name} is of the dtype {kind}: only {', '.join(_FLOATS)} are supported")
                self.shapes[name], where[name] = tuple(tensor.get_shape()), file

        def load(name: str) -> Tensor:
            with safe_open(where[name], framework="pt") as opened:
                return opened.get_tensor(name)

        return load

    def _decode_gguf(self, file: Path) -> Callable[[str], Tensor]:
        try:
            import gguf  # noqa: F401
            import transformers
        except ImportError:
            needed = "pip install 'phantom-parallel[pretrained]'"
            raise ValueError(f"{file} is read by transformers and gguf: {needed}") from None
        # Without trust_remote_code=False, transformers asks on a terminal whether to run Python files beside the model.
        where: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True, "trust_remote_code": False}
        with open(os.devnull, "w") as nowhere, redirect_stderr(nowhere), redirect_stdout(nowhere):  # progress bars
            try:
                model = transformers.AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **where)
                tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, **where)
            except Exception as error:  # of any class: a damaged file fails anywhere in the libraries
                raise ValueError(f"{file} is not a GGUF file that transformers can read: {error}") from None
        self.config = model.config.to_dict()
        self.config.pop("quantization_config", None)  # of the file; the tensors are decoded
        special = {f"{name}_token": getattr(tokenizer, f"{name}_token", None) for name in ("bos", "eos")}
        self.files = {
            TOKENIZER: tokenizer.backend_tokenizer.to_str(pretty=True).encode(),
            TOKENIZER_CONFIG: json.dumps(special, indent=2).encode(),
        }
        if tokenizer.chat_template:
            self.files[CHAT_TEMPLATE] = tokenizer.chat_template.encode()
        tensors = {name: tensor.detach() for name, tensor in model.state_dict().items()}
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        return lambda name: tensors[name]


def copy_kept_files(source: Path, folder: Path) -> None:
    """Copy the tokenizer and the files around it from one model's folder, or the folder of its training around it, to
    another's.
    """
    if not any((source / name).is_file() for name in KEPT_FILES):
        source = source.parent
    for name, data in read_kept_files(source).items():
        write_bytes(folder / name, data)


def read_kept_files(folder: Path) -> dict[str, bytes]:
    """The contents of the files of `KEPT_FILES` in a model's folder. A chat template inside the tokenizer's settings is
    also a file of its own. ValueError if a file is of another kind: it may be a link to a private one.
    """
    files: dict[str, bytes] = {}
    template = None
    for name in KEPT_FILES:
        if not (path := folder / name).is_file():
            continue
        if name == CHAT_TEMPLATE:
            if "messages" not in (template := read_text(path)):
                raise ValueError(f"{path} is not a chat template: it does not use messages")
        else:
            settings = read_json(path)
            if name == TOKENIZER_CONFIG and isinstance(settings.get("chat_template"), str):
                template = settings["chat_template"]
        files[name] = path.read_bytes()
    return files if template is None else files | {CHAT_TEMPLATE: template.encode()}


def _gguf_file(path: Path) -> Path | None:
    if path.is_file():
        if path.suffix != ".gguf":
            raise ValueError(f"{path} is a file: give a folder of a pretrained model, or a file NAME.gguf")
        return path
    if not path.is_dir():
        raise ValueError(f"there is no folder {path}")
    if (path / CONFIG).is_file():
        return None
    files = sorted(file for file in path.glob("*.gguf") if file.is_file())
    if len(files) != 1:
        raise ValueError(f"{path} is no pretrained model: there is neither {CONFIG} nor one GGUF file ({len(files)})")
    return files[0]


def _safetensors_files(folder: Path) -> list[Path]:
    """The files of a model's tensors."""
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if not (folder / INDEX).is_file():
        pickled = next(folder.glob("*.bin"), None)
        hint = f"; {pickled.name} is a pickle, which could run code" if pickled is not None else ""
        raise ValueError(f"{folder} has neither {WEIGHTS} nor {INDEX}{hint}")
    names = read_json(folder / INDEX).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(n, str) and Path(n).name == n for n in names.values()):
        raise ValueError(f'{folder / INDEX}: "weight_map" must give the file of each tensor')
    return [folder / name for name in sorted(set(names.values()))]
