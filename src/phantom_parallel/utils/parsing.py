"""JSON and TOML from files into dataclasses, with errors that name the file and the key."""

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass
from typing import Any, TypeVar, get_args, get_type_hints

import msgspec

T = TypeVar("T")
_DEEPEST = 32  # levels of nested data


def convert(data: Any, kind: type[T], source: str) -> T:
    """Build a dataclass from plain data. Types are checked; whole numbers are accepted where a float is expected.

    Args:
        data: What a JSON or TOML parser returned.
        kind: The type to build.
        source: Where the data come from, for the error.

    Raises:
        ValueError: If a value has the wrong type, a field is missing, or the class itself refuses the values.
    """
    try:
        return msgspec.convert(data, kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(_explained(error, kind, source)) from None


def decode_json(text: bytes, kind: type[T], source: str) -> T:
    """Parse JSON into a dataclass, as `convert` does. NaN, infinities, numbers of more than 64 bits and data that are
    nested more than 32 levels deep are refused.
    """
    try:
        found = msgspec.json.decode(text, type=kind)
        _check_values(msgspec.json.decode(text))
        return found
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(_explained(error, kind, source)) from None


def decode_toml(text: str, source: str) -> dict[str, Any]:
    """Parse TOML; ValueError names the source."""
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{source} is not readable as TOML: {_reason(error)}") from None


def check_keys(data: Mapping[str, Any], known: Iterable[str], source: str) -> None:
    """Raise ValueError if there are keys other than ``known``."""
    known = set(known)
    if unknown := sorted(data.keys() - known):
        raise ValueError(f"{source} has unknown settings {', '.join(unknown)}; known are {', '.join(sorted(known))}")


def _check_values(data: Any) -> None:
    level = [data]
    for _ in range(_DEEPEST):
        nested = [one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list)]
        level = [value for values in nested for value in values]
        if any(isinstance(one, int) and abs(one) >= 2**63 for one in level):
            raise msgspec.ValidationError("an integer has more than 64 bits")
    if any(isinstance(one, dict | list) for one in level):
        raise RecursionError


def _explained(error: Exception, kind: Any, source: str) -> str:
    text, _, path = _reason(error).partition(" - at `$")
    key = path.rstrip("`").lstrip(".")
    if found := re.match("Object missing required field `(.*)`", text):
        text = f"{found[1]} is missing"
    if is_dataclass(kind) and (found := re.match("Invalid enum value (.*)", text)):
        choices = get_args(get_type_hints(kind).get(key))
        text = f"must be one of {', '.join(map(str, choices))}, got {found[1]}" if choices else text
    return ": ".join(part for part in (source, key, text.replace("`", "")) if part)


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "the data are nested too deeply"
    return re.sub(r"\s+", " ", str(error))
