"""The one model at the end of a run of peers, where one of them is hostile."""

import pytest
import torch

from fedtrain.runtime.peers.consensus import ENDED
from fedtrain.runtime.peers.parcels import share_of_model, trained_part
from fedtrain.runtime.peers.whole_models import sha256

from ..limits import bounded
from ..test_consensus import ROUNDS, digests, ended, with_rule
from ..test_gossip_peers import PLAIN, arena


@pytest.mark.parametrize(
    "rule", ["median", "trimmed_mean:f=1", "krum:f=1", "self_clip:f=1", "balance", "centered_clip"]
)
def test_with_a_rule_a_hostile_peer_moves_the_last_model_no_further_than_honest_ones_say(rule):
    def hostile(peer):
        if peer.name == "4":
            trained_part(peer.model).fill_(1e6)

    rule = "centered_clip:start=zero" if rule == "centered_clip" else rule
    peers, found = bounded(ended(with_rule(rule), 8, "regular:4", touch=hostile))
    assert len(digests(found)) == 1
    honest = torch.stack([trained_part(p.model) for name, p in peers.items() if name != "4"])
    got, spread = trained_part(found["0"].model), (honest.max(0).values - honest.min(0).values).norm()
    assert float((got - honest.mean(0)).norm()) <= 2 * float(spread) + 1e-9
    assert trained_part(with_mean(hostile)).max() > 1e5  # the mean has no such bound


def with_mean(touch):
    _, found = bounded(ended(with_rule("mean"), 8, "regular:4", touch=touch))
    return found["0"].model


def test_with_a_rule_a_peer_that_shows_each_another_model_can_not_give_anybody_one_of_its_choice():
    def two_faced(peer):
        if peer.name != "4":
            return
        exchange = peer.neighbors.exchange

        async def lie(number, shares, *rest):
            lies = {}
            for i, (taker, share) in enumerate(shares.items()):
                data = torch.frombuffer(bytearray(share.payload), dtype=torch.uint8).clone()
                if len(data) == 400:  # a model of 50 float64
                    data.view(torch.float64).fill_(1e3 * (1 if i % 2 else -1))
                lies[taker] = type(share)(
                    memoryview(data.numpy().data), share.weight, share.degree, note=share.note
                )
            return await exchange(number, lies, *rest)

        peer.neighbors.exchange = lie

    peers, found = bounded(ended(with_rule("median"), 8, "regular:4", touch=two_faced))
    honest = torch.stack([trained_part(p.model) for name, p in peers.items() if name != "4"])
    for name in set(found) - {"4"}:
        if found[name] is not None:
            got = trained_part(found[name].model)
            assert bool((got <= honest.max(0).values).all() & (got >= honest.min(0).values).all())


def test_with_a_rule_one_peer_that_says_to_be_done_is_not_believed():
    def liar(peer):
        if peer.name == "4":
            model = arena(PLAIN, 500)
            peer.neighbors.publish(ROUNDS + ENDED, share_of_model(model))
            peer.neighbors.announce(ROUNDS + ENDED)

    _, found = bounded(ended(with_rule("median"), 6, "complete", touch=liar))
    assert found["0"].digest != sha256(arena(PLAIN, 500))
