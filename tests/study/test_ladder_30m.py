"""studies/ladder_30m.py: what it starts is each run of its study, once."""

from scripts import loaded
from slipstream.study.only import matching
from slipstream.study.parse import load_study


def test_each_run_of_the_study_is_started_once():
    with loaded("ladder_30m") as script:
        study = load_study(script.STUDY)
        points = list(study.expand({}).points)
        labels = study.labels()
        asked = [*script.WHOLE.values(), *script.SHORT.values()]
        found = [matching(points, only, labels) for only in asked]
    assert [len(each) for each in found] == [1] * len(asked)
    assert {each[0].digest for each in found} == {point.digest for point in points}


def test_whole_runs_share_the_machine_and_short_ones_fill_what_is_left():
    with loaded("ladder_30m") as script:
        whole, short = [*script.WHOLE], [*script.SHORT]
        chosen = script.next_run
        started: list[str] = []
        while name := chosen([run for run in [*whole, *short] if run not in started], started, 1500.0):
            started.append(name)
        assert started == whole, "short ones hold up none"
        assert {*whole} >= script.FIRST
        assert chosen([whole[-1], *short], [], script.WHOLE_SECONDS) == whole[-1]
        assert chosen([whole[-1], *short], [], script.WHOLE_SECONDS - 1.0) == short[0], "it would not end"
        assert chosen(whole[2:], whole[:2], 3 * script.SHARE_SECONDS) == whole[2]
        assert chosen(whole[2:], whole[:2], 3 * script.SHARE_SECONDS - 1.0) is None, (
            "none of the three would end"
        )
        assert chosen(short, ["third", "delay"], 1500.0) is None
        assert chosen(short, ["delay"], 1500.0) == short[0]
        assert chosen(short[1:], [short[0]], 1500.0) == short[1]
        assert chosen(short[2:], short[:2], 1500.0) is None, "two at once"
        assert chosen(short, [], script.SHORT_SECONDS - 1.0) is None
        assert chosen([], [], 1500.0) is None


def test_how_far_a_run_is_comes_from_the_process_that_trains_it(tmp_path, capsys):
    with loaded("ladder_30m") as script:
        lease = script.Lease(tmp_path, 100.0, [], [])
        for name in ("sync", "third"):
            (tmp_path / "logs" / name).write_text("1 run, 0 done\n\n")
        trains = tmp_path / "runs" / "third"
        trains.mkdir(parents=True)
        (trains / "worker-0.log").write_text("step 1\nstep 20  loss 5.1\n")
        lease.tell()
    assert capsys.readouterr().out.splitlines()[1:] == ["  sync: 1 run, 0 done", "  third: step 20  loss 5.1"]
