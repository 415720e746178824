"""What must be true of a run, whatever went wrong in it.

commits   each round is committed once, after the one before it, and no restart takes one back
model     each committed model is, to the last bit, the one before it moved by the mean of the updates of
          those sites that the commit names; each update was trained in this round, from these weights
masks     a sum is opened over a cohort's quorum at least, and one site's update of a round in one sum only
privacy   no update with noise leaves before the disk has its line in the ledger
progress  when nothing goes wrong any more, the run ends; no process ends with an error again and again
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from fedtrain.arena import Arena
from fedtrain.digest import digest_of
from fedtrain.events import Event, UpdateReceived
from fedtrain.messages import Update
from fedtrain.runtime.simulations.partial_sums import PlainSum
from fedtrain.runtime.sites.secure_site import SecureSite
from fedtrain.runtime.sites.site import Site
from fedtrain.runtime.star.gathered import Gathering
from fedtrain.schema import Schema, TensorSpec
from fedtrain.secagg import messages as msg
from fedtrain.store import RunStore
from fedtrain.transport.star import AggregatorEnd
from tests.vsim.chance import Change, standing
from tests.vsim.clock import Killed

if TYPE_CHECKING:
    from tests.vsim.world import Machine, World

Values = np.ndarray[Any, Any]
SCHEMA = Schema((TensorSpec("w", (5,), "float32", True), TensorSpec("b", (2,), "float32", True)))
ARENA_BYTES = len(Arena.zeros(SCHEMA).payload)


def values_of(data: bytes | memoryview) -> Values:
    """The seven numbers of an arena."""
    return np.frombuffer(data, np.float32, 7, SCHEMA.sections[0].offset)


def payload_of(values: Values) -> bytes:
    """The bytes of an arena of seven numbers, as `arena_of` has them."""
    return values.tobytes().ljust(ARENA_BYTES, b"\0")


def arena_of(values: Values) -> Arena:
    """An arena of seven numbers."""
    arena = Arena.zeros(SCHEMA)
    arena.flat(SCHEMA.sections[0]).numpy()[:] = values
    return arena


def examples_of(site: str) -> float:
    return 3.0 + 2 * (ord(site) - ord("a"))


class Onlooker:
    """Looks on while a world runs. An AssertionError is a fault that the seed has found."""

    counts: dict[str, int]

    def __init__(self, world: World) -> None:
        self.world = world
        self._wrong: list[str] = []  # what was found where a process would have caught it

    def ended(self, machine: Machine, error: Exception) -> None:
        """A process ended with an error: its people start it again."""
        self.counts["restarts"] += 1
        if not self.world.faulty:
            machine.errors.append(f"{type(error).__name__}: {error}")
            assert len(machine.errors) < 6, f"{machine.name} ends again and again: {machine.errors[-1]}"

    def holds(self, true: object, what: str) -> None:
        if not true:
            self._wrong.append(what)
            self.world.tell(f"WRONG: {what}")

    def at_the_end(self) -> None:
        """When all is over."""
        assert not self._wrong, f"seed {self.world.plan.seed}: " + "; ".join(self._wrong)


class Claims(Onlooker):
    """Of a star."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.counts = dict.fromkeys(("commits", "restarts", "opened", "released", "models"), 0)
        self._updates: dict[tuple[str, int, str], list[tuple[str, Values]]] = defaultdict(list)
        self._folded: dict[int, dict[str, str]] = {}  # round -> site -> digest of the update that was taken
        self._commits: dict[int, tuple[str, list[str]]] = {}  # round -> digest of the model, sites
        self._doubtful: tuple[int, str, list[str]] | None = None  # a commit in which its process was killed
        self._models: dict[str, Values] = {}
        self._agreed: dict[tuple[str, bytes], tuple[str, ...]] = {}  # (site, session) -> survivors
        self._cohorts: dict[bytes, int] = {}  # session -> how many were asked
        self._opened: dict[tuple[str, str, int], set[tuple[str, ...]]] = defaultdict(set)
        self._left: dict[str, set[str]] = defaultdict(set)  # site -> digests of what left it

    # --- what the trainers and the people see

    def trained(self, site: str, number: int, weights: str, digest: str, delta: Values) -> None:
        self._updates[site, number, weights].append((digest, delta))

    def told(self, machine: Machine, event: Event) -> None:
        if isinstance(event, UpdateReceived):
            self.counts["models"] += 1

    # --- looking on

    @contextmanager
    def watching(self) -> Iterator[None]:
        looked: tuple[Change, ...] = (
            (Gathering, "add", self._gathered), (Site, "fulfil", self._fulfilled),
            (SecureSite, "answer", self._answered), (SecureSite, "offer", self._offered),
        )  # fmt: skip
        with standing(
            *((where, name, looked_at(getattr(where, name), after)) for where, name, after in looked),
            (RunStore, "commit", self._commits_by(RunStore.commit)),
            (AggregatorEnd, "tick", self._ticks(AggregatorEnd.tick)),
        ):
            yield

    def _ticks(self, tick: Callable[[AggregatorEnd, float], None]) -> Any:
        """A clock that gives up nobody who is here."""

        def ticked(end: AggregatorEnd, now: float) -> None:
            before = [(exchange, set(exchange.waiting)) for exchange in end._exchanges]
            tick(end, now)
            given_up = {site for exchange, waiting in before for site in waiting - exchange.waiting}
            self.holds(
                not given_up & end.sessions.keys(), f"{given_up} are given up, and {[*end.sessions]} are here"
            )

        return ticked

    def _commits_by(self, commit: Callable[..., None]) -> Any:
        def committing(store: RunStore, checkpoint: Any, record: Any, *rest: Any) -> None:
            weights, sites = checkpoint.weights, list(rest[1]) if len(rest) > 1 else []
            data = (weights if isinstance(weights, Arena) else weights.load()).payload
            self._models[weights.digest] = values_of(bytes(data))
            self._found(checkpoint.round)
            try:
                commit(store, checkpoint, record, *rest)
            except Killed:  # the disk has it, or has not: the next commit tells
                self._doubtful = checkpoint.round, weights.digest, sites
                raise
            self._committed(checkpoint.round, weights.digest, sites)

        return committing

    def _found(self, number: int) -> None:
        """Who commits this round goes on from the one before, also where its process was killed in that."""
        doubtful, self._doubtful = self._doubtful, None
        if doubtful is not None and doubtful[0] == number - 1 == len(self._commits):
            self._committed(*doubtful)

    def _committed(self, number: int, digest: str, sites: list[str]) -> None:
        self.counts["commits"] += 1
        self.holds(
            number == len(self._commits), f"round {number} is committed after {len(self._commits) - 1}"
        )
        self._commits[number] = digest, sites
        if number > 0 and number - 1 in self._commits:
            self._check_model(number, digest, sites)

    def _check_model(self, number: int, digest: str, sites: list[str]) -> None:
        base, _ = self._commits[number - 1]
        strategy = self.world.configs["aggregator"].strategy
        self.holds(len(sites) >= strategy.min_sites, f"round {number} has {sites}: too few")
        self.holds(len(set(sites)) == len(sites), f"round {number} has {sites}: one twice")
        found = list[tuple[str, Values]]()
        for site in sorted(sites):
            trained = self._updates[site, number - 1, base]
            taken = self._folded.get(number - 1, {}).get(site)
            good = [delta for own, delta in trained if taken in (own, None)]
            if not good:
                return self.holds(
                    False, f"round {number}: what {site} is said to have sent is not its update of it"
                )
            found.append((site, good[-1]))
        mean = self._masked_mean(number - 1, found) if self.world.plan.kind == "masks" else self._mean(found)
        model = (self._models[base] + mean).astype(np.float32)
        expected = digest_of(payload_of(model))
        if expected != digest:  # the numbers take long to write
            self.holds(False, f"round {number}: the model is not the mean of {sites}: {model}")

    def _mean(self, found: list[tuple[str, Values]]) -> Values:
        """As aggregation.mean defines it: products and sums in float64, in order; rounded once."""
        total, weight = np.zeros(7), 0.0
        for site, delta in found:
            own = examples_of(site)
            total, weight = total + delta.astype(np.float64) * own, weight + own
        mean: Values = (total / weight).astype(np.float32)
        return mean

    def _masked_mean(self, number: int, found: list[tuple[str, Values]]) -> Values:
        """As the same sum has it without masks."""
        config = self.world.configs["aggregator"]
        plain = PlainSum(config, number, SCHEMA, len(found))
        for site, delta in found:
            arena = arena_of(delta)
            plain.add(site, Update(delta=arena, num_examples=examples_of(site)))
        total = plain.total()
        assert total.delta is not None
        return values_of(bytes(total.delta.payload))

    def _gathered(self, gathering: Gathering, _: Any, site: str, update: Update, **__: Any) -> None:
        self._folded.setdefault(gathering.plan.round, {})[site] = update.delta.digest

    def _fulfilled(self, site: Site, reply: Any, request: Any) -> None:
        """A reply is about to leave a site."""
        if not isinstance(reply, Update) or self.world.plan.kind != "noise":
            return
        name = site._name
        self._left[name].add(reply.delta.digest)
        ledger = self.world.machines[name].disk.folder / f"@{name}" / "releases.jsonl"
        told = self.world.machines[name].disk.durable(ledger).count(b"\n")
        self.counts["released"] += 1
        left = len(self._left[name])
        self.holds(told >= left, f"{name} gives its update number {left}, and its ledger has {told} for sure")

    def _offered(self, site: SecureSite, reply: Any, request: Any, *_: Any) -> None:
        if isinstance(reply, msg.Keys):
            self._cohorts[site._client._sid] = len(request.terms.cohort)

    def _answered(self, site: SecureSite, reply: Any, request: Any) -> None:
        """A step of a secure sum at a site."""
        name = site._site
        if isinstance(request, msg.Agree) and isinstance(reply, msg.Agreed):
            self._agreed[name, request.sid] = request.sites
        if not (isinstance(request, msg.Unmask) and isinstance(reply, msg.Unmasked)):
            return
        over, asked = self._agreed[name, request.sid], self._cohorts[request.sid]
        number = int(request.id.split("/")[1])
        self.counts["opened"] += 1
        least = max(2 * asked // 3 + 1, 3)
        self.holds(
            len(over) >= least, f"{name} opens a sum over {over} of {asked} sites: {least} are the least"
        )
        signed = {*request.signatures, name} & set(over)
        self.holds(
            len(signed) >= least, f"{name} opens a sum that {sorted(signed)} of {asked} sites agreed to"
        )
        self.holds(over == tuple(sorted({*over, name})), f"{name} opens a sum that it is not in")
        step = "evaluate" if site._client is site._clients[msg.AdvertiseEvaluation] else "train"
        several = self._opened[name, step, number]
        several.add(over)
        self.holds(len(several) == 1, f"{name} gave its {step} {number} into sums over {sorted(several)}")

    # --- when all is over

    def at_the_end(self) -> None:
        config = self.world.configs["aggregator"]
        store = RunStore(config.run_dir, read_only=True)
        try:
            kept = [(row.round, row.weights) for row in store.rounds()]
        finally:
            store.close()
        if self._doubtful is not None and len(kept) > len(self._commits):
            self._committed(*self._doubtful)
        told = [(number, digest) for number, (digest, _) in sorted(self._commits.items())]
        self.holds(kept == told, f"the store has the rounds {kept}, and these were committed: {told}")
        self.holds(len(kept) == config.run.rounds + 1, f"{len(kept) - 1} rounds of {config.run.rounds}")
        for name, left in self._left.items():
            ledger = self.world.machines[name].disk.folder / f"@{name}" / "releases.jsonl"
            lines = ledger.read_bytes().count(b"\n") if ledger.exists() else 0
            self.holds(lines >= len(left), f"{name} gave {len(left)} updates, and its ledger has {lines}")
        super().at_the_end()


def looked_at(real: Callable[..., Any], after: Callable[..., None]) -> Callable[..., Any]:
    """The method, whose result is looked at: `after(self, result, *arguments)`."""
    if real.__code__.co_flags & 0x80:  # a coroutine

        async def awaited(self: Any, *arguments: Any, **named: Any) -> Any:
            found = await real(self, *arguments, **named)
            after(self, found, *arguments, **named)
            return found

        return awaited

    def called(self: Any, *arguments: Any, **named: Any) -> Any:
        found = real(self, *arguments, **named)
        after(self, found, *arguments, **named)
        return found

    return called
