"""JSON and TOML from files into dataclasses, with errors that name the file and the key, and what help texts and errors
say about fields and names.
"""

import ast
import difflib
import inspect
import re
import textwrap
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import is_dataclass
from itertools import pairwise
from typing import Any, TypeVar, get_args, get_type_hints

import msgspec

T = TypeVar("T")
_docs: dict[type, dict[str, str]] = {}  # reading sources takes most of the time in which a command reads its options
_CONTROL_CHARACTERS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def convert(data: Any, kind: type[T], source: str) -> T:
    """Build a dataclass from what a JSON or TOML parser returned; ValueError names ``source`` and the key."""
    with _explaining(kind, source):
        return msgspec.convert(data, kind)


def decode_json(text: bytes, kind: type[T], source: str) -> T:
    """Parse JSON into a dataclass, as `convert` does. NaN and infinities are refused."""
    with _explaining(kind, source):
        return msgspec.json.decode(text, type=kind)


def decode_toml(text: str, source: str) -> dict[str, Any]:
    """Parse TOML; ValueError names the source."""
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{source} is not readable as TOML: {' '.join(str(error).split())}") from None


def check_keys(data: Mapping[str, Any], known: Iterable[str], source: str) -> None:
    """Raise ValueError if there are keys other than ``known``."""
    known = set(known)
    if unknown := sorted(data.keys() - known):
        raise ValueError(f"{source} has unknown settings {', '.join(unknown)}; known are {', '.join(sorted(known))}")


def printable(text: str) -> str:
    """Escape control characters but newlines and tabs: they could control the terminal that shows a text."""
    return text.translate(_CONTROL_CHARACTERS)


def choose_from(wrong: str, known: Iterable[str]) -> str:
    """The end of an error message: the name that is closest to ``wrong``, if one is close, and all of them."""
    names = list(known)
    near = difflib.get_close_matches(wrong, names, n=1)
    return f"did you mean {near[0]!r}? There are {', '.join(names)}" if near else f"there are {', '.join(names)}"


def field_docs(kind: type) -> dict[str, str]:
    """The string under each field of a class and of its bases, by the field's name."""
    if kind in _docs:
        return _docs[kind]
    docs = _docs[kind] = dict[str, str]()
    for base in reversed(kind.__mro__):
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError):  # built in, or without a file
            continue
        (statement,) = tree.body
        for field, after in pairwise(statement.body if isinstance(statement, ast.ClassDef) else ()):
            text = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else None
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, str):
                docs[field.target.id] = " ".join(text.split())
    return docs


@contextmanager
def _explaining(kind: Any, source: str) -> Iterator[None]:
    """Turn errors of msgspec into a ValueError of one line with the source and the key."""
    try:
        yield
    except (msgspec.MsgspecError, RecursionError) as error:
        text, _, path = " ".join(str(error).split()).partition(" - at `$")
        key = path.rstrip("`").lstrip(".")
        if match := re.match("Object missing required field `(.*)`", text):
            text = f"{match[1]} is missing"
        if is_dataclass(kind) and (match := re.match("Invalid enum value (.*)", text)):
            choices = get_args(get_type_hints(kind).get(key))
            text = f"must be one of {', '.join(map(str, choices))}, got {match[1]}" if choices else text
        raise ValueError(": ".join(part for part in (source, key, text.replace("`", "")) if part)) from None
