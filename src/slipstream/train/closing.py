"""The end of a run, for the person who started it: the loss against what it is worth, the report, what to do next."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from shlex import quote

from slipstream.config import Config
from slipstream.data.shards import open_shard
from slipstream.data.tokenizer import Tokenizer
from slipstream.errors import UserError
from slipstream.formats import si
from slipstream.metrics.events import read_run
from slipstream.metrics.progress import Show, duration
from slipstream.metrics.report import write_report
from slipstream.models.cut import measured_cut
from slipstream.models.sizes import attention_flops, layer_cost, parameters
from slipstream.train.build import cut
from slipstream.train.evaluate import unigram_entropy
from slipstream.train.generate import load_trained, write
from slipstream.train.master import TOKENIZER_FILE
from slipstream.train.own_model import OwnModel
from slipstream.train.trainer import Outcome, RunParts

PROMPT_TOKENS = 8  # of the validation text that a sample begins with
WORTH_A_CUT = 0.04  # of the slowest stage's time: less than that may be chance


def close(parts: RunParts, outcome: Outcome) -> None:
    """On the leader: say how it ended; for a finished run also sample, record `finish`, write the report."""
    config, recorder, show = parts.config, parts.recorder, parts.show
    if recorder is None or show is None:
        return
    folder = Path(config.run.dir)
    if outcome.reason == "signal":
        saved = (
            "saved. The same command resumes it"
            if config.checkpoint.keep
            else "not saved: checkpoint.keep = 0"
        )
        show.note(f"Stopped at step {outcome.step}, {saved}.", "bold")
    if outcome.reason != "finished":
        return
    assert outcome.validation_loss is not None
    entropy = unigram_entropy(parts.train_data, parts.model.vocab)
    own = isinstance(parts.model, OwnModel)
    if config.train.sample_tokens and (folder / TOKENIZER_FILE).is_file() and not own:
        _sample(parts, outcome, folder)
    tokens = outcome.step * config.tokens_per_step
    worked = max(read_run(folder).clock().values())  # over all starts of the run
    recorder.write(
        "finish",
        outcome.step,
        validation_loss=outcome.validation_loss,
        unigram_entropy=entropy,
        tokens=tokens,
        seconds=round(worked, 3),
    )
    if config.train.report:
        write_report([folder])
    show.note(f"\nFinished {outcome.step:,} steps, {tokens:,} tokens, in {duration(worked)}.")
    better = outcome.validation_loss < entropy
    show.note(
        f"Validation loss {outcome.validation_loss:.4f}, {'against' if better else 'which does not beat'} "
        f"{entropy:.4f} for guessing every token by its frequency (nats per token; lower is better).",
        "bold green" if better else "bold yellow",
    )
    busy = parts.reporter.busy
    if len(busy) > 1:
        shares = ", ".join(f"stage {stage} {share:.0%}" for stage, share in enumerate(busy))
        show.note(f"Busy: {shares}; the slowest is stage {busy.index(max(busy))}.{_better_cut(parts, busy)}")
    show.note(next_steps(config))


def _better_cut(parts: RunParts, busy: Sequence[float]) -> str:
    """Where the layers would be cut by what the stages were measured to take. The same run may go on with it."""
    config, model = parts.config, parts.model
    if isinstance(model, OwnModel) or config.chunks != 1 or len(busy) > model.layers:
        return ""
    layer = layer_cost(model, config.data.sequence).forward_flops
    attention = attention_flops(model, config.data.sequence) / layer
    boundaries, left = measured_cut(busy, cut(config, model, len(busy)), attention)
    if left > 1 - WORTH_A_CUT:
        return ""
    return f" Cut at pipeline.boundaries={boundaries} it would have {1 - left:.0%} less to do."


def _sample(parts: RunParts, outcome: Outcome, folder: Path) -> None:
    """Asked for by train.sample_tokens. Small models write badly: what is shown says what it is."""
    config, recorder, show = parts.config, parts.recorder, parts.show
    assert recorder is not None
    assert show is not None
    trained = load_trained(folder)
    prompt = config.train.sample_prompt
    if prompt is None:
        prompt = _opening(trained.tokenizer, parts.valid_data.paths)
    text = write(trained, prompt, config.train.sample_tokens, temperature=0.8, top_k=40, seed=0)
    recorder.write("sample", outcome.step, prompt=prompt, text=text)
    assert not isinstance(parts.model, OwnModel)
    size = f"{si(parameters(parts.model))} parameters, {si(outcome.step * config.tokens_per_step)} tokens of training"
    show.note(f"\nA text by this model ({size}), continuing {prompt!r}:\n{prompt}{text}")


def _opening(tokenizer: Tokenizer, shards: Sequence[Path]) -> str:
    """How the validation text begins: a prompt in the language of the corpus."""
    if not shards:
        return ""
    ids = [int(token) for token in open_shard(shards[0])[: 4 * PROMPT_TOKENS]]
    text = tokenizer.decode([token for token in ids if token != tokenizer.end_of_document][:PROMPT_TOKENS])
    return text.strip().split("\n")[0] or text


def record_failure(parts: RunParts, error: Exception) -> None:
    """Why the run ended, for whoever looks at its log: without a last word it would seem to be still running."""
    if parts.recorder is not None:
        with contextlib.suppress(OSError):  # of a disk without room for this line either
            kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
            parts.recorder.write("error", parts.reporter.reported, message=f"{kind}{error}")


def say_finished(config: Config, step: int) -> None:
    show, folder = Show(step), Path(config.run.dir)
    show.note(
        f"This run is finished: {step} steps. To train on, set train.steps={2 * step} (say); to begin another, set "
        f"another run.dir, or run.fork_from={quote(str(folder))}.",
        "bold",
    )
    show.note(next_steps(config))


def next_steps(config: Config) -> str:
    """Where the report is, and what can be done with the run now."""
    folder = Path(config.run.dir)
    here, settings, above, exported = map(
        quote, map(str, (folder, folder / "config.toml", folder.parent, f"{folder}-hf"))
    )
    saved, text = (folder / "checkpoints").exists(), (folder / TOKENIZER_FILE).exists()
    offers = {
        "open": ((folder / "report.html").exists(), f"{folder / 'report.html'}"),
        "write": (saved and text and not config.own_model, f"slipstream generate {here} 'your prompt'"),
        "export": (saved, f"slipstream export {here} {exported}"),
        "train on": (saved, f"slipstream train {settings} train.steps={2 * config.train.steps}"),
        "compare": (True, f"slipstream runs {above}"),
        "own text": (config.data.path is None and config.data.module is None,
                     "slipstream data prepare YOUR_FOLDER --out shards"),
    }  # fmt: skip
    lines = [f"  {name:<10} {words}" for name, (offered, words) in offers.items() if offered]
    return "\n".join(["Next:", *lines, f"Everything the run wrote is in {folder}."])
