"""How the gap falls with the part of an update that is old: the figures of docs/results/cutover.md.

In proportion would be gap(f) = f gap(1), f the part that is old; what a gap has beyond that is taken by seed. Two equal
runs of different code are held against each other, and each against the synchronous runs.

    python tools/cutover_fit.py        prints the tables of cutover.md
"""

from __future__ import annotations

import statistics

from size_fit import entry, penalties, row_of, shown, table

from slipstream.study.statistics import interval

OLD = {"1/2": 16 / 32, "1/3": 11 / 32, "1/4": 8 / 32}  # as they were run, also with 64 microbatches
NAMES = {"1": "all (2BW)", "1/2": "half", "1/3": "a third", "1/4": "a quarter"}
CORRECTED = {"ef": "error feedback", "": "no correction"}


def mode_of(correction: str, part: str) -> str:
    """The label that a-cutover has for it."""
    if part == "1":
        return correction or "delay"
    return f"{correction} {part}".strip()


def part_rows() -> list[str]:
    """Setting A, Muon."""
    rows = {row["mode"]: row for row in table("a-cutover") if row["optimizer"] == "muon"}
    found = []
    for correction, name in CORRECTED.items():
        for part, told in NAMES.items():
            if (row := rows.get(mode_of(correction, part))) is not None:
                cells = [f"{told}, {name}", row["seeds"], entry(row, "gap", "+.4f"), *penalties(row)]
                found.append(row_of(cells))
    return found


def b_rows() -> list[str]:
    rows = {row["mode"]: row for row in table("b-cutover")}
    return [
        row_of([NAMES[part], entry(rows[mode], "gap", "+.4f"), *penalties(rows[mode])])
        for part, mode in (("1", "ef"), ("1/2", "ef 1/2"), ("1/3", "ef 1/3"))
    ]


def gaps(study: str, mode: str) -> dict[str, float]:
    rows = [row for row in table(f"{study}-runs") if row.get("optimizer", "muon") == "muon" and row["loss"]]
    losses = {(row["mode"], row["seed"]): float(row["loss"]) for row in rows}
    return {seed: loss - losses["sync", seed] for (one, seed), loss in losses.items() if one == mode}


def proportion_rows() -> list[str]:
    """What a part pays more than its share of the whole gap, by seed, and the share that it pays."""
    rows = []
    for study, setting in (("a-cutover", "A"), ("b-cutover", "B")):
        for correction, name in CORRECTED.items():
            whole = gaps(study, mode_of(correction, "1"))
            for part, share in OLD.items():
                found = gaps(study, mode_of(correction, part))
                common = [seed for seed in found if seed in whole]
                if not common:
                    continue
                more = interval([found[seed] - share * whole[seed] for seed in common])
                paid = sum(found[seed] for seed in common) / sum(whole[seed] for seed in common)
                cells = [
                    f"{setting}, {name}",
                    NAMES[part],
                    f"{share:.2f}",
                    f"{paid:.2f}",
                    shown(more, "+.4f"),
                ]
                rows.append(row_of(cells))
    return rows


def code_rows() -> list[str]:
    """B with a third old, run twice: newer code, older code, the newer less the older."""
    sync = {row["seed"]: float(row["loss"]) for row in table("b-cutover-runs") if row["mode"] == "sync"}
    twice = [row for row in table("repeats") if row["study"] == "b-cutover"]
    newer = {row["seed"]: float(row["in_table"]) for row in twice}
    older = {row["seed"]: float(row["other"]) for row in twice}
    told = [
        *(interval([losses[seed] - sync[seed] for seed in losses]) for losses in (newer, older)),
        interval([newer[seed] - older[seed] for seed in newer]),
    ]
    means = [f"{statistics.fmean(losses.values()):.4f}" for losses in (newer, older)]
    return [row_of([*means, *(shown(one, "+.4f") for one in told)])]


KINDS = (part_rows, b_rows, proportion_rows, code_rows)


def rows() -> list[str]:
    """Every row of the page that is computed."""
    return [row for kind in KINDS for row in kind()]


if __name__ == "__main__":
    for kind in KINDS:
        print(*kind(), "", sep="\n")
