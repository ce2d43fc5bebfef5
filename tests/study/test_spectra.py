"""The script that compares singular values, on matrices whose values are known."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "studies" / "spectra.py"))


def test_hidden_matrices_of_the_master_alone(tmp_path):
    turn = torch.linalg.qr(torch.randn(3, 3, generator=torch.Generator().manual_seed(0))).Q
    matrix = turn @ torch.diag(torch.tensor([2.0, 1.0, 1.0]))
    folder = tmp_path / "checkpoints" / "step-00000007"
    folder.mkdir(parents=True)
    tensors = {
        "master/layers.0.mlp.up.weight": matrix,
        "master/layers.0.mlp_norm.weight": torch.ones(3),
        "master/embedding.weight": torch.eye(3),
        "banks/7/layers.0.mlp.up.weight": torch.eye(3),
    }
    save_file(tensors, folder / "stage-000.safetensors")
    ((name, norm, largest, rank),) = SCRIPT["spectra"](tmp_path, 7)
    assert name == "layers.0.mlp.up.weight"
    assert (norm, largest, rank) == pytest.approx((6**0.5, 2.0, 1.5), rel=1e-5)


def test_the_table_is_a_mean_over_seeds_of_geometric_means_over_matrices():
    row = SCRIPT["Row"]
    rows = [
        row(optimizer, mode, seed, step, matrix, value, 1.0, 1.0 + seed)
        for optimizer in SCRIPT["OPTIMIZERS"]
        for mode in SCRIPT["MODES"]
        for seed in SCRIPT["SEEDS"]
        for step in SCRIPT["STEPS"]
        for matrix, value in (("a", 2.0), ("b", 8.0))
    ]
    lines = SCRIPT["table"](rows).splitlines()
    assert len(lines) == 2 + 6
    cells = [cell.strip() for cell in lines[2].strip("|").split("|")]
    assert cells[:5] == [
        "adamw",
        "sync",
        "4.00 (4.00 to 4.00)",
        "1.00 (1.00 to 1.00)",
        "2.00 (1.00 to 3.00)",
    ]
