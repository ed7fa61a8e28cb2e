"""Settings of the tests of the mirror."""

import pytest

from tests.training.mirrored import LIMITS
from training import mirror


@pytest.fixture
def patience(monkeypatch):
    """A slow machine is no bad weather."""
    monkeypatch.setattr(mirror, "SETTINGS", {**LIMITS, "init_timeout": 100, "finish_timeout": 100})
