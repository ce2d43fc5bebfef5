"""Processes and process groups: who runs where, and how the ranks find each other.

`launch` and `RankPool` start ranks on this machine; `World` describes the ranks of a running job, whether
this package started them or torchrun did. Nothing else in the package reads environment variables.
"""

from slipstream.distributed.launch import RankPool, launch
from slipstream.distributed.partition import Partitions, partitioned
from slipstream.distributed.world import World, initialise, started_by_torchrun

__all__ = ["Partitions", "RankPool", "World", "initialise", "launch", "partitioned", "started_by_torchrun"]
