"""How even a model is over sites: what an evaluation says of each metric beside its average over all data.

    accuracy               the average over all examples, wherever they are
    accuracy/uniform       the mean over sites, each of which counts alike
    accuracy/worst_decile  the mean of the worst tenth of sites, rounded up to whole sites
    accuracy/std           the standard deviation over sites

The last three are how fairness is reported since Li et al. 2020 (q-FFL, arXiv 1905.10497, section 5.1). They
are known where each site's own metrics are, of two sites or more. Under masks they are not. Sums of the
sites' own averages and of their squares would, with the sums that are there, open each of three sites. The
averages alone would open small ones: of 4/7 + 8/9 + 6/11 the denominators tell each numerator.

So a suffix says how sites become one number. A prefix says what was evaluated, where that is not the global
model on the sites' data: "server/accuracy" is on data that the server holds. What else a site evaluates, a
model of its own say, has a prefix in the names that it gives, and is worked out over sites like the rest.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from .errors import ConfigError

if TYPE_CHECKING:
    from .messages import SiteId

SERVER = "server"  # a prefix, and the site whose eval_data() the server holds
UNIFORM, WORST, STD = "uniform", "worst_decile", "std"
SUFFIXES = (UNIFORM, WORST, STD)
Lower = Callable[[str], bool | None]  # whether a smaller value of a metric is better; None: not known
# Words of a metric's name of which a smaller value is better
COSTS = """
    mae mse rmse msle rmsle mape smape mase wape nmse nrmse medae mre nll ppl bpc bpb bpd wer cer ter eer
    der brier ece mce bce ce xent kl kld js jsd fid kid lpips mcd hd asd assd masd rvd epe mpjpe ade fde
    crps rps fpr fnr fdr far frr hter emd mmd chamfer hausdorff hamming levenshtein wasserstein pinball
    energy risk cost costs penalty false misses mistakes bias residual residuals err errs latency
"""
# and of which a larger one is
GAINS = """
    accuracy acc auc auroc auprc aucpr rocauc prauc roc ap map f1 f2 fbeta fscore fmeasure dice dsc iou
    miou jaccard precision recall sensitivity specificity tpr tnr ppv npv r2 bleu rouge rougel meteor cider
    chrf psnr ssim mssim snr sdr sisdr kappa mcc correlation corr pearson spearman kendall pcc ccc ndcg dcg
    mrr hit hits likelihood loglik elbo reward rewards returns gain lift em exact correct cindex
    concordance similarity explained score success win wins pck nmi ami ari purity throughput
"""


def is_cost(metric: str) -> bool | None:
    """Whether a smaller value is better, as far as the metric's name tells; None where it does not."""
    name = metric.lower()
    words = set(re.split(r"[^a-z0-9]+", name))
    words |= {word.rstrip("0123456789") for word in words}
    if re.search(r"(^|/)(neg|minus|inverse|1 ?-|(1|one)_minus)", name):  # of neg_mse a larger value
        return True if "lik" in name else None
    if re.search("loss|error|perplex|entropy|divergence|deviance|distance|regret|discrepancy|misclass", name):
        return True
    cost = not words.isdisjoint(COSTS.split())
    gain = not words.isdisjoint(GAINS.split()) and not (cost and "score" in words)
    return cost if gain != cost else None


def mistyped(metric: str) -> bool:
    """Whether a metric's name is nearly, and not quite, that of a known one."""
    near = difflib.get_close_matches(metric, ["loss", *COSTS.split(), *GAINS.split()], n=1, cutoff=0.8)
    return bool(near) and metric not in near


def decided(metric: str, lower: bool | None) -> bool:
    """Whether a smaller value is better; ConfigError where `lower`, None, leaves that open."""
    if lower is None:
        raise ConfigError(
            f'evaluate.mode: "auto" goes by words of a metric\'s name, and {metric!r} has none that says '
            f'which value is better. Set evaluate.mode = "min" where a smaller {metric} is better, "max" '
            f"where a larger one is."
        )
    return lower


def joined(metrics: Mapping[str, float], ours: Mapping[str, float]) -> dict[str, float]:
    """Both. ConfigError where the task has given one of our names to a metric of its own."""
    if taken := sorted(ours.keys() & metrics.keys()):
        raise ConfigError(
            f"the task gives a metric {taken[0]!r}, and fedtrain makes one of this name. Give the task's "
            f"another name."
        )
    return {**metrics, **ours}


def over_sites(by_site: Mapping[SiteId, Mapping[str, float]], lower: Lower) -> dict[str, float]:
    """The metrics with a suffix, of each metric that two sites or more give; a site whose value is NaN gives
    none. Without a known better direction of the metric there is no worst tenth."""
    values: dict[str, list[float]] = {}
    for site in sorted(by_site):
        for name, value in by_site[site].items():
            if value == value:
                values.setdefault(name, []).append(value)
    found: dict[str, float] = {}
    for name, each in values.items():
        if len(each) > 1:
            mean, low = _mean(each), lower(name)
            found[f"{name}/{UNIFORM}"] = mean
            if low is not None:
                worst_first = sorted(each, reverse=low)
                found[f"{name}/{WORST}"] = _mean(worst_first[: math.ceil(len(each) / 10)])
            found[f"{name}/{STD}"] = math.sqrt(_mean([(value - mean) ** 2 for value in each]))
    return found


def split(name: str) -> tuple[str, str]:
    """("accuracy", "std") of "accuracy/std"; the suffix is "" for a name without one."""
    metric, _, suffix = name.rpartition("/")
    return (metric, suffix) if metric and suffix in SUFFIXES else (name, "")


def averaged(metrics: Mapping[str, float | None]) -> list[str]:
    """The names of the metrics that are averages over all data: what is left without those over sites."""
    return [name for name in metrics if not split(name)[1] or split(name)[0] not in metrics]


def _mean(values: Sequence[float]) -> float:
    """NaN where a value is infinite or NaN."""
    return math.fsum(values) / len(values) if all(map(math.isfinite, values)) else math.nan
