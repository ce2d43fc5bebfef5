"""Cuts against all others there are: by brute force."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.errors import UserError
from slipstream.models.cut import QUICK_HEAD, WORTH_CUTTING_A_LAYER, Layers, balanced, measured_cut, split
from slipstream.models.sizes import PRESETS, ModelConfig, attention_flops, head_cost, layer_cost

TINY = ModelConfig(vocab=64, dim=32, layers=3, heads=4, kv_heads=2, ffn=48, tied=False)


def every_cut(layers, stages, step=1):
    """Into non-empty stages, at layers, or with step 2 at halves of them."""
    inner = [edge / step for edge in range(1, step * layers)]
    return [
        [Layers(a, b) for a, b in pairwise([0, *edges, layers])] for edges in combinations(inner, stages - 1)
    ]


def times(cut, attention, layer, first=0.0, last=0.0):
    found = [
        sum(layer * (attention * a + (1 - attention) * b) for a, b in part.halves().values()) for part in cut
    ]
    found[0] += first
    found[-1] += last
    return found


@settings(max_examples=60, deadline=None)
@given(
    layers=st.integers(1, 6),
    stages=st.integers(1, 6),
    vocab=st.sampled_from([8, 500, 5000]),
    whole=st.booleans(),
)
def test_split_is_the_best_contiguous_one(layers, stages, vocab, whole):
    config = replace(TINY, layers=layers, vocab=vocab)
    if stages > layers:
        with pytest.raises(UserError, match="stages"):
            split(config, stages)
        return

    def costliest(cut, share=1.0):
        layer, head = layer_cost(config, 64).forward_flops, head_cost(config).forward_flops
        return max(times(cut, attention_flops(config, 64) / layer, layer, 0.0, share * head))

    found = split(config, stages, sequence=64, whole_layers=whole)
    assert [found[0].start, found[-1].stop] == [0, layers]
    assert all(a.stop == b.start for a, b in pairwise(found))
    by_layer = min(map(costliest, every_cut(layers, stages)))
    within = min(map(costliest, every_cut(layers, stages, 2)))
    if all(isinstance(part.start, int) for part in found):
        assert costliest(found) == pytest.approx(by_layer)
        return
    assert not whole
    assert costliest(found) == pytest.approx(within)
    assert within <= (1 - WORTH_CUTTING_A_LAYER) * by_layer * (1 + 1e-9)
    # And still where the head is quicker than its FLOPs.
    others = split(config, stages, sequence=64, whole_layers=True)
    assert costliest(found, QUICK_HEAD) <= (1 - WORTH_CUTTING_A_LAYER) * costliest(others, QUICK_HEAD) * (
        1 + 1e-9
    )


@settings(max_examples=100, deadline=None)
@given(data=st.data(), layers=st.integers(2, 6), layer=st.sampled_from([0.5, 1.0, 3.0]), whole=st.booleans())
def test_a_cut_by_measured_times_is_the_best_contiguous_one(data, layers, layer, whole):
    """Of times that are so much a layer, an embedding and a head: found again from the times alone."""
    stages = data.draw(st.integers(2, min(4, layers)))
    attention = data.draw(st.sampled_from([0.25, 0.5]))
    last = data.draw(st.sampled_from([0.0, 0.25, 2.0, 7.5]))
    first = data.draw(st.sampled_from([0.0, 0.25, 1.5])) if stages > 2 else 0.0
    candidates = every_cut(layers, stages, 1 if whole else 2)

    def costliest(cut):
        return max(times(cut, attention, layer, first, last))

    now = data.draw(st.sampled_from(candidates))
    boundaries, left = measured_cut(times(now, attention, layer, first, last), now, attention, whole)
    found = [Layers(a, b) for a, b in pairwise([0, *boundaries, layers])]
    best, by_layer = min(map(costliest, candidates)), min(map(costliest, every_cut(layers, stages)))
    if best > (1 - WORTH_CUTTING_A_LAYER) * by_layer:
        best = min(by_layer, costliest(now))
    assert costliest(found) == pytest.approx(best)
    assert left == pytest.approx(best / costliest(now))
    if left == 1:
        assert found == now


def test_one_stage_has_no_cut():
    assert measured_cut([3.0], [Layers(0, 4)], 0.5) == ([], 1.0)


def test_parts_are_even_where_that_costs_nothing():
    assert balanced([1, 1, 1, 1], 2) == [0, 2, 4]
    assert balanced([9, 1, 1, 1], 2) == [0, 1, 4]
    assert balanced([1, 1, 1, 9], 3) == [0, 2, 3, 4]
    assert balanced([5], 1) == [0, 1]
    assert balanced([1] * 7 + [3], 4) == [0, 3, 5, 7, 8]
    assert balanced([1] * 10, 4) == [0, 3, 6, 8, 10]  # longer ones first
    assert balanced([0, 0, 0], 3) == [0, 1, 2, 3]


def test_few_layers_to_a_stage_are_cut_inside_a_layer():
    """Eight layers and a head of 2.3 of them on four stages: 2.85 layers instead of 3.28."""
    config = PRESETS["llama-42m"]
    assert [part.stop for part in split(config, 4)] == [2.5, 5, 7.5, 8]
    assert [part.stop for part in split(config, 4, whole_layers=True)] == [3, 5, 7, 8]


def test_a_head_that_is_quicker_than_its_flops_does_not_make_a_cut_worse():
    """The default model on two stages: [3.5] is 4 % better by FLOPs, and was measured to take 11 % longer."""
    assert [part.stop for part in split(PRESETS["cpu-default"], 2, sequence=128)] == [3, 4]


def test_halves_of_layers():
    assert Layers(0, 2).halves() == {0: (True, True), 1: (True, True)}
    assert Layers(1.5, 2.5).halves() == {1: (False, True), 2: (True, False)}
    assert Layers(1, 1.5).halves() == {1: (True, False)}
    assert Layers(1.5, 2).halves() == {1: (False, True)}


def test_wrong_boundaries_say_what_to_change():
    assert split(TINY, 2, [1]) == [(0, 1), (1, 3)]
    assert split(TINY, 3, [0.5, 2.5]) == [(0, 0.5), (0.5, 2.5), (2.5, 3)]
    assert len(split(TINY, 5, [0.5, 1, 2, 2.5])) == 5, "more than there are layers"
    for boundaries in ([], [0], [3], [1, 2], [2, 1], [1.25]):
        with pytest.raises(UserError, match=r"boundaries.* inside layer 2"):
            split(TINY, 2, boundaries)
