"""What `slipstream bench train` prints for people; `--json` prints the result itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from slipstream.bench.train import CONTENDERS


def print_table(console: Console, result: Mapping[str, Any]) -> None:
    title = (
        f"{result['model']}, sequence {result['sequence']}, {result['microbatches']} x {result['rows']} sequences "
        f"per update, {result['device_name']}, torch {result['torch']}"
    )
    table = Table("trainer", "tokens/s", "MFU", "ms per update", "peak GiB", "set-up s", title=title)
    for name, row in result["contenders"].items():
        if "error" in row:
            table.add_row(CONTENDERS[name], "failed", "", "", "", "")
            continue
        table.add_row(
            CONTENDERS[name],
            f"{row['tokens_per_second']:,.0f}",
            "" if row["mfu"] is None else f"{row['mfu']:.1%}",
            f"{row['step_seconds'] * 1e3:.1f}",
            f"{row['peak_memory_bytes'] / 2**30:.1f}",
            f"{row['setup_seconds']:.0f}",
        )
    console.print(table)
    for name, row in result["contenders"].items():
        if "error" in row:
            console.print(f"{CONTENDERS[name]} failed: {row['error']}", markup=False)
        elif row["rows"] != result["rows"]:
            console.print(f"{CONTENDERS[name]}: microbatches of {row['rows']}, larger ones did not fit")
    for name in CONTENDERS:
        if ratio := result.get(f"ours_over_{name}"):
            console.print(f"{ratio:.3f} times as fast as {CONTENDERS[name]}")
