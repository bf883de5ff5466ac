"""Standard streams that are closed, or whose readers have left."""

import os
import sys
from contextlib import suppress
from typing import Any

_CONTROL_CHARACTERS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def printable(text: str) -> str:
    """Escape control characters other than newlines and tabs: in a name or in generated text, they could control the
    terminal that shows it.
    """
    return text.translate(_CONTROL_CHARACTERS)


class LenientStderr:
    """``sys.stderr`` for what is not worth ending the work for: text that cannot be written is dropped, as after the
    terminal was closed or the disk of a log file became full.
    """

    def __init__(self) -> None:
        self._stream: Any = sys.stderr  # None if the process was started without one

    def write(self, text: str) -> int:
        with suppress(OSError):
            if self._stream is not None:
                self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            if self._stream is not None:
                self._stream.flush()

    def isatty(self) -> bool:
        return self._stream is not None and self._stream.isatty()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def open_missing_streams() -> None:
    """Connect standard streams that are closed to the null device, in this process and those that it starts.

    Otherwise the next files that are opened would get their descriptors, and what a library prints would go into them.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest free descriptor, so that it is that of the stream
            os.set_inheritable(opened, True)
            if opened == number:
                setattr(sys, name, open(opened, "r" if number == 0 else "w", closefd=False))  # noqa: SIM115
