"""Documents out of Hugging Face datasets, streamed, and several sources in one mixture by weight.

A source is named as `NAME[,key=value]...`: a dataset of the hub, a folder, or one of the library's readers (`json`,
`parquet`, `text`) with `files`. Nothing but what is used is downloaded, and no code of a dataset is run.

Law of a mixture: of any beginning of it, every source's bytes are its weight's share to within one document of
each source. It ends where the first source does: what is left of the others would be another mixture.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from slipstream.errors import DataError, install, words_of

Documents = Callable[[], Iterable[str]]  # each call reads them from the start


@dataclass(frozen=True)
class Source:
    """One dataset: where it is, and which of its rows and columns are text."""

    name: str
    config: str | None = None
    split: str = "train"
    field: str = "text"
    files: str | None = None  # for the readers json, parquet, text, csv: a path or pattern
    revision: str | None = None
    weight: float | None = None

    def documents(self) -> Iterator[str]:
        """Every text that is not empty, in the dataset's order."""
        rows = iter(_open(self))
        while True:
            try:
                row = next(rows)
            except StopIteration:
                return
            except Exception as error:  # a library's: the network, a file, a column of another kind
                raise DataError(f"{self} cannot be read: {words_of(error)}") from error
            text = row.get(self.field) if isinstance(row, dict) else None
            if text is None and self.field not in row:
                raise DataError(
                    f"{self} has no column '{self.field}' (it has: {', '.join(list(row)[:8])}). Set field=."
                )
            if text is not None and not isinstance(text, str):
                raise DataError(f"Column '{self.field}' of {self} holds {type(text).__name__}, not text.")
            if text and text.strip():
                yield text.encode("utf-8", "replace").decode()

    def __str__(self) -> str:
        return f"The dataset {self.name}{'' if self.config is None else f' ({self.config})'}"


def parse_source(text: str) -> Source:
    """`Salesforce/wikitext,config=wikitext-103-raw-v1,weight=2`"""
    name, *parts = text.split(",")
    known = [field.name for field in fields(Source) if field.name != "name"]
    given: dict[str, Any] = {}
    for part in parts:
        key, equals, value = part.partition("=")
        if key not in known or not equals or not value:
            raise DataError(f"--dataset {text}: '{part}' is none of {'=, '.join(known)}=.")
        given[key] = value
    if not name:
        raise DataError(f"--dataset {text}: it begins with the dataset's name.")
    if "weight" in given:
        given["weight"] = _weight(text, given["weight"])
    return Source(name, **given)


def _weight(text: str, value: str) -> float:
    try:
        weight = float(value)
    except ValueError:
        weight = 0.0
    if not 0 < weight < float("inf"):
        raise DataError(f"--dataset {text}: weight={value} is not a number above 0.")
    return weight


def check_sources(sources: Sequence[Source]) -> None:
    """Refuse at once what would fail later."""
    if sources and find_spec("datasets") is None:
        raise DataError(f"--dataset reads with `datasets`, which is not installed. {install('datasets')}")


def _open(source: Source) -> Iterable[dict[str, Any]]:
    check_sources([source])
    import datasets

    try:
        return datasets.load_dataset(
            source.name,
            source.config,
            split=source.split,
            data_files=source.files,
            revision=source.revision,
            streaming=True,
        )
    except Exception as error:  # a library's, of what a person named
        raise DataError(f"{source} cannot be opened: {words_of(error)}") from error


def mixed(sources: Sequence[tuple[Documents, float]]) -> Iterator[str]:
    """Texts of all sources, each time of the one that is furthest behind its weight."""
    readers = [iter(documents()) for documents, _ in sources]
    read = [0] * len(sources)
    while True:
        index = min(range(len(sources)), key=lambda i: (read[i] / sources[i][1], i))
        text = next(readers[index], None)
        if text is None:
            return
        read[index] += len(text.encode())
        yield text


def together(files: Documents | None, sources: Sequence[Source]) -> Documents:
    """Files and datasets one after the other; with a weight anywhere, a mixture, where what names none has 1."""
    parts = [] if files is None else [(files, 1.0)]
    parts += [(source.documents, source.weight or 1.0) for source in sources]
    if any(source.weight is not None for source in sources):
        return lambda: mixed(parts)
    return lambda: (text for documents, _ in parts for text in documents())


def limited(documents: Documents, most_bytes: int) -> Iterator[str]:
    """Whole documents, until there are so many bytes."""
    read = 0
    for text in documents():
        if read >= most_bytes:
            return
        read += len(text.encode())
        yield text


@contextmanager
def kept(documents: Documents, folder: Path) -> Iterator[Documents]:
    """`documents`, read from where they come from once: what the first reading gave is in a file of `folder` for the
    later ones, and gone in the end. A stream over a network may be slow, or give something else the next time."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, path = tempfile.mkstemp(prefix=".documents-", dir=folder)
        os.close(handle)
    except OSError as error:
        raise DataError(f"{folder} cannot be written: {error}. Choose another folder for --out.") from error
    complete = False

    def again() -> Iterator[str]:
        nonlocal complete
        if complete:
            with open(path, encoding="utf-8") as file:
                yield from map(json.loads, file)
            return
        with open(path, "w", encoding="utf-8") as file:
            for text in documents():
                file.write(json.dumps(text, ensure_ascii=False) + "\n")
                yield text
        complete = True

    try:
        yield again
    finally:
        Path(path).unlink(missing_ok=True)
