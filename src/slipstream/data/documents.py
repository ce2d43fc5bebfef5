"""Documents out of files: .txt (or .md), .jsonl and .parquet, the first two also as .xz, .gz or .zst.

Text is cut into documents at separator lines; a JSON line or a table row is one document. Empty
documents are left out. Decompression is capped: a small file that unpacks without end is refused.
"""

from __future__ import annotations

import gzip
import io
import lzma
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import IO, Any

from slipstream.errors import DataError, install
from slipstream.formats import parse_json

SEPARATORS = ("form-feed", "blank-line", "line", "none")
_PACKED = (".xz", ".gz", ".zst")
_TEXT = (".txt", ".text", ".md")
_PLAIN = (*_TEXT, ".jsonl", ".parquet")
_KNOWN = ".txt, .md and .jsonl (also with .xz, .gz, .zst), .parquet"
_FREE_BYTES = 64 << 20  # below this size no ratio is suspicious
_ZSTD_BYTES = 1 << 12  # read at a time: four of them may unpack to 128 KiB
_ROWS = 64  # of a table, read at a time


@dataclass(frozen=True)
class Reading:
    """How to cut files into documents.

    `separator`: "form-feed" (a line holding one form feed; a file without any is one document),
    "blank-line", "line" (each line a document) or "none" (each file a document).
    `max_expansion`: refuse a packed file that grows beyond this many times its size.
    """

    separator: str = "form-feed"
    field: str = "text"  # of .jsonl and .parquet
    max_expansion: float = 100.0


def read_documents(paths: Sequence[Path], reading: Reading) -> Iterator[str]:
    """Every non-empty document of the files, in order."""
    for path in paths:
        yield from (text for text in _of_file(path, reading) if text.strip())


def find_files(paths: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """(files to read, files left out): of a folder, everything of a known kind in it, at any depth."""
    found: list[Path] = []
    left_out: list[Path] = []
    for path in paths:
        if not path.is_dir():
            found.append(path)
            continue
        inside = sorted(_files_inside(path))
        known = {file for file in inside if _kind(file) in _PLAIN and file.stat().st_size}
        if not known:
            held = ", ".join(sorted({file.suffix or file.name for file in inside})) or "nothing"
            raise DataError(
                f"The folder {path} holds no text that can be read (it holds: {held}). Known: {_KNOWN}."
            )
        found += (file for file in inside if file in known)
        left_out += [file for file in inside if file not in known]
    return found, left_out


def _files_inside(folder: Path) -> Iterator[Path]:
    """Files that are not hidden, through links to folders as well, each folder once."""
    seen: set[str] = set()
    for place, folders, names in os.walk(folder, followlinks=True):
        if (real := os.path.realpath(place)) in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in names:
            if not name.startswith(".") and (file := Path(place, name)).is_file():
                yield file


def check_inputs(paths: Sequence[Path], reading: Reading) -> None:
    """Refuse at once what would fail after minutes of reading."""
    if reading.separator not in SEPARATORS:
        raise DataError(f"There is no separator '{reading.separator}'. Choose {', '.join(SEPARATORS)}.")
    if not reading.max_expansion >= 1:
        raise DataError(f"--max-expansion is {reading.max_expansion:g}. Set it to 1 or more.")
    for path in paths:
        if not path.is_file():
            what = (
                f"{path} is a folder. Name its files"
                if path.is_dir()
                else f"There is no file {path}. Name text"
            )
            raise DataError(f"{what}: {_KNOWN}.")
        if path.stat().st_size == 0:
            raise DataError(f"{path} is empty.")
        if _kind(path) not in _PLAIN:
            raise DataError(f"{path} is of an unknown kind. Known: {_KNOWN}.")


def _kind(path: Path) -> str:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in _PACKED:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def _of_file(path: Path, reading: Reading) -> Iterator[str]:
    if _kind(path) == ".parquet":
        yield from _of_parquet(path, reading)
        return
    try:
        with _open_binary(path) as raw:
            capped = _Capped(raw, path, reading.max_expansion)
            lines = io.TextIOWrapper(io.BufferedReader(capped, 1 << 20), encoding="utf-8-sig")
            if _kind(path) == ".jsonl":
                yield from _of_json_lines(path, lines, reading.field)
            else:
                yield from _of_text(lines, reading.separator)
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 ({error}). Convert it first.") from error
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}. It may be cut short or of another kind.") from error


def _open_binary(path: Path) -> IO[bytes]:
    match path.suffix.lower():
        case ".xz":
            return lzma.open(path)
        case ".gz":
            return gzip.open(path)  # pyrefly: ignore[bad-return]
        case ".zst":
            return io.BufferedReader(_Zstandard(path), 1 << 20)
    return path.open("rb")


def _optional(module: str, path: Path) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise DataError(f"Reading {path} needs `{module}`. {install('data')}") from error


class _Zstandard(io.RawIOBase):
    """The frames of a .zst file, one after the other. One that does not end, which the library accepts, is an error."""

    def __init__(self, path: Path) -> None:
        library = _optional("zstandard", path)
        self._new = library.ZstdDecompressor(max_window_size=1 << 27).decompressobj
        self._error = library.ZstdError
        self._file = path.open("rb")
        self._frame: Any = None
        self._packed, self._ready = b"", b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            self._packed = self._packed or self._file.read(_ZSTD_BYTES)
            if not self._packed:
                if self._frame is not None:
                    raise EOFError("a frame does not end")
                return 0
            self._frame = self._frame or self._new()
            try:
                self._ready = self._frame.decompress(self._packed)
            except self._error as error:
                raise EOFError(str(error)) from error
            self._packed = self._frame.unused_data
            if self._frame.eof:
                self._frame = None
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


def _limit(path: Path, max_expansion: float) -> float:
    return max(_FREE_BYTES, max_expansion * path.stat().st_size)


def _too_large(path: Path, limit: float) -> DataError:
    return DataError(
        f"{path} unpacks to more than {limit:.0f} bytes from {path.stat().st_size}. "
        "If that is meant, raise --max-expansion."
    )


class _Capped(io.RawIOBase):
    """A readable stream that refuses to grow beyond `max_expansion` times the file."""

    def __init__(self, inner: IO[bytes], path: Path, max_expansion: float) -> None:
        self.inner, self.path = inner, path
        self.limit = _limit(path, max_expansion)
        self.count = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self.inner.read(len(buffer))
        buffer[: len(data)] = data
        self.count += len(data)
        if self.count > self.limit:
            raise _too_large(self.path, self.limit)
        return len(data)


def _of_text(lines: Iterator[str] | io.TextIOWrapper, separator: str) -> Iterator[str]:
    boundary = {"form-feed": "\f", "blank-line": ""}.get(separator)
    held: list[str] = []
    for line in lines:
        if separator == "line":
            yield line.rstrip("\n")
        elif boundary is not None and line.rstrip("\n") == boundary:
            yield "".join(held).removesuffix("\n")
            held = []
        else:
            held.append(line)
    yield "".join(held)


def _of_json_lines(path: Path, lines: io.TextIOWrapper, field: str) -> Iterator[str]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = parse_json(line)
        except ValueError as error:
            # Also a number of thousands of digits, or endless brackets.
            raise DataError(f"{path}, line {number} is not JSON: {error}.") from error
        text = record.get(field) if isinstance(record, dict) else None
        if not isinstance(text, str) and isinstance(record, dict) and field in record:
            raise DataError(f"{path}, line {number} holds {type(text).__name__} under '{field}', not text.")
        if not isinstance(text, str):
            keys = ", ".join(list(record)[:8]) if isinstance(record, dict) else type(record).__name__
            raise DataError(
                f"{path}, line {number} has no text under '{field}' (it has: {keys}). Set --field."
            )
        # JSON may escape half a surrogate pair, which no encoding of text can hold.
        yield text.encode("utf-8", "replace").decode()


def _of_parquet(path: Path, reading: Reading) -> Iterator[str]:
    parquet = _optional("pyarrow.parquet", path)
    arrow = import_module("pyarrow")
    field, limit, count = reading.field, _limit(path, reading.max_expansion), 0
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if field not in names:
                raise DataError(
                    f"{path} has no column '{field}' (it has: {', '.join(names[:8])}). Set --field."
                )
            for batch in file.iter_batches(batch_size=_ROWS, columns=[field]):
                count += batch.nbytes
                if count > limit:
                    raise _too_large(path, limit)
                for text in batch.column(0).to_pylist():
                    if text is not None and not isinstance(text, str):
                        raise DataError(f"Column '{field}' of {path} holds {type(text).__name__}, not text.")
                    yield text or ""
    except UnicodeDecodeError as error:
        raise DataError(f"Column '{field}' of {path} is not UTF-8 ({error}). Convert it first.") from error
    except (OSError, arrow.ArrowException) as error:
        raise DataError(f"{path} cannot be read: {error}. It may be cut short or of another kind.") from error
