"""A Python object of the user's own: "package.module:name" or "path/file.py:name"; also of the working folder."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

from slipstream.errors import UserError


def check_place(key: str, place: str) -> None:
    """Refuse a place that cannot be right, without importing anything of it."""
    where, name = _parts(key, place)
    if where.endswith(".py"):
        found = Path(where).is_file()
    else:
        _search_here()
        try:  # of a module in a package the package is imported, which may fail in any way
            found = importlib.util.find_spec(where) is not None
        except (ImportError, ValueError):
            found = False
    if not found:
        raise UserError(
            f"{key} = '{place}': there is no {'file' if where.endswith('.py') else 'module'} '{where}'. Name one that "
            f"can be imported in {os.getcwd()}, for example my_model:{name}."
        )


def fetch(key: str, place: str) -> Any:
    """The object itself; its module is imported."""
    where, name = _parts(key, place)
    module = _from_file(Path(where)) if where.endswith(".py") else _imported(key, place, where)
    try:
        return getattr(module, name)
    except AttributeError:
        known = [word for word in vars(module) if not word.startswith("_")]
        raise UserError(
            f"{key} = '{place}': '{where}' has no '{name}'. It has {', '.join(known[:12])}."
        ) from None


def _parts(key: str, place: str) -> tuple[str, str]:
    where, colon, name = place.rpartition(":")
    if not colon or not where or not name.isidentifier():
        raise UserError(f"{key} = '{place}' is not MODULE:NAME. Write for example my_model:layers.")
    return where, name


def _imported(key: str, place: str, where: str) -> Any:
    _search_here()
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError as error:
        raise UserError(f"{key} = '{place}' cannot be imported: {error}.") from error


def _from_file(path: Path) -> Any:
    """Imported once, under the file's own name, so that what it defines can be found again by pickle and by name."""
    name = path.stem
    if name in sys.modules and getattr(sys.modules[name], "__file__", None) == str(path.resolve()):
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if spec is None or spec.loader is None or not path.is_file():
        raise UserError(f"There is no Python file '{path}'.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _search_here() -> None:
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
