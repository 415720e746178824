"""S22, S23, S25, S29, S39: a site's own policy decides whom it sums with and what it answers, whatever the
aggregator, or the holder of the issuing key, asks."""

import asyncio
import os
import py_compile
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from fedtrain.arena import Arena, ArenaFile
from fedtrain.config import Config, SitePolicy, keep_policy, policy_from
from fedtrain.config.policy import changed
from fedtrain.errors import CertificateError, ConfigError, Damaged, RoundError
from fedtrain.messages import Evaluate, Evaluation, Failure, Train, Update
from fedtrain.pki import Credentials, Signer, Verifier, fingerprint, issue
from fedtrain.runtime.peers.gossip_setup import check_policy as check_peers_policy
from fedtrain.runtime.simulations.simulated_masks import SimulatedKeys
from fedtrain.runtime.sites import site as sites
from fedtrain.runtime.sites.approval import Approvals, approve
from fedtrain.runtime.sites.gate import Gate, check_policy, gate_of, hold
from fedtrain.runtime.sites.pins import Pins, pins_of
from fedtrain.runtime.sites.secure_site import SecureSite
from fedtrain.runtime.sites.site import Site
from fedtrain.runtime.star.secure_terms import encoding_of, hash_of, policy
from fedtrain.runtime.trainers.trainer import TrainerDied
from fedtrain.schema import Schema, TensorSpec
from fedtrain.secagg.messages import Advertise, Terms
from fedtrain.secagg.server import masked_sum
from fedtrain.store import Ledger
from fedtrain.transport.memory import LocalCohort
from fedtrain.wire.frames import Bounds
from tests.federation import aggregator, certificates, hello, link, random_arena
from tests.inprocess import Events

SCHEMA = Schema((TensorSpec("w", (64,), "float32", True),))
KEYS = SimulatedKeys()


def key_of(site):
    return KEYS.fingerprints([site])[site].hex()


class Patients:
    """A trainer without a process, whose update is this site's secret."""

    def __init__(self, ledger, secret):
        self._ledger, self._secret, self.trained = ledger, secret, 0

    async def train(self, site, round, weights, out, counted):
        self.trained += 1
        delta = Arena.zeros(SCHEMA)
        delta.flat(SCHEMA.sections[0]).copy_(self._secret)
        out.write_bytes(delta.payload)
        return Update(delta=ArenaFile(SCHEMA, out, delta.digest), num_examples=5.0)

    async def close(self):
        pass


def config_of(folder):
    return Config.of({"run": {"name": "r"}, "secagg": {"max_examples": 10, "verify": False}}, folder)


def secure_site(config, site):
    return SecureSite(config, site, KEYS.FEDERATION, KEYS.signer(site), KEYS)


def advertise(config, cohort):
    quorum, threshold, _ = policy(config, KEYS.FEDERATION).graph(len(cohort))
    encoding = encoding_of(config, 0, len(cohort), SCHEMA)
    terms = Terms(
        federation=KEYS.FEDERATION, run="r", round=0, attempt=0, nonce=bytes(16),
        cohort=KEYS.fingerprints(cohort), quorum=quorum, threshold=threshold,
        value_bits=encoding.point.value_bits, clip=1.0, max_weight=10.0, length=encoding.length,
    )  # fmt: skip
    model = Arena.zeros(SCHEMA)
    return Advertise(id="a", round=0, weights=model, terms=terms), hash_of(model)


def opened(folder, own, cohort=("victim", "x", "y")):
    """What a sum over a victim and sites that the holder of the issuing key invented tells of the victim:
    (the sum minus the invented updates, the victim's secret update, the victim's trainer)."""
    config, ledger = config_of(folder), Ledger(folder / "ledger")
    secret = torch.rand(64, generator=torch.Generator().manual_seed(3)) - 0.5
    trainer = Patients(ledger, secret)
    gate = Gate()
    if own is not None:
        hold(gate, own, "victim")
    victim = Site("victim", SCHEMA, ledger, trainer, secure=secure_site(config, "victim"), gate=gate)
    asked, model = advertise(config, cohort)
    fetched = Path(ledger.inbox.file(asked.weights.digest))
    fetched.write_bytes(asked.weights.payload)
    at_the_site = replace(asked, weights=ArenaFile(SCHEMA, fetched, asked.weights.digest))
    nothing = Update(delta=Arena.zeros(SCHEMA), num_examples=1.0)

    def invented(site):
        mine = secure_site(config, site)
        return lambda r: mine.offer(r, model, nothing) if isinstance(r, Advertise) else mine.answer(r)

    async def to_the_victim(request):
        return await victim.answer(at_the_site if isinstance(request, Advertise) else request)

    async def run():
        others = {site: invented(site) for site in cohort if site != "victim"}
        masked = await masked_sum(
            LocalCohort({"victim": to_the_victim, **others}), asked.terms, model,
            dict.fromkeys(sorted(cohort), asked), KEYS.verify, deadline_s=60, step_deadline_s=60,
        )  # fmt: skip
        return await masked.unmask()

    try:
        found = asyncio.run(run())
    finally:
        ledger.close()
    unit = asked.terms.fixed_point
    values = found.vector[:64].astype("int32") / unit.q_max * unit.clip * 10.0 / 5.0
    return torch.tensor(values), secret, trainer


PINNED = SitePolicy(members={site: key_of(site) for site in "bc"})


def test_c1_without_a_policy_two_invented_sites_open_the_update_of_the_third(tmp_path):
    """The attack, so that the test below is known to hold off a real one."""
    found, secret, _ = opened(tmp_path, None)
    assert torch.allclose(found.float(), secret, atol=1e-6)


def test_c1_a_site_sums_with_the_sites_that_it_pinned_and_no_invented_one(tmp_path):
    with pytest.raises(
        RoundError, match=r"has not pinned x, y .*policy\.pin_members.*policy pin x=\w{64} y="
    ):
        opened(tmp_path, PINNED)


def test_c1_an_invented_site_with_a_pinned_name_has_another_key(tmp_path):
    """Whoever holds the issuing key can make a certificate for b, but not with b's key."""
    pinned = SitePolicy(members={"b": "0" * 64, "c": key_of("c")})
    with pytest.raises(RoundError, match="has not pinned b with the keys"):
        opened(tmp_path, pinned, ("b", "c", "victim"))
    found, secret, _ = opened(tmp_path / "2", PINNED, ("b", "c", "victim"))
    assert torch.allclose(found.float(), secret, atol=1e-6), "these three know each other"


# --- S22: approvals


TASK = """import fedtrain, helper
open("ran", "w").close()
class Toy(fedtrain.Task):
    pass  # nothing
"""


@pytest.fixture
def project(tmp_path):
    """A site's project, with the key and certificate of the site north."""
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "helper.py").write_text("x = 1\n")
    (tmp_path / "requirements.txt").write_text("torch==2.13.0\n")
    certificates(tmp_path / "certs", "north")
    return Config.of({"run": {"task": "task:Toy"}, "network": {"certs": "certs"}}, tmp_path)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("task.py", TASK.replace("nothing", "nothing at all")),
        ("helper.py", "x = 2\n"),
        ("requirements.txt", "torch==2.13.1\n"),
        ("pyproject.toml", "[project]\n"),
    ],
)
def test_s22_a_task_runs_after_its_approval_and_one_changed_byte_needs_another(project, file, text):
    """A comment too, which the digest that both ends compare does not count."""
    approvals = Approvals(project.root / "certs/sites/north")
    with pytest.raises(ConfigError, match=r"task:Toy is not approved.*fedtrain task approve north"):
        approvals.check(project)
    first = approve(project)[0]
    assert Approvals(approvals.folder).check(project) == first
    (project.root / file).write_text(text)
    with pytest.raises(ConfigError, match=f"{file} changed since task:Toy was approved"):
        Approvals(approvals.folder).check(project)
    assert approve(project)[0].digest != first.digest
    Approvals(approvals.folder).check(project)
    assert not (project.root / "ran").exists(), "approving runs nothing"


def test_s22_other_arguments_of_a_task_are_another_task(project):
    approve(project)
    other = Config.of({"run": {"task": "task:Toy(3)"}}, project.root)
    with pytest.raises(ConfigError, match="not approved"):
        Approvals(project.root / "certs/sites/north").check(other)


def test_s22_a_withdrawn_approval_counts_no_more_and_a_changed_line_is_found(project):
    approval, (folder,) = approve(project)
    Approvals(folder).withdraw(approval.digest[:8])
    with pytest.raises(ConfigError, match="not approved"):
        Approvals(folder).check(project)
    for name in ("approvals.jsonl", "approvals.jsonl.copy"):
        lines = (folder / name).read_bytes().splitlines(keepends=True)
        (folder / name).write_bytes(lines[0] + lines[1].replace(b"false", b"true"))
    with pytest.raises(Damaged, match="not sealed"):
        Approvals(folder)


def test_s22_no_line_of_an_unapproved_task_runs_at_a_site_also_when_its_trainer_starts_again(project):
    started = []

    async def trainer(scratch):
        started.append(scratch)
        (project.root / "task.py").write_text("raise SystemExit")  # by somebody, while it loads
        raise TrainerDied("it died")

    approve(project)
    with pytest.raises(TrainerDied):
        asyncio.run(sites.run(project, "north", emit=Events(), start_trainer=trainer))
    with pytest.raises(ConfigError, match=r"task.py changed since"):
        asyncio.run(sites.run(project, "north", emit=Events(), start_trainer=trainer))
    assert len(started) == 1
    assert not (project.root / "ran").exists()


def test_s22_a_compiled_file_beside_an_approved_source_is_not_run(tmp_path):
    """Python believes a .pyc that says that it needs no check against its source."""
    (tmp_path / "task.py").write_text("found = 'source'\n")
    (tmp_path / "evil.py").write_text("found = 'compiled'\n")
    cached = tmp_path / "__pycache__" / f"task.{sys.implementation.cache_tag}.pyc"
    py_compile.compile(
        str(tmp_path / "evil.py"), str(cached),
        invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
    )  # fmt: skip
    load = "import sys; sys.path.insert(0, '.'); {}; print(task.found)"
    ours = "from pathlib import Path; from fedtrain.config.project import load, sources; "
    ours += "task = load('task', sources('task:Toy', Path('.')))"
    for before, found in (("import task", "compiled"), (ours, "source")):
        done = subprocess.run(
            [sys.executable, "-c", load.format(before)], cwd=tmp_path, capture_output=True, text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, check=True,
        )  # fmt: skip
        assert done.stdout.strip() == found


# --- S23, S29: the policy's file


def test_s23_a_site_without_a_policy_takes_part_in_nothing_and_says_what_makes_one(project):
    with pytest.raises(ConfigError, match=r"policy.toml does not exist.*fedtrain task approve north"):
        asyncio.run(sites.run(project, "north", emit=Events()))


@pytest.mark.parametrize("open_to_others", ["policy.toml", "."])
def test_s29_a_policy_that_others_may_write_is_refused(project, open_to_others):
    """Nobody but the site's people approves: no message does, and a policy counts only where others can't
    write."""
    folder = approve(project)[1][0]
    assert (folder / "policy.toml").stat().st_mode & 0o077 == 0
    (folder / open_to_others).chmod(0o770)
    with pytest.raises(ConfigError, match="can be written by others"):
        asyncio.run(sites.run(project, "north", emit=Events()))


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("min_cohort = 2", r"policy.min_cohort: 2 must be 3 or more"),
        ("min_cohrt = 5", r"policy.min_cohrt: unknown key. Did you mean policy.min_cohort"),
        ("session = '-1s'", "policy.session"),
        ("[members]\nb = 'ab'", "policy.members.b: 'ab' must be 64 hex digits"),
        ("rounds = ", "policy.toml"),
    ],
)
def test_s23_a_mistake_in_a_policy_is_told_and_nothing_runs(project, line, why):
    folder = approve(project)[1][0]
    (folder / "policy.toml").write_text(line)
    with pytest.raises(ConfigError, match=why):
        policy_from(folder)


def test_s23_a_site_whose_settings_its_policy_denies_does_not_start(project):
    """The policy wins over fedtrain.toml, before a line of the task has run."""
    approve(project)
    alone = Config.of(project.table() | {"secagg": {"enabled": False}}, project.root)
    with pytest.raises(ConfigError, match=r"policy.secure_sums: .*secagg.enabled = false"):
        asyncio.run(sites.run(alone, "north", emit=Events()))
    assert not (project.root / "ran").exists()


def test_a_policy_is_read_as_it_was_written(project):
    folder = approve(project)[1][0]
    own = changed(policy_from(folder), {"metrics": ["lo*"], "session": "2h", "rounds": 7, "min_cohort": 5})
    keep_policy(folder, own)
    assert policy_from(folder) == own
    assert own.members == {"north": fingerprint((folder / "cert.pem").read_bytes()).hex()}


# --- S25, S26: what is asked, and what leaves


@pytest.fixture
def held(tmp_path):
    """Starts the site again, with this policy: its gate, and the events of its log."""
    ledgers = []

    def start(masks=True, **rules):
        while ledgers:
            ledgers.pop().close()
        ledgers.append(Ledger(tmp_path / "held"))
        events, bounds = Events(), Bounds(trainings=9, rounds=9, every=1)
        own = SitePolicy(**rules)
        return gate_of(events, bounds, own, "victim", None, ledgers[0], masks=masks), events

    yield start
    for ledger in ledgers:
        ledger.close()


def test_s25_a_site_gives_nothing_alone_nor_in_a_smaller_cohort_than_its_policy_says(tmp_path, held):
    gate, events = held(min_cohort=4, members={site: key_of(site) for site in "bc"})
    alone = Train(id="t", round=0, weights=Arena.zeros(SCHEMA))
    assert "(its own policy.secure_sums)" in gate.refusal(alone)
    assert "policy.secure_sums" in gate.refusal(Evaluate(id="e", round=1, weights=Arena.zeros(SCHEMA)))
    asked, _ = advertise(config_of(tmp_path), ("b", "c", "victim"))
    assert gate.refusal(asked) == (
        "its cohort would have 3 sites, and 4 are the fewest here (its own policy.min_cohort)"
    )
    rules = [each["rule"] for each in events.of("denied")]
    assert rules == ["policy.secure_sums", "policy.secure_sums", "policy.min_cohort"]
    assert not held(secure_sums=False)[0].refusal(alone)
    with pytest.raises(ConfigError, match=r"policy.secure_sums: .*secagg.enabled = false"):
        check_policy(Config.of({"secagg": {"enabled": False}}), SitePolicy())


def test_s25_no_dropout_makes_a_sum_smaller_than_the_policy_allows(tmp_path):
    """Four are asked, as the policy wants; the aggregator then says that one is gone."""
    config = config_of(tmp_path)
    asked, model = advertise(config, ("b", "c", "d", "victim"))
    mine = SecureSite(
        config, "victim", KEYS.FEDERATION, KEYS.signer("victim"), KEYS, rules=SitePolicy(min_cohort=4)
    )
    nothing = Update(delta=Arena.zeros(SCHEMA), num_examples=1.0)
    refused = mine.offer(asked, model, nothing)
    assert "quorum = 3 of 4 sites is asked for: 4 is the least here" in refused.reason


def test_a_sites_log_names_its_cohort_with_its_keys(tmp_path, held):
    gate, events = held(members={site: key_of(site) for site in "bc"})
    assert gate.refusal(advertise(config_of(tmp_path), ("b", "c", "victim"))[0]) == ""
    (told,) = events.of("cohort")
    assert told == {"round": 1, "what": "train", "cohort": {s: key_of(s) for s in ("b", "c", "victim")}}


@pytest.mark.parametrize("least", [1, 20])
def test_s25_an_evaluation_of_no_examples_leaves_in_the_open_alone_and_a_sum_without_a_count_never(
    tmp_path, least
):
    """It gives nothing away; but a masked sum over three, one of them known for nothing, is one over two."""
    nothing, odd = {"loss": (0.0, 0.0), "counts": ([0.0, 0.0], 0.0)}, {"loss": (0.5, 0.0)}
    asked = Evaluate(id="e", round=1, weights=Arena.zeros(SCHEMA))
    own, bounds = SitePolicy(min_examples=least), Bounds(trainings=1, rounds=1, every=1)
    for masks in (True, False):
        ledger = Ledger(tmp_path / str(masks))
        gate = gate_of(Events(), bounds, own, "a", None, ledger, masks=masks)
        why = gate.withheld(asked, Evaluation(metrics=nothing))
        assert ("nothing to evaluate on" in why) if masks else why == "", why
        assert "policy.min_examples" in gate.withheld(asked, Evaluation(metrics=odd))
        ledger.close()


@pytest.mark.parametrize(
    ("rules", "metrics", "why"),
    [
        ({"metrics": ("loss", "acc*")}, {"loss": (1.0, 9.0), "accuracy": (1.0, 9.0)}, ""),
        (
            {"metrics": ("loss",)},
            {"loss": (1.0, 9.0), "names": (1.0, 9.0)},
            "names, and loss may leave",
        ),
        ({"metrics": ()}, {"loss": (1.0, 9.0)}, "and none may leave (its own policy.metrics)"),
        ({"min_examples": 10}, {"loss": (1.0, 9.0)}, "fewer of its examples stand behind"),
        ({"min_examples": 9}, {"loss": (1.0, 9.0)}, ""),
    ],
)
def test_s26_only_results_of_enough_examples_and_with_allowed_metrics_leave(held, rules, metrics, why):
    gate, _ = held(**rules)
    asked = Evaluate(id="e", round=1, weights=Arena.zeros(SCHEMA))
    trained = Update(delta=Arena.zeros(SCHEMA), num_examples=9.0, metrics=metrics)
    for result in (Evaluation(metrics=metrics), trained):
        found = gate.withheld(asked, result)
        assert why in found
        assert bool(found) == bool(why)


def test_s26_no_more_bytes_leave_in_a_round_than_the_policy_allows(held):
    gate, _ = held(bytes_out=700)
    reply = Update(delta=Arena.zeros(SCHEMA), num_examples=9.0)  # of 256 bytes, and a header

    def sends(round):
        return gate.withheld(Train(id="t", round=round, weights=reply.delta), reply, leaving=True)

    assert sends(0) == ""
    assert "(its own policy.bytes_out)" in sends(0)
    assert sends(1) == ""
    assert "policy.bytes_out" in sends(0), "another round in between changes nothing"


@pytest.mark.parametrize("masks", [True, False])
def test_h2_a_site_evaluates_one_model_a_round_which_is_the_one_it_trains_from(held, masks):
    """Else an aggregator learns how any model does on the site's data, as often as it likes."""
    gate, _ = held(masks=masks)
    train = Train(id="t", round=1, weights=Arena.zeros(SCHEMA))
    first = Evaluate(id="e", round=1, weights=Arena.zeros(SCHEMA))
    assert gate.unfit(first, "committed") == ""
    assert "another model" in gate.unfit(first, "chosen")
    assert ("another model" in gate.unfit(train, "chosen")) == masks
    assert gate.unfit(train, "committed") == gate.unfit(first, "committed") == ""
    again, _ = held(masks=masks)
    assert "another model" in again.unfit(first, "chosen"), "also after a restart"


# --- S39


def test_s39_a_session_ends_with_its_life_and_is_made_anew_while_the_work_goes_on(tmp_path):
    certs, weights = certificates(tmp_path / "certs", "a"), random_arena(64, 1)
    lost = Events()

    async def run():
        async with aggregator(certs, tmp_path, weights.schema) as star:
            site = link(certs, "a", star.cohort.port, tmp_path, emit=lost, session_s=0.2, jitter=lambda: 0.0)
            serving = asyncio.create_task(site.serve(hello(weights.schema), slow))
            async with asyncio.timeout(60):
                while len(star.of("site_joined")) < 3:  # noqa: ASYNC110  # no event tells it
                    await asyncio.sleep(0.01)
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)

    async def slow(request):
        return Failure(reason="asked nothing")

    asyncio.run(run())
    assert any("policy.session" in each["reason"] for each in lost.of("site_lost"))


# --- Peers


def test_c1_a_peer_that_is_not_pinned_is_nobody_to_a_verifier_that_pins(tmp_path):
    """Of rosters, masks' keys and secure sums alike."""
    certs = certificates(tmp_path, "a", "b")
    a, b = (Credentials.load(certs / "sites" / name) for name in "ab")
    pins = SitePolicy(members={"b": fingerprint(b.chain).hex()}).pinned("a", fingerprint(a.chain))
    verifier = Verifier(a.root, "fedtrain", pinned=pins)
    signer = Signer.of(b)
    assert verifier.verify(signer.certificate, b"x", signer.sign(b"x"))[0] == "b"
    shutil.rmtree(certs / "sites" / "b")
    invented = Signer.of(Credentials.load(issue(certs, "site", "b")))  # by whoever has the issuing key
    with pytest.raises(CertificateError, match=r"b is not pinned here with its key \(policy.pin_members\)"):
        verifier.verify(invented.certificate, b"x", invented.sign(b"x"))


def test_c1_pins_are_those_of_the_file_at_any_time_and_a_file_that_no_start_would_take_changes_none(tmp_path):
    certs, told = certificates(tmp_path, "a", "b"), Events()
    folder, credentials = certs / "sites" / "a", Credentials.load(certs / "sites" / "a")
    keep_policy(folder, SitePolicy())
    pins = pins_of(folder, SitePolicy(), credentials, told)
    own = {"a": fingerprint(credentials.chain).hex()}
    gate = Gate()
    hold(gate, SitePolicy(), "a", pins=pins)
    cohort = dict.fromkeys("abc", bytes(32)) | {"b": bytes.fromhex("cd" * 32)}
    asked, _ = advertise(config_of(tmp_path), "abc")
    asked = replace(asked, terms=replace(asked.terms, cohort=cohort))
    assert dict(pins) == own
    assert "has not pinned b, c" in gate.refusal(asked)
    keep_policy(folder, SitePolicy(members={"b": "cd" * 32}, pin_members=False))
    assert dict(pins) == own | {"b": "cd" * 32}  # the rule itself is that of the start
    assert "has not pinned c" in gate.refusal(asked)
    keep_policy(folder, SitePolicy(members={"b": "cd" * 32, "c": "00" * 32}))
    assert gate.refusal(asked) == ""
    (folder / "policy.toml").chmod(0o666)  # anybody's word
    keep_policy(folder, SitePolicy(members={"b": "ab" * 32}))
    (folder / "policy.toml").chmod(0o666)
    assert dict(pins) == own | {"b": "cd" * 32, "c": "00" * 32}
    assert len(pins) == 3
    assert ["can be written by others" in each["text"] for each in told.of("notice")] == [True]
    signed = Pins(folder, SitePolicy(signed_members=True), credentials, told)
    keep_policy(folder, SitePolicy(members={"b": "ab" * 32}))
    assert dict(signed) == own  # nobody has signed that list
    assert "policy.signed_members = true" in told.of("notice")[-1]["text"]
    assert pins_of(folder, SitePolicy(pin_members=False), credentials, told) is None


@pytest.mark.parametrize(
    ("gossip", "rules", "why"),
    [
        ({}, {}, r"policy.secure_sums: gossip.masks = false"),
        ({"masks": True}, {"bytes_out": 9}, "policy.bytes_out: a peer doesn't hold to it"),
        ({"masks": True}, {"rounds": 3}, "policy.rounds: 10 rounds are asked for"),
    ],
)
def test_s23_a_peer_keeps_to_its_policy_or_does_not_start(gossip, rules, why):
    with pytest.raises(ConfigError, match=why):
        check_peers_policy(Config.of({"gossip": gossip}), SitePolicy(**rules))
    check_peers_policy(Config.of({"gossip": {"masks": True}}), SitePolicy(min_examples=5))
