"""H1: what an aggregator learns from several sums, and the guard at each site that remembers them."""

import asyncio

import msgspec
import numpy as np
import pytest
import torch

from fedtrain.arena import Arena
from fedtrain.config import Config, SitePolicy
from fedtrain.errors import SecAggError, StoreError, Unfinished
from fedtrain.messages import Evaluation, Update
from fedtrain.questions import Question
from fedtrain.runtime.simulations.simulated_masks import SimulatedKeys
from fedtrain.runtime.sites.cohorts import FILE, RULES, SKETCH, Cohorts, Opened, norm, sketch
from fedtrain.runtime.sites.gate import Gate
from fedtrain.runtime.sites.secure_site import SecureSite
from fedtrain.runtime.sites.statistics import hash_of_tally
from fedtrain.runtime.star.secure_terms import encoding_of, hash_of, policy
from fedtrain.schema import Schema, TensorSpec
from fedtrain.secagg.messages import Advertise, AdvertiseEvaluation, AdvertiseTally, Agree, Mask, Terms
from fedtrain.secagg.server import masked_sum
from fedtrain.store import Ledger
from fedtrain.transport.memory import LocalCohort

NUMEL = 30
DEAD = 7  # a coordinate that is 0 in all data
SCHEMA = Schema((TensorSpec("w", (NUMEL,), "float32", True),))
SITES = "abcdefgh"


class Ward:
    """Sites with data of their own, and an aggregator that asks what it likes over whom it likes.

    A site's update is 10 steps of gradient descent on a least squares problem of its own, on all its data, or
    on batches that each round draws anew.
    """

    def __init__(self, folder):
        self.folder, self.batches, self.keys, self.ledgers = folder, False, SimulatedKeys(), {}
        self.start("r")

    def start(self, run, sections=None, **rules):
        """The sites' processes, again perhaps, for this run, with these rules of their own."""
        self.stop()
        settings = {"secagg": {"max_examples": 100, "verify": False}} | (sections or {})
        self.run, self.config = run, Config.of({"run": {"name": run}} | settings, self.folder)
        self.ledgers = {site: Ledger(self.folder / "runs" / f"{run}@{site}") for site in SITES}
        self.sites = {
            site: SecureSite(
                self.config,
                site,
                SimulatedKeys.FEDERATION,
                self.keys.signer(site),
                self.keys,
                sums=ledger,
                rules=SitePolicy(**rules),
            )
            for site, ledger in self.ledgers.items()
        }
        self.sessions = 0

    def stop(self):
        for ledger in self.ledgers.values():
            ledger.close()

    def update(self, site, number, weights):
        """How far the site moves the weights."""
        draw = np.random.default_rng(ord(site))
        data, target = draw.normal(size=(40, NUMEL)), draw.normal(size=40)
        data[:, DEAD] = 0
        batch = np.random.default_rng([ord(site), number]) if self.batches else None
        w = start = weights.flat(weights.schema.sections[0]).numpy().astype(np.float64)
        for _ in range(10):
            some = batch.choice(40, 30, replace=False) if batch else slice(None)
            w = w - 0.001 * data[some].T @ (data[some] @ w - target[some])
        return w - start

    def result(self, site, request):
        if isinstance(request, AdvertiseEvaluation | AdvertiseTally):
            return Evaluation(metrics={"loss": (float(ord(site)), 10.0)})
        delta = Arena.zeros(SCHEMA)
        delta.views()["w"].copy_(torch.from_numpy(self.update(site, request.round, request.weights)))
        return Update(delta=delta, num_examples=50.0, metrics={"loss": (1.0, 50.0)})

    def sum(self, cohort, number, weights, kind=Advertise, lost="", question=None):
        """One session over these sites, of which some are `lost` before they mask: (mean, U3)."""
        self.sessions += 1
        quorum, threshold, _ = policy(self.config, "").graph(len(cohort))
        schema = SCHEMA if kind is Advertise else None
        encoding = encoding_of(self.config, number, len(cohort), schema)
        terms = Terms(
            federation=SimulatedKeys.FEDERATION, run=self.run, round=number, attempt=self.sessions,
            nonce=self.sessions.to_bytes(16), cohort=self.keys.fingerprints(cohort), quorum=quorum,
            threshold=threshold, value_bits=encoding.point.value_bits, clip=1.0, max_weight=100.0,
            length=encoding.length,
        )  # fmt: skip
        if kind is AdvertiseTally:
            asked = AdvertiseTally(
                id=str(self.sessions), round=number, question=question, min_cell=5, terms=terms
            )
            model = hash_of_tally(asked)
        else:
            asked, model = (
                kind(id=str(self.sessions), round=number, weights=weights, terms=terms),
                hash_of(weights),
            )

        def handler(site):
            def answer(request):
                if isinstance(request, kind):
                    return self.sites[site].offer(request, model, self.result(site, request))
                return self.sites[site].answer(request)

            return answer

        async def session():
            members = LocalCohort(
                {site: handler(site) for site in cohort},
                lambda site, request: site in lost and isinstance(request, Mask),
            )
            masked = await masked_sum(
                members, terms, model, dict.fromkeys(cohort, asked), self.keys.verify,
                deadline_s=60, step_deadline_s=60,
            )  # fmt: skip
            return await masked.unmask()

        found = asyncio.run(session())
        total = encoding.decode(found.vector, len(found.sites), found.names)
        mean = None if total.delta is None else total.delta.views()["w"].double().numpy()
        return mean, "".join(found.sites)

    def stepped(self, weights, mean):
        after = weights.load()
        after.views()["w"].add_(torch.from_numpy(mean))
        return after

    def trained(self, cohort, rounds, weights=None, first=0):
        """The model after some rounds over one cohort."""
        weights = weights or Arena.zeros(SCHEMA)
        for number in range(first, first + rounds):
            weights = self.stepped(weights, self.sum(cohort, number, weights)[0])
        return weights


@pytest.fixture
def ward(tmp_path):
    ward = Ward(tmp_path)
    yield ward
    ward.stop()


def cosine(a, b):
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def shifted(weights, by, at=slice(None)):
    other = weights.load()
    other.views()["w"][at] += by
    return other


REFUSED = "both sums together would tell of {} sites alone"


# --- The attack, and what the guard makes of it


@pytest.mark.parametrize("batches", [False, True], ids=["all data", "batches"])
def test_h1_without_the_guard_two_rounds_of_one_model_are_the_update_of_who_was_left_out(
    ward, monkeypatch, batches
):
    """The attack itself: were it not to work, the tests below would show nothing."""
    monkeypatch.setattr(Cohorts, "check", lambda self, asked: None)
    ward.batches = batches
    weights = ward.trained("abcde", 2)
    whole, rest = ward.sum("abcde", 2, weights)[0], ward.sum("abcd", 3, weights)[0]
    assert cosine(5 * whole - 4 * rest, ward.update("e", 2, weights)) > (0.6 if batches else 0.99)


@pytest.mark.parametrize(
    ("change", "batches"),
    [("none", False), ("none", True), ("by 1e-7", False), ("by 1e-7", True), ("where no data is", False)],
)
def test_h1_a_model_that_a_site_answered_for_is_not_answered_for_without_one_of_the_sites(
    ward, change, batches
):
    """Far away in a coordinate that changes no site's update is near, too."""
    ward.batches = batches
    weights = ward.trained("abcde", 2)
    ward.sum("abcde", 2, weights)
    by, at = {"none": (0, 0), "by 1e-7": (1e-7, slice(None)), "where no data is": (100, DEAD)}[change]
    with pytest.raises(Unfinished, match=REFUSED.format(1)):
        ward.sum("abcd", 3, shifted(weights, by, at))
    ward.sum("abcde", 3, shifted(weights, by, at))  # over the same sites it tells nothing of one


def test_h1_the_site_that_came_is_hidden_as_well_as_the_one_that_left(ward):
    weights = ward.trained("abcd", 2)
    ward.sum("abcd", 2, weights)
    with pytest.raises(Unfinished, match=REFUSED.format(1)):
        ward.sum("abcde", 3, shifted(weights, 1e-7))
    with pytest.raises(Unfinished, match=REFUSED.format(2)):
        ward.sum("abce", 4, shifted(weights, 1e-7))


def test_h1_a_dropout_that_the_aggregator_invents_counts_as_a_smaller_cohort(ward):
    weights = ward.trained("abcde", 2)
    ward.sum("abcde", 2, weights)
    with pytest.raises(Unfinished, match=REFUSED.format(1)):
        ward.sum("abcde", 3, shifted(weights, 1e-7), lost="e")


@pytest.mark.parametrize("run", ["r", "another"])
def test_h1_the_guard_outlives_the_process_and_the_run(ward, run):
    weights = ward.trained("abcde", 3)
    ward.start(run)
    for model in (Arena.zeros(SCHEMA), shifted(Arena.zeros(SCHEMA), 1e-7)):
        with pytest.raises(Unfinished, match=r"model was answered for in round 1 of r over 5 sites"):
            ward.sum("abcd", 5, model)
    ward.sum("abcd", 5, weights)  # which nobody answered for


def test_h1_what_is_opened_is_on_disk_before_a_share_leaves(ward, monkeypatch):
    def full(self, value):
        raise StoreError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(Cohorts, "opens", full)
        with pytest.raises(Unfinished):
            ward.sum("abcde", 0, Arena.zeros(SCHEMA))
    ward.start("r")
    ward.sum("abcd", 1, Arena.zeros(SCHEMA))  # nothing had left
    assert len((ward.folder / "runs/@a" / FILE).read_text().splitlines()) == 2  # the key, and this sum


def test_h1_evaluations_and_statistics_have_the_same_guard(ward):
    weights = ward.trained("abcde", 2)
    ward.sum("abcde", 2, weights, AdvertiseEvaluation)
    for model in (weights, shifted(weights, 1e-7)):
        with pytest.raises(Unfinished, match=REFUSED.format(1)):
            ward.sum("abcd", 3, model, AdvertiseEvaluation)
    question, other = Question(cells=()), Question(cells=(), powers=())
    ward.sum("abcde", 0, None, AdvertiseTally, question=question)
    ward.start("another")
    for asked, number in ((question, 0), (other, 1)):
        with pytest.raises(Unfinished, match=REFUSED.format(1)):
            ward.sum("abcd", number, None, AdvertiseTally, question=asked)


# --- Honest runs go on


def test_a_model_answered_for_over_all_is_summed_again_when_the_first_sum_was_never_opened(ward):
    weights = Arena.zeros(SCHEMA)
    with pytest.raises(Unfinished):
        ward.sum("abcde", 0, weights, lost="de")  # below the quorum
    assert ward.sum("abcde", 0, weights, lost="e")[1] == "abcd"


@pytest.mark.parametrize("batches", [False, True], ids=["all data", "batches"])
def test_dropouts_and_churn_between_honest_rounds_are_nobodys_concern(ward, batches):
    """8 rounds, each over other sites, one of which is lost on the way."""
    ward.batches, draw = batches, np.random.default_rng(5)
    weights, seen = Arena.zeros(SCHEMA), set()
    for number in range(8):
        cohort = "".join(sorted(draw.choice(list(SITES), draw.integers(4, 9), replace=False)))
        mean, sites = ward.sum(cohort, number, weights, lost=cohort[number % len(cohort)])
        weights, seen = ward.stepped(weights, mean), seen | {sites}
    assert len(seen) > 6


def test_a_run_that_has_converged_goes_on_over_the_same_sites_and_changes_by_three_at_a_time(ward):
    """Then one more site's update is what differs, though nobody lies."""
    weights = Arena.zeros(SCHEMA)
    for number in range(60):  # as if of an earlier run
        weights = ward.stepped(weights, np.mean([ward.update(site, number, weights) for site in "abcde"], 0))
    mean, _ = ward.sum("abcde", 60, weights)
    assert np.linalg.norm(mean) < RULES.cohort_near * np.linalg.norm(ward.update("a", 60, weights))
    weights = ward.stepped(weights, mean)
    for cohort in ("abcd", "abcdef"):
        with pytest.raises(Unfinished, match=REFUSED.format(1)):
            ward.sum(cohort, 61, weights)
    weights = ward.stepped(weights, ward.sum("abcde", 61, weights)[0])
    assert ward.sum("abcdefgh", 62, weights)[1] == "abcdefgh"


def test_a_site_whose_policy_says_so_holds_every_model_for_near(ward):
    """Then joiners and leavers are batched, also between honest rounds."""
    ward.start("r", cohort_near=1e9)
    weights = ward.trained("abcde", 2)
    with pytest.raises(Unfinished, match=REFUSED.format(1)):
        ward.sum("abcd", 2, weights)
    assert ward.sum("abcdefgh", 2, weights)[1] == "abcdefgh"
    ward.start("r", cohort_change=0)
    assert ward.sum("abcd", 3, weights)[1] == "abcd"  # its people may switch the guard off


def test_the_rule_that_refuses_a_cohort_is_named_before_the_protocol_goes_on(ward):
    weights, denied = ward.trained("abcde", 1), []
    gate = Gate(denied.append)
    gate.asked["policy.cohort_change"] = ward.sites["a"].tells_too_much
    with pytest.raises(Unfinished):
        ward.sum("abcd", 1, Arena.zeros(SCHEMA))
    for sites, why in ((tuple("abcd"), "(its own policy.cohort_change)"), (tuple("abcde"), "")):
        assert gate.refusal(Agree(id="1", sid=b"", sites=sites)).endswith(why)
    assert [event.rule for event in denied] == ["policy.cohort_change"]
    assert weights.digest != Arena.zeros(SCHEMA).digest


# --- Models of several schemas, noise, and a guard whose files are gone

MINE, OTHERS = bytes([1] * 32), bytes([2] * 32)


def vector(*values):
    return np.resize(np.array(values, np.float64), SKETCH).tobytes()


def opened(model, sites, at, moved, schema=MINE, clip=0.0):
    """A sum over these sites, of a model at this point, which the site moved by so much."""
    return Opened(
        "Advertise", "r", 0, model, tuple(sites), vector(at), vector(moved), schema=schema, clip=clip
    )


def test_d4_models_of_other_schemas_are_never_near(tmp_path):
    """North's noise in one run, of norm 7,700, made the models of another task near."""
    guard = Cohorts(tmp_path)
    guard.opens(opened(b"lesion", "abc", 1.0, 0.1, OTHERS))
    guard.check(opened(b"dp", "abd", 1.0, 1000.0))
    with pytest.raises(SecAggError, match="a near model"):
        guard.check(opened(b"lesion 2", "abd", 1.0, 0.1, OTHERS))


def test_d4_under_a_sites_noise_near_is_a_part_of_the_clip(tmp_path):
    """What the norm is before the noise; an evaluation takes that of the last update of such a model."""
    guard = Cohorts(tmp_path)
    noised = opened(b"one", "abcd", 0.0, 1000.0, clip=1.0)
    guard.opens(noised)
    guard.opens(opened(b"of another task", "abcd", 0.0, 1e6, OTHERS))
    moved = msgspec.structs.replace(opened(b"two", "abc", 0.1, -1000.0, clip=1.0))
    guard.check(moved)  # by 0.8: without the noise this site's step may be that long
    with pytest.raises(SecAggError, match="a near model"):
        guard.check(msgspec.structs.replace(moved, weights=vector(1e-4)))
    for at, near in ((0.1, False), (1e-4, True)):
        guard = Cohorts(tmp_path / str(at))
        guard.opens(noised)
        guard.opens(msgspec.structs.replace(noised, kind="AdvertiseEvaluation", update=b""))
        asked = msgspec.structs.replace(moved, kind="AdvertiseEvaluation", weights=vector(at), update=b"")
        if near:
            with pytest.raises(SecAggError, match="a near model"):
                guard.check(asked)
        else:
            guard.check(asked)


def test_d4_lines_of_earlier_versions_count_for_models_of_any_schema(tmp_path):
    guard = Cohorts(tmp_path)
    guard.opens(opened(b"old", "abc", 1.0, 1.0, schema=b""))
    line = (tmp_path / FILE).read_text().splitlines()[0]
    assert "schema" not in line
    with pytest.raises(SecAggError, match="a near model"):
        guard.check(opened(b"new", "abd", 1.0, 1.0))


def test_d4_a_sites_noise_does_not_keep_it_out_of_another_run(tmp_path, ward):
    """Through the site: noise 50 times the clip, and a run of the same sites but one before it."""
    ward.trained("abcd", 2)
    sections = {
        "privacy": {"noise_multiplier": 50.0, "clip": 1.0},
        "secagg": {"max_examples": 100, "verify": False},
    }
    ward.start("dp", sections)
    noise = np.random.default_rng(3)
    ward.update = lambda site, number, weights: noise.normal(0, 50, NUMEL)
    ward.trained("abce", 2, shifted(Arena.zeros(SCHEMA), 1.0))  # near by the noise's norm, of 274


@pytest.mark.parametrize("how", ["gone", "shorter"])
def test_d5_a_guard_whose_files_are_gone_or_cut_stops_the_site(ward, how):
    """As the ledger of epsilon does: each run's folder says how long the file was."""
    ward.trained("abcde", 2)
    ward.stop()
    for path in (ward.folder / "runs/@a").glob(f"{FILE}*"):
        kept = path.read_bytes().splitlines(keepends=True)[:-1]
        path.unlink()
        if how == "shorter":
            path.write_bytes(b"".join(kept))
    for run in ("r", "another"):
        with pytest.raises(StoreError, match=r"cohorts.jsonl has . lines, and r@a noted 3\. Restore it"):
            ward.start(run)


def test_d5_a_run_of_an_earlier_version_without_a_note_goes_on(ward):
    ward.trained("abcde", 1)
    for note in ward.folder.glob("runs/*/opened"):
        note.unlink()
    ward.start("r")
    ward.trained("abcde", 1, first=1)
    (ward.folder / "runs/r@a/opened").write_bytes(b"no note")
    ward.start("r")  # a note that is damaged is set aside
    assert not (ward.folder / "runs/r@a/opened").exists()


def test_e4_a_site_notices_a_run_that_begins_with_a_site_more_each_round(ward):
    """3, 4, 5 sites in rounds 1, 2, 3: what each newcomer gave is nearly the difference of two sums."""
    lines = []
    ward.ledgers["a"].warn = lines.append
    ward.sites["a"]._cohorts._warn = lines.append
    weights = ward.trained("abc", 1)
    weights = ward.trained("abcd", 1, weights, first=1)
    ward.trained("abcde", 1, weights, first=2)
    (line,) = lines
    assert "round 2 is summed over 4 sites, and the sum before it was over 3" in line
    assert "strategy.min_sites" in line


# --- The parts


def test_a_sketch_tells_distances_to_a_fifth():
    draw = np.random.default_rng(1)

    def sketched(arena):
        return sketch(bytes(16), arena, arena.schema.sections)

    for scale in (1e-6, 1.0, 1e6):
        a = Arena.zeros(
            Schema((TensorSpec("w", (100_003,), "float32", True), TensorSpec("n", (3,), "int64", False)))
        )
        b = a.load()
        a.views()["w"].copy_(torch.from_numpy(scale * draw.normal(size=100_003)))
        b.views()["w"].copy_(a.views()["w"] + torch.from_numpy(1e-3 * scale * draw.normal(size=100_003)))
        apart = float((a.views()["w"].double() - b.views()["w"].double()).norm())
        assert norm(sketched(a), sketched(b)) == pytest.approx(apart, rel=0.3)
        assert norm(sketched(a)) == pytest.approx(float(a.views()["w"].double().norm()), rel=0.3)
    assert sketched(a) != sketch(bytes([1] * 16), a, a.schema.sections)


def test_a_damaged_guard_stops_the_site_and_says_what_to_do(ward):
    ward.sum("abcde", 0, Arena.zeros(SCHEMA))
    for path in (ward.folder / "runs/@a").iterdir():
        path.write_bytes(path.read_bytes().replace(b'"round":0', b'"round":1'))
    with pytest.raises(StoreError, match=r"cohorts\.jsonl.*Restore it from a copy"):
        Cohorts(ward.folder / "runs/@a")


def test_the_very_same_model_is_not_answered_for_over_any_other_sites_however_many_differ(tmp_path):
    """A sum over so many more would hide each of them; but what was answered for stays as it is."""
    guard = Cohorts(tmp_path)
    guard.opens(Opened("Advertise", "r", 0, b"model", tuple("abcdefg")))
    with pytest.raises(SecAggError, match="was answered for in round 1 of r over 7 sites"):
        guard.check(Opened("Advertise", "r", 1, b"model", tuple("abc")))
    guard.check(Opened("Advertise", "r", 1, b"another", tuple("abc")))
    guard.check(Opened("Advertise", "r", 1, b"model", tuple("abcdefg")))


def test_with_a_change_of_0_the_guard_refuses_nothing(tmp_path):
    cohorts = Cohorts(tmp_path, SitePolicy(cohort_change=0))
    asked = Opened("Advertise", "r", 0, b"model", ("a", "b", "c"))
    cohorts.opens(asked)
    cohorts.opens(msgspec.structs.replace(asked, sites=("a", "b")))
    assert [each.cohort[1] for each in Cohorts(tmp_path)._opened] == [("a", "b", "c"), ("a", "b")]
