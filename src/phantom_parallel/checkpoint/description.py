"""The JSON description that stands beside tensors: what they are, and the digests of their files."""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from phantom_parallel.checkpoint.tensor_file import FileDigest, is_digest
from phantom_parallel.utils.files import read_text


def read_description(path: Path, what: str, kind: str, versions: Collection[int]) -> dict[str, Any]:
    """Read the JSON object that describes tensors.

    Args:
        path: The JSON file.
        what: What is described, for errors.
        kind: Expected value of "format".
        versions: Values of "version" that can be read.

    Raises:
        ValueError: If the file is not readable, or is of another kind or version.
    """
    try:
        found = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a readable {what} description: {error}") from None
    if not isinstance(found, dict) or found.get("format") != kind:
        raise ValueError(f'{path} is not a Phantom Parallel {what}: expected "format": "{kind}"')
    if found.get("version") not in versions:
        known = " and ".join(map(str, sorted(versions)))
        raise ValueError(
            f"{path} has version {found.get('version')!r}, this release reads {known}: "
            "use the release that wrote it, or a newer one"
        )
    return found


def described_files(found: dict[str, Any], path: Path) -> dict[str, FileDigest]:
    """Digests of the files that the description ``found``, read from ``path``, belongs to."""
    files = found.get("files")
    if not isinstance(files, dict) or not files:
        raise ValueError(f'{path}: expected an object "files" with a digest for each file, got {type(files).__name__}')
    for name, digest in files.items():
        if Path(name).name != name or not name.endswith(".safetensors") or not is_digest(digest):
            raise ValueError(f'{path}: "files" has no valid digest for {name!r}')
    return files
