"""Classes of the user's own, "module:Class" beside the task: in place of every part, checked alike."""

import asyncio
import re
import sys
from contextlib import closing
from pathlib import Path

import pytest
import torch

import fedtrain
from fedtrain import aggregation, compression, gossip, pki, strategies, topology
from fedtrain.config import Config, SitePolicy, keep_policy
from fedtrain.errors import ConfigError, TaskError
from fedtrain.gossip import rules
from fedtrain.runtime.own_code import GRAPH, STAR, check_beside_key, named_in, source_digest
from fedtrain.runtime.peers import peer
from fedtrain.runtime.peers.gossip_setup import agreed, algorithm_of
from fedtrain.runtime.sites.approval import Approvals, approve
from fedtrain.runtime.sites.compressed import check_own
from fedtrain.runtime.sites.start import checked_policy
from fedtrain.store import RunStore
from tests.security.test_policy import certificates

TASK = """
import fedtrain, torch
class Toy(fedtrain.Task):
    def sites(self):
        return [f"s{i}" for i in range(6)]
    def model(self):
        return torch.nn.Linear(4, 2)
    def data(self, site):
        x = torch.randn(12, 4, generator=torch.Generator().manual_seed(int(site[1:])))
        return x, (x[:, 0] > 0).long()
    def loss(self, model, batch):
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
"""
# Each is one of ours by another name, so that a run with it must end with the bits of ours.
PARTS = """
from dataclasses import dataclass
from fedtrain.aggregation import BEFORE, RULES
from fedtrain.compression import COMPRESSORS
from fedtrain.gossip import ALGORITHMS
from fedtrain.gossip.rules import RULES as MIXING
from fedtrain.strategies import STRATEGIES
from fedtrain.topology import Graph

@dataclass(frozen=True)
class MyAdam(STRATEGIES["fedadam"]): pass
@dataclass(frozen=True)
class MyMean(RULES["trimmed_mean"]): pass
@dataclass(frozen=True)
class MyNnm(BEFORE["nnm"]): pass
@dataclass(frozen=True)
class MyQuantize(COMPRESSORS["quantize"]): pass
@dataclass(frozen=True)
class MyTopK(COMPRESSORS["topk"]): pass
@dataclass(frozen=True)
class MyRandomK(COMPRESSORS["randomk"]): pass
@dataclass(frozen=True)
class MyPeriodic(ALGORITHMS["periodic"]): pass
@dataclass(frozen=True)
class MyDiLoCo(ALGORITHMS["diloco"]): pass
@dataclass(frozen=True)
class MyClip(MIXING["self_clip"]): pass
@dataclass(frozen=True)
class MyRing(Graph):
    reach: int = 1
    def out(self, members, t, draw):
        n = len(members)
        return [{(i - self.reach) % n, (i + self.reach) % n} for i in range(n)]
class NotFrozen(RULES["median"]): part: float = 0.5
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "parts.py").write_text(PARTS)
    (tmp_path / "fedtrain.toml").write_text('[run]\ntask = "task:Toy"\nrounds = 2\n[simulate]\nworkers = 0\n')
    return tmp_path


OPEN = {"secagg.enabled": False, "strategy.min_sites": 6}
OURS = [
    ("federated", {"strategy.kind": "fedadam", "strategy.tau": 0.01}, {"strategy.kind": "parts:MyAdam"}),
    ("federated", {"aggregation.rule": "trimmed_mean", "aggregation.f": 2, **OPEN},
     {"aggregation.rule": "parts:MyMean"}),
    ("federated", {"aggregation.rule": "median", "aggregation.before": ["nnm:2"], **OPEN},
     {"aggregation.before": ["parts:MyNnm:2"]}),
    ("federated", {"compression.up": "quantize:4", **OPEN}, {"compression.up": "parts:MyQuantize:4"}),
    ("federated", {"compression.down": "error_feedback:topk:0.5", **OPEN},
     {"compression.down": "error_feedback:parts:MyTopK:0.5"}),
    ("federated", {"compression.up": "randomk:0.5"}, {"compression.up": "parts:MyRandomK:fraction=0.5"}),
    ("gossip", {"gossip.algorithm": "periodic", "gossip.every": 2}, {"gossip.algorithm": "parts:MyPeriodic"}),
    ("gossip", {"gossip.topology": "ring"}, {"gossip.topology": "parts:MyRing"}),
    ("gossip", {"gossip.topology": "complete", "gossip.rule": "trimmed_mean:f=1"},
     {"gossip.rule": "parts:MyMean:f=1"}),
    ("gossip", {"gossip.topology": "complete", "gossip.rule": "self_clip:f=1"},
     {"gossip.rule": "parts:MyClip:f=1"}),
    ("gossip", {"gossip.topology": "ring", "gossip.algorithm": "choco", "gossip.gamma": 0.5,
                "gossip.compressor": "topk:0.5"}, {"gossip.compressor": "parts:MyTopK:0.5"}),
    ("gossip", {"gossip.algorithm": "diloco", "gossip.compressor": "quantize:8"},
     {"gossip.compressor": "parts:MyQuantize"}),
]  # fmt: skip


def model(project, mode, settings):
    run = fedtrain.simulate(project, settings, mode=mode, fresh=True)
    with closing(RunStore(run.path)) as store:
        return store.latest().weights.load().data.clone()


@pytest.mark.parametrize(
    ("mode", "ours", "own"), OURS, ids=lambda each: each if isinstance(each, str) else [*each][-1]
)
def test_a_run_with_a_class_of_ones_own_has_the_bits_of_ours_that_it_is_like(project, mode, ours, own):
    assert torch.equal(model(project, mode, ours | own), model(project, mode, ours))


BUILDERS = {
    "strategy.kind": lambda spec, root: strategies.build(spec, {}, root),
    "aggregation.rule": lambda spec, root: aggregation.build(spec, {}, root=root),
    "aggregation.before": lambda spec, root: aggregation.parse(spec, root),
    "compression": lambda spec, root: compression.parse(spec, root),
    "gossip.algorithm": lambda spec, root: gossip.build(spec, {}, root=root),
    "gossip.rule": lambda spec, root: rules.parse(spec, {}, aggregation.build, root=root),
    "topology": lambda spec, root: topology.parse(spec, root=root),
}


@pytest.mark.parametrize("key", BUILDERS)
@pytest.mark.parametrize(
    ("spec", "error", "says"),
    [
        ("nowhere:Mine", ConfigError, "'nowhere:Mine': there is no module 'nowhere' in "),
        ("task:Toy", ConfigError, r"'task:Toy' is not an? .* Write @dataclass.* class Toy\(fedtrain\."),
        ("parts:Missing", ConfigError, "'parts:Missing' is not a"),
        ("parts:NotFrozen", ConfigError, "'parts:NotFrozen' is not a"),
        ("broken:Mine", TaskError, "'broken:Mine': ZeroDivisionError in broken.py:2, in <module>"),
        ("lacking:Mine", TaskError, r"ModuleNotFoundError \(no module named 'nothing_such'\)"),
    ],
)  # fmt: skip
def test_each_part_of_ones_own_is_refused_in_the_same_words(project, key, spec, error, says):
    (project / "broken.py").write_text("secret = 17\n1 / 0\n")
    (project / "lacking.py").write_text("import nothing_such\n")
    with pytest.raises(error, match=f"^{key}: .*{says}"):
        BUILDERS[key](spec, project)


@pytest.mark.parametrize(
    ("spec", "meant"),
    [("quantise:block", "quantize"), ("eror_feedback:topk:0.1", "error_feedback")],
)
def test_a_misspelt_name_of_ours_that_reads_like_a_class_is_told_what_was_meant(project, spec, meant):
    with pytest.raises(ConfigError, match=f"there is no module .* Did you mean '{meant}'"):
        compression.parse(spec, project)


def test_an_option_that_a_class_of_ones_own_does_not_have_is_refused(project):
    with pytest.raises(ConfigError, match=r"parts:MyTopK has no such option. Did you mean fraction"):
        compression.parse("parts:MyTopK:fracton=0.1", project)
    with pytest.raises(ConfigError, match=r"parts:MyRing has no such option. Did you mean reach"):
        topology.parse("parts:MyRing:reech=2", root=project)


def test_two_projects_in_one_process_do_not_mix_their_classes(project, tmp_path):
    for name, factor in (("one", 1.0), ("two", 2.0)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "method.py").write_text(
            "from dataclasses import dataclass\nfrom fedtrain.strategies import Strategy\n"
            f"@dataclass(frozen=True)\nclass Mine(Strategy):\n    factor: float = {factor}\n"
        )
    found = [strategies.build("method:Mine", {}, tmp_path / name).factor for name in ("one", "two", "one")]
    assert found == [1.0, 2.0, 1.0]


# --- what is approved


NAMED = {
    "strategy.kind": {"strategy": {"kind": "parts:MyAdam"}},
    "aggregation.rule": {"aggregation": {"rule": "parts:MyMean"}},
    "aggregation.before 2": {"aggregation": {"before": ["nnm:1", "parts:MyNnm:1"]}},
    "compression.up": {"compression": {"up": "error_feedback:parts:MyTopK:0.1"}},
    "compression.down": {"compression": {"down": "parts:MyQuantize:4"}},
    "gossip.algorithm": {"gossip": {"algorithm": "parts:MyPeriodic"}},
    "gossip.topology": {"gossip": {"topology": "parts:MyRing:2"}},
    "gossip.rule": {"gossip": {"rule": "parts:MyClip:f=1"}},
    "gossip.compressor": {"gossip": {"algorithm": "choco", "compressor": "parts:MyTopK:0.1"}},
}


def of(project, table):
    return Config.of({"run": {"task": "task:Toy"}, "network": {"certs": "certs"}, **table}, project)


def compared(config):
    """What a federation's ends compare, or peers."""
    return agreed(config) if named_in(config, *GRAPH) else source_digest(config)


@pytest.mark.parametrize("key", NAMED)
def test_s22_the_file_of_a_class_of_ones_own_is_approved_with_the_task(project, key):
    certificates(project / "certs", "north")
    config, folder = of(project, NAMED[key]), project / "certs/sites/north"
    assert list(named_in(config, *STAR, *GRAPH)) == [key]
    (project / "parts.py").write_text("raise SystemExit('executed')\n")
    approve(config)
    before = compared(config)
    Approvals(folder).check(config)
    (project / "parts.py").write_text("raise SystemExit('executed again')\n")
    with pytest.raises(ConfigError, match=r"parts\.py changed since task:Toy was approved"):
        Approvals(folder).check(config)
    assert compared(config) != before, "the other end compares it"
    with pytest.raises(ConfigError, match=r"not approved|changed since"):
        Approvals(folder).check(of(project, {}))


def test_s22_what_has_the_name_of_ours_is_no_code_of_ones_own(project):
    (project / "topk.py").write_text("")
    table = {"compression": {"up": "topk:fraction"}, "gossip": {"topology": "file:graph"}}
    assert named_in(of(project, table), *STAR, *GRAPH) == {}


def test_a_file_that_another_mode_would_use_need_not_be_there(project):
    (project / "parts.py").unlink()
    (project / "fedtrain.toml").write_text(
        (project / "fedtrain.toml").read_text() + '[gossip]\nalgorithm = "parts:MyPeriodic"\n'
    )
    assert len(fedtrain.simulate(project).history) == 2


# --- where it may run


def test_s10_a_compressor_of_ones_own_runs_beside_a_sites_key_only_where_the_site_says_so(project):
    certificates(project / "certs", "north")
    config = of(project, {"compression": {"up": "parts:MyRandomK"}})
    with pytest.raises(
        ConfigError, match=r"compression\.up: parts:MyRandomK would run .*confine=off.*secagg"
    ):
        check_beside_key(config, SitePolicy(), peer=False)
    check_beside_key(config, SitePolicy(confine="off"), peer=False)
    open_ = of(project, {"compression": {"up": "parts:MyRandomK"}, "secagg": {"enabled": False}})
    check_beside_key(open_, SitePolicy(), peer=False)
    approve(config)
    with pytest.raises(ConfigError, match="would run in the process that holds this site's key"):
        checked_policy(config, "north", pki.Credentials.load(project / "certs/sites/north"))


@pytest.mark.parametrize("key", [key for key in NAMED if key.startswith("gossip")])
def test_s10_no_line_of_ones_own_runs_beside_a_peers_key_before_its_people_said_so(project, key):
    certificates(project / "certs", "north")
    config, folder = of(project, NAMED[key]), project / "certs/sites/north"
    (project / "parts.py").write_text("open('executed', 'w').close()\n")
    approve(config)

    def start():
        asyncio.run(peer.run(config, "north", emit=print))

    with pytest.raises(ConfigError, match=rf"{key}: parts:.* would run .*this peer's key.*confine=off"):
        start()
    keep_policy(folder, SitePolicy(confine="off"))
    (project / "parts.py").write_text("open('executed', 'w').close()\n# changed\n")
    with pytest.raises(ConfigError, match=r"parts\.py changed since"):
        start()
    assert not (project / "executed").exists()


def test_peers_refuse_a_strategy_of_ones_own_before_they_load_it(project):
    (project / "parts.py").write_text("raise SystemExit('executed')\n")
    with pytest.raises(ConfigError, match=r"strategy\.kind: parts:MyAdam steps at a server"):
        algorithm_of(of(project, NAMED["strategy.kind"]))


# --- what can be checked of it


COMPRESSOR = """
from dataclasses import dataclass
import numpy as np, torch
from fedtrain.compression import Compressor, Linear
@dataclass(frozen=True)
class Mine(Compressor):
    def encode(self, vector, seed, state):
        return vector.view(torch.uint8), state
    def decode(self, payload, seed, n, out=None):
        return payload.view(torch.float32).clone()
    def bytes_for(self, n):
        return 4 * n
@dataclass(frozen=True)
class Short(Mine):
    def bytes_for(self, n):
        return 4 * n - 1
@dataclass(frozen=True)
class Changes(Mine):
    def encode(self, vector, seed, state):
        return vector.mul_(2).view(torch.uint8), state
@dataclass(frozen=True)
class Drawn(Mine):
    def encode(self, vector, seed, state):
        return (vector + torch.rand(len(vector))).view(torch.uint8), state
@dataclass(frozen=True)
class Double(Mine):
    def decode(self, payload, seed, n, out=None):
        return payload.view(torch.float32).double()
@dataclass(frozen=True)
class Squares(Linear):
    def length(self, n):
        return n
    def project(self, vector, seed):
        return vector
    def lift(self, vector, seed, n):
        return vector**2
@dataclass(frozen=True)
class Tripled(Mine):
    def decode(self, payload, seed, n, out=None):
        return 3 * payload.view(torch.float32)
@dataclass(frozen=True)
class Halved(Mine):
    def decode(self, payload, seed, n, out=None):
        return payload.view(torch.float32) / 2
@dataclass(frozen=True)
class Raises(Mine):
    def encode(self, vector, seed, state):
        raise KeyError("patient 17")
"""


@pytest.mark.parametrize(
    ("name", "error", "says"),
    [
        ("Short", ConfigError, r"Short\.encode\(\) made torch.uint8 \[4\] of 1 values: by bytes_for\(\)"),
        ("Changes", ConfigError, "changed the vector that it was given"),
        ("Drawn", ConfigError, "made other bytes of the same vector, seed and state. Draw from .*Keystream"),
        ("Double", ConfigError, r"made torch.float64 \[1\] .* must be torch.float32 \[1\]"),
        ("Squares", ConfigError, r"lift\(\) of a sum is not the sum"),
        ("error_feedback", ConfigError, r"Tripled loses 2 times the norm .*its contraction\(\)"),
        ("Raises", TaskError, r"KeyError in parts\.py:\d+, in encode$"),
    ],
)  # fmt: skip
def test_a_compressor_that_breaks_its_promise_is_refused_before_a_run(project, name, error, says):
    (project / "parts.py").write_text(COMPRESSOR)
    up = "error_feedback:parts:Tripled" if name == "error_feedback" else f"parts:{name}"
    with pytest.raises(error, match=says):
        check_own(of(project, {"compression": {"up": up}, "secagg": {"enabled": False}}))
    check_own(of(project, {"compression": {"up": "parts:Mine"}, "secagg": {"enabled": False}}))


def test_whole_models_travel_by_a_compressor_of_ones_own_that_loses_little(project):
    (project / "parts.py").write_text(COMPRESSOR)
    fine, lossy = (
        of(project, {"gossip": {"algorithm": "diloco", "compressor": f"parts:{name}"}})
        for name in ("Mine", "Halved")
    )
    assert algorithm_of(fine)[0].compressor.inner == compression.parse("parts:Mine", project)
    with pytest.raises(ConfigError, match="diloco sends whole models, and parts:Halved leaves out so much"):
        algorithm_of(lossy)


MY_GRAPH = """
from dataclasses import dataclass
import random
from fedtrain.errors import ConfigError
from fedtrain.topology import Graph
@dataclass(frozen=True)
class Mine(Graph):
    def out(self, members, t, draw):
        return {body}
"""


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("[random.sample([j for j in range(6) if j != i], 2) for i in range(6)]", "another graph for"),
        ("[[1]]", r"Mine\.out\(\) gave \[\[1\]\]\. For each of the 6 members it must give"),
        ("[[i] for i in range(6)]", "others to which it sends"),
        ("[[6] for i in range(6)]", "0 to 5"),
        ("[[(i + 1) % 6] for i in range(6)]", '"metropolis" wants edges that go both ways'),
        ("[[i ^ 1] for i in range(6)]", "is not connected"),
    ],
)  # fmt: skip
def test_a_graph_that_peers_could_not_share_is_refused(project, body, says):
    (project / "parts.py").write_text(MY_GRAPH.format(body=body))
    with pytest.raises(ConfigError, match=says):
        topology.parse("parts:Mine", root=project).check(6)


def test_a_graph_of_ones_own_may_draw_from_the_seed_and_change_from_round_to_round(project):
    body = "[[draw.choice([j for j in range(len(members)) if j != i])] for i in range(len(members))]"
    text = (
        MY_GRAPH.format(body=body) + "    weights = 'push-sum'\n    def period(self, n):\n        return 0\n"
    )
    (project / "parts.py").write_text(text)
    graph = topology.parse("parts:Mine", root=project)
    rounds = [graph.round(9, t, seed=3).edges for t in range(3)]
    assert rounds == [graph.round(9, t, seed=3).edges for t in range(3)]
    assert rounds[0] != rounds[1] != rounds[2]


def test_a_rule_of_ones_own_that_calls_itself_linear_is_refused(project):
    (project / "parts.py").write_text(
        PARTS + "@dataclass(frozen=True)\nclass Mine(RULES['median']):\n    linear = True\n"
    )
    with pytest.raises(
        ConfigError, match=r"parts:Mine says that it is linear, .* its own of\(\) would not be"
    ):
        aggregation.build("parts:Mine", {}, root=project)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"gossip.algorithm": "parts:MyPeriodic", "gossip.compressor": "quantize:4"},
            "no field `compressor`",
        ),
        ({"gossip.algorithm": "parts:MyPeriodic", "simulate.speeds": "lognormal:1"}, "wait for each"),
    ],
)
def test_a_key_that_an_algorithm_of_ones_own_ignores_is_refused(project, settings, says):
    with pytest.raises(ConfigError, match=says):
        fedtrain.simulate(project, settings, mode="gossip", fresh=True)


# --- the pages


PAGES = ["strategies", "aggregation", "compression", "topology", "gossip"]
BLOCK = re.compile(r"```python\n# (my_\w+\.py)\n(.*?)```.*?```toml\n(.*?)```", re.S)


@pytest.mark.parametrize("page", PAGES)
def test_the_example_of_a_page_on_ones_own_runs_as_it_stands(project, page):
    text = (Path(__file__).parents[1] / "docs" / f"{page}.md").read_text()
    name, code, table = BLOCK.search(text).groups()
    (project / name).write_text(code)
    (project / "fedtrain.toml").write_text((project / "fedtrain.toml").read_text() + table)
    run = fedtrain.simulate(project, mode="gossip" if "[gossip]" in table else "federated")
    assert len(run.history) == 2
    assert f"{name.removesuffix('.py')}:" in str(named_in(run.config, *STAR, *GRAPH).values())


def test_a_class_without_fields_of_its_own_needs_no_decorator_and_one_with_them_does(project):
    head = "from typing import ClassVar\nfrom fedtrain.strategies import FedProx\n\nclass Mine(FedProx):\n"
    (project / "plain.py").write_text(head + "    mine: ClassVar[int] = 3\n")
    assert strategies.build("plain:Mine", {"mu": 0.5}, project).mu == 0.5
    (project / "lost.py").write_text(head + "    nu: float = 0.0\n")  # no option: FedProx's __init__ has none
    with pytest.raises(ConfigError, match="'lost:Mine' is not a strategy"):
        strategies.build("lost:Mine", {"mu": 0.5}, project)
