"""Whether a run is well, from what it writes."""

import fcntl
import json

import pytest

from slipstream.cli import main
from slipstream.metrics.events import read_run
from slipstream.metrics.pulse import FAILED, STALLED, TO_RESUME, WELL, is_held, pulse


def written(folder, *events):
    lines = [json.dumps({"event": kind, "step": step, "time": at} | more) for kind, step, at, more in events]
    (folder / "events.jsonl").write_text("".join(line + "\n" for line in lines))
    return read_run(folder)


STEPS = [("start", 0, 100.0, {}), *(("step", step, 100.0 + step, {}) for step in range(1, 31))]


@pytest.mark.parametrize(
    ("more", "held", "now", "words", "code"),
    [
        ([], True, 140.0, "running: step 30, no checkpoint yet", WELL),
        (
            [("checkpoint", 20, 120.0, {})],
            True,
            180.0,
            "running: step 30, newest checkpoint at step 20",
            WELL,
        ),
        ([], True, 200.0, "nothing was written for 70 s", STALLED),
        ([], False, 200.0, "not running, not finished: step 30", TO_RESUME),
        (
            [("error", 30, 131.0, {"message": "Rank 1 died.\nMore"})],
            False,
            200.0,
            "failed at step 30, no checkpoint yet: Rank 1 died.",
            FAILED,
        ),
        ([("finish", 30, 131.0, {})], False, 200.0, "finished at step 30", WELL),
    ],
)
def test_in_words_and_as_a_code(tmp_path, more, held, now, words, code):
    found = pulse(written(tmp_path, *STEPS, *more), held, now)
    assert words in found.words
    assert found.code == code


def test_a_slow_run_is_given_its_time(tmp_path):
    slow = [("start", 0, 0.0, {}), *(("step", step, 100.0 * step, {}) for step in range(1, 5))]
    assert pulse(written(tmp_path, *slow), True, 2300.0).code == WELL
    assert pulse(written(tmp_path, *slow), True, 2500.0).code == STALLED


def test_the_lock_says_whether_it_runs(tmp_path):
    lock = tmp_path / "lock"
    assert not is_held(lock)
    with lock.open("w") as file:
        assert not is_held(lock)
        fcntl.flock(file, fcntl.LOCK_EX)
        assert is_held(lock)
    assert not is_held(lock)


def test_the_command(tmp_path, capsys):
    written(tmp_path, *STEPS)
    with pytest.raises(SystemExit) as ended:
        main(["health", str(tmp_path)])
    assert ended.value.code == TO_RESUME
    assert "not running, not finished: step 30" in capsys.readouterr().out
