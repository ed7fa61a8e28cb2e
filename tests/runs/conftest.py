"""Runs that several files compare theirs with."""

import functools
from pathlib import Path

import pytest

from tests.runs.tiny import start


@pytest.fixture(scope="session")
def reference(tmp_path_factory):
    """Runs that nothing disturbs, by name of the optimizer."""

    @functools.cache
    def run(optimizer: str) -> Path:
        return start(tmp_path_factory.mktemp(optimizer), optimizer={"name": optimizer})

    return run
