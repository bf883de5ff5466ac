"""Files and folders that appear whole or not at all, and JSON in them."""

import ctypes
import errno
import fcntl
import json
import math
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from phantom_parallel.utils.lock import FolderLock

_SCRATCH = ".writing-"  # prefix of unfinished files: hidden, and distinct from a user's own files
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of Linux
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def atomic_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a new binary file that takes the place of ``path`` once the block has ended without an exception.

    The data are flushed to the disk before the name changes, so a power failure leaves the old or the new file.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _naming(path):
        scratch, handle = _open_scratch(path)
    try:
        with _naming(path), open(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
        _sync_folder(path.parent)
    finally:
        scratch.unlink(missing_ok=True)


@contextmanager
def atomic_folder(path: str | os.PathLike[str], *, overwrite: bool = False) -> Iterator[Path]:
    """Yield a new folder to fill, which becomes ``path`` once the block has ended without an exception.

    Raises:
        FileExistsError: If ``path`` exists and ``overwrite`` is False. With ``overwrite``, the old folder is removed
            only after the new one is complete.
    """
    path = Path(path)
    if path.exists() and not overwrite:
        raise FileExistsError(f"{path} exists: choose another folder, or overwrite it (--overwrite, overwrite=True)")
    with scratch_folder(path) as scratch, _naming(path):
        yield scratch
        replace_folder(scratch, path)


def check_replaceable(path: Path, overwrite: bool, marker: str, source: Path | None = None) -> None:
    """Raise FileExistsError if something is at ``path`` that a new folder may not replace: anything at all without
    ``overwrite``, and with it anything but an empty folder or one that has the file ``marker``, as the new one will.
    What the new folder is made from, ``source``, is never replaced, nor is a folder around it.
    """
    if not path.exists():
        return
    if not overwrite:
        raise FileExistsError(f"{path} exists: choose another folder, or overwrite it (--overwrite, overwrite=True)")
    if source is not None and path.resolve() in (source.resolve(), *source.resolve().parents):
        raise FileExistsError(f"{path} holds {source}, which is read: choose another folder")
    if not path.is_dir() or (any(path.iterdir()) and not (path / marker).is_file()):
        raise FileExistsError(
            f"{path} is not the folder of a model, so it is not overwritten: choose another, or remove it yourself"
        )


@contextmanager
def scratch_folder(path: Path) -> Iterator[Path]:
    """Yield a new folder beside ``path``, for several processes to fill before one calls `replace_folder`, and remove
    what is left of it after. Those that killed writers of ``path`` have left are removed first.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch, handle = _open_scratch(path, folder=True)
    try:
        yield scratch
    finally:
        os.close(handle)
        remove_folder(scratch)


def remove_folder(path: Path) -> None:
    """Remove a folder, or as much of it as can be removed, if it exists. Nobody sees a part of it under its name."""
    scratch = path
    if not path.name.startswith(_SCRATCH):
        with suppress(OSError):
            scratch = path.rename(_scratch_beside(path))
    shutil.rmtree(scratch, ignore_errors=True)


def replace_folder(new: Path, path: Path) -> None:
    """Let the folder ``new``, once its files are on the disk, take the place of ``path``.

    On Linux the two are exchanged in one operation, so that ``path`` exists at any moment.
    """
    for file in filter(Path.is_file, new.rglob("*")):
        with open(file, "rb") as opened:
            os.fsync(opened.fileno())
    if not path.exists():
        os.rename(new, path)
    else:
        if not _exchange(new, path):
            old = _scratch_beside(path)
            os.rename(path, old)
            try:
                os.rename(new, path)
            except OSError:
                os.rename(old, path)
                raise
            new = old
        remove_folder(new)
    _sync_folder(path.parent)


def is_unused(folder: Path) -> bool:
    """Whether nothing is in a folder but locks and what killed writers have left."""
    return all(path.name.startswith((FolderLock.NAME, _SCRATCH)) for path in folder.iterdir())


def remove_scratch(folder: Path) -> None:
    """Remove unfinished files and folders of writers that were killed. No writer may be active in ``folder``."""
    for path in folder.glob(f"{_SCRATCH}*"):
        _remove(path)


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """Read a whole file. Pipes and devices, which may not end, are refused with an OSError."""
    path = Path(path)
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return path.read_bytes()


def read_text(path: str | os.PathLike[str]) -> str:
    """Read a whole text file in UTF-8, as `read_bytes` does."""
    return read_bytes(path).decode()


def write_bytes(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a whole file atomically."""
    with atomic_file(path) as file:
        file.write(data)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a whole text file atomically, as UTF-8."""
    write_bytes(path, text.encode())


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Write a JSON file atomically. NaN and infinities, which JSON does not have, raise ValueError."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def json_text(value: Any) -> str:
    """Serialize to JSON. NaN and infinities, which JSON does not have, become null."""
    return json.dumps(_finite_or_none(value), indent=2, allow_nan=False)


def _finite_or_none(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite_or_none(item) for key, item in value.items()}
    return [_finite_or_none(item) for item in value] if isinstance(value, list | tuple) else value


def cache_folder() -> Path:
    """The cache of this library: below ``XDG_CACHE_HOME``, by default ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "phantom-parallel"


def _open_scratch(path: Path, *, folder: bool = False) -> tuple[Path, int]:
    """Make and open a file or folder beside ``path``, and lock it, so that others see that its writer runs. Those of
    writers of ``path`` that were killed are removed first.
    """
    abandoned = re.compile(re.escape(f"{_SCRATCH}{path.name}-") + r"[0-9a-f]{8}")
    for scratch in [other for other in path.parent.iterdir() if abandoned.fullmatch(other.name)]:
        with suppress(OSError):  # its writer runs, or has just finished
            handle = os.open(scratch, os.O_RDONLY)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(scratch)
            finally:
                os.close(handle)
    while True:
        scratch = _scratch_beside(path)
        try:
            if folder:
                scratch.mkdir()
            handle = os.open(scratch, os.O_RDONLY if folder else os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        except FileNotFoundError:
            if path.parent.is_dir():
                continue  # another writer has removed it, as it was not locked yet
            raise
        with suppress(OSError):  # some file systems have no locks, and nothing is removed there either
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if scratch.exists():
            return scratch, handle
        os.close(handle)


def _remove(path: Path) -> None:
    """Remove a file or folder, or as much of it as can be removed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """Flush a folder's entries to the disk, where the file system supports it."""
    handle = os.open(folder, os.O_RDONLY)
    with suppress(OSError):
        os.fsync(handle)
    os.close(handle)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Add ``path`` to the error of a disk without room for what is written there, which does not have it."""
    try:
        yield
    except OSError as error:
        if error.errno in _NO_ROOM and not error.filename:
            error.filename = str(path)
        raise


def _exchange(first: Path, second: Path) -> bool:
    """Exchange two names in one operation; False where the system or the file system cannot."""
    try:
        rename = ctypes.CDLL(None).renameat2
    except (AttributeError, OSError):
        return False
    return rename(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0


def _scratch_beside(path: Path) -> Path:
    return path.parent / f"{_SCRATCH}{path.name}-{secrets.token_hex(4)}"
