"""The security checks of checks.toml, each as a piece of text that can be taken out of a file."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Check:
    """One check: its text in a file of the package, and the test that fails without it."""

    name: str
    file: str  # under fedtrain/
    text: str
    test: str
    becomes: str  # what the text turns into

    def removed_from(self, whole: str) -> str:
        """The file's text without the check."""
        assert whole.count(self.text) == 1, f"{self.name}: its text stands {whole.count(self.text)} times"
        return whole.replace(self.text, self.becomes)


def never(condition: str) -> str:
    """`if X:`, not met any more; what X computes and names, it still does."""
    assert condition[:3] + condition[-1] == "if :", condition
    return f"if ({condition[3:-1]}) and False:"


def checks() -> list[Check]:
    table = tomllib.loads((Path(__file__).with_name("checks.toml")).read_text())
    return [
        Check(name, file, text, test, rest[0] if rest else never(text))
        for file, rows in table.items()
        for name, (text, test, *rest) in rows.items()
    ]


CHECKS = checks()
