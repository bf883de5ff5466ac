"""``phantom_parallel.heal``: a converted model learns from the dense model that it was made from."""

import os
from pathlib import Path
from typing import Any

from phantom_parallel.checkpoint.model import family_of
from phantom_parallel.families.registry import get_family
from phantom_parallel.infer.run import check_folder
from phantom_parallel.train import Summary, TrainConfig, run


def heal(
    model: str | os.PathLike[str],
    teacher: str | os.PathLike[str],
    data: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    resume: bool = False,
    show: bool = False,
    **settings: Any,
) -> Summary:
    """Train a converted model with the dense model as its teacher: first each layer on its own, then all of them.

    Args:
        model: Folder of the phantom model.
        teacher: Folder of the dense model.
        data: Text to learn from: a file, or a folder of files.
        out: A new or empty folder, or with ``resume`` that of the same healing. The healed model is ``model`` in it.
        resume: Continue from the latest checkpoint in ``out``.
        show: Whether to show progress on stderr.
        settings: Options of ``phantom model heal`` by name: ``steps``, ``lr``, ``batch``, ``ranks``.

    Returns:
        How it ended, with the held-out losses of the healed model, of the teacher, and of the model before.

    Raises:
        ValueError, OSError: For wrong settings or files, before any rank starts.
    """
    paths: dict[str, Any] = {"model": str(model), "teacher": str(teacher), "data": str(data)}
    return run(heal_config(Path(model))(**paths, **settings), out, resume=resume, show=show)


def heal_config(model: Path) -> type[TrainConfig]:
    """Class of the settings that heal the model in a folder."""
    return get_family(family_of(check_folder(model))).heal_config()
