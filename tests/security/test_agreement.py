"""S22, S15: whoever would train something else does not join, and is told what differs."""

import pytest
from msgspec.structs import replace

from fedtrain.config import Config
from fedtrain.errors import JoinRefused
from fedtrain.runtime.star.agreement import agree
from fedtrain.schema import Schema, TensorSpec
from fedtrain.wire.frames import PROTOCOL, Hello

CONFIG = Config.of({"train": {"lr": 0.5}})
MODEL, OTHER = (Schema((TensorSpec("w", (n,), "float32", True),)) for n in (4, 5))
HELLO = Hello(
    protocol=PROTOCOL, version="1", task_digest="d" * 64, schema=MODEL, agreed=CONFIG.agreed()
)  # fmt: skip


@pytest.mark.parametrize(
    ("differs", "why"),
    [
        ({"protocol": PROTOCOL - 1}, "a speaks protocol"),
        (
            {"task_digest": "e" * 64},
            "a and the aggregator have different task code: eeeeeeeeeeee at the site",
        ),
        ({"agreed": CONFIG.agreed() | {"train.lr": "0.1"}}, "differ in train.lr: 0.1 at the site, 0.5 at"),
        (
            {"agreed": CONFIG.agreed() | {"train.lr": "0.1", "run.seed": "7"}},
            r"differ in run.seed: 7 at the site, 0 at the aggregator; train.lr: 0.1 at the site, 0.5 at the",
        ),
        ({"agreed": {}}, r"a and the aggregator differ in .*; and in \d+ more\. Use the same fedtrain.toml"),
        ({"schema": OTHER}, "a and the aggregator have different models: w"),
        ({"frozen": OTHER}, "a and the aggregator have different models"),
    ],
    ids=["protocol", "task", "setting", "two settings", "no settings", "model", "frozen"],
)
def test_s22_a_site_that_would_train_something_else_does_not_join(differs, why):
    agree("a", HELLO, CONFIG, MODEL, "d" * 64)
    with pytest.raises(JoinRefused, match=why):
        agree("a", replace(HELLO, **differs), CONFIG, MODEL, "d" * 64)
