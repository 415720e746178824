"""One peer as a process, for faults: averages numbers with all others, and says each round what came.

    python -m tests.gossip_peer NAME FILE     FILE: JSON with keys, addresses, deadline_s; until it is killed

It loads no torch. What it stands for is what a runtime does: announce, exchange, commit, publish; and pull a
state when it is behind. How long a round waited is told beside how long the process itself stood still in it.
"""

import array
import asyncio
import json
import sys
import time
from pathlib import Path

from fedtrain.exchange import Contact, Share
from fedtrain.transport.admission import Curve
from fedtrain.transport.link import LinkSettings
from fedtrain.transport.zmq import ZmqNeighbors
from fedtrain.wire.gossip import Greeting
from tests.rosters import FixedRoster, met, signs

SIZE = 50_000


class Whole:
    """Shares that came whole, by peer."""

    def __init__(self):
        self.coming, self.whole = {}, {}

    def begin(self, offer):
        self.coming[offer.peer] = bytearray(offer.nbytes)

    def mix(self, peer, offset, chunk):
        self.coming[peer][offset : offset + len(chunk)] = chunk

    def end(self, peer, nbytes):
        data = self.coming.pop(peer)
        if nbytes == len(data):
            self.whole[peer] = array.array("d", bytes(data[:8]))[0]


class Stood:
    """How long this process has not run, though it had something to do."""

    TICK_S = 0.05

    def __init__(self):
        self.seconds, self._ticks = 0.0, asyncio.ensure_future(self._tick())

    async def _tick(self):
        while True:
            began = time.monotonic()
            await asyncio.sleep(self.TICK_S)
            self.seconds += time.monotonic() - began - self.TICK_S


def share(x):
    return Share(memoryview(array.array("d", [x]) * SIZE).cast("B"))


async def main(name, spec):
    mine = spec["peers"][name]
    contacts = [Contact(n, p["public"].encode(), mine["calls"][n]) for n, p in spec["peers"].items()]
    neighbors = ZmqNeighbors(
        me=name, curve=Curve(mine["public"].encode(), mine["secret"].encode()), sign=signs(name),
        roster=FixedRoster(contacts), run="faults",
        greeting=Greeting(version="test", task_digest="", schema_digest="", agreed={}),
        listen=mine["listen"], settings=LinkSettings(heartbeat_s=0.3, idle_s=spec["idle_s"]),
    )  # fmt: skip
    neighbors.start()
    others = sorted(set(spec["peers"]) - {name})
    connected = await met(neighbors, others, 15.0 if "--back" not in sys.argv else 2.0)
    x, t, stood = float(mine["start"]), 0, Stood()
    say("ready", met=connected)
    while True:
        progress = neighbors.progress()
        ahead = {p: r for p, r in progress.items() if r > t + 1}
        source = max(ahead, key=ahead.__getitem__, default="")
        if 2 * len(ahead) > len(progress) and (letter := await neighbors.pull(source, 3.0)):
            x, t = array.array("d", bytes(letter.share.payload[:8]))[0], max(letter.round, t)
            say("pulled", round=t, x=x, source=source, stood_s=stood.seconds)
        neighbors.announce(t, others)
        await asyncio.sleep(spec["train_s"])
        mixer, before = Whole(), stood.seconds
        done = await neighbors.exchange(t, dict.fromkeys(others, share(x)), others, mixer, spec["deadline_s"])
        both = sorted(done.arrived & done.given)
        x = (x + sum(mixer.whole[p] for p in both)) / (1 + len(both))
        t += 1
        neighbors.publish(t, share(x))
        told = {"waited_s": done.waited_s, "stood_s": stood.seconds - before, "missing": dict(done.missing)}
        say("round", round=t, x=x, both=both, **told)


def say(kind, **fields):
    print(json.dumps({"kind": kind, "at": time.monotonic(), **fields}), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], json.loads(Path(sys.argv[2]).read_text())))
