"""The end of a run, for the person who started it: the loss against what it is worth, a sample, every
path.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from slipstream.errors import UserError
from slipstream.metrics.events import read_run
from slipstream.metrics.progress import Show, duration
from slipstream.metrics.report import write_report
from slipstream.train.evaluate import unigram_entropy
from slipstream.train.generate import load_trained, write
from slipstream.train.master import TOKENIZER_FILE
from slipstream.train.trainer import Outcome, Parts


def close(parts: Parts, outcome: Outcome) -> None:
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
    _say_speed(show, parts.reporter.busy)
    show.note(
        f"validation loss (master) {outcome.validation_loss:.4f} nats/token; unigram entropy of the corpus "
        f"{entropy:.4f}",
        "bold green" if outcome.validation_loss < entropy else "bold yellow",
    )
    if config.train.sample_tokens and (folder / TOKENIZER_FILE).is_file():
        prompt = config.train.sample_prompt
        text = write(
            load_trained(folder), prompt, config.train.sample_tokens, temperature=0.8, top_k=40, seed=0
        )
        recorder.write("sample", outcome.step, prompt=prompt, text=text)
        show.note(f"sample:\n{prompt}{text}")
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
    show.note(f"Finished {outcome.step} steps, {tokens:,} tokens, in {duration(worked)}.")
    show.note(paths(folder))


def record_failure(parts: Parts, error: Exception) -> None:
    """Why the run ended, for whoever looks at its log: without a last word it would seem to be still running."""
    if parts.recorder is not None:
        with contextlib.suppress(OSError):  # of a disk without room for this line either
            kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
            parts.recorder.write("error", parts.reporter.reported, message=f"{kind}{error}")


def say_finished(folder: Path, step: int) -> None:
    show = Show(step)
    show.note(f"This run is finished: {step} steps. Set another run.dir, or run.fork_from={folder} to go on.")
    show.note(paths(folder))


def paths(folder: Path) -> str:
    """Everything the run wrote."""
    meanings = {
        "report.html": "the run as one page",
        "events.jsonl": "every step, validation and checkpoint",
        "config.toml": "the resolved run; starts it again",
        "environment.json": "versions, machine, seeds, data",
        "tokenizer.json": "the tokenizer",
        "checkpoints": "the newest weights and state",
        "logs": "the other ranks' lines",
    }
    lines = [
        f"  {folder / name}  {meaning}" for name, meaning in meanings.items() if (folder / name).exists()
    ]
    ahead = [f"Next: slipstream generate {folder} 'PROMPT'"] if (folder / "checkpoints").exists() else []
    return "\n".join(["Written:", *lines, *ahead])


def _say_speed(show: Show, busy: tuple[float, ...]) -> None:
    if len(busy) > 1:
        slowest = max(range(len(busy)), key=lambda stage: busy[stage])
        shares = ", ".join(f"stage {stage} {share:.0%}" for stage, share in enumerate(busy))
        show.note(f"busy: {shares}; the slowest is stage {slowest}")
