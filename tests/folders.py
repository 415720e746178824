"""Folders of tests that are not in memory."""

import tempfile
from pathlib import Path

import pytest


@pytest.fixture
def on_disk():
    """An empty folder on a disk. Confined trainers may write to /dev/shm, where torch shares tensors."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)
