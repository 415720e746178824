"""Five sites roll out by the commands of the docs: a newcomer, a revocation, a renewal, a restore."""

import re
from pathlib import Path

import pytest

from tests.rollout import rollout

PAGE = Path(__file__).parents[2] / "docs" / "start-institution.md"


@pytest.mark.slow(60)
def test_five_sites_roll_out_by_the_commands_that_the_page_counts(tmp_path):
    with rollout(tmp_path) as made:
        made.all()
        counts = re.search(r"took (\d+) commands.*?It took (\d+) with", PAGE.read_text(), re.S)
        assert (made.first_typed, made.typed) == (int(counts[1]), int(counts[2]))
