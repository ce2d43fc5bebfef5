"""The command table. Each command lives in its own thin module beside this one and calls one layer.

A command module is imported only when its command is used, so `slipstream --help` never imports torch.
"""

from __future__ import annotations

import sys
from importlib import import_module

import click
import typer
from rich.console import Console

from slipstream.errors import UserError

# command -> (module, one line of help). A module holds `app`, a typer.Typer with one or more commands.
COMMANDS = {
    "train": ("slipstream.cli.train", "Pretrain a language model; resume it; start it under torchrun."),
    "config": ("slipstream.cli.config", "Every setting of a run: meaning, default, type."),
    "data": ("slipstream.cli.data", "Turn text into token shards; look into shards."),
    "generate": ("slipstream.cli.generate", "Write text with a trained run."),
    "export": ("slipstream.cli.export", "Write a run as a Hugging Face folder."),
    "report": ("slipstream.cli.report", "One HTML page about one or more runs."),
    "watch": ("slipstream.cli.watch", "A live view of a running job."),
    "schedule": ("slipstream.cli.schedule", "Draw and compare pipeline schedules."),
    "plan": ("slipstream.cli.plan", "Choose a layout for a model and a cluster."),
    "study": ("slipstream.cli.study", "Run many runs and tabulate what delay costs."),
    "bench": ("slipstream.cli.bench", "Measure the engine against torch's own schedules."),
}


class _Commands(click.Group):
    """Loads a command's module on use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, summary = COMMANDS[cmd_name]
        command = typer.main.get_command(import_module(module).app)
        command.name = cmd_name
        command.short_help = summary
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="slipstream")
def cli() -> None:
    """Asynchronous pipeline-parallel pretraining: no bubble, the loss of synchronous training."""


def main() -> None:
    """Entry point: a user's mistake is printed without a traceback and exits with 2."""
    try:
        cli(standalone_mode=True)
    except UserError as error:
        Console(stderr=True, highlight=False).print(f"[bold red]error:[/] {_escape(str(error))}", soft_wrap=True)
        sys.exit(2)


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)


if __name__ == "__main__":
    main()
