"""Pages that need nothing else, say what there is, and stay within their window."""

import json
import re
import shutil
import subprocess
from dataclasses import asdict, replace
from html.parser import HTMLParser

import numpy as np
import pytest
from matplotlib.image import imread

from phantom_parallel.report import html as report
from phantom_parallel.study.notes import headline, notes
from phantom_parallel.study.results import Results
from phantom_parallel.utils.parsing import decode_json
from tests.report.test_figures import write_fields
from tests.study.sample import NATURE, make_links, make_results

SCRIPT = "<script>alert(1)</script>"
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="there is no Chromium")
needs_poppler = pytest.mark.skipif(shutil.which("pdftoppm") is None, reason="there is no poppler")


class Page(HTMLParser):
    """Every tag and attribute of a page, and the ids twice given."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.loads, self.ids = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        for name, value in attributes:
            if name in ("src", "href", "xlink:href", "data", "srcset", "action") and not value.startswith(
                ("#", "data:")
            ):
                self.loads.append(value)
            if name == "id":
                self.ids.append(value)


def make_many():
    """A comparison of twelve, as many as presets have."""
    results = make_results(tuple(NATURE))
    more = tuple(replace(cell, strategy=f"{cell.strategy}@2x2") for cell in results.cells[:5])
    return replace(results, cells=results.cells + more)


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reports")
    made = {"compare": make_results(), "links": make_links(), "fields": make_many()}
    (folder / "fields").mkdir()
    write_fields(folder / "fields", np.random.default_rng(0).uniform(size=(50, 2)), {"phantom": 0.1, "dense": -0.2})
    return {name: report.write_report(results, folder / name) for name, results in made.items()}


def test_everything_is_written(pages):
    folder = pages["compare"].parent
    names = sorted(path.name for path in folder.iterdir())
    assert " ".join(names) == "cells.csv curve.csv figures ratios.csv report.html runs.csv summary.txt trials.csv"
    figures = {path.name for path in (folder / "figures").iterdir()}
    stems = ("loss-time", "loss-energy")
    assert figures == {f"{stem}.{kind}" for stem in stems for kind in ("svg", "png")}
    assert (folder / "figures" / "loss-time.png").read_bytes().startswith(b"\x89PNG")


def test_fields_are_part_of_the_page_and_follow_the_reasons(pages):
    text = pages["fields"].read_text()
    assert text.index("<h2>Why") < text.index('id="field-1"') < text.index('id="field-2"') < text.index("<h2>All")
    assert text.count("data:image/png;base64,") >= 2 * 6
    assert {"field-1.png", "field-2.svg"} <= {path.name for path in (pages["fields"].parent / "figures").iterdir()}


def test_the_summary_is_the_headline_then_what_the_terminal_has(pages):
    lines = (pages["fields"].parent / "summary.txt").read_text().splitlines()
    results = make_many()
    above = " ".join(lines[: lines.index("")])
    assert above == " ".join(headline(results))
    assert max(map(len, lines)) <= 80
    assert not any(line.endswith((",", " ")) and "[" in line.split("]")[-1] for line in lines)  # no broken interval
    assert sum(line.startswith("- ") for line in lines) == 4


@pytest.mark.parametrize("name", ["compare", "links", "fields"])
def test_a_page_needs_nothing_else(pages, name):
    text = pages[name].read_text(encoding="utf-8")
    page = Page(text)
    assert page.loads == []
    assert "http" not in text
    assert "@import" not in text
    assert "script" not in page.tags
    assert len(page.ids) == len(set(page.ids))
    assert set(re.findall(r"url\(#([^)]+)\)", text)) <= set(page.ids)
    assert set(re.findall(r'href="#([^"]+)"', text)) <= set(page.ids)


def test_a_page_has_the_answer_first_and_caveats_folded(pages):
    text = pages["compare"].read_text()
    results = make_results()
    places = [
        text.index(part)
        for part in (headline(results)[0][:12], "<svg", 'aria-label="main figures"', "<h2>Why", "<h2>All", "Method and")
    ]
    assert places == sorted(places)
    for note in notes(results):
        assert note.split("'")[0] in text
    for part in ("phantom compare --out out/compare", "assumed of one core", "No energy sensor", "training.width"):
        assert part in text
    assert text.count("<figcaption>") == 2


def test_what_comes_from_data_is_escaped(tmp_path):
    results = make_results(name=SCRIPT, question=SCRIPT, command=SCRIPT, environment={SCRIPT: SCRIPT})
    data = json.dumps(asdict(results)).replace("tensor", SCRIPT)  # a file by somebody else could have it
    text = report.write_report(decode_json(data.encode(), Results, "renamed"), tmp_path).read_text()
    assert "script" not in Page(text).tags
    assert "&lt;script&gt;" in text
    assert "<script" not in text


def browse(page, tmp_path, *options):
    command = [
        *(BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"),
        *(f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=2000", *options, page.as_uri()),
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


ASK = """
onload = () => { document.title = JSON.stringify([...document.querySelectorAll("iframe")].map(frame => {
  const page = frame.contentDocument
  const bottom = selector => page.querySelector(selector)?.getBoundingClientRect().bottom
  const scales = [...page.querySelectorAll("svg")].map(svg => svg.getBoundingClientRect().width)
  const tables = [...page.querySelectorAll("table")]
  const widths = tables.map(table => [table.getBoundingClientRect().width, table.closest(".wide") !== null])
  return [page.documentElement.scrollWidth, bottom(".first"), bottom(".small"), Math.max(...scales), widths]
})) }
"""


@needs_browser
@pytest.mark.slow
def test_pages_fit_their_windows_and_the_first_screen_has_the_answer(pages, tmp_path):
    """A page with all reports in frames of a phone's and of a desktop's width, which asks each for its sizes."""

    def sizes(places):
        frames = (f'<iframe width="{width}" height="900" src="{path.as_uri()}"></iframe>' for path, width in places)
        asking = tmp_path / "asking.html"
        asking.write_text(f"<style>iframe {{ border: 0 }}</style>{''.join(frames)}<script>{ASK}</script>")
        shown = browse(asking, tmp_path, "--allow-file-access-from-files", "--dump-dom", "--window-size=1300,900")
        return json.loads(re.search(r"<title>(.*?)</title>", shown).group(1))

    places = [(path, width) for path in pages.values() for width in (390, 1200)]
    for (path, width), (page, chart, table, widest, _) in zip(places, sizes(places), strict=True):
        assert page <= width
        assert widest <= width  # figures scale
        if width == 1200 and path == pages["compare"]:
            assert chart < table < 900
    # Printed on Letter, the narrower paper, with the margins of Chromium; wide tables lie across.
    printed = [tmp_path / f"{name}.html" for name in pages]
    for copy, path in zip(printed, pages.values(), strict=True):
        copy.write_text(path.read_text().replace("@media print", "@media all"))
    tables = [shown[-1] for shown in sizes([(path, 739) for path in printed])]
    assert [any(wide for _, wide in shown) for shown in tables] == [name != "compare" for name in pages]
    too_wide = [size for shown in tables for size in shown if size[0] > (979 if size[1] else 739)]
    assert not too_wide
    for name, setting, dark in (("light", 1, False), ("dark", 0, True)):
        picture = tmp_path / f"{name}.png"
        options = (f"--blink-settings=preferredColorScheme={setting}", f"--screenshot={picture}")
        browse(pages["compare"], tmp_path, *options, "--window-size=1200,900")
        pixels = imread(picture)[..., :3].mean(-1)
        assert bool(pixels[5, 5] < 0.2) is dark
        assert pixels.std() > 0.02


def test_print_shows_what_is_folded_and_is_never_dark(pages):
    style = re.search("<style>(.*?)</style>", pages["compare"].read_text(), re.DOTALL).group(1)
    rules = style[style.index("@media print") :]
    assert re.search(r"details::details-content {[^}]*content-visibility: visible", rules)
    assert all("break-inside: avoid" in rule for rule in rules.split("}") if "figure, .lead" in rule)
    assert re.findall("@media ([^{]*prefers-color-scheme[^{]*) {", style) == ["screen and (prefers-color-scheme: dark)"]


@needs_browser
@needs_poppler
@pytest.mark.slow
def test_printed_pages_have_all_text_within_white_margins(pages, tmp_path):
    """Also on a machine whose screen is dark."""
    for name, path in pages.items():
        document, options = (
            tmp_path / f"{name}.pdf",
            ("--blink-settings=preferredColorScheme=0", "--no-pdf-header-footer"),
        )
        browse(path, tmp_path, *options, f"--print-to-pdf={document}")
        text = subprocess.run(["pdftotext", document, "-"], capture_output=True, text=True, check=True).stdout
        for folded in ("Source of these watts", "Environment", "phantom compare --out out/compare"):
            assert folded in text
        subprocess.run(["pdftoppm", "-r", "50", "-png", document, tmp_path / name], check=True)
        sheets = [imread(sheet)[..., :3].mean(-1) for sheet in sorted(tmp_path.glob(f"{name}-*.png"))]
        assert sheets
        for sheet in sheets:
            border = np.concatenate([sheet[:, :10], sheet[:, -10:]], axis=1)
            assert border.min() > 0.97  # white, and nothing runs over the edge of the paper
            assert np.median(sheet) > 0.97
