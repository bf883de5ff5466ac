"""README, CONTRIBUTING and docs/ are true: figures are the result files', links resolve, code and commands run."""

import contextlib
import io
import os
import re
import shlex
import tomllib
from pathlib import Path

import pytest
import torch

from benchmarks import tables
from phantom_parallel.cli.main import COMMANDS, GROUPS
from phantom_parallel.cli.main import _parse as parse_command

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)

FENCE = re.compile(r"^```(?P<language>\w*)\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE)
# Code that readers do not need, such as a small model: it runs before the snippets that follow, on so many ranks.
SETUP = re.compile(r"^<!-- setup ranks=(?P<ranks>\d+)\n(?P<code>.*?)^-->$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\((?P<target>[^)\s]+)\)")


def blocks(page, language):
    """(first line, code) of every fenced block of a language."""
    text = page.read_text()
    return [
        (text.count("\n", 0, match.start("code")), match["code"])
        for match in FENCE.finditer(text)
        if match["language"] == language
    ]


# Figures


@pytest.mark.parametrize("page", tables.pages(), ids=lambda page: page.stem)
def test_figures_are_those_of_the_result_files(page):
    text = page.read_text()
    assert text == tables.generated(text, page.parent), "run python -m benchmarks.tables --write"


def test_every_result_file_has_a_place_in_the_documentation():
    used = set().union(*(tables.results_used(page.read_text()) for page in tables.pages()))
    assert used == {path.stem for path in tables.RESULTS.glob("*.json")}


# Links


@every_page
def test_links_resolve(page):
    for match in LINK.finditer(re.sub(r"`[^`\n]*`", "", FENCE.sub("", page.read_text()))):  # without code
        path, _, anchor = match["target"].partition("#")
        if "://" in path:
            continue
        target = page.parent / path if path else page
        assert target.exists(), f"{page.name} links to {match['target']}"
        if anchor:
            assert anchor in anchors(target), f"{page.name} links to {match['target']}"


def anchors(page):
    titles = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", tables.pages(), ids=lambda page: page.stem)
def test_files_of_the_package_that_are_named_exist(page):
    for name in re.findall(r"\bphantom_parallel/[\w./]*\w", page.read_text()):
        assert (ROOT / "src" / name).exists(), f"{page.name} names {name}"


# Code


@pytest.mark.parametrize(
    "page", [pytest.param(page, id=page.stem, marks=[pytest.mark.slow] * (page != PAGES[0])) for page in PAGES]
)
def test_python_snippets_run(page, ranks, tmp_path):
    for size, parts in snippets(page):
        done = ranks(size)(run_snippets, str(page.relative_to(ROOT)), parts, tmp_path)
        assert len(done) == size  # a snippet that raises is a RankFailed, with its line


def snippets(page):
    """Parts of the page that share a namespace, in order: how many ranks they need, and (first line, code) of each."""
    text = page.read_text()
    matches = sorted([*FENCE.finditer(text), *SETUP.finditer(text)], key=lambda match: match.start())
    groups = [(1, [])]
    for match in matches:
        if match.re is SETUP:
            groups.append((int(match["ranks"]), []))
        if match.re is SETUP or match["language"] == "python":
            groups[-1][1].append((text.count("\n", 0, match.start("code")), match["code"]))
    assert text.count("```python") == len(blocks(page, "python")), "a snippet that this test does not find"
    assert text.count("<!-- setup") == len(SETUP.findall(text)), "a set-up that this test does not find"
    return [group for group in groups if group[1]]


def run_snippets(name, parts, folder):
    """Run on every rank. Lines of a traceback are those of the page."""
    before, threads = os.getcwd(), torch.get_num_threads()
    namespace = {"__name__": "__main__"}
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            for first, code in parts:
                exec(compile("\n" * first + code, name, "exec"), namespace)
    finally:
        os.chdir(before)
        torch.set_num_threads(threads)


@every_page
def test_toml_snippets_are_valid(page):
    for _, code in blocks(page, "toml"):
        assert tomllib.loads(code)


def commands():
    """Every ``phantom`` command line of a console block, with its page."""
    for page in PAGES:
        for language in ("console", "bash"):
            for _, code in blocks(page, language):
                for line in code.replace("\\\n", " ").splitlines():
                    match = re.search(r"(?:\bphantom|-m phantom_parallel\.cli\.main) (\w.*)$", line)
                    if match:
                        yield pytest.param(shlex.split(match[1], comments=True), id=f"{page.stem}: {match[1][:50]}")


@pytest.mark.parametrize("arguments", list(commands()))
def test_commands_have_the_options_that_they_are_shown_with(arguments):
    words = 2 if arguments[0] in GROUPS else 1
    name = " ".join(arguments[:words])
    assert name in COMMANDS
    parse_command(name, arguments[words:])
