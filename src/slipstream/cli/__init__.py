"""The command table. Each command lives in its own thin module beside this one and calls one layer.

A command module is imported only when its command is used, so `slipstream --help` never imports torch.
"""

from __future__ import annotations

import difflib
import errno
import os
import signal
import sys
from importlib import import_module
from typing import TextIO

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from slipstream import __version__
from slipstream.errors import StoppedError, UserError

# command -> (module, one line of help). A module holds `app`, a typer.Typer with one or more commands.
COMMANDS = {
    "train": ("slipstream.cli.train", "Pretrain a language model; resume it; start it under torchrun."),
    "config": ("slipstream.cli.config", "Every setting of a run: meaning, default, type."),
    "data": ("slipstream.cli.data", "Turn text into token shards; look into shards."),
    "generate": ("slipstream.cli.generate", "Write text with a trained run."),
    "export": ("slipstream.cli.export", "Write a run as a Hugging Face folder."),
    "report": ("slipstream.cli.report", "One HTML page about one or more runs."),
    "runs": ("slipstream.cli.runs", "List runs; compare them; show in what they differ."),
    "health": ("slipstream.cli.health", "Whether a run is well, in one line and an exit code."),
    "watch": ("slipstream.cli.watch", "A live view of a running job."),
    "schedule": ("slipstream.cli.schedule", "Draw and compare pipeline schedules."),
    "plan": ("slipstream.cli.plan", "Choose a layout for a model and a cluster."),
    "study": ("slipstream.cli.study", "Run many runs and tabulate what delay costs."),
    "bench": ("slipstream.cli.bench", "Measure the engine against torch's own schedules."),
    "completion": ("slipstream.cli.completion", "Make your shell complete commands, keys and values."),
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
    try:
        _dispatch(sys.argv[1:] if argv is None else argv)
    except StoppedError:  # what there is to say was said when it was asked for
        sys.exit(INTERRUPTED)
    except UserError as error:
        _fail(str(error))
    except BrokenPipeError:  # `| head`: nobody wants the rest
        discard(sys.stdout)
        sys.exit(CLOSED_PIPE)
    except OSError as error:
        if error.errno not in _FULL and (error.filename is None or error.errno not in _PLACES):
            raise
        where = f"{error.filename}: " if error.filename is not None else ""
        _fail(f"{where}{error.strerror}. Name another place, or make room there.")


def discard(stream: TextIO) -> None:
    """Point a stream at nothing: what is still in its buffer cannot be written at the end of the process."""
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


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
        app = import_module(COMMANDS[name][0]).app
        app(args=arguments[1:], prog_name=f"slipstream {name}")
    else:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f" Did you mean '{near[0]}'?" if near else ""
        raise UserError(f"There is no command '{name}'.{hint} `slipstream --help` lists the commands.")


def _print_help() -> None:
    console = Console(highlight=False)
    console.print(
        "[bold]slipstream[/] COMMAND [ARGUMENTS]\n\n"
        "Asynchronous pipeline-parallel pretraining: no bubble, every gradient one update old.\n"
    )
    table = Table(box=None, show_header=False, padding=(0, 2))
    for name, (_, summary) in COMMANDS.items():
        table.add_row(f"[bold cyan]{name}[/]", summary)
    console.print(table)
    console.print(
        "\n`slipstream COMMAND --help` explains a command; `slipstream train` runs the default job."
    )
