"""The settings of fedtrain.toml: one frozen dataclass a section, one field a key.

One file serves every mode. `--set train.lr=0.01` and FEDTRAIN_TRAIN__LR=0.01 override it, in that order of
strength. A key that nobody reads is an error that names the nearest one that exists.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

from msgspec import Meta

from ..digest import settings_digest
from ..fairness import STD, decided, is_cost, split
from .load import Source, build, read, refuse_unknown, types_of
from .simulated import SimulateConfig
from .values import (
    AtLeastOne,
    BelowOne,
    Count,
    Duration,
    Fraction,
    Inner,
    NotNegative,
    Number,
    Positive,
    Seconds,
    Settings,
    plain,
    require,
)  # fmt: skip

NAMED = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
NAME = Meta(pattern=NAMED, description="1 to 64 letters, digits, '.', '_' or '-'")
TASK = Meta(pattern=r".*:.*", description='"module:Class", as in "task:Heart"')
PORT = r"([0-5]?\d{1,4}|6[0-4]\d{3}|65[0-4]\d\d|655[0-2]\d|6553[0-5])"
ADDRESS = Meta(pattern=rf"|(\[[^\s/\[\]]+\]|[^\s/:\[\]]+):{PORT}", description='"host:port" or "[ipv6]:port"')
FOLDER = Meta(pattern=r"(?!.*://).*|s3://.*", description='a folder, or "s3://bucket/prefix"')
MACHINE = ("train.device", "train.deterministic", "train.tf32", "train.threads", "train.eval_batch_size")
COMMANDS = ("train.command", "train.command_timeout")
LOCAL = (*MACHINE, *COMMANDS, "limits.max_ratio")  # keys of agreed sections that may differ
COMMAND_WORDS = ("weights", "out", "report", "request", "site", "round")  # in braces in train.command
OWN = {"root", "given"}  # fields of a Config that are no sections


@dataclass(frozen=True)
class RunConfig(Settings):
    """What is trained, and for how long."""

    task: Annotated[str, TASK] = "task:Task"  # module:Class; the module lies beside the configuration file
    name: Annotated[str, NAME] = "run"  # names the run directory
    rounds: AtLeastOne = 10  # rounds after which the run is over
    seed: Annotated[int, Meta(ge=0, lt=2**63)] = 0  # all randomness comes from (seed, round, site)
    dir: str = "runs"  # folder in which run directories are made, relative to the configuration file


@dataclass(frozen=True)
class TrainConfig(Settings):
    """How a site trains. Everything here but MACHINE and COMMANDS is the same at all sites."""

    local_epochs: AtLeastOne = 1  # passes over the site's data in a round
    local_steps: Count = 0  # optimizer steps in a round; 0: local_epochs decides
    batch_size: Count = 32  # examples in a batch; 0: the whole local dataset in one batch
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"  # used unless the task has its own optimizer()
    lr: Positive = 0.01  # learning rate
    warmup: Count = 0  # optimizer steps of the run over which the learning rate rises
    decay: Literal["none", "linear", "cosine"] = "none"  # of the learning rate, to 0 at the run's last step
    momentum: Number = 0.0  # of sgd
    weight_decay: Number = 0.0  # L2 penalty of sgd and adam; decoupled decay of adamw
    clip_norm: NotNegative = 0.0  # bound on the gradient's L2 norm in a step; 0: no bound
    accumulate: AtLeastOne = 1  # batches whose gradients are summed into one optimizer step
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"  # bf16 and fp16 by autocast
    drop_last: bool = False  # leave out the last batch of an epoch when it is not full
    eval_batch_size: AtLeastOne = 256  # examples in a batch of an evaluation
    device: str = "auto"  # auto (a GPU where there is one), cpu, cuda, cuda:1
    deterministic: bool = False  # on a GPU: the same bits each time, by slower kernels; a CPU's are so anyhow
    tf32: bool = False  # on a GPU: products of fp32 matrices in TF32, faster, with 10 bits of the fraction
    threads: AtLeastOne = 1  # CPU threads; equal numbers give equal bits
    # A shell command that trains in place of fedtrain, such as "python train.py {weights} {out} {report}"
    command: str = ""
    command_timeout: Duration = Seconds(3600)  # of one training by `command`, which is then ended

    def __post_init__(self) -> None:
        super().__post_init__()
        said = not self.command or "{request}" in self.command or "{out}" in self.command
        require(said, "train.command", "has no {out}, the file that it is to write; nor {request}")

    def steps_in_round(self, count: int) -> int:
        """Optimizer steps of a round on so many examples."""
        batch = max(1, min(self.batch_size or count, count))
        usable = count - count % batch if self.drop_last else count
        return self.local_steps or -(-usable // (batch * self.accumulate)) * self.local_epochs


@dataclass(frozen=True)
class StrategyConfig(Settings):
    """Who takes part in a round, and how the global model moves. Other keys are the strategy's own fields."""

    kind: str = "fedavg"  # a name in strategies.STRATEGIES, or module:Class
    min_sites: AtLeastOne = 3  # valid updates that a round needs
    fraction: Fraction = 1.0  # part of the joined sites that is drawn for a round
    enough: Fraction = 1.0  # part of the drawn sites whose updates close a round; 1: it waits for all
    round_deadline: Duration = Seconds(600)  # a reply that comes later is left out of the round
    attempts: AtLeastOne = 3  # times that a round is tried before the run stops
    options: dict[str, Any] = field(default_factory=dict)  # the strategy's own keys


@dataclass(frozen=True)
class AggregationConfig(Settings):
    """How a round's updates become one. Other keys are the rule's own fields."""

    rule: str = "mean"  # a name in aggregation.RULES
    before: list[str] = field(default_factory=list)  # pre-aggregations: "nnm:2", "bucketing:2", "clip:1.5"
    options: dict[str, Any] = field(default_factory=dict)  # the rule's own keys


@dataclass(frozen=True)
class AsynchronousConfig(Settings):
    """No rounds: a site is asked again as soon as its update is in (FedBuff, Nguyen et al. 2022)."""

    enabled: bool = False
    buffer: AtLeastOne = 3  # updates that make a version of the model, the paper's K; 1 is FedAsync
    max_staleness: Count = 20  # versions; an update that was trained from an older model is refused
    staleness_exponent: NotNegative = 0.5  # an update counts (1 + its staleness)^-this; 0: all count alike


@dataclass(frozen=True)
class SecAggConfig(Settings):
    """Secure aggregation: the aggregator learns sums over sites and nothing else.

    Each site holds the aggregator to its own file: what is asked for there with other values is refused.
    """

    enabled: bool = True
    clip: Positive = 1.0  # bound on each coordinate of (examples / max_examples) * delta
    max_examples: Positive = 10_000.0  # examples that one site may have
    ring_bits: Literal[16, 32, 64] = 32  # bits in which a coordinate travels
    value_bits: Count = 0  # bits of one site's value: 4 to ring_bits - 1; 0: as many as the sum has room for
    # sites check each sum that they are in, and make the next model of it themselves; auto: where they can
    verify: bool | Literal["auto"] = "auto"
    groups: AtLeastOne = 1  # random groups of sites, redrawn each round, with one sum each; for robust rules
    # Sites in a round up to which each site shares masks with every other. In a larger round each site shares
    # masks with some neighbours only: as many as keep secrets and the round safe at `corrupt` and `dropout`.
    full_graph: Count = 100
    # A security parameter: part of the sites that may pass all they know to the aggregator while no other
    # site's update becomes known. Used beyond full_graph; a larger part costs more neighbours.
    corrupt: BelowOne = 0.2
    # Part of the sites that may be lost in a round that still ends with a sum; below 1 - corrupt. Used beyond
    # full_graph; a larger part costs more neighbours.
    dropout: NotNegative = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.value_bits == 0 or 4 <= self.value_bits < self.ring_bits, "secagg.value_bits",
                f"{self.value_bits} must be 0 (as many as fit), or 4 to secagg.ring_bits - 1")  # fmt: skip
        require(self.dropout < 1 - self.corrupt, "secagg.dropout",
                f"{self.dropout} must be in [0, 1 - secagg.corrupt)")  # fmt: skip


@dataclass(frozen=True)
class CompressionConfig(Settings):
    """What travels in fewer bytes; each is a compressor in one line, as in "quantize:8" or "topk:0.01"."""

    up: str = ""  # of updates; under masks a linear compressor: "randomk:0.1", "lowrank:4"
    down: str = ""  # of the step by which a round moves the model, with error feedback at the aggregator
    error_feedback: bool = True  # what a biased compressor leaves out is kept and added to the next vector


@dataclass(frozen=True)
class PrivacyConfig(Settings):
    """Noise on what a site gives away: differential privacy of a site's data, or of each of its examples."""

    unit: Literal["site", "example"] = "site"  # what is protected: all data of a site, or single examples
    where: Literal["site", "sum"] = "site"  # noise protects each update by itself, or a sum under masks
    noise_multiplier: NotNegative = 0.0  # the noise's standard deviation, in multiples of clip; 0: no noise
    clip: Positive = 1.0  # L2 norm to which an update, or an example's gradient, is shortened
    delta: Inner = 1e-5  # the delta of the (epsilon, delta) that is reported

    def __post_init__(self) -> None:
        super().__post_init__()
        require("site" in (self.unit, self.where), "privacy.where", 'must be "site" with unit = "example"')

    @property
    def in_sums(self) -> bool:
        """Whether the sites' noise protects their sums, and not each update."""
        return self.where == "sum" and self.noise_multiplier > 0


@dataclass(frozen=True)
class EvaluateConfig(Settings):
    """When the model is evaluated, and what an evaluation decides."""

    every: Count = 1  # rounds between evaluations, and one after the last round; 0: never
    metric: str = "loss"  # that decides the best model and an early stop; "loss/worst_decile" is one too
    mode: Literal["auto", "min", "max"] = "auto"  # which metric is better; auto: as its name says
    patience: Count = 0  # evaluations without improvement before the run stops; 0: it does not stop early
    min_delta: Number = 0.0  # difference from which on a better metric counts as an improvement
    sites: Count = 0  # sites that are drawn for an evaluation, where sites evaluate; 0: all of them
    server: bool = False  # evaluate also on eval_data("server"), at the aggregator, as "server/loss"

    def better(self, new: float, old: float | None) -> bool:
        """Whether a metric's new value improves on the best one before it; NaN never does. See decided."""
        lower = decided(self.metric, self.lower(self.metric))
        if new != new:
            return False
        return old is None or (new < old - self.min_delta if lower else new > old + self.min_delta)

    def lower(self, name: str) -> bool | None:
        """Whether a smaller value of a metric is better: as `mode` says for `metric`, and for what is worked
        out of one metric over sites alike; else by the name, None where that does not tell. Of a spread over
        sites a smaller one is."""
        (metric, suffix), (own, how) = split(name), split(self.metric)
        if self.mode != "auto" and (name == self.metric or (STD not in (suffix, how) and metric == own)):
            return self.mode == "min"
        return suffix == STD or is_cost(metric)


@dataclass(frozen=True)
class LimitsConfig(Settings):
    """What an update may be before it is refused (S16-S19)."""

    max_examples: Positive = 1e9  # a site that claims more examples is refused
    max_norm: NotNegative = 0.0  # bound on an update's L2 norm; 0: no bound
    max_ratio: NotNegative = 100.0  # bound on a step's norm, in usual ones of updates; 0: no bound


@dataclass(frozen=True)
class StatsConfig(Settings):
    """Statistics of the sites' data, without training."""

    allow: bool = False  # a site answers an aggregator that asks for them
    min_cell: AtLeastOne = 5  # counts below it are not shown; a site answers nobody who shows smaller ones
    bins: Annotated[int, Meta(ge=2, le=64)] = 20  # cells of a histogram, about


@dataclass(frozen=True)
class NetworkConfig(Settings):
    """Where the aggregator is. The three time settings: heartbeat, idle, strategy.round_deadline."""

    listen: Annotated[str, ADDRESS] = "127.0.0.1:8440"  # where the aggregator, or a peer, listens
    address: Annotated[str, ADDRESS] = ""  # what sites connect to; empty: the same as listen
    certs: str = "certs"  # folder made by `fedtrain certs`, relative to the configuration file
    heartbeat: Annotated[Seconds, Meta(ge=1)] = Seconds(5)  # time between checks of a quiet connection
    idle: Duration = Seconds(30)  # how long a lost site is waited for in a round, and at the end of the run


@dataclass(frozen=True)
class GossipConfig(Settings):
    """How peers average without a server. Other keys are the algorithm's own fields."""

    algorithm: str = "dpsgd"  # a name in gossip.ALGORITHMS
    topology: str = "base:1"  # who talks to whom, a graph that `fedtrain topology` knows
    weights: str = ""  # metropolis, uniform or push-sum; empty: what suits the topology
    compressor: str = "quantize:8"  # of choco, diloco, noloco and streaming-diloco; empty: whole models
    rule: str = "mean"  # what a peer makes of its neighbours' models: median, self_clip:f=1, ...
    masks: bool = False  # a peer learns the sum of its neighbours' models and no single one
    clip: Positive = 16.0  # under masks: bound on each coordinate of a model times its weight
    round_deadline: Duration = Seconds(600)  # from a peer's own start; a later neighbour is left out
    agree: bool = True  # after the last round all peers average once more, without training, to one model
    roster: str = "roster"  # folder of the peers' signed entries, relative to the configuration file
    options: dict[str, Any] = field(default_factory=dict)  # the algorithm's own keys


@dataclass(frozen=True)
class ParallelConfig(Settings):
    """How many ranks share the training of one model: `fedtrain datacenter`, or a site of several ranks."""

    ranks: AtLeastOne = 1  # processes that `fedtrain site` trains with; of a datacenter, torchrun decides
    dp: Count = 0  # data-parallel ranks; 0: what the other axes leave
    # What data-parallel ranks shard; 0: nothing, 1: optimizer state, 2: gradients too, 3: parameters too
    zero: Literal[0, 1, 2, 3] = 0
    # Full copies of the model among the data-parallel ranks: groups of hybrid sharding, or islands.
    # 0: one where sync is "step", as many as dp where sync is "local"
    replicate: Count = 0
    tp: AtLeastOne = 1  # tensor-parallel ranks
    sp: bool = False  # sequence parallelism between the tensor-parallel ranks
    pp: AtLeastOne = 1  # ranks that are stages of a pipeline
    cp: AtLeastOne = 1  # context-parallel ranks: each has a part of every sequence
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero-bubble", "zbv"] = "1f1b"  # of the pipeline
    microbatches: Count = 0  # pieces into which a batch is cut for the pipeline; 0: twice pp
    offload: Literal["none", "cpu", "disk", "nvme"] = "none"  # where shards rest; needs zero = 2 or 3
    offload_dir: str = ""  # for offload to disk or nvme: a folder on a disk of this machine
    checkpoint_activations: bool = False  # compute activations again in the backward pass, don't keep them
    compile: bool = False  # torch.compile: by blocks of the plan, or the whole
    comm_hook: Literal["none", "fp16", "bf16", "powersgd", "topk"] = "none"  # of gradients, at zero = 0
    comm_rank: AtLeastOne = 4  # rank of the matrices that comm_hook = powersgd sends
    comm_fraction: Fraction = 0.01  # part of coordinates that comm_hook = topk sends
    find_unused: bool = False  # some parameters take no part in some losses
    # step: average gradients each step; local: islands, by [strategy]
    sync: Literal["step", "local"] = "step"
    carry: bool = True  # islands keep their optimizer's state and place in the data between rounds
    fragments: AtLeastOne = 1  # pieces of the model that islands exchange one after the other (streaming)
    overlap: Count = 0  # steps that go on while a fragment is exchanged
    mix: BelowOne = 0.0  # part of its own weights that an island keeps in a fragment
    nonfinite: Literal["skip", "raise"] = "skip"  # what becomes of a step whose gradient has NaN or Inf
    log_every: AtLeastOne = 10  # steps between `step` events
    peak_tflops: NotNegative = 0.0  # of one device, for MFU; 0: known GPUs by name, else no MFU
    backend: Literal["auto", "nccl", "gloo"] = "auto"  # nccl on GPUs; with gloo, ranks may share a GPU
    readers: Count = 0  # processes of each rank that read examples ahead of their step; 0: none
    timeout: Duration = Seconds(600)  # after which a collective counts as hanging
    step_timeout: Duration = Seconds(600)  # the same, where it is less, once a rank took its first step

    def __post_init__(self) -> None:
        super().__post_init__()
        require(not self.sp or self.tp > 1, "parallel.sp", "needs parallel.tp of 2 or more")
        require(self.offload == "none" or self.zero >= 2, "parallel.offload", "needs parallel.zero = 2 or 3")
        require(self.offload not in ("disk", "nvme") or self.offload_dir != "", "parallel.offload_dir",
                f"parallel.offload = {self.offload} needs a folder on a disk of this machine")  # fmt: skip


@dataclass(frozen=True)
class CheckpointConfig(Settings):
    """Where and how often a run in a datacenter keeps its state."""

    every: Count = 100  # optimizer steps between checkpoints; 0: only at the end, and on SIGTERM
    keep: AtLeastOne = 3  # newest checkpoints that stay
    background: bool = True  # training goes on while the disk or bucket is written
    dir: Annotated[str, FOLDER] = ""  # relative to the configuration file; empty: in the run directory
    format: Literal["sharded", "full"] = "sharded"  # a file for each rank, or one file of whole tensors
    patience: Duration = Seconds(120)  # how long a bucket may be away before a save or a load fails


@dataclass(frozen=True)
class Config:
    """All of fedtrain.toml. `root` is the folder that it lies in."""

    run: RunConfig = field(default_factory=RunConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    strategy: StrategyConfig = field(default_factory=StrategyConfig)
    aggregation: AggregationConfig = field(default_factory=AggregationConfig)
    asynchronous: AsynchronousConfig = field(default_factory=AsynchronousConfig)
    secagg: SecAggConfig = field(default_factory=SecAggConfig)
    compression: CompressionConfig = field(default_factory=CompressionConfig)
    privacy: PrivacyConfig = field(default_factory=PrivacyConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    stats: StatsConfig = field(default_factory=StatsConfig)
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
        path: Path | str | None = "fedtrain.toml",
        sets: Iterable[str] = (),
        env: Mapping[str, str] | None = None,
        *,
        settings: Mapping[str, Any] = MappingProxyType({}),
        root: Path | None = None,
    ) -> Config:
        """Read the file, then the environment, then `sets` ("train.lr=0.01"), then `settings` (key -> value,
        as a program gives them). Without a file, `root` is the folder that it would lie in."""
        table, stronger = read(path and Path(path), sets, os.environ if env is None else env, settings)
        config = cls.of(table, root=root or Path(path or "").resolve().parent)
        return replace(config, given={**config.given, **stronger})

    @classmethod
    def of(cls, table: dict[str, Any], root: Path | str = ".") -> Config:
        """From the file's table; what is in it counts as set in the file."""
        kinds = {name: kind for name, kind in types_of(cls).items() if name not in OWN}
        found: dict[str, Any] = {}
        given: dict[str, Source] = {}
        for name, keys in table.items():
            refuse_unknown(name, kinds, "section")
            if isinstance(keys, dict):
                given |= {f"{name}.{key}": Source.FILE for key in keys}
                own = {f.name for f in fields(kinds[name])}
                if "options" in own and "options" not in keys:
                    options = {k: v for k, v in keys.items() if k not in own}
                    keys = {k: v for k, v in keys.items() if k in own} | {"options": options}
            found[name] = build(kinds[name], keys, name)
        return cls(**found, root=Path(root).resolve(), given=given)

    def sections(self) -> dict[str, Any]:
        """Name -> dataclass, in the order of the file."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in OWN}

    def value(self, key: str) -> Any:
        """Of "section.key", which may be one of the section's options."""
        section, _, name = key.partition(".")
        of = vars(self.sections()[section])
        return of[name] if name in of else of["options"][name]

    def agreed(self) -> dict[str, str]:
        """What every participant must have alike for the numbers to mean the same: key -> value as text."""
        whole = ["train", "asynchronous", "secagg", "compression"]
        if self.secagg.enabled:  # what the aggregator can't see, sites hold to
            whole.append("limits")
        keys = [f"{name}.{f.name}" for name in whole for f in fields(self.sections()[name])]
        keys += ["run.name", "run.seed", "run.task", "strategy.kind"]
        keys += ["aggregation.rule", "aggregation.before"]
        keys += [f"strategy.{name}" for name in self.strategy.options]
        keys += [f"aggregation.{name}" for name in self.aggregation.options]
        if self.privacy.in_sums:  # else each site's own affair
            keys += ["privacy.where", "privacy.noise_multiplier", "privacy.clip"]
        pairs = {key: self.value(key) for key in keys if key not in LOCAL}
        pairs |= {} if self.secagg.enabled else {"secagg.verify": False}  # there are no sums to check
        return {k: repr(v) for k, v in sorted(pairs.items())}

    def digest(self) -> str:
        """SHA-256 over `agreed()`."""
        return settings_digest(self.agreed())

    def table(self) -> dict[str, Any]:
        """Plain values of every section, defaults included, for the run directory."""
        return {
            name: {k: plain(v) for k, v in vars(section).items()} for name, section in self.sections().items()
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
        """Where checkpoints lie: under checkpoint.dir each run has a folder; or in the run directory."""
        shared, name = self.checkpoint.dir, self.run.name
        if not shared:
            return self.datacenter_dir / "checkpoints"
        return f"{shared.rstrip('/')}/{name}" if "://" in shared else self.root / shared / name

    def site_dir(self, site: str) -> Path:
        return self.root / self.run.dir / f"{self.run.name}@{site}"
