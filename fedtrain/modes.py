"""The table of the keys of fedtrain.toml that each command reads. A key that would have no effect is refused.

A key given by `--set` must be read by the command that is run, but for those of SHARED: one command line
may serve several modes, and a count that one of them does not need promises nothing. The file and the
environment may also have keys of other commands, but a key that promises something (a robust rule, a bound,
noise, fewer bytes, an end) is refused where the command that is run would not keep the promise.

The environment belongs to a machine, so it may also set sections that the command doesn't read at all; in a
section that the command reads, it must read the key. A key may stay that a stronger setting has switched
off: with `--set evaluate.every=0` the file keeps its evaluate.patience.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from .config import COMMANDS, MACHINE, SITE_MODELS, Config, SimulateConfig, Source, is_own
from .errors import ConfigError
from .fairness import decided, mistyped

EVERYWHERE = ("run", "train", "evaluate", "privacy")
BOUNDS = ("aggregation.rule", "aggregation.before", "aggregation.options", "limits.max_norm",
          "limits.max_examples")  # fmt: skip
NOISE = ("privacy.noise_multiplier", "privacy.clip", "privacy.unit", "privacy.where")
STAR = (*BOUNDS, "compression.up", "compression.down", "evaluate.patience")
SHARED = (
    "strategy.min_sites",
    "strategy.attempts",
    "parallel.schedule",
    "parallel.microbatches",
    "parallel.comm_rank",
    "parallel.comm_fraction",
)
GOSSIP = (*BOUNDS, *NOISE, "secagg.enabled", "gossip.compressor", "gossip.clip", "evaluate.patience")


@dataclass(frozen=True)
class Mode:
    """A row of the table: a command, or a command with an option."""

    command: str  # as the user types it
    reads: tuple[str, ...]  # whole sections, and single keys of other sections
    but: tuple[str, ...] = ()  # keys in `reads` that the command does not read
    keeps: tuple[
        str, ...
    ] = ()  # keys with a promise: refused, from every source, if the command can't keep it


MODES: dict[str, Mode] = {
    "simulate": Mode(
        "simulate",
        (*EVERYWHERE, "strategy", "aggregation", "asynchronous", "secagg", "compression", "limits",
         "simulate"),
        keeps=(*STAR, *NOISE, "simulate.engine"),
    ),
    "gossip": Mode(
        "simulate --mode gossip",
        (*EVERYWHERE, "strategy.kind", "strategy.options", "gossip", "simulate"),
        but=("gossip.roster", "simulate.workers", "simulate.on", "privacy.where",
             "evaluate.server", "evaluate.sites",
             *(f"simulate.{key}" for key in SITE_MODELS if key != "speeds")),
        keeps=(*GOSSIP, "simulate.engine"),
    ),
    "aggregator": Mode(
        "aggregator",
        ("run", "train", "evaluate", "strategy", "aggregation", "asynchronous", "secagg", "compression",
         "privacy", "limits", "network"),
        but=(*COMMANDS, "network.address", "privacy.delta"),
        keeps=STAR,
    ),
    "statistics": Mode(
        "aggregator --stats",
        ("run", "train", "evaluate.every", "strategy.kind", "strategy.options", "strategy.min_sites",
         "strategy.round_deadline", "strategy.attempts", "aggregation", "asynchronous", "secagg",
         "compression", "limits", "stats", "network"),
        but=(*MACHINE, *COMMANDS, "limits.max_ratio", "stats.allow", "network.address"),
    ),
    "stats": Mode(
        "stats",
        ("run", "train.eval_batch_size", "strategy.min_sites", "secagg.enabled", "stats", "simulate.sites",
         "simulate.partition", "simulate.examples", "simulate.min_examples"),
        but=("run.rounds", "stats.allow"),
        keeps=NOISE,
    ),
    "site": Mode(
        "site",
        ("run", "train", "privacy", "evaluate.every", "strategy.kind", "strategy.options",
         "strategy.min_sites", "aggregation", "asynchronous", "secagg", "compression", "limits", "stats",
         "network", "parallel"),
        but=("stats.bins", "network.idle", "limits.max_ratio", "parallel.carry", "parallel.fragments",
             "parallel.overlap", "parallel.mix", "parallel.log_every", "parallel.peak_tflops"),
        keeps=NOISE,
    ),
    "peer": Mode(
        "peer",
        (*EVERYWHERE, "strategy.kind", "strategy.options", "strategy.min_sites", "gossip", "network",
         "parallel"),
        but=("evaluate.server", "evaluate.sites", "privacy.where", "parallel.carry", "parallel.fragments",
             "parallel.overlap", "parallel.mix", "parallel.log_every", "parallel.peak_tflops"),
        keeps=GOSSIP,
    ),
    "datacenter": Mode(
        "datacenter",
        ("run", "train", "evaluate", "parallel", "checkpoint", "network.certs"),
        but=(*COMMANDS, "evaluate.server", "evaluate.sites", "parallel.ranks", "parallel.carry",
             "parallel.fragments", "parallel.overlap", "parallel.mix"),
        keeps=(*NOISE, "evaluate.patience", "train.command"),
    ),
    "islands": Mode(
        'datacenter with parallel.sync = "local"',
        ("run", "train", "evaluate", "parallel", "checkpoint", "strategy.kind", "strategy.options",
         "simulate.partition", "simulate.min_examples", "network.certs"),
        but=(*COMMANDS, "evaluate.server", "evaluate.sites", "parallel.ranks"),
        keeps=(*NOISE, *BOUNDS, "evaluate.patience", "train.command"),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Only:
    """Keys that are read only with certain other settings."""

    keys: tuple[str, ...]  # keys or whole sections, without `switch`
    when: Callable[[Config], bool]  # whether they are read
    switch: str  # the key that decides
    words: str  # the settings with which they are read, for a message
    modes: tuple[str, ...] = tuple(MODES)


TRAINING = tuple(name for name in MODES if name not in ("statistics", "stats"))
MASKS = "secagg.enabled = true"
ROUNDS = "asynchronous.enabled = false"
FEDERATED = ("simulate", "aggregator", "site")
GRAPH = ("gossip", "peer")
NEVER_WAIT = ("adpsgd", "swift")  # gossip.algorithm
WITH_COMPRESSOR = ("choco", "diloco", "noloco", "streaming-diloco")


def _one_of(config: Config, algorithms: tuple[str, ...]) -> bool:
    """Whether gossip.algorithm is one of these, or of the user's own, whose class says what it reads."""
    return config.gossip.algorithm in algorithms or is_own(config.gossip.algorithm)


ONLY = (
    Only(("secagg",), lambda c: c.secagg.enabled, "secagg.enabled", MASKS),
    Only(("strategy.min_sites", "limits"), lambda c: c.secagg.enabled, "secagg.enabled", MASKS, ("site",)),
    Only(("limits",), lambda c: c.secagg.enabled, "secagg.enabled", MASKS, ("statistics",)),
    Only(("simulate.masks",), lambda c: c.secagg.enabled, "secagg.enabled", MASKS, ("simulate",)),
    Only(("asynchronous",), lambda c: c.asynchronous.enabled, "asynchronous.enabled",
         "asynchronous.enabled = true"),
    Only(("strategy.fraction", "strategy.enough"), lambda c: not c.asynchronous.enabled,
         "asynchronous.enabled", ROUNDS, FEDERATED),
    Only(("train.warmup", "train.decay"), lambda c: not c.asynchronous.enabled, "asynchronous.enabled",
         ROUNDS, FEDERATED),
    Only(("strategy.enough",), lambda c: c.simulate.timed, "simulate.speeds",
         "a key that says how long simulated sites take: simulate.speeds, say", ("simulate",)),
    Only(("simulate.speeds",), lambda c: _one_of(c, NEVER_WAIT), "gossip.algorithm",
         f"gossip.algorithm = {' or '.join(NEVER_WAIT)}, whose peers never wait", ("gossip",)),
    Only(("simulate.engine",), lambda c: c.gossip.algorithm not in NEVER_WAIT, "gossip.algorithm",
         f"a gossip.algorithm other than {' and '.join(NEVER_WAIT)}", ("gossip",)),
    Only(("gossip.round_deadline",), lambda c: c.gossip.agree or c.gossip.algorithm != "swift",
         "gossip.algorithm", "gossip.agree, or a gossip.algorithm other than swift", GRAPH),
    Only(("gossip.compressor",), lambda c: _one_of(c, WITH_COMPRESSOR) and not c.gossip.masks,
         "gossip.algorithm", f"gossip.algorithm = {' or '.join(WITH_COMPRESSOR)}, without masks", GRAPH),
    Only(("gossip.clip", "simulate.masks"), lambda c: c.gossip.masks, "gossip.masks",
         "gossip.masks = true", GRAPH),
    Only(("compression.error_feedback",), lambda c: bool(c.compression.up or c.compression.down),
         "compression.up", "compression.up or compression.down"),
    Only(("compression.error_feedback",), lambda c: bool(c.compression.down) or not c.secagg.enabled,
         "secagg.enabled", "secagg.enabled = false, or compression.down"),
    Only(("privacy",), lambda c: c.privacy.noise_multiplier > 0, "privacy.noise_multiplier",
         "privacy.noise_multiplier above 0"),
    Only(("privacy",), lambda c: c.privacy.where == "sum", "privacy.where", 'privacy.where = "sum"',
         ("aggregator",)),
    Only(("secagg.clip", "secagg.max_examples"), lambda c: not c.privacy.in_sums, "privacy.where",
         'privacy.where = "site"', FEDERATED),
    Only(("stats.min_cell",), lambda c: c.stats.allow, "stats.allow", "stats.allow = true", ("site",)),
    Only(("evaluate.mode", "evaluate.min_delta", "evaluate.patience"),
         lambda c: c.evaluate.server or not c.privacy.in_sums, "privacy.where",
         'privacy.where = "site", or evaluate.server = true: no site with noise evaluates', ("aggregator",)),
    Only(("evaluate",), lambda c: c.evaluate.every > 0, "evaluate.every", "evaluate.every above 0"),
    Only(MACHINE, lambda c: c.evaluate.server, "evaluate.server", "evaluate.server = true", ("aggregator",)),
    Only(("train.deterministic", "train.tf32"), lambda c: c.train.device != "cpu", "train.device",
         "train.device = cuda: a CPU has neither choice"),
    Only(("train.eval_batch_size",), lambda c: c.evaluate.every > 0, "evaluate.every",
         "evaluate.every above 0", TRAINING),
    Only(("train.command_timeout",), lambda c: bool(c.train.command), "train.command", "train.command"),
    Only(("train.momentum",), lambda c: c.train.optimizer == "sgd", "train.optimizer",
         'train.optimizer = "sgd"'),
    Only(("train.local_epochs",), lambda c: not c.train.local_steps, "train.local_steps",
         "train.local_steps = 0"),
    Only(("parallel",), lambda c: c.parallel.ranks > 1, "parallel.ranks", "parallel.ranks above 1",
         ("site", "peer")),
    Only(("parallel.comm_rank",), lambda c: c.parallel.comm_hook == "powersgd", "parallel.comm_hook",
         'parallel.comm_hook = "powersgd"'),
    Only(("parallel.comm_fraction",), lambda c: c.parallel.comm_hook == "topk", "parallel.comm_hook",
         'parallel.comm_hook = "topk"'),
    Only(("parallel.schedule", "parallel.microbatches"), lambda c: c.parallel.pp > 1, "parallel.pp",
         "parallel.pp above 1"),
    Only(("parallel.offload_dir",), lambda c: c.parallel.offload in ("disk", "nvme"), "parallel.offload",
         'parallel.offload = "disk" or "nvme"'),
)  # fmt: skip
INSTEAD = {  # key -> the key that replaces it in gossip modes
    "aggregation.rule": "gossip.rule",
    "aggregation.before": "gossip.rule",
    "aggregation.options": "gossip.rule",
    "secagg.enabled": "gossip.masks",
    "strategy.round_deadline": "gossip.round_deadline",
}
# Values that promise nothing in the file, for keys with another default
NOTHING: dict[str, tuple[Any, ...]] = {"secagg.enabled": (False,), "simulate.engine": ("auto", "loop")}


def keys() -> dict[str, Any]:
    """Every key of fedtrain.toml, with its default."""
    default = Config()
    return {f"{name}.{f.name}": getattr(section, f.name)
            for name, section in default.sections().items() for f in fields(section)}  # fmt: skip


def reads(config: Config, name: str) -> frozenset[str]:
    """The keys that the mode `name` reads with these settings."""
    mode = MODES[name]
    return frozenset(key for key in keys() if _in(key, mode.reads) and key not in mode.but
                     and not _off(config, name, key))  # fmt: skip


def check(config: Config, *names: str, notice: Callable[[str], None] = lambda text: None) -> None:
    """ConfigError for a key that is set and that none of the modes `names` reads, by the rules at the top of
    this file. The message says where the key is read; for a key of SHARED it is a `notice`."""
    known, seen = keys(), frozenset[str]().union(*(reads(config, name) for name in names))
    for given, source in config.given.items():
        key, value = _key(given), config.value(given)
        typed = source >= Source.SET
        nothing = () if typed and key in NOTHING else NOTHING.get(key, (known[key],))
        if key in seen or (key == given and value in nothing):
            continue
        if typed or all(_refused(config, mode, key, source) for mode in names):
            text = f"{given} = {value!r} ({source}): {_why(config, names, key)}"
            if not (typed and key in SHARED):
                raise ConfigError(text)
            notice(f"{text} It has no effect here.")
    metric = config.evaluate.metric
    if "evaluate.metric" in seen and not mistyped(metric):  # which the first evaluation says
        decided(metric, config.evaluate.lower(metric))


def check_dealt(
    config: Config,
    *,
    natural: bool,
    keys: tuple[str, ...] = ("sites", "partition", "examples", "min_examples"),
) -> None:
    """ConfigError for a key that says how one pool of examples is dealt, where the task has natural sites."""
    default = SimulateConfig()
    for key in keys if natural else ():
        value, source = getattr(config.simulate, key), config.given.get(f"simulate.{key}", Source.FILE)
        if value != getattr(default, key) or source >= Source.SET:
            raise ConfigError(
                f"simulate.{key} = {value!r} ({source}) does nothing: it deals one pool of examples, and the "
                f"task's sites() names the sites, each with data of its own. Leave it out; or let sites() "
                f"return None and data() the pool."
            )


def idle(config: Config, name: str) -> list[str]:
    """Keys that are set and that the mode `name` does not read."""
    seen = reads(config, name)
    return [given for given in config.given if _key(given) not in seen]


def row(config: Config, name: str) -> str:
    """The sections that a mode reads, as a text; for a section that it reads in part, with the keys."""
    seen, words = reads(config, name), []
    for section in dict.fromkeys(key.partition(".")[0] for key in keys()):
        own = [key.partition(".")[2] for key in keys() if _in(key, (section,))]
        here = [key for key in own if f"{section}.{key}" in seen]
        left = [key for key in own if key not in here]
        if here and left:
            words.append(section + (f" ({', '.join(here)})" if len(here) <= len(left)
                                    else f" (without {', '.join(left)})"))  # fmt: skip
        elif here:
            words.append(section)
    return ", ".join(words)


def _in(key: str, some: tuple[str, ...]) -> bool:
    return key in some or key.partition(".")[0] in some


def _off(config: Config, name: str, key: str) -> list[Only]:
    """The conditions that keep a mode from reading a key with these settings."""
    return [only for only in ONLY if name in only.modes and key != only.switch and _in(key, only.keys)
            and not only.when(config)]  # fmt: skip


def _refused(config: Config, name: str, key: str, source: Source) -> bool:
    """Whether a mode refuses a key that it doesn't read, given in the file or the environment."""
    mode = MODES[name]
    if key in INSTEAD and name in GRAPH and INSTEAD[key] in config.given:
        return False
    off = _off(config, name, key)
    if any(config.given.get(only.switch, Source.FILE) > source for only in off):
        return False
    of_a_section = any(_in(other, (key.partition(".")[0],)) for other in reads(config, name))
    return key in mode.keeps or (source is Source.ENVIRONMENT and of_a_section)


def _why(config: Config, names: tuple[str, ...], key: str) -> str:
    here = " and ".join(MODES[name].command for name in names)
    for name in names:
        mode = MODES[name]
        if _in(key, mode.reads) and key not in mode.but and (off := _off(config, name, key)):
            return f"{here} reads it only with {' and '.join(only.words for only in off)}."
    readers = [mode.command for mode in MODES.values() if _in(key, mode.reads) and key not in mode.but]
    instead = f" Here {INSTEAD[key]} decides." if key in INSTEAD and set(names) & set(GRAPH) else ""
    return f"{here} does not read it; it is read by {', '.join(readers)}.{instead}"


def _key(given: str) -> str:
    """The key of a setting; a strategy's own option, like strategy.mu, belongs to strategy.options."""
    return given if given in keys() else f"{given.partition('.')[0]}.options"


def names_of(command: str, config: Config, arguments: Mapping[str, Any]) -> tuple[str, ...]:
    """The modes that a command runs or plans; () for a command that only shows runs."""
    datacenter = "islands" if config.parallel.sync == "local" else "datacenter"
    match command:
        case "simulate":
            return ("gossip",) if arguments["mode"] == "gossip" else ("simulate",)
        case "aggregator":
            return ("statistics",) if arguments["stats"] else ("aggregator",)
        case "site" | "peer" | "stats":
            return (command,)
        case "datacenter":
            return (datacenter,)
        case "plan":
            return FEDERATED if arguments["ranks"] is None else (datacenter,)
    return ()
