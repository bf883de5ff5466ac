"""Options of a study that would change nothing: they are refused, since whoever gives one expects it to."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from phantom_parallel.study.settings import SEARCH_PREFIX, RegimeSettings, StudySettings, study_file, training_fields
from phantom_parallel.train.config import TrainConfig

_OF_SEARCH = ("learning_rates", SEARCH_PREFIX)
_TO_REFERENCE = ("at_most", "stop_at_target")


def check_changes(
    before: StudySettings | RegimeSettings, after: StudySettings | RegimeSettings, given: Iterable[str], name: str
) -> None:
    """Refuse options that leave every cell of a study as it is. One that repeats the value of the file is not refused.

    Args:
        before: The settings of the file.
        after: The settings with all options.
        given: The settings that were given as options.
        name: Name or path of the study.

    Raises:
        ValueError: It names the option, says why it changes nothing, and what to do instead.
    """
    for key in given:
        reason = _why_unused(before, after, key, name)
        if reason:
            raise ValueError(f"--{key.replace('_', '-')} changes nothing in the study {after.name}: {reason}")


def _why_unused(
    before: StudySettings | RegimeSettings, after: StudySettings | RegimeSettings, key: str, name: str
) -> str:
    """Why an option changes nothing, whatever its value; empty if it may."""
    if isinstance(after, RegimeSettings):
        if key == "link" and after.links:
            return f"it has links of its own ({', '.join(after.links)}): use --links"
        if key == "batch" and after.batches:
            return f"it has batch sizes of its own ({', '.join(map(str, after.batches))}): use --batches"
    elif reason := _why_unused_by_kind(after, key):
        return reason
    if key not in training_fields(after.family):
        return ""
    cells = (*after.cells, *after.modelled) if isinstance(after, StudySettings) else ()
    instead = f"copy {study_file(name)}, edit its cells and give the path of the copy instead of the name"
    if cells and all(key in cell for cell in cells):
        return f"every cell sets {key} itself; to change that, {instead}"
    if before.training.get(key) == after.training.get(key) or _changes_a_training(before, after, key):
        return ""
    return f"every cell either sets {key} itself or does not have it; to change that, {instead}"


def _why_unused_by_kind(settings: StudySettings, key: str) -> str:
    """Why a setting is not used by studies of this kind."""
    if settings.measure == "speed" and (key == "seeds" or key in _TO_REFERENCE or key.startswith(_OF_SEARCH)):
        return "it times steps, without a search, seeds or a target; --steps and --rounds say how many"
    if settings.measure == "loss" and key == "rounds":
        return "it trains every cell once for each seed: use --seeds"
    if key in _TO_REFERENCE and settings.reference is None:
        return "no cell is trained to the loss of a reference"
    return "it has no modelled cells" if key == "hardware" and not settings.modelled else ""


def _changes_a_training(
    before: StudySettings | RegimeSettings, after: StudySettings | RegimeSettings, key: str
) -> bool:
    """Whether a training would be another one without this change of a training's field, or would not be possible."""
    training = {name: value for name, value in after.training.items() if name != key}
    if key in before.training:
        training[key] = before.training[key]
    try:
        return list(_trainings(after)) != list(_trainings(replace(after, training=training)))
    except ValueError:
        return True


def _trainings(settings: StudySettings | RegimeSettings) -> Iterator[TrainConfig]:
    if isinstance(settings, StudySettings):
        for cell in (*settings.cells, *settings.modelled):
            yield settings.config(cell, lr=1e-3, seed=0)
        return
    for batch in settings.all_batches:
        here = settings.at(batch=batch)
        for one in here.contenders:
            yield here.config(one, lr=1e-3, seed=0, steps=settings.steps)
