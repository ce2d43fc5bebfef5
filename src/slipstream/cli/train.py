"""`slipstream train`: run, resume, or (under torchrun) be one rank of a run."""

from __future__ import annotations

import os
from pathlib import Path

import typer

from slipstream.config import Config, load, to_toml
from slipstream.config.load import keys, nearest
from slipstream.distributed import started_by_torchrun
from slipstream.errors import UserError
from slipstream.train.banner import facts
from slipstream.train.claim import is_run
from slipstream.train.cutovers import expected
from slipstream.train.preflight import prepare
from slipstream.train.start import start

STOPPED = 75  # sysexits.h: not done, worth trying again


def train(
    arguments: list[str] = typer.Argument(
        None, metavar="[RUN.TOML] [KEY=VALUE]...", help="A run and overrides."
    ),
    dry_run: bool = typer.Option(False, "--dry-run", help="Print the resolved run and stop."),
    quiet: bool = typer.Option(False, "--quiet", "-q", help="Print only warnings, errors and the result."),
) -> None:
    """Pretrain a language model. With no arguments: a small model on two worker processes of this machine.

    A run.dir that holds a checkpoint is resumed. Inside torchrun the same command uses torchrun's ranks.
    `slipstream config` explains every key.

    Exit codes: 0 finished; 75 stopped on request and saved, the same command goes on (ranks of torchrun exit with 0,
    or it would start them again); 130 stopped at once by a second Ctrl-C; 2 a mistake in the settings, the data or the
    machine.
    """
    config = parse([*(arguments or []), *(["train.quiet=true"] if quiet else [])])
    if dry_run:
        config = prepare(config)
        known = facts(expected(config))  # before anything is printed: it may find a mistake
        print(to_toml(config))
        print("\n".join(f"# {name}: {value}" for name, value in known.items()))
        return
    if start(config) == "signal" and not started_by_torchrun():
        raise typer.Exit(STOPPED)


def parse(arguments: list[str]) -> Config:
    """The first argument without a '=' is the file; the rest are overrides."""
    option = next((text for text in arguments if text.startswith("-")), None)
    if option is not None:
        raise UserError(f"There is no option {option}. {_instead(option)}")
    # os.path: a value may be longer than any file name, which pathlib raises an error about.
    files = [text for text in arguments if "=" not in text or os.path.isfile(text)]
    overrides = [text for text in arguments if text not in files]
    if len(files) > 1:
        overrides += files[1:]  # reported as what they are: not overrides
    if files and files[0] in keys():
        raise UserError(
            f"'{files[0]}' is a key of a run, not a file. Write {files[0]}=VALUE, without spaces."
        )
    config = load(files[0] if files else None, overrides)
    if not files or any(text.startswith("run.dir=") for text in overrides):
        return config
    # The settings in a run's folder are that run's, wherever the folder has been moved to.
    path = Path(files[0])
    if path.name == "config.toml" and is_run(path.parent) and not _same(Path(config.run.dir), path.parent):
        return config.changed(run={"dir": str(path.parent)})
    return config


def _same(one: Path, other: Path) -> bool:
    return one.resolve() == other.resolve()


def _instead(option: str) -> str:
    name = option.lstrip("-").partition("=")[0].replace("-", "_")
    if near := nearest(name):
        return f"A setting is written without dashes: {near}=VALUE."
    return (
        "There are --dry-run, --quiet and --help; settings are KEY=VALUE, and `slipstream config` lists them."
    )
