"""Which value of a metric is better: what the name says, or an error that asks for evaluate.mode."""

import pytest

import fedtrain
from fedtrain import modes
from fedtrain.config import Config, EvaluateConfig
from fedtrain.contrib.sweep import trials
from fedtrain.errors import ConfigError
from fedtrain.events import Best
from fedtrain.fairness import is_cost, over_sites
from fedtrain.tracking.board import Board
from fedtrain.tracking.live import line
from tests.toy import Toy

COSTS = """
    loss val_loss server/loss hd95 HD95_mm cross_entropy CrossEntropy bce kl kl_div msle fid deviance distance
    hamming eer val_ce divergence regret energy neg_log_likelihood negative_log_likelihood false_alarms mpjpe
    epe lpips perplexity dice_loss logloss rmse_mm q_error mae brier_score ece top1_err chamfer_distance nll
    hausdorff wer fpr fnr kld log-loss
""".split()  # noqa: SIM905  # a list of this length is read more easily as a text
GAINS = """
    accuracy acc top5_acc acc1 server/accuracy auc AUROC auprc f1 f1_macro dice dice_score iou mIoU precision
    precision@5 recall recall_at_10 r2 bleu psnr ssim mAP map50 kappa mcc sensitivity specificity ndcg pearson
    log_likelihood cindex explained_variance
""".split()  # noqa: SIM905
NEITHER = [
    "utility",
    "quality",
    "speed",
    "neg_mean_squared_error",
    "neg_rmse",
    "1-accuracy",
    "one_minus_auc",
    "x",
    "kl_accuracy",
]


@pytest.mark.parametrize(("names", "cost"), [(COSTS, True), (GAINS, False), (NEITHER, None)])
def test_a_metrics_name_says_which_value_is_better(names, cost):
    assert {name: is_cost(name) for name in names} == dict.fromkeys(names, cost)


@pytest.mark.parametrize("mode", ["simulate", "aggregator", "gossip", "peer", "datacenter", "islands"])
def test_a_metric_in_neither_list_is_refused_before_training(mode):
    with pytest.raises(ConfigError, match=r"evaluate.mode: .*'utility'.*\"min\".*\"max\""):
        modes.check(Config.load(None, settings={"evaluate.metric": "utility"}), mode)


def test_a_direction_that_is_given_or_not_needed_is_no_error():
    for settings in ({"evaluate.mode": "max"}, {"evaluate.mode": "min"}, {"evaluate.every": 0}):
        given = settings | ({} if settings.get("evaluate.every") == 0 else {"evaluate.metric": "utility"})
        modes.check(Config.load(None, settings=given), "simulate")
    modes.check(Config.load(None, settings={"evaluate.metric": "utility/std"}), "simulate")
    modes.check(Config.of({"evaluate": {"metric": "utility"}}), "site")  # there it decides nothing


def test_a_name_that_is_nearly_a_known_one_is_left_to_the_first_evaluation():
    """Which says what the task gives."""
    for name in ("acuracy", "los", "accurracy"):
        modes.check(Config.load(None, settings={"evaluate.metric": name}), "simulate")


def test_the_direction_of_no_metric_is_guessed_later_either():
    with pytest.raises(ConfigError, match=r"evaluate\.mode"):
        EvaluateConfig(metric="utility").better(1.0, None)
    with pytest.raises(ConfigError, match=r"evaluate\.mode"):
        trials.ranked(Config.load(None, settings={"evaluate.metric": "utility"}), [])


def test_worst_sites_are_those_that_the_direction_says():
    by_site = {"a": {"hd95": 1.0, "utility": 1.0}, "b": {"hd95": 3.0, "utility": 3.0}}
    found = over_sites(by_site, EvaluateConfig().lower)
    assert found["hd95/worst_decile"] == 3.0
    assert "utility/worst_decile" not in found
    assert found["utility/uniform"] == 2.0
    known = EvaluateConfig(metric="utility", mode="max").lower
    assert over_sites(by_site, known)["utility/worst_decile"] == 1.0


def test_the_log_says_which_way_the_best_is_better():
    best = Best(round=1, metric="hd95", value=2.1, better="lower")
    assert line(best, Board.of([])).endswith("is the best so far: hd95 2.1000 (lower is better)")


class Contours(Toy):
    """A distance in mm that falls from round to round."""

    def evaluate(self, model, batch):
        return {"hd95": ((model(batch[0]) - batch[1]).abs().sum(), len(batch[1]))}


def test_a_distance_that_falls_in_each_round_is_best_in_the_last(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = fedtrain.simulate(Contours, {
        "run.rounds": 8, "evaluate.metric": "hd95", "evaluate.patience": 3, "simulate.workers": 0,
    })  # fmt: skip
    assert run.board.best == Best(
        time=run.board.best.time, round=8, metric="hd95", value=run.metrics["hd95"], better="lower"
    )
