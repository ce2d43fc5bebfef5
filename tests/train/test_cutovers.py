"""The cutover of a run, before it starts: what its banner shows, what is said where stages will wait at it, and how
much a rate is scaled down for what is late."""

from __future__ import annotations

import re

import pytest

from slipstream.config import Config, load, resolve, to_toml
from slipstream.schedule.steady import steady
from slipstream.train import cutovers, preflight
from slipstream.train.banner import banner, facts
from slipstream.train.build import correction
from slipstream.train.cutovers import expected, waits, with_cutover
from slipstream.train.folder import checkpoints


def config(folder, *overrides: str) -> Config:
    return resolve(load(None, [f"run.dir={folder}", "pipeline.microbatches=6", *overrides]))


def run(folder, *overrides: str) -> Config:
    """What a run with a checkpoint leaves behind that says how it was started."""
    made = expected(config(folder, *overrides))
    step = checkpoints(folder) / "step-00000004"
    step.mkdir(parents=True)
    (step / "manifest.json").write_text("{}")
    (folder / "config.toml").write_text(to_toml(made))
    return made


def shown(made: Config) -> tuple[str, str]:
    """What the banner and a dry run say of the old part."""
    made = expected(made)
    (line,) = (line for line in banner(made).splitlines() if line.startswith("  schedule"))
    return line, facts(made)["old part"]


@pytest.mark.parametrize(
    ("overrides", "old"),
    [
        (["pipeline.stages=2"], 3),
        (["pipeline.stages=4"], 5),
        (["pipeline.stages=2", "pipeline.cutover=1"], 1),
        (["pipeline.stages=2", "optim.correction=delay_compensation"], 6),
        (["pipeline.schedule=emulate", "pipeline.cutover=2"], 2),
    ],
)
def test_the_old_part_is_shown(tmp_path, overrides, old):
    line, fact = shown(config(tmp_path / "new", *overrides))
    assert f"c={old}, " in line
    assert fact == f"{old} of 6 microbatches"


def test_a_run_that_goes_on_or_is_forked_is_shown_with_its_own(tmp_path):
    run(tmp_path / "run", "pipeline.stages=2")
    line, fact = shown(config(tmp_path / "run", "pipeline.stages=4"))
    assert "P=4 stages, m=6, c=3, " in line
    assert fact == "3 of 6 microbatches"
    for source in ("run", "run/checkpoints", "run/checkpoints/step-00000004"):
        fork = config(tmp_path / "fork", "pipeline.stages=4", f"run.fork_from={tmp_path / source}")
        assert "c=3, " in shown(fork)[0]
    (tmp_path / "run/checkpoints/step-00000004/manifest.json").unlink()
    assert "c=5, " in shown(config(tmp_path / "run", "pipeline.stages=4"))[0], "nothing to go on with"


@pytest.mark.parametrize(
    ("stages", "cutover", "words"),
    [
        (2, 3, None),
        (2, 2, "2 of 6 microbatches; 2 stages need 3 not to wait at it. .* less than 1 % longer"),
        (2, 1, "2 stages need 3 .* less than 1 % longer"),
        (4, 4, "4 stages need 5 .* less than 1 % longer"),
        (4, 2, r"4 stages need 5 .* an update takes 1\.17 times as long"),
        (4, 1, r"an update takes 1\.33 times as long"),
        (4, 0, r"an update takes 1\.49 times as long"),
        (1, 1, None),
    ],
)
def test_a_wait_at_the_cutover_is_said_with_its_figure(tmp_path, stages, cutover, words):
    asked = config(tmp_path, f"pipeline.stages={stages}", f"pipeline.cutover={cutover}")
    notes = waits(asked, None)
    if words is None:
        assert notes == []
    else:
        (note,) = notes
        assert re.search(words, note), note


@pytest.mark.parametrize("depth", [0, 1, 5])
def test_its_figure_is_that_of_all_the_microbatches(depth):
    """From a few on, each further one adds a forward and a backward to an update, whatever the cutover is."""
    for stages, microbatches in ((1, 30), (2, 31), (4, 40), (5, 47)):
        in_flight = stages + depth if depth else None
        for cutover in range(stages + 2):
            whole = steady("2bw", stages, microbatches, cutovers._USUAL, cutover=cutover, in_flight=in_flight)
            found = cutovers._time(stages, microbatches, cutover, in_flight)
            assert found == pytest.approx(whole.time_per_update, rel=1e-12), (stages, cutover)


def test_many_microbatches_are_not_simulated_to_say_it(tmp_path, monkeypatch):
    def counted(name, stages, microbatches, costs, **options):
        assert microbatches < 32
        return steady(name, stages, microbatches, costs, **options)

    monkeypatch.setattr(cutovers, "steady", counted)
    for microbatches, longer in (
        (200, "1.03 times as long"),
        (2048, "less than 1 % longer"),
        (2**20, "less than 1 %"),
    ):
        many = ["pipeline.stages=8", "model.layers=8", f"pipeline.microbatches={microbatches}"]
        (note,) = waits(config(tmp_path, *many, "pipeline.cutover=1"), None)
        assert longer in note


@pytest.mark.parametrize(("device", "torch_has_no_gpu", "shown", "cutover"), [
    ("cpu", False, "nvidia0", 13), ("cuda", True, "null", 9), ("auto", True, "nvidia0", 13),
    ("auto", False, "nvidia0", 9), ("auto", False, "nvidia-caps", 13),
])  # fmt: skip
def test_processors_take_a_larger_cutover(tmp_path, monkeypatch, device, torch_has_no_gpu, shown, cutover):
    """From five stages on, where it hides what their messages take. It is the run's, wherever that goes on."""
    monkeypatch.setattr(preflight, "cpu_only", lambda: torch_has_no_gpu)
    monkeypatch.setattr(preflight, "DEV", tmp_path / "dev")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / shown).touch()
    many = ["pipeline.stages=8", "model.layers=8", "pipeline.microbatches=16"]
    made = with_cutover(config(tmp_path, *many, f"train.device={device}"), None)
    assert made.pipeline.cutover == cutover
    for other in ("cpu", "cuda"):
        again = with_cutover(config(tmp_path, *many, f"train.device={other}"), made)
        assert again.pipeline.cutover == cutover
        assert waits(again, None) == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    made = with_cutover(config(tmp_path, *many, f"train.device={device}"), None)
    assert made.pipeline.cutover == (9 if device == "cuda" else 13)


@pytest.mark.parametrize(
    ("variable", "value", "built_for", "seen"),
    [
        ("CUDA_VISIBLE_DEVICES", "0,1", "cuda", True),
        ("CUDA_VISIBLE_DEVICES", " GPU-8932f937", "cuda", True),
        ("CUDA_VISIBLE_DEVICES", "MIG-8932f937", "cuda", True),
        ("CUDA_VISIBLE_DEVICES", "", "cuda", False),
        ("CUDA_VISIBLE_DEVICES", "-1,0", "cuda", False),
        ("CUDA_VISIBLE_DEVICES", "NoDevFiles", "cuda", False),
        ("HIP_VISIBLE_DEVICES", "", "cuda", True),
        ("HIP_VISIBLE_DEVICES", "", "hip", False),
        ("HIP_VISIBLE_DEVICES", "0", "hip", True),
    ],
)
def test_a_gpu_that_is_hidden_is_none(tmp_path, monkeypatch, variable, value, built_for, seen):
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(preflight, "DEV", tmp_path)
    monkeypatch.setattr(preflight, "_built_for", lambda name: name == built_for)
    (tmp_path / "nvidia0").touch()
    monkeypatch.setenv(variable, value)
    assert preflight.gpu_here() == seen
    (tmp_path / "nvidia0").unlink()
    assert not preflight.gpu_here()


def test_it_is_said_once(tmp_path):
    two, four = (
        config(tmp_path, f"pipeline.stages={stages}", "pipeline.cutover=1", f"train.steps={steps}")
        for stages, steps in ((2, 500), (4, 600))
    )
    assert waits(four, before=two)
    assert not waits(four, before=four)
    assert not waits(two, before=config(tmp_path, "pipeline.stages=2", "pipeline.cutover=1"))
    assert waits(two, before=four)
    assert waits(two, before=config(tmp_path, "pipeline.stages=2", "pipeline.cutover=3")), "another cutover"


@pytest.mark.parametrize(
    ("overrides", "delay"),
    [
        ([], 1.0),
        (["pipeline.cutover=0"], 0.0),
        (["pipeline.cutover=1"], 1 / 6),
        (["pipeline.cutover=3"], 0.5),
        (["pipeline.cutover=[6,3]"], 0.75),
        (["pipeline.delay=2"], 2.0),
        (["pipeline.delay=[3,1]"], 2.0),
    ],
)
def test_it_is_scaled_by_the_mean_delay(overrides, delay):
    settings = ["pipeline.schedule=emulate", "pipeline.microbatches=6", "optim.correction=lr_scaling"]
    made = correction(resolve(load(None, [*settings, *overrides])))
    assert made.factor(0) == pytest.approx(1 / (1 + delay))
