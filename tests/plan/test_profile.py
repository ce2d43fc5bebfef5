"""Measuring: the arithmetic on made-up times, and one real profile on this machine."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest

from slipstream.errors import UserError
from slipstream.models.sizes import preset
from slipstream.plan.devices import Runtime
from slipstream.plan.profile import Profile, StageSeconds, fit_line, fit_runtime, link, spreads, timing
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


def test_a_real_profile_survives_its_file(tmp_path):
    from slipstream.cli.profile import measure_profile

    profile = measure_profile(preset("cpu-default"), 64, "muon")
    assert set(profile.timings) == {"embedding", "layer", "head"}
    assert profile.timings["layer"].forward(2) > 0
    assert 1e-6 < profile.link.latency < 0.1
    assert profile.torch_engine.on_demand
    assert not profile.engine.on_demand
    profile.write(tmp_path / "p.json")
    assert Profile.read(tmp_path / "p.json") == profile


def test_a_file_that_is_no_profile(tmp_path):
    with pytest.raises(UserError, match="cannot be read"):
        Profile.read(tmp_path / "none.json")
    (tmp_path / "p.json").write_text(json.dumps({"device": "x"}))
    with pytest.raises(UserError, match="not a profile"):
        Profile.read(tmp_path / "p.json")
