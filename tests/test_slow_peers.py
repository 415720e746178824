"""One slow peer among others: the others stay together and quick, and its model counts."""

from pathlib import Path

import pytest

from .limits import bounded
from .peers import village

ROOT = Path(__file__).parents[1]
QUICK = [
    ("dpsgd", "ring", "1.1"), ("dpsgd", "base:1", "1.1"), ("sgp", "one-peer-exponential", "1.5"),
    ("dpsgd overlap", "torus", "1.1"),
]  # fmt: skip
ROWS = [
    ("dpsgd", "ring", "0.99"), ("dpsgd", "regular:4", "3"), ("dpsgd", "complete", "three"),
    ("gradient-tracking", "ring", "1.5"), ("choco", "regular:4", "1.1"), ("dpsgd", "ring", "every-other"),
    ("dpsgd", "ring", "two-speeds"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "graph", "case"), [*QUICK, *(pytest.param(*row, marks=pytest.mark.slow(3)) for row in ROWS)]
)
def test_a_slow_peer_parts_no_others_and_its_model_counts(kind, graph, case, monkeypatch):
    """A1: on a ring the others exchanged nothing, from 1.1 deadlines on."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from gossip_slow import DEADLINE_S, run

    told = run(kind, graph, case, trainings=2).told()
    assert told["edges"] >= 0.95
    assert told["round_s"] <= DEADLINE_S / 2
    assert told["counted"] >= 0.2
    assert abs(told["sum_error"]) < 1e-12


@pytest.mark.slow(20)
def test_real_peers_beside_a_slow_one_average_in_nearly_all_rounds(tmp_path):
    """A1: a ring of 5, of whom e trains 1.5 times as long as the deadline."""

    async def main():
        async with village(tmp_path, "abcde", rounds=24, topology="ring", round_deadline="1s") as v:
            pace = dict.fromkeys("abcde", 0.05) | {"e": 1.5}
            ends = [v.start(name, pace_s=pace[name], strategy={"min_sites": 5}) for name in "abcde"]
            results = [await end for end in ends]
            assert not any(result.own_model for result in results)
            assert len({v.of(name, "agreed")[-1]["digest"] for name in "abcde"}) == 1
            heard = {name: [done_at(v, name, other) for other in "abcde"] for name in "abcd"}
            pairs = [("a", 1), ("b", 0), ("b", 2), ("c", 1), ("c", 3), ("d", 2)]
            assert all(heard[name][other] >= 0.9 for name, other in pairs), heard
            assert heard["a"][4] + heard["d"][4] > 0

    bounded(main())


def done_at(v, name, other):
    """In which part of its rounds a peer has averaged with another one."""
    done = [each for each in v.of(name, "site_state") if (each["site"], each["state"]) == (other, "done")]
    return len(done) / v.rounds_of(name)
