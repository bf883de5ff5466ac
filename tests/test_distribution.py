"""The wheel: what is in it, and that it works where nothing but it and its dependencies is installed."""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "phantom_parallel"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy of the sources, as setuptools writes beside them. Nothing is downloaded."""
    source, dist = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("src", "tests", "benchmarks"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    pip("wheel", "--no-build-isolation", "--wheel-dir", dist, source)
    (built,) = dist.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory):
    """An empty environment with the wheel installed. Its dependencies are those of the environment that runs the tests,
    as a path: an editable install there is a .pth file, which is not read again, and so stays out of sight.
    """
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    python = folder / "bin" / "python"
    pip("--python", python, "install", wheel)
    (site,) = (folder / "lib").glob("python*/site-packages")
    paths = dict.fromkeys((sysconfig.get_path("purelib"), sysconfig.get_path("platlib")))
    (site / "dependencies.pth").write_text("\n".join(paths) + "\n")
    return folder


def pip(*arguments):
    mode, rest = (arguments[:3], arguments[3:]) if arguments[0] == "--python" else (arguments[:1], arguments[1:])
    run(sys.executable, "-m", "pip", *mode, "--quiet", "--no-deps", "--no-index", *rest)


def run(*command, **options):
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run([str(word) for word in command], env=clean, capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_holds_the_package_and_its_data_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
    about = {name for name in names if name.partition("/")[0].endswith(".dist-info")}
    wanted = {
        str(path.relative_to(PACKAGE.parent)) for path in PACKAGE.rglob("*") if path.is_file() and path.suffix != ".pyc"
    }
    assert names - about == wanted
    assert {Path(name).suffix for name in wanted} == {".py", ".toml", ".j2", ".typed"}
    assert any(name.endswith("licenses/LICENSE") for name in about)


@pytest.mark.slow
def test_the_installed_package_is_the_one_that_runs_and_finds_its_data(environment, tmp_path):
    code = "import phantom_parallel as p; print(p.__file__)"
    assert Path(run(environment / "bin" / "python", "-c", code, cwd=tmp_path).strip()).is_relative_to(environment)
    command = "plan --width 4096 --depth 2 --batch 64 --devices 8 --hardware dgx-a100"
    printed = run(environment / "bin" / "phantom", *command.split(), cwd=tmp_path)
    for word in ("phantom", "tensor", "dgx-a100"):
        assert word in printed
