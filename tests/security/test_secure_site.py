"""S12, S14 at a site's own end: what an aggregator can't do with models of one digest, nor with haste."""

import asyncio
import errno
import os
import threading

import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from msgspec.structs import replace

from fedtrain.arena import Arena, ArenaFile
from fedtrain.config import Config
from fedtrain.digest import digest_of
from fedtrain.errors import ConfigError, StoreError, Unfinished
from fedtrain.events import Notice
from fedtrain.messages import Failure, Update
from fedtrain.runtime.simulations.simulated_masks import SimulatedKeys
from fedtrain.runtime.sites.gate import Gate
from fedtrain.runtime.sites.secure_site import SecureSite
from fedtrain.runtime.sites.site import Site
from fedtrain.runtime.star.secure_terms import encoding_of, hash_of, policy
from fedtrain.schema import Schema, TensorSpec
from fedtrain.secagg.masking import serial
from fedtrain.secagg.messages import Advertise, AdvertiseEvaluation, Keys, Mask, Masked, Terms, Unmask
from fedtrain.secagg.server import masked_sum
from fedtrain.store import Ledger
from fedtrain.transport.memory import LocalCohort

SCHEMA = Schema((TensorSpec("w", (64,), "float32", True),))
SITES = ("a", "b", "c")


# --- Two models of one digest


def times(x, y):
    """In the field of AES-GCM, SP 800-38D 6.3."""
    product = 0
    for i in range(128):
        if x >> (127 - i) & 1:
            product ^= y
        y = y >> 1 ^ (0xE1 << 120 if y & 1 else 0)
    return product


def another_of_the_same_digest(model):
    """The digest is a polynomial at H = AES(0), which everybody knows: d in one block, d·H in the next."""
    h = int.from_bytes(Cipher(algorithms.AES(bytes(16)), modes.ECB()).encryptor().update(bytes(16)))
    d = 1 << 127
    change = d.to_bytes(16) + times(d, h).to_bytes(16)
    return bytes(a ^ b for a, b in zip(model[:32], change, strict=True)) + model[32:]


class Blobs:
    """A trainer without a process, that says on what it trained."""

    def __init__(self):
        self.trained_on = []

    async def train(self, site, round, weights, out, counted):
        self.trained_on.append(weights.path.read_bytes())
        out.write_bytes(bytes(SCHEMA.nbytes))
        return Update(delta=Arena.zeros(SCHEMA), num_examples=5.0)

    async def close(self):
        pass


def test_two_models_can_have_one_digest():
    model = bytes(Arena.zeros(SCHEMA).payload)
    other = another_of_the_same_digest(model)
    assert model != other
    assert digest_of(model) == digest_of(other)


def test_s12_an_update_trained_on_one_model_is_in_no_sum_for_another_of_the_same_digest(tmp_path):
    """Or a site given a model of its own would be in the others' sum (arXiv 2111.07380)."""
    config, ledger, trainer = config_of(tmp_path), Ledger(tmp_path / "ledger"), Blobs()
    site = Site("a", SCHEMA, ledger, trainer, secure=sites_of(config, SimulatedKeys())["a"])
    model = bytes(Arena.zeros(SCHEMA).payload)
    both = [another_of_the_same_digest(model), model]

    async def ask():
        for i, data in enumerate(both):
            path = ledger.folder / "inbox" / digest_of(data)
            path.write_bytes(data)  # where a transfer leaves it
            weights = ArenaFile(SCHEMA, path, digest_of(data))
            reply = await site.answer(Advertise(id=str(i), round=0, weights=weights, terms=terms(config, i)))
            assert isinstance(reply, Keys), reply
        await site.close()

    asyncio.run(ask())
    ledger.close()
    assert trainer.trained_on == both


def test_a_vector_of_another_length_than_the_sites_own_is_refused(tmp_path):
    """With fewer ring elements than its model has, coordinates would be missing."""
    config, model = config_of(tmp_path), hash_of(Arena.zeros(SCHEMA))
    site, update = sites_of(config, SimulatedKeys())["a"], Update(delta=Arena.zeros(SCHEMA), num_examples=5.0)
    asked = advertise(config)
    for length in (asked.terms.length - 1, asked.terms.length + 1):
        other = replace(asked, id=f"length {length}", terms=replace(asked.terms, length=length))
        assert f"length = {length} is asked for" in site.offer(other, model, update).reason
    assert isinstance(site.offer(asked, model, update), Keys)


# --- Requests that come while one is under way


def config_of(folder):
    return Config.of({"run": {"name": "r"}, "secagg": {"max_examples": 10, "verify": False}}, folder)


def sites_of(config, keys, **options):
    return {
        site: SecureSite(
            config, site, SimulatedKeys.FEDERATION, keys.signer(site), keys, **options,
        )
        for site in SITES
    }  # fmt: skip


def terms(config, nonce=0):
    quorum, threshold, _ = policy(config, SimulatedKeys.FEDERATION).graph(len(SITES))
    encoding = encoding_of(config, 0, len(SITES), SCHEMA)
    return Terms(
        federation=SimulatedKeys.FEDERATION, run="r", round=0, attempt=nonce, nonce=bytes([nonce] * 16),
        cohort=SimulatedKeys().fingerprints(SITES), quorum=quorum, threshold=threshold,
        value_bits=encoding.point.value_bits, clip=1.0, max_weight=10.0, length=encoding.length,
    )  # fmt: skip


def advertise(config, nonce=0):
    return Advertise(id=str(nonce), round=0, weights=Arena.zeros(SCHEMA), terms=terms(config, nonce))


@pytest.mark.parametrize("then", ["the same again", "another session"])
def test_what_is_asked_while_a_vector_is_masked_waits_for_it(tmp_path, then):
    """As when a connection breaks while a site masks: it is asked again, and the first work goes on."""
    config, asked, masking, go_on = config_of(tmp_path), *(threading.Event() for _ in range(3))
    model, update = hash_of(Arena.zeros(SCHEMA)), Update(delta=Arena.zeros(SCHEMA), num_examples=5.0)
    keys, replies = SimulatedKeys(), []

    def slowly(work, items):
        if asked.is_set():
            masking.set()
            assert go_on.wait(60)
        return serial(work, items)

    sites = sites_of(config, keys, parallel=slowly)

    def handler(site):
        async def answer(request):
            if isinstance(request, Advertise):
                return await asyncio.to_thread(site.offer, request, model, update)
            if not isinstance(request, Mask) or replies:
                return await asyncio.to_thread(site.answer, request)
            asked.set()
            first = asyncio.create_task(asyncio.to_thread(site.answer, request))
            await asyncio.to_thread(masking.wait, 60)
            second = asyncio.create_task(
                asyncio.to_thread(site.answer, request)
                if then == "the same again"
                else asyncio.to_thread(site.offer, advertise(config, 1), model, update)
            )
            await asyncio.wait([second], timeout=0.1)  # as far as it comes
            go_on.set()
            replies.extend(await asyncio.gather(first, second))
            return replies[0]

        return answer

    async def run():
        cohort = LocalCohort({name: handler(site) for name, site in sites.items()})
        offer = advertise(config)
        masked = await masked_sum(
            cohort,
            offer.terms,
            model,
            dict.fromkeys(sorted(offer.terms.cohort), offer),
            keys.verify,
            deadline_s=60,
            step_deadline_s=60,
        )
        return await masked.unmask()

    if then == "the same again":
        assert asyncio.run(run()).sites == SITES
        assert isinstance(replies[0], Masked)
        assert replies[0] is replies[1]
    else:
        with pytest.raises(Unfinished, match="a is in no such session"):
            asyncio.run(run())
        assert [type(reply) for reply in replies] == [Masked, Keys]


# --- What a site remembers of its sums


def test_s14_what_a_site_gave_shares_for_is_on_disk_before_they_leave(tmp_path):
    config, keys, ledger = config_of(tmp_path), SimulatedKeys(), Ledger(tmp_path / "ledger")
    model, update = hash_of(Arena.zeros(SCHEMA)), Update(delta=Arena.zeros(SCHEMA), num_examples=5.0)

    class Unwritable:
        folder, records, warn = tmp_path / "unwritable", None, print

        def sums(self):
            return {}

        def keep_sum(self, kind, newest):
            raise OSError("no space left on device")

    async def run(sites, nonce):
        asked = advertise(config, nonce)
        cohort = LocalCohort({name: answers(site) for name, site in sites.items()})
        masked = await masked_sum(
            cohort,
            asked.terms,
            model,
            dict.fromkeys(sorted(asked.terms.cohort), asked),
            keys.verify,
            deadline_s=60,
            step_deadline_s=60,
        )
        return await masked.unmask()

    def answers(site):
        return lambda r: site.offer(r, model, update) if isinstance(r, Advertise) else site.answer(r)

    Unwritable.folder.mkdir()
    with pytest.raises(OSError, match="no space left"):
        asyncio.run(run(sites_of(config, keys, sums=Unwritable()), 0))
    asyncio.run(run(sites_of(config, keys, sums=ledger), 1))
    assert ledger.sums() == {"Advertise": ((0, SITES),)}
    ledger.close()
    lines = []
    (tmp_path / "ledger/sums.json").write_text("{")
    again = Ledger(tmp_path / "ledger", lines.append)
    assert again.sums() == {"Advertise": ((0, SITES),)}
    assert "sums.json is damaged: " in lines[0]
    assert "made again from the other of the two files" in lines[0]
    for name in ("sums.json", "sums.json.copy"):
        (tmp_path / "ledger" / name).write_text("{")
    with pytest.raises(StoreError, match=r"sums\.json is damaged.*another run\.name"):
        again.sums()
    again.close()


# --- What a site says of itself when something fails


def test_s35_a_failure_leaves_without_the_folders_of_the_sites_machine(tmp_path, monkeypatch):
    """A full disk, and a trainer that can't be started, name files: to the site's people with their folders,
    to the aggregator without."""
    config, keys, told, said = config_of(tmp_path), SimulatedKeys(), [], []
    ledgers = {name: Ledger(tmp_path / "hospital" / name) for name in SITES}
    weights = ArenaFile(SCHEMA, tmp_path / "model", digest_of(bytes(SCHEMA.nbytes)))
    weights.path.write_bytes(bytes(SCHEMA.nbytes))

    class Gone(Blobs):
        async def evaluate(self, site, round, weights, counted):
            raise ConfigError(f"{ledgers[site].folder}/task.py is gone")

    def site_of(name):
        secure = sites_of(config, keys, sums=ledgers[name])[name]
        return Site(name, SCHEMA, ledgers[name], Gone(), secure=secure, gate=Gate(told.append))

    def full(fd):
        raise OSError(errno.ENOSPC, "No space left on device")

    def handler(site):
        async def answer(request):
            with monkeypatch.context() as patch:
                if isinstance(request, Unmask):
                    patch.setattr(os, "fsync", full)  # as the guard keeps what is opened
                said.append(await site.answer(request))
            return said[-1]

        return answer

    async def run():
        sites = {name: site_of(name) for name in SITES}
        cohort = LocalCohort({name: handler(site) for name, site in sites.items()})
        asked = replace(advertise(config), weights=weights)
        masked = await masked_sum(
            cohort, asked.terms, hash_of(weights), dict.fromkeys(SITES, asked), keys.verify,
            deadline_s=60, step_deadline_s=60,
        )  # fmt: skip
        with pytest.raises(Unfinished):
            await masked.unmask()
        about = AdvertiseEvaluation(id="e", round=1, weights=weights, terms=replace(asked.terms, round=1))
        await handler(sites["a"])(about)

    asyncio.run(run())
    failures = [reply.reason for reply in said if isinstance(reply, Failure)]
    assert [reason.partition(" for ")[2][:13] for reason in failures[:-1]] == ["cohorts.jsonl"] * 3
    assert failures[-1] == "task.py is gone"
    assert "hospital" not in "".join(failures)
    notices = [event.text for event in told if isinstance(event, Notice)]
    assert [text.count(str(tmp_path / "hospital")) for text in notices] == [1] * 4
    for ledger in ledgers.values():
        ledger.close()
