"""``phantom COMMAND``: finds the command, reads its options, and turns a user's mistake into one line and exit code 2.

A command is a module ``phantom_parallel.cli.NAME`` with a frozen dataclass ``Options``, whose fields are the options,
whose docstring is the help, and whose ``run()`` does the work. A command on models of a family, which the word after
the command names, has ``options_for(family, arguments)`` instead. It returns such a class, and defaults that take the
place of the class's own. Modules are imported only when they are needed, so that ``--help`` is quick and one command's
dependencies do not burden another.
"""

import importlib
import sys
from typing import Any

from phantom_parallel.cli import exit_codes
from phantom_parallel.utils.streams import open_missing_streams

# What each command is for; the order is that of the help.
COMMANDS: dict[str, str] = {
    "compare": "train every strategy to the same loss, and show what it cost: the main job",
    "study": "the paper's experiments and related ones: ghosts, scaling, links, batches, ...",
    "report": "make a report again from the results of compare or study",
    "train": "train a model on local ranks or a cluster's, with checkpoints to resume from",
    "infer": "predictions of a trained model, and what a sample costs against tensor parallelism",
    "generate": "text from a trained transformer, and what a token costs for prefill and decode",
    "import": "a pretrained Llama, Mistral or Qwen2 of Hugging Face as a model, to run on ranks or to convert",
    "convert": "a trained dense model as a phantom model, fitted to its outputs on calibration data",
    "heal": "a converted model learns from the dense model that it was made from, on ranks",
    "export": "a model as a folder that transformers loads",
    "plan": "compare strategies, ranks and ghosts for a model and a machine",
    "dryrun": "what one rank of many would compute, send and keep, from the real model code without data",
    "hardware": "hardware profiles, each figure with its source",
    "meter": "what this machine can measure: energy sensors, a short reading, what to install or allow",
    "calibrate": "measure this machine and write its hardware profiles",
    "validate": "predicted against measured step times on this machine",
}

MODULES = {"import": "import_model", "export": "export_model"}  # where a command cannot be a module's name
NAMED = ("study",)  # commands whose first word may be the name of something else than a family


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return the exit code.

    Without ``arguments``, this is the program of the process: it takes the arguments and handles the signals of it.
    """
    if arguments is None:
        exit_codes.exit_on_signals()
        open_missing_streams()
    try:
        return _main(sys.argv[1:] if arguments is None else arguments, handle_signals=arguments is None)
    except BrokenPipeError:  # the reader of the output has closed it, as `| head` does
        return exit_codes.stop_output()
    except SystemExit as leaving:
        if isinstance(leaving.__context__, BrokenPipeError):  # which rich turns into exit code 1
            return exit_codes.stop_output()
        raise
    finally:
        if arguments is None:
            exit_codes.exit_on_signals()  # until the interpreter has ended


def _main(arguments: list[str], handle_signals: bool) -> int:
    try:
        _run(arguments, handle_signals)
        sys.stdout.flush()
    except (SystemExit, BrokenPipeError):
        raise
    except BaseException as error:
        code = exit_codes.exit_code(error)
        if code is None:
            raise
        exit_codes.report_error(error)
        return code
    return 0


def _run(arguments: list[str], handle_signals: bool) -> None:
    if arguments[:1] == ["help"]:  # as of git and pip
        arguments = [*arguments[1:], "--help"]
    name = arguments[0] if arguments else "--help"
    if name in ("-h", "--help"):
        _help()
    elif name == "--version":
        from phantom_parallel import __version__

        print(f"phantom {__version__}")
    elif name not in COMMANDS:
        from phantom_parallel.utils.names import choose_from

        raise ValueError(f"there is no command {name!r}: {choose_from(name, COMMANDS)}")
    else:
        command = _parse(name, arguments[1:])
        if handle_signals:
            exit_codes.raise_on_signals()
        command.run()


def _parse(name: str, arguments: list[str]) -> Any:
    """The options of a command, filled from its arguments."""
    from phantom_parallel.cli.options import check_first_word, parse, split_family

    if "--" in arguments:
        raise ValueError(f"'--' is not an option: every value has a name, see phantom {name} --help")
    module = importlib.import_module(f"phantom_parallel.cli.{MODULES.get(name, name)}")
    family, rest = split_family(arguments)
    if hasattr(module, "options_for"):
        if name not in NAMED:
            check_first_word(rest, name, family)
        options, defaults = module.options_for(family, rest)
        return parse(options, " ".join(["phantom", name, *([family] if family else [])]), rest, defaults)
    return parse(module.Options, f"phantom {name}", arguments)


def _help() -> None:
    print("usage: phantom COMMAND [OPTIONS]\n\nPhantom parallelism for PyTorch.\n\ncommands:")
    for name, purpose in COMMANDS.items():
        print(f"  {name:<12}{purpose}")
    print("\nphantom COMMAND --help shows a command's options.")


if __name__ == "__main__":
    sys.exit(main())
