"""Settings of all tests."""

import os

import pytest
from hypothesis import settings

# One thread, here and in child processes: sums agree, and tiny models do not wait for a busy core.
os.environ["OMP_NUM_THREADS"] = "1"
settings.register_profile("headlight", deadline=None)
settings.load_profile("headlight")


@pytest.fixture
def wandb_alone(tmp_path_factory, monkeypatch):
    """Weights & Biases without what this machine says about it: no key, no settings, no server."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    home = tmp_path_factory.mktemp("home")
    for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR", "NETRC"):
        monkeypatch.setenv(name, str(home / name))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")  # the product sets it too, beyond the test
    return home
