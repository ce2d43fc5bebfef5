"""The token penalty by length: against laws whose answer is known, and which runs it is read off."""

from __future__ import annotations

import csv
import io
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.errors import UserError
from slipstream.study.cells import Cell, roles_of
from slipstream.study.page import write_tables
from slipstream.study.parse import load_study
from slipstream.study.penalty import BEYOND, PowerLaw, loss_at, penalty_of_gap, power_law
from slipstream.study.results import Result, write_export
from slipstream.study.sweep import settings
from slipstream.study.tables import as_csv, compared_cells, gain_table, loss_table

STEPS = (100, 400, 1600)
STUDY = """
[base]
train.steps = 400
[axes.seed]
key = "train.seed"
values = [0, 1, 2]
[axes.updates]
key = "train.steps"
values = [100, 400, 1600]
[axes.lr]
key = "optim.lr"
values = [0.001, 0.002]
[axes.mode.values]
sync = { pipeline.delay = 0 }
ef = { optim.correction = "error_feedback" }
"""


def law(tokens: float, power: float = 0.8, floor: float = 3.0, excess: float = 0.3) -> float:
    """What a synchronous run of so many tokens ends at; one of 400,000 ends at `floor + excess`."""
    return floor + excess * (tokens / 4e5) ** -power


def study_of(tmp_path, runs: str, table: str, name: str = "s", modes: str = ""):
    path = tmp_path / f"{name}.toml"
    path.write_text(f"{STUDY}{modes}\n[runs]\n{runs}\n[table]\n{table}\n")
    study = load_study(path)
    return study, study.expand({})


def results_of(expansion, loss, fall: float = 0.5):
    """A result for each point that `loss(tokens, mode, seed)` has one for; `fall`: of its curve, per e-fold."""
    found = {}
    for point in expansion.points:
        tokens, seed = point.config.train.steps * 1000.0, point.config.train.seed
        end = loss(tokens, point.labels["mode"], seed)
        if end is None:
            continue
        curve = [(tokens * i / 64, end + fall * math.log(64 / i)) for i in range(1, 65)]
        found[point.digest] = Result(
            point.digest, point.folder, settings(point.config), loss=end, steps=point.config.train.steps,
            tokens=tokens, validation=curve, data="text",
        )  # fmt: skip
    return found


def rows(study, expansion, results) -> dict[tuple[str, str], Cell]:
    cells, _ = compared_cells(study, expansion, results)
    return {(dict(cell.group).get("updates", ""), cell.mode): cell for cell in cells}


def gap_of(tokens: float) -> float:
    return {1e5: 0.2, 4e5: 0.06, 16e5: 0.02}[tokens]


# The curves.


@given(st.floats(0.02, 3.0), st.floats(0.01, 5.0), st.floats(1.2, 30.0), st.floats(1.2, 30.0))
def test_the_law_through_three_points_is_the_one_they_were_made_with(power, excess, first, second):
    points = [(t, 2.0 + excess * t**-power) for t in (1.0, first, first * second)]
    found = power_law(points)
    assert found is not None
    assert found.power == pytest.approx(power, rel=1e-3)
    for tokens, loss in points:
        assert found.log_tokens_at(loss) == pytest.approx(math.log(tokens), abs=1e-6)


@pytest.mark.parametrize(
    "losses",
    [
        (5.0, 4.0, 3.0),  # straight in ln tokens
        (5.0, 4.5, 3.0),  # falls faster and faster
        (5.0, 4.0, 4.0),
        (5.0, 4.0, 4.1),
        (4.0, 5.0, 3.0),
    ],
)
def test_there_is_no_law_through_points_that_are_not_convex_and_falling(losses):
    assert power_law(list(zip((1.0, 4.0, 16.0), losses, strict=True))) is None


def test_a_law_is_read_hardly_beyond_its_runs():
    points = [(t, law(t)) for t in (1e5, 4e5, 16e5)]
    found = power_law(points)
    assert found is not None
    inside = found.penalty(law(4e5), law(2e5))
    assert inside is not None
    assert inside.value == pytest.approx(2.0)
    assert not inside.extrapolated
    ends = found.penalty(law(16e5), law(1e5))
    assert ends is not None
    assert ends.value == pytest.approx(16.0)
    assert not ends.extrapolated
    near = found.penalty(law(16e5), law(16e5 * (BEYOND - 0.01)))
    assert near is not None
    assert near.value == pytest.approx(1 / (BEYOND - 0.01))
    assert near.extrapolated
    assert found.penalty(law(16e5), law(16e5 * (BEYOND + 0.01))) is None
    assert found.penalty(law(1e5), law(1e5 / (BEYOND + 0.01))) is None
    assert found.penalty(law(16e5), 2.9) is None  # below all that any length reaches


@given(st.floats(0.05, 2.5), st.floats(1.5, 20.0), st.floats(0.01, 0.95))
def test_the_chord_of_two_lengths_is_a_lower_bound_on_every_law(power, ratio, share):
    """At the longer of the two, for a loss between them; at the shorter it would be an upper one."""
    short, whole = law(16e5 / ratio, power), law(16e5, power)
    slope, gap = (short - whole) / math.log(ratio), share * (short - whole)
    true = power_law([(t, law(t, power)) for t in (16e5 / ratio / 2, 16e5 / ratio, 16e5)])
    assert true is not None
    found = true.penalty(whole, whole + gap)
    assert found is not None
    assert penalty_of_gap(gap, slope) <= found.value * (1 + 1e-6)


POSITIVE = st.floats(1e-300, 1e300)


@given(
    st.lists(st.tuples(POSITIVE, st.floats(-1e308, 1e308)), min_size=3, max_size=3), st.floats(-1e308, 1e308)
)
def test_whatever_an_export_holds_a_law_is_one_or_there_is_none(points, loss):
    found = power_law(points)
    if found is not None:
        penalty = found.penalty(points[0][1], loss)
        assert penalty is None or 0 < penalty.value < math.inf
    loss_at(points, points[1][0])


def test_the_loss_on_a_curve_between_its_points_and_nowhere_else():
    curve = [(0.0, 9.0), (100.0, 5.0), (400.0, 4.0)]
    assert loss_at(curve, 200.0) == pytest.approx(4.5)
    assert (loss_at(curve, 100.0), loss_at(curve, 400.0)) == (5.0, 4.0)
    assert loss_at(curve, 50.0) is None
    assert loss_at(curve, 401.0) is None


# Which runs.


def test_three_lengths_give_a_value_with_its_interval(tmp_path):
    study, expansion = study_of(
        tmp_path, 'product = ["updates", "seed", "mode"]', 'baseline = "ef"\nlength = "updates"'
    )
    tokens_of = {seed: 1 + 0.01 * seed for seed in range(3)}  # each seed's law is a little shifted

    def loss(tokens, mode, seed):
        own = law(tokens * tokens_of[seed])
        return own if mode == "sync" else law(tokens * tokens_of[seed] / (1.2 + 0.05 * seed))

    results = results_of(expansion, loss)
    found = rows(study, expansion, results)
    middle = found["400", "ef"]
    assert middle.by_length is not None
    assert middle.by_length.value == pytest.approx((1.2 * 1.25 * 1.3) ** (1 / 3))
    assert middle.by_length.n == 3
    assert middle.by_length.interval is not None
    assert middle.read is not None
    assert middle.read.power == pytest.approx(0.8)
    assert found["1600", "ef"].by_length.value == pytest.approx(middle.by_length.value)
    assert found["100", "ef"].by_length is None  # would lie below the shortest runs
    assert found["100", "ef"].penalty is not None
    table = loss_table(list(found.values()), roles_of(study))
    assert "mean β over seeds: 0.80" in table.note
    assert "≥" not in table.note


def test_a_seed_without_all_three_lengths_leaves_a_bound(tmp_path):
    study, expansion = study_of(
        tmp_path, 'product = ["updates", "seed", "mode"]', 'baseline = "ef"\nlength = "updates"'
    )
    results = results_of(
        expansion,
        lambda tokens, mode, seed: (
            None if (tokens, seed) == (16e5, 2) else law(tokens) + (mode == "ef") * gap_of(tokens)
        ),
    )
    found = rows(study, expansion, results)
    assert found["400", "ef"].by_length.least
    assert found["400", "ef"].by_length.n == 3
    assert not found["1600", "ef"].by_length.least  # both of its seeds have three


@pytest.mark.parametrize("whole", ["ef", "plain"])
def test_what_explains_a_bound_is_there_where_another_mode_has_a_value(tmp_path, whole):
    study, expansion = study_of(
        tmp_path,
        'product = ["updates", "seed", "mode"]',
        'baseline = "ef"\nlength = "updates"',
        modes='plain = { optim.correction = "none" }',
    )

    def loss(tokens, mode, seed):
        lacks = (tokens, mode, seed) == (16e5, "sync", 2) or (mode == whole and seed == 2)
        # Each seed has a law of its own, so that their mean depends on which a mode has.
        own = law(tokens, power=0.8 + 0.1 * seed)
        return None if lacks else own + (mode != "sync") * gap_of(tokens)

    found = rows(study, expansion, results_of(expansion, loss))
    bounded = "plain" if whole == "ef" else "ef"
    assert not found["400", whole].by_length.least
    assert found["400", bounded].by_length.least
    note = loss_table(list(found.values()), roles_of(study)).note
    assert "Two lengths give a lower bound (≥)" in note
    assert "mean β over seeds: 0.85." in note


def test_modes_whose_figures_differ_are_told_apart(tmp_path):
    study, expansion = study_of(
        tmp_path,
        'product = ["updates", "seed", "mode"]',
        'baseline = "ef"\nlength = "updates"',
        modes='plain = { optim.correction = "none" }',
    )

    def loss(tokens, mode, seed):
        own = law(tokens, power=0.8 + 0.1 * seed)
        return None if mode == "plain" and seed == 2 else own + (mode != "sync") * gap_of(tokens)

    found = rows(study, expansion, results_of(expansion, loss))
    note = loss_table(list(found.values()), roles_of(study)).note
    assert "mean β over seeds: 400 ef 0.90, 400 plain 0.85, 1600 ef 0.90, 1600 plain 0.85." in note


def two(tmp_path, fall: float, gap: float = 0.06):
    study, expansion = study_of(
        tmp_path, 'product = ["updates:100,400", "seed", "mode"]', 'baseline = "ef"\nlength = "updates"'
    )
    results = results_of(
        expansion,
        lambda tokens, mode, seed: (
            law(tokens) + 0.01 * seed + (gap * (1 + 0.1 * seed) if mode == "ef" else 0)
        ),
        fall,
    )
    return study, expansion, results, rows(study, expansion, results)


def test_two_lengths_give_the_larger_of_two_lower_bounds_and_no_interval(tmp_path):
    slope = (law(1e5) - law(4e5)) / math.log(4)
    # The curve falls so fast that at 100,000 tokens it lies above the short run's end: the chord is the larger bound.
    *_, found = two(tmp_path, fall=2 * slope)
    cell = found["400", "ef"]
    assert cell.by_length.value == pytest.approx(math.exp(0.066 / slope))
    assert (cell.by_length.least, cell.by_length.interval, cell.by_length.n) == (True, None, 3)
    assert cell.read.slope == pytest.approx(slope)
    assert cell.read.curve
    assert found["100", "ef"].by_length is None
    *_, found = two(tmp_path, fall=slope * 1.0001)
    assert found["400", "ef"].by_length.value == pytest.approx(math.exp(0.066 / slope), rel=1e-4)


def test_the_reading_by_curve_bounds_only_where_the_shorter_run_ended_below_the_curve(tmp_path):
    slope = (law(1e5) - law(4e5)) / math.log(4)
    study, expansion, results, found = two(tmp_path, fall=slope / 2)
    cell = found["400", "ef"]
    assert cell.penalty.value == pytest.approx(math.exp(0.066 / (slope / 2)))
    assert not cell.read.curve
    assert cell.by_length.value == pytest.approx(math.exp(0.066 / slope))
    table = loss_table(list(found.values()), roles_of(study))
    assert "Here it is exp(gap / slope)" in table.note

    # The same end of the whole runs, reached by a drop at the last moment: the curve counts, and is the larger one.
    late = {
        digest: replace(one, validation=[(t, y + (t < 3.9e5) * 2 * slope) for t, y in one.validation])
        for digest, one in results.items()
    }
    cell = rows(study, expansion, late)["400", "ef"]
    assert cell.read.curve
    assert cell.by_length.value == pytest.approx(max(cell.penalty.value, math.exp(0.066 / slope)))


@pytest.mark.parametrize("gap", [0.3, 1.0, 200.0])
def test_a_loss_above_the_shorter_runs_is_bounded_by_how_many_times_as_long_the_whole_one_is(tmp_path, gap):
    slope = (law(1e5) - law(4e5)) / math.log(4)
    study, *_, found = two(tmp_path, fall=2 * slope, gap=gap)
    cell = found["400", "ef"]
    within = min(gap * 1.1, law(1e5) - law(4e5))  # one of 0.3, seeds apart, ends between the two lengths
    assert cell.by_length.value == pytest.approx(math.exp(within / slope))
    assert cell.read.beyond == (gap > 0.3)
    true = ((law(4e5) + 1.1 * gap - 3.0) / 0.3) ** (1 / 0.8)  # by the law that all these runs were made with
    assert cell.by_length.value <= true
    note = loss_table(list(found.values()), roles_of(study)).note
    assert ("above the shorter run's end" in note) == (gap > 0.3)

    *_, found = two(tmp_path, fall=slope / 2, gap=gap)
    note = loss_table(list(found.values()), roles_of(study)).note
    assert ("it is exp(gap / slope)" in note) != ("above the shorter run's end" in note)

    # Nor is the reading by curve a bound where the shorter runs have not been.
    *_, found = two(tmp_path, fall=slope * 1.01, gap=gap)
    cell = found["400", "ef"]
    assert cell.read.curve
    assert cell.by_length.value <= true


def test_what_loses_nothing_has_no_lower_bound(tmp_path):
    *_, found = two(tmp_path, fall=1.0, gap=-0.01)
    assert found["400", "ef"].by_length is None
    assert found["400", "ef"].penalty is not None


def test_bounds_are_marked_in_every_table(tmp_path):
    study, expansion, results, found = two(tmp_path, fall=1.0)
    cells = list(found.values())
    table = loss_table(cells, roles_of(study))
    row = dict(zip(table.header, table.rows[-1], strict=True))
    value = found["400", "ef"].by_length.value
    assert row["token penalty by length"] == f"≥ {value:.3f}"
    assert "Two lengths give a lower bound (≥)" in table.note
    (gains,) = gain_table(cells, roles_of(study))
    assert "≤: of the penalty only a lower bound is known" in gains.note
    (bound,) = [row for row in gains.rows if row[2] == "by length"]
    speed = float(gains.rows[1][3])
    assert bound[3].startswith("≤ ")
    assert float(bound[3].removeprefix("≤ ")) == pytest.approx(speed / value, abs=2e-3)
    (last,) = list(csv.DictReader(io.StringIO(as_csv(cells, roles_of(study)))))[-1:]
    assert (last["by_length_least"], last["penalty_by_length_low"]) == ("1", "")
    write_tables(study, expansion, results, tmp_path)
    assert f"≥ {value:.3f}" in (tmp_path / "s.html").read_text()


def elsewhere(tmp_path, change=lambda result: result):
    """A study of one length, and another one's export that holds two more."""
    _, wide = study_of(tmp_path, 'product = ["updates:100,1600", "seed", "mode"]', 'baseline = "ef"', "wide")
    held = results_of(
        wide, lambda tokens, mode, seed: law(tokens) + 0.01 * seed + (mode == "ef") * gap_of(tokens)
    )
    write_export(tmp_path / "out" / "wide.jsonl.gz", [change(result) for result in held.values()])
    study, expansion = study_of(
        tmp_path, 'product = ["seed", "mode"]', 'baseline = "ef"\nlengths = "out/wide.jsonl.gz"'
    )
    results = results_of(
        expansion, lambda tokens, mode, seed: law(tokens) + 0.01 * seed + (mode == "ef") * 0.06
    )
    return study, expansion, results


def test_a_table_takes_lengths_from_another_studys_export(tmp_path):
    study, expansion, results = elsewhere(tmp_path)
    assert roles_of(study).lengths == (str(tmp_path / "out" / "wide.jsonl.gz"),)
    cell = rows(study, expansion, results)["", "ef"]
    true = power_law([(t, law(t)) for t in (1e5, 4e5, 16e5)])
    assert isinstance(true, PowerLaw)
    assert (cell.by_length.n, cell.by_length.least) == (3, False)
    assert cell.by_length.value == pytest.approx(true.penalty(law(4e5), law(4e5) + 0.06).value)
    table = loss_table(compared_cells(study, expansion, results)[0], roles_of(study))
    assert "Other lengths than this study's are wide's." in table.note
    assert len(table.rows) == 2  # nothing else of the other study is shown


@pytest.mark.parametrize(
    "change",
    [
        lambda one: replace(one, settings={**one.settings, "optim.lr": 0.123}),
        lambda one: replace(one, settings={**one.settings, "model.layers": 3}),
        lambda one: replace(one, settings={**one.settings, "optim.name": "adamw"}),
        lambda one: replace(one, settings={**one.settings, "train.seed": 7}),
        lambda one: replace(one, data="another text"),
        lambda one: replace(one, loss=None, failed="it broke"),
        lambda one: replace(one, settings={**one.settings, "pipeline.delay": 1}),
    ],
)
def test_runs_that_differ_in_more_than_length_are_none_of_its_lengths(tmp_path, change):
    cell = rows(*elsewhere(tmp_path, change))["", "ef"]
    assert cell.penalty is not None
    assert cell.by_length is None


def test_settings_that_decide_no_number_may_differ(tmp_path):
    layout = {"train.cuda_graphs": True, "train.eval_every": 7, "pipeline.least_stages": 3}
    cell = rows(*elsewhere(tmp_path, lambda one: replace(one, settings={**one.settings, **layout})))["", "ef"]
    assert cell.by_length is not None


def test_the_same_text_may_lie_elsewhere_where_its_fingerprint_is_known(tmp_path):
    moved = {"data.path": "/elsewhere/the-same-text"}
    known, unknown = tmp_path / "known", tmp_path / "unknown"
    for place in (known, unknown):
        place.mkdir()
    cell = rows(*elsewhere(known, lambda one: replace(one, settings={**one.settings, **moved})))["", "ef"]
    assert (cell.by_length.n, cell.by_length.least) == (3, False)

    # Runs of before there were fingerprints are told by the path alone.
    def nameless(one, change):
        return replace(one, data="", settings={**one.settings, **change})

    for change, held in (({}, True), (moved, False)):
        study, expansion, results = elsewhere(unknown, lambda one, change=change: nameless(one, change))
        results = {name: nameless(one, {}) for name, one in results.items()}
        assert (rows(study, expansion, results)["", "ef"].by_length is not None) == held


def test_another_studys_runs_fill_no_row_of_this_one(tmp_path):
    study, expansion, results = elsewhere(tmp_path)
    without = {name: one for name, one in results.items() if one.settings["pipeline.delay"] == 0}
    assert [cell.mode for cell in compared_cells(study, expansion, without)[0]] == ["sync"]


def test_a_missing_export_is_named(tmp_path):
    study, expansion, results = elsewhere(tmp_path)
    (tmp_path / "out" / "wide.jsonl.gz").unlink()
    with pytest.raises(UserError, match=r"takes lengths from '.*wide\.jsonl\.gz', and there is no such"):
        compared_cells(study, expansion, results)


def test_lengths_are_names_of_files(tmp_path):
    with pytest.raises(UserError, match="lengths = 3: it is a list of names"):
        study_of(tmp_path, 'product = ["seed", "mode"]', 'baseline = "ef"\nlengths = 3')
