"""The example in each base class runs as it stands, and prints what it says."""

import doctest
import importlib

import pytest

BASES = ["aggregation.base", "compression.base", "gossip.base", "gossip.rules.base", "metrics",
         "strategies.base", "topology.base", "training.task"]  # fmt: skip


@pytest.mark.parametrize("module", BASES)
def test_the_example_of_a_base_class_prints_what_it_says(module):
    failed, tried = doctest.testmod(importlib.import_module(f"fedtrain.{module}"))
    assert failed == 0
    assert tried >= 3
