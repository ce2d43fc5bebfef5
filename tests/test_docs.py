"""The pages are right about themselves: links, code, commands, keys, references."""

from __future__ import annotations

import inspect
import json
import re
import shlex
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

import pages
from pages import PAGES, ROOT
from slipstream.cli import COMMANDS
from slipstream.cli import command as command_of
from slipstream.config import describe, load
from slipstream.config.load import from_tree

sys.path.insert(0, str(ROOT / "tools"))
import cutover_fit
import docs_hooks
import fine_start
import race_figure
import size_figure
import size_fit
import updates_figure
import updates_fit

SITE = (ROOT / "mkdocs.yml").read_text()
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_lead_somewhere(page):
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", pages.prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in pages.anchors(file)):
            broken.append(target)
    assert not broken


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_code_blocks_parse(page):
    for block in pages.blocks(page):
        if block.language == "python":
            compile(block.text, f"{page.name}: {block.title}", "exec")
        if block.language == "toml" and "--8<--" not in block.text:
            tree = tomllib.loads(block.text)
            if "base" not in tree:  # a study has one
                from_tree(tree)
        for included in re.findall(r'^--8<-- "(.*)"$', block.text, re.MULTILINE):
            assert (ROOT / included).is_file(), included


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_commands_exist(page):
    """Every `slipstream` line names a command, options and keys that there are."""
    for line in pages.commands(page, "slipstream"):
        words = shlex.split(line.replace("…", "x").replace("...", ""))[1:]
        if not words or words[0] in ("COMMAND", "--help"):
            continue
        assert words[0] in COMMANDS, line
        command = command_of(words[0])
        command = getattr(command, "commands", {}).get(next(iter(words[1:]), ""), command)
        known = {name for parameter in command.params for name in parameter.opts + parameter.secondary_opts}
        wrong = [
            word
            for word in words
            if word.startswith("--") and word.partition("=")[0] not in known | {"--help"}
        ]
        assert not wrong, line
        keys = [word for word in words[1:] if re.match(r"(?!optim\.options\.)[a-z]+\.[a-z_.]+=", word)]
        known_keys = {key.name for key in describe()}
        assert {key.partition("=")[0] for key in keys} <= known_keys, line


def test_every_page_is_in_the_navigation():
    listed = set(re.findall(r"[\w/-]+\.md", SITE))
    there = {str(page.relative_to(ROOT / "docs")) for page in PAGES if page.is_relative_to(ROOT / "docs")}
    assert listed == there


def test_the_settings_page_has_every_key_with_its_default():
    assert docs_hooks.MARKER in (ROOT / "docs/config.md").read_text()
    made = docs_hooks.on_page_markdown((ROOT / "docs/config.md").read_text())
    rows = dict(re.findall(r"^\| `([\w.]+)` \| (.*?) \|", made, re.MULTILINE))
    default = load().model_dump()
    assert list(rows) == [f"{section}.{key}" for section, keys in default.items() for key in keys]
    assert rows["pipeline.schedule"] == '`"2bw"`'
    assert rows["optim.sync_start"] == "`0.0`"
    assert rows["train.compile"] == "`false`"
    assert rows["optim.lr"] == "derived"
    assert rows["data.path"] == "none"


def test_the_api_page_has_everything_public():
    text = (ROOT / "docs/api.md").read_text()
    documented = re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE)
    found = [
        getattr(import_module(place.rpartition(".")[0]), place.rpartition(".")[2]) for place in documented
    ]
    for place, thing in zip(documented, found, strict=True):
        assert inspect.getdoc(thing), f"{place} has no docstring"
    for package in ("slipstream", "slipstream.optim", "slipstream.schedule"):
        for name in import_module(package).__all__:
            thing = getattr(import_module(package), name)
            assert (
                any(thing is one for one in found) or f"`{name}`" in text or f"`{package}.{name}`" in text
            ), name
    for engine in (import_module("slipstream").Schedule2BW, import_module("slipstream").Emulator):
        public = [name for name in vars(engine) if not name.startswith("_")]
        assert [name for name in public if not inspect.getdoc(inspect.getattr_static(engine, name))] == []


def test_the_picture_of_the_readme_shows_what_was_measured(tmp_path):
    """docs/figures/loss-against-time.svg is drawn from the race that docs/results keeps, and from nothing else."""
    drawn = race_figure.draw(race_figure.curves(ROOT / "docs/results/one-gpu-race.html"))
    assert drawn == (ROOT / "docs/figures/loss-against-time.svg").read_text()


def test_the_picture_of_the_results_shows_what_the_tables_say():
    """Every point is a row of a table: gap, interval and size; the published ones are `published.csv`'s."""
    text = size_figure.FIGURE.read_text()
    assert text == size_figure.draw(size_figure.dots())
    shown = json.loads(text[text.index("<metadata>") + 10 : text.index("</metadata>")])
    ours = {(dot["setting"], dot["mode"]): dot for dot in shown if not dot["published"]}
    assert {setting for setting, _ in ours} == {
        "0.46M",
        "1.3M",
        "2M",
        "4M",
        "8M (B)",
        "16M",
        "30M",
        "42M (A)",
    }
    rows = {(row["optimizer"], row["mode"]): row for row in size_figure.table("b-muon-adamw")}
    for mode in ("delay", "ef"):
        dot, row = ours["8M (B)", mode], rows["muon", mode]
        numbers = [float(row[key]) for key in ("gap", "gap_low", "gap_high")]
        assert [dot["gap"], dot["low"], dot["high"]] == numbers
        assert (dot["parameters"], round(dot["tokens_per_parameter"])) == (8_129_792, 20)
    published = {(dot["setting"], dot["mode"]): dot["gap"] for dot in shown if dot["published"]}
    assert (published["360M", "delay"], published["360M", "ef"]) == (0.012, 0.005)
    for row in size_figure.table("published"):
        sync = next(
            r for r in size_figure.table("published") if (r["model"], r["mode"]) == (row["model"], "sync")
        )
        if row["gap"]:
            assert float(row["gap"]) == pytest.approx(float(row["loss"]) - float(sync["loss"]), abs=1e-9)


def test_the_results_give_every_token_penalty_by_both_readings():
    page = (ROOT / "docs/results/net_gain.md").read_text()
    rows = size_figure.penalty_rows()
    assert len(rows) == 16
    assert [row for row in rows if row not in page] == []


def test_the_page_about_the_cutover_has_the_rows_that_are_computed():
    page = (ROOT / "docs/results/cutover.md").read_text()
    assert [row for row in cutover_fit.rows() if row not in page] == []


def test_the_page_about_the_fine_start_has_the_rows_that_are_computed():
    page = (ROOT / "docs/results/fine_start.md").read_text()
    assert [row for row in fine_start.rows() if row not in page] == []


def test_the_page_about_size_has_the_rows_that_are_computed():
    page = (ROOT / "docs/results/size.md").read_text()
    assert [row for row in size_fit.rows() if row not in page] == []
    table = {(row["size"], row["mode"]): row for row in size_fit.table("ladder")}
    for (size, mode), row in table.items():
        if mode != "sync":  # the study's own table says the same
            gaps = list(size_fit.gaps(size, mode).values())
            assert size_fit.interval(gaps).value == pytest.approx(float(row["gap"]), abs=1e-5)


def test_the_page_about_updates_has_the_rows_and_the_picture_that_are_computed():
    page = (ROOT / "docs/results/length_and_batch.md").read_text()
    assert [row for row in updates_fit.rows() if row not in page] == []
    assert updates_figure.FIGURE.read_text() == updates_figure.draw()


def test_the_results_begin_with_one_picture_and_one_table_of_ten_rows():
    """Each row links to a page of its own, which has the commands that made it; every page is short."""
    first = (ROOT / "docs/results/README.md").read_text()
    assert first.count("![") == 1
    table = [line for line in first.splitlines() if line.startswith("|")][2:]
    assert 1 <= len(table) <= 10
    assert "#" not in first.replace("# Results", "", 1)  # nothing else: no other heading
    for row in table:
        (page, *_) = re.findall(r"\]\(([\w-]+\.md)\)", row)
        assert pages.commands(ROOT / "docs/results" / page, "slipstream"), page
    for page in (ROOT / "docs/results").glob("*.md"):
        assert len(page.read_text().splitlines()) < 150, page


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_examples_take_what_the_results_recommend():
    """Muon with error feedback and the cutover everywhere; a synchronous start on a cluster."""
    for path in sorted((ROOT / "examples").glob("*.toml")):
        config = load(path)
        if config.pipeline.schedule != "2bw":
            continue
        assert config.optim.name == "muon", path
        assert config.optim.correction in (None, "error_feedback"), path
        assert config.pipeline.cutover in (None, config.pipeline.stages), path
    assert load(ROOT / "examples/cluster_360m.toml").optim.sync_start > 0


def test_pages_name_files_that_exist():
    """`src/...`, `tests/...`, `examples/...` and `studies/...` in running text."""
    for page in PAGES:
        named = re.findall(r"`((?:src|tests|examples|studies|tools|docs)/[\w./-]+\.\w+)`", page.read_text())
        missing = [name for name in named if not (Path(ROOT) / name).exists()]
        assert not missing, f"{page.name}: {missing}"


def test_the_container_is_made_from_files_that_exist():
    lines = re.findall(r"^COPY (.*) \S+$", (ROOT / "Containerfile").read_text(), re.MULTILINE)
    assert lines
    assert all((ROOT / name).exists() for line in lines for name in line.split())
