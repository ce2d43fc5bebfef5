"""`slipstream generate`: text from a trained run."""

from __future__ import annotations

import json

import typer

from slipstream.errors import UserError


def generate(
    run: str = typer.Argument(help="A run folder, or one of its checkpoints."),
    prompt: str = typer.Argument("", help="Text to continue."),
    tokens: int = typer.Option(128, min=1, help="Tokens to write."),
    temperature: float = typer.Option(0.8, min=0, help="0: always the likeliest token."),
    top_k: int = typer.Option(40, min=0, help="Choose among the k likeliest; 0: among all."),
    seed: int = typer.Option(0, min=0, max=2**64 - 1, help="Same seed, same text."),
    stream: bool = typer.Option(False, "--stream", help="Print the text as it is written."),
    as_json: bool = typer.Option(False, "--json", help="Print a JSON object."),
) -> None:
    """Continue PROMPT with the newest weights of RUN."""
    from slipstream.train.generate import load_trained, pieces, write

    if stream and as_json:
        raise UserError("--stream and --json do not go together: drop one of them.")
    trained = load_trained(run)
    if stream:
        print(prompt, end="", flush=True)
        for piece in pieces(trained, prompt, tokens, temperature=temperature, top_k=top_k, seed=seed):
            print(piece, end="", flush=True)
        print()
        return
    text = write(trained, prompt, tokens, temperature=temperature, top_k=top_k, seed=seed)
    if as_json:
        print(json.dumps({"run": run, "step": trained.step, "prompt": prompt, "text": text}))
    else:
        print(prompt + text)
