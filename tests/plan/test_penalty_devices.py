"""The token penalty table and the device presets: matching, replacing, refusing."""

from __future__ import annotations

import json
import math

import pytest

from slipstream.errors import UserError
from slipstream.plan.devices import GIB, PRESETS, Cluster, find_device
from slipstream.plan.penalty import Penalty, find_penalty, load_penalties


def test_the_package_table_names_its_sources_and_orders_corrections():
    table = load_penalties()
    assert all(entry.source and entry.penalty >= 1.0 for entry in table)
    for optimizer, size in (("muon", 4.2e7), ("adamw", 4.2e7)):
        plain = find_penalty(table, optimizer, "none", 16384, size).penalty
        corrected = find_penalty(table, optimizer, "error_feedback", 16384, size).penalty
        started = find_penalty(table, optimizer, "error_feedback+sync_start", 16384, size).penalty
        assert plain > corrected > started > 1.0


def test_the_nearest_batch_and_model_are_taken():
    table = [Penalty("muon", "none", 1.0 + n / 10, 10.0**n, 1e6) for n in range(3, 7)]
    assert find_penalty(table, "muon", "none", 2e4, 1e6).batch_tokens == 1e4
    assert find_penalty(table, "muon", "none", 1e9, 1e6).batch_tokens == 1e6


def test_a_missing_entry_is_an_error_that_lists_what_there_is():
    with pytest.raises(UserError, match="muon with error_feedback"):
        find_penalty(load_penalties(), "ademamix", "none", 1e6, 1e9)


def test_a_users_table_replaces_ours(tmp_path):
    path = tmp_path / "mine.json"
    entry = {"optimizer": "muon", "correction": "none", "batch_tokens": 1, "parameters": 1, "penalty": 1.5}
    path.write_text(json.dumps({"entries": [entry]}))
    assert load_penalties(path)[0].penalty == 1.5
    path.write_text(json.dumps({"entries": [{**entry, "penalty": 0.9}]}))
    with pytest.raises(UserError, match="at least 1"):
        load_penalties(path)
    path.write_text(json.dumps({"entries": [{**entry, "penalty": float("inf")}]}))
    with pytest.raises(UserError, match="at least 1"):
        load_penalties(path)
    for bad in (b"{", b'{"entries": [{"optimizer": "x"}]}', b"[]"):
        path.write_bytes(bad)
        with pytest.raises(UserError, match="expected form"):
            load_penalties(path)
    with pytest.raises(UserError, match="cannot be read"):
        load_penalties(tmp_path / "none.json")


def test_a_table_that_is_none_is_named(tmp_path):
    path = tmp_path / "table.json"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="cannot be read"):
        load_penalties(path)
    entry = {
        "optimizer": "muon",
        "correction": "none",
        "penalty": 1.1,
        "batch_tokens": math.nan,
        "parameters": 1,
    }
    path.write_text(json.dumps({"entries": [entry]}))
    with pytest.raises(UserError, match="out of range"):
        load_penalties(path)


def test_presets_are_plausible_and_sourced():
    for device in PRESETS.values():
        assert device.source != "given by the user"
        assert 0 < device.room_bytes < (device.memory_bytes or 0)
        assert device.inter_bandwidth <= device.intra_bandwidth
        assert 0 < device.efficiency < 1


def test_figures_can_be_replaced_and_wrong_ones_are_refused():
    assert find_device("h100", memory_bytes=40 * GIB).memory_bytes == 40 * GIB
    assert find_device("h100", inter_latency=0.0).inter_latency == 0.0
    with pytest.raises(UserError, match="efficiency must be above 0"):
        find_device("h100", efficiency=0.0)
    with pytest.raises(UserError, match="Did you mean 'h100'"):
        find_device("h10")
    with pytest.raises(UserError, match="at least 1 device"):
        Cluster(PRESETS["h100"], 0)


def test_a_device_file(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("peak_flops = 1e14\nmemory_bytes = 2e10\n")
    assert find_device(str(path)).name == "mine"
    path.write_text("peak_flops = 1e14\n")
    with pytest.raises(UserError, match="no memory figure"):
        _ = find_device(str(path)).room_bytes
    path.write_text("peak_flop = 1e14\n")
    with pytest.raises(UserError, match="Did you mean 'peak_flops'"):
        find_device(str(path))
    path.write_text("memory_bytes = 1e9\n")
    with pytest.raises(UserError, match="peak_flops is missing"):
        find_device(str(path))
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="not valid TOML"):
        find_device(str(path))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('peak_flops = "fast"', "peak_flops must be above 0, not 'fast'"),
        ("peak_flops = -1e14", "peak_flops must be above 0"),
        ("peak_flops = nan", "peak_flops must be above 0"),
        ('peak_flops = 1e14\nmemory_bytes = "80"', "memory_bytes must be above 0, not '80'"),
        ("peak_flops = 1e14\nper_node = 0", "per_node must be a whole number above 0"),
        ("peak_flops = 1e14\nefficiency = 45", "efficiency must be above 0 and at most 1, not 45"),
        ("peak_flops = 1e14\ninter_latency = -1", "inter_latency must be 0 or more"),
        ("peak_flops = 1e14\nname = 3", "name must be a text"),
    ],
)
def test_a_device_file_with_a_wrong_figure_says_which(tmp_path, line, words):
    path = tmp_path / "mine.toml"
    path.write_text(line)
    with pytest.raises(UserError, match=words):
        find_device(str(path))
