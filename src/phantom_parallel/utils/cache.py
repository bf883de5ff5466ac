"""Where files are kept that can be made again, in a folder of the user's own."""

import os
from contextlib import suppress
from pathlib import Path

_COMPILED = "TORCHINDUCTOR_CACHE_DIR"


def cache_folder() -> Path:
    """The cache of this library: below ``XDG_CACHE_HOME``, by default ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "phantom-parallel"


def keep_compiled_code_private() -> None:
    """Let Inductor keep compiled code in the user's cache, unless the environment names another folder.

    By default it is below the temporary directory, under a name that another user of the machine may have taken first,
    and what is there is loaded and run.
    """
    if not os.environ.get(_COMPILED):
        folder = cache_folder() / "inductor"
        with suppress(OSError):  # without a place for it, torch's default stays
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.environ[_COMPILED] = str(folder)
