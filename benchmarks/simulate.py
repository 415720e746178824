"""How many sites a second a simulation trains, beside a plain loop and, with --beside, other frameworks.

    python benchmarks/simulate.py [--json] [--beside] [--case NAME] [--engine NAME]

Rounds go through all that a real run has: checks, the float64 fold, a committed checkpoint each round. All
that is compared takes turns (--seconds 1), as the machine may change its pace; figures are medians over the
turns, ratios the medians of each turn's ratio. Set-up and the first round are timed apart.

    updates_per_s       sites trained a second, 2 workers
    over_thread         / those of one thread of a plain torch loop, peers/plain_torch.py
    over_plain2         / those of two processes of that loop, which exchange nothing
    gemm_fraction       floating-point operations a second / those of a product of large matrices on all
                        cores. Counted are matrix products and convolutions forward and backward, of the
                        examples that there are (torch's FlopCounterMode): no padding, nothing by element
    speedup_2_over_1    / those of 1 worker; `machine_2_over_1`: two processes of the plain loop / one
    first_round_s       from the call to the first commit: processes, torch, data, the choice of an engine
    ray_over_local      those of 2 workers that Ray, or torchrun, has started / ours (case `launchers`)
    over_NAME           / those of a peer: pfl1 and pfl2 (ranks), flwr, jax
    difference_NAME     from its model to ours after the first round, the largest, as a part of the largest
                        change that ours made

Peers have the same sites, batches, learning rate and initial weights, ready-made, and neither check nor
commit anything. Each lives in a virtual environment of its own, made by pip under --cache; one that can't be
installed or fails is told of, with the reason.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import common
import numpy as np
from peers.participants import PEERS, Absent, Participant
from peers.work import Array, Work
from simulation_cases import CASES, Case, flops, work_of

GEMM_FLOPS = 2 * 1024**3  # of a round of peers/gemm.py
PLAIN_COMMAND = [sys.executable, "-m", "peers.plain_torch"]
LAUNCHED = {  # simulate.on -> what starts our script
    "ray": [sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"],
}
OURS, OURS_1, PLAIN, PLAIN_2, GEMM = "fedtrain", "fedtrain-1", "plain", "plain2", "gemm"


class Table:
    """Everyone's rounds a second, turn by turn."""

    def __init__(self, case: Case, work: Work, folder: Path, cache: Path, turn_s: float) -> None:
        self.case, self.work, self.folder, self.turn_s = case, work, folder, turn_s
        self.rates: dict[str, list[float]] = {}
        self.first_rounds_s: list[float] = []
        self.absent: dict[str, str] = {}
        self.told = ""  # by our last run: the engine and why
        self._starts: dict[str, Callable[[], Participant]] = {
            PLAIN: lambda: self._script(PLAIN, PLAIN_COMMAND),
            PLAIN_2: lambda: self._script(PLAIN, PLAIN_COMMAND, 2),
            GEMM: lambda: self._script(GEMM, [sys.executable, "-m", "peers.gemm"]),
        }
        for name in case.peers:
            self._starts[name] = partial(self._peer, name, cache)
        for on in case.launchers:
            self._starts[on] = partial(self._launched, on)
        self.at_work: dict[str, Participant] = {}

    def _ours(self, name: str, workers: int) -> Participant:
        settings = json.dumps(self.case.settings(self.folder, workers))
        return self._script(name, [sys.executable, "-m", "simulation_by_turns"], also=[settings])

    def _launched(self, on: str) -> Participant:
        """Ours, with two workers started in another way."""
        settings = self.case.settings(self.folder, 2)
        settings["run"]["dir"] += on
        settings["simulate"] |= {"on": on}
        command = LAUNCHED[on] + ["-m", "simulation_by_turns"]
        return self._script(on, command, also=[json.dumps(settings)])

    def _peer(self, name: str, cache: Path) -> Participant:
        return self._script(name, PEERS[name].command(cache))

    def _script(
        self, name: str, command: list[str], beside: int = 1, also: Sequence[str] = ()
    ) -> Participant:
        return Participant([*command, name, str(self.work.path), *also], beside)

    def begin(self, stack: ExitStack) -> None:
        """Start all but ours, which begin anew in each turn, so that their first rounds are known."""
        for name, start in self._starts.items():
            with self._may_fail(name):
                participant = stack.enter_context(closing(start()))
                participant.first_round()
                self.at_work[name] = participant

    def turn(self) -> None:
        for name, workers in ((OURS, 2), (OURS_1, 1)):
            with closing(self._ours(name, workers)) as ours:
                first_s = ours.first_round()
                self._measure(name, ours)
                if name == OURS:
                    self.first_rounds_s.append(first_s)
                    self.told = ours.errors().strip()
        for name, participant in [*self.at_work.items()]:
            with self._may_fail(name):
                self._measure(name, participant)

    def _measure(self, name: str, participant: Participant) -> None:
        participant.turn(self.turn_s / 2)  # to get warm
        self.rates.setdefault(name, []).append(participant.turn(self.turn_s))

    @contextmanager
    def _may_fail(self, name: str) -> Iterator[None]:
        """A peer that fails takes part no longer; the plain loop has to work."""
        try:
            yield
        except Absent as why:
            if name not in PEERS and name not in LAUNCHED:
                raise
            self.absent[name] = str(why)
            self.at_work.pop(name, None)

    def updates_per_s(self, name: str) -> float:
        return float(statistics.median(self.rates[name]) * self.work.sizes.shape[1])

    def ratio(self, name: str, other: str) -> float:
        pairs = zip(self.rates[name], self.rates[other], strict=True)
        return statistics.median(a / b for a, b in pairs)

    def difference(self, name: str) -> float:
        """Between the model of a peer and ours after the first round, as a part of what ours changed."""
        ours, theirs = (np.load(self.folder / f"{each}.npy") for each in (OURS, name))
        before: Array = np.concatenate([np.ravel(w) for w in self.work.weights])
        return float(np.abs(theirs - ours).max() / np.abs(ours - before).max())

    def tell(self) -> None:
        def emit(metric: str, value: float, unit: str = "×") -> None:
            common.emit("simulate", self.case.name, metric, value, unit)

        emit("updates_per_s", self.updates_per_s(OURS), "updates/s")
        emit("updates_per_s_1_worker", self.updates_per_s(OURS_1), "updates/s")
        emit("over_thread", self.ratio(OURS, PLAIN))
        emit("over_plain2", self.ratio(OURS, PLAIN_2))
        of_a_round = flops(self.work) * self.work.sizes.shape[1]
        emit("gemm_fraction", self.ratio(OURS, GEMM) * of_a_round / GEMM_FLOPS, "")
        emit("gemm_flops", statistics.median(self.rates[GEMM]) * GEMM_FLOPS / 1e9, "GFLOP/s")
        emit("speedup_2_over_1", self.ratio(OURS, OURS_1))
        emit("machine_2_over_1", self.ratio(PLAIN_2, PLAIN))
        emit("first_round_s", statistics.median(self.first_rounds_s), "s")
        for name in (PLAIN, *(name for name in self.case.peers if name in self.at_work)):
            emit(f"{name}_updates_per_s", self.updates_per_s(name), "updates/s")
            if name in PEERS:
                emit(f"over_{name}", self.ratio(OURS, name))
            emit(f"difference_{name}", self.difference(name), "")
        for name in self.case.launchers:
            if name in self.at_work:
                emit(f"{name}_over_local", self.ratio(name, OURS))
        if self.told:
            common.say({"case": self.case.name, "told": self.told})
        for name, why in self.absent.items():
            common.say({"case": self.case.name, "absent": name, "reason": why})


def measure(case: Case, cache: Path, repeat: int, turn_s: float) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        table = Table(case, work_of(case, folder), folder, cache, turn_s)
        with ExitStack() as stack:
            try:
                table.begin(stack)
                for _ in range(repeat):
                    table.turn()
            except Absent as why:
                common.say({"case": case.name, "failed": str(why)})
                return
        table.tell()


def main() -> None:
    parser = common.arguments(__doc__.splitlines()[0])
    parser.add_argument(
        "--case", choices=[case.name for case in CASES], action="append", help="may be repeated"
    )
    parser.add_argument("--beside", action="store_true", help="measure other frameworks too")
    parser.add_argument("--peer", choices=PEERS, action="append", help="with --beside: only these")
    parser.add_argument("--engine", help="in place of each case's simulate.engine")
    parser.add_argument("--repeat", type=int, default=5, help="turns of each")
    parser.add_argument("--seconds", type=float, default=1.0, help="of a turn")
    parser.add_argument(
        "--cache", type=Path, default=Path.home() / ".cache" / "fedtrain-benchmarks",
        help="where peers' environments are made and kept",
    )  # fmt: skip
    args = parser.parse_args()
    common.begin(args)
    for case in CASES:
        if args.case and case.name not in args.case:
            continue
        peers = tuple(p for p in case.peers if args.beside and p in (args.peer or PEERS))
        case = replace(case, peers=peers, engine=args.engine or case.engine)
        measure(case, args.cache, args.repeat, args.seconds)


if __name__ == "__main__":
    main()
