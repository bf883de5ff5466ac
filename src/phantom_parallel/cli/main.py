"""``phantom COMMAND``: finds the command, reads its options, and turns a user's error into one line and exit code 2.

A command is a frozen dataclass: its fields are the options, its docstring is the help, and its ``run()`` does the
work. A command on models of a family has a function of the family and the arguments instead, which returns such a class
and defaults that take the place of the class's own. Modules are imported only when they are needed.
"""

import importlib
import sys
from typing import Any, NamedTuple

from phantom_parallel.cli import exit_codes


class Command(NamedTuple):
    """Where a command is, and what it is for."""

    module: str
    purpose: str
    options: str = "options_for"  # the function or the class in the module


# The order is that of the help.
COMMANDS: dict[str, Command] = {
    "compare": Command("compare", "train every strategy to the same loss, and show what it cost", "compare_options"),
    "study": Command("compare", "the paper's experiments and related ones: ghosts, scaling, ...", "study_options"),
    "train": Command("train", "train a model on local ranks or a cluster's"),
    "generate": Command("infer", "text from a transformer", "GenerateOptions"),
    "infer": Command("infer", "predictions of a trained model, and what a sample costs", "InferOptions"),
    "eval": Command("infer", "perplexity, accuracy or error, beside the model it was converted from", "EvalOptions"),
    "plan": Command("plan", "compare strategies and layouts for a model and a machine"),
    "tune": Command("tune", "the blocks and ghosts that reach the loss at the least cost on a machine"),
    "dryrun": Command("dryrun", "what one rank of many would compute, send and keep"),
    "doctor": Command("doctor", "check this machine and its ranks; run this first on a new one", "Options"),
    "model import": Command("model", "a pretrained Llama, Mistral or Qwen2 of Hugging Face", "ImportOptions"),
    "model convert": Command("model", "a dense model as a phantom model, fitted on calibration data", "ConvertOptions"),
    "model heal": Command("model", "train a converted model with the dense model as its teacher", "heal_options"),
    "model export": Command("model", "a model as a folder that transformers loads", "ExportOptions"),
    "machine show": Command("machine", "hardware profiles, each figure with its source", "ShowOptions"),
    "machine measure": Command("machine", "measure this machine and write its profiles", "MeasureOptions"),
    "machine check": Command("machine", "predicted against measured step times", "CheckOptions"),
    "machine sensors": Command("machine", "what energy this machine can measure", "SensorsOptions"),
}
GROUPS = {
    "model": "models from other libraries and to them: import, convert, heal, export",
    "machine": "hardware profiles, measured or published: show, measure, check, sensors",
}


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return the exit code; without ``arguments``, as the program of the process."""
    is_program = arguments is None
    if is_program:
        exit_codes.exit_on_signals()
    try:
        _run(sys.argv[1:] if arguments is None else arguments, handle_signals=is_program)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of the output has closed it, as `| head` does
        return exit_codes.stop_output()
    except SystemExit as leaving:
        if isinstance(leaving.__context__, BrokenPipeError):  # which rich turns into exit code 1
            return exit_codes.stop_output()
        raise
    except BaseException as error:
        code = exit_codes.exit_code(error)
        if code is None:
            raise
        exit_codes.report_error(error)
        return code
    finally:
        if is_program:
            exit_codes.exit_on_signals()  # until the interpreter has ended
    return 0


def _run(arguments: list[str], handle_signals: bool) -> None:
    if arguments[:1] == ["help"]:  # as of git and pip
        arguments = [*arguments[1:], "--help"]
    first = arguments[0] if arguments else "--help"
    words = 2 if first in GROUPS else 1
    name = " ".join(arguments[:words])
    if first in ("-h", "--help"):
        _help()
    elif first == "--version":
        from phantom_parallel import __version__

        print(f"phantom {__version__}")
    elif first in GROUPS and (arguments[1:2] or ["--help"])[0] in ("-h", "--help"):
        _help(first)
    elif name not in COMMANDS:
        from phantom_parallel.utils.parsing import choose_from

        typed = arguments[words - 1]
        known = _subcommands(first) if first in GROUPS else {name.split()[0]: "" for name in COMMANDS}
        where = f" of phantom {first}" if first in GROUPS else ""
        raise ValueError(f"there is no command {typed!r}{where}: {choose_from(typed, known)}")
    else:
        command = _parse(name, arguments[words:])
        if handle_signals:
            exit_codes.raise_on_signals()
        command.run()


def _parse(name: str, arguments: list[str]) -> Any:
    """The options of a command, filled from its arguments."""
    from phantom_parallel.cli.options import parse
    from phantom_parallel.families.registry import family_names
    from phantom_parallel.utils.parsing import choose_from

    if "--" in arguments:
        raise ValueError(f"'--' is not an option: every value has a name, see phantom {name} --help")
    options = getattr(importlib.import_module(f"phantom_parallel.cli.{COMMANDS[name].module}"), COMMANDS[name].options)
    if isinstance(options, type):
        return parse(options, f"phantom {name}", arguments)
    families = arguments[:1] if arguments[:1] and arguments[0] in family_names() else []
    rest = arguments[len(families) :]
    if rest and not rest[0].startswith("-") and name != "study":  # which begins with its own name
        if families:
            raise ValueError(f"unexpected {rest[0]!r} after {families[0]}: see phantom {name} {families[0]} --help")
        raise ValueError(f"there is no model family {rest[0]!r}: {choose_from(rest[0], family_names())}")
    made, defaults = options(families[0] if families else None, rest)
    return parse(made, " ".join(["phantom", name, *families]), rest, defaults)


def _subcommands(group: str) -> dict[str, str]:
    return {name.split()[1]: command.purpose for name, command in COMMANDS.items() if name.startswith(f"{group} ")}


def _help(group: str | None = None) -> None:
    """Print the commands, or those of a group."""
    commands = {name: command.purpose for name, command in COMMANDS.items() if " " not in name} | GROUPS
    start = f"phantom {group} " if group else "phantom "
    print(f"usage: {start}COMMAND [OPTIONS]\n")
    print(GROUPS[group].partition(":")[0] if group else "Phantom parallelism for PyTorch.", end="\n\ncommands:\n")
    for name, purpose in (_subcommands(group) if group else commands).items():
        print(f"  {name:<10}{purpose}")
    print(f"\n{start}COMMAND --help shows a command's options.")


if __name__ == "__main__":
    sys.exit(main())
