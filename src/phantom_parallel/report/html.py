"""The report of a comparison or a study: one HTML file that needs no other, with figures and CSV files beside it."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from phantom_parallel.report import captions, study_tables, tables
from phantom_parallel.report.compare_figures import comparison_figures
from phantom_parallel.report.csv_files import csv_files
from phantom_parallel.report.plots import GRID, INK, LOOKS, MUTED, SECOND_PHANTOM, SURFACE, CaptionedFigure
from phantom_parallel.report.study_figures import study_figures
from phantom_parallel.study.contenders import LAYOUTS
from phantom_parallel.study.results import Comparison, Study
from phantom_parallel.study.units import listed, plain, quantity
from phantom_parallel.utils.files import write_bytes, write_text
from phantom_parallel.utils.network import Network, format_rate
from phantom_parallel.utils.strategies import STRATEGIES

# Colours of the figures and their names in the page, which has another set for dark screens.
COLOURS = {INK: "ink", MUTED: "muted", GRID: "grid", SURFACE: "surface", SECOND_PHANTOM[0]: "other"} | {
    colour: strategy for strategy, (colour, _) in LOOKS.items()
}


def write_report(found: Comparison | Study, folder: Path) -> Path:
    """Write report.html, figures/ and CSV files into the folder; returns the path of the page."""
    return write_page(found, write_figures(found, folder), folder)


def write_figures(found: Comparison | Study, folder: Path) -> list[CaptionedFigure]:
    """Write figures/ into the folder, which takes most of the time of a report."""
    drawn = comparison_figures(found) if isinstance(found, Comparison) else study_figures(found)
    for drawing in drawn:
        write_text(folder / "figures" / f"{drawing.name}.svg", drawing.svg)
        write_bytes(folder / "figures" / f"{drawing.name}.png", drawing.png)
    return drawn


def write_page(found: Comparison | Study, drawn: list[CaptionedFigure], folder: Path) -> Path:
    """Write report.html with these figures, and CSV files, into the folder; returns the path of the page."""
    data = csv_files(found)
    for name, text in data.items():
        write_text(folder / name, text)
    page = folder / "report.html"
    write_text(page, render(found, drawn, list(data)))
    return page


def render(found: Comparison | Study, drawn: list[CaptionedFigure], files: list[str]) -> str:
    """The HTML of the page."""
    environment = Environment(
        loader=PackageLoader("phantom_parallel.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    if isinstance(found, Comparison):
        sections: tuple[tables.Section, ...] = tables.comparison_sections(found)
        details = tables.detailed_sections(found)
        words: dict[str, Any] = {
            "note": tables.note(found),
            "details": details if details != sections else (),
            "headline": captions.headline(found),
            "names": listed(one.strategy for one in found.strategies),
            "wires_searched": captions.wires_are_searched(found),
            "has_intervals": any(one.ratio.low is not None for one in found.ratios),
            "about": [(one.description or one.strategy, explanation(one.strategy)) for one in found.strategies],
            "charges_idle": any(entry.provenance == "modelled" for one in found.strategies for entry in one.inference),
            "sensors": tables.measured_by(found.runs),
        }
        title = f"{found.name}: phantom parallelism compared at equal loss"
    else:
        every = (study_tables.study_section(found),)
        sections = study_tables.study_sections(found) if found.is_regime else every
        words = {
            "fixed": flat(study_tables.fixed_settings(found.cells)),
            "note": study_tables.note(found),
            "details": every if found.is_regime else (),
            "charges_idle": False,
            "has_modelled_cells": any(cell.modelled for cell in found.cells),
        }
        title = f"{found.name}: a study of phantom parallelism"
    return environment.get_template(f"{found.kind}.html.j2").render(
        found=found,
        title=title,
        sections=sections,
        figures=[(drawing, inline(drawing)) for drawing in drawn],
        files=files,
        settings=[*flat(found.settings), *network_settings(found.network)],
        environment=flat(found.environment),
        wall=wall_clock(found),
        plain=plain,
        light={name: colour for colour, name in COLOURS.items()},
        **words,
    )


def inline(drawing: CaptionedFigure) -> Markup:
    """The figure as an SVG element: colours are variables of the page, ids are unique, and nothing is loaded."""
    text = drawing.svg
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r'\s+xmlns(:\w+)?="[^"]*"', "", text)
    for colour, name in COLOURS.items():
        text = re.sub(rf"{colour}\b", f"var(--{name})", text, flags=re.IGNORECASE)
    text = re.sub(r'\bid="', f'id="{drawing.name}-', text)
    text = re.sub(r"url\(#", f"url(#{drawing.name}-", text)
    text = re.sub(r'xlink:href="#', f'href="#{drawing.name}-', text)
    text = re.sub(r"'DejaVu Sans'[^;\"]*", "system-ui, sans-serif", text)
    return Markup(text.replace("<svg ", Markup('<svg role="img" aria-label="{}" ').format(drawing.title), 1))


def wall_clock(found: Comparison | Study) -> str:
    """How long it took, and what that covers."""
    time = quantity(found.wall_seconds, "s")
    if found.wall_of == "process":
        return f"{time} from the start of the process until this page was written"
    return f"trainings and timings took {time}, without the start of the process and without this report"


def explanation(name: str) -> str | None:
    """What a contender does, whatever the format of the values that it exchanges."""
    base, *layout = re.split("[@+]", name)
    if base in LAYOUTS:
        model = "phantom model with all its blocks" if STRATEGIES[LAYOUTS[base]].has_blocks else "dense model"
        return f"every rank holds the whole {model} and works on rows of its own, and ranks exchange gradients"
    strategy = STRATEGIES.get(base)
    if strategy is None:
        return None
    copies = "@" in name and not layout[0].endswith("x1")
    return f"{strategy.explanation}; copies exchange gradients" if copies else strategy.explanation


def network_settings(network: Network | None) -> list[tuple[str, str]]:
    """The network that ranks exchanged over, for the settings of the page."""
    if network is None:
        return []
    found = [("network", network.describe()), ("network.emulated", "yes")]
    found += [] if network.rate is None else [("network.rate", format_rate(network.rate))]
    if network.scaled is not None:
        found += [("network.FLOPs a byte", f"{network.scaled.ratio:,.0f}, as {network.scaled.profile} between nodes")]
    return found


def flat(nested: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Settings as names and texts; names of nested settings are joined by dots."""
    found: list[tuple[str, str]] = []
    for name, value in nested.items():
        if isinstance(value, Mapping):
            found += flat(value, f"{prefix}{name}.")
        elif isinstance(value, list | tuple) and any(isinstance(one, Mapping | list | tuple) for one in value):
            parts = {str(number): one for number, one in enumerate(value, 1)}
            found += flat(parts, f"{prefix}{name}.")
        elif isinstance(value, list | tuple):
            found.append((f"{prefix}{name}", ", ".join(map(_text, value))))
        else:
            found.append((f"{prefix}{name}", _text(value)))
    return found


def _text(value: Any) -> str:
    return tables.NOTHING if value is None else str(value)
