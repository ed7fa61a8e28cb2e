import pytest

from data import preparation, writer


@pytest.fixture
def home(tmp_path_factory, monkeypatch):
    """What `datasets` keeps for itself."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("home"))


@pytest.fixture
def small(home, monkeypatch):
    """So that little text has many shards, batches and places to go on from."""
    for module, name, value in (
        (writer, "SHARD", 1000),
        (preparation, "BATCH", 200),
        (writer, "SAVE_EVERY", 900),
    ):
        monkeypatch.setattr(module, name, value)
