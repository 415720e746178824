"""[simulate]: a simulation's sites, how fast and how often there they are, and what trains them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from .values import Amount, AtLeastOne, BelowOne, Count, Seconds, Settings, require

AMOUNT = r"\d+(\.\d+)?"
SPEEDS = Meta(
    pattern=rf"equal|(lognormal|straggler):{AMOUNT}", description='"equal", "lognormal:1" or "straggler:10"'
)
DRAWN = Meta(
    pattern=rf"|{AMOUNT}|(lognormal|uniform):{AMOUNT},{AMOUNT}",
    description='a number, "lognormal:20,1" (median, spread of the logarithm), "uniform:5,50", or empty',
)
THERE = Meta(
    pattern=rf"always|(daily|part):0?\.\d+(,{AMOUNT})?",
    description='"always", "daily:0.3" or "part:0.5" (of the time, between 0 and 1)',
)


@dataclass(frozen=True)
class SimulateConfig(Settings):
    """A simulation's sites, and the processes that train them."""

    sites: AtLeastOne = 10  # number of sites where the task names none of its own
    partition: str = "iid"  # how one pool of examples is dealt: iid, dirichlet:0.3, shards:2, quantity:0.5
    examples: Count = 0  # of a site on average, drawn from the pool by each for itself; 0: the pool is dealt
    min_examples: AtLeastOne = 2  # of a site at least, of one pool: the largest sites give what others lack
    workers: int | Literal["auto"] = "auto"  # processes; auto: one a core; 0: none, sites train in this one
    on: Literal["local", "ray", "torchrun"] = "local"  # where workers are: this machine, a Ray cluster, ranks
    # loop: one by one, a federation's bits; stacked: many at once; auto: by the model's size
    engine: Literal["auto", "loop", "stacked"] = "auto"
    masks: bool = False  # do all of secure aggregation's work as it is done for real; the model is the same
    speeds: Annotated[str, SPEEDS] = "equal"  # how many times as long as usual a site's training takes
    # Seconds of training for one example at a site of usual speed; 0: a training takes 1 s, however many
    # examples the site has.
    example_time: Annotated[Seconds, Meta(ge=0)] = Seconds(0)
    down_mbit: Annotated[Amount, DRAWN] = Amount("")  # Mbit/s to a site; empty: models come in no time
    up_mbit: Annotated[Amount, DRAWN] = Amount("")  # Mbit/s from a site; empty: updates go in no time
    latency: Annotated[Amount, DRAWN] = Amount("")  # seconds that a message is under way; empty: none
    availability: Annotated[str, THERE] = "always"  # when a site is there
    dropout: BelowOne = 0.0  # probability that a site which is asked to train is not heard of again
    trace: str = ""  # file of measured sites, relative to the configuration file; in place of the keys above

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.workers == "auto" or self.workers >= 0, "simulate.workers",
                f'{self.workers} must be "auto" (one a core), 0 (none) or more')  # fmt: skip
        for key in ("down_mbit", "up_mbit", "latency"):
            text = getattr(self, key)
            kind, low, high = numbers_in(text)
            require(low > 0 or key == "latency" or not kind, f"simulate.{key}",
                    f"{text!r} must be above 0; leave it empty for no limit")  # fmt: skip
            require(kind != "uniform" or low <= high, f"simulate.{key}",
                    f"{text!r}: {low:g} is above {high:g}")  # fmt: skip
        kind, low, high = numbers_in(self.availability)
        require(kind == "always" or 0 < low < 1, "simulate.availability",
                f"{self.availability!r}: a site must be there between 0 and 1 of the time")  # fmt: skip
        require(kind != "part" or high > 0, "simulate.availability",
                f"{self.availability!r}: the hours between two draws must be above 0")  # fmt: skip

    @property
    def timed(self) -> bool:
        """Whether a key says how long simulated sites take, or that some don't answer."""
        default = SimulateConfig()
        return any(getattr(self, key) != getattr(default, key) for key in SITE_MODELS)


SITE_MODELS = (
    "speeds", "example_time", "down_mbit", "up_mbit", "latency", "availability", "dropout", "trace",
)  # fmt: skip


def numbers_in(text: str) -> tuple[str, float, float]:
    """The kind that a text like "lognormal:20,1" names, and its two numbers: "20" is of kind "fixed", "" of
    kind "", and 1 stands for a second number that is not given."""
    kind, colon, rest = text.partition(":")
    if not colon:
        return ("fixed", float(kind), 1.0) if kind[:1].isdigit() else (kind, 0.0, 1.0)
    first, _, second = rest.partition(",")
    return kind, float(first), float(second or 1)
