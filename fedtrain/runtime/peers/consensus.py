"""The end of a run of peers: the peers make one model of all theirs, the same bits at each of them.

Without a robust rule the model is cut into blocks, and each block has a root: all send the root their block,
the root adds them up in the order of names, and gives everybody the result. So each peer sends two models,
whatever the number of peers, and one place decides each bit. With a robust rule every peer gets every
model and applies the rule itself, so that no peer has the last word. Then peers vote (votes.py). Many peers
turn to a few others at a time, in an order that is the same at both ends.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from ...arena import Arena
from ...errors import BadUpdate, SecAggError
from ...exchange import Exchanged, PeerId
from ...gossip import Parcel
from ...gossip.one_model import blocks_of, joined, mean, ruled
from ...secagg.peer_sums import Layout, PeerSum, RingSum
from ...store.rounds import MadeOf
from ...transport.overlay import in_turn
from .averaging import sum_name
from .gossip import Peer
from .parcels import Inbox, good, made_of, share_of, share_of_model, state_of
from .votes import NAMED, VOTES, OneModel, Voters, Votes
from .whole_models import among, as_model, as_numbers, mass_of, parts_of, rule_of, sha256, signed, with_own

if TYPE_CHECKING:
    from .whole_models import Parts

ATTEMPTS = 4  # at one model, each without those who were lost in the one before
PHASES = 4  # exchanges of an attempt: models, results, votes, which votes came
EXCHANGES = ATTEMPTS * PHASES + 1  # the last one waits for those who still try
ENDED = 1 << 24  # the number, from the first exchange on, that says that a peer has the model
ECHOED = 64  # members up to which each tells all others which votes it got
PULL_S = 60.0  # for a model to come


class Consensus:
    """One peer's part in the agreement. `run` is the page."""

    def __init__(
        self, peer: Peer, first: int, initial: Arena, alive: Callable[[], Collection[PeerId]],
        deadline_s: float, voters: Voters, turns: int = 1, patience_s: float | None = None,
    ) -> None:  # fmt: skip
        """`first`: the number of the first exchange, after those of all rounds. `initial`: the run's first
        model, which has the parts that never travel. `turns`: in how many a peer turns to all others, the
        same at all peers. `patience_s`: for which an exchange may go on once others have the model; None: to
        its end."""
        self._peer, self._first, self._initial, self._alive = peer, first, initial, alive
        self._deadline_s, self._voters, self._neighbors = deadline_s, voters, peer.neighbors
        self._turns, self._patience_s = turns, patience_s
        self._members: Sequence[PeerId] = ()
        self._made_of = MadeOf()  # the model that this peer made
        self.rule, self.lost, self._silent = rule_of(peer), dict[PeerId, str](), list[PeerId]()
        self.votes: Votes = {}
        self._unproven = set[PeerId]()  # who said to have the model, and gave none that most voted for
        self._taken: OneModel | None = None  # of one who has it, found while this peer still waited

    @property
    def done(self) -> int:
        """What a peer announces as its round once it has the model."""
        return self._first + ENDED

    async def run(self, least: int) -> OneModel | None:
        """The model that most of the roster agree on; None when they can't, and `lost` says who was missing,
        `votes` what each made. `least`: as many as a rule or masks need."""
        slow: set[PeerId] = set()
        for number in range(self._first, self._first + ATTEMPTS * PHASES, PHASES):
            if (found := await self._of_the_others()) is not None:
                return found
            members = sorted({*self._alive(), self._peer.name} - slow)
            if len(members) < max(least, self._voters.need):
                break
            self._members = members
            model = await (self._by_blocks if self.rule is None else self._by_rule)(number, members)
            if model is not None:
                self._neighbors.publish(number + PHASES - 2, share_of_model(model, self._made_of))
            self.votes, silent = await self._told(number, members, model)
            slow |= await self._echoed(number, members, silent)
            if (found := await self._settle(number, model)) is not None:
                return await self._finished(found)
        others = sorted(self._neighbors.progress().keys() & {*self._alive()})
        self._neighbors.announce(self.done - 1)  # nothing comes: it is over when they have gone on
        await self._neighbors.exchange(self.done - 1, {}, others, Inbox({}, {}, 0), self._deadline_s)
        return await self._of_the_others()

    async def _by_blocks(self, number: int, members: Sequence[PeerId]) -> Arena | None:
        """The mean by mass, each block of which its root decides; None where a block is missing."""
        me = self._peer.name
        roots = [name for name in members if self._voters.is_called(name)] or list(members)
        blocks = [blocks_of(part, len(roots)) for part in self._parts.values()]
        of_root = {root: dict(zip(self._parts, each, strict=True))
                   for root, each in zip(roots, zip(*blocks, strict=True), strict=True)}  # fmt: skip
        gather = self._summed if self._peer.sums is not None else self._mean
        mine = await gather(number, members, of_root)
        if mine is None and me in roots:  # then nobody has all results
            return None
        give, like = among(members, mine or {}), among(members, of_root[roots[0]])
        told = {name: Parcel(give) for name in members if name != me} if give else {}
        came = await self._swap(number + 1, told, [root for root in roots if root != me], like)
        results = {root: parcel.parts for root, parcel in came.items()} | ({me: give} if give else {})
        if any(root not in results for root in roots):
            return None
        wholes = {
            name: joined([results[root][tagged] for root in roots], part)
            for tagged, (name, part) in zip(like, self._parts.items(), strict=True)
        }
        return self._model(wholes, members)

    async def _mean(
        self, number: int, members: Sequence[PeerId], of_root: Mapping[PeerId, Parts]
    ) -> Parts | None:
        """This root's block; None when a member's did not come, or this peer is no root."""
        me, mass = self._peer.name, {"mass": mass_of(self._peer)}
        blocks = {root: among(members, parts) for root, parts in of_root.items()}
        own = {root: Parcel(parts, mass) for root, parts in blocks.items() if root != me}
        expected = [name for name in members if name != me] if me in of_root else []
        came = await self._swap(number, own, expected, next(iter(blocks.values())))
        if me not in of_root or len(came) < len(expected):
            return None
        came[me] = Parcel(blocks[me], mass)
        masses = [came[name].fields.get("mass", 1.0) for name in members]
        return {part: mean([came[name].parts[tagged] for name in members], masses)
                for part, tagged in zip(of_root[me], blocks[me], strict=True)}  # fmt: skip

    async def _summed(
        self, number: int, members: Sequence[PeerId], of_root: Mapping[PeerId, Parts]
    ) -> Parts | None:
        """The same under masks: a root learns the sum of the others' blocks."""
        me, sums, weight = self._peer.name, self._peer.sums, 1 / len(members)
        assert sums is not None

        def session(root: PeerId) -> PeerSum | None:
            return sums.session(number, root, [name for name in members if name != root])

        given: dict[PeerId, Parcel] = {}
        for root, parts in of_root.items():
            if root != me and (at := session(root)) is not None:
                values, scalars = as_numbers(parts)
                layout = Layout.of(len(members) - 1, self._peer.clip, values, len(scalars))
                ring, _ = sums.masked(layout, values, scalars, weight, at)
                given[root] = Parcel({sum_name(at): signed(ring)})
        at = session(me) if me in of_root else None
        values, scalars = as_numbers(next(iter(of_root.values())))
        total = RingSum(Layout.of(len(members) - 1, self._peer.clip, values, len(scalars)))
        expected = [name for name in members if name != me] if at is not None else []
        came = await self._swap_sums(number, given, expected, at, total)
        if at is None or len(came) < len(expected):
            return None
        try:
            return with_own(of_root[me], weight, *total.layout.decode(total.total))
        except SecAggError:
            return None

    async def _by_rule(self, number: int, members: Sequence[PeerId]) -> Arena | None:
        """What the rule makes of all models, whose order is that of the names."""
        own, others = Parcel(self._parts), [name for name in members if name != self._peer.name]
        came = await self._swap(number, dict.fromkeys(others, own), others, self._parts) | {
            self._peer.name: own
        }
        here = [name for name in members if name in came]
        assert self.rule is not None
        if len(here) < max(self.rule.needs, 2):
            return None
        rows = {name: [came[peer].parts[name] for peer in here] for name in self._parts}
        return self._model(ruled(self.rule, here, rows, self._first), here)

    async def _told(
        self, number: int, members: Sequence[PeerId], model: Arena | None
    ) -> tuple[Votes, set[PeerId]]:
        """Each member's vote, this peer's among them; and the members that most did not hear of."""
        mine: Votes = {}
        if model is not None:
            made = self._voters.made(sha256(model), self._made_of)
            mine[self._peer.name] = made, self._voters.sign(self._voters.message(number, made))
        told = await self._tell(number + PHASES - 2, members, (mine, self._silent[:NAMED]))
        named = Counter([*self._silent, *(name for _, missed in told.values() for name in {*missed})])
        slow = {name for name, times in named.items() if 2 * times > 1 + len(told.keys() - {name})}
        own = {name: {name: votes[name]} for name, (votes, _) in told.items() if name in votes}
        return self._count(number, [mine, *own.values()]), slow

    async def _echoed(self, number: int, members: Sequence[PeerId], slow: set[PeerId]) -> set[PeerId]:
        """Add the votes that others got, without those of peers that voted for two models; returns the
        members that most take for slow."""
        if len(members) > ECHOED:
            return slow
        told = await self._tell(number + PHASES - 1, members, (self.votes, sorted(slow)))
        self.votes = self._count(number, [self.votes, *(votes for votes, _ in told.values())])
        named = Counter([*slow, *(name for _, theirs in told.values() for name in {*theirs})])
        return {name for name, times in named.items() if 2 * times > 1 + len(told)}

    def _count(self, number: int, told: Sequence[Votes]) -> Votes:
        votes, twice = self._voters.checked(number, told)
        self.lost |= dict.fromkeys(twice, "voted for two models")
        return votes

    async def _tell(
        self, number: int, members: Sequence[PeerId], what: tuple[Votes, Sequence[PeerId]]
    ) -> dict[PeerId, tuple[Votes, list[PeerId]]]:
        """Give all members some votes and names, and return theirs."""
        import torch

        part = torch.frombuffer(bytearray(msgspec.msgpack.encode(what)), dtype=torch.uint8)
        others = [name for name in members if name != self._peer.name]
        came = await self._swap(number, dict.fromkeys(others, Parcel({"told": part})), others, {"told": part})
        told = dict[PeerId, tuple[Votes, list[PeerId]]]()
        for name, heard in came.items():
            with suppress(msgspec.DecodeError, KeyError):
                told[name] = VOTES.decode(bytes(heard.parts["told"].numpy()))
        return told

    async def _settle(self, number: int, model: Arena | None) -> OneModel | None:
        """The model that most of the roster voted for: this peer's own, or else that of one of them."""
        counts = Counter(made for made, _ in self.votes.values())
        made, times = counts.most_common(1)[0] if counts else ("", 0)
        if times < self._voters.need:
            return None
        voted = {name: vote for name, (theirs, vote) in sorted(self.votes.items()) if theirs == made}
        proof = dict([*voted.items()][: self._voters.need])
        who = sorted({self._peer.name, *voted})
        if self._peer.name in voted and model is not None:
            return OneModel(model, sha256(model), who, replace(self._made_of, attempt=number, votes=proof))
        for holder in voted:
            taken = await self._pull(holder)
            if taken is not None and self._voters.made(sha256(taken[1]), taken[2]) == made:
                made_of = replace(taken[2], attempt=number, votes=proof)
                return OneModel(taken[1], sha256(taken[1]), who, made_of)
        return None

    async def _of_the_others(self) -> OneModel | None:
        """The model of those who have finished: with the votes of most of the roster, or from so many."""
        done = [name for name, number in sorted(self._neighbors.progress().items()) if number == self.done]
        if done and self._turns > 1:  # more than those who are near may have finished
            done += sorted({*self._alive()} - {self._peer.name, *done})
        found = self._taken or await self._proven(done)
        return None if found is None else await self._finished(found)

    async def _proven(self, done: Sequence[PeerId]) -> OneModel | None:
        """The model that one of these gives with the votes of most of the roster, or that most give alike."""
        holders: dict[str, list[PeerId]] = {}
        for name in done:
            taken = await self._pull(name)
            self._unproven.add(name)
            if taken is None or taken[0] != self.done:
                continue
            digest, made_of = sha256(taken[1]), taken[2]
            made = self._voters.made(digest, made_of)
            holders.setdefault(made, []).append(name)
            if max(self._voters.for_it(made, made_of), len(holders[made])) >= self._voters.need:
                return OneModel(taken[1], digest, sorted([self._peer.name, *holders[made]]), made_of)
        return None

    async def _finished(self, found: OneModel) -> OneModel:
        """Offer the model, and refuse what others still give: they would wait until this peer has left."""
        self._neighbors.publish(self.done, share_of_model(found.model, found.made_of))
        self._neighbors.announce(self.done)
        await self._neighbors.exchange(self.done, {}, [], Inbox({}, {}, 0), self._deadline_s)
        return found

    # --- what they are made of

    @property
    def _parts(self) -> Parts:
        return parts_of(self._peer.model)

    def _model(self, parts: Parts, of: Sequence[PeerId]) -> Arena | None:
        model, self._made_of = as_model(parts, self._initial), MadeOf(len(of), of)
        return model if all(map(good, parts.values())) else None

    async def _swap(
        self, number: int, given: Mapping[PeerId, Parcel], expected: Sequence[PeerId], like: Parts
    ) -> dict[PeerId, Parcel]:
        """Give each its parcel; the parcels that came whole, and whose numbers a model may have."""
        most = 2 * self._peer.model.schema.nbytes + (1 << 16) + 256 * len(self._members)
        inbox = Inbox({}, like, most, like.keys() & {"told"}, patient=True)
        came = await self._exchange(number, given, expected, inbox)
        parcels = {name: inbox.parcel(name) for name in sorted(came)}
        return {name: one for name, one in parcels.items() if all(map(good, one.parts.values()))}

    async def _swap_sums(
        self, number: int, given: Mapping[PeerId, Parcel], expected: Sequence[PeerId], at: PeerSum | None,
        total: RingSum,
    ) -> Collection[PeerId]:  # fmt: skip
        name = sum_name(at) if at is not None else ""
        inbox = Inbox({name: total}, {name: signed(total.total)}, 0, patient=True)
        return await self._exchange(number, given, expected, inbox)

    async def _exchange(
        self, number: int, given: Mapping[PeerId, Parcel], expected: Sequence[PeerId], inbox: Inbox
    ) -> Collection[PeerId]:
        shares = {name: share_of(parcel, 1.0, len(given)) for name, parcel in given.items()}
        arrived, missing = set[PeerId](), dict[PeerId, str]()
        for turn, part in enumerate(in_turn(self._peer.name, self._members, self._turns)):
            if turn and self._taken is not None:
                break
            at = self._first + (number - self._first) * self._turns + turn
            to = {name: share for name, share in shares.items() if name in part}
            self._neighbors.announce(at)
            done = await self._unless_over(self._neighbors.exchange(
                at, to, [name for name in expected if name in part], inbox, self._deadline_s
            ))  # fmt: skip
            arrived |= done.arrived
            missing |= done.missing
        if (phase := (number - self._first) % PHASES) == 0:
            self.lost, self._silent = {}, sorted(missing)
        elif phase == 1:  # who counts with other members fits with nobody
            self._silent += sorted(name for name, why in missing.items() if why.startswith("refused"))
        self.lost |= missing
        return arrived

    async def _is_over(self) -> bool:
        """Whether one of those who are near has given the model: it stays for a while only, to give it."""
        done = {name for name, number in self._neighbors.progress().items() if number == self.done}
        if self.rule is None and self._taken is None:
            self._taken = await self._proven(sorted(done - self._unproven))
        return self._taken is not None

    async def _unless_over(self, exchange: Coroutine[Any, Any, Exchanged]) -> Exchanged:
        """How it went; nothing came where it still waits for somebody when others have the model."""
        task = asyncio.ensure_future(exchange)
        try:
            while not task.done():
                await asyncio.wait([task], timeout=self._patience_s)
                over = asyncio.ensure_future(self._is_over())
                await asyncio.wait([task, over], return_when=asyncio.FIRST_COMPLETED)
                if over.done() and over.result() and not task.done():
                    return Exchanged()
                over.cancel()
            return task.result()
        finally:
            task.cancel()
            await asyncio.wait([task])  # the next exchange begins when this one is stopped

    async def _pull(self, peer: PeerId) -> tuple[int, Arena, MadeOf] | None:
        if (letter := await self._neighbors.pull(peer, PULL_S)) is None:
            return None
        try:
            self._voters.check(of := made_of(letter))
            return letter.round, state_of(letter, self._peer.model.schema).load(), of
        except BadUpdate as e:
            self.lost[peer] = f"its model: {e}"
            return None
