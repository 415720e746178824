"""Rounds under secure aggregation: the fixed-point mean, whoever drops out, over real connections too."""

import asyncio
import hashlib
import math
from itertools import chain

import pytest
import torch
from msgspec.structs import replace

from fedtrain import compression
from fedtrain.arena import Arena, ArenaFile, Slab
from fedtrain.config import Config
from fedtrain.digest import seed_of
from fedtrain.errors import ConfigError, Diverged, TooFewSites
from fedtrain.events import silent
from fedtrain.messages import Evaluate, Evaluation, Failure, Train, Update
from fedtrain.pki import Credentials, revoke
from fedtrain.pki.identity import Current
from fedtrain.pki.proof import AggregatorCheck
from fedtrain.pki.signing import Verifier, fingerprint
from fedtrain.runtime.journal import Journal
from fedtrain.runtime.simulations import plain_sums
from fedtrain.runtime.simulations.simulated_masks import MaskedCohort, SimulatedMasks
from fedtrain.runtime.sites import secure_site
from fedtrain.runtime.sites.secure_site import secure_site_of
from fedtrain.runtime.sites.site import Site
from fedtrain.runtime.star import federated, secure_rounds, secure_terms
from fedtrain.runtime.star.answers import InTheOpen
from fedtrain.runtime.star.mutual import admit_step
from fedtrain.runtime.star.secure_rounds import Settled
from fedtrain.runtime.threads import ThreadPool
from fedtrain.schema import Schema, TensorSpec
from fedtrain.secagg.messages import Advertise, AdvertiseEvaluation, Agree, Mask, Share, Unmask
from fedtrain.store import Checkpoint, Ledger, RoundPlan, RunStore, Spool
from fedtrain.strategies import beginning, build
from fedtrain.transport.endpoints import RemoteCohort
from fedtrain.transport.grpc import GrpcTransport
from fedtrain.transport.memory import LocalCohort
from fedtrain.transport.site_link import SiteLink

from .federation import certificates, hello, proving, tls

SCHEMA = Schema(
    (
        TensorSpec("w", (300,), "float32", True),
        TensorSpec("mean", (3,), "float32", False),
        TensorSpec("count", (), "int64", False),
    )
)
SITES = ["a", "b", "c", "d"]
STEPS = [Advertise, Share, Mask, Agree, Unmask]


@pytest.mark.parametrize("workers", [1, 3])
def test_a_session_is_bound_to_every_byte_of_the_model_in_a_file_or_in_memory(tmp_path, workers):
    schema = Schema((TensorSpec("w", (300_000,), "float32", True), TensorSpec("n", (5,), "int64", False)))
    model = Arena(schema, torch.randint(0, 256, (schema.nbytes,), dtype=torch.uint8))
    (tmp_path / "weights").write_bytes(model.payload)
    w, n = model.payload[: 300_000 * 4], model.payload[schema.sections[1].offset :][: 5 * 8]
    parts = [*(w[at : at + (1 << 19)] for at in range(0, len(w), 1 << 19)), n]
    expected = hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).digest()
    pool = ThreadPool(workers)
    assert secure_terms.hash_of(model, pool) == expected
    assert secure_terms.hash_of(ArenaFile(schema, tmp_path / "weights"), pool) == expected
    for at in (0, (1 << 19) - 1, 1 << 19, 300_000 * 4 - 1, schema.sections[1].offset + 39):
        other = model.load()
        other.data[at] ^= 1
        assert secure_terms.hash_of(other) != expected


def config(folder, *, sites=SITES, **sections):
    table = {
        "run": {"name": "r", "seed": 3, "rounds": 2},
        "strategy": {"min_sites": 3, "round_deadline": "20s"},
        "evaluate": {"every": 0},
    }
    for name, keys in sections.items():
        table[name] = table.get(name, {}) | keys
    return Config.of(table, folder)


def found(site, number=0, size=0.1):
    """What a site's training gives: its own in every round."""
    arena, seed = Arena.zeros(SCHEMA), 100 * number + ord(site[-1])
    generator = torch.Generator().manual_seed(seed)
    for name, view in arena.views().items():
        if view.is_floating_point():
            view.copy_(size * torch.randn(view.shape, generator=generator))
        else:
            view.fill_(seed)
        assert name in ("w", "mean", "count")
    weight = 10.0 + ord(site[-1]) % 7
    return Update(delta=arena, num_examples=weight, metrics={"loss": (weight * 0.5, weight)})


def trains(site):
    def answer(request):
        if isinstance(request, Evaluate):
            return Evaluation(metrics={"accuracy": (ord(site[-1]) % 5, 10.0)})
        return found(site, request.round)

    return answer


def openly(sites=SITES, loses=lambda site, request: False, **changed):
    return LocalCohort({site: trains(site) for site in sites} | changed, loses)


class Events(list):
    def __call__(self, event):
        self.append((event.kind, event.fields()))

    def of(self, kind):
        return [fields for k, fields in self if k == kind]


def zeros():
    return Arena.zeros(SCHEMA)


def mean_of(answers, sites=SITES, number=0):
    return asyncio.run(answers.train(RoundPlan(number, 0, list(sites)), zeros()))


def fixed(cfg, sites=SITES, cohort=None, number=0):
    return mean_of(plain_sums.FixedPointSums(cfg, cohort or openly(sites), Events()), sites, number)


# --- Masks change nothing


@pytest.mark.parametrize("ring_bits", [16, 32, 64])
def test_under_masks_the_mean_is_the_fixed_point_mean_bit_for_bit(tmp_path, ring_bits):
    cfg = config(tmp_path, secagg={"ring_bits": ring_bits, "max_examples": 100})
    masked = mean_of(SimulatedMasks(cfg, openly(), Events()))
    assert masked.delta.digest == fixed(cfg).delta.digest
    assert masked.metrics == fixed(cfg).metrics == {"loss": 0.5}
    assert len(masked.sites) == 4


@pytest.mark.parametrize("groups", [1, 3])
def test_updates_of_a_simulation_which_lie_in_slabs_have_the_same_sum(tmp_path, groups):
    """One is not finite, and is refused alone; and a slab's updates are in several groups' sums."""
    sites = [f"site-{c}" for c in "abcdefghijklm"]
    keys = {"secagg": {"groups": groups}, "strategy": {"min_sites": 9}}
    keys |= {"aggregation": {"rule": "median"}} if groups > 1 else {}
    updates = {site: found(site, 0) for site in sites}
    updates["site-c"].delta.views()["w"][7] = math.nan
    rows = []
    for some in (sites[:6], sites[6:]):
        slab = Slab(SCHEMA, torch.stack([updates[site].delta.data for site in some]))
        rows += [replace(updates[site], delta=row) for site, row in zip(some, slab.arenas(), strict=True)]
    stacked = dict(zip(sites, rows, strict=True))
    means, events = [], Events()
    for replies in (updates, stacked):
        cohort = LocalCohort({site: lambda request, reply=reply: reply for site, reply in replies.items()})
        means.append(mean_of(plain_sums.FixedPointSums(config(tmp_path, **keys), cohort, events), sites))
    assert len(means[0].sites) == len(means[1].sites) == 12
    assert means[0].delta.digest == means[1].delta.digest
    assert means[0].metrics == means[1].metrics
    assert [e["site"] for e in events.of("update_refused")] == ["site-c"] * 2
    assert len({e["reason"] for e in events.of("update_refused")}) == 1


def test_the_fixed_point_mean_is_the_plain_mean_to_a_step(tmp_path):
    cfg = config(tmp_path, secagg={"max_examples": 20})
    plain = mean_of(InTheOpen(cfg, openly(), Events())).delta.views()
    close = fixed(cfg).delta.views()
    assert torch.allclose(close["w"], plain["w"], atol=1e-7, rtol=0)
    assert torch.allclose(close["mean"], plain["mean"], atol=1e-6, rtol=0)
    assert torch.equal(close["count"], plain["count"])


def test_the_round_rounds_anew_each_time_and_for_each_site(tmp_path):
    cfg = config(tmp_path, secagg={"value_bits": 8})
    same = [Update(delta=found("a").delta, num_examples=5.0) for _ in range(2)]
    cohort = openly(a=lambda r: same[0], b=lambda r: same[1], c=lambda r: same[0], d=lambda r: same[1])
    digests = {fixed(cfg, cohort=cohort, number=n).delta.digest for n in range(3)}
    assert len(digests) == 3


@pytest.mark.parametrize(
    ("groups", "rule", "before"), [(2, "mean", []), (3, "median", []), (4, "median", ["clip:9", "nnm:1"])]
)
def test_groups_are_redrawn_each_round_and_their_means_are_what_a_robust_rule_sees(
    tmp_path, groups, rule, before
):
    sites = [f"site-{c}" for c in "abcdefghijkl"]
    cfg = config(
        tmp_path,
        secagg={"groups": groups, "clip": 100.0},
        strategy={"min_sites": 3 * groups},
        aggregation={"rule": rule, "before": before},
    )
    drawn = [secure_rounds.groups_of(cfg, RoundPlan(number, 0, sites)) for number in range(4)]
    assert all(sorted(chain(*each)) == sites for each in drawn)
    assert len({tuple(map(tuple, each)) for each in drawn}) == 4
    hostile = {"site-a": lambda r: Update(delta=found("a", size=1e4).delta, num_examples=10.0)}
    masked = mean_of(SimulatedMasks(cfg, openly(sites, **hostile), Events()), sites)
    assert masked.delta.digest == fixed(cfg, sites, openly(sites, **hostile)).delta.digest
    if rule == "median":  # the one hostile group is not the median
        assert masked.delta.views()["w"].abs().max() < 1


@pytest.mark.parametrize("compressor", ["randomk:0.25", "lowrank:2", "float16"])
def test_what_is_compressed_linearly_is_summed_compressed(tmp_path, compressor):
    cfg = config(tmp_path, secagg={"max_examples": 20}, compression={"up": compressor})
    mean = fixed(cfg)
    assert mean_of(SimulatedMasks(cfg, openly(), Events())).delta.digest == mean.delta.digest
    squeeze, seed = compression.parse(compressor).shaped([(300,)]), seed_of(3, "compression", 0)
    plain = mean_of(InTheOpen(cfg, openly(), Events())).delta.views()["w"].numpy()
    expected = squeeze.lift(squeeze.project(plain, seed), seed, 300)
    assert torch.allclose(mean.delta.views()["w"], torch.from_numpy(expected), atol=2e-4, rtol=0)


# --- Dropouts


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_a_site_lost_at_any_step_costs_nothing_but_its_update(tmp_path, step):
    cfg, events = config(tmp_path), Events()
    cohort = MaskedLosing(cfg, lambda site, request: site == "d" and isinstance(request, step))
    mean = mean_of(cohort.answers(events))
    inside = SITES if step in (Agree, Unmask) else ["a", "b", "c"]
    expected = fixed(cfg, cohort=openly(loses=lambda site, request: site not in inside))
    assert mean.delta.digest == expected.delta.digest
    assert sorted(mean.sites) == sorted(inside)
    assert {e["site"] for e in events.of("update_received")} == set(inside)


def test_too_few_abort_and_the_next_attempt_trains_nobody_again(tmp_path):
    cfg, events, asked = config(tmp_path, run={"rounds": 1}), Events(), []

    def loses(site, request):
        asked.append((site, type(request).__name__, request.id))
        return site in "cd" and isinstance(request, Mask) and request.id.split("/")[2] == "0"

    answers = MaskedLosing(cfg, loses).answers(events)
    with RunStoreOf(cfg) as store:
        asyncio.run(federated.run(Journal(cfg, store, events), answers, build("fedavg", {})))
        weights = store.latest().weights
    assert [e["attempt"] for e in events.of("round_started")] == [1, 2]
    assert "3 are needed" in events.of("round_failed")[0]["reason"]
    assert torch.equal(weights.views()["w"], fixed(cfg).delta.views()["w"])


def test_too_few_groups_for_the_rule_fail_the_attempt(tmp_path):
    sites = [f"site-{c}" for c in "abcdefghi"]
    keys = {"secagg": {"groups": 3}, "aggregation": {"rule": "median"}, "strategy": {"min_sites": 9}}
    gone = secure_rounds.groups_of(config(tmp_path, **keys), RoundPlan(0, 0, sites))[1][0]
    lossy = openly(sites, loses=lambda site, request: site == gone)
    answers = plain_sums.FixedPointSums(config(tmp_path, **keys), lossy, Events())
    answers._config = config(tmp_path, **keys | {"strategy": {"min_sites": 6}})  # so that groups are too few
    with pytest.raises(TooFewSites, match="groups with a sum, for median: 2 sites replied, 3 are needed"):
        mean_of(answers, sites)


def test_a_sum_that_broke_off_while_it_was_opened_is_had_again_over_the_same_sites(tmp_path):
    """a and b gave shares for a sum over a, b and c; they would refuse one over others."""
    cfg, events = config(tmp_path, run={"rounds": 1}), Events()

    def loses(site, request):
        if request.id.split("/")[2] != "0":
            return False
        return (site == "d" and isinstance(request, Mask)) or (site == "c" and isinstance(request, Unmask))

    with RunStoreOf(cfg) as store:
        answers = MaskedLosing(cfg, loses).answers(events, store)
        asyncio.run(federated.run(Journal(cfg, store, events), answers, build("fedavg", {})))
        weights = store.latest().weights
        assert store.opened(0) == [("a", "b", "c")]
    expected = fixed(cfg, cohort=openly(loses=lambda site, request: site == "d"))
    assert torch.equal(weights.views()["w"], expected.delta.views()["w"])


def test_an_aggregator_that_gave_up_asks_for_the_sum_that_it_began_to_open_when_it_is_started_again(tmp_path):
    """Found by seed 176 of tests.vsim: it asked for all sites then, and those that gave shares refused for
    ever."""
    cfg, events = config(tmp_path, run={"rounds": 1}, strategy={"attempts": 2}), Events()

    def loses(site, request):
        return isinstance(request, {"c": Unmask, "d": Mask}.get(site, ()))

    with RunStoreOf(cfg) as store:
        answers = MaskedLosing(cfg, loses).answers(events, store)
        with pytest.raises(TooFewSites, match="unmask"):
            asyncio.run(federated.run(Journal(cfg, store, events), answers, build("fedavg", {})))
        again = MaskedLosing(cfg, lambda site, request: False).answers(events, store)
        asyncio.run(federated.run(Journal(cfg, store, events), again, build("fedavg", {})))
        weights = store.latest().weights
    expected = fixed(cfg, cohort=openly(loses=lambda site, request: site == "d"))
    assert torch.equal(weights.views()["w"], expected.delta.views()["w"])


@pytest.mark.parametrize("gone", ["", "c"])
def test_an_evaluation_that_began_to_be_opened_is_had_of_the_same_sites_or_of_none(tmp_path, gone):
    """Found by seed 5206 of tests.vsim: other sites were asked when the aggregator was started again, and
    those that had given shares refused for ever."""
    cfg, asked = config(tmp_path, strategy={"attempts": 2}), []

    def breaks(site, request):
        return isinstance(request, {"c": Unmask, "d": Mask}.get(site, ()))

    def refuses(site, request):
        asked.extend([site] if isinstance(request, AdvertiseEvaluation) else [])
        return site == gone

    with RunStoreOf(cfg) as store:
        weights = store.latest().weights
        first = MaskedLosing(cfg, breaks).answers(Events(), store)
        assert asyncio.run(first.evaluate(0, SITES, weights)) == ({}, {})
        assert store.opened(0, evaluation=True) == [("a", "b", "c")]
        assert store.opened(0) == []  # the next round may be over others
        again = MaskedLosing(cfg, refuses).answers(Events(), store)
        metrics, _ = asyncio.run(again.evaluate(0, SITES, weights))
    assert bool(metrics) == (not gone)
    assert {*asked} == {"a", "b", "c"}


def test_another_attempt_at_an_evaluation_under_masks_begins_when_enough_sites_are_there(tmp_path):
    cfg, waited_for = config(tmp_path, strategy={"attempts": 3, "min_sites": 4}), []
    lost = lambda site, request: site == "d" and len(waited_for) < 2

    async def members(at_least):
        waited_for.append(at_least)
        return SITES

    with RunStoreOf(cfg) as store:
        answers = MaskedLosing(cfg, lost).answers(Events(), store)
        answers.cohort.members = members
        metrics, _ = asyncio.run(answers.evaluate(0, SITES, store.latest().weights))
    assert metrics
    assert waited_for == [4, 4]


def test_groups_that_were_summed_stay_when_another_one_is_tried_again(tmp_path):
    sites = [f"site-{c}" for c in "abcdefghi"]
    cfg = config(tmp_path, run={"rounds": 1}, secagg={"groups": 3}, strategy={"min_sites": 9})
    first, events, asked = secure_rounds.groups_of(cfg, RoundPlan(0, 0, sites)), Events(), []
    lost = first[1][0]

    def loses(site, request):
        if isinstance(request, Advertise):
            asked.append(tuple(request.terms.cohort))
        return site == lost and isinstance(request, Mask) and request.id.split("/")[2] == "0"

    answers = MaskedLosing(cfg, loses, sites).answers(events)
    with RunStoreOf(cfg) as store:
        asyncio.run(federated.run(Journal(cfg, store, events), answers, build("fedavg", {})))
    assert [e["attempt"] for e in events.of("round_started")] == [1, 2]
    assert set(asked) == {tuple(group) for group in first}


def test_a_site_insists_on_its_own_least_cohort_whatever_the_aggregator_asks_for(tmp_path):
    """Two sites that are with the aggregator could open a third one's update in a sum of three."""
    events = Events()
    answers = SimulatedMasks(config(tmp_path), openly(), events)
    strict = config(tmp_path, strategy={"min_sites": 4})
    answers.cohort = MaskedCohort(strict, openly(), answers.cohort._keys)
    with pytest.raises(TooFewSites, match="a cohort of 3 sites: this site sums with 4 or more"):
        mean_of(answers, SITES[:3])
    assert (
        secure_terms.policy(config(tmp_path, strategy={"min_sites": 15}, secagg={"groups": 3}), "").min_sites
        == 5
    )


class MaskedLosing:
    """Simulated sites under masks, whose requests are lost as `loses` says."""

    def __init__(self, cfg, loses, sites=SITES):
        self.cfg, self.loses, self.sites = cfg, loses, sites

    def answers(self, events, store=None):
        answers = SimulatedMasks(self.cfg, openly(self.sites), events)
        answers._training, answers._evaluation = (Settled(store, evaluation=it) for it in (False, True))
        inner, loses = answers.cohort, self.loses

        class Losing:
            bytes_in = bytes_out = 0
            members, tell = inner.members, inner.tell

            async def exchange(self, requests, deadline_s):
                kept = {site: r for site, r in requests.items() if not loses(site, r)}
                if kept:
                    async for pair in inner.exchange(kept, deadline_s):
                        yield pair

        answers.cohort = Losing()
        return answers


class RunStoreOf:
    def __init__(self, cfg):
        self.store = RunStore(cfg.run_dir)
        self.store.begin(SCHEMA, cfg.agreed(), task_digest="t")
        strategy = build(cfg.strategy.kind, cfg.strategy.options)
        self.store.commit(Checkpoint(0, *beginning(strategy, zeros())), {})

    def __enter__(self):
        return self.store

    def __exit__(self, *_):
        self.store.close()


# --- What can't be summed


def test_s16_an_update_with_nan_never_leaves_its_site_and_the_round_goes_on(tmp_path):
    bad = found("d")
    bad.delta.views()["w"][7] = math.nan
    cfg, events = config(tmp_path), Events()
    mean = mean_of(SimulatedMasks(cfg, openly(d=lambda r: bad), events))
    assert mean.delta.digest == fixed(cfg, cohort=openly(d=lambda r: bad)).delta.digest
    assert len(mean.sites) == 3
    assert [e["site"] for e in events.of("update_refused")] == ["d"]
    assert "not finite" in events.of("update_refused")[0]["reason"]


def test_a_site_with_more_examples_than_agreed_is_told_what_to_change(tmp_path):
    cfg, events = config(tmp_path, secagg={"max_examples": 15}), Events()
    many = Update(delta=found("d").delta, num_examples=16.0)
    few = {site: lambda r, s=site: Update(delta=found(s).delta, num_examples=5.0) for site in "abc"}
    mean_of(SimulatedMasks(cfg, openly(d=lambda r: many, **few), events))
    (refused,) = events.of("update_refused")
    assert "more examples than secagg.max_examples = 15. Raise it" in refused["reason"]
    assert "16" not in refused["reason"]  # that is known at the site, and nobody else's business


def test_s19_a_delta_over_the_norm_bound_is_shortened_at_the_site(tmp_path):
    cfg = config(tmp_path, limits={"max_norm": 0.5})
    mean = mean_of(SimulatedMasks(cfg, openly(), Events()))
    assert mean.delta.digest == fixed(cfg).delta.digest
    assert float(mean.delta.views()["w"].norm()) <= 0.5


def test_clipped_values_are_counted_without_saying_whose(tmp_path):
    events = Events()
    mean_of(SimulatedMasks(config(tmp_path, secagg={"clip": 1e-4}), openly(), events))
    (notice,) = events.of("notice")
    assert "values were clipped to secagg.clip" in notice["text"]


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"strategy": {"min_sites": 2}}, r"fewer than 3 sites hides nobody.*Raise it to 3"),
        ({"secagg": {"groups": 2}}, r"in each of 2 groups.*Raise it to 6"),
        ({"aggregation": {"rule": "median"}}, r"compares single updates.*secagg\.groups"),
        ({"aggregation": {"before": ["clip:1"]}}, r"before = \['clip:1'\] compares single updates"),
        (
            {"secagg": {"groups": 4}, "strategy": {"min_sites": 12}, "aggregation": {"before": ["nnm:2"]}},
            r"mean after nnm:2 needs 5 updates a round, but 4",
        ),
        ({"aggregation": {"rule": "fltrust", "root": "a"}}, r"fltrust compares each site with a.*secagg"),
        (
            {"secagg": {"groups": 2}, "strategy": {"min_sites": 6}, "aggregation": {"rule": "krum", "f": 1}},
            r"krum",
        ),
        ({"secagg": {"ring_bits": 16, "value_bits": 15}}, "would wrap"),
        ({"compression": {"up": "topk:0.1"}}, r"not linear.*randomk"),
        ({"secagg": {"full_graph": 0, "corrupt": 0.6, "dropout": 0.3}}, "Lower the fractions"),
    ],
)
def test_what_secure_aggregation_cannot_give_is_refused_before_the_first_round(tmp_path, sections, said):
    with pytest.raises(ConfigError, match=said):
        secure_terms.check_config(config(tmp_path, **sections))


def test_the_graph_of_many_sites_is_as_sparse_as_the_fractions_agreed_on_let_it_be(tmp_path):
    def degree(**keys):
        return secure_terms.policy(config(tmp_path, secagg=keys), "ward").graph(100)[2]

    assert degree() == 0  # all mask with all
    assert degree(full_graph=99) == 62  # of the published table: 20 % corrupt, 20 % lost
    assert degree(full_graph=99, corrupt=0.1, dropout=0.1) == 32


def test_a_sum_that_no_model_survives_is_not_committed_and_nobody_can_be_named(tmp_path):
    from fedtrain.runtime.star.federated import federated_round
    from fedtrain.strategies import beginning, build

    cfg = config(tmp_path)
    huge = build("fedavgm", {"server_lr": 1e25})
    start = Checkpoint(0, *beginning(huge, zeros()))
    with pytest.raises(Diverged, match=r"can't be known under masks: lower secagg\.clip") as error:
        asyncio.run(
            federated_round(SimulatedMasks(cfg, openly(), Events()), RoundPlan(0, 0, SITES), huge, start)
        )
    assert error.value.culprits == []


# --- Over real connections


class Blobs:
    """A site's trainer: no process, but files as a process leaves them."""

    def __init__(self, site):
        self.site, self.trained = site, 0

    async def train(self, site, round, weights, out, counted):
        self.trained += 1
        update = found(site, round)
        out.write_bytes(update.delta.payload)
        return Update(delta=update.delta, num_examples=update.num_examples, metrics=update.metrics)

    async def evaluate(self, site, round, weights, counted=-1):
        return trains(site)(Evaluate(id="", round=round, weights=weights))

    async def close(self):
        pass


class Federation:
    """An aggregator and sites over mutual TLS, in this process; `lost(site, request)` ends a site."""

    def __init__(self, folder, cfg, lost=lambda site, request: False):
        self.folder, self.cfg, self.lost = folder, cfg, lost
        self.certs = certificates(folder / "certs", *SITES)
        self.events, self.trainers, self.tasks = Events(), {s: Blobs(s) for s in SITES}, {}
        self.seen, self.configs = {}, {}  # fingerprints; of sites with a file of their own

    async def __aenter__(self):
        root = Credentials.load(self.certs / "aggregator").root

        def identify(pem):
            from fedtrain.pki import identity_of

            name = identity_of(pem).name
            self.seen[name] = fingerprint(pem)
            return name

        self.cohort = RemoteCohort(
            GrpcTransport(tls(self.certs / "aggregator"), 5.0), listen="127.0.0.1:0", identify=identify,
            welcome=lambda site, hello: None,
            admit=lambda site, request, reply: admit_step(request, reply, 10_000),
            inbox=lambda site: Spool(self.folder / "inbox" / site), replies=secure_rounds.REPLIES,
            idle_s=0.2, emit=self.events, prove=proving(self.certs),
        )  # fmt: skip
        await self.cohort.start()
        self.verify = Verifier(root, "fedtrain").verify
        self.answers = self.aggregator()
        for site in SITES:
            self.start(site)
        await asyncio.wait_for(self.cohort.members(len(SITES)), 20)
        return self

    def aggregator(self):
        return secure_rounds.UnderMasks(
            self.cfg, self.cohort, self.events, federation="fedtrain",
            verifier=self, callers=self,
        )  # fmt: skip

    def fingerprints(self, sites):
        return {s: self.seen[s] for s in sites if s in self.seen}

    def start(self, site):
        credentials = Credentials.load(self.certs / "sites" / site)
        ledger = Ledger(self.folder / f"ledger-{site}")
        cfg = self.configs.get(site, self.cfg)
        check = AggregatorCheck(credentials, cfg.root / cfg.network.certs, silent)
        mine = secure_site_of(cfg, site, Current(self.certs / "sites" / site), ledger, check)
        worker = Site(site, SCHEMA, ledger, self.trainers[site], secure=mine)
        link = SiteLink(
            GrpcTransport(tls(self.certs / "sites" / site), 5.0), address=f"127.0.0.1:{self.cohort.port}",
            target="aggregator.fedtrain.fedtrain", inbox=ledger.inbox,
            requests=secure_site.SECURE_REQUESTS | Train, emit=silent, trust=check,
        )  # fmt: skip

        async def answer(request):
            if self.lost(site, request):
                self.tasks[site].cancel()
                await asyncio.sleep(60)
            return await worker.answer(request)

        async def serve():
            try:
                await link.serve(hello(SCHEMA), answer)
            finally:
                ledger.close()

        self.tasks[site] = asyncio.create_task(serve())

    async def restart(self, *sites):
        """As after kill -9, or after the aggregator said that the run is over."""
        for site in sites:
            self.tasks[site].cancel()
        await asyncio.gather(*(self.tasks[site] for site in sites), return_exceptions=True)
        for site in sites:
            self.start(site)
        await self.told("site_joined", len(SITES) + len(sites))

    async def told(self, kind, times):
        async with asyncio.timeout(20):
            while len(self.events.of(kind)) < times:  # noqa: ASYNC110  # no event tells it
                await asyncio.sleep(0.02)

    async def __aexit__(self, *_):
        await self.cohort.stop("over")
        for task in self.tasks.values():
            task.cancel()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_s13_over_mutual_tls_a_site_killed_at_any_step_leaves_the_exact_sum(tmp_path, step):
    cfg = config(tmp_path)

    async def round_with_a_death():
        lost = lambda site, request: site == "d" and isinstance(request, step)
        async with Federation(tmp_path, cfg, lost) as federation:
            mean = await asyncio.wait_for(federation.answers.train(RoundPlan(0, 0, SITES), zeros()), 30)
            return mean, federation.tasks["d"].cancelled()

    mean, died = asyncio.run(round_with_a_death())
    inside = SITES if step in (Agree, Unmask) else ["a", "b", "c"]
    assert died
    assert sorted(mean.sites) == sorted(inside)
    expected = fixed(cfg, cohort=openly(loses=lambda site, request: site not in inside))
    assert mean.delta.digest == expected.delta.digest


def test_below_the_threshold_the_round_aborts_and_is_had_again_without_training(tmp_path):
    cfg, once = config(tmp_path), set()

    def lost(site, request):
        if site in "cd" and isinstance(request, Mask) and site not in once:
            once.add(site)
            return True
        return False

    async def two_attempts():
        async with Federation(tmp_path, cfg, lost) as federation:
            with pytest.raises(TooFewSites, match="3 are needed"):
                await asyncio.wait_for(federation.answers.train(RoundPlan(0, 0, SITES), zeros()), 30)
            for site in "cd":
                federation.start(site)
            await asyncio.wait_for(federation.cohort.members(4), 20)
            mean = await asyncio.wait_for(federation.answers.train(RoundPlan(0, 1, SITES), zeros()), 30)
            return mean, [t.trained for t in federation.trainers.values()]

    mean, trained = asyncio.run(two_attempts())
    assert mean.delta.digest == fixed(cfg).delta.digest
    assert trained == [1, 1, 1, 1]


@pytest.mark.parametrize("restarted", [[], SITES], ids=["sites that stay", "sites that were restarted"])
def test_s14_an_update_that_was_summed_is_in_no_sum_without_one_of_the_sites(tmp_path, restarted):
    """The difference of the two sums would be d's update, to the bit."""

    async def two_sums():
        async with Federation(tmp_path, config(tmp_path)) as federation:
            await asyncio.wait_for(federation.answers.train(RoundPlan(0, 0, SITES), zeros()), 30)
            await federation.restart(*restarted)
            before = len(federation.events)
            answers = federation.aggregator()  # that forgets, or seems to
            with pytest.raises(TooFewSites, match="one over others would give away what differs"):
                await asyncio.wait_for(answers.train(RoundPlan(0, 1, SITES[:3]), zeros()), 30)
            del federation.events[:before]
            again = federation.aggregator()
            return await asyncio.wait_for(again.train(RoundPlan(0, 2, SITES), zeros()), 30)

    assert asyncio.run(two_sums()).delta.digest == fixed(config(tmp_path)).delta.digest


def test_s06_sites_do_not_sum_with_a_revoked_one_whatever_the_aggregator_says(tmp_path):
    async def with_revoked():
        async with Federation(tmp_path, config(tmp_path)) as federation:
            await asyncio.wait_for(federation.answers.train(RoundPlan(0, 0, SITES), zeros()), 30)
            revoke(federation.certs, ["d"])
            federation.configs["d"] = config(tmp_path, network={"certs": "nowhere"})  # it looks at no list
            await federation.restart("d")
            after = found("a").delta  # any other model than the one before
            with pytest.raises(TooFewSites, match=r"a refuses: .*d.*: its certificate [0-9A-F]+ was revoked"):
                await asyncio.wait_for(federation.answers.train(RoundPlan(1, 0, SITES), after), 30)
            mean = await asyncio.wait_for(federation.answers.train(RoundPlan(1, 1, SITES[:3]), after), 30)
            return len(mean.sites)

    assert asyncio.run(with_revoked()) == 3


@pytest.mark.parametrize("comes", [True, False])
def test_a_restarted_aggregator_waits_for_a_planned_site_and_goes_on_without_it(tmp_path, comes):
    """It knows whom it had asked, and not yet with which certificate they come."""

    async def resumed():
        cfg = config(tmp_path, network={"idle": "20s" if comes else "0.3s"})
        async with Federation(tmp_path, cfg) as federation:
            federation.tasks["d"].cancel()
            await federation.told("site_lost", 1)
            del federation.seen["d"]
            training = asyncio.create_task(federation.answers.train(RoundPlan(0, 0, SITES), zeros()))
            await asyncio.sleep(0)
            if comes:
                federation.start("d")
            return await asyncio.wait_for(training, 30)

    assert len(asyncio.run(resumed()).sites) == (4 if comes else 3)


def test_evaluations_come_as_sums_too(tmp_path):
    async def evaluated():
        async with Federation(tmp_path, config(tmp_path)) as federation:
            return await asyncio.wait_for(federation.answers.evaluate(1, SITES, zeros()), 30)

    metrics, by_site = asyncio.run(evaluated())
    assert metrics == {"accuracy": (sum(ord(s) % 5 for s in SITES), 40)}
    assert by_site == {}


def test_s12_a_site_in_secure_mode_gives_its_update_to_nobody_who_asks_for_it_plainly(tmp_path):
    async def ask():
        async with Federation(tmp_path, config(tmp_path)) as federation:
            request = Train(id="r/0/0/train", round=0, weights=zeros())
            replies = federation.cohort.exchange(dict.fromkeys(SITES, request), 10)
            return [reply async for _, reply in replies], [t.trained for t in federation.trainers.values()]

    replies, trained = asyncio.run(ask())
    assert len(replies) == 4
    assert all(isinstance(r, Failure) and "secure sums only" in r.reason for r in replies)
    assert trained == [0, 0, 0, 0]


# --- What it will cost


def test_the_plan_says_what_a_round_moves_and_what_masks_cost(tmp_path):
    from fedtrain.runtime.plan import round_plan

    (tmp_path / "plan_task.py").write_text(
        "import torch, fedtrain\n\nclass Task(fedtrain.Task):\n"
        "    def model(self):\n        return torch.nn.Linear(1000, 100)\n"
        "    def data(self, site):\n        raise NotImplementedError\n"
        "    def loss(self, model, batch):\n        raise NotImplementedError\n"
    )
    run = {"task": "plan_task:Task"}
    plan = round_plan(config(tmp_path, run=run), sites=10)
    assert plan.down_bytes == pytest.approx(4 * 100_100, abs=64)
    assert plan.up_bytes == pytest.approx(4 * 100_100, rel=0.01)
    assert plan.aggregator_bytes == 10 * (plan.down_bytes + plan.up_bytes)
    assert (plan.masks.neighbours, plan.masks.may_drop) == (9, 3)
    assert 0 < plan.masks.aggregator_s < plan.masks.aggregator_worst_s
    half = round_plan(config(tmp_path, run=run, secagg={"ring_bits": 16}), sites=10)
    assert half.up_bytes == pytest.approx(2 * 100_100, rel=0.01)
    assert round_plan(config(tmp_path, run=run, secagg={"enabled": False}), sites=10).masks is None
