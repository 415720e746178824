"""What secure aggregation costs beside training and the network, at a site and at the aggregator.

    python benchmarks/secagg.py [--json] [--rounds 5] [--threads 2] [--case 1Mx10]

Real sites and a real aggregator (secagg/client.py, secagg/server.py) with real certificates, all in this
process; every site has its own random update. Times are medians over rounds after a first one.

site_s                  all five steps at one site: keys, shares, rounding, masks, signatures and their checks
  site_signatures_s     signing and checking signatures, which the bound leaves out; summed over threads
server_s                all else (but counting the bytes), from the first request to the mean of the updates
site_, server_bound_s   what these ciphers take alone, at the best rates seen on as many threads: each byte of
                        mask drawn by the faster keystream and added once, vectors added, keys agreed on
*_over_bound            the one divided by the other
site_check_s            of a case with checksums: what holding the sum against them takes; site_s has the rest
site_over_without       the two together, divided by site_s of the same round without checksums; by turns
upload_bytes_per_param  all that a site sends in a round, headers, keys and shares too
flwr_*_s                Flower's own functions, each timed once and multiplied by how often it is called,
                        where flwr is installed
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import common
import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from fedtrain import pki
from fedtrain.arena import Arena
from fedtrain.malloc import keep_freed
from fedtrain.messages import Reply, Request, Update
from fedtrain.runtime.threads import ThreadPool
from fedtrain.schema import Schema, TensorSpec
from fedtrain.secagg.checksum import Checksums
from fedtrain.secagg.client import Client, Owed
from fedtrain.secagg.encoding import Encoded, Encoding, rounding_seed
from fedtrain.secagg.fixedpoint import FixedPoint
from fedtrain.secagg.masking import (
    BLOCK_BYTES,
    TAG_BYTES,
    ZEROS,
    Parallel,
    counter_mode,
    exhaust,
    galois_mode,
)
from fedtrain.secagg.messages import Advertise, Agree, Mask, Share, Terms, Unmask
from fedtrain.secagg.policy import Policy
from fedtrain.secagg.server import masked_sum
from fedtrain.transport.memory import LocalCohort
from fedtrain.wire import codec

BLOCKS = 50  # of keystream in one trial of its rate
MODEL = hashlib.sha256(b"the weights that all have").digest()
RUN: Any = {"federation": "bench", "run": "secagg"}
METRICS = ("accuracy", "loss")


@dataclass(frozen=True)
class Case:
    name: str
    params: int
    sites: int
    dropout: float  # of the sites, after their shares were dealt: the costliest moment
    finder: bool = False  # neighbours as secagg/graph.py finds them, against 10 % corrupt and 10 % lost
    ring_bits: Literal[16, 32, 64] = 32
    verify: bool = False  # the case is had by turns with and without checksums

    @property
    def policy(self) -> Policy:
        fixed, length = self.encoding.point, self.encoding.length
        return Policy(
            **RUN, ring_bits=self.ring_bits, clip=fixed.clip, max_weight=fixed.max_weight, length=length,
            full_graph=0 if self.finder else self.sites, corrupt=0.1, dropout=0.1, verify=self.verify,
        )  # fmt: skip

    @property
    def encoding(self) -> Encoding:
        schema = Schema((TensorSpec("w", (self.params,), "float32", True),))
        point = FixedPoint(self.sites, self.ring_bits, clip=1.0, max_weight=100.0, unsigned=self.verify)
        return Encoding(point, schema)


CASES = [
    Case("100kx100-full-0", 100_000, 100, 0.0),
    Case("1Mx10-full-30", 1_000_000, 10, 0.3),
    Case("1Mx10-full-30-r16", 1_000_000, 10, 0.3, ring_bits=16),
    Case("1Mx100-full-30", 1_000_000, 100, 0.3),
    Case("1Mx100-finder-10", 1_000_000, 100, 0.1, finder=True),
    Case("10Mx10-full-10", 10_000_000, 10, 0.1),
    Case("1Mx10-full-10-verify", 1_000_000, 10, 0.1, verify=True),
    Case("10Mx10-full-10-verify", 10_000_000, 10, 0.1, verify=True),
]


class Site:
    """A site whose training has ended, and the time that it takes over its replies."""

    def __init__(
        self, name: str, case: Case, parallel: Parallel, verifier: pki.Verifier, folder: Path
    ) -> None:
        signer = pki.Signer.of(pki.Credentials.load(folder / "sites" / name))
        self.client = Client(
            name, case.policy, certificate=signer.certificate, sign=self.timed(signer.sign),
            verify=self.timed(verifier.verify), parallel=parallel, owe=self.owe,
        )  # fmt: skip
        self.case, self.parallel, self.check_s = case, parallel, 0.0
        self.fingerprint = pki.fingerprint(signer.certificate)
        self.values = np.random.default_rng(list(name.encode())).standard_normal(case.params, np.float32)
        self.values *= 0.01
        assert case.encoding.schema is not None
        delta = Arena.wrap(case.encoding.schema, padded(self.values, case.encoding.schema.nbytes))
        self.update = Update(delta=delta, num_examples=50.0, metrics=dict.fromkeys(METRICS, (20.0, 50.0)))
        self.own = Encoded(case.encoding, self.update, rounding_seed("bench", name), parallel=parallel)
        self.spent_s = self.signatures_s = self.counting_s = self.sent_bytes = 0.0

    def owe(self, owed: Owed) -> None:
        self.owed = owed

    def check(self, total: np.ndarray) -> None:
        """As a site does that is shown the sum."""
        began = clock()
        numel = self.case.encoding.numel(self.owed.names)
        checksums = Checksums(self.owed.seed, self.case.encoding.point, self.parallel)
        assert checksums.fits(total[:numel], total[numel:], self.owed.sites)
        self.check_s = clock() - began

    def timed(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def measured(*args: bytes) -> Any:
            began = clock()
            result = work(*args)
            self.signatures_s += clock() - began
            return result

        return measured

    def __call__(self, request: Request) -> Reply:
        began = clock()
        if isinstance(request, Advertise):
            self.spent_s = self.signatures_s = self.counting_s = self.sent_bytes = 0.0
            reply: Reply = self.client.begin(request, MODEL, self.own)
        else:
            assert isinstance(request, Share | Mask | Agree | Unmask), request
            reply = self.client.answer(request)
        done = clock()
        self.spent_s += done - began
        self.sent_bytes += len(codec.encode(reply)) + sum(a.schema.nbytes for a in codec.arenas(reply))
        self.counting_s += clock() - done
        return reply


def padded(values: np.ndarray, nbytes: int) -> bytearray:
    """An arena's bytes; sections end on a multiple of 64."""
    return bytearray(values.tobytes().ljust(nbytes, b"\0"))


clock = time.perf_counter


@dataclass(frozen=True)
class Timing:
    site_s: float  # median over the survivors
    signatures_s: float  # the same
    server_s: float
    upload_bytes: float  # of a survivor
    check_s: float = 0.0  # median over the survivors


def run(case: Case, rounds: int, parallel: Parallel, folder: Path) -> list[Timing]:
    verifier = pki.Verifier((folder / "ca/root.pem").read_bytes(), RUN["federation"])
    names = [f"s{i:03}" for i in range(case.sites)]
    sites = {name: Site(name, case, parallel, verifier, folder) for name in names}
    lost = set(names[: round(case.sites * case.dropout)])
    cohort = LocalCohort(sites, lambda site, request: isinstance(request, Mask) and site in lost)
    there = [sites[name] for name in names if name not in lost]
    expected = sum(site.values.astype(np.float64) for site in there) / len(there)
    quorum, threshold, degree = case.policy.graph(case.sites)
    found = []
    for number in range(rounds + 1):
        terms = Terms(
            **RUN, round=number, attempt=0, nonce=np.random.bytes(16),
            cohort={name: site.fingerprint for name, site in sites.items()}, quorum=quorum,
            threshold=threshold, degree=degree, ring_bits=case.ring_bits,
            value_bits=case.encoding.point.value_bits, clip=case.policy.clip,
            max_weight=case.policy.max_weight, length=case.policy.length, verify=case.verify,
        )  # fmt: skip
        offer = Advertise(
            id=terms.request_id("advertise"), round=number, weights=there[0].update.delta, terms=terms
        )

        async def once(terms: Terms = terms, offer: Advertise = offer) -> tuple[np.ndarray, float]:
            began = clock()
            masked = await masked_sum(
                cohort, terms, MODEL, dict.fromkeys(sorted(terms.cohort), offer), verifier.verify,
                deadline_s=600, step_deadline_s=600, parallel=parallel,
            )  # fmt: skip
            total = await masked.unmask()
            assert total.sites == tuple(name for name in names if name not in lost)
            assert not total.blamed
            vector = total.vector[: terms.numel(total.names)]
            mean = case.encoding.decode(vector, len(total.sites), total.names, parallel)
            spent = clock() - began
            for site in there if case.verify else ():
                site.check(total.vector)
            assert mean.metrics["loss"] == (20.0 * len(there), 50.0 * len(there))
            assert mean.delta is not None
            return mean.delta.views()["w"].numpy(), spent

        mean, whole = asyncio.run(once())
        assert np.abs(mean - expected).max() < 4 * case.encoding.point.step
        found.append(
            Timing(
                statistics.median(site.spent_s for site in there),
                statistics.median(site.signatures_s for site in there),
                whole - sum(site.spent_s + site.counting_s for site in sites.values()),
                statistics.median(site.sent_bytes for site in there),
                statistics.median(site.check_s for site in there),
            )
        )
    return found[1:]


# --- The bound


@dataclass(frozen=True)
class Rates:
    keystream: float  # bytes/s over all threads, by the faster kernel
    add_mask: float  # bytes/s over all threads, of blocks in the cache
    add_vector: (
        float  # bytes/s of a vector in memory added to another, which the aggregator does on one thread
    )
    agree_s: float  # one X25519 agreement, on one thread: Python's lock is held in it

    def site_s(self, case: Case) -> float:
        k, nbytes = neighbours(case), case.params * case.ring_bits // 8
        return (k + 1) * nbytes * self.mask_s + 2 * k * self.agree_s

    def server_s(self, case: Case) -> float:
        nbytes, lost = case.params * case.ring_bits // 8, round(case.sites * case.dropout)
        left = case.sites - lost
        pairs = lost * neighbours(case) * left / (case.sites - 1)  # masks of those who were lost
        return (left + pairs) * nbytes * self.mask_s + left * nbytes / self.add_vector + pairs * self.agree_s

    def best(self, other: Rates) -> Rates:
        return Rates(
            max(self.keystream, other.keystream),
            max(self.add_mask, other.add_mask),
            max(self.add_vector, other.add_vector),
            min(self.agree_s, other.agree_s),
        )

    @property
    def mask_s(self) -> float:
        """A byte of mask, drawn and added."""
        return 1 / self.keystream + 1 / self.add_mask


def neighbours(case: Case) -> int:
    return case.policy.graph(case.sites)[2] or case.sites - 1


def measure(threads: int, parallel: Parallel) -> Rates:
    def streaming(kernel: Callable[[bytes], Callable[..., object]]) -> Callable[[int], None]:
        def work(_: int) -> None:
            stream, out = kernel(bytes(16)), memoryview(bytearray(BLOCK_BYTES + TAG_BYTES))
            for block in range(BLOCKS):
                stream(block.to_bytes(12, "big"), ZEROS, out)

        return work

    def adding(_: int) -> None:
        total, block = np.zeros((2, BLOCK_BYTES // 4), np.uint32)
        for _ in range(BLOCKS):
            np.add(total, block, out=total)

    def all_of(work: Callable[[int], None]) -> None:
        with parallel(work, range(threads)) as mine:
            exhaust(mine)

    stream_s, mask_s = (
        min(fastest(partial(all_of, work)) for work in works)
        for works in ([streaming(counter_mode), streaming(galois_mode)], [adding])
    )
    pair, public = X25519PrivateKey.generate(), X25519PrivateKey.generate().public_key()
    agree_s = fastest(lambda: [pair.exchange(public) for _ in range(100)]) / 100
    total, vector = np.zeros((2, 4_000_000), np.uint32)
    add_s = fastest(lambda: np.add(total, vector, out=total))
    nbytes = threads * BLOCKS * BLOCK_BYTES
    return Rates(nbytes / stream_s, nbytes / mask_s, vector.nbytes / add_s, agree_s)


def fastest(work: Callable[[], object], times: int = 7) -> float:
    found = []
    for _ in range(times):
        began = clock()
        work()
        found.append(clock() - began)
    return min(found)


# --- Flower


def flower(case: Case) -> tuple[float, float] | None:
    """(site_s, server_s) of its functions, each as often as its workflow calls it; None where it isn't."""
    try:
        from flwr.common.secure_aggregation.crypto.shamir import combine_shares, create_shares
        from flwr.common.secure_aggregation.crypto.symmetric_encryption import generate_shared_key
        from flwr.common.secure_aggregation.ndarrays_arithmetic import parameters_addition, parameters_mod
        from flwr.common.secure_aggregation.quantization import quantize
        from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen
        from flwr.supercore.primitives.asymmetric import generate_key_pairs
    except ImportError:
        return None
    k, lost = neighbours(case), round(case.sites * case.dropout)
    left, threshold = case.sites - lost, case.policy.graph(case.sites)[1]
    pairs = lost * k * left / (case.sites - 1)
    values = [np.random.standard_normal(case.params)]
    (secret, _), (_, public) = generate_key_pairs(), generate_key_pairs()
    shares = create_shares(bytes(32), threshold, k + 1)
    wide = [quantize(values, 8.0, 1 << 22)[0].astype(np.int64)]  # as with its masks, which are int64
    mask_s = fastest(lambda: pseudo_rand_gen(bytes(32), 1 << 32, [(case.params,)]), 2)
    add_s = fastest(lambda: parameters_addition(wide, wide), 2)
    agree_s = fastest(lambda: generate_shared_key(secret, public), 5)
    share_s = fastest(lambda: create_shares(bytes(32), threshold, k + 1), 2)
    combine_s = fastest(lambda: combine_shares(shares[:threshold]), 2)
    quantize_s = fastest(lambda: quantize(values, 8.0, 1 << 22), 2)
    mod_s = fastest(lambda: parameters_mod(wide, 1 << 32), 2)
    site_s = quantize_s + (k + 1) * (mask_s + add_s) + mod_s + k * agree_s + 2 * share_s
    server_s = (
        left * add_s + case.sites * combine_s + (left + pairs) * (mask_s + add_s) + pairs * agree_s + mod_s
    )
    return site_s, server_s


def main() -> None:
    global clock
    parser = common.arguments(__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--case", default="", help="only cases with this in their name")
    parser.add_argument("--cpu", action="store_true",
                        help="CPU time of one thread, for a machine that does other things, too")  # fmt: skip
    args = parser.parse_args()
    common.begin(args)
    keep_freed()  # as sites and aggregators do
    if args.cpu:
        clock, args.threads = time.thread_time, 1
    with tempfile.TemporaryDirectory() as name:
        parallel = ThreadPool(args.threads)
        folder = Path(name) / "certs"
        pki.init(folder, RUN["federation"])
        for i in range(max(case.sites for case in CASES)):
            pki.issue(folder, "site", f"s{i:03}")
        rates = measure(args.threads, parallel)
        for case in CASES:
            if args.case in case.name:
                if case.verify:
                    by_turns(case, args.rounds, parallel, folder)
                    continue
                timings = run(case, args.rounds, parallel, folder)
                rates = rates.best(measure(args.threads, parallel))  # a slow minute makes no bound easier
                report(case, timings, rates)
        common.emit("secagg", "machine", "threads", args.threads, "")
        common.emit("secagg", "machine", "keystream", rates.keystream / 1e9, "GB/s")
        common.emit("secagg", "machine", "add_mask", rates.add_mask / 1e9, "GB/s")
        common.emit("secagg", "machine", "add_vector", rates.add_vector / 1e9, "GB/s")
        common.emit("secagg", "machine", "agreement", rates.agree_s * 1e6, "µs")


def by_turns(case: Case, rounds: int, parallel: Parallel, folder: Path) -> None:
    """A round without checksums and one with them, in turns: what they cost a site."""
    plain, checked = list[Timing](), list[Timing]()
    for _ in range(rounds):
        plain += run(replace(case, verify=False), 1, parallel, folder)
        checked += run(case, 1, parallel, folder)
    without = statistics.median(t.site_s for t in plain)
    summed = statistics.median(t.site_s for t in checked)
    check_s = statistics.median(t.check_s for t in checked)
    ratios = [(b.site_s + b.check_s) / a.site_s for a, b in zip(plain, checked, strict=True)]
    common.emit("secagg", case.name, "site_s_without", without, "s")
    common.emit("secagg", case.name, "site_s", summed, "s")
    common.emit("secagg", case.name, "site_check_s", check_s, "s")
    common.emit("secagg", case.name, "site_over_without", statistics.median(ratios), "×")
    upload = statistics.median(t.upload_bytes for t in checked) / case.params
    common.emit("secagg", case.name, "upload_bytes_per_param", upload, "B")


def report(case: Case, timings: list[Timing], rates: Rates) -> None:
    site_s = statistics.median(t.site_s for t in timings)
    server_s = statistics.median(t.server_s for t in timings)
    common.emit("secagg", case.name, "site_s", site_s, "s")
    signatures_s = statistics.median(t.signatures_s for t in timings)
    common.emit("secagg", case.name, "site_signatures_s", signatures_s, "s")
    common.emit("secagg", case.name, "site_bound_s", rates.site_s(case), "s")
    common.emit("secagg", case.name, "site_over_bound", site_s / rates.site_s(case), "×")
    common.emit("secagg", case.name, "server_s", server_s, "s")
    common.emit("secagg", case.name, "server_bound_s", rates.server_s(case), "s")
    common.emit("secagg", case.name, "server_over_bound", server_s / rates.server_s(case), "×")
    upload = statistics.median(t.upload_bytes for t in timings) / case.params
    common.emit("secagg", case.name, "upload_bytes_per_param", upload, "B")
    if peer := flower(case):
        common.emit("secagg", case.name, "flwr_site_s", peer[0], "s")
        common.emit("secagg", case.name, "flwr_server_s", peer[1], "s")


if __name__ == "__main__":
    main()
