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
    """Write the newest weights as a folder that transformers loads, with config and tokenizer.

    A dense model becomes a LlamaForCausalLM (Qwen3ForCausalLM with QK-norm), experts a MixtralForCausalLM. Of a model
    of your own (model.module) it writes model.safetensors, under the names of your own module.
    """
    if dtype not in _DTYPES:
        raise UserError(f"There is no dtype '{dtype}' to export to. Choose {', '.join(_DTYPES)}.")
    import torch

    from slipstream.train.export import export as write
    from slipstream.train.export import hugging_face_class, write_own
    from slipstream.train.master import load_master, own_names

    master = load_master(run)
    if master.model is None:
        write_own(own_names(master), folder, tokenizer=master.tokenizer, dtype=getattr(torch, dtype))
        _say(folder, f"{master.config.model.module}, state dict", dtype, master.step, as_json)
        return
    sequence = master.config.data.sequence
    weights, model = master.weights, master.model
    write(weights, model, folder, tokenizer=master.tokenizer, sequence=sequence, dtype=getattr(torch, dtype))
    _say(folder, hugging_face_class(model), dtype, master.step, as_json)
    if as_json:
        return
    if master.tokenizer is None:
        print("The run's data has no tokenizer.json, so the folder has no tokenizer.")
    print(f"Next: transformers.AutoModelForCausalLM.from_pretrained({str(folder)!r})")


def _say(folder: Path, kind: str, dtype: str, step: int, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"folder": str(folder), "class": kind, "step": step}))
    else:
        text = f"{folder}: {kind}, {dtype}, weights after update {step}"
        Console(highlight=False).print(text, soft_wrap=True, markup=False)
