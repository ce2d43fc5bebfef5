"""The import law: which layer may import which, read from the source with ast.

Also: what must start without torch never imports it at the top of a module.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "src" / "slipstream"

# layer -> what it may import of this package. A dotted name allows one module of a layer only.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "formats": set(),
    "torch_late": set(),
    "torch_private": {"torch_late"},
    "cuda_graphs": set(),
    "kernels": set(),
    "lists": {"kernels", "torch_private"},
    "schedule": {"errors"},
    "models": {"formats", "errors", "torch_private"},
    "optimizers": {"errors"},
    "optim": {
        "optimizers",
        "errors",
        "cuda_graphs",
        "kernels",
        "lists",
        "torch_late",
        "torch_private",
        "distributed.groups",
    },
    "data": {"formats", "errors"},
    "distributed": {"errors", "torch_private"},
    "pipeline": {
        "schedule",
        "optim",
        "distributed",
        "errors",
        "cuda_graphs",
        "kernels",
        "lists",
        "torch_late",
        "torch_private",
    },
    "metrics": {"formats", "schedule", "models.sizes", "errors"},
    "plan": {"formats", "schedule", "models.cut", "models.sizes", "errors"},
    "config": {"formats", "schedule", "models.cut", "models.sizes", "optimizers", "errors"},
    "train": {
        "formats",
        "pipeline",
        "models",
        "optim",
        "data",
        "metrics",
        "distributed",
        "config",
        "schedule",
        "optimizers",
        "errors",
        "torch_private",
    },
    "torchtitan": {"pipeline", "optim", "schedule", "errors"},
    "study": {
        "formats",
        "train",
        "data",
        "metrics",
        "plan",
        "config",
        "schedule",
        "errors",
        # `study/adaptive.py` holds corrections that only a study names
        "optim.corrections",
        "lists",
    },
    "bench": {
        "formats",
        "pipeline",
        "schedule",
        "models",
        "optim",
        "distributed",
        "errors",
        "lists",
        "torch_private",
        "plan",  # `bench/profile.py` measures what the planner predicts from
        # `bench train` measures the trainer itself
        "train",
        "config",
        "data",
        "metrics",
        "study.statistics",  # intervals over the seeds of a race
    },
}
FREE = {"cli", "__init__", "__main__"}  # these may import everything
WITHOUT_TORCH = (
    "formats",
    "schedule",
    "plan",
    "metrics",
    "cli",
    "config",
    "errors",
    "models/cut",
    "models/sizes",
    "optimizers",
)


def modules() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def layer_of(path: Path) -> str:
    return path.relative_to(ROOT).with_suffix("").parts[0]


def imported(path: Path, root: Path = ROOT) -> set[str]:
    """Modules of this package that `path` imports anywhere, without the leading `slipstream.`."""
    package = ("slipstream", *path.relative_to(root).parent.parts)
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (base, node.module or "")))
            found |= {f"{module}.{alias.name}" for alias in node.names}
    return {name.removeprefix("slipstream.") for name in found if name.startswith("slipstream.")}


def violations(layer: str, names: set[str]) -> list[str]:
    """The imports in `names` that `layer` must not make; `__version__` is no layer."""
    allowed = ALLOWED[layer] | {layer, "__version__"}
    return sorted(
        name for name in names if not any(name == good or name.startswith(f"{good}.") for good in allowed)
    )


def test_every_layer_has_a_rule() -> None:
    assert {layer_of(path) for path in modules()} <= set(ALLOWED) | FREE


@pytest.mark.parametrize("layer", sorted(ALLOWED))
def test_layer_imports_only_what_it_may(layer: str) -> None:
    broken = {
        str(path.relative_to(ROOT)): bad
        for path in modules()
        if layer_of(path) == layer and (bad := violations(layer, imported(path)))
    }
    assert not broken, f"{layer} may import {sorted(ALLOWED[layer])}, but: {broken}"


@pytest.mark.parametrize(
    ("where", "line", "bad"),
    [
        ("schedule/a.py", "from slipstream.pipeline import runtime", ["pipeline.runtime"]),
        ("schedule/a.py", "def f():\n    import slipstream.optim.muon", ["optim.muon"]),
        ("schedule/a.py", "from ..models import sizes", ["models.sizes"]),
        ("schedule/a.py", "from . import actions\nfrom slipstream.errors import UserError", []),
        ("metrics/a.py", "from slipstream.models.sizes import PRESETS", []),
        ("metrics/a.py", "from slipstream.models.llama import Llama", ["models.llama.Llama"]),
        ("metrics/a.py", "from slipstream import models", ["models"]),
        ("errors.py", "from slipstream import schedule", ["schedule"]),
    ],
)
def test_the_test_sees_what_it_should(where: str, line: str, bad: list[str], tmp_path: Path) -> None:
    path = tmp_path / where
    path.parent.mkdir(exist_ok=True)
    path.write_text(line)
    layer = Path(where).with_suffix("").parts[0]
    assert violations(layer, imported(path, tmp_path)) == bad


def test_no_torch_at_the_top_where_it_must_start_quickly() -> None:
    for path in modules():
        if str(path.relative_to(ROOT).with_suffix("")).startswith(WITHOUT_TORCH):
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                else:
                    names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                assert not any(name.split(".")[0] == "torch" for name in names), f"{path} imports torch"


@pytest.mark.parametrize(
    "module", ["slipstream.schedule", "slipstream.cli.schedule", "slipstream.schedule.plot"]
)
def test_schedules_load_neither_torch_nor_plotly(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules or 'plotly' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


SLOW = (
    "torch._dynamo",
    "torch.distributed.tensor",
    "torch.distributed.pipelining",
    "torch.distributed.fsdp",
)
PLAIN_RUN = f"""
import sys
from slipstream.cli import main
sys.argv = ["slipstream", "train", *sys.argv[1:]]
try:
    main()
finally:
    print("slow:", [name for name in {SLOW} if name in sys.modules])
"""


def test_a_run_that_needs_neither_compiler_nor_shards_does_not_import_them(tmp_path: Path) -> None:
    """They take as long as the rest of torch."""
    tiny = [
        "model.dim=32",
        "model.layers=1",
        "model.ffn=32",
        "data.sequence=8",
        "train.steps=1",
        "train.eval_batches=1",
    ]
    command = [
        sys.executable,
        "-c",
        PLAIN_RUN,
        *tiny,
        "train.report=false",
        "pipeline.schedule=emulate",
        f"run.dir={tmp_path / 'run'}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "slow: []", done.stdout + done.stderr
