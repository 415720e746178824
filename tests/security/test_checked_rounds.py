"""Real rounds whose next model the sites make of a sum that they check, and aggregators that lie about it."""

from dataclasses import replace as changed

import msgspec
import numpy as np
import pytest

from fedtrain.config import Config
from fedtrain.errors import ConfigError, ForgedSum
from fedtrain.runtime.sites.models import FILE, CheckedSums, SeenSums
from fedtrain.runtime.star import federated, secure_rounds
from fedtrain.runtime.star.combinations import check_strategy, keeps_state
from fedtrain.runtime.star.secure_terms import check_config, unverified, verifies
from fedtrain.runtime.star.secure_terms import policy as policy_of
from fedtrain.secagg import messages
from fedtrain.secagg.client import Client, Owed
from fedtrain.store import RunStore
from fedtrain.store.disk import read_sealed
from fedtrain.strategies import STRATEGIES, Strategy, build
from fedtrain.transport.endpoints import RemoteCohort
from tests.inprocess import Events, federation, final, simulated, with_port
from tests.test_blame import Spoils
from tests.wards import WARDS

SITES = ["a", "b", "c"]


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ward_task.py").write_text(WARDS)
    table = {
        "run": {"name": "r", "rounds": 3, "seed": 4, "task": "ward_task:Wards"},
        "train": {"lr": 0.3},
        "secagg": {"verify": True},
        "simulate": {"workers": 0},
    }
    return Config.of(with_port(table), tmp_path)


def lying(config):
    """A run whose aggregator lies: what the sites were told, and the first site's error."""
    logs = {site: Events() for site in SITES}
    with pytest.raises(ExceptionGroup) as error:
        federation(config, SITES, logs=logs)
    found = [e for e in error.value.exceptions if isinstance(e, ForgedSum)]
    assert found, error.value.exceptions
    told = [event for log in logs.values() for event in log.of("sum_forged")]
    assert "aggregator" in told[0]["aggregator"]
    return logs, told, found[0]


def state(config, site):
    return msgspec.to_builtins(read_sealed(config.site_dir(site) / FILE, SeenSums))


def test_honest_rounds_have_the_bits_of_the_simulation_and_each_site_made_each_model_itself(
    config, monkeypatch
):
    """A small sum comes with the request that names it: only the first model is fetched."""
    logs, fetched = {site: Events() for site in SITES}, []
    download = RemoteCohort._download

    async def noted(cohort, *call):
        fetched.append(call)
        await download(cohort, *call)

    monkeypatch.setattr(RemoteCohort, "_download", noted)
    federation(config, SITES, logs=logs)
    assert len(fetched) == len(SITES)
    simulated(config, monkeypatch)
    assert final(config.run_dir).load().data.equal(final(config.simulate_dir).load().data)
    for site in SITES:
        assert sorted(state(config, site)["checked"].values()) == [1, 2, 3]
        assert not [e for e in logs[site].of("notice") if "could not check" in e["text"]]


@pytest.mark.parametrize("coordinate", [0, 3, -6, -1])
def test_a_sum_with_one_altered_number_stops_each_site_that_is_shown_it(config, monkeypatch, coordinate):
    """Of the model, of the weights and metrics, or of the checksum itself."""
    shown = messages.shown

    def altered(sid, total):
        total = total.copy()
        total[coordinate] ^= 1
        return shown(sid, total)

    monkeypatch.setattr(secure_rounds.msg, "shown", altered)
    logs, told, error = lying(config)
    assert told[0]["round"] == 1
    assert "does not fit the sites' checksums" in str(error)
    assert "round 1" in str(error)
    for log in logs.values():  # nobody trained on it, or evaluated it
        assert not [e for e in log.of("site_state") if e["round"] == 1 and e["state"] == "evaluating"]


def test_a_model_that_is_not_what_the_sum_makes_stops_the_sites(config, monkeypatch):
    """The sum is right, and the aggregator moves the model by something else."""
    step = federated.server_step

    def forged(*args, **known):
        weights, after = step(*args, **known)
        next(iter(weights.trained().values()))[0] += 1e-6
        weights.changed()
        return weights, after

    monkeypatch.setattr(federated, "server_step", forged)
    _, told, error = lying(config)
    assert told[0]["round"] == 1
    assert "the model that it names is not what the sum makes" in str(error)


def test_a_sum_of_another_size_stops_the_sites(config, monkeypatch):
    shown = messages.shown
    monkeypatch.setattr(
        secure_rounds.msg, "shown", lambda sid, total: shown(sid, np.append(total, total[:1]))
    )
    _, _, error = lying(config)
    assert "shows a sum that is not what its sites sent: it is " in str(error)


@pytest.mark.parametrize("how", ["withheld", "of another session"])
def test_an_aggregator_that_shows_no_sum_gets_no_further_update(config, monkeypatch, how):
    """Each site says that it could not check the model, and none takes part where too few could."""
    if how == "withheld":
        monkeypatch.setattr(RunStore, "patches", lambda store, number: ())
    else:
        shown = messages.shown
        monkeypatch.setattr(secure_rounds.msg, "shown", lambda sid, total: shown(bytes(32), total))
    config = changed(config, strategy=changed(config.strategy, attempts=1))
    logs = {site: Events() for site in SITES}
    with pytest.raises(ExceptionGroup) as error:
        federation(config, SITES, logs=logs)
    assert "0 of 3 sites checked the sum that this model was made of: 1 must" in repr(error.value.exceptions)
    for log in logs.values():
        assert any("could not check what the model was made of" in e["text"] for e in log.of("notice"))
    store = RunStore(config.run_dir, read_only=True)
    assert len(store.rounds()) == 2  # the initial model, and the one that nobody could check
    store.close()


# --- a site that spoils sums

SIX = [*"abcdef"]


@pytest.fixture
def six(config, monkeypatch):
    """Rounds of all six sites, by default settings, of which one sends noise into each sum of updates."""
    begin, members = Client.begin, RemoteCohort.members

    def hostile(self, request, model, own, *rest):
        bad = self.site == "b" and isinstance(request, messages.Advertise)
        return begin(self, request, model, Spoils(own, "noise") if bad else own, *rest)

    all_of = lambda cohort, need: members(cohort, need and len(SIX))
    monkeypatch.setattr(Client, "begin", hostile)
    monkeypatch.setattr(RemoteCohort, "members", all_of)
    strategy, secagg = changed(config.strategy, min_sites=3), changed(config.secagg, verify="auto")
    return changed(config, strategy=strategy, secagg=secagg, run=changed(config.run, rounds=6))


@pytest.mark.slow(4)
def test_a_site_that_spoils_sums_is_found_and_the_others_check_each_model(six):
    """Before, the run ended with the first such sum."""
    logs = {site: Events() for site in SIX}
    told = federation(six, SIX, logs=logs)
    assert [e["site"] for e in told.of("update_refused")] == ["b"]
    inside = [e["sites"] for e in told.of("round_committed")]
    assert inside[:2] == [0, 3], "a spoiled sum, then one of two halves moves the model"
    assert inside[-1] == 5, "the last round is over all others"
    assert not [e for log in logs.values() for e in log.of("sum_forged")]
    assert {state(six, site)["unmoved"] for site in SIX} == {1}


def test_the_model_stays_but_for_a_bit_in_three_rounds_of_a_run_alone(tmp_path):
    """In each the aggregator has another sum of almost the same model."""
    sums = CheckedSums(tmp_path, Events())
    assert sums.has_checked(0, b"0")
    for number in range(1, 4):
        before = lambda number=number: b"%d" % (number - 1)
        for _ in range(2):
            assert sums.has_checked(number, b"%d" % number, before)
    sums = CheckedSums(tmp_path, Events())
    assert not sums.has_checked(4, b"4", lambda: b"3")


def test_a_model_but_for_a_bit_is_checked_where_that_of_the_round_before_was(tmp_path):
    sums = CheckedSums(tmp_path, Events())
    assert sums.has_checked(0, b"0")
    assert not sums.has_checked(1, b"1", lambda: b"another")
    assert not sums.has_checked(2, b"2", lambda: b"0"), "of two rounds ago"
    assert sums.has_checked(1, b"1", lambda: b"0")


# --- what a site remembers


def test_what_a_site_has_to_check_outlives_its_process(tmp_path):
    owed = Owed(bytes(32), 4, bytes(range(32)), 3, ("a", "b", "c"), ("loss",))
    CheckedSums(tmp_path, Events()).owe(owed)
    again = CheckedSums(tmp_path, Events())
    assert again.known.owed == owed
    again.made(b"model", 5)
    assert CheckedSums(tmp_path, Events()).has_checked(5, b"model")


def test_a_model_counts_as_checked_for_its_round_alone_and_by_what_binds_to_it(tmp_path):
    sums = CheckedSums(tmp_path, Events())
    assert sums.has_checked(0, b"0")
    assert not sums.has_checked(1, b"model")
    sums.made(b"model", 1)
    assert not sums.has_checked(3, b"model")
    assert sums.has_checked(1, b"model")
    assert not sums.has_checked(1, b"other")


@pytest.mark.parametrize("damage", [b"", b"{", b"\xff\xfe", b'{"owed": 3}'])
def test_a_site_whose_memory_of_sums_is_damaged_has_checked_nothing(tmp_path, damage):
    (tmp_path / FILE).write_bytes(damage)
    assert not CheckedSums(tmp_path, Events()).has_checked(1, b"model")


# --- what it doesn't go with


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [("secagg", "groups", 2), ("compression", "down", "quantize:8"), ("strategy", "fraction", 0.5)],
)
def test_settings_under_which_sites_could_not_make_the_model_are_refused(config, section, key, value):
    own = changed(getattr(config, section), **{key: value})
    config = changed(config, **{section: own})
    config = changed(config, strategy=changed(config.strategy, min_sites=6))
    with pytest.raises(ConfigError, match=rf"secagg.verify: {section}.{key} = .*; it would have to be"):
        check_config(config)


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("secagg", "groups", 2),
        ("compression", "down", "quantize:8"),
        ("strategy", "fraction", 0.5),
        ("strategy", "kind", "fedadam"),
        ("strategy", "kind", "own:Mine"),
    ],
)
def test_by_default_checks_are_off_with_the_reason_where_sites_can_not_check(config, section, key, value):
    config = changed(config, secagg=changed(config.secagg, verify="auto"))
    assert (verifies(config), unverified(config)) == (True, "")
    config = changed(config, **{section: changed(getattr(config, section), **{key: value})})
    config = changed(config, strategy=changed(config.strategy, min_sites=6))
    check_config(config)
    assert not verifies(config)
    assert f"(secagg.verify): {section}.{key} = " in unverified(config)


def test_the_settings_alone_tell_which_strategies_keep_state():
    """Of them the supervisor of a site knows, which loads no torch."""
    for kind, made in STRATEGIES.items():
        options = {"noise_multiplier": 1.0} if kind == "dp_fedavg" else {}
        if kind in ("fedper", "fedrep"):
            options = {"local": ["head.*"]}
        strategy = build(kind, options)
        stateful = bool(strategy.sigma) or keeps_state(strategy)
        assert stateful == (made.init is not Strategy.init), kind


def test_by_default_both_ends_say_once_that_sums_are_not_checked(config):
    table = changed(config.strategy, kind="fedavgm")
    config = changed(config, secagg=changed(config.secagg, verify="auto"), strategy=table)
    config = changed(config, run=changed(config.run, rounds=1), evaluate=changed(config.evaluate, every=0))
    logs = {site: Events() for site in SITES}
    for log in (federation(config, SITES, logs=logs), *logs.values()):
        told = [e["text"] for e in log.of("notice") if "do not check the sums" in e["text"]]
        assert len(told) == 1
        assert "strategy.kind = fedavgm moves the model by more than a sum" in told[0]


def test_by_default_a_round_over_more_sites_than_share_keys_is_not_checked(config):
    policy = policy_of(changed(config, secagg=changed(config.secagg, verify="auto", full_graph=3)), "f")
    assert policy.checks(3)
    assert not policy.checks(40)
    assert policy_of(changed(config, secagg=changed(config.secagg, full_graph=3)), "f").checks(40)


def test_the_model_after_a_round_without_checksums_needs_no_check(tmp_path):
    sums = CheckedSums(tmp_path, Events())
    sums.owe(Owed(bytes(32), 4, b"", 150, ("a", "b", "c"), ("loss",)))
    assert sums.has_checked(5, b"model")
    assert not sums.has_checked(6, b"next")


def test_a_round_that_moves_the_model_by_nothing_leaves_it_checked(tmp_path):
    sums = CheckedSums(tmp_path, Events())
    assert sums.has_checked(0, b"model")
    assert sums.has_checked(1, b"model")
    assert sums.has_checked(2, b"model")
    assert not sums.has_checked(4, b"model")


@pytest.mark.parametrize("kind", ["fedadam", "fedavgm", "scaffold", "dp_fedavg"])
def test_strategies_whose_step_only_the_aggregator_can_make_are_refused(config, kind):
    options = {"noise_multiplier": 1.0} if kind == "dp_fedavg" else {}
    config = changed(config, strategy=changed(config.strategy, kind=kind, options=options))
    with pytest.raises(ConfigError, match=r"secagg.verify: .*by what the aggregator alone has"):
        check_strategy(config, build(kind, options))


def test_sites_and_aggregator_that_start_again_still_check_the_sum_of_the_round_before(config, monkeypatch):
    """With evaluate.every = 0 it is shown only when the next round begins, by other processes."""
    config = changed(config, evaluate=changed(config.evaluate, every=0))
    federation(changed(config, run=changed(config.run, rounds=1)), SITES)
    for site in SITES:
        assert list(state(config, site)["checked"].values()) == [0]
        assert state(config, site)["owed"]
    federation(config, SITES)
    simulated(config, monkeypatch)
    assert final(config.run_dir).load().data.equal(final(config.simulate_dir).load().data)
    for site in SITES:
        assert sorted(state(config, site)["checked"].values()) == [0, 1, 2]


def test_a_site_that_lost_its_memory_takes_part_beside_the_others_and_checks_the_next_sum(config):
    config = changed(config, evaluate=changed(config.evaluate, every=0))
    federation(changed(config, run=changed(config.run, rounds=1)), SITES)
    (config.site_dir("a") / FILE).unlink()
    logs = {site: Events() for site in SITES}
    federation(config, SITES, logs=logs)
    assert list(state(config, "a")["checked"].values()) == [2]
    notices = [event["text"] for event in logs["a"].of("notice")]
    assert sum("could not check what the model was made of" in text for text in notices) == 1
