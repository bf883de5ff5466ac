"""Files and folders that appear whole or not at all, JSON in them, and locks on folders."""

import ctypes
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import msgspec
from filelock import FileLock, Timeout

_SCRATCH = ".writing-"  # prefix of unfinished files: hidden, and distinct from a user's own files
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of Linux


@contextmanager
def atomic_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a binary file that takes the place of ``path``, as a whole and on the disk, once the block has ended."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = _scratch_beside(path)
    try:
        with open(scratch, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
        _sync_folder(path.parent)
    finally:
        scratch.unlink(missing_ok=True)


@contextmanager
def atomic_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a new folder to fill, which replaces ``path`` once the block has ended without an exception."""
    path = Path(path)
    with scratch_folder(path) as scratch:
        yield scratch
        replace_folder(scratch, path)


def check_replaceable(path: Path, overwrite: bool, marker: str, source: Path | None = None) -> None:
    """Raise FileExistsError if a new folder may not replace what is at ``path``. With ``overwrite`` it may replace an
    empty folder or one that has the file ``marker``, but neither its own ``source`` nor a folder around that.
    """
    if not path.exists():
        return
    if not overwrite:
        raise FileExistsError(f"{path} exists: choose another folder, or overwrite it (--overwrite, overwrite=True)")
    if source is not None and path.resolve() in (source.resolve(), *source.resolve().parents):
        raise FileExistsError(f"{path} holds {source}, which is read: choose another folder")
    if not path.is_dir() or (any(path.iterdir()) and not (path / marker).is_file()):
        raise FileExistsError(f"{path} is not the folder of a model, and not overwritten: choose another folder")


@contextmanager
def scratch_folder(path: Path) -> Iterator[Path]:
    """Yield a new folder beside ``path``, to fill before `replace_folder`, and remove what is left of it after."""
    scratch = _scratch_beside(path)
    scratch.mkdir(parents=True)
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def replace_folder(new: Path, path: Path) -> None:
    """Let the folder ``new`` take the place of ``path``, which on Linux exists at any moment."""
    for file in filter(Path.is_file, new.rglob("*")):
        with open(file, "rb") as opened:
            os.fsync(opened.fileno())
    if not path.exists():
        os.rename(new, path)
    elif not _exchange(new, path):
        old = _scratch_beside(path)
        os.rename(path, old)
        try:
            os.rename(new, path)
        except OSError:
            os.rename(old, path)
            raise
        new = old
    shutil.rmtree(new, ignore_errors=True)
    _sync_folder(path.parent)


def _exchange(first: Path, second: Path) -> bool:
    """Exchange two names in one operation; False where the system or the file system cannot."""
    try:
        rename = ctypes.CDLL(None).renameat2
    except (AttributeError, OSError):
        return False
    return rename(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0


def remove_folder(path: Path) -> None:
    """Remove a folder, or as much of it as can be removed, if it exists. Nobody sees a part of it under its name."""
    with suppress(OSError):
        path = path.rename(_scratch_beside(path))
    shutil.rmtree(path, ignore_errors=True)


def remove_scratch(folder: Path, name: str = "*") -> None:
    """Remove what killed writers of ``name`` in ``folder`` have left. No writer may be active there."""
    for path in folder.glob(f"{_SCRATCH}{name}-*"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def is_unused(folder: Path) -> bool:
    """Whether nothing is in a folder but locks and what killed writers have left."""
    return all(path.name.startswith((FolderLock.NAME, _SCRATCH)) for path in folder.iterdir())


def read_text(path: str | os.PathLike[str]) -> str:
    """Read a whole text file in UTF-8."""
    return Path(path).read_bytes().decode()


def read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the JSON object of a file; ValueError, which names the file, if there is none."""
    try:
        value = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not readable: {getattr(error, 'strerror', None) or error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold an object, got {type(value).__name__}")
    return value


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
    encoded = msgspec.json.encode(value, enc_hook=lambda entry: str(entry) if isinstance(entry, str) else float(entry))
    return msgspec.json.format(encoded, indent=2).decode()


def cache_folder() -> Path:
    """The cache of this library, which is created if needed: below ``XDG_CACHE_HOME``, by default ``~/.cache``."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "phantom-parallel"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"cannot create {folder} ({error.strerror}): set XDG_CACHE_HOME to a writable folder") from None
    return folder


class FolderLock:
    """A lock on the folder of a run, which a process that has died does not keep.

    The first process of a run acquires it; the ranks that it launches `join`, so that the folder stays locked until
    they have ended as well, whatever became of the first process. The folder must exist.
    """

    NAME: ClassVar[str] = ".lock"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._main, self._ranks = (FileLock(folder / f"{self.NAME}{end}", mode=0o600) for end in ("", "-ranks"))

    def acquire(self, patience: float = 20.0) -> None:
        """Lock the folder; BlockingIOError if another run holds it. Ranks of a dead process are waited for."""
        try:
            self._main.acquire(timeout=0)
            self._ranks.acquire(timeout=patience)
            self._ranks.release()
        except Timeout:
            self._main.release()
            raise BlockingIOError(f"{self._folder} is in use by another process: choose another folder") from None

    def join(self) -> None:
        """Keep the folder locked until this rank has ended, or another one that was first."""
        with suppress(Timeout):
            self._ranks.acquire(timeout=0)

    def __enter__(self) -> "FolderLock":
        return self

    def __exit__(self, *exception: object) -> None:
        self._main.release()
        self._ranks.release()


def _scratch_beside(path: Path) -> Path:
    return path.parent / f"{_SCRATCH}{path.name}-{secrets.token_hex(4)}"


def _sync_folder(folder: Path) -> None:
    """Flush a folder's entries to the disk, where the file system supports it."""
    handle = os.open(folder, os.O_RDONLY)
    with suppress(OSError):
        os.fsync(handle)
    os.close(handle)
