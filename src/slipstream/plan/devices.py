"""Devices and clusters: memory, arithmetic, memory bandwidth, links. Presets for common accelerators.

Peaks are the vendors' dense 16-bit figures; what is reached of them is `efficiency`, the one number here
that is an assumption (replace it with `--efficiency`, or measure with `--profile`). A node holds `per_node`
devices joined by the fast link; each device has its own share of the node's network card.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from slipstream.errors import UserError, did_you_mean
from slipstream.formats import parse_toml

MIB, GIB = 2**20, 2**30
SMALLEST, LARGEST = 1e-9, 1e24  # of a figure: what is outside is a slip, and overflows somewhere
_MAY_BE_NONE = ("reserved_bytes", "workspace_bytes", "link_bytes", "group_bytes")


@dataclass(frozen=True)
class Runtime:
    """What driving a stage takes of its rank, beside the stage's own work. Measured, never assumed."""

    action: float = 0.0  # seconds per forward or backward
    update: float = 0.0  # seconds per update
    on_demand: bool = False  # receives are posted when needed, not ahead


FREE = Runtime()


@dataclass(frozen=True)
class Device:
    """One accelerator and its links. Rates are per device and per direction."""

    name: str
    peak_flops: float  # dense, 16 bit
    memory_bytes: float | None = None
    memory_bandwidth: float = 1e12  # bytes per second
    efficiency: float = 0.5  # share of the peak that a stage's forward and backward reach
    intra_bandwidth: float = 25e9  # bytes per second inside a node
    intra_latency: float = 8e-6  # seconds
    inter_bandwidth: float = 25e9  # bytes per second between nodes
    inter_latency: float = 20e-6
    per_node: int = 8
    layer_overhead: float = 60e-6  # seconds per layer and call that no batch size amortises: launches
    reserved_bytes: float = 1.0 * GIB  # outside the allocator: the context, NCCL's kernels
    workspace_bytes: float = 64.5 * MIB  # inside it: what the matrix products keep
    link_bytes: float = 17 * MIB  # of a communicator of two stages, one direction (docs/notes/transports.md)
    group_bytes: float = 1.16 * GIB  # of a communicator of data ranks
    usable: float = 0.94  # share of the rest that can be filled before fragmentation bites
    processor: bool = False  # stages work on cores, in float32
    source: str = "given by the user"
    engine: Runtime = FREE  # of 2BW
    torch_engine: Runtime = FREE  # of the synchronous schedules, which torch runs

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            wanted = _wanted(field.name, value)
            if wanted and not (value is None and field.name == "memory_bytes"):
                raise UserError(f"The device's {field.name} must be {wanted}, not {value!r}.")

    @property
    def room_bytes(self) -> float:
        """What a plan may fill. A device without a memory figure cannot be planned for."""
        if not self.memory_bytes:
            raise UserError(
                f"The device '{self.name}' has no memory figure, so no layout can be checked. "
                f"Give --memory in GiB (for example --memory 80), or choose a preset: {', '.join(PRESETS)}."
            )
        return self.usable * max(0.0, self.memory_bytes - self.reserved_bytes)


def _wanted(name: str, value: object) -> str:
    """What a figure should have been, whoever gave it: a flag, a file or a profile; nothing where it is right."""
    if name in ("name", "source"):
        return "" if isinstance(value, str) else "a text"
    if isinstance(value, Runtime):
        return ""
    if name == "processor":
        return "" if isinstance(value, bool) else "true or false"
    number = value if isinstance(value, int | float) else -1.0
    if abs(number) > LARGEST or 0 < number < SMALLEST:
        return f"a number from {SMALLEST:g} to {LARGEST:g}"
    if name in ("intra_latency", "inter_latency", "layer_overhead", *_MAY_BE_NONE):
        return "" if number >= 0 else "0 or more"
    if name in ("efficiency", "usable"):
        return "" if 0 < number <= 1 else "above 0 and at most 1"
    if name == "per_node":
        return "" if isinstance(value, int) and value > 0 else "a whole number above 0"
    return "" if number > 0 else "above 0"


MOST_JITTER = 10


@dataclass(frozen=True)
class Cluster:
    """`devices` of one kind, with the spread of durations that the network and the clock cause."""

    device: Device
    devices: int
    jitter: float = 0.0  # relative standard deviation of every duration

    def __post_init__(self) -> None:
        if not 0 <= self.jitter <= MOST_JITTER:
            raise UserError(f"A jitter of {self.jitter:g} is not from 0 to {MOST_JITTER}: it is a share.")
        if self.devices < 1:
            raise UserError(f"A cluster needs at least 1 device, not {self.devices}.")


def _preset(name: str, tflops: float, gib: float, tb_per_second: float, intra_gb: float, inter_gb: float,
            source: str, **rest: Any) -> Device:  # fmt: skip
    return Device(name, tflops * 1e12, gib * GIB, tb_per_second * 1e12, intra_bandwidth=intra_gb * 1e9,
                  inter_bandwidth=inter_gb * 1e9, source=source, **rest)  # fmt: skip


# Memory is what the driver reports, a little under the figure on the label.
PRESETS: dict[str, Device] = {
    device.name: device
    for device in (
        _preset("v100-16g", 125, 15.8, 0.9, 150, 1.56,
                "V100 SXM2 data sheet; 100 Gb/s a node", efficiency=0.4),
        _preset("v100-32g", 125, 31.7, 0.9, 150, 1.56,
                "V100 SXM2 data sheet; 100 Gb/s a node", efficiency=0.4),
        _preset("a100-40g", 312, 39.4, 1.55, 300, 25, "A100 SXM data sheet; 200 Gb/s a device"),
        _preset("a100-80g", 312, 79.2, 2.04, 300, 25, "A100 SXM data sheet; 200 Gb/s a device"),
        _preset("h100", 989, 79.2, 3.35, 450, 50, "H100 SXM data sheet; 400 Gb/s a device", efficiency=0.45),
        _preset("h200", 989, 139.8, 4.8, 450, 50, "H200 SXM data sheet; 400 Gb/s a device", efficiency=0.45),
        _preset("b200", 2250, 178.0, 8.0, 900, 50, "HGX B200 data sheet; 400 Gb/s a device", efficiency=0.45),
        _preset("mi300x", 1307, 191.5, 5.3, 64, 50, "MI300X data sheet; one link per pair", efficiency=0.4),
        _preset("l40s", 362, 44.5, 0.864, 25, 12.5, "L40S data sheet; PCIe 4, 100 Gb/s a device"),
        _preset("rtx4090", 165, 23.5, 1.0, 20, 3.1, "RTX 4090 data sheet; PCIe 4, 25 Gb/s a device"),
        _preset("cpu", 0.06, 8.0, 0.02, 3, 1, "one slow core, 34 GFLOP/s fp32 measured", layer_overhead=4e-4,
                intra_latency=1e-4, inter_latency=3e-4, efficiency=0.55, reserved_bytes=0.2 * GIB,
                workspace_bytes=0, link_bytes=0, group_bytes=0, processor=True),
    )
}  # fmt: skip


def find_device(name: str, **changes: float | int | None) -> Device:
    """A preset, or a TOML file whose keys are the fields of `Device`, with some figures replaced."""
    if name in PRESETS:
        device = PRESETS[name]
    elif name.endswith(".toml"):
        device = _from_file(Path(name))
    else:
        raise UserError(
            f"There is no device preset '{name}'.{did_you_mean(name, PRESETS)} Presets: {', '.join(PRESETS)}; "
            "or give a .toml file with name, peak_flops and memory_bytes."
        )
    given: dict[str, Any] = {key: value for key, value in changes.items() if value is not None}
    return replace(device, **given)


def device_called(name: str) -> Device:
    """The preset of a device by what its maker or a profile calls it."""
    letters = re.sub("[^a-z0-9]", "", name.lower())  # nvidiaa100sxm480gb
    for preset in PRESETS:
        if all(word in letters for word in preset.split("-")):
            return PRESETS[preset]
    raise UserError(
        f"The profile is of '{name}', which is no preset. Name the nearest with --device, for what a profile does not "
        f"measure: {', '.join(PRESETS)}."
    )


def _from_file(path: Path) -> Device:
    try:
        table = parse_toml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"The device file {path} cannot be read: {error.strerror}.") from None
    except ValueError as error:  # also one that is not text
        raise UserError(f"The device file {path} is not valid TOML: {error}.") from None
    known = {field.name for field in fields(Device)} - {"engine", "torch_engine"}  # only a profile has these
    for key in table:
        if key not in known:
            hint = did_you_mean(key, known)
            raise UserError(f"{path}: a device has no '{key}'.{hint} Keys: {', '.join(sorted(known))}.")
    if "peak_flops" not in table:
        raise UserError(f"{path}: peak_flops is missing (dense 16-bit operations per second).")
    given: dict[str, Any] = {"name": path.stem, **table}
    return Device(**given)
