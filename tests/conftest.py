"""What all tests share."""

import os

# Tests run side by side, a process a core. Where each would start a thread a core, small
# factorizations wait for each other's threads, ten times as long as they compute.
os.environ.setdefault("OMP_NUM_THREADS", "1")
