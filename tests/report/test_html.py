"""Pages that need nothing else, say what there is, and stay within their window."""

import json
import re
import shutil
import subprocess
from dataclasses import asdict
from html.parser import HTMLParser

import pytest
from matplotlib.image import imread

from phantom_parallel.report import html as report
from phantom_parallel.study.notes import headline, notes
from phantom_parallel.study.results import Results
from phantom_parallel.utils.parsing import decode_json
from tests.study.sample import make_links, make_results

SCRIPT = "<script>alert(1)</script>"
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="there is no Chromium")


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


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reports")
    made = {"compare": make_results(), "links": make_links()}
    return {name: report.write_report(results, folder / name) for name, results in made.items()}


def test_everything_is_written(pages):
    folder = pages["compare"].parent
    names = sorted(path.name for path in folder.iterdir())
    assert " ".join(names) == "cells.csv curve.csv figures ratios.csv report.html runs.csv summary.txt trials.csv"
    figures = {path.name for path in (folder / "figures").iterdir()}
    stems = ("loss-time", "loss-energy")
    assert figures == {f"{stem}.{kind}" for stem in stems for kind in ("svg", "png")}
    assert (folder / "figures" / "loss-time.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["compare", "links"])
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
  return [page.documentElement.scrollWidth, bottom(".first"), bottom(".small"), Math.max(...scales)]
})) }
"""


@needs_browser
@pytest.mark.slow
def test_pages_fit_their_windows_and_the_first_screen_has_the_answer(pages, tmp_path):
    """A page with all reports in frames of a phone's and of a desktop's width, which asks each for its sizes."""
    places = [(path, width) for path in pages.values() for width in (390, 1200)]
    frames = "".join(f'<iframe width="{width}" height="900" src="{path.as_uri()}"></iframe>' for path, width in places)
    asking = tmp_path / "asking.html"
    asking.write_text(f"<style>iframe {{ border: 0 }}</style>{frames}<script>{ASK}</script>")
    shown = browse(asking, tmp_path, "--allow-file-access-from-files", "--dump-dom", "--window-size=1300,900")
    sizes = json.loads(re.search(r"<title>(.*?)</title>", shown).group(1))
    for (path, width), (page, chart, table, widest) in zip(places, sizes, strict=True):
        assert page <= width
        assert widest <= width  # figures scale
        if width == 1200 and path == pages["compare"]:
            assert chart < table < 900
    for name, setting, dark in (("light", 1, False), ("dark", 0, True)):
        picture = tmp_path / f"{name}.png"
        options = (f"--blink-settings=preferredColorScheme={setting}", f"--screenshot={picture}")
        browse(pages["compare"], tmp_path, *options, "--window-size=1200,900")
        pixels = imread(picture)[..., :3].mean(-1)
        assert bool(pixels[5, 5] < 0.2) is dark
        assert pixels.std() > 0.02
