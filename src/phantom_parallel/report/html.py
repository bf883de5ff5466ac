"""The report of a comparison or a study: one HTML file that needs no other, with figures and CSV files beside it."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from phantom_parallel.report import figures, tables
from phantom_parallel.report.figures import LOOKS, SECOND_PHANTOM, CaptionedFigure, save
from phantom_parallel.report.tables import measured_by, reasons
from phantom_parallel.study.contenders import BASES
from phantom_parallel.study.notes import headline, loss_of, notes
from phantom_parallel.study.results import Results
from phantom_parallel.study.units import plain, quantity, tied
from phantom_parallel.utils.files import write_text

# Colours of the figures and their names in the page, which has another set for dark screens.
COLOURS = {colour: strategy for strategy, (colour, _) in LOOKS.items()} | {SECOND_PHANTOM[0]: "other"}
COLOURS |= {getattr(figures, name.upper()): name for name in ("ink", "muted", "grid", "surface")}


def write_report(results: Results, folder: Path) -> Path:
    """Write report.html, summary.txt, figures/ and CSV files into the folder; returns the path of the page."""
    files = tables.csv_files(results) | {"summary.txt": tables.summary(results)}
    for name, text in files.items():
        write_text(folder / name, text)
    first, *rest = tables.main_sections(results, short=results.is_comparison)
    shown: dict[str, Any] = {"main": [first], "details": [*rest, *tables.detailed_sections(results)]}
    shown |= {function.__name__: function(results) for function in (headline, loss_of, notes, reasons, measured_by)}
    shown |= {name: flat(getattr(results, name)) for name in ("settings", "environment")}
    shown["explanations"] = {cell.strategy: explanation(cell.strategy) for cell in results.cells}
    shown |= {"results": results, "files": list(files), "wall": quantity(results.wall_seconds, "s"), "plain": plain}
    return _write_page(folder, "report.html.j2", figures.figures(results) + figures.field_figures(folder), shown)


def write_tuning(tuned: Mapping[str, Any], folder: Path) -> Path:
    """Write the page and the figures of a result of phantom tune into its folder; returns the path of the page."""
    sizes = {name: value for name, value in tuned.items() if isinstance(value, str | int | float)}
    return _write_page(folder, "tune.html.j2", figures.tuning(tuned), {"tuned": tuned, "settings": flat(sizes)})


def _write_page(folder: Path, template: str, drawn: list[CaptionedFigure], values: Mapping[str, Any]) -> Path:
    for figure in drawn:
        save(figure.figure, folder / "figures" / figure.name, figure.svg)
    settings: Any = {"undefined": StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    environment = Environment(loader=PackageLoader("phantom_parallel.report"), autoescape=True, **settings)
    environment.filters["tied"] = tied
    shown = {"figures": [(figure, inline(figure)) for figure in drawn]}
    light = {name: colour for colour, name in COLOURS.items()}
    page = folder / "report.html"
    write_text(page, environment.get_template(template).render(light=light, **shown, **values))
    return page


def inline(figure: CaptionedFigure) -> Markup:
    """The figure as an SVG element: colours are variables of the page, ids are unique, and nothing is loaded."""
    text = figure.svg
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r'\s+xmlns(:\w+)?="[^"]*"', "", text)
    for colour, name in COLOURS.items():
        text = re.sub(rf"{colour}\b", f"var(--{name})", text, flags=re.IGNORECASE)
    text = re.sub(r'\bid="', f'id="{figure.name}-', text)
    text = re.sub(r"url\(#", f"url(#{figure.name}-", text)
    text = re.sub(r'xlink:href="#', f'href="#{figure.name}-', text)
    text = re.sub(r"'DejaVu Sans'[^;\"]*", "system-ui, sans-serif", text)
    return Markup(text.replace("<svg ", Markup('<svg role="img" aria-label="{}" ').format(figure.title), 1))


def explanation(name: str) -> str:
    """What a contender does, whatever the format of the values that it exchanges."""
    base, *layout = re.split("[@+]", name)
    text = BASES[base].explanation if base in BASES else ""
    return f"{text}; copies exchange gradients" if "@" in name and not layout[0].endswith("x1") else text


def flat(nested: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Settings as names and texts; names of nested settings are joined by dots."""
    pairs: list[tuple[str, str]] = []
    for name, value in nested.items():
        if isinstance(value, Mapping):
            pairs += flat(value, f"{prefix}{name}.")
        elif isinstance(value, list | tuple):
            pairs.append((f"{prefix}{name}", ", ".join(map(str, value)) or tables.NOTHING))
        else:
            pairs.append((f"{prefix}{name}", tables.NOTHING if value is None else str(value)))
    return pairs
