"""A secure sum is the plain sum of the sites that sent, bit by bit, whoever drops out when; or it is none."""

import hashlib
import re
from collections.abc import Mapping
from itertools import combinations_with_replacement, product
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from fedtrain import pki
from fedtrain.arena import Arena, ArenaFile
from fedtrain.digest import digest_of
from fedtrain.errors import BadUpdate, SecAggError, TooFewSites, Unfinished
from fedtrain.messages import Evaluation
from fedtrain.runtime.threads import ThreadPool
from fedtrain.secagg import client, keys, messages
from fedtrain.secagg.client import Client
from fedtrain.secagg.masking import BLOCK_BYTES, RINGS
from fedtrain.secagg.messages import (
    Agreed,
    Keys,
    Masked,
    RingArena,
    SealedShares,
    Share,
    Shares,
    Unmasked,
    keys_statement,
    seed_commitment,
    statement,
)
from fedtrain.secagg.roster import common_names
from fedtrain.secagg.server import SumSession, fold, leave_out_lonely
from fedtrain.transport.memory import LocalCohort
from fedtrain.wire import encode

from .secure import MODEL, NO_WEIGHTS, STEPS, Federation, losing

NEVER = "never"


def check(federation: Federation, drops: Mapping[str, str]) -> None:
    """One session in which sites drop out at these steps, against what is worked out here."""
    left = [
        sorted(site for site in federation.members if drops.get(site, NEVER) not in STEPS[: i + 1])
        for i in range(len(STEPS))
    ]
    short = next((i for i, sites in enumerate(left) if len(sites) < federation.terms.quorum), None)
    if short is None:
        found = federation.sum(losing(drops))
        assert found.sites == tuple(left[2])
        assert np.array_equal(found.vector, federation.plain(left[2]))
        assert found.dropped.keys() == federation.members.keys() - set(left[2])
        assert not found.blamed
        return
    with pytest.raises(Unfinished) as error:
        federation.sum(losing(drops))
    assert (error.value.have, error.value.need) == (len(left[short]), federation.terms.quorum)
    assert error.value.survivors == (tuple(left[2]) if short == 4 else ())
    assert short == 4 or not any(member.answers(Unmasked) for member in federation.members.values())


# --- S13: dropouts


@pytest.mark.parametrize("pattern", list(product([*STEPS, NEVER], repeat=3)), ids="-".join)
def test_s13_a_sum_of_three_is_exact_or_refused_for_every_pattern_of_dropouts(pattern):
    check(Federation(3), {s: step for s, step in zip("abc", pattern, strict=True) if step != NEVER})


@pytest.mark.parametrize("n", [4, 5])
def test_s13_a_sum_is_exact_or_refused_for_every_number_of_dropouts_at_each_step(n):
    """Which of the sites it is changes with the pattern; all of them are in the slow test."""
    for turn, pattern in enumerate(combinations_with_replacement([*STEPS, NEVER], n)):
        steps = [pattern[(i + turn) % n] for i in range(n)]
        federation = Federation(n, seed=turn)
        check(federation, {s: steps[i] for i, s in enumerate(federation.members) if steps[i] != NEVER})


@pytest.mark.slow
@pytest.mark.parametrize("first", [*STEPS, NEVER])
@pytest.mark.parametrize("n", [4, 5])
def test_s13_a_sum_is_exact_or_refused_for_every_pattern_of_dropouts(n, first):
    for turn, rest in enumerate(product([*STEPS, NEVER], repeat=n - 1)):
        federation, steps = Federation(n, seed=turn), (first, *rest)
        check(federation, {s: steps[i] for i, s in enumerate(federation.members) if steps[i] != NEVER})


@settings(max_examples=15, deadline=None)
@given(data=st.data(), n=st.integers(3, 40), ring=st.sampled_from([(16, 8), (32, 16), (64, 43)]))
def test_s13_a_sum_of_up_to_40_sites_is_exact_or_refused(data, n, ring):
    federation = Federation(n, ring_bits=ring[0], value_bits=ring[1], seed=n)
    drops = data.draw(
        st.dictionaries(st.sampled_from(sorted(federation.members)), st.sampled_from(STEPS), max_size=n // 2)
    )
    check(federation, drops)


def test_s13_a_session_below_the_quorum_names_who_is_missing_and_why():
    with pytest.raises(
        TooFewSites, match=r"masked vectors: 2, and 3 are needed. c: masked vectors: no reply"
    ):
        Federation(3).sum(losing({"c": "Mask"}))


def test_another_attempt_with_fresh_keys_sums_the_same_updates():
    federation = Federation(5)
    with pytest.raises(Unfinished):
        federation.sum(losing({"b": "Mask", "c": "Mask"}))
    federation.again()
    assert np.array_equal(federation.sum().vector, federation.plain("abcde"))
    keys = [entry for member in federation.members.values() for entry in member.answers(Keys)]
    secrets = [part for key in keys for part in (key.mask_key, key.seal_key, key.commitment)]
    assert len(set(secrets)) == len(secrets) == 5 * 2 * 3


# --- Large cohorts: a graph in which nobody has more than k neighbours


def sparse(seed: object = 0) -> Federation:
    return Federation(110, full_graph=100, corrupt=0.1, dropout=0.1, seed=seed)


def test_in_a_sparse_graph_each_site_deals_to_its_neighbours_only():
    federation = sparse()
    degree = federation.terms.degree
    assert 0 < degree < 60
    found = federation.sum()
    assert np.array_equal(found.vector, federation.plain(federation.members))
    for member in federation.members.values():
        (shares,) = member.answers(Shares)
        assert len(shares.sealed) == degree
        assert member.site not in shares.sealed


def test_s13_in_a_sparse_graph_dropouts_at_every_step_change_no_other_bit():
    federation = sparse(seed=1)
    gone = np.random.default_rng(5).choice(sorted(federation.members), 11, replace=False)
    check(federation, {str(site): STEPS[i % len(STEPS)] for i, site in enumerate(gone)})


def test_s13_a_site_whose_neighbours_are_lost_is_left_out_before_anybody_masks():
    """On a ring its neighbours then have as few, and so on: the session is had again."""
    federation, near = Federation(90, full_graph=0, corrupt=0.0, dropout=0.2), []
    cut = federation.terms.degree - federation.terms.threshold + 1
    assert 90 - cut >= federation.terms.quorum

    def bend(site, request):
        if isinstance(request, Share) and site == "s000":
            near.extend(peer for peer in request.roster if peer != site)
        return None if site in near[:cut] else request

    with pytest.raises(Unfinished, match=r"needed\. s000[^:]*: shares: fewer than"):
        federation.sum(bend)
    assert not any(member.answers(Masked) for member in federation.members.values())


def test_a_site_with_too_few_holders_left_is_out_before_anybody_masks_with_it():
    session = SumSession(LocalCohort({}), Federation(5).terms)
    holders = {"a": ("b", "c"), "b": ("a", "c"), "c": ("a", "d"), "d": ("c", "e")}
    dealt = dict.fromkeys("abcd", Shares(sealed={}, signature=b""))  # e did not deal, so d is alone, then c
    leave_out_lonely(session, dealt, holders, 2)
    assert dealt == {}
    assert session.dropped["d"] == "shares: fewer than 2 of its 2 holders are left"
    dealt = dict.fromkeys("abcd", Shares(sealed={}, signature=b""))
    leave_out_lonely(session, dealt, holders, 1)
    assert dealt.keys() == set("abcd")


# --- What is summed


@pytest.mark.parametrize(("ring_bits", "value_bits"), [(16, 13), (32, 29), (64, 43)])
def test_sums_at_the_edge_of_the_ring_do_not_wrap(ring_bits, value_bits):
    federation = Federation(5, ring_bits=ring_bits, value_bits=value_bits)
    q_max = federation.terms.fixed_point.q_max
    for member in federation.members.values():
        member.values = np.array([q_max, -q_max, 0, 1, -1])
    total = federation.sum().vector.view(f"i{ring_bits // 8}")
    assert total[:5].tolist() == [5 * q_max, -5 * q_max, 0, 5, -5]


def test_a_metric_of_most_sites_is_summed_and_one_of_few_is_not():
    """A sum over few would tell what they have, and a site could swell the vector by names of its own."""
    federation = Federation(5)
    for site in "abc":
        federation.members[site].names = ("accuracy", "loss")
    federation.members["d"].names = ("f1", "loss")
    found = federation.sum()
    assert found.names == ("accuracy", "loss")
    assert found.odd == {"d": {"f1"}}
    assert np.array_equal(found.vector, federation.plain("abcde", ("accuracy", "loss")))


@pytest.mark.parametrize(
    ("sites", "having", "summed"), [(3, 3, True), (3, 2, False), (6, 4, True), (6, 3, False)]
)
def test_a_metric_must_be_of_more_than_half_of_the_sites_and_of_three(sites, having, summed):
    names = {str(i): ("loss", "x") if i < having else ("loss",) for i in range(sites)}
    assert common_names(names) == (("loss", "x") if summed else ("loss",))


def test_sites_that_most_have_too_many_metrics_are_told_so():
    federation = Federation(5)
    for site, member in federation.members.items():
        member.names = tuple(
            sorted(f"{other}{i:03}" for other in "abcde" if other != site for i in range(64))
        )
    with pytest.raises(SecAggError, match="most sites have 320 metrics, at most 256 are allowed"):
        federation.sum()


@pytest.mark.parametrize(
    ("hostile", "says"),
    [
        (("loss", "tp[4]"), "it evaluates tp[4], most sites tp[3]"),
        (("loss", "z[65534]"), "its metrics are 65535 numbers, 65536 are allowed together"),
    ],
)
def test_a_site_whose_metrics_have_no_place_beside_the_others_is_blamed_and_the_sum_goes_on(hostile, says):
    federation = Federation(5)
    for member in federation.members.values():
        member.names = ("loss", "tp[3]")
    federation.members["c"].names = hostile
    found = federation.sum()
    assert found.sites == ("a", "b", "d", "e")
    assert says in found.blamed["c"]
    assert found.names == ("loss", "tp[3]")
    assert np.array_equal(found.vector, federation.plain("abde", ("loss", "tp[3]")))


@pytest.mark.parametrize("form", ["file", "torch"])
def test_vectors_are_folded_from_wherever_they_lie(form, tmp_path):
    federation = Federation(3, length=300_000)  # more than one chunk

    def moved(member):
        def answer(request):
            reply = member(request)
            if not isinstance(reply, Masked):
                return reply
            path = tmp_path / member.site
            path.write_bytes(reply.vector.payload)
            there = ArenaFile(reply.vector.schema, path, reply.vector.digest)
            return replace(reply, vector=there if form == "file" else there.load())

        return answer

    members = federation.members
    plain = federation.plain("abc")
    federation.members = {site: moved(member) for site, member in members.items()}
    assert np.array_equal(federation.sum().vector, plain)


def test_a_vector_that_is_lost_while_it_is_folded_ends_the_session(tmp_path):
    federation = Federation(5)

    def cut(reply):
        if not isinstance(reply, Masked):
            return reply
        path = tmp_path / "vector"
        path.write_bytes(bytes(reply.vector.payload)[:7])
        return replace(reply, vector=ArenaFile(reply.vector.schema, path, reply.vector.digest))

    federation.members["b"].lie = cut
    with pytest.raises(BadUpdate, match="7 bytes at coordinate 0"):
        federation.sum()


def test_a_ring_arena_is_an_arena_like_any_other():
    schema = Federation(3, length=1001).terms.schema(())
    ours = RingArena(schema)
    ours.vector[:] = np.arange(1001, dtype=np.uint32) * 0x01234567
    copy = Arena.wrap(schema, bytearray(ours.payload))
    (section,) = schema.sections
    assert len(ours.payload) == schema.nbytes
    assert ours.digest == copy.digest == digest_of(ours.payload)
    assert bytes(ours.span(section, 7, 999)) == bytes(copy.span(section, 7, 999))
    assert ours.chunk(section, 7, 999).equal(copy.chunk(section, 7, 999))
    assert ours.load().data.equal(copy.data)


@pytest.mark.parametrize("ring_bits", RINGS)
@pytest.mark.parametrize("blocks", [0.5, 4, 9.5])
def test_all_cores_add_a_vector_as_one_does_from_memory_or_from_a_file(tmp_path, ring_bits, blocks):
    length = int(blocks * BLOCK_BYTES) // (ring_bits // 8)
    draw = np.random.default_rng(ring_bits)
    total, numbers = draw.integers(0, 1 << ring_bits, (2, length), RINGS[ring_bits])
    arena = RingArena(Federation(3, length=length, ring_bits=ring_bits, value_bits=8).terms.schema(()))
    arena.vector[:] = numbers
    (tmp_path / "vector").write_bytes(arena.payload)
    for vector in (arena, ArenaFile(arena.schema, tmp_path / "vector")):
        sums = total.copy()
        fold(sums, vector, ThreadPool(3))
        assert np.array_equal(sums, total + numbers)


def test_of_a_vector_whose_room_was_given_up_nothing_can_be_read_not_even_a_digest():
    """The next vector is written there, and is not masked yet."""
    schema = Federation(3, length=1001).terms.schema(())
    old = RingArena(schema)
    new = RingArena(schema, old.give_up())
    new.vector[:] = 7
    assert len(old.payload) == len(old.vector) == 0
    assert old.digest == digest_of(b"")
    assert new.digest == digest_of(new.payload)


# --- Sites that send what cannot be


def on(kind, **changes):
    """Changes to one kind of reply; functions of the reply, by field."""

    def change(reply):
        if not isinstance(reply, kind):
            return reply
        return replace(reply, **{name: make(reply) for name, make in changes.items()})

    return change


def flipped(data):
    return data[:-1] + bytes([data[-1] ^ 1])


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (on(Keys, signature=lambda r: flipped(r.signature)), "keys: b: a signature is not by its key"),
        (on(Keys, mask_key=lambda r: flipped(r.mask_key)), "keys: b: a signature is not by its key"),
        (on(Shares, signature=lambda r: flipped(r.signature)), "shares: b: a signature is not by its key"),
        (on(Shares, sealed=lambda r: {**r.sealed, "z": r.sealed["a"]}), "shares for 6 sites came, 5 hold"),
        (on(Shares, sealed=lambda r: {"a": r.sealed["a"]}), "shares for 1 sites came, 5 hold"),
        (
            on(Shares, sealed=lambda r: {**r.sealed, "c": replace_text(r.sealed["c"], b"short")}),
            "what came as shares has not their size",
        ),
        (on(Masked, signature=lambda r: flipped(r.signature)), "masked vectors: b: a signature is not"),
        (on(Masked, vector=lambda r: NO_WEIGHTS), r"the vector is not masked int32\[15\]"),
        (lambda r: Evaluation(metrics={}) if isinstance(r, Masked) else r, "vectors: a Evaluation came"),
    ],
)
def test_a_site_that_sends_what_cannot_be_is_named_and_the_others_are_summed(change, why):
    federation = Federation(5)
    plain = federation.plain("acde")
    federation.members["b"].lie = change
    found = federation.sum()
    assert found.sites == ("a", "c", "d", "e")
    assert np.array_equal(found.vector, plain)
    assert found.blamed.keys() == {"b"}
    assert re.search(why, found.blamed["b"])


def test_a_site_whose_vote_is_forged_is_named_and_still_in_the_sum():
    federation = Federation(5)
    federation.members["b"].lie = on(Agreed, signature=lambda r: flipped(r.signature))
    found = federation.sum()
    assert found.sites == tuple("abcde")
    assert np.array_equal(found.vector, federation.plain("abcde"))
    assert "signatures: b: a signature is not by its key" in found.blamed["b"]


def replace_text(sealed, text):
    return SealedShares(text, sealed.seed, sealed.key)


def signed(member, entry, terms):
    return replace(entry, signature=member.sign(keys_statement(terms.sid(MODEL), member.site, entry)))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"mask_key": keys.bytes_of(1)}, "keeps no secret"),
        ({"seal_key": keys.bytes_of(keys.PRIME + 9)}, "keeps no secret"),
        ({"mask_key": b"short"}, "keeps no secret"),
        ({"commitment": b"short"}, "for two purposes"),
        ({"names": ("b", "a")}, "must be sorted"),
        ({"names": tuple(f"{i:03}" for i in range(257))}, "at most 256"),
        ({"names": ("x" * 129,)}, "none longer than 128"),
        ({"certificate": b"certificate of a"}, "a signature is not by its key"),
    ],
)
def test_a_site_that_signs_keys_that_cannot_be_is_left_out(changes, why):
    federation = Federation(5)
    member = federation.members["b"]

    def change(reply):
        if not isinstance(reply, Keys):
            return reply
        return signed(member, replace(reply, **changes), federation.terms)

    federation.members["b"].lie = change
    found = federation.sum()
    assert found.sites == ("a", "c", "d", "e")
    assert re.search(why, found.blamed["b"])


def test_a_site_that_offers_anothers_key_is_left_out():
    federation = Federation(5)
    member, theirs = federation.members["b"], federation.members["a"]

    def change(reply):
        if not isinstance(reply, Keys):
            return reply
        (entry,) = theirs.answers(Keys)
        return signed(member, replace(reply, mask_key=entry.mask_key), federation.terms)

    federation.members["b"].lie = change
    assert "that another site has" in federation.sum().blamed["b"]


def wrong_share(of, kind="seeds"):
    return on(Unmasked, **{kind: lambda r: {**getattr(r, kind), of: flipped(getattr(r, kind)[of])}})


def test_a_bad_share_is_traced_to_who_sent_it_and_the_sum_is_still_exact():
    federation = Federation(5)
    federation.members["b"].lie = wrong_share(of="d")
    found = federation.sum()
    assert found.blamed == {"b": "shares to unmask: not the share that d dealt to it"}
    assert np.array_equal(found.vector, federation.plain("abcde"))


def test_a_bad_share_of_a_lost_sites_key_is_traced_too():
    federation = Federation(7)
    federation.members["b"].lie = wrong_share(of="f", kind="keys")
    found = federation.sum(losing({"f": "Mask"}))
    assert found.blamed == {"b": "shares to unmask: not the share that f dealt to it"}
    assert np.array_equal(found.vector, federation.plain("abcdeg"))


def test_with_too_few_good_shares_there_is_no_sum_and_all_who_lied_are_named():
    federation = Federation(5)
    for liar in "bd":
        federation.members[liar].lie = wrong_share(of="a")
    with pytest.raises(Unfinished, match="good shares to unmask: 3, and 4 are needed") as error:
        federation.sum()
    assert error.value.blamed.keys() == {"b", "d"}
    assert error.value.survivors == tuple("abcde")


@pytest.mark.parametrize(
    "change",
    [
        on(Unmasked, seeds=lambda r: {**r.seeds, "a": b"short"}),
        on(Unmasked, seeds=lambda r: {}),
        on(Unmasked, keys=lambda r: {"a": bytes(32)}),
    ],
)
def test_an_answer_without_the_shares_that_are_due_is_not_used(change):
    federation = Federation(5)
    federation.members["a"].lie = change
    found = federation.sum()
    assert found.blamed.keys() == {"a"}
    assert np.array_equal(found.vector, federation.plain("abcde"))


def test_a_site_whose_shares_give_no_secret_is_named(monkeypatch):
    def other(sid, site, seed):
        return seed_commitment(sid, site, bytes(32) if site == "b" else seed)

    its_messages = SimpleNamespace(**{**vars(messages), "seed_commitment": other})
    monkeypatch.setattr(client, "msg", its_messages)  # the site's alone, not the aggregator's
    with pytest.raises(Unfinished, match="good shares of b: 0, and 4 are needed") as error:
        Federation(5).sum()
    assert error.value.blamed == {"b": "shares: they don't give the secret that it committed to"}


def test_values_that_no_update_gives_are_found_in_the_sum():
    federation = Federation(3, value_bits=16)
    federation.members["b"].values = np.array([0, 0, 1 << 20, 0, 0])
    found = federation.sum()
    with pytest.raises(SecAggError, match=r"its 3 sites can reach ±98301 at most"):
        federation.terms.fixed_point.decode(found.vector, len(found.sites), 1.0)


# --- The aggregator's order of work


def test_the_survivors_are_known_before_any_share_is_asked_for():
    federation, seen = Federation(5), []

    def bend(site, request):
        if type(request).__name__ == "Unmask":
            assert seen == [("a", "b", "d", "e")]
        return losing({"c": "Mask"})(site, request)

    federation.sum(bend, agreed=seen.append)
    assert seen == [("a", "b", "d", "e")]


def test_no_more_sites_are_waited_for_than_it_takes_to_unmask():
    federation = Federation(10)
    federation.sum()
    assert [len(m.answers(Unmasked)) for m in federation.members.values()] == [1] * 7 + [0] * 3


def test_heavy_work_is_done_in_a_thread():
    given = []

    async def in_thread(work, *args):
        given.append(work.__name__)
        return work(*args)

    Federation(3).sum(in_thread=in_thread)
    assert given == ["honest", "honest", "fold", "fold", "fold", "honest", "rebuild", "_take_out"]


# --- A site's memory


def test_the_same_request_again_gets_the_same_reply_and_moves_nothing():
    federation = Federation(5)
    members = federation.members

    def twice(member):
        def answer(request):
            first = member(request)
            assert member(request) is first
            return first

        return answer

    plain = federation.plain(members)
    federation.members = {site: twice(member) for site, member in members.items()}
    assert np.array_equal(federation.sum().vector, plain)


@pytest.mark.parametrize(
    ("step", "there"), [("Share", "abde"), ("Mask", "abde"), ("Agree", "abcde"), ("Unmask", "abcde")]
)
def test_a_restarted_site_is_a_dropout(step, there):
    federation = Federation(5)
    member = federation.members["c"]

    def bend(site, request):
        if site == "c" and type(request).__name__ == step:
            member.start("again")
        return request

    found = federation.sum(bend)
    assert member.refused == "c is in no such session: it has ended, or this site was restarted"
    assert found.sites == tuple(there)
    assert np.array_equal(found.vector, federation.plain(there))


def test_the_next_session_masks_in_the_memory_of_the_last_which_nobody_can_read_then():
    """Whoever still sent the last vector would send what is written for the next one, unmasked at first."""
    federation = Federation(3)
    federation.sum()
    member, read = federation.members["a"], []
    (last,) = member.answers(Masked)
    memory, write = last.vector.bytes, member.write

    def written(names, out):
        write(names, out)
        read.append(bytes(last.vector.payload))

    member.write = written
    federation.again()
    federation.sum()
    assert member.answers(Masked)[1].vector.bytes is memory
    assert read == [b""]


# --- Known answers


def test_rfc_7748_agreement():
    """Section 6.1."""
    alice = keys.KeyPair(bytes.fromhex("77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a"))
    bob = keys.KeyPair(bytes.fromhex("5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb"))
    assert alice.public.hex() == "8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a"
    assert bob.public.hex() == "de9edb7d7b7dc1b4d35b61c2ece435373f8343c85b78674dadfc7e146f882b4f"
    shared = "4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742"
    assert alice.agree(bob.public).hex() == bob.agree(alice.public).hex() == shared


def test_rfc_5869_derivation():
    """Test cases 1 and 3; the first 32 bytes, which are all that is ever drawn here."""
    info = bytes.fromhex("f0f1f2f3f4f5f6f7f8f9")
    found = keys.hkdf(b"\x0b" * 22, info, 32, salt=bytes(range(13)))
    assert found.hex() == "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf"
    found = keys.hkdf(b"\x0b" * 22, b"", 32)
    assert found.hex() == "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d"


def test_every_point_of_low_order_is_known_as_one():
    """Doubling thrice, by the curve's x-only formula, ends at the neutral element: z = 0."""
    p = keys.PRIME
    for u in keys.LOW_ORDER:
        x, z = u, 1
        for _ in range(3):
            x, z = (x * x - z * z) ** 2 % p, 4 * x * z * (x * x + 486662 * x * z + z * z) % p
        assert z == 0


def test_statements_of_different_parts_are_different():
    parts = [("a", "b"), ("ab",), ("a", b"b"), ("a", "b", ""), ("", "ab"), ("a", 1), ("a", 1.0), ("a", "1")]
    assert len({statement("x", *p) for p in parts} | {statement("xa", "b")}) == len(parts) + 1


def test_a_whole_session_is_byte_for_byte_what_it_was():
    """Five sites, one lost after it dealt, all seeded. Other bytes are another protocol: raise VERSION.

    Version 2 commits to shares with 24 bytes: with 32, 100 sites in the full graph uploaded 4.022 bytes a
    parameter at 1M. Version 3 draws masks in blocks of 1 MiB. Version 4 hashes statements as
    MessagePack, which takes a twentieth of the time for a long list of sites. Version 5: a request to train
    names the last round in which the site's update counted, and a model the patches that lead to it.
    Version 6: a request to evaluate names that round, too. Version 7: keys say whether their site checked the
    sum that the model was made of. Version 8: where sums have checksums, each integer has q_max added.
    """
    federation, said = Federation(5, seed="frozen"), hashlib.sha256()

    def bend(site, request):
        if site == "c" and type(request).__name__ == "Mask":
            return None
        said.update(site.encode() + encode(request))
        return request

    found = federation.sum(bend)
    for member in federation.members.values():
        for reply in member.said:
            said.update(encode(reply))
    assert said.hexdigest() == "09979823b9540a6eb336a2232b9a7814300e3e947758534ac7fcfa3fcfe4d1b8"
    assert (
        hashlib.sha256(found.vector.tobytes()).hexdigest()
        == "2a1f6283da7dd39fdee767f8570778bfcb6e212ac3e0fe458a4f97dfaa2247a3"
    )


# --- The parts together


def test_a_session_under_real_certificates(tmp_path):
    certs = tmp_path / "certs"
    pki.init(certs, "ward")
    signers = {
        site: pki.Signer.of(pki.Credentials.load(pki.issue(certs, "site", site))) for site in ("a", "b", "c")
    }
    verifier = pki.Verifier((certs / "ca/root.pem").read_bytes(), "ward")
    federation = Federation(3)
    prints = {site: pki.fingerprint(signer.certificate) for site, signer in signers.items()}
    federation.terms = replace(federation.terms, cohort=prints)
    federation.authority = verifier
    for site, member in federation.members.items():
        member.client = Client(
            site, federation.policy, certificate=signers[site].certificate, sign=signers[site].sign,
            verify=verifier.verify,
        )  # fmt: skip
    assert np.array_equal(federation.sum().vector, federation.plain("abc"))


@pytest.mark.parametrize(("ring_bits", "value_bits", "most"), [(32, 16, 4.02), (16, 12, 2.02)])
def test_a_site_uploads_little_more_than_the_ring_takes(ring_bits, value_bits, most):
    federation = Federation(10, length=1_000_000, ring_bits=ring_bits, value_bits=value_bits)
    for member in federation.members.values():
        member.write = lambda names, out: out.fill(0)
    federation.sum()
    said = federation.members["a"].said
    (masked,) = federation.members["a"].answers(Masked)
    sent = sum(len(encode(reply)) for reply in said) + masked.vector.schema.nbytes
    chain = 1400  # bytes of a real certificate chain
    assert (sent + chain) / 1_000_000 < most
