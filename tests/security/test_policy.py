"""S22, S23, S25, S29, S39: a site's own policy decides whom it sums with and what it answers, whatever the
aggregator, or the holder of the issuing key, asks."""

import asyncio

import pytest
import torch
from msgspec.structs import replace

from fedtrain.arena import Arena, ArenaFile
from fedtrain.config import Config, SitePolicy
from fedtrain.errors import RoundError
from fedtrain.messages import Update
from fedtrain.runtime.simulations.simulated_masks import SimulatedKeys
from fedtrain.runtime.sites.gate import Gate, hold
from fedtrain.runtime.sites.secure_site import SecureSite
from fedtrain.runtime.sites.site import Site
from fedtrain.runtime.star.secure_terms import encoding_of, hash_of, policy
from fedtrain.schema import Schema, TensorSpec
from fedtrain.secagg.messages import Advertise, Terms
from fedtrain.secagg.server import masked_sum
from fedtrain.store import Ledger
from fedtrain.transport.memory import LocalCohort

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
    return Config.of({"run": {"name": "r"}, "secagg": {"max_examples": 10}}, folder)


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
    fetched = ledger.inbox.path(asked.weights.digest)
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
