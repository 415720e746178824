"""S12, S13, S14, and each lie that an aggregator or a site could tell in secure aggregation.

The aggregator here takes the protocol's steps without its own checks, and sends what `bend` makes of each
request. Sites are honest, and in each test they refuse: no share is given away, or none that helps.
"""

import re
from collections import defaultdict
from contextlib import suppress
from dataclasses import replace as replace_policy
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from fedtrain.errors import RoundError, Unfinished, WireError
from fedtrain.secagg import client, server
from fedtrain.secagg import keys as session_keys
from fedtrain.secagg.client import NEVER
from fedtrain.secagg.keys import KeyPair, pair_mask_key, pair_mask_sign
from fedtrain.secagg.masking import add_masks
from fedtrain.secagg.messages import (
    SHARE_COMMITMENT_BYTES,
    Advertise,
    Agree,
    Agreed,
    Keys,
    Mask,
    Masked,
    Share,
    Shares,
    Unmask,
    Unmasked,
    graph_seed,
    keys_statement,
    share_commitment,
)
from fedtrain.secagg.roster import peers_of
from fedtrain.wire import decode, encode

from ..secure import MODEL, NO_WEIGHTS, Federation, losing, stream


@pytest.fixture(autouse=True)
def lawless(monkeypatch):
    """The aggregator believes and passes on everything."""
    for check in ("check_signed", "check_fresh", "check_signer"):
        monkeypatch.setattr(server, check, lambda *anything: None)


def on(kind, change):
    """Bends one kind of request: change(site, request)."""
    return lambda site, request: change(site, request) if isinstance(request, kind) else request


def honestly(site, request):
    return request


def refuses(federation, bend, why, sites=None):
    """A session with a lie in it: these sites (all) refuse for this reason, and nobody unmasks."""
    with pytest.raises(RoundError):
        federation.sum(bend)
    for site in sites or federation.members:
        assert re.search(why, federation.members[site].refused), (site, federation.members[site].refused)
    assert not any(member.answers(Unmasked) for member in federation.members.values())


# --- S12


def test_s12_nothing_that_the_aggregator_saw_contains_an_update_in_any_form():
    federation, seen = Federation(3, length=2000, value_bits=30), bytearray()

    def bend(site, request):
        seen.extend(encode(request))
        return request

    federation.sum(bend)
    for member in federation.members.values():
        for reply in member.said:
            seen.extend(encode(reply))
        seen.extend(member.answers(Masked)[0].vector.payload)
    assert len(seen) > 3 * 8000
    q_max = federation.terms.fixed_point.q_max
    for member in federation.members.values():
        plain = (member.values / q_max).astype(np.float32)
        for form in (plain, plain.astype(np.float64), member.values.astype(np.int32), member.values):
            data = form.tobytes()
            width = 2 * form.itemsize  # two coordinates side by side: 60 random bits
            assert not any(data[at : at + width] in seen for at in range(0, len(data), width))


def test_s12_the_scan_would_find_a_vector_that_was_not_masked(monkeypatch):
    """Sites that leave out their masks, as a mistake in the client would: the test above can fail."""
    monkeypatch.setattr("fedtrain.secagg.client.add_masks", lambda vector, masks, parallel, wrote: None)
    with pytest.raises(AssertionError):
        test_s12_nothing_that_the_aggregator_saw_contains_an_update_in_any_form()


def test_s12_one_vector_with_all_pairwise_masks_taken_out_is_still_masked():
    """All that an aggregator can do to a site that it calls dead when it has its vector."""
    federation = Federation(5)
    federation.sum(honestly)
    member = federation.members["e"]
    (masked,), (own,) = member.answers(Masked), member.answers(Keys)
    random = stream("e", 0)
    pair = KeyPair(random(32))  # the secret itself, as if rebuilt from shares
    assert pair.public == own.mask_key
    sid, vector = federation.terms.sid(MODEL), masked.vector.vector.copy()
    for peer in "abcd":
        shared = pair.agree(federation.members[peer].answers(Keys)[0].mask_key)
        add_masks(vector, [(pair_mask_key(shared, sid, "e", peer), -pair_mask_sign("e", peer))])
    bare = federation.plain("e")
    assert not set(vector) & set(bare)


# --- S14: one kind of share for each site


def test_s14_a_site_called_dead_after_its_vector_came_gives_one_kind_of_share():
    """The others unmask without it, with shares of its key; of its seed nobody ever gives one."""
    federation = Federation(5)
    with pytest.raises(Unfinished):
        federation.sum(on(Agree, lambda site, request: replace(request, sites=tuple("abcd"))))
    assert "the list of survivors is without this site" in federation.members["e"].refused
    kinds = shares_given(federation)
    assert kinds["e"] == {"key"}
    assert all(kinds[site] == {"seed"} for site in "abcd")


def shares_given(federation):
    """Of which kinds the aggregator got shares, by whose secrets they are of."""
    kinds = defaultdict(set)
    for member in federation.members.values():
        for reply in member.answers(Unmasked):
            for kind, shares in (("seed", reply.seeds), ("key", reply.keys)):
                for site in shares:
                    kinds[site].add(kind)
    return kinds


def test_s14_different_survivors_for_different_sites_open_nothing():
    federation = Federation(5)

    def change(site, request):
        return replace(request, sites=tuple("abcde") if site in "abe" else tuple("abcd"))

    refuses(federation, on(Agree, change), "a signature is not by its key")


def test_s14_a_site_is_asked_for_the_other_kind_of_share_when_it_gave_one():
    federation = Federation(5)
    federation.sum()
    terms, member = federation.terms, federation.members["a"]
    sid = terms.sid(MODEL)
    agree = Agree(id="2", sid=sid, sites=tuple("abcd"))
    unmask = Unmask(id="3", sid=sid, signatures=dict.fromkeys("abcd", b""))
    for request in (agree, unmask):
        assert "is in no such session" in member(request).reason
    assert len(member.answers(Agreed)) == len(member.answers(Unmasked)) == 1


def test_s14_a_site_signs_one_list_of_survivors_in_a_session():
    federation = Federation(5)
    second = []

    def bend(site, request):
        if isinstance(request, Unmask):
            other = Agree(id=f"again-{site}", sid=request.sid, sites=tuple("abcd"))
            second.append(federation.members[site](other))
        return request

    refuses(federation, bend, "Agree was asked when Unmask was due")
    assert len(second) == 5


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_s14_whatever_lists_each_site_is_shown_nobody_is_opened_in_both_ways(data):
    """Of dealers, of survivors and of votes: with all sites honest, at most one list is opened at all."""
    federation, everyone = Federation(5), tuple("abcde")
    lists = st.lists(st.sampled_from([everyone, *combinations(everyone, 4)]), min_size=5, max_size=5)
    dealers = data.draw(lists) if data.draw(st.booleans()) else [everyone] * 5
    alive = data.draw(lists)
    voted = {}

    def bend(site, request):
        place = everyone.index(site)
        if isinstance(request, Mask):
            sealed = {s: text for s, text in request.sealed.items() if s in dealers[place]}
            return replace(request, sites=dealers[place], sealed=sealed)
        if isinstance(request, Agree):
            return replace(request, sites=alive[place])
        if isinstance(request, Unmask):
            votes = {s: member.answers(Agreed) for s, member in federation.members.items()}
            kept = {s: vote[0].signature for s, vote in votes.items() if vote}
            voted[site] = data.draw(st.sets(st.sampled_from(sorted(kept)))) if kept else set()
            return replace(request, signatures={s: kept[s] for s in sorted(voted[site])})
        return request

    with suppress(RoundError):
        federation.sum(bend)
    kinds = shares_given(federation)
    assert all(len(given) == 1 for given in kinds.values())
    opened = {alive[everyone.index(s)] for s, m in federation.members.items() if m.answers(Unmasked)}
    assert len(opened) <= 1


def test_s14_a_vector_is_masked_once_in_a_session():
    """Its difference to one for fewer dealers would be a mask."""
    federation, second = Federation(5), []

    def bend(site, request):
        if isinstance(request, Agree):
            left = tuple(s for s in "abcde" if s != ("e" if site != "e" else "a"))
            sealed = {s: m.answers(Shares)[0].sealed[site] for s, m in federation.members.items()}
            sealed = {s: text for s, text in sealed.items() if s in left and s != site}
            again = Mask(id=f"again-{site}", sid=request.sid, sites=left, sealed=sealed)
            second.append(federation.members[site](again))
        return request

    refuses(federation, bend, "Mask was asked when Agree was due")
    assert len(second) == 5
    assert all(len(member.answers(Masked)) == 1 for member in federation.members.values())


# --- Survivors


@pytest.mark.parametrize(
    ("sites", "why"),
    [
        ("abc", "the list of survivors has 3 sites: 4 are the least"),
        ("abcdef", "1 sites that were not there before"),
        ("edcba", "not sorted"),
        ("abcdd", "not sorted, or has a site twice"),
    ],
)
def test_a_list_of_survivors_that_is_too_short_or_not_of_dealers_is_not_signed(sites, why):
    federation = Federation(5)
    refuses(federation, on(Agree, lambda site, request: replace(request, sites=tuple(sites))), why)
    assert not any(member.answers(Agreed) for member in federation.members.values())


def test_a_list_of_survivors_with_a_site_that_never_dealt_is_not_signed():
    federation = Federation(6)

    def bend(site, request):
        if isinstance(request, Agree):
            return replace(request, sites=tuple("abcdef"))
        return losing({"f": "Share"})(site, request)

    refuses(federation, bend, "1 sites that were not there before", "abcde")


def test_signatures_of_too_few_sites_open_nothing():
    federation = Federation(5)

    def change(site, request):
        return replace(request, signatures={s: request.signatures[s] for s in "ab"})

    refuses(federation, on(Unmask, change), "[23] sites signed the list of survivors, 4 must")


@pytest.mark.parametrize("lie", ["forged", "of another step", "under another name", "by a stranger"])
def test_a_forged_signature_opens_nothing(lie):
    federation = Federation(5)

    def change(site, request):
        signatures = dict(request.signatures)
        victim = next(s for s in sorted(signatures) if s != site)
        if lie == "forged":
            signatures[victim] = bytes(32)
        elif lie == "of another step":
            signatures[victim] = federation.members[victim].answers(Shares)[0].signature
        elif lie == "under another name":
            signatures[victim] = signatures[next(s for s in sorted(signatures) if s not in (site, victim))]
        else:
            signatures["z"] = bytes(32)
        return replace(request, signatures=signatures)

    refuses(federation, on(Unmask, change), "a signature is not by its key|from others than the survivors")


# --- Rosters


def test_two_rosters_for_one_session_are_refused_by_all():
    """They differ in no more than that half of the sites are told of one metric more."""
    federation = Federation(6)

    def change(site, request):
        return replace(request, names=("loss", "zeal")) if site in "abc" else request

    refuses(federation, on(Share, change), "was not sealed by it for . and this roster")


@pytest.mark.parametrize("whose", ["a stranger's", "a site's", "a site's, for other metrics", "the reader's"])
def test_keys_that_the_aggregator_made_are_refused(whose):
    federation = Federation(5)
    made = {site: KeyPair(stream("aggregator", site)(32)).public for site in "abcde"}

    def change(site, request):
        roster = dict(request.roster)
        if whose == "a stranger's":
            roster["z"] = replace(roster["a"], mask_key=made["a"], seal_key=made["b"])
        else:
            victim = site if whose == "the reader's" else next(s for s in "abcde" if s != site)
            changed = {"names": ("loss", "zeal")} if "metrics" in whose else {"mask_key": made[victim]}
            roster[victim] = replace(roster[victim], **changed)
        return replace(request, roster=roster)

    why = {
        "a stranger's": "1 sites that were not there before",
        "a site's": "a signature is not by its key",
        "a site's, for other metrics": "a signature is not by its key",
        "the reader's": "the roster has another key for this site than it sent",
    }
    refuses(federation, on(Share, change), why[whose])


def test_a_site_that_only_the_aggregator_vouches_for_is_refused():
    """It is in the cohort, and its keys are signed; not by a site."""
    federation = Federation(5)
    federation.members["e"].lie = lambda reply: (
        replace(reply, signature=bytes(32)) if isinstance(reply, Keys) else reply
    )
    refuses(federation, honestly, "e: a signature is not by its key", "abcd")


def test_one_site_under_two_names_is_refused():
    """e's entry is signed, with its own certificate, by a."""
    federation = Federation(5)
    member = federation.members["a"]

    def change(site, request):
        entry = replace(request.roster["e"], certificate=member.certificate)
        sid = federation.terms.sid(MODEL)
        entry = replace(entry, signature=member.sign(keys_statement(sid, "e", entry)))
        return replace(request, roster={**request.roster, "e": entry})

    refuses(federation, on(Share, change), "e's keys are signed by a", "abcd")


def test_a_site_with_another_certificate_than_agreed_is_refused():
    """One that was stolen and replaced, say; all sites have one cohort, by its fingerprints."""
    federation = Federation(5)
    member, sid = federation.members["e"], federation.terms.sid(MODEL)

    def change(site, request):
        entry = replace(request.roster["e"], certificate=b"certificate of e, an older one")
        entry = replace(entry, signature=member.sign(keys_statement(sid, "e", entry)))
        return replace(request, roster={**request.roster, "e": entry})

    refuses(federation, on(Share, change), "with another key than agreed", "abcd")


def test_one_certificate_under_two_names_is_refused():
    """The cohort itself says that e's is a's certificate."""
    federation = Federation(6)
    member = federation.members["a"]
    cohort = {**federation.terms.cohort, "e": federation.terms.cohort["a"]}
    federation.terms = replace(federation.terms, cohort=cohort)
    made = Keys(
        certificate=member.certificate, commitment=bytes(32), names=(), signature=b"",
        mask_key=KeyPair(stream(1)(32)).public, seal_key=KeyPair(stream(2)(32)).public,
    )  # fmt: skip
    made = replace(made, signature=member.sign(keys_statement(federation.terms.sid(MODEL), "e", made)))

    def change(site, request):
        return replace(request, roster={**request.roster, "e": made})

    refuses(federation, on(Share, change), "e's keys are signed by a", "bcdf")


def test_a_roster_below_the_quorum_is_refused():
    federation = Federation(5)

    def change(site, request):
        left = sorted({site, *"abc"})[:3]
        return replace(request, roster={s: request.roster[s] for s in {*left[:2], site}})

    refuses(federation, on(Share, change), "the roster has [23] sites: 4 are the least")


def test_metrics_without_a_place_are_noticed():
    federation = Federation(3)
    refuses(federation, on(Share, lambda site, request: replace(request, names=())), "have no place")


def test_a_site_gives_no_metric_into_a_sum_that_hides_it_among_fewer_than_three():
    """The aggregator names it, though one other site alone has it."""
    federation = Federation(5)
    for site in "ab":
        federation.members[site].names = ("auc", "loss")
    refuses(
        federation, on(Share, lambda site, request: replace(request, names=("auc", "loss"))),
        "the metric 'auc' would be summed over 2 sites: 3 are the least", "ab",
    )  # fmt: skip


def test_h7_a_site_with_hundreds_of_metrics_of_its_own_stops_no_sum():
    """256 metrics of its own beside one that all have were more than fit, and nobody was named."""
    federation = Federation(5)
    federation.members["c"].names = tuple(sorted(["loss", *(f"foreign{i:03}" for i in range(255))]))
    federation.members["d"].names = tuple(f"other{i:03}" for i in range(200))
    found = federation.sum()
    assert found.names == ("loss",)
    assert found.sites == tuple("abcde")
    assert {site: len(names) for site, names in found.odd.items()} == {"c": 255, "d": 200}


@pytest.mark.parametrize(
    "names",
    [("loss", "loss"), ("loss", "auc"), ("loss", "x" * 129), ("loss", *(f"x{i:03}" for i in range(256)))],
    ids=["twice", "unsorted", "long", "too many"],
)
def test_metrics_names_that_would_move_or_swell_the_vector_are_refused(names):
    federation = Federation(3)
    why = "the roster has [0-9]+ names of metrics: they must be sorted"
    refuses(federation, on(Share, lambda site, request: replace(request, names=names)), why)


@pytest.mark.parametrize("u", [*sorted(session_keys.LOW_ORDER), session_keys.PRIME + 1, 2**255 + 9])
@pytest.mark.parametrize("field", ["mask_key", "seal_key"])
def test_points_with_which_nothing_is_secret_are_refused(u, field):
    """A site that is with the aggregator signs one."""
    federation = Federation(4)
    member = federation.members["d"]

    def change(site, request):
        bad = (u % 2**256).to_bytes(32, "little")
        entry = replace(request.roster["d"], **{field: bad})
        sid = federation.terms.sid(MODEL)
        entry = replace(entry, signature=member.sign(keys_statement(sid, "d", entry)))
        return replace(request, roster={**request.roster, "d": entry})

    refuses(federation, on(Share, change), "d offers a key that keeps no secret", "abc")


def test_one_key_at_two_sites_is_refused():
    federation = Federation(4)
    member = federation.members["d"]

    def change(site, request):
        other = next(s for s in "abc" if s != site)
        entry = replace(request.roster["d"], mask_key=request.roster[other].mask_key)
        sid = federation.terms.sid(MODEL)
        entry = replace(entry, signature=member.sign(keys_statement(sid, "d", entry)))
        return replace(request, roster={**request.roster, "d": entry})

    refuses(federation, on(Share, change), "for two purposes, or one that another site has", "abc")


def test_one_key_for_two_purposes_is_refused():
    """A mask key that is rebuilt would open what was sealed."""
    federation = Federation(4)
    member = federation.members["d"]

    def change(site, request):
        entry = replace(request.roster["d"], seal_key=request.roster["d"].mask_key)
        sid = federation.terms.sid(MODEL)
        entry = replace(entry, signature=member.sign(keys_statement(sid, "d", entry)))
        return replace(request, roster={**request.roster, "d": entry})

    refuses(federation, on(Share, change), "d offers a key for two purposes", "abc")


# --- Shares


def test_swapped_ciphertexts_are_refused():
    federation = Federation(5)

    def change(site, request):
        senders = sorted(request.sealed)
        sealed = dict(request.sealed)
        for one, other in pairwise(senders):
            sealed[one], sealed[other] = sealed[other], sealed[one]
        return replace(request, sealed=sealed)

    refuses(federation, on(Mask, change), "was not sealed by it for . and this roster")


def test_a_ciphertext_for_another_site_is_refused():
    federation = Federation(5)

    def change(site, request):
        sender = next(s for s in "abcde" if s != site)
        other = next(s for s in "abcde" if s not in (site, sender))
        (shares,) = federation.members[sender].answers(Shares)
        return replace(request, sealed={**request.sealed, sender: shares.sealed[other]})

    refuses(federation, on(Mask, change), "was not sealed by it for . and this roster")


def test_commitments_to_shares_cannot_be_exchanged():
    """Or an honest site would be blamed for its share later."""
    federation = Federation(5)

    def change(site, request):
        sender = next(iter(request.sealed))
        forged = replace(request.sealed[sender], seed=bytes(32))
        return replace(request, sealed={**request.sealed, sender: forged})

    refuses(federation, on(Mask, change), "was not sealed by it for . and this roster")


@pytest.mark.parametrize("about", ["seed", "key"])
def test_shares_that_are_not_those_told_to_the_aggregator_are_refused(about, monkeypatch):
    """By d, which would later be able to have the others blamed for them."""
    lied = set()

    def commitment(kind, sid, site, holder, share):
        first = (kind, holder) not in lied  # as d deals; then its holder looks
        if site == "d" != holder and kind == about and first:
            lied.add((kind, holder))
            return bytes(SHARE_COMMITMENT_BYTES)
        return share_commitment(kind, sid, site, holder, share)

    monkeypatch.setattr(client.msg, "share_commitment", commitment)
    why = r"d's shares for [abc] are not those that it told the aggregator"
    refuses(Federation(4), honestly, why, "abc")
    assert len(lied) == 3


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (lambda r: {"sealed": {}}, "shares came from others than this site's peers"),
        (
            lambda r: {"sealed": {**r.sealed, "z": next(iter(r.sealed.values()))}},
            "shares came from others than this site's peers",
        ),
        (lambda r: {"sites": r.sites[:3]}, "has 3 sites: 4 are the least|is without this site"),
        (lambda r: {"sites": (*r.sites, "z")}, "1 sites that were not there before"),
    ],
)
def test_a_list_of_dealers_that_is_not_what_it_was_is_refused(changes, why):
    federation = Federation(5)
    refuses(federation, on(Mask, lambda site, request: replace(request, **changes(request))), why)
    assert not any(member.answers(Masked) for member in federation.members.values())


def test_a_site_that_is_not_among_the_dealers_does_not_mask():
    """The others would take its vector, and none of its masks."""
    federation = Federation(5)

    def change(site, request):
        return replace(request, sites=tuple(s for s in request.sites if s != site))

    refuses(federation, on(Mask, change), "the list of those who dealt shares is without this site")


# --- Terms


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"threshold": 1}, r"threshold = 1 of 5 sites is asked for: 4 is the least here"),
        ({"threshold": 3}, r"threshold = 3 of 5 sites"),
        ({"threshold": 6}, r"threshold = 6 of 5 sites"),
        ({"quorum": 2}, r"quorum = 2 of 5 sites"),
        ({"degree": 2}, r"degree = 2 is asked for, and this site has 0"),
        ({"ring_bits": 16}, r"ring_bits = 16 is asked for, and this site has 32"),
        ({"value_bits": 4}, r"value_bits = 4 is asked for, and this site has 16"),
        ({"value_bits": 30}, r"value_bits = 30"),
        ({"clip": 1e-9}, r"clip = 1e-09"),
        ({"max_weight": 1e9}, r"max_weight = 1000000000.0"),
        ({"length": 4}, r"length = 4"),
        ({"privacy": "none"}, r"privacy = 'none' is asked for, and this site has ''"),
        ({"federation": "isle"}, r"federation = 'isle'"),
        ({"run": "lung"}, r"run = 'lung'"),
        ({"round": 2}, r"round 4 is asked for, under terms for round 3"),
        ({"nonce": b"short"}, r"a nonce of 5 bytes: 16 are needed"),
    ],
)
def test_terms_that_protect_less_than_the_sites_own_are_refused(changes, why):
    federation = Federation(5)

    def change(site, request):
        return replace(request, terms=replace(request.terms, **changes))

    refuses(federation, on(Advertise, change), why)
    assert not any(member.answers(Keys) for member in federation.members.values())


def test_a_cohort_of_two_is_refused():
    federation = Federation(2)
    refuses(federation, honestly, "a cohort of 2 sites: this site sums with 3")


def test_a_sum_over_fewer_than_a_sites_own_least_is_refused_at_every_step():
    """More than two thirds of the cohort, and still too few for these sites."""
    federation = Federation(5, min_sites=5)
    fewer = replace(federation.terms, quorum=4)
    refuses(
        federation,
        on(Advertise, lambda site, request: replace(request, terms=fewer)),
        "quorum = 4 of 5 sites is asked for: 5 is the least here",
    )
    for lost in ("Share", "Mask", "Agree"):
        federation = Federation(5, min_sites=5)
        with pytest.raises(Unfinished, match="4, and 5 are needed"):
            federation.sum(losing({"e": lost}))
        assert not any(member.answers(Unmasked) for member in federation.members.values())


def test_a_site_with_anothers_certificate_takes_part_in_nothing():
    federation = Federation(3)
    a, b = federation.members["a"], federation.members["b"]
    a.certificate, a.sign = b.certificate, b.sign
    a.start("with b's certificate")
    cohort = {**federation.terms.cohort, "a": federation.terms.cohort["b"]}
    federation.terms = replace(federation.terms, cohort=cohort)
    refuses(federation, honestly, "the cohort does not have this site with its present key", "a")


def test_a_cohort_with_another_certificate_for_this_site_is_refused():
    federation = Federation(3)

    def change(site, request):
        cohort = {**request.terms.cohort, site: bytes(32)}
        return replace(request, terms=replace(request.terms, cohort=cohort))

    refuses(federation, on(Advertise, change), "the cohort does not have this site with its present key")


def test_a_cohort_of_hundreds_in_the_sparsest_graph_is_refused():
    federation = Federation(110)
    own = federation.terms.degree
    changed = replace(federation.terms, degree=own - 2)
    for policy_of, terms, why in (
        ("a", changed, f"degree = {own - 2} is asked for, and this site has {own}"),
        ("b", replace(federation.terms, threshold=own // 2), "is the least here"),
    ):
        member = federation.members["s000"]
        member.start(policy_of)
        offer = Advertise(id=policy_of, round=terms.round, weights=NO_WEIGHTS, terms=terms)
        assert re.search(why, member(offer).reason)


def test_every_term_is_in_the_sessions_id_and_the_id_in_every_key():
    terms = Federation(3).terms
    changed = {
        "federation": "isle", "run": "lung", "round": 4, "attempt": 1, "nonce": bytes(16), "quorum": 2,
        "threshold": 2, "degree": 2, "ring_bits": 64, "value_bits": 8, "clip": 2.0, "max_weight": 9.0,
        "length": 6, "privacy": "noise", "verify": True, "cohort": {**terms.cohort, "c": bytes(32)},
    }  # fmt: skip
    assert changed.keys() == set(terms.__struct_fields__)
    sids = {replace(terms, **{field: value}).sid(MODEL) for field, value in changed.items()}
    sids |= {terms.sid(MODEL), terms.sid(bytes(32))}
    assert len(sids) == len(changed) + 2
    keys = {
        key
        for sid in sids
        for key in (
            session_keys.self_mask_key(bytes(32), sid, "a"), session_keys.self_mask_key(bytes(32), sid, "b"),
            pair_mask_key(bytes(32), sid, "a", "b"), pair_mask_key(bytes(32), sid, "a", "c"),
            session_keys.seal(bytes(32), sid, "a", "b", b"", b""),
            session_keys.seal(bytes(32), sid, "b", "a", b"", b""),
        )
    }  # fmt: skip
    assert len(keys) == 6 * len(sids)


def test_a_session_of_changed_terms_is_another_session():
    """Mid-session the aggregator says that it is about something else."""
    federation = Federation(5)

    def bend(site, request):
        if isinstance(request, Mask | Agree | Unmask):
            return replace(request, sid=replace(federation.terms, clip=9.0).sid(MODEL))
        return request

    refuses(federation, bend, "is in no such session")


def test_sites_with_different_models_refuse_each_others_keys():
    federation = Federation(4)
    federation.members["d"].model = bytes(32)
    refuses(federation, honestly, "a signature is not by its key", "abc")


def test_masks_for_different_models_do_not_cancel():
    """Whatever else might go wrong: what two sites add for each other depends on the model that each has."""
    one, other = KeyPair(stream(1)(32)), KeyPair(stream(2)(32))
    shared, terms = one.agree(other.public), Federation(3).terms
    vector = np.zeros(1000, np.uint32)
    add_masks(vector, [(pair_mask_key(shared, terms.sid(MODEL), "a", "b"), 1)])
    add_masks(vector, [(pair_mask_key(shared, terms.sid(bytes(32)), "b", "a"), -1)])
    assert np.count_nonzero(vector) > 990


# --- Replays and order


def test_a_session_is_not_had_twice():
    federation = Federation(3)
    federation.sum()
    for member in federation.members.values():
        again = Advertise(id="other", round=3, weights=NO_WEIGHTS, terms=federation.terms)
        assert "this session was had before" in member(again).reason


def test_a_session_of_a_sites_earlier_life_is_of_no_use():
    """All sites were restarted; the aggregator starts the same session and replays what it kept."""
    federation, kept = Federation(3), {}

    def record(site, request):
        kept[site, type(request)] = request
        return request

    federation.sum(record)
    for member in federation.members.values():
        member.start("another life")

    def replay(site, request):
        return kept[site, type(request)]

    refuses(federation, replay, "the roster has another key for this site than it sent")


def test_signatures_of_an_earlier_life_count_for_nothing_in_the_same_session():
    """The same nonce again, and fresh keys: what sites signed then is not about these keys."""
    federation, kept = Federation(3), {}

    def record(site, request):
        if isinstance(request, Unmask):
            kept[site] = request.signatures
        return request

    federation.sum(record)
    for member in federation.members.values():
        member.start("another life")

    def bend(site, request):
        return replace(request, signatures=kept[site]) if isinstance(request, Unmask) else request

    refuses(federation, bend, "a signature is not by its key")


@pytest.mark.parametrize("of", ["another attempt", "an earlier round", "another run"])
@pytest.mark.parametrize("what", ["keys", "a sealed share", "votes"])
def test_what_sites_signed_and_sealed_for_another_session_is_refused(of, what):
    federation = Federation(5)
    changes = {"another attempt": {}, "an earlier round": {"round": 2}, "another run": {"run": "lung"}}[of]
    for member in federation.members.values():
        member.client.policy = replace_policy(federation.policy, run=changes.get("run", "heart"))
    federation.again(**changes)
    with pytest.raises(Unfinished):
        federation.sum(losing(dict.fromkeys("cde", "Unmask")))  # so that they may sum again
    for member in federation.members.values():
        member.client.policy, member.client.opened = federation.policy, NEVER
    federation.again(round=3, run="heart")

    def bend(site, request):
        other = "a" if site != "a" else "b"
        old = federation.members[other]
        if isinstance(request, Share) and what == "keys":
            return replace(request, roster={**request.roster, other: old.answers(Keys)[0]})
        if isinstance(request, Mask) and what == "a sealed share":
            return replace(request, sealed={**request.sealed, other: old.answers(Shares)[0].sealed[site]})
        if isinstance(request, Unmask) and what == "votes":
            votes = {s: federation.members[s].answers(Agreed)[0].signature for s in request.signatures}
            return replace(request, signatures=votes)
        return request

    before = {site: len(member.answers(Unmasked)) for site, member in federation.members.items()}
    with pytest.raises(RoundError):
        federation.sum(bend)
    why = "was not sealed by it for . and this roster" if "share" in what else "a signature is not by its key"
    for site, member in federation.members.items():
        assert re.search(why, member.refused), member.refused
        assert len(member.answers(Unmasked)) == before[site]


def test_one_id_for_several_steps_gets_an_answer_to_each():
    federation = Federation(3)
    found = federation.sum(lambda site, request: replace(request, id="the same"))
    assert np.array_equal(found.vector, federation.plain("abc"))
    again = Advertise(id="the same", round=3, weights=NO_WEIGHTS, terms=federation.terms)
    assert "this session was had before" in federation.members["a"](again).reason


@pytest.mark.parametrize("early", [Mask, Agree, Unmask])
def test_a_step_before_its_time_ends_the_session(early):
    federation = Federation(3)
    sid = federation.terms.sid(MODEL)
    out_of_turn = {
        Mask: Mask(id="early", sid=sid, sites=(), sealed={}),
        Agree: Agree(id="early", sid=sid, sites=tuple("abc")),
        Unmask: Unmask(id="early", sid=sid, signatures={}),
    }
    bend = on(Share, lambda site, request: out_of_turn[early])
    refuses(federation, bend, f"{early.__name__} was asked when Share was due")


# --- One sum of an update


def test_an_update_that_was_unmasked_goes_into_no_sum_over_other_sites():
    """Or the difference of the two sums would be e's update."""
    federation = Federation(5)
    federation.sum()
    federation.again()
    with pytest.raises(Unfinished):
        federation.sum(losing({"e": "Mask"}))
    for site in "abcd":
        assert "one over others would give away what differs" in federation.members[site].refused
    assert [len(member.answers(Unmasked)) for member in federation.members.values()] == [1, 1, 1, 1, 0]


def test_an_update_that_was_unmasked_is_summed_over_the_same_sites_again():
    """As after a crash of the aggregator, before it committed."""
    federation = Federation(5)
    first = federation.sum(losing({"e": "Mask"}))
    federation.again()
    second = federation.sum(losing({"e": "Mask"}))
    assert np.array_equal(first.vector, second.vector)


def test_an_earlier_round_is_not_summed_again():
    federation = Federation(3)
    federation.sum()
    federation.again(round=2)
    for member in federation.members.values():
        offer = Advertise(id="back", round=2, weights=NO_WEIGHTS, terms=federation.terms)
        assert "round 3 after a sum of round 4 over 3 sites was unmasked here" in member(offer).reason


def test_the_next_round_is_summed_over_whoever_is_there():
    federation = Federation(5)
    federation.sum()
    federation.again(round=4)
    assert federation.sum(losing({"e": "Mask"})).sites == tuple("abcd")


# --- Anything else


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_requests_with_any_byte_changed_give_the_sum_or_none(data):
    """What decodes is answered or refused; a site never fails in another way, and a sum is never wrong."""
    federation = Federation(3)
    kind = data.draw(st.sampled_from([Share, Mask, Agree, Unmask]))

    def change(site, request):
        body = bytearray(encode(request))
        body[data.draw(st.integers(0, len(body) - 1))] ^= data.draw(st.integers(1, 255))
        try:
            return decode(bytes(body), Share | Mask | Agree | Unmask)
        except WireError:
            return None

    try:
        found = federation.sum(
            on(kind, lambda site, request: change(site, request) if site == "b" else request)
        )
    except RoundError:
        return
    assert np.array_equal(found.vector, federation.plain("abc"))


# --- Sparse graphs


def sparse():
    return Federation(110, full_graph=100, corrupt=0.1, dropout=0.1)


def test_a_site_with_too_few_neighbours_left_does_not_mask(monkeypatch):
    """The cohort as a whole is large enough; only this site would stand nearly alone."""
    monkeypatch.setattr(server, "leave_out_lonely", lambda *anything: None)
    federation = Federation(90, full_graph=0, corrupt=0.0, dropout=0.2)
    terms, member = federation.terms, federation.members["s000"]
    cut = terms.degree - terms.threshold + 1
    assert 90 - cut >= terms.quorum

    def change(site, request):
        if site != "s000":
            return None  # what the others do does not matter here
        gone = sorted(request.sealed)[:cut]
        left = tuple(s for s in request.sites if s not in gone)
        sealed = {s: text for s, text in request.sealed.items() if s not in gone}
        return replace(request, sites=left, sealed=sealed)

    with pytest.raises(Unfinished):
        federation.sum(on(Mask, change))
    assert f"{terms.threshold - 1} of the {terms.degree} holders of this site's shares" in member.refused
    assert not member.answers(Masked)


def test_every_sites_keys_decide_on_the_graph():
    """Or the aggregator could choose who is whose neighbour."""
    federation, seen = sparse(), {}

    def record(site, request):
        seen[site] = request
        return request

    with suppress(RoundError):
        federation.sum(lambda site, request: record(site, request) if isinstance(request, Share) else
                       request if isinstance(request, Advertise) else None)  # fmt: skip
    lines, sid = seen["s000"].lines, federation.terms.sid(MODEL)
    graphs = {
        peers_of("s000", tuple(sorted(lines)), federation.terms.degree, graph_seed(sid, changed))
        for changed in (lines, *({**lines, site: bytes(32)} for site in sorted(lines)))
    }
    assert len(graphs) == len(lines) + 1


def test_a_list_of_survivors_that_leaves_a_site_too_few_neighbours_is_not_signed():
    """The cohort as a whole is large enough; this site's masks are with those who are called lost."""
    federation = Federation(90, full_graph=0, corrupt=0.0, dropout=0.2)
    terms, member, peers = federation.terms, federation.members["s000"], []
    cut = terms.degree - terms.threshold + 1
    assert 90 - cut >= terms.quorum

    def change(site, request):
        if isinstance(request, Share) and site == "s000":
            peers.extend(s for s in request.roster if s != site)
        if isinstance(request, Agree):
            return replace(request, sites=tuple(s for s in request.sites if s not in peers[:cut]))
        return request

    with pytest.raises(RoundError):
        federation.sum(change)
    assert f"{terms.threshold - 1} of the {terms.degree} holders of this site's shares" in member.refused
    assert not member.answers(Agreed)


@pytest.mark.parametrize(
    ("lie", "why"),
    [
        ("fewer neighbours", "not of this site and its peers"),
        ("more neighbours", "not of this site and its peers"),
        ("other lines for each site", "not of this site and its peers|was not sealed by it"),
        ("another line for a neighbour", "the roster has other keys for 1 sites than its lines say"),
        ("no line for this site", "the roster has other keys for 1 sites than its lines say"),
    ],
)
def test_a_roster_of_hundreds_is_the_same_for_all(lie, why):
    federation = sparse()

    def change(site, request):
        roster, lines = dict(request.roster), dict(request.lines)
        peer = next(s for s in roster if s != site)
        stranger = next(s for s in lines if s not in roster)
        if lie == "fewer neighbours":
            del roster[peer]
        elif lie == "more neighbours":
            (roster[stranger],) = federation.members[stranger].answers(Keys)
        elif lie == "other lines for each site":
            lines[stranger] = site.encode().ljust(32)
        elif lie == "another line for a neighbour":
            lines[peer] = bytes(32)
        else:
            del lines[site]
        return replace(request, roster=roster, lines=lines)

    refuses(federation, on(Share, change), why)
