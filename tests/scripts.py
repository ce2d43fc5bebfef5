"""The scripts of studies/ as modules: they are started by name, not installed."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

STUDIES = Path(__file__).parents[1] / "studies"


@contextmanager
def loaded(name: str) -> Iterator[ModuleType]:
    """Known by its name inside, so that its dataclasses and processes find it."""
    spec = importlib.util.spec_from_file_location(name, STUDIES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        del sys.modules[name]
