"""The language work: evenly cut, the same model for every contender, and measured by the command."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from slipstream.bench.contenders import RIVALS
from slipstream.bench.language import cut
from slipstream.bench.work import Work, build_optimizer, loss_fn
from slipstream.cli import main
from slipstream.distributed import RankPool
from slipstream.errors import UserError

TINY = Work("language", stages=2, microbatches=4, batch=1, tokens=8, preset="cpu-default", head_layers=1.0)


def sizes(owners: list[int], head_layers: float, layers: int = 30) -> list[int]:
    parts = cut(layers, owners, head_layers)
    assert [layer for part in parts for layer in part] == list(range(layers))
    return [len(part) for part in parts]


def test_each_rank_gets_an_equal_share_of_layers_and_head() -> None:
    assert sizes([0, 1, 2, 3], 6.85) == [9, 9, 9, 3]
    assert sizes([0, 1, 2, 3], 10.0) == [10, 10, 9, 1]
    assert sizes([0, 1, 2, 3, 0, 1, 2, 3], 6.85) == [5, 5, 5, 2, 4, 4, 4, 1]
    assert sizes([0, 1, 2, 3, 3, 2, 1, 0], 10.0) == [1, 5, 5, 5, 4, 5, 5, 0]
    with pytest.raises(UserError, match="cannot fill 8 parts"):
        sizes([0, 1, 2, 3, 0, 1, 2, 3], 1.0, layers=5)


def plain_losses(work: Work, updates: int) -> list[float]:
    model = nn.Sequential(*(work.module(part, work.stages) for part in range(work.stages)))
    optimizer = build_optimizer(model)
    losses: list[torch.Tensor] = []
    for _ in range(updates):
        batches = (batch.chunk(work.microbatches) for batch in (work.inputs(), work.targets()))
        losses = [loss_fn(model(value), target) for value, target in zip(*batches, strict=True)]
        torch.stack(losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [float(loss.detach()) for loss in losses]


@pytest.mark.parametrize("name", ["torch_1f1b", "torch_zbv"])
def test_torchs_schedules_train_the_same_model(pool: RankPool, name: str) -> None:
    assert name in RIVALS
    ranks = pool.run("slipstream.bench.sample:take_sample", name, TINY, 2, 2, ranks=2, timeout=200)
    losses = next(list(rank.losses) for rank in ranks if rank.losses)
    assert losses == pytest.approx(plain_losses(TINY, updates=2), rel=1e-5)


@pytest.mark.parametrize("name", ["bound", "slipstream"])
def test_the_others_run_it_too(pool: RankPool, name: str) -> None:
    ranks = pool.run("slipstream.bench.sample:take_sample", name, TINY, 1, 3, ranks=2, timeout=200)
    assert all(len(rank.ends) == 3 for rank in ranks)


def test_the_command_measures_the_head_and_writes_each_result(tmp_path) -> None:
    out = tmp_path / "bench.json"
    options = "--work language --model cpu-default --rows 1 --sequence 8 --microbatches 2,4 --rivals none"
    options += " --stages 2 --rounds 1 --updates 4 --json --out"
    with pytest.raises(SystemExit) as ended:
        main(["bench", *options.split(), str(out)])
    assert ended.value.code == 0
    written = json.loads(out.read_text())
    assert [row["microbatches"] for row in written] == [2, 4]
    assert written[0]["head_layers"] > 0
    assert sum(written[0]["layers"]) == 4
    assert written[0]["slipstream_ms"] > 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--partitions 4", "Add --device cuda"),
        ("--device tpu", "choose cpu or cuda"),
        ("--device cuda --partitions 4 --stages 2", "Drop one"),
        ("--compile", "Add --work language"),
        ("--work language --rows 0", "at least 1"),
        ("--work language --sequence 0", "at least 1"),
        ("--rows 0", "at least 1"),
        ("--work sleep --rows 8", "change nothing where stages sleep"),
        ("--work sleep --sequence 8", "change nothing where stages sleep"),
        ("--work language --model smollm2-136m", "Did you mean"),
        ("--work language --model cpu-default --stages 60", "or fewer"),
        ("--link-latency-ms nan", "must not be negative"),
        ("--link-latency-ms inf", "nor endless"),
        ("--device cuda", "sees no GPU"),
        ("--device cuda --probe", "sees no GPU"),
        ("--device cuda --probe --partitions 0", "1 or more"),
    ],
)
def test_what_cannot_take_effect_is_refused(
    options: str, words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        main(["bench", *options.split()])
    assert ended.value.code == 2
    assert words in capsys.readouterr().err
