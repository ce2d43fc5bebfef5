"""`slipstream data`: make token shards out of text, and look into them."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from slipstream.errors import DataError

FEW_TOKENS = 2000  # one update of the default run

app = typer.Typer(add_completion=False, help="Turn text into token shards; look into shards.")


@app.command()
def prepare(
    out: Annotated[Path, typer.Option(help="The folder to make.")],
    inputs: Annotated[
        list[Path] | None,
        typer.Argument(help="Folders, or .txt, .md, .jsonl (also .xz, .gz, .zst) or .parquet files."),
    ] = None,
    dataset: Annotated[
        list[str] | None,
        typer.Option(
            help="A Hugging Face dataset, streamed: NAME[,config=..][,split=train][,field=text][,files=..]"
            "[,revision=..][,weight=..]; may be repeated."
        ),
    ] = None,
    limit_mb: Annotated[
        int | None, typer.Option(min=1, help="Stop after so much text, at a document's end, in MB.")
    ] = None,
    vocab: Annotated[
        int | None,
        typer.Option(help="Size of the BPE vocabulary to train. Default: 16384, less for a text under 4 MB."),
    ] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="A tokenizer.json to use instead.")] = None,
    valid: Annotated[list[Path] | None, typer.Option(help="Validation file; may be repeated.")] = None,
    valid_fraction: Annotated[
        float | None,
        typer.Option(help="Share of documents set aside otherwise. Default: 0.01, more for a small text."),
    ] = None,
    separator: Annotated[str, typer.Option(help="form-feed, blank-line, line or none.")] = "form-feed",
    field: Annotated[str, typer.Option(help="The text's name in .jsonl and .parquet.")] = "text",
    sample_mb: Annotated[int, typer.Option(min=1, help="Text to train the tokenizer on, in MB.")] = 64,
    max_expansion: Annotated[
        float, typer.Option(help="Refuse files that unpack to more times this.")
    ] = 100.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Tokenise text into shards, split into train and validation by document."""
    from slipstream.data.documents import Reading, check_inputs, find_files, read_documents
    from slipstream.data.prepare import Recipe
    from slipstream.data.prepare import prepare as run
    from slipstream.data.streams import check_sources, kept, limited, parse_source, together

    reading = Reading(separator, field, max_expansion)
    sources = [parse_source(text) for text in dataset or ()]
    if not inputs and not sources:
        raise DataError("There is nothing to read. Name files or folders, or a dataset with --dataset.")
    files, left_out = find_files(inputs or ())
    check_inputs([*files, *(valid or ())], reading)
    check_sources(sources)
    documents = together((lambda: read_documents(files, reading)) if files else None, sources)
    if limit_mb is not None:
        whole = documents
        documents = lambda: limited(whole, limit_mb * 1_000_000)  # noqa: E731
    recipe = Recipe(vocab, tokenizer, valid_fraction, sample_bytes=sample_mb << 20)
    started = time.monotonic()
    with ExitStack() as stack:
        bar = stack.enter_context(_bar())
        if sources:
            documents = stack.enter_context(kept(documents, out.parent))
        meta = run(
            documents,
            out,
            recipe,
            valid=(lambda: read_documents(valid, reading)) if valid else None,
            progress=bar,
        )
    summary = {"folder": str(out), "seconds": round(time.monotonic() - started, 1), **meta}
    summary["files"] = len(files)
    _print_summary(summary, as_json)
    if as_json:
        return
    if left_out:
        kinds = ", ".join(sorted({path.suffix or path.name for path in left_out}))
        print(f"  left out         {len(left_out)} files, empty or of other kinds ({kinds})")
    tokens = meta["tokens"]["valid"]
    if tokens < FEW_TOKENS:
        Console(stderr=True, highlight=False).print(
            f"[yellow]The validation text has only {tokens:,} tokens: its loss will say little. Name more text, or a "
            "validation file with --valid.[/]",
            soft_wrap=True,
        )
    name = shlex.quote(f"run.dir=runs/{out.resolve().name}")
    print(f"Next: slipstream train {shlex.quote(f'data.path={out}')} {name}")


@app.command()
def show(
    folder: Annotated[Path, typer.Argument(help="A folder of shards.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """What a folder of shards holds; every header is checked."""
    from slipstream.data.shards import find_shards, fingerprint, open_shard, read_meta

    train, valid = find_shards(folder, "train"), find_shards(folder, "valid")
    tokens = {
        name: sum(len(open_shard(path)) for path in paths)
        for name, paths in (("train", train), ("valid", valid))
    }
    meta = read_meta(folder)
    summary = {**meta, "folder": str(folder), "tokens": tokens, "fingerprint": fingerprint([*train, *valid])}
    _print_summary(summary, as_json)


def _print_summary(summary: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(summary))
        return
    console = Console(highlight=False)
    console.print(str(summary["folder"]), style="bold", soft_wrap=True, markup=False)
    for name in [
        "files",
        "vocab",
        "end_of_document",
        "documents",
        "tokens",
        "bytes",
        "seconds",
        "fingerprint",
    ]:
        value = summary.get(name)
        if isinstance(value, dict):
            value = ", ".join(f"{key} {_figure(count)}" for key, count in value.items())
        if value is not None:
            text = f"  {name.replace('_', ' '):16} {_figure(value)}"
            console.print(text, soft_wrap=True, markup=False)


def _figure(value: object) -> str:
    """meta.json may come from elsewhere, and say anything."""
    return f"{value:,}" if isinstance(value, int) and abs(value) < 1 << 64 else str(value)


@contextmanager
def _bar() -> Iterator[Callable[[str, int, int | None], None]]:
    """A rich progress bar on stderr fed by (what, bytes so far, bytes in all)."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[size]}"),
    )
    shown, drawn = "", 0.0

    def show(what: str, done: int, total: int | None) -> None:
        nonlocal shown, drawn
        now = time.monotonic()
        if what == shown and now - drawn < 0.1 and done != total:
            return
        shown, drawn = what, now
        size = f"{done / 1e6:,.0f} MB" if done else ""
        progress.update(task, description=what, completed=done, total=total, size=size)

    with Progress(
        *columns, TimeElapsedColumn(), console=Console(stderr=True), disable=not sys.stderr.isatty()
    ) as progress:
        task = progress.add_task("starting", total=None, size="")
        yield show
