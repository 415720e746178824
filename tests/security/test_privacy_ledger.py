"""S24: what a site's data has given away is counted over all its runs and restarts, and never forgotten."""

import asyncio
import os
import re
from dataclasses import replace

import msgspec
import pytest

from fedtrain.arena import ArenaFile
from fedtrain.config import Config, SitePolicy
from fedtrain.errors import ConfigError, Damaged, SecAggError
from fedtrain.messages import Failure, Train, Update
from fedtrain.privacy import Release, epsilon
from fedtrain.runtime.sites.records import ledger_of, records_of
from fedtrain.runtime.sites.site import Site
from fedtrain.runtime.sites.spent import Budget, Spent, SumKeys
from fedtrain.runtime.star.secure_terms import policy
from fedtrain.secagg.fixedpoint import FixedPoint
from fedtrain.secagg.messages import Terms
from fedtrain.store import Ledger
from fedtrain.store.disk import COPY
from tests.test_gossip_peers import PLAIN, Log, arena
from tests.test_privacy import Trainer


def private(root, run="r", **privacy):
    keys = {"noise_multiplier": 2.0, "clip": 0.5} | privacy
    return Config.of({"run": {"name": run}, "privacy": keys}, root)


def spent_of(config, name="a", log=None, most=None):
    """The ledger of a site's data, as its next process in this run opens it."""
    folder = config.site_dir(name)
    folder.mkdir(parents=True, exist_ok=True)
    return Spent.of_site(config, folder, log or Log(), SitePolicy(**vars(most)) if most else SitePolicy())


def price(*multipliers, delta=1e-5):
    return epsilon([Release("gaussian", each / 2) for each in multipliers], delta)


def test_a_release_that_an_earlier_process_counted_is_on_the_disk_before_it_leaves_again(
    tmp_path, monkeypatch
):
    """That process may have been killed before its sync; then a power cut could take the line."""
    config, release, synced = private(tmp_path), Release("gaussian", 1.0), []
    spent_of(config).give("a", 0, release, "sum")
    again = spent_of(config)
    monkeypatch.setattr(
        os, "fsync", lambda fd: synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))
    )
    again.give("a", 0, release, "sum")
    assert again.releases == 1
    assert synced == ["releases.jsonl", "releases.jsonl.copy", "@a"]


def test_s24_what_was_given_away_in_other_runs_and_by_other_settings_counts(tmp_path):
    """20 releases at multiplier 0.5 cost epsilon 243; a restart at 50, or another run, makes it no less."""
    cheap = spent_of(private(tmp_path, noise_multiplier=0.5))
    for round in range(20):
        cheap.trained("a", round, 8.0)
    for run in ("r", "another"):
        log = Log()
        spent_of(private(tmp_path, run, noise_multiplier=50.0), log=log).trained("a", 20, 8.0)
        assert log.of("privacy_spent")[0]["epsilon"] > price(*[0.5] * 20) > 200
    assert log.of("privacy_spent")[0]["releases"] == 22
    assert log.of("privacy_spent")[0]["epsilon"] == price(*[0.5] * 20, 50.0, 50.0)
    other = Log()
    spent_of(private(tmp_path), "b", other).trained("b", 0, 8.0)
    assert other.of("privacy_spent")[0]["epsilon"] == price(2.0)  # another site has other data


def test_s24_another_run_dir_leaves_nothing_behind_that_a_site_gave_away(tmp_path):
    """The folder of the key says where the ledger is, whatever run.dir says."""
    own, log, capped = tmp_path / "certs/sites/a", Log(), SitePolicy(noise="site", epsilon=price(*[2.0] * 4))
    own.mkdir(parents=True)

    def started(run_dir):
        config = private(tmp_path)
        config = Config.of(config.table() | {"run": {"name": "r", "dir": run_dir}}, tmp_path)
        ledger = ledger_of(config, "a", own, capped, log)
        ledger.close()
        return Spent.of_site(config, ledger.folder, log, capped, ledger.records)

    first = started("runs")
    for round in range(3):
        first.trained("a", round, 8.0)
    second = started("elsewhere")
    assert second.releases == 3
    second.trained("a", 3, 8.0)
    with pytest.raises(ConfigError, match=r"policy.epsilon: .* over all its runs"):
        second.trained("a", 4, 8.0)
    assert not log.of("notice")
    (tmp_path / "runs").rename(tmp_path / "kept")
    with pytest.raises(Damaged, match=r"records were in .*runs/@a, which is gone.*policy.epsilon"):
        started("elsewhere")
    (own / "records").write_text("../../../kept/@a\n")
    assert started("elsewhere").releases == second.releases


def test_s24_two_ledgers_of_a_site_from_before_become_one_and_a_folder_that_is_read_only_is_told(tmp_path):
    config, own, log = private(tmp_path), tmp_path / "certs/sites/a", Log()
    own.mkdir(parents=True)
    spent_of(config).trained("a", 0, 8.0)  # of a fedtrain that knew run.dir alone
    other = Config.of(config.table() | {"run": {"name": "q", "dir": "other"}}, tmp_path)
    records = records_of(own, other.site_dir("a"), SitePolicy(), log)
    before = Spent.of_site(other, other.site_dir("a"), log, SitePolicy(), records)
    other.site_dir("a").mkdir(parents=True)
    before.trained("a", 0, 8.0)
    assert records_of(own, config.site_dir("a"), SitePolicy(), log) == records
    for _ in range(2):
        assert Spent.of_site(config, config.site_dir("a"), log, SitePolicy(), records).releases == 2
    assert not log.of("notice")
    nowhere = records_of(tmp_path / "none", config.site_dir("a"), SitePolicy(), log)
    assert nowhere == tmp_path / "runs/@a"
    assert "can't be written" in log.of("notice")[0]["text"]


def test_s24_two_processes_of_one_site_add_to_one_ledger(tmp_path):
    log = Log()
    one, two = (spent_of(private(tmp_path, run), log=log) for run in ("r", "q"))
    for round in range(3):
        one.trained("a", round, 8.0)
        two.trained("a", round, 8.0)
    assert [e["releases"] for e in log.of("privacy_spent")] == [1, 2, 3, 4, 5, 6]
    assert spent_of(private(tmp_path)).epsilon == price(*[2.0] * 6)
    assert (one.rounds, two.rounds) == (3, 3)


class Counting(Trainer):
    asked = 0

    async def train(self, *about):
        self.asked += 1
        return await super().train(*about)


def answers(root, config, most, rounds, trainer):
    """A site's replies in a run, asked for these rounds; each time by another process of the site."""
    replies = []
    for round in rounds:
        ledger = Ledger(config.site_dir("a"))
        spent = Spent.of_site(config, ledger.folder, Log(), SitePolicy(**vars(most)))
        weights = root / f"weights-{round}"
        weights.write_bytes(arena(PLAIN, round).payload)
        given = ArenaFile(PLAIN, weights, arena(PLAIN, round).digest)
        request = Train(id=f"{config.run.name}/{round}/0/train", round=round, weights=given)
        try:
            replies.append(asyncio.run(Site("a", PLAIN, ledger, trainer, spent=spent).answer(request)))
        finally:
            ledger.close()
    return replies


def test_s24_over_its_budget_a_site_refuses_and_says_so_over_runs_and_restarts(tmp_path):
    most, trainer = Budget(price(2.0, 2.0, 2.0) + 0.01, 1e-5), Counting()
    first = answers(tmp_path, private(tmp_path), most, (0, 1, 1), trainer)
    assert all(isinstance(each, Update) for each in first)
    assert trainer.asked == 2  # a reply that is sent again is the same bits, and costs nothing
    replies = answers(tmp_path, private(tmp_path, "another"), most, (0, 1, 2), trainer)
    assert isinstance(replies[0], Update)
    assert trainer.asked == 3
    cost = f"{price(*[2.0] * 4):.4g} at delta = 1e-05, over all its runs, and {most.epsilon:g} is the most"
    for each in replies[1:]:
        assert isinstance(each, Failure)
        assert each.reason.startswith(
            "policy.epsilon: with one more release this site's data would have cost"
        )
        assert cost in each.reason
    assert spent_of(private(tmp_path)).releases == 3


def test_s24_less_noise_or_a_larger_delta_of_the_run_changes_no_budget(tmp_path):
    most = Budget(price(2.0, delta=1e-6) + 0.01, 1e-6)
    spent = spent_of(private(tmp_path, noise_multiplier=1.5, delta=0.1), most=most)
    with pytest.raises(ConfigError, match=r"policy.epsilon: .* at delta = 1e-06"):
        spent.check_next(-1)
    spent_of(private(tmp_path, delta=0.1), most=most).check_next(-1)


def test_s24_a_dear_update_that_protects_examples_does_not_leave_and_the_next_is_not_trained(tmp_path):
    """How dear it is, depends on how many examples it was trained on."""
    config = Config.of(
        {
            "privacy": {"unit": "example", "noise_multiplier": 1.0},
            "train": {"batch_size": 0},
            "run": {"name": "r"},
        },
        tmp_path,
    )
    one = epsilon([Release("gaussian", 1.0)], 1e-5)
    spent = spent_of(config, most=Budget(one * 1.01, 1e-5))
    spent.check_next(-1)
    spent.trained("a", 0, 8.0)
    spent.check_next(0)  # nobody knows yet
    with pytest.raises(ConfigError, match=r"policy\.epsilon"):
        spent.trained("a", 1, 8.0)
    with pytest.raises(ConfigError, match=r"policy\.epsilon"):
        spent.check_next(0)
    assert spent.releases == 1


def test_s24_noise_in_sums_is_counted_over_runs_and_a_sum_that_is_had_again_once(tmp_path):
    most = Budget(epsilon([Release("discrete_gaussian", 1.0, steps=2)], 1e-5) + 0.01, 1e-5)
    keys = {}
    for run in ("r", "another"):
        config = private(tmp_path, run, where="sum")
        keys[run] = SumKeys(config, "a", config.site_dir("a"), spent_of(config, most=most))
        assert keys[run].key(0, "x") == keys[run].key(0, "x")
    with pytest.raises(ConfigError, match=r"policy\.epsilon"):
        keys["r"].key(1, "y")
    keys["r"].key(0, "x")


def test_s24_a_ledger_that_is_gone_shorter_or_damaged_stops_the_site(tmp_path):
    spent = spent_of(private(tmp_path))
    for round in range(3):
        spent.trained("a", round, 8.0)
    files = [spent._chain._paths[0], spent._chain._paths[0].with_name("releases.jsonl" + COPY)]
    whole = files[0].read_bytes()
    assert files[1].read_bytes() == whole
    for left in (b"", whole[: whole.index(b"\n") + 1], whole.replace(b'"sigma":1.0', b'"sigma":19.0')):
        for path in files:
            path.write_bytes(left) if left else path.unlink()
        for run in ("r", "another"):
            with pytest.raises(Damaged, match="must not be forgotten: restore it from a copy"):
                spent_of(private(tmp_path, run))
        with pytest.raises(Damaged):
            spent.trained("a", 3, 8.0)  # a process that has the ledger open doesn't write it anew
    for path in files:
        path.write_bytes(whole)
    assert spent_of(private(tmp_path)).releases == 3


def test_s24_what_runs_counted_each_for_itself_is_taken_over_once(tmp_path):
    """Also where the process was killed in the middle of it."""
    for run, rounds in (("q", 3), ("r", 2)):
        config = private(tmp_path, run)
        config.site_dir("a").mkdir(parents=True)
        before = Spent(config, config.site_dir("a"), Log())  # as a ledger of one run is kept
        for round in range(rounds):
            before.trained("a", round, 8.0)
    kept = {path: path.read_bytes() for path in tmp_path.rglob("releases.jsonl*")}
    assert len(kept) == 4
    for _ in range(2):
        spent = spent_of(private(tmp_path, "r"))
        assert (spent.releases, spent.rounds) == (5, 2)
        assert {path.parent.name for path in tmp_path.rglob("releases.jsonl*")} == {"@a"}
        for path, text in kept.items():  # killed before they were removed
            path.write_bytes(text)


def test_s24_releases_of_both_kinds_protect_single_examples_at_least(tmp_path):
    log = Log()
    spent_of(private(tmp_path, "r"), log=log).trained("a", 0, 8.0)
    of_examples = Config.of(
        {"run": {"name": "q"}, "privacy": {"unit": "example", "noise_multiplier": 1.0}}, tmp_path
    )
    spent_of(of_examples, log=log).give("a", 0, Release("gaussian", 1.0))
    spent_of(private(tmp_path, "r"), log=log).trained("a", 1, 8.0)
    assert [e["unit"] for e in log.of("privacy_spent")] == ["site", "example", "example"]
    assert log.of("privacy_spent")[-1]["epsilon"] == epsilon([Release("gaussian", 1.0, steps=3)], 1e-5)


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        (
            {"privacy": {"where": "sum", "noise_multiplier": 2.0}},
            {"privacy": {"where": "sum", "noise_multiplier": 1.9999999}},
            "noise 1.9999999 of 1.0",
        ),
        ({"privacy": {"where": "sum", "noise_multiplier": 2.0}}, {}, ""),
        (
            {"strategy": {"kind": "dp_fedavg", "noise_multiplier": 1.0}},
            {"strategy": {"kind": "dp_fedavg", "noise_multiplier": 0.9}},
            "dp_fedavg noise_multiplier=0.9",
        ),
        ({"strategy": {"kind": "dp_fedavg", "noise_multiplier": 1.0}}, {}, ""),
    ],
)
def test_the_noise_of_sums_and_of_the_aggregator_is_among_the_terms_of_each_secure_sum(one, other, said):
    """A site holds the aggregator, and through the session's id all other sites, to its own file."""
    mine, theirs = (policy(Config.of({"run": {"name": "r"}} | each), "f") for each in (one, other))
    assert theirs.privacy == said != mine.privacy
    least, threshold, degree = theirs.graph(3)
    fixed = FixedPoint(3, theirs.ring_bits, theirs.clip, theirs.max_weight, theirs.value_bits)
    terms = Terms(
        federation="f", run="r", round=0, attempt=0, nonce=bytes(16), cohort=dict.fromkeys("abc", b""),
        quorum=least, threshold=threshold, degree=degree, ring_bits=theirs.ring_bits,
        value_bits=fixed.value_bits, clip=theirs.clip, max_weight=theirs.max_weight, length=0,
        privacy=theirs.privacy, verify=theirs.checks(3),
    )  # fmt: skip
    theirs.check(terms)
    with pytest.raises(SecAggError, match=re.escape(f"privacy = {said!r} is asked for")):
        replace(mine, clip=theirs.clip, max_weight=theirs.max_weight).check(terms)
    assert terms.sid(b"") != msgspec.structs.replace(terms, privacy=mine.privacy).sid(b"")
