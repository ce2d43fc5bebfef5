"""Streamed datasets: mixtures keep their weights, a source is read once, and what cannot work is said at once."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.test_prepare import TEXTS, decoded
from slipstream.cli import main
from slipstream.data.streams import Source, kept, limited, mixed, parse_source, together
from slipstream.errors import DataError

SIZES = st.lists(st.integers(1, 50), min_size=1, max_size=30)


def source_of(sizes, letter):
    return lambda: (letter * size for size in sizes)


@settings(deadline=None)
@given(st.lists(st.tuples(SIZES, st.floats(0.1, 10)), min_size=1, max_size=4))
def test_every_beginning_of_a_mixture_has_the_shares_of_the_weights(sources):
    """read_i / w_i is never more than one document of i ahead of any other source."""
    made = [(source_of(sizes, "abcd"[index]), weight) for index, (sizes, weight) in enumerate(sources)]
    read, count = [0] * len(sources), [0] * len(sources)
    for text in mixed(made):
        index = "abcd".index(text[0])
        assert len(text) == sources[index][0][count[index]]  # in the source's own order
        read[index], count[index] = read[index] + len(text), count[index] + 1
        shares = [done / weight for done, (_, weight) in zip(read, sources, strict=True)]
        for ahead, (sizes, weight), started in zip(shares, sources, count, strict=True):
            assert not started or ahead - min(shares) <= max(sizes) / weight * (1 + 1e-9)
    assert any(done == len(sizes) for done, (sizes, _) in zip(count, sources, strict=True))  # one has ended


def test_without_weights_all_of_everything_is_read():
    class Named(Source):
        def documents(self):
            yield from (f"{self.name}{index}" for index in range(2))

    files = lambda: ["file0", "file1"]  # noqa: E731
    plain = together(files, [Named("a"), Named("b")])
    assert list(plain()) == list(plain()) == ["file0", "file1", "a0", "a1", "b0", "b1"]
    weighted = together(files, [Named("a", weight=1.0)])
    assert list(weighted()) == ["file0", "a0", "a1"]  # by bytes; here a is behind, and at its end


def test_a_limit_ends_after_the_document_that_reaches_it():
    texts = ["ä" * 5, "b" * 5, "c"]
    assert list(limited(lambda: texts, 10)) == texts[:1]
    assert list(limited(lambda: texts, 11)) == texts[:2]
    assert list(limited(lambda: texts, 1000)) == texts


def test_a_source_is_read_once(tmp_path):
    readings, texts = [], ["one\ntwo\u2028three", "\x00\x85", "naïve № \\"]

    def documents():
        readings.append(1)
        yield from texts

    with kept(documents, tmp_path / "new") as again:
        assert next(iter(again())) == texts[0]  # an unfinished reading does not count
        assert list(again()) == list(again()) == list(again()) == texts
        assert len(readings) == 2
        assert len(list((tmp_path / "new").iterdir())) == 1
    assert list((tmp_path / "new").iterdir()) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a,splt=train", "'splt=train' is none of config=, split="),
        ("a,split", "'split' is none of"),
        (",split=train", "begins with the dataset's name"),
        ("a,weight=0", "weight=0 is not a number above 0"),
        ("a,weight=nan", "weight=nan is not a number"),
        ("a,weight=much", "weight=much is not a number"),
    ],
)
def test_a_source_that_is_misspelt_is_named(text, words):
    with pytest.raises(DataError, match=words):
        parse_source(text)


def test_a_source_is_parsed():
    found = parse_source("Salesforce/wikitext,config=wikitext-103-raw-v1,split=validation,weight=2.5")
    assert found == Source("Salesforce/wikitext", "wikitext-103-raw-v1", "validation", weight=2.5)


def prepared(tmp_path, capsys, *words):
    with pytest.raises(SystemExit) as ended:
        main(["data", "prepare", "--out", str(tmp_path / "out"), "--vocab", "300", *words, "--json"])
    said = capsys.readouterr()
    return ended.value.code, said.out, said.err


def test_nothing_to_read_is_said(tmp_path, capsys):
    code, _, words = prepared(tmp_path, capsys)
    assert code == 2
    assert "Name files or folders, or a dataset with --dataset" in words


def test_without_the_library_the_extra_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("slipstream.data.streams.find_spec", lambda name: None)
    code, _, words = prepared(tmp_path, capsys, "--dataset", "json,files=x.jsonl")
    assert code == 2
    assert "[datasets]" in words
    assert not (tmp_path / "out").exists()


def test_files_are_limited_too(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("\n".join(f"line {index} of a text" * 200 for index in range(800)))
    code, out, words = prepared(
        tmp_path, capsys, str(tmp_path / "a.txt"), "--separator", "line", "--limit-mb", "1"
    )
    assert code == 0, words
    assert 1_000_000 <= json.loads(out)["bytes"] < 1_010_000


@pytest.fixture
def library(monkeypatch, tmp_path):
    """The library on local files, without a network."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return pytest.importorskip("datasets", reason="needs datasets: pip install 'slipstream[datasets]'")


def write_json_lines(path, texts, field="text"):
    path.write_text(
        "".join(json.dumps({field: text, "number": index}) + "\n" for index, text in enumerate(texts))
    )
    return path


def test_json_lines_are_streamed_as_they_are(library, tmp_path, capsys):
    path = write_json_lines(tmp_path / "a.jsonl", [*TEXTS, "", "  "])
    code, out, words = prepared(tmp_path, capsys, "--dataset", f"json,files={path}")
    assert code == 0, words
    found = decoded(tmp_path / "out", "train") + decoded(tmp_path / "out", "valid")
    assert sorted(found) == sorted(TEXTS)
    assert json.loads(out)["bytes"] == sum(len(text.encode()) for text in TEXTS)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_folder_with_parquet_files_and_a_field_of_another_name(library, tmp_path, capsys):
    folder = tmp_path / "set"
    folder.mkdir()
    library.Dataset.from_dict({"body": TEXTS}).to_parquet(folder / "train.parquet")
    code, _, words = prepared(tmp_path, capsys, "--dataset", f"{folder},field=body")
    assert code == 0, words
    found = decoded(tmp_path / "out", "train") + decoded(tmp_path / "out", "valid")
    assert sorted(found) == sorted(TEXTS)


def test_a_mixture_of_datasets_and_files_has_its_shares(library, tmp_path, capsys):
    a = write_json_lines(tmp_path / "a.jsonl", [f"a{index:04d} {'x' * 100}" for index in range(500)])
    b = write_json_lines(tmp_path / "b.jsonl", [f"b{index:04d} {'y' * 50}" for index in range(500)], "body")
    (tmp_path / "c.txt").write_text("\n".join(f"c{index:04d} {'z' * 75}" for index in range(500)))
    code, _, words = prepared(
        tmp_path, capsys, str(tmp_path / "c.txt"), "--separator", "line", "--dataset", f"json,files={a},weight=2",
        "--dataset", f"json,files={b},field=body,weight=0.5",
    )  # fmt: skip
    assert code == 0, words
    found = decoded(tmp_path / "out", "train") + decoded(tmp_path / "out", "valid")
    read = {letter: sum(len(text) for text in found if text[0] == letter) for letter in "abc"}
    assert read["a"] == 500 * 106  # the one that ends first
    assert read["b"] == pytest.approx(read["a"] / 4, abs=106)
    assert read["c"] == pytest.approx(read["a"] / 2, abs=106)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("json,files={path},field=body", r"has no column 'body' \(it has: text, number\)\. Set field="),
        ("json,files={path},field=number", "Column 'number' of The dataset json holds int, not text"),
        ("json,files={path}.gone", "The dataset json cannot be opened"),
        ("json,files={path},split=dev", "The dataset json cannot be opened"),
        ("json,files={bad}", "The dataset json cannot be (read|opened)"),
    ],
)
def test_a_dataset_that_cannot_be_read_is_named(library, tmp_path, spec, words):
    path, bad = write_json_lines(tmp_path / "a.jsonl", TEXTS), tmp_path / "b.jsonl"
    bad.write_text("{")
    with pytest.raises(DataError, match=words):
        list(parse_source(spec.format(path=path, bad=bad)).documents())
