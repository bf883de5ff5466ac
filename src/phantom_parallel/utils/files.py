"""Files and folders that appear whole or not at all, with the permissions of the umask."""

import ctypes
import errno
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

from phantom_parallel.utils.lock import FolderLock, flock

# Prefix of unfinished files: hidden from readers, and distinct from a user's own files when `remove_scratch` runs.
_SCRATCH = ".writing-"
_MOST_BYTES = 1 << 28  # of a file that is read as a whole: a description, not tensors or rows
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
        sync_folder(path.parent)
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
    for file in new.rglob("*"):
        if file.is_file():
            with open(file, "rb") as opened:
                os.fsync(opened.fileno())
    if path.exists() and _exchange(new, path):
        remove_folder(new)
    elif path.exists():
        old = _scratch_beside(path)
        os.rename(path, old)
        try:
            os.rename(new, path)
        except OSError:
            os.rename(old, path)
            raise
        remove_folder(old)
    else:
        os.rename(new, path)
    sync_folder(path.parent)


def check_regular(path: str | os.PathLike[str], most_bytes: float = math.inf) -> None:
    """Raise OSError unless ``path`` is a file with contents of its own, of at most ``most_bytes``: a pipe may wait for
    a writer, and a device such as /dev/zero may not end.
    """
    path = Path(path)
    size = path.stat().st_size
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not path.is_file():
        raise OSError(errno.EINVAL, "not a regular file, but a pipe, socket or device", str(path))
    if size > most_bytes:
        raise OSError(errno.EFBIG, f"{size:,} bytes are too many, at most {most_bytes:,} are read", str(path))


def read_bytes(path: str | os.PathLike[str], most_bytes: float = _MOST_BYTES) -> bytes:
    """Read a whole file, as far as `check_regular` accepts it."""
    check_regular(path, most_bytes)
    return Path(path).read_bytes()


def read_text(path: str | os.PathLike[str]) -> str:
    """Read a whole text file in UTF-8, as far as `check_regular` accepts it."""
    return read_bytes(path).decode()


def write_bytes(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a whole file atomically."""
    with atomic_file(path) as file:
        file.write(data)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a whole text file atomically, as UTF-8."""
    write_bytes(path, text.encode())


def json_text(value: Any) -> str:
    """Serialize to JSON. NaN and infinities, which JSON does not have, become null."""
    return json.dumps(_finite_or_none(value), indent=2, allow_nan=False)


def _finite_or_none(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite_or_none(item) for key, item in value.items()}
    return [_finite_or_none(item) for item in value] if isinstance(value, list | tuple) else value


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Write a JSON file atomically. NaN and infinities, which JSON does not have, raise ValueError."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def is_unused(folder: Path) -> bool:
    """Whether nothing is in a folder but a lock and what killed writers have left."""
    return all(path.name == FolderLock.NAME or path.name.startswith(_SCRATCH) for path in folder.iterdir())


def remove_scratch(folder: Path) -> None:
    """Remove unfinished files and folders of writers that were killed. No writer may be active in ``folder``."""
    for path in folder.glob(f"{_SCRATCH}*"):
        _remove(path)


def _open_scratch(path: Path, *, folder: bool = False) -> tuple[Path, int]:
    """Make and open a file or folder beside ``path``, with a lock by which others see that its writer runs. Those of
    writers of ``path`` that were killed are removed first.
    """
    _remove_abandoned(path)
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
        if flock(handle, exclusive=False) and scratch.exists():
            return scratch, handle
        os.close(handle)


def _remove_abandoned(path: Path) -> None:
    """Remove what writers of ``path`` have left unfinished that do not run any more: a writer holds a lock on it."""
    unfinished = re.compile(re.escape(f"{_SCRATCH}{path.name}-") + r"[0-9a-f]{8}")
    for scratch in [one for one in path.parent.iterdir() if unfinished.fullmatch(one.name)]:
        try:
            handle = os.open(scratch, os.O_RDONLY)
        except OSError:
            continue  # its writer has just finished
        try:
            if flock(handle, exclusive=True, without_locks=False):
                _remove(scratch)
        finally:
            os.close(handle)


def _remove(path: Path) -> None:
    """Remove a file or folder, or as much of it as can be removed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to the disk, where the system supports it."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError:
        pass  # some file systems cannot sync a folder; the files themselves are synced
    finally:
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
