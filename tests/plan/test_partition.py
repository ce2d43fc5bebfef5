"""The partition against brute force."""

from __future__ import annotations

from itertools import combinations, pairwise
from math import inf

from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.plan.partition import partition


def every_cut(layers: int, stages: int):
    for inner in combinations(range(1, layers), stages - 1):
        edges = [0, *inner, layers]
        yield [range(a, b) for a, b in pairwise(edges)]


@settings(max_examples=150, deadline=None)
@given(data=st.data(), weights=st.lists(st.integers(1, 20), min_size=1, max_size=9))
def test_no_cut_beats_it(data, weights):
    layers = len(weights)
    stages = data.draw(st.integers(1, layers))
    first, last = data.draw(st.integers(0, 30)), data.draw(st.integers(0, 30))
    limit = data.draw(st.sampled_from([inf, 25.0, 12.0]))
    speed = data.draw(st.lists(st.integers(1, 3), min_size=stages, max_size=stages))

    def cost(stage: int, i: int, j: int) -> float:
        if i >= j:
            return inf
        total = sum(weights[i:j]) + (first if i == 0 else 0) + (last if j == layers else 0)
        return float(total * speed[stage]) if total <= limit else inf

    def key(cut):
        values = [cost(s, layers.start, layers.stop) for s, layers in enumerate(cut)]
        return max(values), sum(value * value for value in values)

    found = partition(layers, stages, cost)
    best = min(map(key, every_cut(layers, stages)))
    if best[0] == inf:
        assert found is None
    else:
        assert found is not None
        assert [layer for part in found for layer in part] == list(range(layers))
        assert key(found) == best


def test_more_stages_than_layers_is_no_cut():
    assert partition(3, 4, lambda *_: 1.0) is None


def test_a_limit_leaves_only_cuts_below_it():
    def cost(_: int, i: int, j: int) -> float:
        return float(j - i)

    assert partition(6, 3, cost, limit=1.9) is None
    assert partition(6, 3, cost, limit=2.0) == [range(2), range(2, 4), range(4, 6)]


def test_a_heavy_head_makes_the_last_stage_shorter():
    cut = partition(12, 4, lambda _, i, j: (j - i) + (2.0 if j == 12 else 0.0) if i < j else inf)
    assert cut is not None
    assert len(cut[-1]) == 2
    assert sorted(len(part) for part in cut[:-1]) == [3, 3, 4]
