"""Each strategy against its paper, written again in numpy, over rounds of partial participation with dropouts
and restarts; and what its formula says where it becomes another one."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from fedtrain.learning import RoundSums
from fedtrain.strategies import build
from tests import references
from tests.references import BODY, HEAD, NORM
from tests.toy import SITES, Net, Toy, Toys, config, data_of, initial

OPEN = {"secagg": {"enabled": False}}
MASKED = {"secagg": {"enabled": True, "ring_bits": 64, "clip": 2.0, "max_examples": 64, "value_bits": 40}}
SUMS = {"open": (OPEN, 1e-10), "masked": (MASKED, 1e-7)}
MASKED_SITES = {"strategy": {"min_sites": 3}}


@pytest.fixture(params=SUMS)
def sums(request):
    return SUMS[request.param]


def run(folder, kind, options=(), sums=OPEN, share=0.3, until=(2, 3, 6), **sections):
    at_least = MASKED_SITES if sums is MASKED else {}
    strategy = {**at_least.get("strategy", {}), **dict(options), **sections.pop("strategy", {})}
    return Toys(config(folder, kind, strategy, **sums, **sections), share).run(until)


def close(found, wanted, tolerance):
    np.testing.assert_allclose(np.asarray(found), np.asarray(wanted), rtol=0, atol=tolerance)


def test_fedavg(tmp_path, sums):
    toys = run(tmp_path, "fedavg", sums=sums[0])
    close(toys.weights, references.fedavg(toys.counted), sums[1])


def test_scaffold(tmp_path, sums):
    toys = run(tmp_path, "scaffold", {"clip": 4.0}, sums=sums[0])
    x, c, c_i = references.scaffold(toys.counted, len(SITES))
    close(toys.weights, x, sums[1])
    close(toys.last.weights.load().extras()["c"], c, sums[1])
    for site in SITES:
        close(toys.memory(site).get("c", np.zeros(18)), c_i[site], sums[1])
    # c is exactly the mean of what sites remember
    total = sum(toys.memory(site).get("c", np.zeros(18)) for site in SITES)
    assert np.array_equal(toys.last.state["sum"].numpy(), total)
    assert np.array_equal(toys.last.weights.load().extras()["c"].numpy(), total / len(SITES))


def test_fednova(tmp_path, sums):
    toys = run(tmp_path, "fednova", {"max_examples": 64.0, "max_steps": 16.0}, sums=sums[0])
    close(toys.weights, references.fednova(toys.counted), sums[1])


@pytest.mark.parametrize("alpha", [0.01, 0.3])
def test_feddyn(tmp_path, sums, alpha):
    toys = run(tmp_path, "feddyn", {"alpha": alpha}, sums=sums[0])
    theta, h, grad = references.feddyn(toys.counted, len(SITES), alpha)
    close(toys.weights, theta, 10 * sums[1])
    close(-alpha * toys.last.state["moved"] / len(SITES), h, 10 * sums[1])
    for site in SITES:
        close(-alpha * toys.memory(site).get("moved", np.zeros(18)), grad[site], 10 * sums[1])


@pytest.mark.parametrize(
    ("kind", "options", "shared", "own", "epochs"),
    [
        ("fedbn", {}, BODY | HEAD, NORM, 0),
        ("fedper", {"local": ["head.*"]}, BODY | NORM, HEAD, 0),
        ("fedrep", {"local": ["head.*"], "head_epochs": 3}, BODY | NORM, HEAD, 3),
        ("fedavg", {"local": ["norm.*"], "fixed": ["body.*"]}, HEAD, NORM, 0),
    ],
)
def test_tensors_that_stay_at_their_site(tmp_path, sums, kind, options, shared, own, epochs):
    toys = run(tmp_path, kind, options, sums=sums[0])
    w, remembered = references.partial(toys.counted, shared, own, epochs)
    assert len(toys.weights) == shared.sum(), "what travels is what is shared"
    close(toys.weights, w[shared], sums[1])
    for site in {site for sites in toys.counted for site in sites}:
        found = np.concatenate([v.ravel() for n, v in toys.memory(site).items() if n.startswith("local/")])
        close(found, remembered[site][own], sums[1])


@pytest.mark.parametrize("personal_lr", [0.0, 0.05])
def test_ditto(tmp_path, sums, personal_lr):
    toys = run(tmp_path, "ditto", {"penalty": 0.5, "personal_lr": personal_lr}, sums=sums[0])
    w, v = references.ditto(toys.counted, 0.5, personal_lr or references.LR)
    close(toys.weights, w, sums[1])
    for site in {site for sites in toys.counted for site in sites}:
        close(toys.memory(site)["v"], v[site], sums[1])


@pytest.mark.parametrize("q", [0.5, 1.0, 2.0])
def test_qfedavg(tmp_path, sums, q):
    toys = run(tmp_path, "qfedavg", {"q": q, "max_loss": 4.0, "max_h": 64.0}, sums=sums[0])
    close(toys.weights, references.qfedavg(toys.counted, q), 10 * sums[1])


@pytest.mark.parametrize("models", [2, 3])
def test_ifca(tmp_path, sums, models):
    toys = run(tmp_path, "ifca", {"models": models, "spread": 0.5}, sums=sums[0], until=())
    first = [toys.weights, *(view.numpy() for view in toys.last.weights.load().extras().values())]
    toys.run((3, 6))
    found, chosen = references.ifca(toys.counted, first)
    close(toys.weights, found[0], sums[1])
    for view, model in zip(toys.last.weights.load().extras().values(), found[1:], strict=True):
        close(view, model, sums[1])
    assert {site: int(toys.memory(site)["chosen"][0]) for site in chosen} == chosen
    assert len(set(chosen.values())) > 1


def test_mimelite(tmp_path, sums):
    toys = run(tmp_path, "mimelite", {"momentum": 0.8}, sums=sums[0])
    x, m = references.mimelite(toys.counted, 0.8)
    close(toys.weights, x, 10 * sums[1])
    close(toys.last.weights.load().extras()["m"], m, 10 * sums[1])


def test_adaptive_fedprox(tmp_path, sums):
    options = {"mu": 0.3, "mu_step": 0.2, "patience": 2, "max_loss": 16.0, "max_examples": 64.0}
    toys = run(tmp_path, "adaptive_fedprox", options, sums=sums[0])
    w, mus = references.adaptive_fedprox(toys.counted, 0.3, 0.2, 2)
    close(toys.weights, w, sums[1])
    close(toys.last.weights.load().extras()["mu"], mus[-1], 1e-12)
    moves = np.diff(mus)
    assert moves.max() > 0, "it rose"
    assert moves.min() < 0, "and fell"


def test_adaptive_fedprox_counts_its_falls_from_the_last_change_and_stops_at_0():
    strategy = build("adaptive_fedprox", {"mu": 0.15})
    state, mus = strategy.init(torch.zeros(1)), []
    for loss in [9, 8, 7, 6, 5, 4, 3, 2, 1, 0.5, 0.4, 0.4, 0.3, 0.5, 0.6]:
        _, state = strategy.step(torch.zeros(1), state, RoundSums(torch.zeros(1), scalars={"loss": loss}))
        mus.append(round(float(state["mu"]), 9))
    assert mus == [0.15] * 5 + [0.05] * 5 + [0.0] * 3 + [0.1, 0.2]


@pytest.mark.parametrize("stragglers", [0.0, 0.5, 0.9])
def test_inexact_fedprox(tmp_path, sums, stragglers):
    """The partial work of stragglers counts by their examples, as all others' does."""
    options = {"mu": 0.2, "stragglers": stragglers}
    toys = run(tmp_path, "inexact_fedprox", options, sums=sums[0], train={"local_epochs": 4})
    w, made = references.inexact_fedprox(toys.counted, 0.2, stragglers, 4)
    close(toys.weights, w, sums[1])
    assert made == ({1, 2, 3, 4} if stragglers else {4})


@pytest.mark.parametrize("variant", ["FO", "HF"])
def test_per_fedavg(tmp_path, sums, variant):
    toys = run(tmp_path, "per_fedavg", {"variant": variant, "alpha": 0.2}, sums=sums[0])
    close(toys.weights, references.per_fedavg(toys.counted, variant, 0.2, 1e-3), sums[1])


def test_fedsgd(tmp_path, sums):
    toys = run(tmp_path, "fedsgd", sums=sums[0], train={"batch_size": 0})
    close(toys.weights, references.fedsgd(toys.counted), sums[1])


def test_cyclic(tmp_path):
    toys = run(tmp_path / "lost", "cyclic", {"min_sites": 1}, share=0.3)
    close(toys.weights, references.cyclic(toys.counted), 1e-10)
    toys = run(tmp_path, "cyclic", {"min_sites": 1}, until=(5, 18), share=0.0)
    close(toys.weights, references.cyclic(toys.counted), 1e-10)
    cycles = [toys.counted[at : at + 6] for at in range(0, 18, 6)]
    assert all(sorted(site for (site,) in cycle) == SITES for cycle in cycles)


# --- Where one formula becomes another


def test_scaffold_with_one_site_is_sgd(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules["tests.toy"].Toy, "sites", lambda task: ["site3"])
    toys = run(tmp_path, "scaffold", {"clip": 4.0, "min_sites": 1}, share=0.0)
    w = initial()
    for round in range(len(toys.counted)):
        w, _ = references.sgd("site3", round, w)
    close(toys.weights, w, 1e-10)


def test_fednova_with_equal_steps_is_fedavg(tmp_path):
    toys = run(tmp_path, "fednova", train={"batch_size": 0})
    plain = run(tmp_path / "plain", "fedavg", train={"batch_size": 0})
    close(toys.weights, plain.weights, 1e-12)


def test_per_fedavg_is_uniform_fedavg_as_alpha_goes_to_0(tmp_path):
    """With all examples in one batch: then the batches of a step are the same."""
    toys = run(tmp_path, "per_fedavg", {"alpha": 1e-13}, train={"batch_size": 0})
    w = initial()
    for sites in toys.counted:
        steps = [references.loss_and_gradient(w, *data_of(s))[1] for s in sites]
        w = w - references.LR * sum(steps) / len(steps)
    close(toys.weights, w, 1e-10)


def test_hessian_free_per_fedavg_goes_to_the_step_of_the_true_hessian(tmp_path):
    """I - alpha H by autograd, of a step on all examples."""
    alpha = 0.2
    toys = run(tmp_path, "per_fedavg", {"alpha": alpha, "delta": 1e-5, "min_sites": 3, "fraction": 0.1},
               until=(1,), share=0.0, train={"batch_size": 0})  # fmt: skip
    w, steps = torch.from_numpy(initial()), []
    for site in toys.counted[0]:
        batch, net = Toy().data(site), Net()

        def loss(flat, batch=batch, net=net):
            parts = {
                "body.weight": flat[:12].view(3, 4),
                "norm.weight": flat[12:15],
                "head.weight": flat[15:],
            }
            return (torch.func.functional_call(net, parts, (batch[0],)) - batch[1]).square().mean() / 2

        adapted = w - alpha * torch.func.grad(loss)(w)
        step = torch.func.grad(loss)(adapted)
        _, hessian = torch.func.vjp(torch.func.grad(loss), w)  # which is symmetric
        steps.append(step - alpha * hessian(step)[0])
    close(toys.weights, w - references.LR * sum(steps) / len(steps), 1e-9)


def test_feddyn_with_alpha_0_and_qfedavg_with_q_0_are_fedavg_of_equal_weights(tmp_path):
    for kind, options in (("feddyn", {"alpha": 0.0}), ("qfedavg", {"q": 0.0})):
        toys = run(tmp_path / kind, kind, options)
        close(toys.weights, references.fedavg(toys.counted, uniform=True), 1e-10)


def test_dittos_personal_model_goes_to_the_model_that_the_round_began_with(tmp_path):
    """With a rate of 1 / penalty, as the penalty grows."""
    penalty = 1e9
    toys = run(tmp_path, "ditto", {"penalty": penalty, "personal_lr": 1 / penalty}, until=(5,))
    begun = toys.weights
    toys.run((6,))
    for site in toys.counted[-1]:
        close(toys.memory(site)["v"], begun, 1e-7)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("scaffold", {"clip": 4.0}),
        ("feddyn", {}),
        ("ditto", {}),
        ("fedrep", {"local": ["head.*"]}),
        ("ifca", {}),
        ("adaptive_fedprox", {"patience": 2}),
    ],
)
def test_a_run_that_is_stopped_after_each_round_has_the_bits_of_one_that_is_not(tmp_path, kind, options):
    stopped = run(tmp_path / "a", kind, options, until=range(1, 7))
    whole = run(tmp_path / "b", kind, options, until=(6,))
    assert stopped.last.weights.digest == whole.last.weights.digest
    assert stopped.counted == whole.counted
