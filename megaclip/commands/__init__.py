"""The command line: `megaclip train`, `megaclip evaluate`, ...; `python -m megaclip` is the same.

Each command is a module of this package with a function `main()`, which reads `sys.argv`, or a file of examples/, which
runs as a script. On several ranks a command is started by a launcher: `deepspeed --module megaclip train ...`.
"""

import errno
import importlib
import io
import logging
import os
import runpy
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import megaclip
from megaclip.environment import check_environment
from megaclip.errors import REFUSED_EXIT_CODE, ConfigError, MegaclipError, first_line, nearest
from megaclip.logging import get_logger


@dataclass(frozen=True)
class Command:
    """A command and the module that runs it."""

    module: str
    """Name of the module in `megaclip.commands`, or path of the script in the package."""
    summary: str
    joins_ranks: bool = False
    """True if a launcher may start it on several ranks, which form a group."""


COMMANDS = {
    "train": Command("train", "train a model; on several GPUs: deepspeed --module megaclip train ...", True),
    "evaluate": Command(
        "evaluate", "evaluate a run or an exported model: zero-shot classification and retrieval", True
    ),
    "export": Command("export_open_clip", "write a checkpoint in open_clip's or transformers' format"),
    "check": Command("check_checkpoint", "check that checkpoints or an export are whole"),
    "import": Command("import_open_clip", "convert weights of other programs to a directory for --pretrained"),
    "inspect": Command("inspect_data", "report the contents, problems and loading speed of a dataset"),
    "plan": Command("plan", "plan a run: memory, largest batch and step time"),
    "translate": Command("translate", "turn a command line of open_clip into ds_config.json and a command"),
    "models": Command("list_models", "list the models of the installed open_clip and the towers that run each"),
    "tokenizer": Command("train_tokenizer", "train a sentencepiece tokenizer on the captions of a dataset"),
    "show": Command("show", "print a page of the documentation, a ds_config or a job of Slurm"),
    "report": Command("ds_report", "print DeepSpeed's environment report with MegaCLIP's op and optional packages"),
    "launch": Command("launch", "start a command on several hosts, with restarts: megaclip launch ... train"),
    "check-hosts": Command("check_hosts", "check the hosts of a run before it: megaclip launch ... check-hosts", True),
    "demo-data": Command("examples/digits/make_scenes.py", "draw the captioned images of the demo"),
    "demo": Command(
        "examples/digits/demo.py", "train, evaluate and export a small model on two CPU cores in six minutes"
    ),
}


_PATH_ADVICE = {
    errno.ENAMETOOLONG: "give the path of a file or folder, not its content",
    errno.EACCES: "give this user access to it, or another path",
}
"""Errors of the operating system that mean a wrong path in the command line, wherever it is read, and what to do."""


def main() -> None:
    """Run the command that `sys.argv` names, and exit with its exit code.

    The exit code is 1, without a traceback, if the program that reads the standard output has ended, as `head` does.
    Captions and names of files may have characters that the output's encoding lacks. They are printed as escapes.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # None if the standard output was closed at the start
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            code = _run()
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:  # of the standard output, or of another process
        if _stdout_has_reader():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python writes the rest of its buffer here
        code = 1
    sys.exit(code)


def _run() -> int | str | None:
    """Run the command; return its exit code, or an error message."""
    arguments = sys.argv[1:]
    from_launcher = []
    while arguments and arguments[0].startswith("--local_rank"):  # deepspeed passes it before all other arguments
        from_launcher.append(arguments.pop(0))
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(f"megaclip {megaclip.__version__}")
        return 0
    name, *rest = arguments
    program = "launch/train.py" if sys.argv[0].endswith("train.py") else f"megaclip {name}"
    sys.argv = [program, *rest, *from_launcher]
    logging.getLogger("DeepSpeed").addFilter(_log_as_megaclip)
    try:
        command = known_command(name)
        if not {"-h", "--help"} & set(rest):
            check_environment(joins_ranks=command.joins_ranks)
        importlib.import_module("megaclip.zero")  # refuses other versions of DeepSpeed before their internals are used
        if command.module.endswith(".py"):
            runpy.run_path(str(Path(megaclip.__file__).parent / command.module), run_name="__main__")
            return 0
        return importlib.import_module(f"megaclip.commands.{command.module}").main()
    except OSError as error:
        if (advice := _PATH_ADVICE.get(error.errno or 0)) is None or "--debug-traceback" in sys.argv:
            raise
        # On every rank that has it: unlike a `MegaclipError`, it may be the error of one rank alone.
        print(f"error: {MegaclipError(f'{first_line(error)}; {advice}')}", file=sys.stderr)
        # Permissions may change while a run trains, so that a restart may succeed.
        return 1 if error.errno == errno.EACCES else REFUSED_EXIT_CODE
    except MegaclipError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0" or not {"LOCAL_SIZE", "LOCAL_WORLD_SIZE"} & set(os.environ):
            print(f"error: {error}", file=sys.stderr)  # once per host, if a launcher has started this rank
        return error.exit_code
    except KeyboardInterrupt:  # a run that trains saves and returns the same code
        print("stopped by Ctrl-C", file=sys.stderr)
        return 128 + signal.SIGINT


def known_command(name: str) -> Command:
    """Return the command with this name. Raises ConfigError if there is none."""
    if name not in COMMANDS:
        raise ConfigError(
            f"unknown command {name!r}; expected one of {', '.join(COMMANDS)}{nearest(name, set(COMMANDS))}"
        )
    return COMMANDS[name]


def _log_as_megaclip(record: logging.LogRecord) -> bool:
    """Filter of DeepSpeed's logger, whose own handler writes to the standard output, among the results."""
    get_logger("megaclip").handle(record)
    return False


def _stdout_has_reader() -> bool:
    try:
        print(flush=True)
    except BrokenPipeError:
        return False
    return True


def usage() -> str:
    """Return the list of commands, one per line."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(["usage: megaclip COMMAND ...", "", *lines, "", "megaclip COMMAND --help lists the flags"])
