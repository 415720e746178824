"""benchmarks/bare_stream.py, against which a deployed round is held."""

import importlib
from pathlib import Path

import pytest

from tests.federation import certificates

SITES = "north", "south"


@pytest.mark.slow
def test_a_bare_stream_moves_the_bytes_again_each_time_that_it_is_told_to(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    module = importlib.import_module("bare_stream")
    certs = certificates(tmp_path / "certs", *SITES)
    with module.BareStream(certs, SITES, 3 * module.CHUNK_BYTES + 5) as bare:
        assert all(bare.once() > 0 for _ in range(2))
        assert all(process.poll() is None for process in (*bare._clients, bare._server))
