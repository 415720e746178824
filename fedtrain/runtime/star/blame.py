"""Who spoils the sums: a search by halves over new rounds, in which nobody's update is ever seen alone.

A sum that no updates can make was spoiled by one of its sites, and masks hide by whom. In the next round the
sites are summed in groups: the suspected ones in halves, each made up to the least of a sum by sites that
nobody suspects. The good groups' mean is that round's step. Whoever is alone with sites that nobody suspects
when a sum is spoiled, is named and asked for nothing more: one of 16 four rounds after the first such sum.

A round without a good group moves the model in its last bit only, so that no site is asked twice for one
model; the groups differ from the cohort before by half of it, which a site's guard (sites/cohorts.py) allows.

Where sites check sums, each can check that of its own group alone. So one good group's sum is the step, its
sites check it, and a third of each of the next groups at least are sites that checked a model last.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain

import msgspec

from ...arena import AnyArena, Arena, ArenaFile
from ...errors import SecAggError
from ...messages import SiteId
from ...schema import ITEM_BYTES, Schema, Section

Group = Sequence[SiteId]


class Spoiled(SecAggError):
    """Sums whose values no updates have."""

    def __init__(self, groups: Sequence[Group], why: str) -> None:
        super().__init__(why)
        self.groups = groups


class Suspects(msgspec.Struct, frozen=True):
    """What the sums of a run have told about who spoils them."""

    parts: list[list[SiteId]] = []  # in each of these is one site at least that does
    named: list[SiteId] = []  # they do
    resting: dict[SiteId, int] = {}  # spoiled a step in the open; the first round that they are asked for
    checkers: list[SiteId] = []  # they can check the last model; of a search where sites check sums

    def after(
        self, spoiled: Iterable[Group], good: Iterable[Group], checkers: Iterable[SiteId] = ()
    ) -> Suspects:
        """With what one more round's sums tell, and the sites that can check the model after it."""
        cleared, before = {*chain.from_iterable(good)}, {*chain.from_iterable(self.parts)}
        found = [[site for site in group if site in before or not before & {*group}] for group in spoiled]
        told = {*chain.from_iterable(found)}
        rest = [part for part in self.parts if not told & {*part}]
        left = [sorted({*part} - cleared) for part in (*found, *rest)]
        return Suspects(
            [part for part in left if len(part) > 1],
            sorted({*self.named, *(part[0] for part in left if len(part) == 1)}),
            self.resting,
            [*checkers],
        )

    def with_resting(self, sites: Mapping[SiteId, int], number: int) -> Suspects:
        """With these sites resting; without those whose rest is over in round `number`."""
        left = {site: until for site, until in self.resting.items() if until > number}
        return msgspec.structs.replace(self, resting={**left, **sites})

    def groups(self, sites: Collection[SiteId], least: int, seed: int) -> list[list[SiteId]]:
        """The sums of a round over these sites, none over fewer than `least`. A half that can't be made up to
        that waits for a later round. [] where none can."""
        draw, suspected = random.Random(seed), {*chain.from_iterable(self.parts)}
        others = draw.sample(free := sorted({*sites} - suspected), len(free))
        others.sort(key=lambda site: site not in self.checkers)
        found = []
        for part in self.parts:
            here = draw.sample(present := sorted({*sites} & {*part}), len(present))
            for half in (here[: (len(here) + 1) // 2], here[(len(here) + 1) // 2 :]):
                known = {*half} & {*(self.checkers or half)}
                lack = max(0, least - len(half), -(-(len(half) - 3 * len(known)) // 2))
                if half and lack <= len(others):
                    found.append(half + others[:lack])
                    others = others[lack:]
        if len(others) >= least:
            return [*map(sorted, found), sorted(others)]
        for place, site in enumerate(others if found else ()):
            found[place % len(found)].append(site)
        return [*map(sorted, found)]


def nudged(weights: AnyArena, number: int) -> Arena:
    """The model with the last bit of one of its numbers flipped: of another one in each round. Nudged again
    in the same round it is what it was."""
    after = weights.load()
    after.data[place_of_nudge(weights.schema, number)] ^= 1
    after.changed()
    return after


def place_of_nudge(schema: Schema, number: int) -> int:
    """The byte in which a nudge of this round flips the last bit."""
    parts = [section for section in schema.model.sections if section.trained]
    part = parts[number % len(parts)]
    return part.offset + number // len(parts) % part.trained * ITEM_BYTES[part.dtype]


class Nudged(ArenaFile):
    """A model in a file as `nudged` makes it, for a process that loads no torch."""

    def __init__(self, weights: ArenaFile, number: int) -> None:
        super().__init__(weights.schema, weights.file)
        self._place = place_of_nudge(weights.schema, number)

    def span(self, section: Section, start: int, stop: int, room: memoryview | None = None) -> memoryview:
        view = super().span(section, start, stop, room)
        at = self._place - section.offset - start * ITEM_BYTES[section.dtype]
        if 0 <= at < len(view):
            view[at] ^= 1
        return view
