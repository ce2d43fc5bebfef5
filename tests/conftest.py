"""One intra-op thread everywhere: another count changes the bits, and the tests compare bits."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, here and in worker processes
