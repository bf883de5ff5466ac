"""What mkdocs does not find in docs/: the README as the home page, other files of the repository that pages link to,
a page of reference for every public package, and the help of every command.

The reference follows ``__all__``. A package that has one gets a page with the names in it; a package without one, a
page with all of its public modules. Everything is found from the sources, so the reference stays complete when code
moves. A name is documented once, in the innermost package that exports it; pages of other packages link there.
"""

import contextlib
import io
import os
import posixpath
import re
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pygments.formatters import HtmlFormatter  # type: ignore[import-untyped]

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "phantom_parallel"
COMMANDS = f"{PACKAGE}.cli"  # described by its help
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "CHANGELOG.md": "CHANGELOG.md"}

LINK = re.compile(r"\]\((?P<target>[^)\s#]+)(?P<anchor>#[^)\s]*)?\)")
COMMENT = re.compile(r"^<!--.*?-->\n|<!--.*?-->", re.DOTALL | re.MULTILINE)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    assert config.nav is not None
    references = [{module.path: _page_of(module.path)} for module in public_modules(_load())]
    config.nav.insert(-1, {"Reference": [{"Commands": "reference/commands.md"}, *references]})
    return config


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    def add(uri: str, content: str) -> None:
        files.append(File.generated(config, uri, content=content))

    for source, uri in PAGES.items():
        add(uri, (ROOT / source).read_text())
    for folder in ("benchmarks/results", "examples"):
        for path in sorted((ROOT / folder).iterdir()):
            if path.is_file():
                files.append(File.generated(config, f"{folder}/{path.name}", abs_src_path=str(path)))
    add("reference/commands.md", commands())
    root = _load()
    homes = documented(root)
    for module in public_modules(root):
        add(_page_of(module.path), reference(module, homes))
    style = HtmlFormatter(style="default")
    add("css/highlight.css", style.get_style_defs(".codehilite") + "\n" + style.get_style_defs(".highlight") + "\n")
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links between files of the repository become links between pages of the site; comments are for the sources."""
    uri = page.file.src_uri
    sources = {site: source for source, site in PAGES.items()}
    source = sources.get(uri, f"docs/{uri}")  # where the page lies in the repository

    def link(found: re.Match[str]) -> str:
        target, anchor = found["target"], found["anchor"] or ""
        if ":" in target:
            return found[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        site = PAGES.get(path, path.removeprefix("docs/"))
        return f"]({posixpath.relpath(site, posixpath.dirname(uri) or '.')}{anchor})"

    return LINK.sub(link, COMMENT.sub("", markdown))


def public_modules(module: griffe.Module) -> list[griffe.Module]:
    """Packages and modules that have a page: the package itself, its public subpackages, and public modules that lie
    directly in the outermost one.
    """
    found = [module]
    for child in _children(module):
        if child.is_subpackage:
            found += public_modules(child)
        elif module.path == PACKAGE:
            found.append(child)
    return found


def _children(module: griffe.Module) -> list[griffe.Module]:
    """Public modules in a package. Modules that it imports are aliases."""
    found = [child for _, child in sorted(module.modules.items()) if not child.is_alias]
    return [child for child in found if not child.name.startswith("_") and child.path != COMMANDS]


def exported(module: griffe.Module) -> list[str]:
    """Names in ``__all__`` that can be documented."""
    return [str(name) for name in module.exports or () if not str(name).startswith("__")]


def documented(root: griffe.Module) -> dict[str, str]:
    """Where a name is documented, by the path where it is defined."""
    homes: dict[str, str] = {}
    for module in public_modules(root):
        for path in _paths(module):
            for one in _within(root[path.removeprefix(f"{PACKAGE}.")]):
                if len(one.path) >= len(homes.get(one.canonical_path, "")):
                    homes[one.canonical_path] = one.path
    return homes


def _within(found: Any) -> list[Any]:
    """A name, or the names that a module defines."""
    if not found.is_module:
        return [found]
    return [found, *(one for name, one in found.members.items() if not (name.startswith("_") or one.is_alias))]


def _paths(module: griffe.Module) -> list[str]:
    """What a page is to document: names, or whole modules with the names that are defined there."""
    if module.exports is not None:
        return [f"{module.path}.{name}" for name in exported(module)]
    if module.is_package or module.is_subpackage:
        return [child.path for child in _children(module) if not child.is_subpackage]
    return [module.path]


def reference(module: griffe.Module, homes: dict[str, str]) -> str:
    """A page of reference: links to names that are documented elsewhere, and directives for mkdocstrings."""
    links, directives = [], []
    for path in _paths(module):
        found = module if path == module.path else module[path.removeprefix(f"{module.path}.")]
        home = homes[found.canonical_path]
        if home == path:
            directives += [f"::: {path}", ""]
        else:
            summary = found.docstring.value.split("\n\n")[0].replace("\n", " ") if found.docstring else ""
            links.append(f"- [`{found.name}`][{home}]: {summary}".removesuffix(": "))
    about = module.docstring.value if module.docstring else ""
    return "\n".join([f"# {module.path}", "", about, "", *links, "", *directives])


def commands() -> str:
    """The help of every command, as a terminal shows it."""
    from phantom_parallel.cli import main as cli
    from phantom_parallel.families.registry import family_names

    lines = ["# Commands", ""]
    for name in ["", *cli.COMMANDS]:
        words = name.split()
        lines += [f"## phantom {name}".strip(), "", "```text", _help([*words, "--help"]), "```", ""]
        module = import_module(f"{COMMANDS}.{cli.COMMANDS[name].module}") if name else None
        options = getattr(module, cli.COMMANDS[name].options) if name else None
        others = family_names()[1:] if options and not isinstance(options, type) else ()
        for variant in others:
            lines += [f"## phantom {name} {variant}", "", "```text", _help([*words, variant, "--help"]), "```", ""]
    return "\n".join(lines)


def _help(arguments: list[str]) -> str:
    from phantom_parallel.cli import main as cli

    os.environ.update(COLUMNS="100", NO_COLOR="1")
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
        cli.main(arguments)
    return re.sub(r"\x1b\[[\d;]*m", "", printed.getvalue()).rstrip()


class LiteralBlocks(griffe.Extension):
    """``Example::`` before an indented block, as in PyTorch's docstrings, is ``Example:`` in Markdown."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"::$", ":", obj.docstring.value, flags=re.MULTILINE)


def _page_of(path: str) -> str:
    return f"reference/{path}.md"


@cache
def _load() -> Any:
    return griffe.load(PACKAGE, search_paths=[str(ROOT / "src")])
