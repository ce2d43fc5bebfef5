"""Damaged input to every reader: a few of each kind here, twenty thousand in all in the slow test (`make fuzz`).

`FOUND` are inputs that once ended in a traceback. They stay.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fuzz.campaign import attempt, seeds_of
from fuzz.targets import TARGETS, Target

QUICK = 8
SEED_ONE, SEED_TWO = 10_000_000, 20_000_000
FOUND = {
    "config files": [SEED_ONE + 186, SEED_ONE + 269],
    "overrides": [3 * SEED_ONE + 2198],
    "command lines": [SEED_ONE + 93, 7 * SEED_ONE + 1156],
    "study files": [3 * SEED_ONE + 251],
    "study results": [3, 14, 27, SEED_ONE + 3],
    "device, penalty and profile files": [5, 60, 105, 7 * SEED_ONE + 289],
    "event logs": [SEED_TWO + 224, 3 * SEED_ONE + 88, 7 * SEED_ONE + 1488, 11 * SEED_ONE + 230],
    "shards": [
        SEED_ONE + 41,
        SEED_ONE + 106,
        SEED_ONE + 112,
        SEED_ONE + 136,
        SEED_ONE + 337,
        7 * SEED_ONE + 644,
    ],
    "texts": [SEED_TWO + 224],
    "checkpoints, resumed": [11 * SEED_ONE + 98],
    "checkpoints": [SEED_ONE + 72, SEED_ONE + 117, 3 * SEED_ONE + 540, 3 * SEED_ONE + 1310],
}
BY_NAME = {target.name: target for target in TARGETS}


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


def check(target: Target, root: Path, seed: int) -> str:
    outcome, details = attempt(target, seeds_of(target, root), root / "work", seed)
    assert outcome in ("accepted", "refused"), f"{target.name}, {seed}: {outcome}\n{details}"
    return outcome


@pytest.mark.parametrize("name", BY_NAME)
def test_damaged_input_is_refused_in_words_or_does_no_harm(name, root):
    for seed in range(QUICK):
        check(BY_NAME[name], root, seed)


@pytest.mark.parametrize(("name", "seed"), [(name, seed) for name, seeds in FOUND.items() for seed in seeds])
def test_what_once_ended_in_a_traceback(name, seed, root):
    check(BY_NAME[name], root, seed)


@pytest.mark.parametrize("name", [name for name in BY_NAME if name not in ("overrides", "command lines")])
def test_what_is_not_damaged_is_accepted(name, root):
    """Else everything would be refused, and nothing tested."""
    whole = BY_NAME[name]

    def change(rng, folder):
        if name in ("config files", "study files"):
            next(folder.glob("*.toml")).rename(folder / "changed.toml")

    whole = Target(whole.name, whole.make, change, whole.use, whole.share, whole.reads_only)
    outcomes = [attempt(whole, seeds_of(whole, root), root / "work", seed) for seed in range(3)]
    assert all(outcome == "accepted" for outcome, _ in outcomes), outcomes


@pytest.mark.slow
def test_twenty_thousand():
    tests = Path(__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(tests)])}
    words = [sys.executable, "-m", "fuzz.campaign", "--inputs", "20000", "--seed", "3"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-8000:]
