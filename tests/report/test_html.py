import json
import re
import shutil
import subprocess
from dataclasses import asdict, replace
from html.parser import HTMLParser

import pytest

from phantom_parallel.report import html as report
from phantom_parallel.study.results import Comparison, SharedModel, Study
from phantom_parallel.utils.network import Network, ScaledLink
from phantom_parallel.utils.parsing import decode_json
from phantom_parallel.utils.strategies import STRATEGIES
from tests.study.sample import make_comparison, make_regime, make_study

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SCRIPT = "<script>alert(1)</script>"


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


STUDIES = ("ghosts", "scaling", "smaller", "batch", "width", "mine")


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reports")
    found = {"compare": make_comparison(remarks=("Phantom is worse in memory.",))}
    found |= {name: make_study(name) for name in STUDIES}
    return {name: report.write_report(one, folder / name) for name, one in found.items()}


def test_everything_is_written(pages):
    folder = pages["compare"].parent
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["curve.csv", "figures", "ratios.csv", "report.html", "runs.csv", "strategies.csv", "trials.csv"]
    figures = {path.name for path in (folder / "figures").iterdir()}
    stems = ("loss-time", "loss-energy", "ratios", "learning-rates", "parts", "bytes", "flops")
    assert figures == {f"{stem}.{kind}" for stem in stems for kind in ("svg", "png")}
    assert (pages["ghosts"].parent / "cells.csv").exists()


@pytest.mark.parametrize("name", ["compare", *STUDIES])
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


def test_a_page_says_all_that_was_found(pages):
    text = pages["compare"].read_text()
    for part in (
        "phantom compare quick --out out/compare",
        "Phantom is worse in memory.",
        "what every strategy came down to in the search",
        "assumed of one core of a server CPU",
        "No energy sensor could be\nread where this ran",
        "training.width",
        "phantom / megatron",
        "a CPU with 2 cores",
        "4 blocks, 16 ghosts",
    ):
        assert part in text, part
    assert text.count("<figcaption>") == 7
    study = pages["scaling"].read_text()
    assert "What does a ghost more buy" in study
    assert "With 16 ghosts phantom is within 2 % of tensor&#39;s loss." in study
    assert "Modelled: frontier-mi250x" in study


def test_figures_take_their_colours_from_the_page(pages):
    text = pages["compare"].read_text()
    figures = "".join(re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL))
    assert set(re.findall(r"(?:fill|stroke): #\w+", figures)) == set()
    for colour in re.findall(r"var\(--(\w+)\)", figures):
        assert f"--{colour}: #" in text


def test_what_comes_from_data_is_escaped(tmp_path):
    found = make_comparison(
        name=SCRIPT, remarks=(SCRIPT,), command=SCRIPT, environment={SCRIPT: SCRIPT}, target_from=SCRIPT
    )
    assert_harmless(report.write_report(renamed(found, Comparison), tmp_path / "compare"))
    study = make_study("batch", question=SCRIPT, findings=(SCRIPT,), settings={"cells": [{SCRIPT: [SCRIPT]}]})
    assert_harmless(report.write_report(renamed(study, Study), tmp_path / "study"))


def renamed(found, kind):
    """With a strategy whose name is a script, as a file by somebody else could have it."""
    return decode_json(json.dumps(asdict(found)).replace("tensor", SCRIPT).encode(), kind, "renamed")


def test_a_comparison_of_nothing_still_has_a_page(tmp_path):
    found = make_comparison(strategies=(), ratios=(), runs=(), trials=())
    assert "In numbers" in report.write_report(found, tmp_path).read_text()


def assert_harmless(page):
    text = page.read_text()
    assert "script" not in Page(text).tags
    assert "&lt;script&gt;" in text
    assert "<script" not in text


def test_writing_again_replaces_the_page_and_leaves_nothing_behind(tmp_path):
    first = report.write_report(make_study("batch"), tmp_path).read_text()
    assert report.write_report(make_study("batch"), tmp_path).read_text() == first
    assert not list(tmp_path.rglob(".*"))


def browse(page, tmp_path, *options):
    command = [
        *(BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"),
        *(f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=2000", *options, page.as_uri()),
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium")
def test_a_browser_shows_the_page(pages, tmp_path):
    shown = browse(pages["compare"], tmp_path, "--dump-dom")
    assert "<title>quick: phantom parallelism compared at equal loss</title>" in shown
    assert shown.count('<svg role="img"') == 7
    assert shown.count("<figcaption>") == 7


@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium")
@pytest.mark.parametrize("width", [420, 1200])
def test_no_page_is_wider_than_its_window(pages, tmp_path, width):
    """A page with all reports in frames of that width, which asks each for its width."""
    frames = "".join(f'<iframe width="{width}" src="{path.as_uri()}"></iframe>' for path in pages.values())
    asks = (
        "document.title = [...document.querySelectorAll('iframe')]"
        ".map(one => one.contentDocument.documentElement.scrollWidth).join(' ')"
    )
    asking = tmp_path / "asking.html"
    asking.write_text(f"<style>iframe {{ border: 0 }}</style>{frames}<script>onload = () => {{ {asks} }}</script>")
    shown = browse(asking, tmp_path, "--allow-file-access-from-files", "--dump-dom", "--window-size=1300,900")
    widths = [int(one) for one in re.search(r"<title>(.*?)</title>", shown).group(1).split()]
    assert len(widths) == len(pages)
    assert max(widths) <= width


def rendered(found: Comparison | Study) -> str:
    return report.render(found, [], [])


def test_a_page_of_many_strategies_on_a_network_names_both():
    network = Network(
        hosts=4,
        link="like:frontier-mi250x",
        rate=1e8,
        scaled=ScaledLink("frontier-mi250x", "fp32", 4e10, 2880.0),
    )
    names = ("phantom", "phantom-copies", "tensor", "megatron", "copies")
    text = rendered(make_comparison(names, network=network, findings=("Least time to the loss: phantom 1 s.",)))
    assert "4 emulated hosts" in text
    assert "100 Mbit/s" in text
    assert "2,880, as frontier-mi250x between nodes" in text
    assert "Least time to the loss: phantom 1 s." in text
    assert "All figures" in text


def test_a_page_of_links_has_a_column_for_each_and_all_cells():
    text = rendered(make_regime())
    assert "100mbit, batch 512" in text
    assert "All figures" in text


def test_copies_are_explained_as_copies():
    for name, model in (("copies", "dense model"), ("phantom-copies", "phantom model")):
        text = report.explanation(name)
        assert f"every rank holds the whole {model}" in text
        assert "exchange gradients" in text
        assert "ghosts" not in text
    assert report.explanation("phantom+int8") == report.explanation("phantom") == STRATEGIES["phantom"].explanation
    assert report.explanation("pipeline@2x2") == f"{STRATEGIES['pipeline'].explanation}; copies exchange gradients"
    assert report.explanation("tensor@4x1") == STRATEGIES["tensor"].explanation
    assert report.explanation("magic") is None


def test_the_clock_says_what_it_covers():
    assert report.wall_clock(make_comparison(wall_of="process")) == (
        "98 s from the start of the process until this page was written"
    )
    assert "without the start of the process and without this report" in rendered(make_comparison())


def test_watts_say_of_what_they_are_and_what_they_are_charged_for():
    core = rendered(make_comparison(power=replace(make_comparison().power, per="core")))
    assert "computing, per core" in core
    assert "ranks that share cores share their watts" in core
    assert "idle, per core" in core  # in inference
    study = rendered(make_study("scaling"))
    assert "computing, per rank" in study
    assert "idle, per" not in study
    assert "within a step a\nrank computes or is blocked in a collective" in study


def test_a_page_says_no_more_of_searches_intervals_and_sensors_than_there_were():
    text = rendered(make_comparison())
    assert "Here phantom, tensor and megatron were trained" in text
    assert "the same search found for it, until" in text
    assert "In brackets: the 95 % confidence interval over seeds." in text
    text = rendered(make_comparison(("phantom", "tensor"), seeds=1))
    assert "In brackets" not in text
    assert "There are no confidence intervals." in text
    assert "Figures of one seed, without confidence intervals." in text
    assert "Means over" not in text
    assert "Here phantom was trained" in rendered(make_comparison(("phantom",)))
    found = make_comparison(("phantom", "tensor+int8"), settings={"search": {"wires": False}})
    exact, int8 = found.strategies
    text = rendered(replace(found, strategies=(exact, replace(int8, wire="int8"))))
    assert "found for it (at full precision, also for other formats on the wire), until" in text
    measured = tuple(replace(run, measured_joules=50.0, measured_by="counter") for run in found.runs)
    assert "Measured by counter, over a whole training with its evaluations." in rendered(replace(found, runs=measured))
    shared = SharedModel("dense model", ("tensor",), "tensor", 3, 1e-4, {"tensor": 0.0})
    text = rendered(replace(found, runs=measured, shared=(shared,)))
    assert "the same search found for its model" in text
    assert "Measured by counter, over the steps that were timed" in text
    assert "whole training" not in text


@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium")
def test_figures_are_legible_on_a_phone(pages, tmp_path):
    """The smallest text of all figures at 390 pixels, in CSS pixels."""
    asks = (
        "const page = document.querySelector('iframe').contentDocument;"
        "document.title = Math.min(...[...page.querySelectorAll('figure svg')]"
        ".flatMap(svg => [...svg.querySelectorAll('text')].map(text => parseFloat(getComputedStyle(text).fontSize)"
        " * svg.getBoundingClientRect().width / svg.viewBox.baseVal.width)))"
    )
    asking = tmp_path / "asking.html"
    frame = f'<iframe width="390" src="{pages["compare"].as_uri()}"></iframe>'
    asking.write_text(f"{frame}<script>onload = () => {{ {asks} }}</script>")
    shown = browse(asking, tmp_path, "--allow-file-access-from-files", "--dump-dom", "--window-size=500,900")
    assert float(re.search(r"<title>(.*?)</title>", shown).group(1)) > 10.5
