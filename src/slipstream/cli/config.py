"""`slipstream config`: every key of a run with its meaning and default, or the resolved run of a file."""

from __future__ import annotations

import difflib
import json
from dataclasses import astuple

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from slipstream.config import Reach, describe
from slipstream.config.write import Key
from slipstream.errors import UserError

SYNONYMS = {  # words people look for, and the keys they mean
    "precision": ("train.dtype",),
    "batch": ("pipeline.microbatches", "pipeline.microbatch_size", "data.sequence"),
    "gpu": ("train.device",),
    "resume": ("run.dir", "run.fork_from"),
    "early stopping": ("train.patience",),
    "dataset": ("data.path",),
    "tokenizer": ("data.path",),
    "gradient clipping": ("optim.max_grad_norm",),
    "fsdp": ("pipeline.shard_optimizer",),
    "zero": ("pipeline.shard_optimizer",),
    "epochs": ("train.steps",),
}


def _said(key: Key) -> str:
    """All that is said of a key, for searching."""
    others = [word for word, keys in SYNONYMS.items() if key.name in keys]
    return " ".join([key.meaning, key.type, *others]).lower()


def config(
    search: str = typer.Argument("", help="Show only keys whose name, meaning or values contain this."),
    as_json: bool = typer.Option(False, "--json", help="Print a JSON list."),
) -> None:
    """Every setting of a run: meaning, default, type, and what changing it does to an existing run.

    `slipstream train run.toml KEY=VALUE --dry-run` prints a resolved run instead.
    """
    word = search.lower()
    found = [key for key in describe() if word in key.name]
    found += [key for key in describe() if key not in found and word in _said(key)]
    if not found:
        near = difflib.get_close_matches(search.lower(), [key.name for key in describe()], n=3, cutoff=0.5)
        hint = f" Did you mean {' or '.join(near)}?" if near else ""
        raise UserError(
            f"No key and no description contains '{search}'.{hint} `slipstream config` lists them all."
        )
    if as_json:
        names = ("key", "type", "default", "meaning", "on_resume")  # a StrEnum is its value
        print(json.dumps([dict(zip(names, astuple(key), strict=True)) for key in found], indent=2))
        return
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(ratio=1)
    section = ""
    for key in found:
        if section and key.name.partition(".")[0] != section:
            table.add_row()
        section = key.name.partition(".")[0]
        default = "" if key.default is None else f" = {json.dumps(key.default)}"
        kept = "" if key.reach is Reach.TRAJECTORY else ", may differ on resume"
        note = escape(f"({key.type}{kept})")
        table.add_row(f"[bold cyan]{key.name}[/]{escape(default)}", f"{escape(key.meaning)} [dim]{note}[/]")
    Console(highlight=False).print(table)
