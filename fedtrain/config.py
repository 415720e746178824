"""fedtrain.toml -> frozen dataclasses.

One file serves every mode. `--set train.lr=0.01` and FEDTRAIN_TRAIN__LR=0.01 override it, in that order of
strength. A key that nobody reads is an error that names the nearest one that exists.
"""

from __future__ import annotations

import difflib
import hashlib
import math
import os
import re
import tomllib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from enum import IntEnum
from pathlib import Path
from typing import Any, Literal, TypeVar, get_type_hints

import msgspec

from .errors import ConfigError

T = TypeVar("T")
OWN = {"root", "given"}  # of a Config, and no sections

UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}  # seconds


class Seconds(float):
    """A duration; in files "500ms", "30s", "10m", "2h" or a plain number of seconds."""

    @classmethod
    def parse(cls, value: object) -> Seconds:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return cls(value)
        match = re.fullmatch(r"\s*([\d.]+)\s*(ms|s|m|h|d)\s*", str(value))
        if match is None:
            raise ValueError(f'{value!r} is not a duration; write "500ms", "30s", "10m", "2h" or seconds')
        return cls(float(match[1]) * UNITS[match[2]])


@dataclass(frozen=True)
class Run:
    task: str = "task:Task"  # module:Class, the module beside this file
    name: str = "run"
    rounds: int = 10
    seed: int = 0
    dir: str = "runs"  # where run directories are made, relative to this file

    def __post_init__(self) -> None:
        require(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", self.name), "run.name",
                f"{self.name!r} must be 1 to 64 letters, digits, '.', '_' or '-'")  # fmt: skip
        require(":" in self.task, "run.task", f'{self.task!r} must be "module:Class", as in "task:Heart"')
        require(self.rounds >= 1, "run.rounds", f"{self.rounds} must be at least 1")
        require(0 <= self.seed < 2**63, "run.seed", f"{self.seed} must be between 0 and 2^63-1")


@dataclass(frozen=True)
class TrainConfig:
    """How a site trains. Everything here but device and threads must be the same at all sites."""

    local_epochs: int = 1
    local_steps: int = 0  # optimizer steps a round; 0: local_epochs decides
    batch_size: int = 32  # 0: the whole local dataset in one batch
    optimizer: str = "sgd"  # sgd | adam | adamw, unless the task has its own optimizer()
    lr: float = 0.01
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip_norm: float = 0.0  # bound on the gradient's norm a step; 0: none
    accumulate: int = 1  # batches summed into one optimizer step
    precision: str = "fp32"  # fp32 | bf16 | fp16 autocast
    drop_last: bool = False
    eval_batch_size: int = 256
    device: str = "auto"  # auto | cpu | cuda | cuda:1
    threads: int = 1  # CPU threads; equal counts give equal bits

    def __post_init__(self) -> None:
        require(self.local_epochs >= 1, "train.local_epochs", f"{self.local_epochs} must be at least 1")
        require(self.local_steps >= 0, "train.local_steps", f"{self.local_steps} must be 0 or more")
        require(self.batch_size >= 0, "train.batch_size", f"{self.batch_size} must be 0 (all) or more")
        require(self.lr > 0, "train.lr", f"{self.lr} must be positive")
        require(self.accumulate >= 1, "train.accumulate", f"{self.accumulate} must be at least 1")
        require(self.clip_norm >= 0, "train.clip_norm", f"{self.clip_norm} must be 0 (off) or positive")
        require(self.threads >= 1, "train.threads", f"{self.threads} must be at least 1")
        require(self.eval_batch_size >= 1, "train.eval_batch_size", "must be at least 1")
        one_of("train.precision", self.precision, ("fp32", "bf16", "fp16"))
        one_of("train.optimizer", self.optimizer, ("sgd", "adam", "adamw"))


@dataclass(frozen=True)
class StrategyConfig:
    """Who takes part in a round, and how the global model moves. Other keys are the strategy's own fields."""

    kind: str = "fedavg"
    min_sites: int = 3  # a round needs this many valid updates
    fraction: float = 1.0  # of the joined sites, sampled each round
    round_deadline: Seconds = Seconds(600)
    attempts: int = 3  # times a round is tried before the run stops
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require(self.min_sites >= 1, "strategy.min_sites", f"{self.min_sites} must be at least 1")
        require(0 < self.fraction <= 1, "strategy.fraction", f"{self.fraction} must be in (0, 1]")
        require(self.round_deadline > 0, "strategy.round_deadline", "must be positive")
        require(self.attempts >= 1, "strategy.attempts", "must be at least 1")


@dataclass(frozen=True)
class AggregationConfig:
    """How a round's updates become one. Other keys are the rule's own fields."""

    rule: str = "mean"
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class AsynchronousConfig:
    """No rounds: a site is asked again as soon as its update is in (FedBuff, Nguyen et al. 2022)."""

    enabled: bool = False
    buffer: int = 3  # updates that make a version of the model, the paper's K; 1: each moves it (FedAsync)
    max_staleness: int = 20  # versions; an update that was trained from an older model is refused
    staleness_exponent: float = 0.5  # an update counts (1 + its staleness)^-this; 0: all alike

    def __post_init__(self) -> None:
        require(self.buffer >= 1, "asynchronous.buffer", f"{self.buffer} must be at least 1")
        require(self.max_staleness >= 0, "asynchronous.max_staleness", f"{self.max_staleness} must be >= 0")
        require(0 <= self.staleness_exponent < math.inf, "asynchronous.staleness_exponent",
                f"{self.staleness_exponent} must be 0 (off) or positive")  # fmt: skip


@dataclass(frozen=True)
class SecAggConfig:
    """Secure aggregation: the aggregator learns sums over sites and nothing else.

    Each site holds the aggregator to its own file: what is asked for there with other values is refused.
    """

    enabled: bool = True
    clip: float = 1.0  # bound on a coordinate of (examples / max_examples) * delta
    max_examples: float = 10_000.0  # of one site
    ring_bits: Literal[16, 32, 64] = 32  # bytes a coordinate travels in, times 8: 16 | 32 | 64
    value_bits: int = 0  # of them for one site's value; 0: as many as the sum over all sites leaves room for
    groups: int = 1  # sums per random group of sites, redrawn each round, for robust rules
    full_graph: int = 100  # up to so many sites everybody masks with everybody; beyond, with some neighbours:
    corrupt: float = 0.2  # enough of them, should this part of the sites be with the aggregator ...
    dropout: float = 0.2  # ... while this part is lost in the round

    def __post_init__(self) -> None:
        require(0 < self.clip < math.inf, "secagg.clip", f"{self.clip} must be positive and finite")
        require(0 < self.max_examples < math.inf, "secagg.max_examples",
                f"{self.max_examples} must be positive and finite")  # fmt: skip
        require(self.ring_bits in (16, 32, 64), "secagg.ring_bits", f"{self.ring_bits} must be 16, 32 or 64")
        require(self.value_bits == 0 or 4 <= self.value_bits < self.ring_bits, "secagg.value_bits",
                f"{self.value_bits} must be 0 (as many as fit), or 4 to secagg.ring_bits - 1")  # fmt: skip
        require(self.groups >= 1, "secagg.groups", f"{self.groups} must be at least 1")
        require(self.full_graph >= 0, "secagg.full_graph", f"{self.full_graph} must not be negative")
        require(0 <= self.corrupt < 1, "secagg.corrupt", f"{self.corrupt} must be in [0, 1)")
        require(0 <= self.dropout < 1 - self.corrupt, "secagg.dropout",
                f"{self.dropout} must be in [0, 1 - secagg.corrupt)")  # fmt: skip


@dataclass(frozen=True)
class CompressionConfig:
    """What travels in fewer bytes; each is a compressor in one line, as in "quantize:8" or "topk:0.01"."""

    up: str = ""  # of updates; under masks a linear one: "randomk:0.1", "lowrank:4"
    down: str = ""  # of what the model moves by in a round, with error feedback at the aggregator
    error_feedback: bool = True  # what a biased compressor left out is kept, and added to what comes next


@dataclass(frozen=True)
class PrivacyConfig:
    """Noise on what a site gives away, each site's own affair: local differential privacy."""

    noise_multiplier: float = 0.0  # the noise's standard deviation, in multiples of clip; 0: no noise
    clip: float = 1.0  # L2 norm to which an update is shortened
    delta: float = 1e-5  # for which epsilon is told

    def __post_init__(self) -> None:
        require(0 <= self.noise_multiplier < float("inf"), "privacy.noise_multiplier",
                f"{self.noise_multiplier} must be 0 (no noise) or more")  # fmt: skip
        require(0 < self.clip < float("inf"), "privacy.clip", f"{self.clip} must be positive")
        require(0 < self.delta < 1, "privacy.delta", f"{self.delta} must be between 0 and 1")


@dataclass(frozen=True)
class EvaluateConfig:
    every: int = 1  # rounds between evaluations; the last round is always evaluated; 0: never
    metric: str = "loss"  # decides early stop and the best model
    mode: str = "auto"  # min | max | auto (min for *loss* and *error*)
    patience: int = 0  # evaluations without improvement before the run stops; 0: never
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        require(self.every >= 0, "evaluate.every", f"{self.every} must be 0 (never) or more")
        require(self.patience >= 0, "evaluate.patience", f"{self.patience} must be 0 (off) or more")
        one_of("evaluate.mode", self.mode, ("auto", "min", "max"))

    def better(self, new: float, old: float | None) -> bool:
        lower = self.mode == "min" or (
            self.mode == "auto" and any(word in self.metric for word in ("loss", "error", "perplexity"))
        )
        if new != new:  # NaN is never better
            return False
        return old is None or (new < old - self.min_delta if lower else new > old + self.min_delta)


@dataclass(frozen=True)
class LimitsConfig:
    """What an update may be before it is refused (S16-S19)."""

    max_examples: float = 1e9  # a claimed sample count above this is refused
    max_norm: float = 0.0  # L2 norm of delta; 0: no bound

    def __post_init__(self) -> None:
        require(self.max_examples > 0, "limits.max_examples", "must be positive")
        require(self.max_norm >= 0, "limits.max_norm", "must be 0 (off) or positive")


@dataclass(frozen=True)
class NetworkConfig:
    """Where the aggregator is. The three time settings: heartbeat, idle, strategy.round_deadline."""

    listen: str = "127.0.0.1:8440"
    address: str = ""  # what sites connect to; empty: the same as listen
    certs: str = "certs"  # directory made by `fedtrain certs`, relative to this file
    heartbeat: Seconds = Seconds(5)
    idle: Seconds = Seconds(30)  # a lost site is waited for this long within a round, and to hear of the end

    def __post_init__(self) -> None:
        for name in ("listen", "address"):
            value = getattr(self, name)
            found = re.fullmatch(r"\[?[^\s/]+\]?:(\d{1,5})", value)
            require(not value or (found and int(found[1]) < 1 << 16), f"network.{name}",
                    f'{value!r} must be "host:port", the port at most 65535')  # fmt: skip
        require(self.heartbeat >= 1, "network.heartbeat", "must be at least 1s")
        require(self.idle > 0, "network.idle", "must be positive")


@dataclass(frozen=True)
class SimulateConfig:
    sites: int = 10  # when the task names no natural sites
    partition: str = "iid"  # iid | dirichlet:0.3 | shards:2 | quantity:0.5
    workers: int = 0  # processes; 0: one a core
    engine: str = "loop"  # loop (the federation's bits) | vmap (many small sites at once)
    masks: bool = False  # do all of secure aggregation's work as it is done for real; the model is the same
    speeds: str = "equal"  # of asynchronous sites: equal | lognormal:1 | straggler:10

    def __post_init__(self) -> None:
        require(self.sites >= 1, "simulate.sites", f"{self.sites} must be at least 1")
        require(self.workers >= 0, "simulate.workers", f"{self.workers} must be 0 (one a core) or more")
        one_of("simulate.engine", self.engine, ("loop", "vmap"))
        require(re.fullmatch(r"equal|(lognormal|straggler):\d+(\.\d+)?", self.speeds), "simulate.speeds",
                f'{self.speeds!r} must be "equal", "lognormal:1" or "straggler:10"')  # fmt: skip


@dataclass(frozen=True)
class GossipConfig:
    """How peers average without a server. Other keys are the algorithm's own fields."""

    algorithm: str = "dpsgd"
    topology: str = "base:1"  # who talks to whom: `fedtrain topology` knows them
    weights: str = ""  # metropolis | uniform | push-sum; "": what suits the topology
    compressor: str = "quantize:8"  # of choco
    rule: str = "mean"  # what a peer makes of its neighbours' models: "median", "self_clip:f=1", ...
    masks: bool = False  # a peer learns the sum of its neighbours' models and no single one
    clip: float = 16.0  # under masks: bound on a coordinate of a model times its weight
    round_deadline: Seconds = Seconds(600)  # a neighbour later than this, by its own start, is left out
    roster: str = "roster"  # folder of the peers' signed entries, relative to this file
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require(self.round_deadline > 0, "gossip.round_deadline", "must be positive")
        require(0 < self.clip < float("inf"), "gossip.clip", f"{self.clip} must be positive")


@dataclass(frozen=True)
class ParallelConfig:
    """How many ranks share the training of one model: `fedtrain datacenter`, or a site of several ranks."""

    ranks: int = 1  # processes that `fedtrain site` trains with; of a datacenter, torchrun decides
    dp: int = 0  # data-parallel ranks; 0: what the other axes leave
    zero: int = 0  # what they shard: 0 nothing, 1 the optimizer's state, 2 gradients too, 3 parameters too
    replicate: int = 0  # of dp, full copies: HSDP groups or islands; 0: one where sync is "step", else dp
    tp: int = 1  # tensor-parallel ranks
    sp: bool = False  # sequence parallel between them
    pp: int = 1  # pipeline stages' ranks
    cp: int = 1  # context-parallel ranks: each has a part of every sequence
    schedule: str = "1f1b"  # of the pipeline: gpipe | 1f1b | interleaved
    microbatches: int = 0  # a batch is cut into for the pipeline; 0: twice pp
    offload: str = "none"  # where shards rest (zero 2 and 3): none | cpu | disk | nvme
    offload_dir: str = ""  # of disk and nvme: a folder on a disk of this machine, for the optimizer's state
    checkpoint_activations: bool = False
    compile: bool = False
    comm_hook: str = "none"  # gradients on the wire: none | fp16 | bf16 | powersgd | topk
    comm_rank: int = 4  # of powersgd
    comm_fraction: float = 0.01  # of coordinates that topk sends
    find_unused: bool = False  # some parameters take no part in some losses
    sync: str = "step"  # step: gradients every step | local: islands, and [strategy] between rounds
    carry: bool = True  # islands keep optimizer and place in the data between rounds; false: as sites do
    fragments: int = 1  # pieces of the model that islands exchange one after the other (streaming)
    overlap: int = 0  # steps that go on while a fragment is exchanged
    mix: float = 0.0  # share of an island's own weights that it keeps when a fragment comes back
    warmup: int = 0  # steps over which the learning rate rises
    decay: str = "none"  # of the learning rate, to 0 at the last step: none | linear | cosine
    nonfinite: str = "skip"  # a step whose gradient has NaN or Inf: skip | raise
    log_every: int = 10  # steps between events
    peak_tflops: float = 0.0  # of one device, for MFU; 0: known GPUs by name, else no MFU
    timeout: Seconds = Seconds(600)  # of a collective, before it counts as hanging

    def __post_init__(self) -> None:
        for name in ("ranks", "tp", "pp", "cp", "comm_rank", "fragments", "log_every"):
            require(getattr(self, name) >= 1, f"parallel.{name}", f"{getattr(self, name)} must be at least 1")
        for name in ("dp", "replicate", "microbatches", "overlap", "warmup", "peak_tflops"):
            require(getattr(self, name) >= 0, f"parallel.{name}", f"{getattr(self, name)} must be 0 or more")
        require(self.zero in (0, 1, 2, 3), "parallel.zero", f"{self.zero} must be 0, 1, 2 or 3")
        require(0 < self.comm_fraction <= 1, "parallel.comm_fraction", "must be in (0, 1]")
        require(0 <= self.mix < 1, "parallel.mix", f"{self.mix} must be in [0, 1)")
        require(self.timeout > 0, "parallel.timeout", "must be positive")
        require(not self.sp or self.tp > 1, "parallel.sp", "needs parallel.tp of 2 or more")
        one_of("parallel.offload", self.offload, ("none", "cpu", "disk", "nvme"))
        require(self.offload == "none" or self.zero >= 2, "parallel.offload", "needs parallel.zero = 2 or 3")
        require(self.offload not in ("disk", "nvme") or self.offload_dir != "", "parallel.offload_dir",
                f"parallel.offload = {self.offload} needs a folder on a disk of this machine")  # fmt: skip
        one_of("parallel.schedule", self.schedule, ("gpipe", "1f1b", "interleaved"))
        one_of("parallel.comm_hook", self.comm_hook, ("none", "fp16", "bf16", "powersgd", "topk"))
        one_of("parallel.sync", self.sync, ("step", "local"))
        one_of("parallel.decay", self.decay, ("none", "linear", "cosine"))
        one_of("parallel.nonfinite", self.nonfinite, ("skip", "raise"))


@dataclass(frozen=True)
class CheckpointConfig:
    """Where and how often a run in a datacenter keeps its state."""

    every: int = 100  # optimizer steps between checkpoints; 0: only at the end, and on SIGTERM
    keep: int = 3
    background: bool = True  # training goes on while the disk or bucket is written
    dir: str = ""  # a folder relative to this file, or s3://bucket/prefix; empty: in the run directory
    format: str = "sharded"  # sharded: each rank writes its pieces | full: whole tensors in one file
    patience: Seconds = Seconds(120)  # how long a bucket may be away before a save or a load fails

    def __post_init__(self) -> None:
        require(self.every >= 0, "checkpoint.every", f"{self.every} must be 0 (at the end) or more")
        require(self.keep >= 1, "checkpoint.keep", f"{self.keep} must be at least 1")
        require(self.patience > 0, "checkpoint.patience", "must be positive")
        require("://" not in self.dir or self.dir.startswith("s3://"), "checkpoint.dir",
                f'{self.dir!r} must be a folder, or "s3://bucket/prefix"')  # fmt: skip
        one_of("checkpoint.format", self.format, ("sharded", "full"))


class Source(IntEnum):
    """Who sets a key; the stronger is the larger."""

    FILE = 0
    ENVIRONMENT = 1
    SET = 2

    def __str__(self) -> str:
        return ("in the file", "in the environment", "--set")[self]


@dataclass(frozen=True)
class Config:
    """All of fedtrain.toml. `root` is the folder that it lies in."""

    run: Run = field(default_factory=Run)
    train: TrainConfig = field(default_factory=TrainConfig)
    strategy: StrategyConfig = field(default_factory=StrategyConfig)
    aggregation: AggregationConfig = field(default_factory=AggregationConfig)
    asynchronous: AsynchronousConfig = field(default_factory=AsynchronousConfig)
    secagg: SecAggConfig = field(default_factory=SecAggConfig)
    compression: CompressionConfig = field(default_factory=CompressionConfig)
    privacy: PrivacyConfig = field(default_factory=PrivacyConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    network: NetworkConfig = field(default_factory=NetworkConfig)
    simulate: SimulateConfig = field(default_factory=SimulateConfig)
    gossip: GossipConfig = field(default_factory=GossipConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    root: Path = Path()
    given: Mapping[str, Source] = field(default_factory=dict, compare=False, repr=False)  # keys that are set

    @classmethod
    def load(
        cls,
        path: Path | str = "fedtrain.toml",
        sets: Iterable[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> Config:
        """Read the file, then the environment, then `sets` ("train.lr=0.01")."""
        path = Path(path)
        try:
            table = tomllib.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(
                f"{path} does not exist. `fedtrain new NAME` makes a project; --config FILE names another."
            ) from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
            raise ConfigError(f"{path}: {e}") from None
        stronger: dict[str, Source] = {}
        for name, value in (os.environ if env is None else env).items():
            if name.startswith("FEDTRAIN_") and "__" in name:
                key = name.removeprefix("FEDTRAIN_").lower().replace("__", ".")
                put(table, key, value, name)
                stronger[key] = Source.ENVIRONMENT
        for item in sets:
            key, equals, value = item.partition("=")
            if not equals:
                raise ConfigError(f"--set {item}: write --set section.key=value, as in --set train.lr=0.01")
            put(table, key.strip(), value.strip(), f"--set {item}")
            stronger[key.strip()] = Source.SET
        config = cls.of(table, root=path.resolve().parent)
        return replace(config, given={**config.given, **stronger})

    @classmethod
    def of(cls, table: dict[str, Any], root: Path | str = ".") -> Config:
        """From the file's table; what is in it counts as set in the file."""
        table = {section: dict(keys) if isinstance(keys, dict) else keys for section, keys in table.items()}
        given = {f"{section}.{key}": Source.FILE
                 for section, keys in table.items() if isinstance(keys, dict) for key in keys}  # fmt: skip
        for section, kind in (
            ("strategy", StrategyConfig), ("aggregation", AggregationConfig), ("gossip", GossipConfig)
        ):  # fmt: skip
            keys = table.get(section, {})
            if isinstance(keys, dict) and "options" not in keys:
                own = {f.name for f in fields(kind)}
                keys["options"] = {k: keys.pop(k) for k in list(keys) if k not in own}
        for name in OWN & table.keys():
            raise ConfigError(f"{name}: unknown section")
        return replace(build(cls, {**table, "root": str(Path(root).resolve())}, ""), given=given)

    def sections(self) -> dict[str, Any]:
        """Name -> dataclass, in the order of the file."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in OWN}

    def value(self, key: str) -> Any:
        """Of "section.key", which may be one of the section's options."""
        section, _, name = key.partition(".")
        of = self.sections()[section]
        return getattr(of, name) if hasattr(of, name) else of.options[name]

    def agreed(self) -> dict[str, str]:
        """What every participant must have alike for the numbers to mean the same: key -> value as text."""
        local = {"device", "threads", "eval_batch_size"}
        pairs = {f"train.{f.name}": getattr(self.train, f.name)
                 for f in fields(self.train) if f.name not in local}  # fmt: skip
        pairs |= {f"strategy.{k}": v for k, v in self.strategy.options.items()}
        pairs |= {f"aggregation.{k}": v for k, v in self.aggregation.options.items()}
        pairs |= {f"asynchronous.{f.name}": getattr(self.asynchronous, f.name)
                  for f in fields(self.asynchronous)}  # fmt: skip
        pairs |= {f"secagg.{f.name}": getattr(self.secagg, f.name) for f in fields(self.secagg)}
        pairs |= {f"compression.{f.name}": getattr(self.compression, f.name)
                  for f in fields(self.compression)}  # fmt: skip
        pairs |= {"run.name": self.run.name, "run.seed": self.run.seed, "run.task": self.run.task,
                  "strategy.kind": self.strategy.kind,
                  "aggregation.rule": self.aggregation.rule}  # fmt: skip
        if self.secagg.enabled:  # what the aggregator can't see, sites hold to
            pairs |= {f"limits.{f.name}": getattr(self.limits, f.name) for f in fields(self.limits)}
        return {k: repr(v) for k, v in sorted(pairs.items())}

    def digest(self) -> str:
        """SHA-256 over `agreed()`."""
        return hashlib.sha256(msgspec.json.encode(self.agreed())).hexdigest()

    def table(self) -> dict[str, Any]:
        """Plain values of every section, defaults included, for the run directory."""
        return {
            name: {f.name: _plain(getattr(section, f.name)) for f in fields(section)}
            for name, section in self.sections().items()
        }

    @property
    def run_dir(self) -> Path:
        """The aggregator's; a run name has neither '@' nor '+', so the three kinds never meet."""
        return self.root / self.run.dir / self.run.name

    @property
    def simulate_dir(self) -> Path:
        return self.root / self.run.dir / f"{self.run.name}+simulate"

    @property
    def gossip_dir(self) -> Path:
        """A simulation's of peers."""
        return self.root / self.run.dir / f"{self.run.name}+gossip"

    def peer_dir(self, peer: str) -> Path:
        return self.root / self.run.dir / f"{self.run.name}+gossip@{peer}"

    @property
    def datacenter_dir(self) -> Path:
        return self.root / self.run.dir / f"{self.run.name}+datacenter"

    @property
    def checkpoint_dir(self) -> Path | str:
        """Where checkpoints lie: checkpoint.dir, or a folder of the run's own."""
        own = self.checkpoint.dir
        if not own:
            return self.datacenter_dir / "checkpoints"
        return own if "://" in own else self.root / own

    def site_dir(self, site: str) -> Path:
        return self.root / self.run.dir / f"{self.run.name}@{site}"


def _plain(value: Any) -> Any:
    return float(value) if isinstance(value, Seconds) else value


def build(cls: type[T], table: object, where: str) -> T:
    """A frozen dataclass from a TOML table; every mistake is a ConfigError that says what to change."""
    if not isinstance(table, dict):
        raise ConfigError(f"{where}: expected a table [{where}], got {table!r}")
    known = {f.name: f for f in fields(cls)}  # type: ignore[arg-type]  # cls is always a dataclass
    types = get_type_hints(cls)
    values: dict[str, Any] = {}
    for key, value in table.items():
        path = f"{where}.{key}" if where else key
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            what = "key" if where else "section"
            hint = f"Did you mean {where + '.' if where else ''}{near[0]}?" if near else (
                f"Known here: {', '.join(n for n in known if n not in OWN)}.")  # fmt: skip
            raise ConfigError(f"{path}: unknown {what}. {hint}")
        if is_dataclass(types[key]):
            values[key] = build(types[key], value, path)
        else:
            values[key] = _convert(value, types[key], path)
    for name, f in known.items():
        if name not in values and f.default is MISSING and f.default_factory is MISSING:
            raise ConfigError(f"{where}.{name}: is required")
    return cls(**values)


def _convert(value: object, kind: Any, path: str) -> Any:
    def hook(kind: type, value: object) -> object:
        return Seconds.parse(value) if kind is Seconds else kind(value)

    try:
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        return msgspec.convert(value, kind, dec_hook=hook)
    except (msgspec.ValidationError, ValueError) as e:
        raise ConfigError(f"{path} = {value!r}: {e}") from None


def put(table: dict[str, Any], key: str, value: str, source: str) -> None:
    """Override one key with text, read as a TOML value where it is one and as a plain string where not."""
    section, dot, name = key.partition(".")
    if not dot:
        raise ConfigError(f"{source}: name a key as section.key, as in train.lr")
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value
    target = table.setdefault(section, {})
    if not isinstance(target, dict):
        raise ConfigError(f"{source}: {section} is not a section")
    target[name] = parsed


def require(condition: object, key: str, message: str) -> None:
    if not condition:
        raise ConfigError(f"{key}: {message}")


def one_of(key: str, value: str, choices: Iterable[str]) -> None:
    choices = tuple(choices)
    if value not in choices:
        near = difflib.get_close_matches(value, choices, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"{key}: {value!r} is not one of {', '.join(choices)}.{hint}")


def value_of(text: str) -> bool | int | float | str:
    """An option's value where it stands in a word, as in "topk:fraction=0.01"."""
    text = text.strip()
    if text in ("true", "false"):
        return text == "true"
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


def options_of(cls: type, parts: Collection[str] = ()) -> list[str]:
    """The fields of a dataclass that a user sets: not its `parts`, which whoever builds it has."""
    return [f.name for f in fields(cls) if f.name not in parts]


def check_options(
    key: str,
    kind: str,
    options: Iterable[str],
    kinds: Mapping[str, type],
    *,
    parts: Collection[str] = (),
    also: Iterable[str] = (),
) -> None:
    """Refuse an option that `kind` doesn't have, and say what was meant: one of its own, a key that the
    section has `also`, or another kind's. `kinds` has all that `key` may be, each with its dataclass."""
    own = options_of(kinds[kind], parts)
    for name in options:
        if name in own:
            continue
        having = [other for other, cls in kinds.items() if name in options_of(cls, parts)]
        if near := difflib.get_close_matches(name, [*own, *also], n=1):
            hint = f"Did you mean {near[0]}?"
        elif having:
            hint = f'{key} = "{having[0]}" has it.'
        else:
            hint = f"It has {', '.join(own) or 'none of its own'}."
        raise ConfigError(f"{key.partition('.')[0]}.{name}: {kind} has no such option. {hint}")
