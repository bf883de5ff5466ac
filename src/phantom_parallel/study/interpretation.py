"""Findings and remarks of results, derived from their figures, settings and environment.

Runs and ``phantom report`` both call `interpreted`, so that the report of earlier results has the findings and caveats
of the current version, and not those of the version that made them.
"""

import re
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

from phantom_parallel.families.registry import DEFAULT_FAMILY, get_family
from phantom_parallel.study.remarks import comparison_remarks, study_remarks
from phantom_parallel.study.results import Comparison, Study
from phantom_parallel.study.settings import CompareSettings, RegimeSettings, StudySettings
from phantom_parallel.study.sweep_findings import sweep_findings
from phantom_parallel.study.winners import findings_of, regime_findings
from phantom_parallel.train.config import TrainConfig
from phantom_parallel.utils.parsing import convert

R = TypeVar("R", bound=Comparison | Study)
# Remarks of this and earlier versions that are derived again. All others are kept: only the run could know them.
_DERIVED = re.compile(
    r".* is worse than .* in "
    r"|.* missed the target loss of "
    r"|.* compute the same model, which a few steps of each confirmed"
    r"|.* is blocked in collectives for a larger share of its time"
    r"|The loss is evaluated every "
    r"|Time and energy to the loss are the steps to the loss times"
    r"|The data (are a teacher's|come from a teacher network) that has phantom's own structure"
    r"|The learning rate of .* is at an end of the rates"
    r"|Steps are timed, and losses are not compared"
    r"|Figures are (medians of|of one round)"
    r"|Tables and figures have medians over"
    r"|(One seed|\d+ seeds): "
    r"|Energy in joules is modelled, not measured"
    r"|The network is emulated: "
    r"|Ranks are processes on CPU cores"
    r"|Blocked time leaves out that in which a rank polls"
    r"|Oversubscribed: "
    r"|Joules are too high: "
    r"|Assumed watts are those of a core"
    r"|Modelled cells come from the cost formulas"
    r"|The settings cannot be read by this version"
)


def interpreted(found: R) -> R:
    """The results with findings and remarks that follow from them. Of the remarks that they have, those that cannot be
    derived are kept, ahead of the others.
    """
    notes = _notes_on_data(found)
    remarks = comparison_remarks(found, notes) if isinstance(found, Comparison) else study_remarks(found, notes)
    derived = tuple(remarks)
    kept = tuple(remark for remark in found.remarks if remark not in derived and not _DERIVED.match(remark))
    return replace(found, findings=_findings(found), remarks=kept + derived)


def _findings(found: Comparison | Study) -> tuple[str, ...]:
    if isinstance(found, Comparison):
        return tuple(findings_of(found.strategies, found.ratios, found.runs))
    if not found.is_regime:
        return tuple(sweep_findings(found.settings, found.cells))
    links = dict.fromkeys(str(cell.settings["link"]) for cell in found.cells)
    batches = dict.fromkeys(batch for cell in found.cells if isinstance(batch := cell.settings["batch"], int))
    return tuple(regime_findings(found.cells, list(links), list(batches)))


def _notes_on_data(found: Comparison | Study) -> list[str]:
    """What the family says about the trainings; a sentence that it may be missing where they cannot be read."""
    try:
        configs = _configs_of(found)
        notes = [note for config in configs for note in get_family(config.family).report_notes(config)]
    except ValueError as error:
        return [f"The settings cannot be read by this version ({error}): caveats on the data may be missing."]
    return list(dict.fromkeys(notes))


def _configs_of(found: Comparison | Study) -> Sequence[TrainConfig]:
    """The trainings that the results are of, from their settings as plain data."""
    data = dict(found.settings)
    data.setdefault("family", data.pop("task", DEFAULT_FAMILY))  # name of the key in version 1
    data["training"] = get_family(data["family"]).train_config().current_names(data.get("training", {}))
    if isinstance(found, Study) and not found.is_regime:
        study = _settings(data, StudySettings)
        return [study.config(cell, lr=1e-3, seed=0) for cell in study.cells]
    settings = _settings(data, RegimeSettings if isinstance(found, Study) else CompareSettings)
    return [settings.config(one, lr=1e-3, seed=0, steps=settings.steps) for one in settings.contenders]


S = TypeVar("S", CompareSettings, StudySettings)


def _settings(data: dict[str, Any], kind: type[S]) -> S:
    known = {one.name for one in fields(kind)}
    return convert({name: value for name, value in data.items() if name in known}, kind, "settings")
