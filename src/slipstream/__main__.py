"""`python -m slipstream`: the same as the `slipstream` command."""

from slipstream.cli import main

main()
