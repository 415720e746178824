"""What two ends compare before they train together, and what a site lets itself be asked."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from ... import __version__
from ...config import Config, SitePolicy
from ...errors import JoinRefused, SecAggError
from ...exchange import PeerId
from ...messages import SiteId
from ...questions import Column, difference
from ...schema import Schema
from ...secagg.peer_sums import PeerSums
from ...wire.frames import PROTOCOL, Bounds, Hello
from ...wire.gossip import Greeting

FEW = 5  # settings that a refusal names


@dataclass(frozen=True)
class Ends:
    """How a refusal names both ends, and where each is; it is one line that reads well at both."""

    them: str
    us: str
    there: str
    here: str

    def same_settings(self, theirs: Mapping[str, str], ours: Mapping[str, str]) -> None:
        """JoinRefused when settings that must be alike differ; it names the first few of them."""
        differ = [key for key in sorted({*ours, *theirs}) if ours.get(key) != theirs.get(key)]
        if differ:
            each = (
                f"{key[:64]}: {str(theirs.get(key))[:64]} at {self.there}, "
                f"{str(ours.get(key))[:64]} at {self.here}"
                for key in differ[:FEW]
            )
            more = f"; and in {len(differ) - FEW} more" if len(differ) > FEW else ""
            raise JoinRefused(
                f"{self.them} and {self.us} differ in {'; '.join(each)}{more}. "
                f"Use the same fedtrain.toml at both."
            )

    def same_digest(self, what: str, theirs: str, ours: str, mend: str) -> None:
        """JoinRefused when two digests of `what` differ."""
        if theirs != ours:
            raise JoinRefused(
                f"{self.them} and {self.us} have different {what}: {theirs[:12]} at {self.there}, "
                f"{ours[:12]} at {self.here}. {mend}"
            )


def agree(
    site: SiteId, hello: Hello, config: Config, schema: Schema, task_digest: str, frozen: Schema = Schema(())
) -> None:
    """JoinRefused unless a site and this aggregator would train the same thing."""
    ends = Ends(site, "the aggregator", "the site", "the aggregator")
    if hello.protocol != PROTOCOL:
        raise JoinRefused(
            f"{site} speaks protocol {hello.protocol} (fedtrain {hello.version[:20]}), the aggregator "
            f"{PROTOCOL} (fedtrain {__version__}). Install the same fedtrain at both."
        )
    ends.same_settings(hello.agreed, config.agreed())
    ends.same_digest("task code", hello.task_digest, task_digest, "Copy the same task file to both.")
    hello.schema.check()
    hello.frozen.check()
    if difference := schema.difference(hello.schema) or frozen.difference(hello.frozen):
        raise JoinRefused(
            f"{site} and the aggregator have different models: {difference} (aggregator here, site there). "
            f"Make model() the same at both."
        )


def agreed_examples(site: SiteId, claimed: float | None, before: float | None) -> None:
    """JoinRefused for a number of examples that is none, or more than the site said `before`, as it first
    joined this run: updates weigh as much as they claim, up to it (S18)."""
    if claimed is not None and not 0 <= claimed < math.inf:
        raise JoinRefused(
            f"{site} says that it has {claimed:g} examples: a number that is 0 or more is needed."
        )
    if before is not None and (claimed is None or claimed > before):
        now = "does not say how many it has now" if claimed is None else f"has {claimed:g} now"
        raise JoinRefused(
            f"{site} had {before:g} examples when it joined this run, and {now}. Let it train on those, or "
            f"start another run (run.name) with all of them."
        )


def agreed_data(site: SiteId, columns: Sequence[Column], other: SiteId, others: Sequence[Column]) -> None:
    """JoinRefused when the data of a site has another form than that of another, which joined first (S38).
    Where one example doesn't tell the form of either, they are not compared."""
    if columns and others and (found := difference(columns, others)):
        raise JoinRefused(
            f"the data of {site} is not like that of {other}, which joined first: {found[:300]} ({site} "
            f"first). Let data(), or columns(), give the same names, types and shapes at all sites."
        )


def agree_as_peers(
    me: PeerId, mine: Greeting, peer: PeerId, theirs: Greeting, sums: PeerSums | None = None
) -> None:
    """JoinRefused unless both peers train the same thing. What `sums` have to know of the other is taken
    in."""
    ends = Ends(peer, me, peer, me)
    ends.same_settings(theirs.agreed, mine.agreed)
    ends.same_digest("task code", theirs.task_digest, mine.task_digest, "Copy the same task file to both.")
    mend = "Let model() load them from the same file at both."
    ends.same_digest("frozen parameters", theirs.frozen_digest, mine.frozen_digest, mend)
    if sums is not None:
        try:
            sums.meet(peer, theirs.mask_key, theirs.mask_number)
        except SecAggError as e:
            raise JoinRefused(str(e)) from None


def bounds_of(config: Config, policy: SitePolicy | None = None) -> Bounds:
    """What these settings allow a site to be asked; and, of a site, its policy."""
    rounds, asynchronous = config.run.rounds, config.asynchronous
    # A version takes asynchronous.buffer updates, which may all be one site's, and has it refused once.
    turns = rounds * (asynchronous.buffer + 1) if asynchronous.enabled else rounds
    found = Bounds(trainings=turns, rounds=rounds, every=config.evaluate.every, statistics=config.stats.allow)
    if policy is None:  # the aggregator's own
        return found
    found = replace(found, noise=config.privacy.noise_multiplier > 0)
    if policy.rounds < turns:
        found = replace(found, trainings=policy.rounds, trainings_by="policy.rounds")
    own, least = found.every, policy.evaluate_every
    if own and (own < least or not least):
        found = replace(found, every=least, every_by="policy.evaluate_every")
    return found


def differences(site: Bounds, run: Bounds) -> list[str]:
    """Where a site lets itself be asked less than this run asks, by which setting, and what it is here: first
    why it sits evaluations out."""
    asked = replace(run, noise=False)  # noise in sums is in the aggregator's file as well, and it asks
    evaluated = [number for number in range(1, min(run.rounds, 1000) + 1) if not asked.evaluation(number)]
    refused = next(filter(None, (site.evaluation(number) for number in evaluated)), "")
    short, found = site.training(run.trainings - 1), list[str]()
    if refused:
        found.append(refused + _alike(site, run, site.every_by, "run.rounds"))
    if short:
        found.append(short + _alike(site, run, site.trainings_by))
    return found


def _alike(site: Bounds, run: Bounds, *keys: str) -> str:
    """What the site's people set where they want it asked as often as the others."""
    both = {
        "run.rounds": (site.rounds, run.rounds), "policy.rounds": (site.trainings, run.trainings),
        "evaluate.every": (site.every, run.every), "policy.evaluate_every": (site.every, run.every),
    }  # fmt: skip
    differ = [(key, *both[key]) for key in keys if key in both and both[key][0] != both[key][1]]
    return "".join(
        f". {key} is {there} there, and {here} here: where its people agree, they set {here} in "
        f"{'its policy' if key.startswith('policy.') else 'its fedtrain.toml'}, and start it again"
        for key, there, here in differ
    )
