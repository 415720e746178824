"""The table of modes is what the code does: real tiny runs of every mode record which keys they read."""

import asyncio
import re
import sys
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path

import pytest
from click.testing import CliRunner

import fedtrain
from fedtrain import pki
from fedtrain.cli import cli
from fedtrain.config import Config, Source
from fedtrain.errors import ConfigError
from fedtrain.events import silent
from fedtrain.gossip import ALGORITHMS
from fedtrain.modes import (
    MODES,
    NEVER_WAIT,
    NOTHING,
    SHARED,
    WITH_COMPRESSOR,
    check,
    idle,
    keys,
    names_of,
    reads,
)
from fedtrain.runtime import statistics
from fedtrain.runtime.datacenters import datacenter
from fedtrain.runtime.peers import peer
from fedtrain.runtime.simulations import gossip_simulation, simulation
from fedtrain.runtime.sites import site
from fedtrain.runtime.star import aggregator
from fedtrain.runtime.trainers.trainer import Trainer
from fedtrain.runtime.trainers.trainer_messages import Failed
from fedtrain.runtime.trainers.workbench import Workbench
from tests.allowed import allowed
from tests.ports import free_port

TASK = """
import torch
import fedtrain

class Task(fedtrain.Task):
    def model(self):
        return torch.nn.Linear(4, 2)

    def data(self, site):
        x = torch.randn(40, 4, generator=torch.Generator().manual_seed(1))
        return x, (x.sum(1) > 0).long()

    def loss(self, model, batch):
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
"""
SITES = ("a", "b", "c")

# --- a configuration that remembers which keys are read of it

COMPARES = {"agreed", "table", "_environment", "__post_init__"}  # read all keys, or only to refuse some
DATACLASSES = "dataclasses.py"


def recording(config: Config) -> tuple[Config, set[str]]:
    seen: set[str] = set()

    def recorder(name, section):
        own = {f.name for f in fields(section)}

        class Recording(type(section)):
            def __getattribute__(self, key):
                if key in own and not counted_out():
                    seen.add(f"{name}.{key}")
                return super().__getattribute__(key)

        Recording.__name__ = type(section).__name__
        copy = object.__new__(Recording)
        copy.__dict__.update(section.__dict__)
        return copy

    return replace(config, **{n: recorder(n, s) for n, s in config.sections().items()}), seen


def counted_out() -> bool:
    """Whether the reader only compares, copies or refuses."""
    frame = sys._getframe(2)
    while frame.f_code.co_name.startswith("<"):  # a comprehension
        frame = frame.f_back
    return frame.f_code.co_name in COMPARES or frame.f_code.co_filename.endswith(DATACLASSES)


class Inline(Trainer):
    """A trainer in this process, so that what it reads is seen; asked and answered as the real one is."""

    backlog = 0
    plain = False  # whether nothing that it reads counts: an aggregator's only makes the initial model

    def __init__(self, bench):
        self.bench, self.description = bench, bench.description

    @classmethod
    async def start(cls, config, *, data_dir=None, scratch, simulated=False, **_):
        if cls.plain:
            config = Config.of(config.table(), config.root)
        return cls(Workbench(config, data_dir, simulated=simulated))

    async def _ask(self, message):
        answer = self.bench.answer(message)
        assert not isinstance(answer, Failed), answer
        return answer

    async def close(self):
        """Nothing runs."""


@contextmanager
def inline(patch):
    with patch.context() as p:
        p.setattr(Trainer, "start", Inline.start)
        yield


# --- one real run of each mode


def simulate(root, config):
    asyncio.run(simulation.simulate(config, emit=silent))


def gossip(root, config):
    asyncio.run(gossip_simulation.simulate(config, emit=silent))


def in_a_datacenter(root, config):
    datacenter.run(config, emit=silent)


def certified(root, *names):
    if not (root / "certs").exists():
        pki.init(root / "certs")
        for name in names:
            pki.issue(root / "certs", *(("aggregator",) if name == "aggregator" else ("site", name)))


def federation(root, config, plain, recorded):
    """Aggregator and three sites over mutual TLS; one of the ends has the recording configuration."""
    certified(root, "aggregator", *SITES)
    Inline.plain = recorded == "aggregator"

    async def main():
        ends = [
            asyncio.create_task(aggregator.serve(config if recorded == "aggregator" else plain, emit=silent))
        ]
        for name in SITES:
            own = config if (recorded, name) == ("site", "a") else plain
            ends.append(asyncio.create_task(site.run(allowed(own, name), name, emit=silent)))
        await asyncio.wait_for(asyncio.gather(*ends), 60)

    try:
        asyncio.run(main())
    finally:
        Inline.plain = False


def survey(root, config, plain):
    """An aggregator that asks three sites for statistics, and then ends."""
    certified(root, "aggregator", *SITES)
    Inline.plain = True

    async def main():
        ends = [asyncio.create_task(site.run(allowed(plain, name), name, emit=silent)) for name in SITES]
        await asyncio.wait_for(aggregator.survey(config, emit=silent), 60)
        for end in ends:
            end.cancel()
        await asyncio.gather(*ends, return_exceptions=True)

    try:
        asyncio.run(main())
    finally:
        Inline.plain = False


def peers(root, config, plain):
    certified(root, *SITES)

    async def main():
        ends = []
        for name in SITES:
            network = replace(config.network, listen=f"127.0.0.1:{free_port()}") if name != "a" else None
            own = config if name == "a" else replace(plain, network=network)
            ends.append(
                asyncio.create_task(peer.run(allowed(own, name, masks=own.gossip.masks), name, emit=silent))
            )
        await asyncio.wait_for(asyncio.gather(*ends), 60)

    asyncio.run(main())


RUNS = {
    "simulate": lambda root, config, plain: simulate(root, config),
    "gossip": lambda root, config, plain: gossip(root, config),
    "aggregator": lambda root, config, plain: federation(root, config, plain, "aggregator"),
    "site": lambda root, config, plain: federation(root, config, plain, "site"),
    "statistics": survey,
    "stats": lambda root, config, plain: statistics.stats(config),
    "peer": peers,
    "datacenter": lambda root, config, plain: in_a_datacenter(root, config),
    "islands": lambda root, config, plain: in_a_datacenter(root, config),
}
OPEN = {"secagg": {"enabled": False}}
ASYNCHRONOUS = OPEN | {"asynchronous": {"enabled": True}}
NOISE = {"privacy": {"noise_multiplier": 0.1}}
SUMS = {"privacy": {"noise_multiplier": 0.1, "where": "sum"}}
NEVER = {"evaluate": {"every": 0}}
ALLOWED = {"stats": {"allow": True}}
STEPS = {"train": {"local_steps": 2, "optimizer": "adam"}}
SMALL = {"compression": {"up": "topk:0.5", "down": "sign"}}
SWIFT, CHOCO = {"gossip": {"algorithm": "swift"}}, {"gossip": {"algorithm": "choco", "topology": "ring"}}
VARIANTS = [
    *(
        ("simulate", c)
        for c in (
            {},
            {"simulate": {"masks": True}},
            SUMS,
            ASYNCHRONOUS | NOISE,
            OPEN | NEVER | STEPS,
            OPEN | SMALL,
            {"simulate": {"speeds": "straggler:2"}, "strategy": {"enough": 0.9}},
        )
    ),
    *(
        ("gossip", c)
        for c in (OPEN | SMALL, NOISE | STEPS, SWIFT | NEVER, CHOCO, {"gossip": {"masks": True}})
    ),
    *(
        (end, c)
        for end in ("aggregator", "site")
        for c in ({}, SUMS, ASYNCHRONOUS, OPEN | NOISE | STEPS | NEVER | SMALL)
    ),
    *(("peer", c) for c in (OPEN | SMALL, NOISE | NEVER)),
    *(("datacenter", c) for c in ({}, STEPS | NEVER)),
    ("islands", {"parallel": {"sync": "local"}}),
    *(("statistics", c) for c in (ALLOWED, OPEN | ALLOWED)),
    *(("stats", c) for c in ({}, OPEN)),
]
# Read where it changes nothing: handed on to what does not use it, or looked at beside what decides.
IN_VAIN = {"gossip.clip", "gossip.round_deadline", "simulate.engine", "strategy.fraction",
           "evaluate.patience", "privacy.where", "train.eval_batch_size", "train.warmup", "train.decay",
           "parallel.offload_dir", "stats.allow"}  # fmt: skip
# A datacenter refuses noise, sets how many sites its islands are, and deals them the whole pool.
ITS_OWN = {
    name: {"privacy.noise_multiplier", "simulate.sites", "simulate.examples"}
    for name in ("datacenter", "islands")
}
# What makes sums of statistics is made for training, too.
ITS_OWN["statistics"] = {"evaluate.metric"}
# What is approved is all code that the file names, whatever will run it.
ITS_OWN["site"] = {f"gossip.{name}" for name in ("algorithm", "topology", "rule", "compressor")}
ITS_OWN["peer"] = {"aggregation.rule", "aggregation.before", "compression.up", "compression.down",
                   "gossip.compressor"}  # fmt: skip


def configured(root, changes):
    (root / "task.py").write_text(TASK)
    table = {
        "run": {"rounds": 2},
        "strategy": {"min_sites": 3},
        "simulate": {"sites": 4, "workers": 1},
        "gossip": {"topology": "complete"},
        "network": {"listen": f"127.0.0.1:{free_port()}", "heartbeat": "1s"},
    }
    for name, own in changes.items():
        table[name] = table.get(name, {}) | own
    return Config.of(table, root)


@pytest.mark.parametrize(("mode", "changes"), VARIANTS, ids=lambda v: v if isinstance(v, str) else None)
def test_a_mode_reads_just_the_keys_that_its_row_says(tmp_path, monkeypatch, mode, changes):
    plain = configured(tmp_path, changes)
    config, seen = recording(plain)
    with inline(monkeypatch):
        RUNS[mode](tmp_path, config, plain)
    told = reads(plain, mode)
    if mode in ("aggregator", "site", "statistics"):
        seen |= {key for key in plain.agreed() if key in told} | {"strategy.options", "aggregation.options"}
    more, less = seen - told - IN_VAIN - ITS_OWN.get(mode, set()), told - seen
    assert not more, f"{mode} reads {sorted(more)}, which fedtrain/modes.py does not say"
    less = {key for key in less if not only_over_ranks(key)} - {"strategy.attempts"}  # of failures
    if plain.asynchronous.enabled:
        less -= {"evaluate.min_delta"}  # of a second evaluation, which may come too late
    assert not less, f"{mode} does not read {sorted(less)}, as fedtrain/modes.py says"


def only_over_ranks(key):
    """Whether the key is read where models are spread over several ranks, which one process has not."""
    section, _, name = key.partition(".")
    if section not in ("parallel", "checkpoint"):
        return False
    folder = Path(fedtrain.__file__).parent
    files = [*(folder / "training").rglob("*.py"), folder / "runtime" / "trainers" / "ranks.py"]
    return any(re.search(rf"\b(config|parallel)\.{name}\b", file.read_text()) for file in files)


# --- what is refused


def test_every_key_is_read_by_some_mode():
    switched_on = Config.of(
        {
            "asynchronous": {"enabled": False}, "privacy": {"noise_multiplier": 1.0},
            "gossip": {"algorithm": "choco"},
            "train": {"command": "train {out}"},
            "parallel": {"ranks": 2, "sync": "local", "comm_hook": "topk", "pp": 2, "zero": 2,
                         "offload": "disk", "offload_dir": "x"},
        }
    )  # fmt: skip
    without_rounds = Config.of(
        {
            "asynchronous": {"enabled": True},
            "gossip": {"algorithm": "swift", "masks": True},
            "parallel": {"comm_hook": "powersgd"},
            "secagg": {"enabled": False},
            "compression": {"up": "topk:0.1"},
        }
    )
    read = {key for config in (switched_on, without_rounds) for mode in MODES for key in reads(config, mode)}
    assert keys().keys() - read == set(), "name the mode that reads it in fedtrain/modes.py"


def test_what_the_table_says_of_gossip_algorithms_is_so():
    assert {name for name, kind in ALGORITHMS.items() if not kind.waits} == set(NEVER_WAIT)
    takes = {name for name, kind in ALGORITHMS.items() if "compressor" in {f.name for f in fields(kind)}}
    assert takes == set(WITH_COMPRESSOR)


def given(key, value, source=Source.SET, **others):
    """Defaults but for one key, of any value; `others`: sections of a file beneath it."""
    config = Config.of(others)
    section, _, name = key.partition(".")
    changed = object.__new__(type(getattr(config, section)))
    changed.__dict__.update(getattr(config, section).__dict__ | {name: value})
    return replace(config, **{section: changed}, given={**config.given, key: source})


def another(value):
    if isinstance(value, bool):
        return not value
    if isinstance(value, dict):
        return {"f": 1}
    if value == "loss":  # evaluate.metric, whose name has to say which value is better
        return "accuracy"
    return value + 1 if isinstance(value, int | float) else "another"


@pytest.mark.parametrize("key", keys())
def test_a_key_of_set_is_read_or_told_with_where_it_is_read(key):
    """Every key in every mode."""
    config = given(key, True if key in NOTHING else another(keys()[key]))
    for mode in MODES:
        if key in reads(config, mode):
            check(config, mode)
            continue
        told = []
        if key in SHARED:
            check(config, mode, notice=told.append)
        else:
            with pytest.raises(ConfigError, match=rf"^{re.escape(key)} = .* \(--set\): ") as refused:
                check(config, mode)
            told.append(str(refused.value))
        (text,) = told
        where = text.partition("(--set): ")[2]
        assert where.startswith(MODES[mode].command), mode
        assert " it is read by " in where or " reads it only with " in where, mode
        assert "\n" not in where, mode


@pytest.mark.parametrize("value", [False, True])
@pytest.mark.parametrize("mode", ["peer", "gossip", "datacenter", "islands"])
def test_masks_are_switched_neither_on_nor_off_where_the_key_does_nothing(mode, value):
    """In the file `false` promises nothing; who types it wants something of this command."""
    check(Config.of({"secagg": {"enabled": False}}), mode)
    instead = " Here gossip.masks decides." if mode in ("peer", "gossip") else ""
    with pytest.raises(ConfigError, match=rf"secagg.enabled = {value} \(--set\): .*{instead}$"):
        check(given("secagg.enabled", value), mode)


@pytest.mark.parametrize("key", ["train.deterministic", "train.tf32"])
def test_a_choice_that_gpus_alone_have_is_refused_where_the_cpu_is_to_train(key):
    check(given(key, True, train={"device": "cuda"}), "simulate")
    with pytest.raises(ConfigError, match=r"reads it only with train\.device = cuda: a CPU has neither"):
        check(given(key, True, train={"device": "cpu"}), "simulate")


PROJECTS = [
    path for path in Path(fedtrain.__file__).parents[1].rglob("*.toml")
    if path.name in ("fedtrain.toml", "gossip.toml") and ".venv" not in path.parts
]  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
def test_one_file_serves_every_mode(mode):
    """The template's, each example's, and one with a section of every mode."""
    assert len(PROJECTS) >= 6
    for path in PROJECTS:
        check(Config.load(path, env={}), mode)
    check(
        Config.of(
            {
                "strategy": {"kind": "fedprox", "mu": 0.1, "round_deadline": "5s", "fraction": 0.5},
                "secagg": {"max_examples": 100, "clip": 2.0},
                "gossip": {"algorithm": "choco", "topology": "ring", "compressor": "topk:0.1"},
                "parallel": {"zero": 3, "ranks": 2}, "checkpoint": {"every": 5},
                "simulate": {"sites": 4, "workers": 2}, "network": {"address": "h:1"},
                "aggregation": {"rule": "median"} if mode not in ("gossip", "peer", "islands") else {},
            }
        ),
        mode,
    )  # fmt: skip


NOISY = {"privacy": {"noise_multiplier": 1.0}}


@pytest.mark.parametrize(
    ("mode", "file", "message"),
    [
        ("gossip", {"aggregation": {"rule": "krum"}}, "aggregation.rule = 'krum'.*Here gossip.rule decides"),
        ("peer", {"aggregation": {"rule": "trimmed_mean", "f": 2}}, "gossip.rule decides"),
        ("gossip", {"aggregation": {"before": ["nnm:1"]}}, "before = .*Here gossip.rule decides"),
        ("islands", {"aggregation": {"before": ["nnm:1"]}}, "aggregation.before = "),
        ("peer", {"limits": {"max_norm": 1.0}}, "limits.max_norm = 1.0 .in the file.: peer does not read it"),
        ("gossip", {"secagg": {"enabled": True}}, "Here gossip.masks decides"),
        ("gossip", {"simulate": {"engine": "stacked"}, "gossip": {"algorithm": "swift"}},
         "simulate.engine = 'stacked'.*only with a gossip.algorithm other than adpsgd and swift"),
        ("gossip", {"gossip": {"compressor": "topk:0.1"}}, "only with gossip.algorithm = choco"),
        ("datacenter", NOISY, "privacy.noise_multiplier = 1.0.*read by simulate, .*site, peer"),
        ("islands", {"aggregation": {"rule": "median"}}, "aggregation.rule = 'median'"),
        ("islands", {"limits": {"max_norm": 1.0}}, "limits.max_norm"),
        ("site", {"privacy": {"clip": 0.5}}, "reads it only with privacy.noise_multiplier above 0"),
        ("simulate", {"evaluate": {"every": 0, "patience": 3}}, "only with evaluate.every above 0"),
        ("peer", {"gossip": {"clip": 4.0}}, "gossip.masks = true"),
    ],
)  # fmt: skip
def test_a_promise_of_the_file_that_would_not_be_kept_is_refused(mode, file, message):
    with pytest.raises(ConfigError, match=message):
        check(Config.of(file), mode)


@pytest.mark.parametrize(
    ("mode", "file", "sets"),
    [
        (
            "datacenter",
            {"aggregation": {"rule": "median"}},
            [],
        ),  # all data is one pool: there is nobody to rule
        ("gossip", {"aggregation": {"rule": "krum"}, "gossip": {"rule": "self_clip:f=1"}}, []),
        ("peer", {"secagg": {"enabled": True}, "gossip": {"masks": False}}, []),
        ("peer", {"limits": {"max_norm": 1.0}}, ["limits.max_norm=0"]),
        ("simulate", {"evaluate": {"patience": 3}}, ["evaluate.every=0"]),
        (
            "simulate",
            {"secagg": {"groups": 2, "max_examples": 50}},
            ["secagg.enabled=false"],
        ),
        (
            "site",
            {"evaluate": {"every": 0, "patience": 3, "metric": "f1"}},
            [],
        ),  # the aggregator's own affair
        ("aggregator", NOISY, []),  # and the sites'
        ("gossip", {}, ["simulate.engine=loop", "aggregation.rule=mean"]),  # as it is without
    ],
)
def test_what_another_mode_keeps_or_a_stronger_setting_switched_off_may_stand(tmp_path, mode, file, sets):
    text = "".join(f"[{name}]\n" + "".join(f"{k} = {str(v).lower() if isinstance(v, bool) else repr(v)}\n"
                                           for k, v in of.items()) for name, of in file.items())  # fmt: skip
    (tmp_path / "fedtrain.toml").write_text(text)
    check(Config.load(tmp_path / "fedtrain.toml", sets, env={}), mode)


def test_the_environment_may_name_what_a_machine_has_and_not_what_this_mode_leaves_unread(tmp_path):
    (tmp_path / "fedtrain.toml").write_text("")
    load = lambda **env: Config.load(tmp_path / "fedtrain.toml", env=env)
    check(load(FEDTRAIN_NETWORK__CERTS="/certs", FEDTRAIN_RUN__DIR="/runs"), "simulate")
    with pytest.raises(ConfigError, match=r"simulate.workers = 8 \(in the environment\)"):
        check(load(FEDTRAIN_SIMULATE__WORKERS="8"), "gossip")


# --- the commands


def test_each_command_checks_its_own_mode_as_it_begins(tmp_path, monkeypatch):
    certified(tmp_path, "aggregator", "a")
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "fedtrain.toml").write_text("")
    monkeypatch.chdir(tmp_path)
    for command, key in {
        "simulate": "network.listen=h:1", "simulate --mode gossip": "limits.max_norm=1",
        "aggregator": "train.device=cpu:0", "site a": "strategy.fraction=0.5",
        "peer a": "aggregation.rule=krum",
        "datacenter": "aggregation.rule=median", "plan": "gossip.rule=median",
        "plan --ranks 2": "strategy.kind=diloco",
    }.items():  # fmt: skip
        result = CliRunner().invoke(cli, [*command.split(), "--set", key])
        assert result.exit_code == 1, result.output
        assert result.stderr.startswith(f"fedtrain: {key.partition('=')[0]} = "), result.stderr
        assert len(result.stderr.splitlines()) == 1
    assert names_of("datacenter", Config.of({"parallel": {"sync": "local"}}), {}) == ("islands",)
    assert CliRunner().invoke(cli, ["runs", "--set", "train.lr=1"]).exit_code == 0  # looks at runs only


def test_plan_prints_the_row_and_what_is_for_other_modes(tmp_path, monkeypatch):
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "fedtrain.toml").write_text('[gossip]\ntopology = "ring"\n[secagg]\nenabled = false\n')
    monkeypatch.chdir(tmp_path)
    assert idle(Config.load(env={}), "simulate") == ["gossip.topology"]
    lines = CliRunner().invoke(cli, ["plan"]).output.splitlines()
    (row,) = (line for line in lines if line.startswith("simulate reads "))
    assert "strategy" in row
    assert "secagg (enabled)" in row
    assert "set for other modes: gossip.topology" in lines
    islands = CliRunner().invoke(cli, ["plan", "--ranks", "2", "--set", "parallel.sync=local"]).output
    assert "strategy (kind, options)" in islands
