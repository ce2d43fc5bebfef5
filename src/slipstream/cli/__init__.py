"""The command table. Each command is a thin function in a module beside this one and calls one layer.

A command module is imported only when its command is used, so `slipstream --help` never imports torch.
"""

from __future__ import annotations

import errno
import io
import signal
import sys
from importlib import import_module
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from slipstream import __version__
from slipstream.errors import StoppedError, UserError, did_you_mean

# command -> (module, one line of help). A module holds the function of that name, or several as the typer.Typer `app`.
COMMANDS = {
    "train": ("train", "Pretrain a language model; resume it; start it under torchrun."),
    "config": ("config", "Every setting of a run: meaning, default, type."),
    "data": ("data", "Turn text into token shards; look into shards."),
    "generate": ("generate", "Write text with a trained run."),
    "export": ("export", "Write a run as a Hugging Face folder."),
    "report": ("runs", "One HTML page about one or more runs."),
    "runs": ("runs", "List runs; compare them; show in what they differ."),
    "health": ("runs", "Whether a run is well, in one line and an exit code."),
    "watch": ("runs", "A live view of a running job."),
    "schedule": ("schedule", "Draw and compare pipeline schedules."),
    "plan": ("plan", "Choose a layout for a model and a cluster."),
    "study": ("study", "Run many runs and tabulate what delay costs."),
    "bench": ("bench", "Measure the engine against torch's own schedules."),
    "completion": ("completion", "Make your shell complete commands, keys and values."),
}


# What can be wrong with a place that was named, wherever that is noticed. A file that is missing is not among it: who
# opens it knows better what to say.
_PLACES = {errno.EACCES, errno.EPERM, errno.EROFS, errno.EISDIR, errno.ENOTDIR, errno.EEXIST,
           errno.ENAMETOOLONG, errno.ELOOP}  # fmt: skip
INTERRUPTED, CLOSED_PIPE = 130, 141  # as a shell tells of SIGINT and SIGPIPE
_FULL = {errno.ENOSPC, errno.EDQUOT}  # met while a file is written, when its name is not told


def main(argv: list[str] | None = None) -> None:
    """Entry point: a mistake, or a place that cannot be used, is printed without a traceback and exits with 2."""
    if argv is None:  # a process of its own: a cluster's "time is up" ends it as Ctrl-C does
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, signal.default_int_handler)
    for stream in (sys.stdout, sys.stderr):
        # What a file or a folder is called may be no text of this terminal.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        _dispatch(sys.argv[1:] if argv is None else argv)
    except StoppedError:  # what there is to say was said when it was asked for
        sys.exit(INTERRUPTED)
    except UserError as error:
        _fail(str(error))
    except BrokenPipeError:  # `| head`: nobody wants the rest
        from slipstream.metrics.progress import discard

        discard(sys.stdout)
        sys.exit(CLOSED_PIPE)
    except OSError as error:
        if error.errno not in _FULL and (error.filename is None or error.errno not in _PLACES):
            raise
        where = f"{error.filename}: " if error.filename is not None else ""
        _fail(f"{where}{error.strerror}. Name another place, or make room there.")


def _fail(message: str) -> None:
    Console(stderr=True, highlight=False).print(f"[bold red]error:[/] {escape(message)}", soft_wrap=True)
    sys.exit(2)


def _dispatch(arguments: list[str]) -> None:
    name = arguments[0] if arguments else "--help"
    if name in ("-h", "--help", "help"):
        _print_help()
    elif name == "--version":
        print(f"slipstream {__version__}")
    elif name == "__complete":  # asked by the scripts of `slipstream completion`
        from slipstream.cli.completion import candidates

        print("\n".join(candidates(" ".join(arguments[1:]))))
    elif name in COMMANDS:
        command(name)(args=arguments[1:], prog_name=f"slipstream {name}")
    else:
        hint = did_you_mean(name, COMMANDS)
        raise UserError(f"There is no command '{name}'.{hint} `slipstream --help` lists the commands.")


def command(name: str) -> Any:
    """As click has it: to call, or to look at."""
    import typer

    module = import_module(f"slipstream.cli.{COMMANDS[name][0]}")
    app = getattr(module, "app", None)
    if app is None:
        app = typer.Typer(add_completion=False)
        # `train` has a better word for an option that there is not.
        app.command(context_settings={"ignore_unknown_options": name == "train"})(getattr(module, name))
    return typer.main.get_command(app)


def _print_help() -> None:
    console = Console(highlight=False)
    console.print(
        "[bold]slipstream[/] COMMAND [ARGUMENTS]\n\n"
        "Asynchronous pipeline-parallel pretraining: no bubble, no gradient more than one update old.\n"
    )
    table = Table(box=None, show_header=False, padding=(0, 2))
    for name, (_, summary) in COMMANDS.items():
        table.add_row(f"[bold cyan]{name}[/]", summary)
    console.print(table)
    console.print(
        "\n`slipstream COMMAND --help` explains a command; `slipstream train` runs the default job."
    )
