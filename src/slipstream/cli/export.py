"""`slipstream export`: the newest weights of a run as a Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from slipstream.errors import UserError

if TYPE_CHECKING:
    from slipstream.train.master import Master

_DTYPES = ("float32", "bfloat16", "float16")


def export(
    run: Annotated[Path, typer.Argument(help="A run folder, or one of its checkpoints.")],
    folder: Annotated[Path, typer.Argument(help="The folder to make.")],
    dtype: Annotated[str, typer.Option(help=f"Type of the weights: {', '.join(_DTYPES)}.")] = "float32",
    tasks: Annotated[
        Path | None,
        typer.Option(help="Also make this folder: tasks for lm_eval out of the run's held-out text."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Write the newest weights as a folder that transformers loads, with config and tokenizer.

    A dense model becomes a LlamaForCausalLM (Qwen3ForCausalLM with QK-norm), experts a MixtralForCausalLM; a model of
    transformers (model.hf) stays what it is. Of a model of your own (model.module) it writes model.safetensors, under
    the names of your own module.
    """
    if dtype not in _DTYPES:
        raise UserError(f"There is no dtype '{dtype}' to export to. Choose {', '.join(_DTYPES)}.")
    import torch

    from slipstream.train.master import export as write
    from slipstream.train.master import load_master

    master = load_master(run)
    own = master.config.model.module is not None
    if tasks is not None and (master.tokenizer is None or own):
        raise UserError(
            "--tasks asks a text of a model that lm_eval can load: this run has no tokenizer or its own model."
        )
    kind = write(master, folder, getattr(torch, dtype))
    if as_json:
        print(json.dumps({"folder": str(folder), "class": kind, "step": master.step}))
    else:
        text = f"{folder}: {kind}, {dtype}, weights after update {master.step}"
        Console(highlight=False).print(text, soft_wrap=True, markup=False)
    if tasks is not None:
        _write_tasks(master, tasks, folder, as_json)
    if as_json or own:
        return
    if master.tokenizer is None:
        print("The run's data has no tokenizer.json, so the folder has no tokenizer.")
    print(f"Next: transformers.AutoModelForCausalLM.from_pretrained({str(folder)!r})")


def _write_tasks(master: Master, tasks: Path, folder: Path, as_json: bool) -> None:
    from slipstream.data.tokenizer import Tokenizer
    from slipstream.data.tokens import TokenDataset
    from slipstream.train.master import whole_model
    from slipstream.train.sources import data_folder, datasets
    from slipstream.train.tasks import own_loss, write_tasks

    assert master.tokenizer is not None
    _, held_out = datasets(master.config, data_folder(master.config))
    if not isinstance(held_out, TokenDataset):
        raise UserError("--tasks needs shards, and the run's data is a function (data.module).")
    windows = master.config.train.eval_batches * held_out.batch_size
    written = write_tasks(tasks, held_out, Tokenizer.load(master.tokenizer), windows)
    ours = own_loss(whole_model(master), written.windows)
    if as_json:
        shown = {
            "tasks": str(tasks),
            "windows": len(written.windows),
            "left_out": written.left_out,
            "loss": ours,
        }
        print(json.dumps(shown))
        return
    print(
        f"{tasks}: {len(written.windows)} windows ({written.left_out} left out), {written.documents} documents, "
        f"{written.questions} questions. Our loss on these windows: {ours:.4f}"
    )
    print(
        f"Next: lm_eval --model hf --model_args pretrained={folder},dtype=float32 --include_path {tasks} "
        "--tasks held_out_windows,held_out_documents,held_out_choice"
    )
