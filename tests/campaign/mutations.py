"""Damage to files: their bytes, the values in JSON and TOML, and the headers of array files."""

import io
import json
import os
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

DEEP = 5_000  # levels of nesting


class Raw(str):
    """Text that is written into JSON or TOML as it is."""


NAN, INFINITE = float("nan"), float("inf")
SIZES = (0, -1, 3, 7, 2**31, 10**9, 2**63, 10**18, 10**30, 10**400, -(10**400))
ODD_VALUES = (
    *SIZES,
    *(NAN, INFINITE, -INFINITE, 1e308, -0.0, 1.5, Raw("1e400"), True, False, None),
    *("", " ", "x", "1", "../..", "/", "\0", "é☃字", "a" * 5_000, "[red]x[/", "<script>alert(1)</script>"),
    *([], {}, [[]], [None], {"": 1}, [1, "x"], {"value": NAN}),
    *(Raw("[" * DEEP + "]" * DEEP), Raw('{"a":' * DEEP + "1" + "}" * DEEP), Raw("9" * 5_000), Raw("1__0"), Raw("")),
)
TEMPLATES = (
    *(
        "{{ 1 / 0 }}",
        "{{ messages[9].content }}",
        "{{ messages.content.x }}",
        "{{ 'a' * 10 ** 11 }}",
        "{{ 10 ** 400 }}",
    ),
    *(
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for i in range(10 ** 30) %}{% endfor %}",
        "{% if %}",
        "{{",
    ),
    *(
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{% include '/etc/passwd' %}",
        "{{ raise_exception('no') }}",
        "",
    ),
)


# --- bytes -----------------------------------------------------------------------------------------------------------


def damage_bytes(data: bytes, random: Random) -> tuple[str, bytes]:
    """The name of a damage, and the data with it."""
    name = random.choice(list(_BYTES))
    return name, _BYTES[name](data, random)


def _flip(data: bytes, random: Random) -> bytes:
    changed = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 16))):
        if changed:
            changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
    return bytes(changed)


def _cut(data: bytes, random: Random) -> bytes:
    return data[: random.randrange(len(data) + 1)]


def _remove(data: bytes, random: Random) -> bytes:
    start = random.randrange(len(data) + 1)
    return data[:start] + data[start + random.choice((1, 4, 64)) :]


def _insert(data: bytes, random: Random) -> bytes:
    start = random.randrange(len(data) + 1)
    return data[:start] + random.choice((b"\0", b"\xff\xfe", b"\n", b"{", b'"', random.randbytes(64))) + data[start:]


def _repeat(data: bytes, random: Random) -> bytes:
    start = random.randrange(len(data) + 1)
    return data[:start] + data[start : start + 200] + data[start:]


_BYTES: dict[str, Callable[[bytes, Random], bytes]] = {
    "flipped bits": _flip,
    "cut short": _cut,
    "bytes removed": _remove,
    "bytes inserted": _insert,
    "bytes repeated": _repeat,
    "more bytes at the end": lambda data, random: data + random.randbytes(random.choice((1, 100))),
    "empty": lambda data, random: b"",
    "junk": lambda data, random: random.randbytes(random.choice((1, 8, 1000))),
    "zeros": lambda data, random: bytes(len(data)),
    "UTF-16": lambda data, random: data.decode("latin-1").encode("utf-16"),
    "byte order mark": lambda data, random: b"\xef\xbb\xbf" + data,
    "Latin-1": lambda data, random: data + "é".encode("latin-1"),
    "another file": lambda data, random: random.choice(
        (b"PK\x03\x04", b"\x93NUMPY\x01\0", b"[]", b"null", b"1", b'""')
    ),
}


def damage_path(path: Path, random: Random) -> str:
    """Replace a file by something that is no file of data; the name of the damage."""
    name = random.choice(("missing", "a folder", "a loop of links", "a pipe", "a device", "very long"))
    path.unlink()
    if name == "a folder":
        path.mkdir()
    elif name == "a loop of links":
        path.symlink_to(path.name)
    elif name == "a pipe":
        os.mkfifo(path)
    elif name == "a device":
        path.symlink_to("/dev/zero")
    elif name == "very long":
        with open(path, "wb") as file:
            file.truncate(1 << 32)
    return name


# --- values of JSON and TOML -----------------------------------------------------------------------------------------


def damage_values(data: Any, random: Random, times: int = 1) -> tuple[str, Any]:
    """Change values, keys or structure of plain data; what was changed, and the new data."""
    done = []
    for _ in range(times):
        where, holder, key = _pick(data, random)
        if holder is None:
            value = random.choice(ODD_VALUES)
            return f"everything is {_short(value)}", value
        how = random.choice(("value", "value", "value", "size", "delete", "rename", "unknown", "wrap", "copy"))
        if how in ("value", "size"):
            holder[key] = random.choice(ODD_VALUES if how == "value" else SIZES)
            done.append(f"{where} = {_short(holder[key])}")
            continue
        done.append(f"{how} {where}")
        if how == "delete":
            del holder[key]
        elif how == "rename" and isinstance(holder, dict):
            holder[random.choice(("", "unknown", key.upper(), f"{key} "))] = holder.pop(key)
        elif how == "unknown" and isinstance(holder, dict):
            holder[random.choice(("unknown", "é", "__class__", ""))] = random.choice(ODD_VALUES)
        elif how == "wrap":
            holder[key] = [holder[key]]
        else:
            holder[key] = _pick(data, random)[1] or holder[key]  # the structure may contain itself: written to a depth
    return "; ".join(done), data


def _pick(data: Any, random: Random) -> tuple[str, Any, Any]:
    """A random place in plain data: its path, and the object and key that hold it. None at the top."""
    places: list[tuple[str, Any, Any]] = []

    def visit(value: Any, where: str, depth: int) -> None:
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, item in items:
            places.append((f"{where}.{key}", value, key))
            if depth < 8:
                visit(item, f"{where}.{key}", depth + 1)

    visit(data, "", 0)
    if not places or random.random() < 0.01:
        return "", None, None
    shallow = [place for place in places if place[0].count(".") < 3]
    return random.choice(shallow if shallow and random.random() < 0.5 else places)


def json_text(value: Any, depth: int = 0) -> str:
    """JSON, with NaN and infinities as Python writes them, and `Raw` as it is."""
    if isinstance(value, Raw):
        return value or "null"
    if isinstance(value, dict) and depth < 12:
        return "{" + ", ".join(f"{json.dumps(key)}: {json_text(item, depth + 1)}" for key, item in value.items()) + "}"
    if isinstance(value, list) and depth < 12:
        return "[" + ", ".join(json_text(item, depth + 1) for item in value) + "]"
    return "null" if isinstance(value, dict | list) else json.dumps(value)


def toml_text(data: Any, depth: int = 0) -> str:
    """TOML, with tables inline below the top."""
    if isinstance(data, Raw):
        return data.replace('"a":', "a=") or '""'
    if isinstance(data, dict) and depth == 0:
        return "".join(f"{_key(key)} = {toml_text(value, 1)}\n" for key, value in data.items())
    if isinstance(data, dict) and depth < 12:
        return "{" + ", ".join(f"{_key(key)} = {toml_text(item, depth + 1)}" for key, item in data.items()) + "}"
    if isinstance(data, list) and depth < 12:
        return "[" + ", ".join(toml_text(item, depth + 1) for item in data) + "]"
    if isinstance(data, float):
        return repr(data)
    return '""' if data is None or isinstance(data, dict | list) else json.dumps(data, ensure_ascii=False)


def _key(key: str) -> str:
    return json.dumps(key, ensure_ascii=False)


def _short(value: Any) -> str:
    text = f"Raw({value[:20]!r})" if isinstance(value, Raw) else repr(value)
    return text if len(text) < 60 else f"{text[:40]}... ({len(text)} characters)"


# --- arrays ----------------------------------------------------------------------------------------------------------

SHAPES = ((10**9, 8), (8, 10**9), (2**62, 8), (10**400, 8), (-1, 8), (0, 8), (8,), (), (8, 8, 8), (64, 7), (64, 1))
TYPES = ("<f16", "<c8", "<c16", "|O", "|S8", "<U4", "<M8[s]", "|b1", "|V8", "<f2", ">f4", "<i8", "<u2", "[('a','<f4')]")


def npy_bytes(array: np.ndarray, random: Random) -> tuple[str, bytes]:
    """An .npy file that does not hold what it should."""
    how = random.choice(("shape", "type", "values", "order", "header", "bytes"))
    shape, kind, order, data = array.shape, repr(array.dtype.str), False, array.tobytes()
    if how == "shape":
        shape = random.choice(SHAPES)
    elif how == "type":
        kind = repr(random.choice(TYPES))
        if random.random() < 0.5 and "O" not in kind and "[" not in kind:
            data = np.zeros(array.shape, np.dtype(eval(kind))).tobytes()  # of our own list
    elif how == "values":
        return f"values {(odd := random.choice((NAN, INFINITE, 3e38, -1e-45)))}", npy_of(_with(array, odd, random))
    elif how == "order":
        order = True
    elif how == "header":
        return "header", _npy(random.choice(("", "{}", "[" * DEEP, "{'descr': 1}", "__import__('os')", "\0")), data)
    else:
        name, data = damage_bytes(npy_of(array), random)
        return name, data
    header = f"{{'descr': {kind}, 'fortran_order': {order}, 'shape': {shape!r}, }}"
    return f"{how}: {header[:120]}", _npy(header, data)


def npy_of(array: np.ndarray) -> bytes:
    """A valid .npy file."""
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def _npy(header: str, data: bytes) -> bytes:
    text = header.encode() + b" " * (63 - (10 + len(header)) % 64) + b"\n"
    return b"\x93NUMPY\x02\x00" + struct.pack("<I", len(text)) + text + data


def _with(array: np.ndarray, value: float, random: Random) -> np.ndarray:
    changed = array.copy()
    with np.errstate(all="ignore"):
        changed[random.randrange(array.shape[0]), random.randrange(array.shape[1])] = value
    return changed


def npz_bytes(arrays: dict[str, np.ndarray], random: Random) -> tuple[str, bytes]:
    """An .npz file with one bad array, a name that is missing, a bomb, or damaged bytes."""
    how = random.choice(("array", "array", "missing", "bomb", "bytes", "name"))
    file, bad = io.BytesIO(), random.choice(list(arrays))
    text = how
    kind = random.choice((zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED))
    with zipfile.ZipFile(file, "w", kind) as archive:
        for name, array in arrays.items():
            data = npy_of(array)
            if how == "array" and name == bad:
                text, data = npy_bytes(array, random)
            elif how == "bomb" and name == bad:
                text, data = "bomb", data + bytes(64 << 20)
            if how != "missing" or name != bad:
                archive.writestr(f"{name}.npy" if how != "name" else random.choice((name, f"../{name}.npy")), data)
    if how == "bytes":
        text, data = damage_bytes(file.getvalue(), random)
        return text, data
    return f"{bad}: {text}", file.getvalue()


def safetensors_bytes(data: bytes, random: Random) -> tuple[str, bytes]:
    """A safetensors file with a damaged header or damaged bytes."""
    if random.random() < 0.4:
        return damage_bytes(data, random)
    length = struct.unpack("<Q", data[:8])[0]
    header, tensors = data[8 : 8 + length], data[8 + length :]
    if random.random() < 0.1:
        wrong = random.choice((0, 1, length - 1, length + 1, 2**31, 2**63, 2**64 - 1))
        return f"length of the header {wrong}", struct.pack("<Q", wrong) + header + tensors
    name, changed = damage_values(json.loads(header), random, times=random.choice((1, 1, 2)))
    text = json_text(changed).encode("utf-8", "surrogatepass")
    return name, struct.pack("<Q", len(text)) + text + tensors


def damage_file(path: Path, random: Random) -> str:
    """Damage one file in the way that suits its kind; what was done."""
    chosen = random.random()
    if chosen < 0.07:
        return f"{path.name}: {damage_path(path, random)}"
    data = path.read_bytes()
    if path.suffix == ".json" and chosen < 0.75:
        name, values = damage_values(json.loads(data), random, times=random.choice((1, 1, 1, 3)))
        data = json_text(values).encode("utf-8", "surrogatepass")
    elif path.suffix == ".jinja" and chosen < 0.75:
        data = (name := random.choice(TEMPLATES)).encode()
    elif path.suffix == ".safetensors":
        name, data = safetensors_bytes(data, random)
    elif path.suffix == ".npy" and chosen < 0.75:
        name, data = npy_bytes(np.load(path), random)
    else:
        name, data = damage_bytes(data, random)
    path.write_bytes(data)
    return f"{path.name}: {name}"


# Settings of pretrained models: other architectures, other forms of the same, and wrong types.
PRETRAINED: dict[str, tuple[Any, ...]] = {
    "model_type": ("llama", "mistral", "qwen2", "gemma", "LLAMA", None, []),
    "hidden_act": ("gelu", "silu", None),
    "rope_theta": (0, -1, 500.0, "10000", None, 10**400),
    "rope_parameters": (
        None,
        {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
        {"rope_type": "yarn", "factor": 2.0},
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "linear", "factor": 0},
        {"rope_theta": 0},
        {"rope_type": "default", "rope_theta": 50.0},
    ),
    "rope_scaling": ({"type": "linear", "factor": 4.0}, {"type": "dynamic", "factor": 2.0}, None, "linear"),
    "partial_rotary_factor": (0.5, 1.0),
    "sliding_window": (4, 0, None, 1.5),
    "use_sliding_window": (True, False),
    "attention_bias": (True, False),
    "mlp_bias": (True, False),
    "head_dim": (8, 4, 0, "8", 8.0, None),
    "num_key_value_heads": (1, 2, 0, None, "2"),
    "tie_word_embeddings": (True, False, "false", None),
    "rms_norm_eps": (1e-6, 1e-2, 0, "1e-5", -1),
    "max_position_embeddings": (4, 2**20, 8.7, 10**18),
    "quantization_config": ({"quant_method": "gptq"}, None),
}


def change_pretrained(path: Path, random: Random) -> str:
    """Change settings of a pretrained model's config.json; what was changed."""
    names = random.sample(list(PRETRAINED), random.choice((1, 1, 2, 3)))
    changes = {name: random.choice(PRETRAINED[name]) for name in names}
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return "; ".join(f"{name} = {_short(value)}" for name, value in changes.items())


def copy_of(folder: Path, target: Path) -> Path:
    """A copy to be damaged."""
    shutil.copytree(folder, target)
    return target
