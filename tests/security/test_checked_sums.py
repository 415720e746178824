"""Sites find out when the aggregator shows them what is not the sum of what they sent."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from fedtrain.errors import Unfinished
from fedtrain.secagg.checksum import Checksums
from fedtrain.secagg.messages import Keys, Mask, Masked, SealedShares, Share, Shares
from tests.secure import STEPS, Federation, losing


def fits(federation, site, vector):
    """Whether a site takes what it is shown for the sum of its last session."""
    owed, point = federation.members[site].owed[-1], federation.terms.fixed_point
    numel = federation.terms.numel(owed.names)
    return Checksums(owed.seed, point).fits(vector[:numel], vector[numel:], owed.sites)


@settings(max_examples=25, deadline=None)
@given(data=st.data(), n=st.integers(3, 12), ring=st.sampled_from([(16, 8), (32, 16), (64, 43)]))
def test_s13_a_checked_sum_survives_the_dropouts_that_any_sum_survives(data, n, ring):
    federation = Federation(n, ring_bits=ring[0], value_bits=ring[1], seed=n, verify=True)
    names = sorted(federation.members)
    drops = data.draw(st.dictionaries(st.sampled_from(names), st.sampled_from(STEPS), max_size=n // 3))
    try:
        found = federation.sum(losing(drops))
    except Unfinished:
        return
    numel = federation.terms.numel(found.names)
    assert np.array_equal(found.vector[:numel], federation.plain(found.sites))
    for site in set(found.sites) - {site for site, step in drops.items() if step == "Agree"}:
        assert federation.members[site].owed[-1].sites == found.sites
        assert fits(federation, site, found.vector)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), ring=st.sampled_from([(16, 8), (32, 16), (64, 43)]))
def test_an_aggregator_that_alters_the_sum_anywhere_is_found_out_by_every_site(data, ring):
    federation = Federation(4, ring_bits=ring[0], value_bits=ring[1], verify=True)
    vector = federation.sum(losing({"d": "Mask"})).vector
    at = data.draw(st.integers(0, federation.terms.numel(("loss",)) - 1))
    vector[at : at + 1] += vector.dtype.type(data.draw(st.integers(1, (1 << ring[0]) - 1)))
    assert not any(fits(federation, site, vector) for site in "abc")


def test_an_aggregator_that_leaves_a_site_out_of_the_sum_that_all_signed_is_found_out():
    federation = Federation(5, verify=True)
    vector = federation.sum().vector
    for left_out in combinations("abcde", 1):
        rest = [site for site in "abcde" if site not in left_out]
        forged = vector.copy()
        forged[: len(federation.plain(rest))] = federation.plain(rest)
        assert not any(fits(federation, site, forged) for site in "abcde")


def test_a_sum_of_another_session_does_not_fit_though_it_is_of_the_same_updates():
    """Each session has a seed of its own: an old sum can't be shown again."""
    federation = Federation(5, verify=True)
    first = federation.sum().vector
    federation.again()
    second = federation.sum().vector
    numel = federation.terms.numel(("loss",))
    assert np.array_equal(first[:numel], second[:numel])
    assert fits(federation, "a", second)
    assert not fits(federation, "a", first)
    mixed = np.concatenate([second[:numel], first[numel:]])
    assert not fits(federation, "a", mixed)


def test_an_aggregator_that_tells_two_sites_of_different_dealers_can_show_a_sum_to_neither():
    """They draw different seeds, and the masks between them are left in the sum."""
    federation = Federation(5, verify=True)

    def bend(site, request):
        if not isinstance(request, Mask) or site != "a":
            return request
        without = tuple(other for other in request.sites if other != "e")
        return replace(request, sites=without, sealed={k: v for k, v in request.sealed.items() if k != "e"})

    vector = federation.sum(bend).vector
    assert "sites that were not there before" in federation.members["a"].refused
    assert not any(fits(federation, site, vector) for site in "bcde")


def test_the_aggregator_has_nothing_of_the_seed_but_ciphertexts():
    federation = Federation(3, verify=True)
    federation.sum()
    parts = {site: member.owed[-1].seed for site, member in federation.members.items()}
    assert len(set(parts.values())) == 1
    for member in federation.members.values():
        (shares,) = member.answers(Shares)
        assert {len(sealed.text) for sealed in shares.sealed.values()} == {0, 3 * 32 + 16}


def test_a_part_of_the_seed_of_another_size_is_blamed_on_its_site():
    federation = Federation(5, verify=True)

    def short(reply):
        if not isinstance(reply, Shares):
            return reply
        old = reply.sealed["a"]
        cut = SealedShares(old.text[:-32], old.seed, old.key)
        return replace(reply, sealed=reply.sealed | {"a": cut})

    federation.members["b"].lie = short
    found = federation.sum()
    assert found.sites == ("a", "c", "d", "e")
    assert "what came as shares has not their size" in found.blamed["b"]


def test_sites_that_check_refuse_a_session_without_checksums_and_one_on_a_sparse_graph():
    federation = Federation(4, verify=True)
    federation.again(verify=False)
    with pytest.raises(Unfinished, match="verify = False is asked for, and this site has True"):
        federation.sum()
    federation = Federation(90, full_graph=80, corrupt=0.0, dropout=0.2, verify=True)
    with pytest.raises(Unfinished, match=r"a sum over 90 sites can't be checked"):
        federation.sum()


# --- a site that was not in the last sum can't check it, and goes by those that were


@pytest.mark.parametrize(("sites", "checked"), [(5, "ab"), (3, "a"), (6, "ab")])
def test_who_could_not_check_the_model_takes_part_beside_a_third_who_did(sites, checked):
    federation = Federation(sites, verify=True)
    for site, member in federation.members.items():
        member.checked = site in checked
    federation.sum()


@pytest.mark.parametrize(("sites", "checked", "must"), [(5, "", 2), (5, "a", 2), (3, "", 1), (6, "a", 2)])
def test_nobody_takes_part_when_too_few_checked_the_model(sites, checked, must):
    federation = Federation(sites, verify=True)
    for site, member in federation.members.items():
        member.checked = site in checked
    with pytest.raises(Unfinished, match=f"of {sites} sites checked the sum that .* made of: {must} must"):
        federation.sum()
    assert not any(member.answers(Shares) for member in federation.members.values())
    assert not any(member.answers(Masked) for member in federation.members.values())


def test_the_aggregator_cannot_say_for_a_site_that_it_checked():
    federation = Federation(5, verify=True)
    for member in federation.members.values():
        member.checked = False

    def bend(site, request):
        if not isinstance(request, Share):
            return request
        said = {name: replace(keys, checked=True) for name, keys in request.roster.items() if name != site}
        return replace(request, roster=request.roster | said)

    with pytest.raises(Unfinished, match="a signature is not by its key"):
        federation.sum(bend)
    assert all(not keys.checked for m in federation.members.values() for keys in m.answers(Keys))
