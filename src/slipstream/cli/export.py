"""`slipstream export`: the newest weights of a run as a Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from slipstream.errors import UserError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_DTYPES = ("float32", "bfloat16", "float16")


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="A run folder, or one of its checkpoints.")],
    folder: Annotated[Path, typer.Argument(help="The folder to make.")],
    dtype: Annotated[str, typer.Option(help=f"Type of the weights: {', '.join(_DTYPES)}.")] = "float32",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Write the master weights as LlamaForCausalLM or MixtralForCausalLM, with config and tokenizer."""
    if dtype not in _DTYPES:
        raise UserError(f"There is no dtype '{dtype}' to export to. Choose {', '.join(_DTYPES)}.")
    import torch

    from slipstream.train.export import export as write
    from slipstream.train.export import hugging_face_class
    from slipstream.train.master import load_master

    master = load_master(run)
    sequence = master.config.data.sequence
    weights, model = master.weights, master.model
    write(weights, model, folder, tokenizer=master.tokenizer, sequence=sequence, dtype=getattr(torch, dtype))
    kind = hugging_face_class(model)
    if as_json:
        print(json.dumps({"folder": str(folder), "class": kind, "step": master.step}))
        return
    console = Console(highlight=False)
    console.print(f"{folder}: {kind}, {dtype}, weights after update {master.step}", soft_wrap=True)
    if master.tokenizer is None:
        console.print("The run's data has no tokenizer.json, so the folder has no tokenizer.")
