"""python -m tests.vsim SEED [LAST] [--trace] [--gossip | --slow]"""

import argparse
import sys

from tests.vsim.hunt import hunt
from tests.vsim.village import SlowVillage, Village
from tests.vsim.world import World

parser = argparse.ArgumentParser(prog="python -m tests.vsim", description="Run seeds of the simulated world.")
parser.add_argument("seed", type=int)
parser.add_argument("last", type=int, nargs="?", help="run all seeds from SEED to this one")
parser.add_argument("--trace", action="store_true", help="tell what happens, and when")
parser.add_argument("--gossip", action="store_true", help="peers without a server")
parser.add_argument("--slow", action="store_true", help="peers without a server, one of them slow")
given = parser.parse_args()
seeds = range(given.seed, (given.seed if given.last is None else given.last) + 1)
world = SlowVillage if given.slow else Village if given.gossip else World
found = hunt(seeds, trace=given.trace, most=len(seeds), world=world)
if len(seeds) == 1:
    print(world.plans.of(given.seed))
print(dict(found.counts))
for seed, why in found.failed.items():
    print(f"seed {seed}: {why}")
sys.exit(bool(found.failed))
