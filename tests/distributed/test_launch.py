"""The launcher: results in rank order, one clear cause on failure, nobody left behind."""

import os
import subprocess
import sys
import threading
import time
from importlib import import_module

import pytest

from slipstream.distributed import RankPool
from slipstream.distributed.answers import Failure, first_cause
from slipstream.errors import StageError, UserError


def test_pool_runs_jobs_of_several_sizes(cold):
    with RankPool(2) as pool:
        first = pool.run("distributed.jobs:total", 1)
        assert [result[:2] for result in first] == [(0, 3.0), (1, 3.0)]
        alone = pool.run("distributed.jobs:total", 5, ranks=1)
        assert alone[0][:2] == (0, 5.0)
        assert alone[0][2] == first[0][2], "a warm worker is reused"
        assert pool.run("distributed.jobs:threads") == [1, 1]
        assert pool.run("distributed.jobs:uneven") == [b"x", b"x"]
        with pytest.raises(UserError, match="Set x to 3"):
            pool.run("distributed.jobs:mistake")
        with pytest.raises(UserError, match="does not fit"):
            pool.run("distributed.jobs:total", 0, ranks=3)


def test_pool_recovers(capfd, monkeypatch, quick):
    with RankPool(2) as pool:
        with pytest.raises(StageError, match="Rank 1 was killed by SIGKILL before it finished"):
            pool.run("distributed.jobs:death")
        before = pool.run("distributed.jobs:total", 0)
        assert len(before) == 2, "the lost worker is replaced"
        pool._workers[0].kill()
        after = pool.run("distributed.jobs:total", 0)
        assert after[0][2] != before[0][2]
        assert after[1][2] == before[1][2], "a rank keeps its number: DTensor's caches hold where it stood"
        monkeypatch.setattr(import_module("slipstream.distributed.answers"), "PRINTING_SECONDS", 2.0)
        with pytest.raises(StageError, match=r"No answer within .* s from rank 0, 1"):
            pool.run("distributed.jobs:stall", timeout=5)
        told = capfd.readouterr().err
        for rank in range(2):
            assert f"Rank {rank} gave no answer. It is here:" in told
        assert told.count("in stall") == 2
        assert [result[:2] for result in pool.run("distributed.jobs:total", 0)] == [(0, 1.0), (1, 1.0)]


def test_ranks_that_have_counted_groups_differently_meet_all_the_same(quick):
    """torch calls a group by how many a process has made, and ranks that call it differently wait for each other."""
    with RankPool(2) as pool:
        for _ in range(2):
            pool.run("distributed.jobs:name_a_group_behind_its_back", timeout=60)
        assert len(pool.run("distributed.jobs:name_a_group_behind_its_back", timeout=60)) == 2


def test_a_file_called_like_a_module_of_pythons_does_no_harm(cold, tmp_path, monkeypatch):
    """Where the launcher finds its modules its ranks do, and not in the folder that someone happens to be in."""
    (tmp_path / "dis.py").write_text("raise SystemExit('imported in the place of a standard module')")
    monkeypatch.chdir(tmp_path)
    with RankPool(1) as pool:
        assert pool.run("distributed.jobs:total", 5)[0][:2] == (0, 5.0)


def test_a_cause_is_told_before_the_groups_are_closed(quick):
    """Which takes a while where others are lost: longer than the launcher waits after what a neighbour saw."""
    with RankPool(2) as pool:
        with pytest.raises(StageError, match="Rank 0 failed with ValueError: the cause"):
            pool.run("distributed.jobs:close_slowly", 4.0, timeout=60)
        assert [row[1] for row in pool.run("distributed.jobs:total", 1, timeout=60)] == [3.0, 3.0]


def test_a_crash_says_where_it_was(capfd, quick):
    with RankPool(2) as pool, pytest.raises(StageError, match="Rank 1 was killed by SIGSEGV"):
        pool.run("distributed.jobs:crash")
    told = capfd.readouterr().err
    assert "Segmentation fault" in told
    assert "in crash" in told


def test_arguments_that_ranks_cannot_read_are_an_error_at_once(quick, monkeypatch):
    """A class of the script that was started, say: pickled by name, and a rank's script is another one."""
    kind = type("Setting", (), {"__module__": "__main__"})
    monkeypatch.setattr(sys.modules["__main__"], "Setting", kind, raising=False)
    with RankPool(2) as pool:
        with pytest.raises(StageError, match=r"cannot be read by its ranks.*Can't get attribute 'Setting'"):
            pool.run("distributed.jobs:total", kind(), timeout=60)
        assert [row[1] for row in pool.run("distributed.jobs:total", 1, timeout=60)] == [3.0, 3.0]


def test_what_a_failed_job_left_behind_does_not_hold_up_the_next_one():
    """A process group with something under way waits for the other ranks when it is destroyed."""
    with RankPool(1) as pool:
        with pytest.raises(UserError, match="left behind"):
            pool.run("distributed.jobs:leave_behind", 40, timeout=60)
        start = time.monotonic()
        for _ in range(2):  # the first of them lets go of the error
            pool.run("distributed.jobs:collect", timeout=60)
        assert time.monotonic() - start < 20


def test_what_a_job_left_behind_is_gone_before_the_next_one(pool):
    """A group of gloo's that lingers wakes a hundred times a second, and a schedule refers to itself."""
    assert pool.run("distributed.jobs:leave_a_cycle", ranks=1, timeout=60) == [False]
    assert pool.run("distributed.jobs:cycle_is_gone", ranks=1, timeout=200) == [True]


def test_a_function_of_the_script_that_was_started_is_refused():
    def job(world): ...

    job.__module__ = "__main__"
    with RankPool(1) as pool, pytest.raises(UserError, match="put it into a module"):
        pool.run(job, timeout=60)


def test_a_file_that_was_cut_short_under_a_rank_is_hinted_at(tmp_path, quick):
    path = tmp_path / "shard"
    path.write_bytes(bytes(10000))
    with (
        RankPool(2) as pool,
        pytest.raises(StageError, match=r"killed by SIGBUS \(a mapped file, such as a data shard"),
    ):
        pool.run("distributed.jobs:read_past_the_end", path)


def test_ranks_print_where_they_are_when_they_are_asked(capfd):
    """`kill -USR2` of the launcher; a rank that prints goes on. Ranks of its own: they print where it does."""
    over = threading.Event()
    with RankPool(2) as pool:
        pool.run("distributed.jobs:total", 0)

        def ask():
            while not over.wait(0.2):
                pool.show_stacks()

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        try:
            pool.run("distributed.jobs:pause", 1.5)
        finally:
            over.set()
            thread.join()
    assert "in pause" in capfd.readouterr().err


def test_workers_die_with_their_launcher(tmp_path):
    script = tmp_path / "launcher.py"
    script.write_text(
        "from slipstream.distributed import RankPool\n"
        "pool = RankPool(1)\n"
        "print(pool.run('distributed.jobs:total', 0)[0][2], flush=True)\n"
        "pool.run('distributed.jobs:stall')\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    launcher = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, env=environment, text=True)
    assert launcher.stdout is not None
    worker = int(launcher.stdout.readline())
    launcher.kill()
    launcher.wait()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and _runs(worker):
        time.sleep(0.05)
    assert not _runs(worker)


def _runs(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_lost_connection_is_not_named_where_a_rank_has_trouble_of_its_own():
    seen = Failure("mistake", UserError("DistNetworkError: [Errno 104] Connection reset by peer"), "")
    cause = Failure("mistake", UserError("ValueError: shapes differ"), "")
    assert str(first_cause([seen, cause])) == "ValueError: shapes differ"
    assert first_cause([seen]) is seen.error


def test_a_rank_that_is_stopped_after_it_was_slow_is_said_to_be_stopped(capfd):
    """One that was late was named without the word that helps, and then never again."""

    class Process:
        pid, is_stopped = 7, False

        def stopped(self) -> bool:
            return self.is_stopped

    answers = import_module("slipstream.distributed.answers")
    process = Process()
    rank = answers._Rank(0, process, time.monotonic() - answers.NOTICE_SECONDS - 1)
    told = []
    for stopped in (False, False, True, True):
        process.is_stopped = stopped
        assert answers._watch([rank], None) == []
        told.append(capfd.readouterr().err)
    assert told[0].endswith("has not been heard for 11 s.\n")
    assert told[2].endswith("`kill -CONT 7` lets it go on.\n")
    assert told[1] == told[3] == ""
