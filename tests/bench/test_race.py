"""Time to loss: what counts as training time, where a curve meets the target, and a race of two real runs."""

import io
import json
import os
import signal
import sys

import pytest
from rich.console import Console
from tests.train.conftest import TINY, make_data

from slipstream.bench import race_seeds
from slipstream.bench.race import Point, _sentence, arguments_of, compare, curve, race, reach, write
from slipstream.cli import _dispatch
from slipstream.cli.train import parse
from slipstream.config import resolve
from slipstream.errors import UserError
from slipstream.metrics.events import Run


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> list[str]:
    data = make_data(tmp_path_factory.mktemp("data"))
    return [*TINY, f"data.path={data}", "train.eval_every=2", "train.sample_tokens=0", "checkpoint.every=0"]


def events(step_seconds, losses, tokens=100, validation_seconds=5.0):
    """A run with a validation after every second step, each of which stops the clock."""
    found, now = [{"event": "start", "step": 0, "time": 990.0}], 1000.0
    for number, loss in enumerate(losses, start=1):
        for step in (2 * number - 1, 2 * number):
            found.append({"event": "step", "step": step, "time": now, "tokens": step * tokens})
            now += step_seconds
        now += validation_seconds - step_seconds  # the validation begins when the step is recorded
        found.append(
            {
                "event": "validation",
                "step": 2 * number,
                "time": now,
                "loss": loss,
                "tokens": 2 * number * tokens,
            }
        )
        now += step_seconds
    return found


def run(tmp_path, name, *args, **kwargs):
    return Run(tmp_path / name, tuple(events(*args, **kwargs)))


def test_validations_and_start_up_are_not_training_time(tmp_path):
    points = curve(run(tmp_path, "a", 1.0, [4.0, 3.0, 2.0], validation_seconds=50.0))
    assert [point.seconds for point in points] == [1.0, 3.0, 5.0]
    assert [point.tokens for point in points] == [200, 400, 600]


def test_the_target_is_met_between_validations():
    points = [Point(0, 0, 4.0), Point(10, 100, 3.0), Point(20, 200, 3.5), Point(30, 300, 2.0)]
    assert reach(points, 3.5) == Point(5.0, 50.0, 3.5)
    assert reach(points, 2.75) == Point(25.0, 250.0, 2.75)
    assert reach(points, 1.0) is None


def test_the_default_target_is_reached_by_all_and_the_gain_is_speed_over_penalty(tmp_path):
    runs = {
        "2bw": run(tmp_path, "2bw", 1.0, [4.0, 3.2, 3.0]),
        "1f1b": run(tmp_path, "1f1b", 1.5, [4.0, 3.0, 2.8]),
        "gpipe": run(tmp_path, "gpipe", 2.0, [4.0, 3.0, 2.8]),
    }
    result = compare(runs, None)
    assert result["target_loss"] == 3.0
    assert result["best_sync"] == "1f1b"
    assert result["token_penalty"] == pytest.approx(600 / 400)
    assert result["speedup_in_tokens_per_second"] == pytest.approx((600 / 5.0) / (400 / 4.5))
    assert result["speedup_in_time_to_target"] == pytest.approx(4.5 / 5.0)
    gain = result["speedup_in_tokens_per_second"] / result["token_penalty"]
    assert gain == pytest.approx(result["speedup_in_time_to_target"])
    assert "1.35 times the tokens per second until there, 1.500 times the tokens" in _sentence(result)


def test_a_target_out_of_reach_is_said_so(tmp_path):
    runs = {"2bw": run(tmp_path, "2bw", 1.0, [4.0, 3.0]), "1f1b": run(tmp_path, "1f1b", 1.0, [4.0, 2.0])}
    result = compare(runs, 2.5)
    assert [lap["seconds_to_target"] is None for lap in result["laps"]] == [True, False]
    assert "best_sync" not in result


def test_too_few_validations_are_a_clear_error(tmp_path):
    with pytest.raises(UserError, match="eval_every"):
        compare({"2bw": run(tmp_path, "2bw", 1.0, [4.0])}, None)


def test_a_target_met_before_the_clock_started_has_no_speed_up(tmp_path):
    runs = {}
    for name, losses in (("2bw", [3.0, 3.5]), ("1f1b", [4.0, 3.0])):
        first, *found = events(1.0, losses)
        runs[name] = Run(tmp_path / name, (first, *found[1:]))  # the first step recorded is validated at once
    result = compare(runs, None)
    assert [lap["seconds_to_target"] for lap in result["laps"]] == [0.0, 1.0]
    assert "best_sync" not in result


def test_what_is_no_target_and_no_folder_is_refused(tmp_path):
    for target in (float("nan"), 0.0):
        with pytest.raises(UserError, match="--target"):
            race([], ["2bw", "1f1b"], tmp_path, target)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written"):
        race([], ["2bw", "1f1b"], tmp_path / "file" / "race")


def test_two_schedules_race_for_real(toy, tmp_path, capfd):
    arguments = [*toy, "train.steps=6", "--schedules", "2bw,1f1b,2bw", "--out", str(tmp_path), "--json"]
    arguments += ["--longer", "1.2"]
    with pytest.raises(SystemExit) as ended:
        _dispatch(["bench", "race", *arguments])
    assert ended.value.code == 0
    result = json.loads(capfd.readouterr().out)
    assert result["complete"]
    assert [lap["schedule"] for lap in result["laps"]] == ["2bw", "1f1b"]
    assert [lap["tokens"] / result["laps"][1]["tokens"] for lap in result["laps"]] == [8 / 6, 1.0]
    assert json.loads((tmp_path / "race.json").read_text())["target_loss"] == result["target_loss"]
    assert "Validation loss by wall clock" in (tmp_path / "race.html").read_text()


def test_seeds_race_one_after_the_other_for_real(toy, tmp_path, capfd):
    arguments = [*toy, "train.steps=6", "--schedules", "2bw,1f1b", "--out", str(tmp_path)]
    with pytest.raises(SystemExit) as ended:
        _dispatch(["bench", "race", *arguments, "--seeds", "3,5", "--json"])
    assert ended.value.code == 0
    result = json.loads(capfd.readouterr().out)
    assert result["complete"]
    assert [found["seed"] for found in result["races"]] == [3, 5]
    for found in result["races"]:
        own = tmp_path / f"seed-{found['seed']}"
        assert found["target_loss"] == json.loads((own / "race.json").read_text())["target_loss"]
        for name in ("2bw", "1f1b"):
            assert f"seed = {found['seed']}" in (own / name / "config.toml").read_text()
    assert result["races"][0]["target_loss"] != result["races"][1]["target_loss"]
    assert json.loads((tmp_path / "race.json").read_text()) == result


def test_three_seeds_make_an_interval(tmp_path):
    races = {}
    for seed, seconds in enumerate((1.2, 1.3, 1.4)):
        for name, step in (("2bw", 1.0), ("1f1b", seconds)):
            place = race_seeds.folder(tmp_path, seed) / name
            place.mkdir(parents=True)
            rows = [*events(step, [4.0, 3.0, 2.0]), {"event": "finish", "step": 6, "time": 2000.0}]
            (place / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        races[seed] = write(["2bw", "1f1b"], race_seeds.folder(tmp_path, seed), None)
        result = race_seeds.write(races, ["2bw", "1f1b"], tmp_path, complete=seed == 2)
        assert (result["speedup_in_time_to_target"]["interval"] is None) == (seed < 2)
    fast = result["speedup_in_time_to_target"]
    assert fast["mean"] == pytest.approx(1.3)
    # t(0.975, 2) = 4.303; the standard error of 1.2, 1.3, 1.4 is 0.1 / sqrt(3)
    assert fast["interval"] == pytest.approx((1.3 - 0.2484, 1.3 + 0.2484), abs=1e-4)
    assert result["token_penalty"]["mean"] == 1.0
    page = (tmp_path / "race.html").read_text()
    assert "1.300 [1.052, 1.548] times as fast as 1f1b" in page
    assert all(f"1f1b, seed {seed}" in page for seed in range(3))
    said = Console(width=200, record=True, file=io.StringIO())
    race_seeds.print_seeds(said, result)
    assert "1.300 [1.052, 1.548] times as fast" in said.export_text()


def test_seeds_that_missed_the_target_are_not_hidden(tmp_path):
    races = {}
    for seed, losses in enumerate(([4.0, 3.0, 2.0], [4.0, 3.0, 2.9])):
        for name in ("2bw", "1f1b"):
            place = race_seeds.folder(tmp_path, seed) / name
            place.mkdir(parents=True)
            (place / "events.jsonl").write_text(
                "".join(json.dumps(row) + "\n" for row in events(1.0, losses))
            )
        races[seed] = write(["2bw", "1f1b"], race_seeds.folder(tmp_path, seed), 2.5)
    race_seeds.write(races, ["2bw", "1f1b"], tmp_path, complete=False)
    page = (tmp_path / "race.html").read_text()
    assert "the 1 of 2 seeds in which both got there" in page
    assert "not over" in page


@pytest.mark.parametrize(
    ("seeds", "words"), [("1,1", "each seed once"), ("one", "list of numbers"), ("0,-1", "seed")]
)
def test_what_is_no_list_of_seeds_is_refused(tmp_path, seeds, words):
    with pytest.raises(UserError, match=words):
        _dispatch(["bench", "race", "--seeds", seeds, "--out", str(tmp_path)])


def test_the_time_between_an_interruption_and_its_resumption_does_not_count(tmp_path):
    found = events(1.0, [4.0, 3.0, 2.0])
    late = [event | {"time": event["time"] + (500 if event["step"] > 4 else 0)} for event in found]
    late.insert(7, {"event": "start", "step": 4, "time": 1400.0})
    assert [event["step"] for event in late[6:9]] == [4, 4, 5]
    assert [point.seconds for point in curve(Run(tmp_path, tuple(late)))] == [1.0, 3.0, 5.0]


def test_what_there_is_of_a_race_is_written(tmp_path):
    def record(name, rows):
        (tmp_path / name).mkdir(exist_ok=True)
        lines = [json.dumps(row) + "\n" for row in rows]
        (tmp_path / name / "events.jsonl").write_text("".join(lines))

    assert write(["2bw", "1f1b"], tmp_path, None) is None
    record("2bw", [*events(1.0, [4.0, 3.2, 3.0]), {"event": "finish", "step": 6, "time": 2000.0}])
    record("1f1b", events(1.5, [4.0])[:2])
    alone = write(["2bw", "1f1b"], tmp_path, None)
    assert alone is not None
    assert "best_sync" not in alone
    record("1f1b", events(1.5, [4.0, 3.1]))
    partial = write(["2bw", "1f1b"], tmp_path, None)
    assert partial is not None
    assert [lap["finished"] for lap in partial["laps"]] == [True, False]
    assert not partial["complete"]
    assert partial["target_loss"] == 3.1
    page = (tmp_path / "race.html").read_text()
    assert "not over" in page
    assert "times the tokens" in page
    assert json.loads((tmp_path / "race.json").read_text()) == partial


def test_an_interrupted_race_keeps_what_it_has_and_goes_on(toy, tmp_path, monkeypatch):
    """SIGTERM, as a cluster sends it when the time is up, twice: the second call goes on where the first one was."""
    log = tmp_path / "2bw" / "events.jsonl"
    endless = [*toy, "train.steps=1000000", "optim.schedule=constant", "optim.warmup=0"]

    def told():
        return [json.loads(line) for line in log.read_text().splitlines() if line.endswith("}")]

    def interrupt_after(step):
        def look(*arguments):
            if log.exists() and any(e["event"] == "validation" and e["step"] > step for e in told()):
                monkeypatch.setattr(module, "write", write)
                os.kill(os.getpid(), signal.SIGTERM)
            return write(*arguments)

        monkeypatch.setattr(module, "write", look)

    module = sys.modules["slipstream.bench.race"]
    monkeypatch.setattr(module, "EVERY_SECONDS", 0.2)
    reached = 0
    for _ in range(2):
        interrupt_after(reached)
        with pytest.raises(UserError, match="interrupted while 2bw trained"):
            race(endless, ["2bw", "1f1b"], tmp_path)
        saved = [event["step"] for event in told() if event["event"] == "checkpoint"]
        assert saved[-1] > reached
        reached = saved[-1]
    assert not (tmp_path / "1f1b").exists()
    starts = [event for event in told() if event["event"] == "start"]
    assert [start["resumed"] for start in starts] == [False, True]


@pytest.mark.parametrize("longer", ["0.9", "nan", "inf"])
def test_ours_trains_no_shorter_than_the_others(tmp_path, longer):
    with pytest.raises(UserError, match="--longer"):
        _dispatch(["bench", "race", "--longer", longer, "--out", str(tmp_path / "race")])


def test_a_mistake_of_the_second_contender_is_said_before_the_first_one_trains(tmp_path):
    out = tmp_path / "race"
    with pytest.raises(UserError, match=r"pipeline\.schedule"):
        _dispatch(["bench", "race", "train.steps=2", "--schedules", "2bw,1f2b", "--out", str(out)])
    assert not out.exists()


def test_what_only_2bw_has_is_left_out_for_its_rivals(toy, tmp_path):
    """Depth, cutover and correction of the run that is raced say nothing about a schedule without delay."""
    own = [
        "pipeline.microbatches=4",
        "pipeline.cutover=3",
        "pipeline.in_flight=3",
        "optim.correction=error_feedback",
        "optim.correction_lambda=0.5",
        "optim.sync_start=0.1",
    ]
    ours, rival = (resolve(parse(arguments_of([*toy, *own], name, tmp_path))) for name in ("2bw", "1f1b"))
    assert (ours.pipeline.cutover, ours.pipeline.in_flight, ours.optim.correction_lambda) == (3, 3, 0.5)
    assert (rival.pipeline.cutover, rival.pipeline.in_flight, rival.optim.correction_lambda) == (None,) * 3
    assert rival.optim.correction == "none"
    assert rival.pipeline.microbatches == 4
