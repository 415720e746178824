"""The one place where a site decides what it answers: rules with names, each of which may say no.

A rule is one line in `hold`, or where the state is made that it needs:

  gate.asked["policy.rounds"] = lambda request: "why not", or "" for nothing against it
  gate.models["evaluate.every"] = lambda request, model: the same, of a model that is here, by its SHA-256
  gate.given["policy.metrics"] = lambda request, result: the same, of what training or an evaluation found
  gate.sent["policy.bytes_out"] = lambda request, reply: the same, of a reply as it would leave

Why not ends with the site's own setting that says so: "(its own policy.rounds)". A refused request is
answered with a Failure that holds it, so that both ends know the setting, and is an event `denied` here.
Rules are asked in their order; those of requests before any work, those of results before a result is
answered or masked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase

import msgspec

from ...config import Config, SitePolicy
from ...errors import ConfigError, some
from ...events import CohortAsked, Denied, Emit, Notice, silent
from ...messages import Evaluate, Evaluation, Failure, Reply, Request, SiteId, Train, Update
from ...questions import Describe, Tally
from ...secagg.messages import Advertise, AdvertiseEvaluation, AdvertiseTally, Terms
from ...store import Ledger
from ...tracking.audit import words
from ...wire.codec import arenas, encode
from ...wire.frames import Bounds
from . import privacy

NOTHING = (
    "it has nothing to evaluate on: its eval_data() gave no examples, and a sum under masks needs some of "
    "each site. Let it give some, or set evaluate.every = 0 at this site: then it is not asked"
)

Asked = Callable[[Request], str]
Given = Callable[[Request, Reply], str]
OfModel = Callable[[Request, str], str]


class Gate:
    """A site's rules. Without any, everything is answered."""

    def __init__(self, emit: Emit = silent) -> None:
        self._emit = emit
        self._told: dict[tuple[str, str], str] = {}  # by rule and kind: a reason is told once
        self.asked: dict[str, Asked] = {}
        self.given: dict[str, Given] = {}
        self.sent: dict[str, Given] = {}
        self.models: dict[str, OfModel] = {}
        self.strangers: Callable[[Request], tuple[SiteId, ...]] = lambda request: ()  # in its cohort

    def refusal(self, request: Request) -> str:
        """Why this site does not answer a request; "" when it does."""
        for rule, says in self.asked.items():
            if why := says(request):
                return self._denied(rule, why, request)
        if (terms := terms_of(request)) is not None:
            cohort = {site: key.hex() for site, key in sorted(terms.cohort.items())}
            self._emit(CohortAsked(round=number_of(request) or 0, what=what_of(request), cohort=cohort))
        return ""

    def unfit(self, request: Request, model: str) -> str:
        """Why nothing is worked out on the model of a request; "" when it is. `model`: its SHA-256."""
        for rule, says in self.models.items():
            if why := says(request, model):
                return self._denied(rule, why, request)
        return ""

    def withheld(self, request: Request, result: Reply, leaving: bool = False) -> str:
        """Why a result, or a reply that is leaving, stays at this site; "" when it may go."""
        rules = self.sent if leaving else self.given
        for rule, says in rules.items() if not isinstance(result, Failure) else ():
            if why := says(request, result):
                return self._denied(rule, why, request)
        if leaving and not isinstance(result, Failure):
            self._told.clear()
        return ""

    def told(self, failure: Failure) -> Failure:
        """A failure as it leaves: without this machine's folders, which its own people are told."""
        if (reason := words(failure.reason)) != failure.reason:
            self._emit(Notice(text=failure.reason))
        return msgspec.structs.replace(failure, reason=reason)

    def _denied(self, rule: str, why: str, request: Request) -> str:
        what = what_of(request)
        if self._told.get((rule, what)) != why:
            self._told[rule, what] = why
            self._emit(Denied(rule=rule, what=what, round=number_of(request), reason=why))
        return why


def terms_of(request: Request) -> Terms | None:
    """The terms of the secure sum that a request begins; None for any other request."""
    if isinstance(request, Advertise | AdvertiseEvaluation | AdvertiseTally):
        return request.terms
    return None


def what_of(request: Request) -> str:
    """What a request asks for, in a word: train, evaluate, tell (statistics), or a step of a secure sum."""
    kinds = {Train: "train", Evaluate: "evaluate", Describe: "tell", Tally: "tell"}
    return next((word for kind, word in kinds.items() if isinstance(request, kind)), type(request).__name__)


def number_of(request: Request) -> int | None:
    """The round of a request, as people count; of an evaluation the number of rounds before it."""
    round: int | None = getattr(request, "round", None)
    return round + 1 if round is not None and not isinstance(request, Evaluate) else round


def gate_of(
    emit: Emit, bounds: Bounds, policy: SitePolicy, me: SiteId, examples: float | None, ledger: Ledger,
    *, masks: bool, pins: Mapping[SiteId, str] | None = None,
) -> Gate:  # fmt: skip
    """The rules of the site `me`, in the order in which they are asked. `pins`: its members as they are at
    any time; None: as in `policy`."""
    gate = Gate(emit)
    bounded(gate, bounds)
    hold(gate, policy, me, examples, pins)
    if masks:
        gate.given = {"eval_data": no_empty_evaluation} | gate.given
    gate.models["evaluate.every"] = one_model_a_round(ledger, masks)
    return gate


def no_empty_evaluation(_: Request, reply: Reply) -> str:
    """A rule: an evaluation of nothing is in no sum, which would be over fewer sites than its cohort has."""
    return NOTHING if isinstance(reply, Evaluation) and reply.of_nothing else ""


def bounded(gate: Gate, bounds: Bounds) -> None:
    """Hold requests to a site's bounds, which the aggregator was told as the site joined."""

    def statistics(request: Request) -> str:
        asked = isinstance(request, Describe | Tally) and not bounds.statistics
        return "it gives no statistics (its own stats.allow = false)" if asked else ""

    gate.asked |= {
        "run.rounds": lambda r: bounds.training(r.round) if isinstance(r, Train) else "",
        "evaluate.every": lambda r: bounds.evaluation(r.round) if isinstance(r, Evaluate) else "",
        "stats.allow": statistics,
    }


def check_policy(config: Config, policy: SitePolicy) -> None:
    """ConfigError for settings of a site under which its policy would have it refuse everything."""
    if policy.secure_sums and not config.secagg.enabled:
        raise ConfigError(
            "policy.secure_sums: this site gives its results into secure sums only, and secagg.enabled = "
            "false. Set secagg.enabled = true; or, to show each result to the aggregator, run: fedtrain "
            "policy set secure_sums=false"
        )
    privacy.check_policy(config, policy)


class BytesOut:
    """Counts, by round, what leaves a site, and says when it would be more than `most` bytes."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._sent: dict[int, int] = {}
        self._round = 0  # to which the steps of a secure sum belong

    def __call__(self, request: Request, reply: Reply) -> str:
        """Counts a reply; why it may not leave, if it may not."""
        round = number_of(request)
        if round is not None:
            self._round = round
        nbytes = len(encode(reply)) + sum(arena.schema.nbytes for arena in arenas(reply))
        before = self._sent.get(self._round, 0)
        if before + nbytes > self._most:
            return (
                f"{before:,} bytes left in round {self._round}, and {nbytes:,} more are over {self._most:,} "
                f"(its own policy.bytes_out)"
            )
        self._sent[self._round] = before + nbytes
        return ""


def hold(
    gate: Gate, policy: SitePolicy, me: SiteId, examples: float | None = None,
    pins: Mapping[SiteId, str] | None = None,
) -> None:  # fmt: skip
    """Hold what is asked of the site `me`, and what it gives, to its policy. `examples`: how many the site
    has; None where only training can tell. `pins`: as in `gate_of`."""

    def secure_sums(request: Request) -> str:
        alone = isinstance(request, Train | Evaluate | Tally) and terms_of(request) is None
        only = "it gives its results into secure sums only (its own policy.secure_sums)"
        return only if policy.secure_sums and alone else ""

    def min_cohort(request: Request) -> str:
        terms = terms_of(request)
        if terms is None or len(terms.cohort) >= policy.min_cohort:
            return ""
        return (
            f"its cohort would have {len(terms.cohort)} sites, and {policy.min_cohort} are the fewest here "
            f"(its own policy.min_cohort)"
        )

    def unpinned(request: Request) -> dict[SiteId, str]:
        terms = terms_of(request)
        cohort = terms.cohort if terms is not None and policy.pin_members else {}
        keys = {site: key.hex() for site, key in sorted(cohort.items()) if site != me}
        return {site: key for site, key in keys.items() if pinned.get(site) != key}

    def pin_members(request: Request) -> str:
        return strangers(keys) if (keys := unpinned(request)) else ""

    def metrics(_: Request, reply: Reply) -> str:
        given = reply.metrics if isinstance(reply, Update | Evaluation) else {}
        other = [name for name in given if not any(fnmatchcase(name, each) for each in policy.metrics)]
        allowed = ", ".join(policy.metrics) or "none"
        gives = f"the task gives {', '.join(other[:5])}, and {allowed} may leave (its own policy.metrics)"
        return gives if other else ""

    def min_examples(_: Request, reply: Reply) -> str:
        behind = math.inf
        if isinstance(reply, Update):
            behind = reply.num_examples if examples is None else examples
        elif isinstance(reply, Evaluation) and not reply.of_nothing:
            behind = max((count for _, count in reply.metrics.values()), default=math.inf)
        few = "fewer of its examples stand behind a result than it allows (its own policy.min_examples)"
        return few if behind < least else ""

    least, pinned = policy.min_examples, policy.members if pins is None else pins
    gate.strangers = lambda request: tuple(unpinned(request))
    gate.asked |= {
        "policy.secure_sums": secure_sums,
        "policy.min_cohort": min_cohort,
        "policy.pin_members": pin_members,
    }
    gate.given |= {"policy.metrics": metrics, "policy.min_examples": min_examples}
    if policy.bytes_out:
        gate.sent["policy.bytes_out"] = BytesOut(policy.bytes_out)


def hold_first_model(gate: Gate, policy: SitePolicy, own: str, answered: Callable[[str], bool]) -> None:
    """Add the rule policy.initial: a site rejects a run that begins with another model than it expects.

    From a first model that the aggregator chose, one sum over all sites gives it whole examples ("Robbing
    the Fed", Fowl et al. 2022). A later model is compared with nothing here: with secagg.verify it is proven
    to follow from the first one.

    Args:
        own: The hash_of of the model that the site's own trainer begins with, as hex digits; compared under
            policy.initial = "own".
        answered: Whether this site gave an update or an evaluation of the model with this hash_of into an
            opened sum, in any of its runs: such a model is accepted under "own" too.
    """
    expected = own if policy.initial == "own" else policy.initial

    def rule(request: Request, model: str) -> str:
        first = isinstance(request, Train | Evaluate) and request.round == 0
        if not first or model == expected or policy.initial == "any":
            return ""
        if policy.initial == "own" and answered(model):
            return ""
        mine = "the task's own model() gives" if policy.initial == "own" else "this site expects"
        return (
            f"the run would begin with the model {model}, and {mine} {expected}. A chosen first model can "
            f"reveal single examples. If the people of the run confirm this model, by a way that the "
            f"aggregator doesn't carry, run here: fedtrain policy set initial={model} (its own "
            f"policy.initial)"
        )

    gate.models = {"policy.initial": rule} | gate.models


def strangers(keys: Mapping[SiteId, str]) -> str:
    """Why a cohort with these sites, whose keys are not pinned, is refused, and what to do."""
    pins = " ".join(f"{site}={key}" for site, key in [*keys.items()][:5])
    return (
        f"it has not pinned {some([*keys])} with the keys in its cohort (its own policy.pin_members). If "
        f"`fedtrain policy show` prints these keys there, run here: fedtrain policy pin {pins}"
    )


def one_model_a_round(ledger: Ledger, masks: bool) -> OfModel:
    """A rule: after so many rounds there is one model, which is evaluated and which the next round trains
    from. So nobody learns how any other model does on the site's data. Without masks an aggregator that lost
    a round may train it anew, over other sites; then only evaluations are held to it."""

    def rule(request: Request, model: str) -> str:
        evaluates = isinstance(request, Evaluate)
        if not (evaluates or (masks and isinstance(request, Train))):
            return ""
        assert isinstance(request, Train | Evaluate), request
        if ledger.model_of(request.round, model) == model:
            return ""
        return (
            f"after {request.round} rounds it was asked about another model: only the one that a round "
            f"committed is evaluated and trained from. A run that begins again needs another run.name (its "
            f"own evaluate.every)"
        )

    return rule
