"""M4: what peers under masks learn when they put their sums together, in the numbers of docs/gossip.md."""

import re
from itertools import combinations
from math import comb
from pathlib import Path

import numpy as np
import pytest

from fedtrain.topology import analysis, parse
from fedtrain.topology.coalitions import opened, opening, smallest

PAGE = (Path(__file__).parents[2] / "docs/gossip.md").read_text()
ROWS = re.findall(r"^\| `([a-z0-9:]+)` \| ([a-z0-9 ,]+) \| ([a-z0-9 ,]+) \| ([a-z0-9 ,]+) \|$", PAGE, re.M)


@pytest.mark.parametrize(
    ("kind", "n", "said"), [(r[0], n, r[i]) for r in ROWS for i, n in enumerate((8, 10, 12), 1)]
)
def test_m4_the_pages_numbers_are_those_that_the_equations_give(kind, n, said):
    if said == "all others":
        assert smallest(parse(kind), n) == "nobody opens another's model, but all others together"
    else:
        size, found, cases = map(int, re.findall(r"\d+", said))
        assert cases == comb(n, size)
        assert opening(parse(kind), n, size) == found
        assert not any(opening(parse(kind), n, fewer) for fewer in range(1, size))


def test_the_page_has_a_row_for_each_kind_of_graph_that_it_names():
    assert [row[0] for row in ROWS] == [
        "regular:3",
        "regular:4",
        "regular:6",
        "torus",
        "exponential",
        "complete",
    ]


def test_what_is_opened_can_be_worked_out_and_the_rest_cannot():
    """Two sets of models with the same sums agree where something is opened, and nowhere else."""
    draw, mixing = np.random.default_rng(0), parse("regular:4").round(8, 0)
    models = draw.normal(size=(8, 5))
    for some in combinations(range(8), 3):
        others = [i for i in range(8) if i not in some]
        sums = mixing.matrix[np.ix_(some, others)]
        least = np.linalg.lstsq(sums, sums @ models[others], rcond=None)[0]  # of all models with these sums
        free = np.eye(5) - np.linalg.pinv(sums) @ sums
        another = least + free @ draw.normal(size=(5, 5))
        known = [i for i, a, b in zip(others, least, another, strict=True) if np.allclose(a, b)]
        assert opened(mixing, some) == known
        assert all(np.allclose(least[others.index(i)], models[i]) for i in known)


def test_a_report_says_it_where_there_can_be_masks_and_not_too_many_peers():
    lines = analysis.report(parse("regular:4"), 8).lines(1000)
    assert lines[-1] == "under masks     3 peers together open another's model in 24 of 56 cases, fewer never"
    for kind, n in (("ring", 8), ("base:1", 8), ("regular:4", 13), ("matching", 8), ("complete", 1)):
        assert not analysis.report(parse(kind), n).masks
