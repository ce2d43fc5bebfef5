"""From results to tables: which runs make a row, and every figure of it against hand-computed ones."""

from __future__ import annotations

import csv
import gzip
import io
import math
from dataclasses import replace
from pathlib import Path

import pytest

from slipstream.cli import main
from slipstream.errors import UserError
from slipstream.study.cells import all_cells, compared, roles_of
from slipstream.study.only import matching
from slipstream.study.page import write_tables
from slipstream.study.parse import load_study
from slipstream.study.results import Result, collect, read_export, thinned, write_export
from slipstream.study.sweep import Point
from slipstream.study.tables import (
    as_csv,
    compared_cells,
    gain_table,
    grid_tables,
    loss_table,
    runs_table,
    tables,
)

STUDY = """
[base]
train.steps = 100
[axes.seed]
key = "train.seed"
values = [0, 1, 2]
[axes.lr]
key = "optim.lr"
values = [0.001, 0.002, 0.004]
[axes.updates]
key = "train.steps"
values = [100, 400]
[axes.mode.values]
sync = { pipeline.delay = 0 }
delay = { optim.correction = "none" }
ef = { optim.correction = "error_feedback" }
"ef+start" = { optim = { correction = "error_feedback", sync_start = 0.1 } }
"""


def make(tmp_path: Path, runs: str, losses: dict[str, float | None], table: str = ""):
    """The study, its expansion, and a result for each run named in `losses` (by its labels)."""
    path = tmp_path / "s.toml"
    path.write_text(f"{STUDY}\n[runs]\n{runs}\n[table]\n{table}\n")
    study = load_study(path)
    expansion = study.expand({})
    results = {}
    for point in expansion.points:
        name = " ".join(point.labels.values())
        if name in losses:
            results[point.digest] = ended(point, losses[name])
    return study, expansion, results


def ended(point: Point, loss: float | None) -> Result:
    tokens = point.config.train.steps * 1000.0
    curve = [] if loss is None else [(t, loss + 0.5 * math.log(tokens / t)) for t in (tokens / 8, tokens)]
    return Result(
        point.digest,
        point.folder,
        {
            "optim.sync_start": point.config.optim.sync_start,
            "pipeline.delay": point.config.pipeline.delay,
        },
        loss=loss,
        failed="" if loss is not None else "the loss is not finite",
        steps=point.config.train.steps,
        tokens=tokens,
        seconds=12.5,
        validation=curve,
        training=curve,
    )


PAIRED: dict[str, float | None] = {
    "0 sync": 3.00, "1 sync": 3.10, "2 sync": 2.90,
    "0 delay": 3.10, "1 delay": 3.20, "2 delay": 3.00,
    "0 ef": 3.02, "1 ef": 3.14, "2 ef": None,
    "0 ef+start": 3.01,
}  # fmt: skip


@pytest.fixture
def paired(tmp_path):
    study, expansion, results = make(tmp_path, 'product = ["seed", "mode"]', PAIRED)
    roles = roles_of(study)
    rows = compared(all_cells(expansion.points, results, roles), roles)
    return study, expansion, results, {cell.mode: cell for cell in rows}, roles


def test_means_gaps_shares_and_penalties(paired):
    *_, cells, _ = paired
    assert cells["sync"].mean == pytest.approx(3.0)
    assert cells["sync"].error == pytest.approx(0.1 / math.sqrt(3))
    assert cells["sync"].gap is None
    assert cells["delay"].gap.value == pytest.approx(0.1)
    assert cells["delay"].gap.interval == pytest.approx((0.1, 0.1))  # the same gap at every seed
    assert cells["delay"].recovered is None  # it is the whole
    assert cells["delay"].penalty.value == pytest.approx(math.exp(0.1 / 0.5))
    assert cells["ef"].gap.value == pytest.approx(0.03)  # 0.02 and 0.04 at the two seeds that ended
    assert (cells["ef"].gap.n, cells["ef"].gap.interval) == (2, None)
    assert list(cells["ef"].failed) == ["2"]
    assert cells["ef"].recovered.value == pytest.approx(0.7)
    assert cells["ef+start"].gap.interval is None
    assert cells["ef+start"].flushed_share == pytest.approx(0.1)


def test_runs_on_two_texts_are_no_pair(tmp_path):
    study, expansion, results = make(tmp_path, 'product = ["seed", "mode"]', PAIRED)
    roles = roles_of(study)
    other = {
        point.digest: replace(results[point.digest], data="another text")
        for point in expansion.points
        if (point.labels["seed"], point.labels["mode"]) in {("0", "ef"), ("0", "ef+start")}
    }
    rows = compared(all_cells(expansion.points, results | other, roles), roles)
    cells = {cell.mode: cell for cell in rows}
    assert cells["ef"].gap.value == pytest.approx(0.04)  # of seed 1 alone
    assert cells["ef"].recovered.value == pytest.approx(0.6)
    assert cells["ef+start"].gap is None
    seeds = {row[0]: row[1] for row in loss_table(rows, roles).rows}
    assert seeds == {"sync": "3", "delay": "3", "ef": "2 (1 paired)", "ef+start": "1 (0 paired)"}


def test_runs_measured_on_two_texts_are_no_pair_either(tmp_path):
    """Trained on the same tokens; a run that was made before the text was noted is taken at its word."""
    study, expansion, results = make(tmp_path, 'product = ["seed", "mode"]', PAIRED)
    roles = roles_of(study)
    texts = {("0", "sync"): "a", ("0", "delay"): "b", ("1", "delay"): "b"}
    noted = {
        point.digest: replace(
            results[point.digest], held_out=texts[point.labels["seed"], point.labels["mode"]]
        )
        for point in expansion.points
        if (point.labels["seed"], point.labels["mode"]) in texts
    }
    cells = {cell.mode: cell for cell in compared(all_cells(expansion.points, results | noted, roles), roles)}
    assert cells["delay"].gap.n == 2  # seeds 1 and 2
    assert cells["ef"].gap.n == 2
    write_tables(study, expansion, results | noted, tmp_path)
    assert "do not share their validation text: a, b." in (tmp_path / "s.md").read_text()


def test_the_loss_table_says_what_it_rests_on(paired):
    _, _, _, cells, roles = paired
    table = loss_table(list(cells.values()), roles)
    rows = {row[0]: row for row in table.rows}
    assert rows["sync"] == ["sync", "3", "3.0000 ± 0.0577", "–", "–", "–"]
    assert rows["delay"][3] == "+0.1000 [+0.1000, +0.1000]"
    assert rows["ef"][1] == "2"
    assert "(1 failed)" in rows["ef"][2]
    assert rows["ef"][3:] == ["+0.0300", "70 %", "1.062"]  # two seeds make no interval
    assert rows["ef+start"] == ["ef+start", "1", "3.0100", "+0.0100", "90 %", "1.020"]


def test_a_mode_that_broke_has_a_row(tmp_path):
    study, expansion, results = make(tmp_path, 'product = ["seed", "mode"]', PAIRED | {"0 delay": 4000.0})
    text = write_tables(study, expansion, results, tmp_path)[0].read_text()
    assert "[0.000, inf] *" in text
    assert max(len(word) for word in text.split()) < 40


def test_csv_holds_the_same_numbers(paired):
    _, _, _, cells, roles = paired
    rows = {row["mode"]: row for row in csv.DictReader(io.StringIO(as_csv(list(cells.values()), roles)))}
    assert float(rows["delay"]["gap"]) == pytest.approx(0.1)
    assert rows["ef"]["failed"] == "1"
    assert float(rows["ef"]["recovered"]) == pytest.approx(0.7)
    assert rows["sync"]["gap"] == ""
    assert rows["ef+start"]["gap_low"] == ""


def test_another_synchronous_mode_has_a_gap_but_recovers_nothing_and_is_no_faster(tmp_path):
    """A change of the optimizer is compared with, and without delay: the second is nothing asynchrony could gain."""
    losses: dict[str, float | None] = {"sync": 3.0, "delay": 3.1, "tuned sync": 2.95}
    axis = '\n[axes.tuned]\nname = "mode"\n[axes.tuned.values]\n"tuned sync" = { pipeline.delay = 0, optim.lr = 0.1 }'
    study, expansion, results = make(tmp_path, 'chain = ["mode", "tuned"]' + axis, losses)
    roles = roles_of(study)
    cells = {cell.mode: cell for cell in compared(all_cells(expansion.points, results, roles), roles)}
    assert cells["tuned sync"].gap.value == pytest.approx(-0.05)
    assert cells["tuned sync"].recovered is None
    (table,) = gain_table(list(cells.values()), roles)
    assert [row[0] for row in table.rows[2:]] == ["delay"]


def test_net_gain_is_tagged_as_simulated(paired):
    _, _, _, cells, roles = paired
    (table,) = gain_table(list(cells.values()), roles)
    assert "simulated" in table.title
    rows = {row[0]: row for row in table.rows}
    column = table.header.index("P=8 m=24")
    speed = float(rows["speed-up of 2BW over it"][column])
    assert float(rows["delay"][column].split()[0]) == pytest.approx(speed / math.exp(0.2), abs=2e-3)
    assert float(rows["ef+start"][column]) < speed / 1.02  # flushed updates cost time too
    assert "fine start" not in table.note
    cells = [*cells.values(), with_setting(cells["ef"], "pipeline.fine_start", 0.2)]
    assert "A fine start is taken to cost no time" in gain_table(cells, roles)[0].note


def with_setting(cell, key, value):
    results = {
        seed: replace(result, settings=result.settings | {key: value})
        for seed, result in cell.results.items()
    }
    return replace(cell, results=results)


def test_the_best_of_a_tuned_axis_is_chosen_on_common_seeds(tmp_path):
    losses: dict[str, float | None] = {
        "0 0.001 sync": 3.2, "0 0.002 sync": 3.0, "0 0.004 sync": None,
        "1 0.001 sync": 2.0,  # an easier seed must not make 0.001 the winner
        "0 0.001 delay": 3.1, "0 0.002 delay": 3.3,
    }  # fmt: skip
    study, expansion, results = make(tmp_path, 'product = ["seed", "lr", "mode"]', losses, 'best = ["lr"]')
    roles = roles_of(study)
    cells = all_cells(expansion.points, results, roles)
    rows = {cell.mode: cell for cell in compared(cells, roles)}
    assert rows["sync"].chosen == (("lr", "0.002"),)
    assert rows["delay"].chosen == (("lr", "0.001"),)
    assert rows["delay"].gap is not None
    assert rows["delay"].gap.value == pytest.approx(0.1)
    (grid,) = grid_tables(cells, roles)
    assert grid.header == ["mode", "0.001", "0.002", "0.004"]
    assert grid.rows == [
        ["sync", "3.2000 (1)", "3.0000 (1)", "failed"],
        ["delay", "3.1000 (1)", "3.3000 (1)", ""],
    ]


def test_a_run_that_two_groups_share_is_trained_once_and_stands_in_both(tmp_path):
    """A synchronous start changes nothing of a synchronous run, which is the reference of either group."""
    path = tmp_path / "s.toml"
    path.write_text(
        f"{STUDY}\n[axes.start.values]\nnone = {{}}\ntenth = {{ optim.sync_start = 0.1 }}\n"
        "[axes.kind.values]\nsync = { pipeline.delay = 0, optim.sync_start = 0 }\nlate = {}\n"
        '[runs]\nproduct = ["seed", "start", "kind"]\n[table]\nmode = "kind"\n'
    )
    study = load_study(path)
    expansion = study.expand({})
    assert (len(expansion.points), len(expansion.named)) == (9, 12)
    assert {point.digest for point in expansion.points} == {point.digest for point in expansion.named}
    results = {point.digest: ended(point, 3.0 + number / 10) for number, point in enumerate(expansion.points)}
    cells, _ = compared_cells(study, expansion, results)
    rows = {(dict(cell.group)["start"], cell.mode): cell for cell in cells}
    assert len(rows) == 4
    for start in ("none", "tenth"):
        assert rows[start, "late"].gap is not None
        assert rows[start, "late"].gap.n == 3
    assert rows["none", "sync"].losses == rows["tenth", "sync"].losses
    again = matching(expansion.named, "start=tenth*kind=sync", study.labels())
    assert {point.digest for point in again} < {point.digest for point in expansion.points}
    listed = [tuple(row[:3]) for row in runs_table(expansion.named, results).rows]
    assert len(listed) == len({*listed}) == 12, "and can be found under both names"


def test_one_run_is_one_seed_whatever_it_is_called(tmp_path):
    path = tmp_path / "s.toml"
    path.write_text(
        "[axes.seed.values]\na = { train.seed = 0 }\nb = { train.seed = 0 }\nc = { train.seed = 1 }\n"
        '[axes.mode.values]\nsync = { pipeline.delay = 0 }\ndelay = {}\n[runs]\nproduct = ["seed", "mode"]\n'
    )
    study = load_study(path)
    expansion = study.expand({})
    results = {point.digest: ended(point, 3.0) for point in expansion.points}
    cells, _ = compared_cells(study, expansion, results)
    assert [sorted(cell.losses) for cell in cells] == [["a", "c"], ["a", "c"]]
    assert [cell.gap.interval for cell in cells if cell.gap] == [None], "two runs have none"
    failed = {point.digest: ended(point, None) for point in expansion.points}
    cells, _ = compared_cells(study, expansion, failed)
    assert [sorted(cell.failed) for cell in cells] == [["a", "c"], ["a", "c"]]


def test_a_value_at_which_seeds_failed_is_shown_as_such(tmp_path):
    """Its one lucky seed must not make the others' means look as if it had won."""
    losses: dict[str, float | None] = {
        "0 0.001 sync": 3.3, "1 0.001 sync": 3.0, "2 0.001 sync": 3.0,
        "0 0.002 sync": 3.2, "1 0.002 sync": None, "2 0.002 sync": None,
    }  # fmt: skip
    study, expansion, results = make(
        tmp_path, 'product = ["seed", "lr", "mode"]', losses, table='best = ["lr"]'
    )
    roles = roles_of(study)
    cells = all_cells(expansion.points, results, roles)
    (best,) = compared(cells, roles)
    (grid,) = grid_tables(cells, roles)
    assert dict(best.chosen) == {"lr": "0.001"}
    assert grid.header == ["mode", "0.001", "0.002"]
    assert grid.rows == [["sync", "3.1000 (3)", "3.2000 (1, 2 failed)"]]
    assert "at which a seed failed is not compared" in grid.note


def test_a_value_at_which_a_seed_failed_is_not_the_best(tmp_path):
    losses: dict[str, float | None] = {
        "0 0.001 sync": 3.2, "0 0.002 sync": 3.0,
        "1 0.001 sync": 3.2, "1 0.002 sync": None,
    }  # fmt: skip
    study, expansion, results = make(tmp_path, 'product = ["seed", "lr", "mode"]', losses, 'best = ["lr"]')
    roles = roles_of(study)
    (row,) = compared(all_cells(expansion.points, results, roles), roles)
    assert row.chosen == (("lr", "0.001"),)


def test_the_best_of_one_axis_needs_no_list(tmp_path):
    study, *_ = make(tmp_path, 'product = ["seed", "lr", "mode"]', {}, 'best = "lr"')
    assert roles_of(study).best == ("lr",)


def test_with_lengths_the_penalty_is_read_off_final_losses_as_well(tmp_path):
    losses: dict[str, float | None] = {"100 sync": 4.0, "400 sync": 3.0, "400 delay": 3.5, "100 delay": 4.25}
    study, expansion, results = make(tmp_path, 'product = ["updates", "mode"]', losses, 'length = "updates"')
    cells, roles = compared_cells(study, expansion, results)
    rows = {(dict(cell.group)["updates"], cell.mode): cell for cell in cells}
    # Within a run the loss falls by 0.5 per e-fold of tokens, between runs by one per factor of 4.
    assert rows["400", "delay"].penalty.value == pytest.approx(math.exp(0.5 / 0.5))
    assert rows["400", "delay"].by_length.value == pytest.approx(2.0)
    assert rows["400", "delay"].by_length.least
    assert rows["100", "delay"].by_length is None
    table = loss_table(cells, roles)
    assert table.header[-2:] == ["token penalty by curve", "token penalty by length"]
    assert table.rows[-1][-2:] == ["2.718", "≥ 2.000"]
    (gains,) = gain_table(cells, roles)
    assert [row[2] for row in gains.rows[2:]] == ["by curve", "by curve", "by length"]
    both = [float(row[3].removeprefix("≤ ")) for row in gains.rows[-2:]]
    assert both[1] / both[0] == pytest.approx(math.e / 2, abs=3e-3)
    (last,) = list(csv.DictReader(io.StringIO(as_csv(cells, roles))))[-1:]
    assert (last["penalty"], last["penalty_by_length"]) == ("2.71828", "2")

    # A length that was run on another text is no point of the curve.
    (short,) = (p for p in expansion.points if p.labels == {"updates": "100", "mode": "sync"})
    results[short.digest] = replace(results[short.digest], data="another text")
    assert all(cell.by_length is None for cell in compared_cells(study, expansion, results)[0])


def test_export_reads_back_as_it_was(tmp_path, paired):
    study, expansion, results, _, _ = paired
    path = tmp_path / "out" / "s.jsonl.gz"
    assert write_export(path, results.values()) == len(results)
    assert {result.digest: result for result in read_export(path)} == results
    assert collect(path) == collect(path.parent) == results
    first = path.read_bytes()
    write_export(path, results.values())
    assert path.read_bytes() == first
    whole = write_tables(study, expansion, results, tmp_path / "a")
    again = write_tables(study, expansion, collect(path), tmp_path / "b")
    assert [one.read_text() for one in whole] == [one.read_text() for one in again]
    assert {one.name for one in whole} == {"s.md", "s.csv", "s-runs.csv", "s.html"}


def test_a_damaged_export_is_a_clear_error(tmp_path):
    path = tmp_path / "x.jsonl.gz"
    path.write_bytes(b"no gzip")
    with pytest.raises(UserError, match="is no export of a study"):
        collect(tmp_path)
    path.write_bytes(gzip.compress(b'{"digest": "d", "run": "r", "settings": {}}\n'))
    with pytest.raises(UserError, match="is no export of a study: 'validation'"):
        collect(tmp_path)


def test_an_export_from_elsewhere_may_hold_a_loss_that_is_none(tmp_path):
    path = tmp_path / "x.jsonl.gz"
    row = '{"digest": "d", "run": "r", "settings": {}, "loss": NaN, "validation": [], "training": []}\n'
    path.write_bytes(gzip.compress(row.encode()))
    (result,) = read_export(path)
    assert (result.loss, result.failed) == (None, "the loss is not finite")


def test_an_export_is_not_written_over_runs_that_nothing_else_holds(tmp_path, paired, capsys):
    _, _, results, *_ = paired
    study, export = tmp_path / "s.toml", tmp_path / "out" / "s.jsonl.gz"
    write_export(export, results.values())
    before = export.read_bytes()
    few = tmp_path / "few.jsonl.gz"
    write_export(few, list(results.values())[:2])

    def command(*places: Path) -> object:
        named = [word for place in places for word in ("--results", str(place))]
        with pytest.raises(SystemExit) as ended:
            main(["study", "export", str(study), *named, "--out", str(export.parent)])
        return ended.value.code

    assert command(few) == 2
    assert "holds 8 runs that are not among these" in capsys.readouterr().err
    assert export.read_bytes() == before
    assert command(few, export) == 0
    assert len(read_export(export)) == len(results)
    assert [path.name for path in export.parent.iterdir()] == [export.name]


def test_the_page_says_what_is_missing_and_what_failed(tmp_path, paired):
    study, expansion, results, _, _ = paired
    write_tables(study, expansion, results, tmp_path)
    text = (tmp_path / "s.md").read_text()
    assert "2 of 12 runs are missing." in text
    assert "seed=2 mode=ef failed: the loss is not finite" in text
    page = (tmp_path / "s.html").read_text()
    assert "Net gain (simulated)" in page
    assert "2 of 12 runs are missing." in page


def test_runs_that_do_not_name_their_code_are_counted(tmp_path, paired):
    study, expansion, results, _, _ = paired
    write_tables(study, expansion, results, tmp_path)
    told = "9 of 9 runs were made before a run noted the commit and fingerprint of its code."
    assert told in (tmp_path / "s.md").read_text()
    named = {digest: replace(result, source="s" * 64) for digest, result in results.items()}
    write_tables(study, expansion, named, tmp_path)
    assert "fingerprint of its code" not in (tmp_path / "s.md").read_text()


def test_a_gap_between_runs_of_different_code_says_so(tmp_path, paired):
    """Also where only one of two names its code; where neither does nothing is known."""
    study, expansion, results, cells, roles = paired
    assert not any(cell.other_code for cell in cells.values())
    made = {
        ("0", "sync"): "a",
        ("1", "sync"): "a",
        ("0", "delay"): "a",
        ("1", "delay"): "a",
        ("0", "ef"): "b",
    }
    named = {
        point.digest: replace(results[point.digest], source=made[point.labels["seed"], point.labels["mode"]])
        for point in expansion.points
        if (point.labels["seed"], point.labels["mode"]) in made
    }
    rows, _ = compared_cells(study, expansion, results | named)
    assert {cell.mode for cell in rows if cell.other_code} == {"ef", "ef+start"}
    table = loss_table(rows, roles)
    assert {row[0] for row in table.rows if row[3].endswith(" †")} == {"ef", "ef+start"}
    assert "†: the runs of at least one pair are of different code." in table.note
    assert "†" not in loss_table(list(cells.values()), roles).note
    told = {row["mode"]: row["other_code"] for row in csv.DictReader(io.StringIO(as_csv(rows, roles)))}
    assert told == {"sync": "0", "delay": "0", "ef": "1", "ef+start": "1"}


def test_a_run_that_broke_on_the_way_is_named(tmp_path, paired):
    study, expansion, results, _, _ = paired
    point = next(p for p in expansion.points if p.name == "seed=0 mode=sync")
    broken = [(1e3, 5.3), (2e3, 7.25), (3e3, 6.0), (4e3, 5.2), (5e3, 5.5)]
    results = {**results, point.digest: replace(results[point.digest], validation=broken)}
    write_tables(study, expansion, results, tmp_path)
    text = (tmp_path / "s.md").read_text()
    assert "seed=0 mode=sync broke on the way: its validation loss rose from 5.30 to 7.25." in text
    assert text.count("broke on the way") == 1  # a rise of 0.3 is noise


def test_every_run_is_listed(paired):
    _, expansion, results, _, _ = paired
    table = runs_table(expansion.points, results)
    assert len(table.rows) == len(PAIRED)
    assert table.rows[0][:3] == ["0", "sync", "3.000000"]
    made = {digest: replace(one, data="d" * 64, commit="c" * 40) for digest, one in results.items()}
    table = runs_table(expansion.points, made)
    row = dict(zip(table.header, table.rows[0], strict=True))
    assert (row["text"], row["code"]) == ("d" * 12, "c" * 40)
    made = {digest: replace(one, source="s" * 64) for digest, one in results.items()}
    assert "s" * 12 in runs_table(expansion.points, made).rows[0]  # run from a copy of the files


def test_no_results_give_no_tables(paired):
    study, expansion, *_ = paired
    assert tables(study, expansion, {}) == []


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ('seeds = "seed"', "has \\['seeds'\\]"),
        ('best = "lr"', "best = 'lr', and the axes are 'seed', 'mode'"),
        ("best = 3", "best = 3, and the axes are"),
        ('best = ["lr"]', "best = 'lr', and the axes are"),
        ('mode = ["mode"]', r"mode = \['mode'\], and the axes are"),
        ('length = "updats"', "length = 'updats', and the axes are"),
        ('reference = "synch"', "reference = 'synch', and 'mode' has 'sync', 'delay', 'ef', 'ef\\+start'"),
    ],
)
def test_a_mistake_in_the_table_is_named_before_anything_runs(tmp_path, table, words):
    with pytest.raises(UserError, match=words):
        make(tmp_path, 'product = ["seed", "mode"]', {}, table)


def test_thinning_keeps_means():
    curve = [(float(i), float(i % 2)) for i in range(1, 1001)]
    short = thinned(curve, 100)
    assert len(short) == 100
    assert short[-1] == (1000.0, 0.5)
    assert thinned(curve[:50], 100) == curve[:50]
