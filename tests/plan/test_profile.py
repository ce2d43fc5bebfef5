"""Measuring: the arithmetic on made-up times, and one real profile on this machine."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest

from slipstream.cli import main
from slipstream.errors import UserError
from slipstream.models.sizes import preset
from slipstream.plan.devices import Runtime
from slipstream.plan.parts import Timing
from slipstream.plan.profile import (
    PARTS,
    Link,
    Measured,
    Profile,
    StageSeconds,
    fit_line,
    fit_runtime,
    link,
    spreads,
    timing,
)
from slipstream.schedule import Costs, build, simulate


@pytest.mark.parametrize(
    ("points", "line"),
    [
        ({1.0: 3.0, 3.0: 7.0}, (1.0, 2.0)),
        ({1.0: 2.0, 3.0: 6.0, 5.0: 10.0}, (0.0, 2.0)),
        ({1.0: 5.0, 3.0: 4.0}, (4.5, 0.0)),  # noise: a larger size cannot be cheaper
        ({1.0: 1.0, 3.0: 5.0}, (0.0, 1.6)),  # noise: a call cannot cost less than nothing
    ],
)
def test_fit_line(points, line):
    assert fit_line(points) == pytest.approx(line)


def test_jitter_and_drift_are_told_apart():
    draw = random.Random(0).gauss
    drifts = [draw(1.0, 0.1) for _ in range(2000)]
    both = [[drift * draw(1.0, 0.2) for _ in range(8)] for drift in drifts]
    assert spreads(both) == pytest.approx((0.2, 0.1), rel=0.1)
    alone = [[draw(1.0, 0.2) for _ in range(8)] for _ in drifts]
    assert spreads(alone)[1] < 0.03


def test_timing_and_link_from_known_times():
    made = timing({size: StageSeconds(0.1 + size, 0.2 + 2 * size, 0.5) for size in (1, 3)})
    assert made.forward(4) == pytest.approx(4.1)
    assert made.backward(4) == pytest.approx(8.2)
    assert made.update == 0.5
    found = link({size: 1e-4 + size / 1e9 for size in (4.0, 1e5, 1e6)})
    assert found.latency == pytest.approx(1e-4)
    assert found.bandwidth == pytest.approx(1e9)


@pytest.mark.parametrize(
    ("schedule", "on_demand"), [("1f1b", True), ("gpipe", True), ("pipedream_2bw", False)]
)
def test_a_known_runtime_is_found_again(schedule, on_demand):
    bare = Costs(forward=1e-4, backward=2e-4, update=3e-4, latency=5e-5, on_demand=on_demand)
    true = replace(bare, overhead=2e-4, update=9e-4)
    periods = {m: simulate(build(schedule, 2, m, 6), true).time_per_update for m in (4, 12)}
    found = fit_runtime(schedule, 2, {4: bare, 12: bare}, periods)
    assert found.action == pytest.approx(2e-4, rel=1e-3)
    assert found.update == pytest.approx(6e-4, rel=1e-2)
    assert found.on_demand is on_demand


def test_a_runtime_faster_than_its_parts_costs_nothing():
    bare = Costs(forward=1e-3, backward=2e-3)
    assert fit_runtime("1f1b", 2, {4: bare, 12: bare}, {4: 1e-4, 12: 3e-4}) == Runtime()


def test_a_real_profile_survives_its_file(tmp_path, monkeypatch):
    from slipstream.cli.profile import measure_profile

    monkeypatch.setattr("slipstream.bench.profile.EMPTY_UPDATES", 10)  # it must be real, not exact
    profile = measure_profile(preset("cpu-default"), 64, "muon")
    assert set(profile.timings) == {"embedding", "layer", "head"}
    assert profile.timings["layer"].forward(2) > 0
    assert profile.link.latency > 1e-6
    assert profile.torch_engine.on_demand
    assert not profile.engine.on_demand
    profile.write(tmp_path / "p.json")
    assert Profile.read(tmp_path / "p.json", Measured.of(preset("cpu-default"), 64, "muon")) == profile


CPU = Measured.of(preset("cpu-default"), 64, "muon")


def made_up() -> Profile:
    return Profile(
        CPU, "mine", 8e9, dict.fromkeys(PARTS, Timing(1e-3, 1e-3, 2e-3, 2e-3, 1e-3)), Link(1e-4, 1e9)
    )


def test_a_file_that_is_no_profile(tmp_path):
    path = tmp_path / "p.json"
    with pytest.raises(UserError, match="cannot be read"):
        Profile.read(path, CPU)
    made_up().write(path)
    whole = json.loads(path.read_text())
    Profile.read(path, CPU)
    slow = {**whole["timings"]["layer"], "forward_overhead": "slow"}
    for bad in (
        [],
        {"device": "x"},
        {**whole, "timings": []},
        {**whole, "timings": {"layer": whole["timings"]["layer"]}},  # the rest would be some preset's
        {**whole, "timings": {**whole["timings"], "layer": slow}},
        {**whole, "timings": {**whole["timings"], "layer": {**slow, "forward_overhead": -1.0}}},
        {**whole, "engine": [1]},
        {**whole, "link": None},
    ):
        path.write_text(json.dumps(bad))
        with pytest.raises(UserError, match="not a profile"):
            Profile.read(path, CPU)


def test_a_profile_of_something_else_is_refused(tmp_path):
    path = tmp_path / "p.json"
    made_up().write(path)
    deeper = replace(preset("cpu-default"), layers=99)  # made of the same parts
    assert Profile.read(path, Measured.of(deeper, 64, "muon")) == made_up()
    for other in (("llama-8m", 64, "muon"), ("cpu-default", 128, "muon"), ("cpu-default", 64, "adamw")):
        with pytest.raises(UserError, match="Measure one for it"):
            Profile.read(path, Measured.of(preset(other[0]), *other[1:]))


def test_what_a_flag_gives_goes_before_what_was_measured(tmp_path, capsys):
    path = tmp_path / "p.json"
    made_up().write(path)
    flags = "--model cpu-default --devices 4 --per-node 1 --batch-tokens 4k --sequence 64 --stages 4"
    given = [
        "plan",
        *flags.split(),
        "--schedule",
        "1f1b",
        "--device",
        "cpu",
        "--profile-file",
        str(path),
        "--json",
    ]

    def seconds(*more: str) -> float:
        with pytest.raises(SystemExit) as leaving:
            main([*given, *more])
        assert not leaving.value.code
        return json.loads(capsys.readouterr().out)["layouts"][0]["seconds_per_update"]

    measured = seconds()
    assert seconds("--latency", "100000") > measured
    assert seconds("--bandwidth", "0.0001") > measured
    with pytest.raises(SystemExit):
        main([*given, "--memory", "0.01"])
    assert "do not fit" in capsys.readouterr().err
