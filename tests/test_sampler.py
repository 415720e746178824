"""Every example once an epoch, in the batches of one process, whatever the world does meanwhile."""

import itertools
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtrain.config import TrainConfig
from fedtrain.errors import ConfigError
from fedtrain.training.engine import steps_in_round
from fedtrain.training.examples import examples_of
from fedtrain.training.sampler import Draws, Sampler, in_order, share_of

sizes = st.fixed_dictionaries(
    {
        "count": st.integers(1, 60),
        "batch": st.integers(0, 17),
        "accumulate": st.integers(1, 3),
        "drop_last": st.booleans(),
        "seed": st.integers(0, 2**62),
    }
)


def world(ranks, sizes, state=None):
    samplers = [Sampler(**sizes, rank=r, ranks=ranks) for r in range(ranks)]
    for sampler in samplers:
        if state is not None:
            sampler.load_state_dict(state)
    return samplers


def take(samplers):
    """One step of a whole world: each batch's examples, ranks in order."""
    shares = [s.take() for s in samplers]
    batches = []
    for parts in zip(*shares, strict=True):
        totals = {p.total for p in parts}
        assert totals == {sum(len(p.mine) for p in parts)}
        assert max(len(p.mine) for p in parts) - min(len(p.mine) for p in parts) <= 1
        batches.append(torch.cat([p.mine for p in parts]).tolist())
    return batches


@settings(deadline=None)
@given(sizes, st.lists(st.tuples(st.integers(1, 5), st.integers(1, 3)), min_size=1, max_size=8))
def test_any_succession_of_worlds_takes_the_batches_of_one_process(sizes, worlds):
    (alone,), state = world(1, sizes), None
    for ranks, steps in worlds:
        samplers = world(ranks, sizes, state)
        for _ in range(steps):
            assert take(samplers) == take([alone])
        state = samplers[-1].state_dict()
        assert all(s.state_dict() == state for s in samplers)


def test_two_ranks_then_three_then_one_skip_nothing_and_see_nothing_twice():
    sizes, seen, state = {"count": 101, "batch": 8, "seed": 3}, [], None
    for ranks, steps in ((2, 4), (3, 5), (1, 4)):
        samplers = world(ranks, sizes, state)
        for _ in range(steps):
            seen += [i for batch in take(samplers) for i in batch]
        state = samplers[0].state_dict()
    assert state == {"epoch": 1, "taken": 0, "count": 101}
    assert sorted(seen) == list(range(101))


@settings(deadline=None)
@given(sizes, st.integers(1, 4))
def test_an_epoch_is_a_permutation_in_as_many_steps_as_schedules_count(sizes, ranks):
    samplers, seen = world(ranks, sizes), []
    train = TrainConfig(
        batch_size=sizes["batch"], accumulate=sizes["accumulate"], drop_last=sizes["drop_last"]
    )
    for _ in range(steps_in_round(train, examples_of(torch.zeros(sizes["count"])))):
        assert samplers[0].epoch == 0
        seen += [i for batch in take(samplers) for i in batch]
    assert samplers[0].epoch == 1
    assert len(set(seen)) == len(seen) == samplers[0].usable
    if not sizes["drop_last"]:
        assert sorted(seen) == list(range(sizes["count"]))


@settings(deadline=None)
@given(sizes)
def test_drop_last_gives_full_batches_but_never_nothing(sizes):
    (sampler,) = world(1, sizes | {"drop_last": True})
    full = sizes["batch"] or sizes["count"]
    totals = [share.total for share in sampler.rest()]
    assert totals
    assert set(totals) == {min(full, sizes["count"])}


@settings(deadline=None)
@given(sizes, st.integers(0, 5))
def test_what_is_read_ahead_is_what_is_taken(sizes, steps):
    (sampler,) = world(1, sizes)
    for _ in range(steps):
        sampler.take()
    ahead = [(s.mine.tolist(), s.total) for s in sampler.rest()]
    epoch, taken = sampler.epoch, []
    while sampler.epoch == epoch:
        taken += [(s.mine.tolist(), s.total) for s in sampler.take()]
    assert ahead == taken


def test_epochs_and_seeds_have_orders_of_their_own():
    a, b = Sampler(50, 10, seed=1), Sampler(50, 10, seed=2)
    first = a.order().tolist()
    assert first != b.order().tolist()
    a.epoch = 1
    assert a.order().tolist() != first
    a.epoch = 0
    assert a.order().tolist() == first


def test_an_order_of_ones_own_is_kept_to():
    sampler = Sampler(5, 2, seed=0, order=in_order(5))
    assert [s.mine.tolist() for s in sampler.rest()] == [[0, 1], [2, 3], [4]]


def test_a_place_in_other_data_is_refused_with_both_numbers():
    with pytest.raises(ConfigError, match="has 9 examples, 8 when"):
        Sampler(9, 2, seed=0).load_state_dict({"epoch": 0, "taken": 4, "count": 8})


def test_no_data_is_an_error():
    with pytest.raises(ConfigError, match="no examples"):
        Sampler(0, 2, seed=0)


@settings(deadline=None)
@given(st.integers(0, 100), st.integers(1, 9))
def test_shares_are_adjacent_and_cover_all(total, ranks):
    ends = [share_of(total, r, ranks) for r in range(ranks)]
    assert ends[0][0] == 0
    assert ends[-1][1] == total
    assert all(a[1] == b[0] for a, b in itertools.pairwise(ends))


def test_what_is_drawn_under_a_seed_changes_no_other_draw():
    def draw():
        return torch.rand(1).item(), np.random.rand(), random.random()

    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(5)
    state = torch.get_rng_state(), np.random.get_state(), random.getstate()
    plain = draw()
    torch.set_rng_state(state[0])
    np.random.set_state(state[1])
    random.setstate(state[2])
    with Draws(9):
        inside = draw()
    assert draw() == plain
    with Draws(9):
        assert draw() == inside
