"""Which torch torchtitan can be imported with. docs/torchtitan.md has the pairs."""

from slipstream.errors import UserError

LEAST_TORCH = (2, 13)  # torchtitan 0.3.0 imports DataParallelMeshDims, which torch 2.11 has not


def check_torch(version: str) -> None:
    """Before anything of torchtitan is imported: its own error names a class that no one has heard of."""
    if tuple(int(part) for part in version.split(".")[:2]) < LEAST_TORCH:
        raise UserError(
            f"torchtitan 0.3.0 cannot be imported with torch {version}. Install torch 2.14.1, with which its own "
            "pipelines run too, or torch 2.13."
        )
