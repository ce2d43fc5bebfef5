"""Prepared folders: nothing of the text is lost, the split is by document, bad input is named."""

from __future__ import annotations

import gzip
import json
import lzma
import random
import re
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from slipstream.cli import main
from slipstream.data import documents as documents_module
from slipstream.data.documents import Reading, check_inputs, find_files, read_documents
from slipstream.data.prepare import Recipe, _heeding_signals, _scan, prepare
from slipstream.data.shards import find_shards, open_shard
from slipstream.data.split import place_of
from slipstream.data.tokenizer import SMALLEST_VOCAB, Tokenizer, without_long_words
from slipstream.errors import DataError, UserError

RUNS = re.compile(r"[^\W_]+|(?:[^\w\s]|_)+|\s+")
TEXTS = [f"Title {i}\nnaïve — text № {i}, again and again.\n  indented {'x' * i}" for i in range(40)]


def decoded(folder, split):
    """The documents a folder holds, decoded."""
    tokenizer = Tokenizer.load(folder)
    stream = np.concatenate([open_shard(path) for path in find_shards(folder, split)]).tolist()
    assert stream[-1] == tokenizer.end_of_document
    texts, held = [], []
    for token in stream:
        if token == tokenizer.end_of_document:
            texts.append(tokenizer.decode(held))
            held = []
        else:
            held.append(token)
    return texts


def test_every_document_is_in_exactly_one_split_as_it_was(tmp_path):
    recipe = Recipe(vocab=300, valid_fraction=0.2, shard_tokens=200)
    meta = prepare(lambda: TEXTS, tmp_path / "out", recipe)
    train, valid = decoded(tmp_path / "out", "train"), decoded(tmp_path / "out", "valid")
    assert sorted(train + valid) == sorted(TEXTS)
    assert 2 <= len(valid) <= 16
    assert meta["documents"] == {"train": len(train), "valid": len(valid)}
    assert meta["bytes"] == sum(len(text.encode()) for text in TEXTS)
    shards = find_shards(tmp_path / "out", "train")
    assert len(shards) > 2
    assert all(len(open_shard(path)) == 200 for path in shards[:-1])
    assert meta["tokens"]["train"] == sum(len(open_shard(path)) for path in shards)


def test_the_split_depends_on_the_texts_alone(tmp_path):
    prepare(lambda: TEXTS, tmp_path / "a", Recipe(vocab=280, valid_fraction=0.2))
    prepare(lambda: TEXTS[::-1], tmp_path / "b", Recipe(vocab=280, valid_fraction=0.2))
    assert sorted(decoded(tmp_path / "a", "valid")) == sorted(decoded(tmp_path / "b", "valid"))


def test_what_is_validated_on_is_not_trained_on_as_well(tmp_path):
    """Validation files that repeat documents of the input: those are for validation alone."""
    meta = prepare(lambda: TEXTS, tmp_path / "out", Recipe(vocab=280), valid=lambda: [*TEXTS[30:], "new"])
    assert decoded(tmp_path / "out", "train") == TEXTS[:30]
    assert decoded(tmp_path / "out", "valid") == [*TEXTS[30:], "new"]
    assert meta["documents"] == {"train": 30, "valid": 11}


def test_what_cannot_work_is_said_before_anything_is_read(tmp_path):
    def unread():
        raise AssertionError("it was read")

    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    for out, recipe, words in (
        (tmp_path / "out", Recipe(vocab=100), "100 cannot hold all bytes"),
        (tmp_path / "out", Recipe(tokenizer=tmp_path / "gone.json"), "no tokenizer"),
        (tmp_path / "file" / "out", Recipe(), "cannot be written"),
        (tmp_path / "loop", Recipe(), "leads back to itself"),
    ):
        with pytest.raises(UserError, match=words):
            prepare(unread, out, recipe)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "loop"]


def test_a_folder_that_none_can_take_the_place_of_is_refused_before_anything_is_read(tmp_path, monkeypatch):
    def unread():
        raise AssertionError("it was read")

    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(UserError, match=r"\. is where you stand.* Name one inside"):
        prepare(unread, Path("."), Recipe())
    (tmp_path / "volume").mkdir()
    monkeypatch.setattr("os.path.ismount", lambda path: Path(path).name == "volume")
    with pytest.raises(UserError, match=r"volume is a mount.* Name one inside"):
        prepare(unread, tmp_path / "volume", Recipe())


def test_two_documents_are_enough_and_one_is_not(tmp_path):
    meta = prepare(lambda: TEXTS[:2], tmp_path / "two", Recipe(vocab=257, valid_fraction=0.0))
    assert meta["documents"] == {"train": 1, "valid": 1}
    for tiny in (["w"], ["a", "b"]):
        with pytest.raises(DataError, match="text is too short"):
            prepare(lambda texts=tiny: texts, tmp_path / "one", Recipe(vocab=257))
    with pytest.raises(DataError, match="single document"):
        prepare(lambda: TEXTS[:1], tmp_path / "one", Recipe(vocab=257, valid_fraction=0.0))
    with pytest.raises(DataError, match="no text"):
        prepare(list, tmp_path / "none", Recipe(vocab=257))
    with pytest.raises(DataError, match="valid-fraction"):
        prepare(lambda: TEXTS, tmp_path / "all", Recipe(vocab=257, valid_fraction=1.0))
    meta = prepare(lambda: TEXTS[:1], tmp_path / "named", Recipe(vocab=257), valid=lambda: TEXTS[1:3])
    assert meta["documents"] == {"train": 1, "valid": 2}


def test_long_documents_are_cut_only_for_encoding(tmp_path, monkeypatch):
    monkeypatch.setattr("slipstream.data.prepare._PIECE_CHARACTERS", 50)
    monkeypatch.setattr("slipstream.data.prepare._BATCH_CHARACTERS", 300)
    texts = ["word " * 100, "line\n" * 100, "é" * 333, "short"]
    prepare(lambda: texts, tmp_path / "out", Recipe(vocab=280, valid_fraction=0.01))
    assert sorted(decoded(tmp_path / "out", "train") + decoded(tmp_path / "out", "valid")) == sorted(texts)


def test_the_sample_for_the_tokenizer_is_bounded(tmp_path):
    texts = [f"{i:04d} " * 50 for i in range(100)]
    seen = []
    original = Tokenizer.train.__func__

    def spy(cls, sample, vocab):
        seen.extend(sample)
        return original(cls, seen, vocab)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tokenizer, "train", classmethod(spy))
        prepare(lambda: texts, tmp_path / "out", Recipe(vocab=257, sample_bytes=2000))
    assert 1000 < sum(map(len, seen)) <= 2000


@pytest.mark.parametrize("fraction", [None, 0.1, 0.5])
def test_the_sample_is_of_training_documents(tmp_path, fraction):
    """Also where it is smaller than what is validated on; and as large as it was asked for."""
    texts = [f"{i:04d} " * 50 for i in range(400)]
    recipe = Recipe(vocab=257, sample_bytes=2500, valid_fraction=fraction)
    scan = _scan(lambda: texts, None, recipe, lambda *_: None)
    sampled = {split for text in scan.sample for split, _ in scan.split.parts(text, place_of(text))}
    assert sampled == {"train"}
    assert len(scan.sample) == 10


def book(lines):
    return "".join(f"{number} is the number of this line, and there is no other\n" for number in range(lines))


def scanned(texts, **recipe):
    return _scan(lambda: texts, None, Recipe(vocab=257, **recipe), lambda *_: None)


def test_a_document_longer_than_the_sample_is_sampled_in_pieces():
    """It neither drives all others out and then goes itself, nor is held whole."""
    texts = [book(20_000), *(f"{i} is small\n" * 30 for i in range(6))]
    wanted = 300_000
    found = scanned(texts, sample_bytes=wanted)
    assert wanted / 2 <= sum(map(len, found.sample)) <= wanted
    assert all(any(part in text for text in texts) for part in found.sample)


@pytest.mark.parametrize("fraction", [0.0, 0.001, None])
@pytest.mark.parametrize("last", [False, True])
def test_a_book_that_is_validated_on_drives_no_training_text_out(fraction, last):
    """Its hash is the least, so it is for validation, or its end is; that is known once all has been read."""
    whole = min((f"{edition}\n{book(20_000)}" for edition in range(30)), key=place_of)
    small = [text for text in (f"{i} is small\n" * 90 for i in range(60)) if place_of(text) > place_of(whole)]
    assert len(small) > 20
    assert place_of(whole) > 0.001
    found = scanned(
        [*small, whole] if last else [whole, *small], sample_bytes=300_000, valid_fraction=fraction
    )
    sampled = {split for text in small for split, _ in found.split.parts(text, place_of(text))}
    assert sampled == {"train"}
    if fraction is None:  # its beginning is for training as well
        (tail,) = (part for name, part in found.split.parts(whole, place_of(whole)) if name == "valid")
        assert all(part not in tail for part in found.sample)
    else:
        assert sorted(found.sample) == sorted(small)


@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.9])
def test_of_a_book_alone_what_is_before_its_end_is_sampled(fraction):
    whole, wanted = book(40_000), 300_000
    found = scanned([whole], sample_bytes=wanted, valid_fraction=fraction)
    head, _ = (part for _, part in found.split.parts(whole, place_of(whole)))
    assert all(part in head for part in found.sample)
    sure = len(head) / 2 if fraction >= 0.5 else 2 * len(head) - len(whole)
    assert min(sure, wanted) - (1 << 16) <= sum(map(len, found.sample)) <= wanted


def test_where_half_of_the_books_are_for_validation_the_sample_is_of_the_others():
    books = [f"{edition}\n{book(4000)}" for edition in range(12)]
    found = scanned(books, sample_bytes=400_000, valid_fraction=0.5)
    training = [text for text in books if place_of(text) > 0.5]
    assert 3 <= len(training) <= 9
    assert sum(map(len, found.sample)) > 400_000 - (1 << 16), "and as large as it was asked for"


def test_where_all_is_for_validation_a_tokenizer_sees_that():
    texts = [f"{i} is small\n" * 30 for i in range(6)]
    assert scanned(texts, valid_fraction=0.999).sample


@pytest.mark.parametrize("wanted", [300_000, 700_000, 10**7])
def test_the_end_of_a_book_that_is_validated_on_is_in_no_sample(wanted):
    whole = book(16_000)
    found = scanned([whole], sample_bytes=wanted)
    head, tail = (part for _, part in found.split.parts(whole, place_of(whole)))
    assert all(part in head for part in found.sample), "every line is there once"
    assert min(wanted, len(head)) - 2 * len(tail) - (1 << 16) <= sum(map(len, found.sample)) <= wanted
    if wanted > len(whole):
        assert found.sample == [head], "and as one text, however many pieces it was read in"


def test_what_heeds_no_signal_is_left_at_once():
    """It works on beside a main thread that waits for it, and that a signal reaches."""
    end = threading.Event()

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(KeyboardInterrupt):
            _heeding_signals(end.wait)
        (still,) = (thread for thread in threading.enumerate() if thread.name == "slipstream-tokenizer")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        end.set()
    still.join(60)
    assert not still.is_alive()


@pytest.mark.parametrize("error", [DataError("no"), TimeoutError("of its own")])
def test_its_result_and_its_errors_are_told(error):
    def fails():
        raise error

    assert _heeding_signals(lambda: 3) == 3
    assert _heeding_signals(lambda: time.sleep(0.3) or 4) == 4
    with pytest.raises(type(error), match=str(error)):
        _heeding_signals(fails)


def test_what_is_no_word_is_cut_before_a_tokenizer_learns_it():
    for text in (
        "ACGT" * 5000,
        "7" * 9000 + " seven",
        "a" + "-" * 20_000,
        " " * 10_000 + "b",
        "_" * 5000 + "字" * 9000,
        "-_" * 5000,
        "4" * 4096,
        "a" * 9000 + " and " + "b" * 9000,
        "word " * 300_000 + "x" * 9000,
    ):
        parts = list(without_long_words(text))
        assert "".join(parts) == text
        assert max(map(len, parts)) <= 1 << 20, (
            "what learns from them takes a hundred bytes for each of theirs"
        )
        assert max(len(run[0]) for part in parts for run in RUNS.finditer(part)) <= 4096
    for text in ("", "plain words\n" * 4000, "字, " * 9000, "a" * 4095):
        assert list(without_long_words(text)) == [text]


@pytest.mark.bench
def test_words_that_are_nearly_long_take_no_longer_than_others():
    def seconds(text):
        began = time.process_time()
        list(without_long_words(text))
        return time.process_time() - began

    assert seconds(("ACGT" * 750 + "\n") * 1000) < 2 * seconds("a few words\n" * 250_000)


def test_nothing_is_left_behind_by_a_failure(tmp_path):
    def broken():
        yield from TEXTS
        raise DataError("the disk is gone")

    calls = iter([lambda: TEXTS, broken])
    with pytest.raises(DataError, match="disk is gone"):
        prepare(lambda: next(calls)(), tmp_path / "out", Recipe(vocab=257))
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "full").mkdir()
    (tmp_path / "full/notes.txt").write_text("mine")
    with pytest.raises(UserError, match="already exists"):
        prepare(lambda: TEXTS, tmp_path / "full", Recipe(vocab=257))
    assert (tmp_path / "full/notes.txt").read_text() == "mine"


def packed(path, data: bytes):
    match path.suffix:
        case ".xz":
            path.write_bytes(lzma.compress(data))
        case ".gz":
            path.write_bytes(gzip.compress(data))
        case ".zst":
            path.write_bytes(pytest.importorskip("zstandard").ZstdCompressor().compress(data))
        case _:
            path.write_bytes(data)
    return path


@pytest.mark.parametrize("suffix", ["", ".xz", ".gz", ".zst"])
def test_text_and_json_lines_are_read_packed_or_not(tmp_path, suffix):
    text = packed(tmp_path / f"a.txt{suffix}", "\n\f\n".join(TEXTS).encode())
    lines = packed(tmp_path / f"b.jsonl{suffix}", "\n".join(json.dumps({"text": t}) for t in TEXTS).encode())
    assert list(read_documents([text], Reading())) == TEXTS
    assert list(read_documents([lines, text], Reading())) == TEXTS * 2


def test_parquet_is_read(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"body": [*TEXTS, None, ""], "n": list(range(42))}), path)
    assert list(read_documents([path], Reading(field="body"))) == TEXTS
    with pytest.raises(DataError, match="body, n"):
        list(read_documents([path], Reading()))
    with pytest.raises(DataError, match="holds int"):
        list(read_documents([path], Reading(field="n")))
    path.write_bytes(b"PAR1 but not really")
    with pytest.raises(DataError, match="cannot be read"):
        list(read_documents([path], Reading()))


@pytest.mark.parametrize(
    ("separator", "expected"),
    [
        ("form-feed", ["a\nb\n\nc", "d\n"]),
        ("blank-line", ["a\nb", "c\n\f\nd\n"]),
        ("line", ["a", "b", "c", "d"]),
        ("none", ["a\nb\n\nc\n\f\nd\n"]),
    ],
)
def test_separators(tmp_path, separator, expected):
    path = packed(tmp_path / "a.txt", b"a\nb\n\nc\n\f\nd\n")
    assert [text for text in read_documents([path], Reading(separator)) if text != "\f"] == expected


def test_a_bomb_is_stopped_early(tmp_path, monkeypatch):
    monkeypatch.setattr(documents_module, "_FREE_BYTES", 1 << 16)
    bomb = packed(tmp_path / "bomb.txt.xz", b"a\n" * (1 << 20))
    assert bomb.stat().st_size < 2000
    with pytest.raises(DataError, match="max-expansion"):
        list(read_documents([bomb], Reading()))
    assert len(list(read_documents([bomb], Reading(max_expansion=1e6)))) == 1


def test_a_table_that_unpacks_without_end_is_stopped(tmp_path, monkeypatch):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(documents_module, "_FREE_BYTES", 1 << 16)
    path = tmp_path / "bomb.parquet"
    parquet.write_table(pyarrow.table({"text": ["a" * (1 << 16)] * 500}), path)
    assert path.stat().st_size < 5000
    with pytest.raises(DataError, match="raise --max-expansion"):
        list(read_documents([path], Reading()))


def test_frames_of_zstandard_are_read_one_after_the_other_and_must_end(tmp_path):
    pack = pytest.importorskip("zstandard").compress
    path = tmp_path / "a.txt.zst"
    path.write_bytes(pack(b"one\n" * 9000) + pack(b"two\n"))
    assert list(read_documents([path], Reading(separator="line"))) == ["one"] * 9000 + ["two"]
    for damaged, message in (
        (flipped(pack(NOISE)), "cannot be read"),
        (pack(NOISE)[:-9], "a frame does not end"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=message):
            list(read_documents([path], Reading()))


NOISE = random.Random(0).randbytes(100_000).hex().encode()


def flipped(data: bytes) -> bytes:
    """Damaged in the middle."""
    middle = len(data) // 2
    return data[:middle] + bytes(255 - byte for byte in data[middle : middle + 200]) + data[middle + 200 :]


def test_bad_files_are_named(tmp_path):
    cases = {
        "cut.txt.xz": (lzma.compress(b"text " * 1000)[:-20], "cannot be read"),
        "fake.txt.gz": (b"not gzip at all", "cannot be read"),
        "flipped.txt.gz": (flipped(gzip.compress(NOISE)), "cannot be read"),
        "latin.txt": ("naïve".encode("latin-1"), "not UTF-8"),
        "bad.jsonl": (b'{"text": "x"}\n{oops\n', "line 2 is not JSON"),
        "other.jsonl": (b'{"body": "x"}\n', "it has: body"),
        "list.jsonl": (b"[1, 2]\n", "no text under 'text'"),
        "number.jsonl": (b'{"text": 5}\n', "line 1 holds int under 'text', not text"),
        "digits.jsonl": (b'{"text": "x", "n": ' + b"1" * 5000 + b"}\n", "line 1 is not JSON"),
        "brackets.jsonl": (b"[" * 100_000 + b"\n", "line 1 is not JSON"),
    }
    for name, (data, message) in cases.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(DataError, match=message) as caught:
            list(read_documents([tmp_path / name], Reading()))
        assert name in str(caught.value)
    (tmp_path / "empty.txt").touch()
    for path, message in (("empty.txt", "is empty"), ("gone.txt", "no file"), ("a.docx", "unknown kind")):
        (tmp_path / "a.docx").write_bytes(b"x")
        with pytest.raises(DataError, match=message):
            check_inputs([tmp_path / path], Reading())
    with pytest.raises(DataError, match="separator"):
        check_inputs([], Reading(separator="tab"))
    for limit in (float("nan"), -1.0):
        with pytest.raises(DataError, match="max-expansion"):
            check_inputs([], Reading(max_expansion=limit))


def test_a_byte_order_mark_is_no_text_and_no_limit_is_a_limit(tmp_path):
    text = packed(tmp_path / "a.txt", "\ufeff\f\none".encode())
    lines = packed(tmp_path / "a.jsonl", '\ufeff{"text": "two"}\n'.encode())
    reading = Reading(max_expansion=float("inf"))
    assert list(read_documents([text, lines], reading)) == ["one", "two"]


def test_half_a_surrogate_pair_in_json_does_not_stop_the_run(tmp_path):
    path = packed(tmp_path / "a.jsonl", b'{"text": "ok \\ud83d end"}\n{"text": "two"}\n')
    prepare(lambda: read_documents([path], Reading()), tmp_path / "out", Recipe(vocab=257))
    assert "ok ? end" in decoded(tmp_path / "out", "train") + decoded(tmp_path / "out", "valid")


def command(*arguments):
    with pytest.raises(SystemExit) as caught:
        main(["data", *map(str, arguments)])
    return caught.value.code


def test_the_command_prepares_shows_and_reuses_a_tokenizer(tmp_path, capsys):
    source = packed(tmp_path / "a.txt.gz", "\n\f\n".join(TEXTS).encode())
    out, again = tmp_path / "out", tmp_path / "again"
    fraction = ["--valid-fraction", "0.1"]
    assert command("prepare", source, "--out", out, "--vocab", 300, "--json", *fraction) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["vocab"] == 300
    assert command("show", out, "--json") == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == summary["tokens"]
    assert command("prepare", source, "--out", again, "--tokenizer", out / "tokenizer.json", *fraction) == 0
    assert "train" in capsys.readouterr().out
    for path in out.glob("*.bin"):
        assert path.read_bytes() == (again / path.name).read_bytes()
    assert command("prepare", tmp_path / "gone.txt", "--out", tmp_path / "x") == 2
    assert "gone.txt" in capsys.readouterr().err


def test_tokenizer_keeps_any_text_and_refuses_what_it_is_not(tmp_path):
    tokenizer = Tokenizer.train(TEXTS, SMALLEST_VOCAB)  # no merges: plain bytes
    tokenizer_ids = tokenizer.encode("plain text")
    odd = "tabs\t\r\n \x00 emoji 🙂 <|endoftext|> ﷽"
    assert tokenizer.decode(tokenizer.encode("plain  text\n\n é🙂")) == "plain  text\n\n é🙂"
    assert tokenizer.decode(tokenizer.encode(odd)) == odd
    assert tokenizer.end_of_document not in tokenizer.encode(odd)
    assert tokenizer.end_of_document not in tokenizer.encode_batch([odd])[0]
    assert tokenizer.vocab_size == SMALLEST_VOCAB
    assert len(tokenizer.encode("abc")) == 3
    with pytest.raises(DataError, match="257"):
        Tokenizer.train(TEXTS, 100)
    tokenizer.inner.enable_truncation(4)
    tokenizer.inner.enable_padding(length=9)
    tokenizer.save(tmp_path / "served.json")  # as a model that was served with a length of 4 has it
    assert Tokenizer.load(tmp_path / "served.json").encode_batch(["plain text"]) == [tokenizer_ids]
    with pytest.raises(DataError, match="no tokenizer"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="not a tokenizer"):
        Tokenizer.load(tmp_path)


def test_a_book_in_one_file_is_cut_near_its_end(tmp_path):
    lines = [f"{i} this is a line of a book\n" for i in range(2000)]
    meta = prepare(lambda: ["".join(lines)], tmp_path / "out", Recipe(vocab=300))
    assert meta["documents"] == {"train": 1, "valid": 1}
    (head,), (tail,) = decoded(tmp_path / "out", "train"), decoded(tmp_path / "out", "valid")
    assert head + tail == "".join(lines)
    assert head.endswith("\n")
    assert 0.08 < len(tail) / len(head + tail) < 0.12


def test_a_long_book_gives_no_more_of_itself_than_is_needed(tmp_path):
    """128 KiB tell something, in one document as in many."""
    lines = "".join(f"{i} this is a line of a long book\n" for i in range(100_000))
    prepare(lambda: [lines], tmp_path / "out", Recipe(vocab=257))
    (tail,) = decoded(tmp_path / "out", "valid")
    assert 128 << 10 <= len(tail) < (128 << 10) + 100


def test_a_line_end_far_away_does_not_make_the_end_long(tmp_path):
    text = "word and more " * 3000 + "\n" + "other text it " * 3000
    prepare(lambda: [text], tmp_path / "out", Recipe(vocab=257))
    (tail,) = decoded(tmp_path / "out", "valid")
    assert 0.09 < len(tail) / len(text) < 0.11
    assert tail.startswith(("other", "text", "it"))


@pytest.mark.parametrize("count", [2, 3, 10, 100])
def test_a_small_text_sets_a_tenth_aside_whatever_its_documents(tmp_path, count):
    texts = [f"{i} " + "a few words more. " * (20_000 // count) for i in range(count)]
    prepare(lambda: texts, tmp_path / "out", Recipe(vocab=300))
    train, valid = (sum(map(len, decoded(tmp_path / "out", split))) for split in ("train", "valid"))
    assert train + valid == sum(map(len, texts))
    assert 0.08 < valid / (train + valid) < 0.25


def test_a_long_text_sets_one_in_a_hundred_aside(tmp_path):
    texts = [f"{i} " + "a few words more. " * 40 for i in range(4000)]
    meta = prepare(lambda: texts, tmp_path / "out", Recipe(vocab=300))
    share = meta["documents"]["valid"] / 4000
    assert 0.03 < share < 0.07  # 128 KiB of 2.9 MB


def test_the_vocabulary_suits_the_text(tmp_path):
    from slipstream.data.prepare import suitable_vocab

    assert [suitable_vocab(size) for size in (1000, 1_000_000, 4 << 20, 10**9)] == [512, 3904, 16384, 16384]


def test_a_folder_is_read_at_any_depth_and_the_next_command_is_printed(tmp_path, capsys):
    texts = tmp_path / "my texts"
    (texts / "deep" / "deeper").mkdir(parents=True)
    (texts / ".git").mkdir()
    for index, name in enumerate(
        ("a.txt", "deep/b.md", "deep/deeper/c.jsonl", ".git/d.txt", "e.pdf", "empty.txt")
    ):
        text = "" if name == "empty.txt" else f"{index} of some words again and again\n" * 400
        (texts / name).write_text(json.dumps({"text": text}) + "\n" if name.endswith("jsonl") else text)
    with pytest.raises(SystemExit) as ended:
        main(["data", "prepare", str(texts), "--out", str(tmp_path / "shards")])
    assert ended.value.code == 0
    told = capsys.readouterr().out
    assert "files            3" in told
    assert "left out         2 files, empty or of other kinds (.pdf, .txt)" in told
    assert f"Next: slipstream train data.path={tmp_path / 'shards'} run.dir=runs/shards" in told
    with pytest.raises(SystemExit):
        main(["data", "prepare", str(texts / ".git" / ".."), "--out", str(tmp_path / "again")])
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "x.png").write_bytes(b"x")
    with pytest.raises(SystemExit) as ended:
        main(["data", "prepare", str(tmp_path / "pictures"), "--out", str(tmp_path / "no")])
    assert ended.value.code == 2
    assert "holds no text that can be read (it holds: .png)" in " ".join(capsys.readouterr().err.split())


def test_linked_folders_are_read_once_and_written_through(tmp_path):
    real, inside, out = tmp_path / "real", tmp_path / "in", tmp_path / "empty"
    for folder in (real, inside, out):
        folder.mkdir()
    (real / "t.txt").write_text("linked")
    (inside / "a.txt").write_text("plain")
    (inside / "sub").symlink_to(real)
    (inside / "again").symlink_to(inside)
    (inside / ".hidden").symlink_to(real)
    found, left_out = find_files([inside])
    assert [path.name for path in found] == ["a.txt", "t.txt"]
    assert left_out == []
    (tmp_path / "link").symlink_to(out)
    prepare(lambda: TEXTS, tmp_path / "link", Recipe(vocab=257))
    assert (out / "meta.json").is_file()
    assert (tmp_path / "link").is_symlink()


def test_little_validation_text_is_warned_of(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("a few words\n" * 30)
    with pytest.raises(SystemExit):
        main(["data", "prepare", str(tmp_path / "a.txt"), "--out", str(tmp_path / "out")])
    assert "its loss will say little" in " ".join(capsys.readouterr().err.split())
