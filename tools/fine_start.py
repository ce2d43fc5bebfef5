"""What a fine start is worth: the figures of docs/results/fine_start.md.

python tools/fine_start.py        prints the tables of fine_start.md
"""

from __future__ import annotations

import re

from cutover_fit import gaps
from size_fit import RESULTS, entry, penalties, row_of, shown, table

from slipstream.study.statistics import interval

A, SMALL = "a-fine", "cpu-fine"
GAPS = {
    (A, "muon"): {
        "ef+fine20": "all old, fine start of 20 %",
        "ef 1/2+fine20": "half old, fine start of 20 %",
        "ef": "all old",
        "ef 1/2": "half old",
        "ef 1/4": "a quarter old from the first update to the last",
        "ef+start20": "all old, synchronous start of 20 %",
    },
    (SMALL, "muon"): {
        "ef": "all old",
        "ef+fine10": "all old, fine start of 10 %",
        "ef+fine20": "all old, fine start of 20 %",
        "ef+fine40": "all old, fine start of 40 %",
        "ef+fine20 of 1/2": "all old, 20 % in microbatches of a half",
        "ef 1/2": "half old",
        "ef 1/2+fine20": "half old, fine start of 20 %",
        "ef 1/4": "a quarter old from the first update to the last",
        "ef+start10": "all old, synchronous start of 10 %",
        "ef+start20": "all old, synchronous start of 20 %",
    },
    (SMALL, "adamw"): {
        "ef": "AdamW, all old",
        "ef+fine20": "AdamW, all old, fine start of 20 %",
        "ef 1/2": "AdamW, half old",
        "ef+start10": "AdamW, all old, synchronous start of 10 %",
    },
}
DIFFERENCES = {  # what is asked, the mode, and the one that is taken from it
    "all old: what a fine start of 20 % takes off": ("ef", "ef+fine20"),
    "half old: what it takes off": ("ef 1/2", "ef 1/2+fine20"),
    "all old: fine start less a quarter old all the time": ("ef+fine20", "ef 1/4"),
    "all old: fine start less a synchronous start of 20 %": ("ef+fine20", "ef+start20"),
    "a fine start of 10 %: what it takes off": ("ef", "ef+fine10"),
    "a fine start of 10 % less a synchronous one": ("ef+fine10", "ef+start10"),
    "20 % less 40 %": ("ef+fine20", "ef+fine40"),
    "in halves less in quarters": ("ef+fine20 of 1/2", "ef+fine20"),
}
NET = {
    ("ef+fine20", 1): "m = P, all old, fine start",
    ("ef", 1): "m = P, all old",
    ("ef+start20", 1): "m = P, all old, synchronous start of 20 %",
    ("ef 1/2+fine20", 2): "m = 2P, half old, fine start",
    ("ef 1/2", 2): "m = 2P, half old",
    ("ef+fine20", 2): "m = 2P, all old, fine start",
    ("ef 1/2+fine20", 3): "m = 3P, half old, fine start",
}


def gap_rows() -> list[str]:
    found = []
    for (study, optimizer), names in GAPS.items():
        rows = {row["mode"]: row for row in table(study) if row["optimizer"] == optimizer}
        for mode, name in names.items():
            seeds = [rows[mode]["seeds"]] if study == A else []  # at 1M all of one optimizer have as many
            tokens = penalties(rows[mode]) if study == A else [entry(rows[mode], "penalty", ".3f")]
            found.append(row_of([name, *seeds, entry(rows[mode], "gap", "+.4f"), *tokens]))
    return found


def difference_rows() -> list[str]:
    """By seed, at 42M and at 1M."""
    found = []
    for name, (mode, other) in DIFFERENCES.items():
        cells = [name]
        for study in (A, SMALL):
            one, two = gaps(study, mode), gaps(study, other)
            common = [seed for seed in one if seed in two]
            cells.append(shown(interval([one[s] - two[s] for s in common]), "+.4f") if common else "–")
        found.append(row_of(cells))
    return found


def net_gain_rows() -> list[str]:
    """By curve, from the study's own table: three numbers of microbatches for each of three depths."""
    cells = {}
    for line in (RESULTS / f"{A}.md").read_text().splitlines():
        if (match := re.match(r"\| muon \| (.*?) \| by curve \| (.*) \|$", line)) is not None:
            cells[match[1]] = match[2].split(" | ")
    return [row_of([name, *cells[mode][times - 1 :: 3]]) for (mode, times), name in NET.items()]


KINDS = (gap_rows, difference_rows, net_gain_rows)


def rows() -> list[str]:
    """Every row of the page that is computed."""
    return [row for kind in KINDS for row in kind()]


if __name__ == "__main__":
    for kind in KINDS:
        print(*kind(), "", sep="\n")
