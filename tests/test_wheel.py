"""What `python -m build` makes: it says nothing odd, holds what the package needs, and runs outside the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from tests.train.conftest import TINY, make_data

ROOT = Path(__file__).parents[1]
DATA_FILES = (".json", ".toml", ".css", ".js", "py.typed")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from the source archive, which is built from a copy of what the checkout holds."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in files.splitlines():
        if (ROOT / name).is_file() and not name.startswith(("docs/", "studies/")):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "build", "--outdir", str(out), str(source)]
    usual = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(command, env=usual, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    said = [line for line in (done.stdout + done.stderr).splitlines() if "warn" in line.lower()]
    assert said == []
    assert len(list(out.glob("*.tar.gz"))) == 1
    (found,) = out.glob("*.whl")
    return found


@pytest.mark.slow
def test_the_wheel_holds_every_file_of_the_package(wheel):
    package = ROOT / "src" / "slipstream"
    wanted = {
        str(path.relative_to(ROOT / "src"))
        for path in package.rglob("*")
        if path.suffix == ".py" or path.name.endswith(DATA_FILES)
    }
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert held == wanted
    assert "slipstream/py.typed" in held


@pytest.mark.slow
def test_it_trains_outside_the_checkout(wheel, tmp_path):
    site = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site)]
    subprocess.run([*install, str(wheel)], check=True)
    environment = {**os.environ, "PYTHONPATH": str(site)}

    def run(*command: str) -> str:
        done = subprocess.run(
            [sys.executable, *command], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    where = run("-c", "import slipstream; print(slipstream.__file__)").strip()
    assert Path(where).is_relative_to(site)
    settings = [*TINY, f"data.path={make_data(tmp_path / 'data')}", f"run.dir={tmp_path / 'run'}"]
    run("-m", "slipstream", "train", *settings, "train.steps=2", "pipeline.stages=2")
    assert (tmp_path / "run" / "report.html").is_file()
