"""The documentation site builds without a warning, and its reference has every public name."""

import importlib
import inspect
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import phantom_parallel
from phantom_parallel.cli.main import COMMANDS

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """As ``make docs`` builds it: a broken link or an argument that a docstring has wrong is an error."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def packages():
    names = [each.name for each in pkgutil.walk_packages(phantom_parallel.__path__, "phantom_parallel.") if each.ispkg]
    left_out = "phantom_parallel.cli", "phantom_parallel.integrations"  # whose modules need packages of their own
    return ["phantom_parallel", *(name for name in names if name not in left_out)]


@pytest.mark.parametrize("name", packages())
def test_the_reference_has_every_public_name(site, name):
    page = (site / "reference" / f"{name}.html").read_text()
    shown = set(re.findall(r' id="([\w.]+)"', page)) | set(re.findall(r'href="[^"#]*#([\w.]+)"', page))
    package = importlib.import_module(name)
    if hasattr(package, "__all__"):
        wanted = set(package.__all__) - {"__version__"}
        assert wanted <= {each.rpartition(".")[2] for each in shown}
    else:
        assert set(names_in_modules(package)) <= shown


def names_in_modules(package):
    """Public classes and functions of the modules that lie directly in a package."""
    for module_info in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        if not module_info.ispkg and not module_info.name.rpartition(".")[2].startswith("_"):
            module = importlib.import_module(module_info.name)
            for name, value in vars(module).items():
                here = getattr(value, "__module__", None) == module.__name__
                if here and not name.startswith("_") and (inspect.isclass(value) or inspect.isfunction(value)):
                    yield f"{module.__name__}.{name}"


def test_every_command_has_its_help(site):
    page = (site / "reference" / "commands.html").read_text()
    assert {f"phantom-{name.replace(' ', '-')}" for name in COMMANDS} <= set(re.findall(r'<h2 id="([^"]*)"', page))


def test_the_site_loads_nothing_from_other_hosts(site):
    for page in site.rglob("*.html"):
        loaded = re.findall(r'<(?:script|img)[^>]* src="([^"]*)"|<link[^>]* href="([^"]*)"', page.read_text())
        assert not [each for pair in loaded for each in pair if re.match(r"(https?:)?//", each)], page.name
