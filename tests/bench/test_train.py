"""`slipstream bench train` at toy size: every contender runs, the numbers agree, mistakes are told."""

from __future__ import annotations

import dataclasses
import json
import sys
from contextlib import contextmanager
from dataclasses import asdict, replace

import pytest
import torch
from rich.console import Console

from slipstream.bench import train, train_contenders
from slipstream.bench.train import CONTENDERS, print_table
from slipstream.bench.train_contenders import Measured, Setting
from slipstream.cli import main
from slipstream.errors import UserError
from slipstream.metrics.breakdown import (
    ATTENTION,
    COMMUNICATION,
    EMBEDDING,
    HEAD,
    MLP,
    NORMS,
    OPTIMIZER,
    PARTS,
    PRODUCTS,
    RECORDED,
)
from slipstream.models.sizes import PRESETS, parameters

TOY = Setting("cpu-default", 16, microbatches=2, rows=2, device="cpu", compiled=False, steps=2, warmup=1)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench") / "data"
    train.write_tokens(folder, TOY)
    return folder


@pytest.mark.parametrize("delayed", [True, False])
def test_our_trainer_is_the_one_of_a_run(data, tmp_path, delayed):
    found = train_contenders.measure_ours(TOY, data, tmp_path, delayed=delayed)
    assert found.step_seconds > 0
    assert found.peak_memory_bytes > 0
    lines = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    assert [event["step"] for event in events if event["event"] == "step"] == [1, 2, 3]
    assert train_contenders.config_of(TOY, data, tmp_path, delayed=delayed).optim.correction == (
        "error_feedback" if delayed else "none"
    )


def test_what_is_of_the_delay_alone_is_left_out_without_it(tmp_path):
    """The row without delay failed, after the other had been measured; a fine start was timed for the whole run."""
    given = (
        "pipeline.cutover=2",
        "pipeline.fine_start=2",
        "pipeline.fine_microbatches=8",
        "optim.sync_start=0",
    )
    setting = dataclasses.replace(TOY, rows=4, steps=20, overrides=given)
    late, sync = (
        train_contenders.config_of(setting, tmp_path, tmp_path, delayed=each) for each in (True, False)
    )
    for config in (late, sync):
        assert (config.pipeline.microbatches, config.pipeline.microbatch_size) == (TOY.microbatches, 4)
        assert config.pipeline.fine_start == 0
    assert (late.pipeline.cutover, sync.pipeline.cutover) == (2, None)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", ["bfloat16", "bfloat16_autocast"])
def test_a_step_with_delay_never_waits_for_all_that_is_queued(data, tmp_path, monkeypatch, dtype):
    """Only events are waited for: a copy or a number that needs an empty queue is an error here."""

    def watched(step, settle, setting, began, sizes):
        for index in range(3):
            step(index)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for index in range(3, 6):
                step(index)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        settle()
        return Measured(1.0, 1.0, 0, 2, 2)

    monkeypatch.setattr(train_contenders, "timed", watched)
    setting = replace(TOY, device="cuda", steps=5, overrides=(f"train.dtype={dtype}",))
    train_contenders.measure_ours(setting, data, tmp_path, delayed=True)


@pytest.mark.parametrize(
    ("name", "library"), [("hf_eager", "transformers"), ("titan_compiled", "torchtitan.models.llama3")]
)
def test_a_rival_has_the_same_shapes(data, monkeypatch, name, library):
    pytest.importorskip(library)
    made = []
    build, compiled = train_contenders.RIVALS[name]

    @contextmanager
    def remembered(*args):
        with build(*args) as rival:
            made.append(rival)
            yield rival

    monkeypatch.setitem(train_contenders.RIVALS, name, (remembered, compiled))
    found = train_contenders.measure_rival(name, TOY, data, rehearsed=True)
    assert (found.rows, found.microbatches) == (2, 2)
    assert sum(p.numel() for p in made[0].module.parameters()) == parameters(PRESETS["cpu-default"])
    assert all(p.isfinite().all() for p in made[0].module.parameters())


def test_a_profile_tells_where_our_time_goes(data, tmp_path, capsys):
    """Every part that a dense model in one process has takes time, most of it twice; the others take none."""
    setting = replace(TOY, profile=2, overrides=("train.chunked_loss=true",))
    found = asdict(train_contenders.measure_ours(setting, data, tmp_path, delayed=True))
    parts = found["parts"]
    assert list(parts) == [part for part in PARTS if part != RECORDED]
    both_ways = [ATTENTION, PRODUCTS, MLP, NORMS, EMBEDDING]
    assert all(there > 0 and back > 0 for there, back in (parts[part] for part in both_ways)), parts
    assert parts[HEAD][0] > 0  # where the chunked loss takes its gradient too
    assert parts[OPTIMIZER][0] > 0
    assert parts[COMMUNICATION] == (0, 0)
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["event"] == "step"] == [1, 2, 3, 4, 5]
    rows = {"ours": found | {"tokens_per_second": 1.0, "mfu": None}}
    print_table(Console(width=80), vars(TOY) | {"device_name": "X", "torch": "2", "contenders": rows})
    shown = capsys.readouterr().out
    assert "head and loss" in shown
    assert "█" in shown


def test_a_profile_of_a_mixture_of_experts_knows_them(tmp_path):
    shape = (
        "model.dim=16",
        "model.layers=1",
        "model.heads=2",
        "model.kv_heads=2",
        "model.ffn=32",
        "model.vocab=64",
    )
    setting = replace(TOY, model="moe-94m", profile=1, steps=1, overrides=shape)
    train.write_tokens(tmp_path / "data", setting)
    parts = train_contenders.measure_ours(setting, tmp_path / "data", tmp_path, delayed=False).parts
    assert parts is not None
    assert all(seconds > 0 for seconds in parts[MLP])


def test_mfu_counts_the_model_that_is_trained(monkeypatch):
    """Overrides of its shape included; none is known of a model of the user's own."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    setting = replace(TOY, device="cuda")
    whole, half = (train.speed(replace(setting, overrides=o), 1.0) for o in ((), ("model.layers=2",)))
    assert whole["tokens_per_second"] == half["tokens_per_second"] == 64
    assert 0 < half["mfu"] < whole["mfu"]
    own = replace(setting, overrides=("model.module=tests.train.own:layers", "model.vocab=64"))
    assert train.speed(own, 1.0)["mfu"] is None


def test_a_rival_that_does_not_fit_gets_smaller_microbatches(data, monkeypatch):
    pytest.importorskip("transformers")
    tried, measure = [], train_contenders._measure

    def full(name, setting, *rest):
        tried.append((setting.rows, setting.microbatches))
        if setting.rows > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return measure(name, setting, *rest)

    monkeypatch.setattr(train_contenders, "_measure", full)
    # A CPU may be slow in bfloat16.
    small = replace(TOY, rival_rows=4, steps=1, warmup=0, overrides=("model.layers=1", "model.ffn=64"))
    found = train_contenders.measure_rival("hf_bf16", small, data, rehearsed=True)
    assert tried == [(4, 1), (2, 2), (1, 4)]
    assert (found.rows, found.microbatches) == (1, 4)


def test_without_transformers_the_message_says_what_to_do(data, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UserError, match="--contenders ours,ours_sync"):
        train_contenders.measure_rival("hf_eager", TOY, data)


@pytest.mark.parametrize("name", ["hf_eager", "titan_compiled"])
@pytest.mark.parametrize("other", ["model.qk_norm=true", "model.experts=4"])
def test_what_is_no_plain_llama_has_no_rival(name, other):
    setting = replace(TOY, overrides=(other, "model.experts_per_token=2") if "experts" in other else (other,))
    train.check(setting, ["ours"])
    with pytest.raises(UserError, match=r"dense Llamas without a norm .* Set --contenders ours,ours_sync"):
        train.check(setting, ["ours", name])


def test_without_torchtitan_the_message_says_what_to_do(data, monkeypatch):
    for name in [*(name for name in sys.modules if name.startswith("torchtitan.")), "torchtitan"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=r"torchtitan cannot be imported.*leave titan_compiled out"):
        train_contenders.measure_rival("titan_compiled", TOY, data)


def test_a_contender_that_fails_does_not_stop_the_others(capsys, tmp_path):
    arguments = "train pipeline.schedule=2bw --model cpu-default --sequence 16 --microbatches 2 --rows 2"
    arguments += " --device cpu --no-compile --steps 2 --warmup 1 --contenders ours,hf_eager --json"
    out = tmp_path / "not yet" / "result.json"
    with pytest.raises(SystemExit) as ended:
        main(["bench", *arguments.split(), "--out", str(out)])
    assert ended.value.code == 0
    shown = capsys.readouterr()
    result = json.loads(shown.out)
    assert json.loads(out.read_text()) == result
    assert "transformers + AdamW, eager: " in shown.err
    assert "pipeline.schedule" in result["contenders"]["ours"]["error"]
    row = result["contenders"]["hf_eager"]
    assert row["tokens_per_second"] == pytest.approx(2 * 2 * 16 / row["step_seconds"])
    assert row["mfu"] is None  # no peak is known for a CPU
    assert result["ours_over_hf_eager"] is None


def test_where_every_contender_failed_the_command_did_too(capsys, monkeypatch):
    monkeypatch.setattr(train, "_in_a_process", lambda *task: {"error": "no luck"})
    with pytest.raises(SystemExit) as ended:
        main(
            ["bench", "train", "--model", "cpu-default", "--device", "cpu", "--contenders", "ours,ours_sync"]
        )
    assert ended.value.code == 1
    assert capsys.readouterr().out.count("no luck") == 2


def test_the_table_tells_speeds_ratios_and_errors(capsys):
    row = {
        "step_seconds": 0.5,
        "setup_seconds": 9.0,
        "peak_memory_bytes": 2**31,
        "rows": 2,
        "microbatches": 2,
    }
    rows = {"ours": row | {"tokens_per_second": 3000.0, "mfu": 0.45}, "hf_eager": {"error": "no [memory]"}}
    rows["hf_compiled"] = row | {"tokens_per_second": 2000.0, "mfu": 0.3, "rows": 1}
    result = vars(TOY) | {"device_name": "X", "torch": "2", "contenders": rows} | train._ratios(rows)
    print_table(Console(width=200), result)
    shown = capsys.readouterr().out
    for words in (
        "45.0%",
        "3,000",
        "1.500 times as fast as transformers",
        "no [memory]",
        "microbatches of 1",
    ):
        assert words in shown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--contenders theirs", ",".join(CONTENDERS)),
        ("--model llama-9000", "Presets"),
        ("--rows 0", "at least 1"),
        ("--profile -1", "at least 0"),
        ("--rival-rows 7", "must divide"),
        ("--device tpu", "cuda or cpu"),
        ("--model moe-94m", "dense"),
        ("--contenders ours,ours", "name each of them once"),
        ("--sequence 0", "data.sequence = 0"),
        ("train.stepz=3", "train.steps"),
    ],
)
def test_mistakes_end_with_2_and_say_what_to_change(capsys, arguments, words):
    device = "" if "--device" in arguments else "--device cpu"
    with pytest.raises(SystemExit) as ended:
        main(["bench", "train", *device.split(), *arguments.split()])
    assert ended.value.code == 2
    assert words in capsys.readouterr().err
