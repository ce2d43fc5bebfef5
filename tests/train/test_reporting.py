"""Numbers that are shown: speed, utilisation, the log and its cutting back, lines on the terminal."""

from __future__ import annotations

import io
import json
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from slipstream.config import load
from slipstream.metrics.progress import Show, duration
from slipstream.metrics.record import Recorder, cut_back, has_event
from slipstream.metrics.throughput import Meter, peak_flops
from slipstream.models.sizes import ModelConfig
from slipstream.train import assemble
from slipstream.train.reporter import Position


def test_speed_is_tokens_over_time_and_does_not_depend_on_bursts():
    meter = Meter(total_steps=100, tokens_per_step=1000, flops_per_token=2e6, peak_flops=1e10, window=4)
    meter.start(10, 50.0, [(50.0, 1.0), (49.0, 2.0)])
    for step in range(11, 21):
        meter.step(step, 50.0 + 0.5 * (step - 10))
    meter.stages([(55.0, 6.0), (54.0, 4.0)])
    assert meter.tokens_per_second == pytest.approx(2000)
    assert meter.mfu == pytest.approx(2000 * 2e6 / 1e10)
    assert meter.eta_seconds == pytest.approx(80 * 0.5)
    assert meter.busy == pytest.approx((1.0, 0.4))
    meter.start(20, 99.0)  # after a validation
    meter.step(21, 99.25)
    meter.step(22, 99.5)
    assert meter.tokens_per_second == pytest.approx(4000)


def test_the_step_that_fills_the_pipeline_is_not_taken_for_its_speed():
    """Stage 0 hands in a group when a third of its work is done; the others then come one period apart."""
    meter = Meter(total_steps=100, tokens_per_step=1000, flops_per_token=2e6)
    shown = []
    for start in (0, 10):
        meter.start(start, 100.0 * start)
        for step in range(start + 1, start + 11):
            meter.step(step, 100.0 * start + step - start - 0.7)
            shown.append(meter.tokens_per_second)
    assert shown[1:] == pytest.approx([1000.0] * 19)  # of the very first step nothing better is known
    for step in range(20, 30):  # nor where every step is followed by a validation
        meter.start(step, 10_000.0 + 3 * step)
        meter.step(step + 1, 10_002.0 + 3 * step)
    assert meter.tokens_per_second == pytest.approx(500.0)


def test_the_gpus_of_all_nodes_are_counted(monkeypatch):
    monkeypatch.setattr(assemble.build, "device", lambda config: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    for ranks, here, gpus, counted in ((16, 8, 8, 16), (8, 8, 8, 8), (4, 4, 1, 1), (2, None, 8, 2)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        if here is None:
            monkeypatch.delenv("LOCAL_WORLD_SIZE")
        else:
            monkeypatch.setenv("LOCAL_WORLD_SIZE", str(here))
        assert assemble._peak(load(), Position(0, ranks, 1, True)) == counted * 989e12


def test_known_peaks():
    assert peak_flops("NVIDIA H200") == 989e12
    assert peak_flops("Some CPU") is None


def test_the_log_is_cut_back_to_a_checkpoint(tmp_path):
    recorder = Recorder(tmp_path)
    for step in range(1, 6):
        recorder.write("step", step, loss=float("nan") if step == 2 else 1.0)
    recorder.write("checkpoint", 3, path="x")
    recorder.write("finish", 5)
    recorder.close()
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"event": "step", "ste')  # a kill in the middle of a line
    cut = cut_back(tmp_path, 3)
    assert cut.steps == 2  # to be done again
    assert cut.until is not None
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [(event["event"], event["step"]) for event in events] == [
        ("step", 1), ("step", 2), ("step", 3), ("checkpoint", 3),
    ]  # fmt: skip
    assert events[1]["loss"] is None
    assert has_event(tmp_path, "checkpoint", 3)
    assert not has_event(tmp_path, "step", 4)


def test_bytes_and_steps_that_are_none_do_not_stop_a_resume(tmp_path):
    good = b'{"event": "step", "step": 1, "time": 1}\n'
    odd = b'\xff\xfe\n{"event": "step", "step": null}\n{"event": "step", "step": "x"}\n[1]\n'
    (tmp_path / "events.jsonl").write_bytes(good + odd)
    assert has_event(tmp_path, "step", 1)
    cut_back(tmp_path, 5)
    assert (tmp_path / "events.jsonl").read_bytes() == good


def test_waiting_for_a_step_to_be_on_record(tmp_path):
    recorder = Recorder(tmp_path)
    assert not recorder.wait_for(1, timeout=0.01)
    recorder.write("step", 1)
    assert recorder.wait_for(1, timeout=60)
    recorder.close()


EVENT = {
    "step": 3, "loss": 2.5, "lr": 1e-3, "grad_norm": 0.25, "skipped": False, "tokens_per_second": 1234.0,
    "busy": [0.5, 1.0], "mfu": None, "memory_bytes": [2**30, 2**31],
}  # fmt: skip


@pytest.mark.parametrize("terminal", [False, True])
def test_a_step_shows_what_matters(terminal):
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=200)
    with Show(10, 1, console) as show:
        show.step(EVENT, 93)
        show.step(EVENT | {"step": 4, "skipped": True, "loss": None}, 4000)
    text = out.getvalue()
    for words in (
        ("2.5000", "1,234 tok/s", "50%/100%", "2.00 GiB", "1:33", "not finite")
        if not terminal
        else ("1,234",)
    ):
        assert words in text
    assert duration(4000) == "1:06:40"


def test_a_run_says_where_its_layers_should_have_been_cut():
    """From the stages' shares alone: stage 0 takes 0.125 a layer, so the head takes as much as four layers."""
    closing = import_module("slipstream.train.closing")
    model = ModelConfig(vocab=64, dim=32, layers=8, heads=4, kv_heads=2, ffn=48)
    config = load(None, ["pipeline.stages=2", "pipeline.boundaries=[4]"])
    parts = SimpleNamespace(config=config, model=model)
    assert closing._better_cut(parts, (0.5, 1.0)).endswith(
        "pipeline.boundaries=[6] it would have 25% less to do."
    )
    assert closing._better_cut(parts, (0.98, 1.0)) == ""
    assert closing._better_cut(parts, (0.5,) * 8 + (1.0,)) == "", (
        "more stages than layers, where no cut is whole"
    )
