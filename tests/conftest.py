"""Settings of all tests."""

import os

from hypothesis import settings

# One thread, here and in child processes: sums agree, and tiny models do not wait for a busy core.
os.environ["OMP_NUM_THREADS"] = "1"
settings.register_profile("headlight", deadline=None)
settings.load_profile("headlight")
