"""Each check of checks.toml stands in the package, and the test that misses it is there."""

from pathlib import Path

import pytest

from tests.security.checks import CHECKS

ROOT = Path(__file__).parents[2]


def test_every_check_that_mutants_take_out_still_stands_once():
    """Whoever rewrites a check rewrites its line in checks.py, too, and runs `make mutants`."""
    gone = [
        f"{check.name}: {check.text!r} in {check.file}"
        for check in CHECKS
        if (ROOT / "fedtrain" / check.file).read_text().count(check.text) != 1
    ]
    assert gone == []
    assert len({check.name for check in CHECKS}) == len(CHECKS) >= 80


@pytest.mark.parametrize("file", sorted({check.test.partition("::")[0] for check in CHECKS}))
def test_every_test_that_mutants_name_is_there(file):
    text = (ROOT / file).read_text()
    for check in CHECKS:
        path, _, name = check.test.partition("::")
        if path == file:
            assert f"def {name.partition('[')[0]}(" in text, check.test
