"""The engine: what one site does in one round."""

import random
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from fedtrain import Arena, Task
from fedtrain.config import TrainConfig
from fedtrain.errors import ConfigError, TaskError
from fedtrain.messages import averages
from fedtrain.training.local import Engine
from fedtrain.training.task import load_task

CONFIG = TrainConfig(lr=0.1, batch_size=8)


def examples(n, seed=0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, 6, generator=g, dtype=dtype), torch.randint(0, 3, (n,), generator=g)


class Small(Task):
    dtype = torch.float64

    def model(self):
        return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).to(self.dtype)

    def loss(self, model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    def evaluate(self, model, batch):
        return {"accuracy": ((model(batch[0]).argmax(1) == batch[1]).sum(), len(batch[1]))}


class Small32(Small):
    dtype = torch.float32


class Normed(Small32):
    def model(self):
        return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Dropout(0.3), nn.Linear(5, 3))


class Columns(Dataset):
    """The same examples, one at a time."""

    def __init__(self, *columns):
        self.columns = columns

    def __len__(self):
        return len(self.columns[0])

    def __getitem__(self, i):
        return tuple(c[i] for c in self.columns)


def train(task, config, data, weights=None, **where):
    engine = Engine(task, config, run_seed=1, correct=where.pop("correct", None))
    start = weights or engine.initial()
    out = Arena.zeros(engine.schema)
    return engine.train(where.get("site", "a"), data, where.get("round", 0), start, out)


def flat(arena):
    return arena.flat(arena.schema.sections[0])


# --- Where the mathematics says what must come out


def test_one_full_batch_step_a_site_averages_to_the_step_on_the_pool():
    config = replace(CONFIG, batch_size=0)
    x, y = examples(60)
    cuts = [0, 7, 30, 60]
    parts = [(x[a:b], y[a:b]) for a, b in pairwise(cuts)]
    updates = [train(Small(), config, part, site=str(i)) for i, part in enumerate(parts)]
    mean = sum(flat(u.delta) * u.num_examples for u in updates) / sum(u.num_examples for u in updates)
    pooled = flat(train(Small(), config, (x, y)).delta)
    torch.testing.assert_close(mean, pooled, rtol=0, atol=1e-12)
    assert pooled.norm() > 1e-3


class Tokens(Small):
    """Examples that weigh differently, as sequences of tokens do."""

    def loss(self, model, batch):
        x, y, weight = batch
        return (F.cross_entropy(model(x), y, reduction="none") * weight).sum(), weight.sum()


@pytest.mark.parametrize("task", [Small(), Tokens()])
@pytest.mark.parametrize("count", [32, 29])
def test_accumulated_small_batches_are_the_one_large_batch(task, count):
    data = (*examples(count), torch.arange(count, dtype=torch.float64) % 5)
    small = train(task, replace(CONFIG, batch_size=8, accumulate=4), data)
    large = train(task, replace(CONFIG, batch_size=32), data)
    torch.testing.assert_close(flat(small.delta), flat(large.delta), rtol=0, atol=1e-12)
    assert small.num_examples == pytest.approx(large.num_examples)


def test_tokens_are_what_a_site_counts_for_when_the_loss_counts_them():
    weight = torch.arange(20.0, dtype=torch.float64)
    update = train(Tokens(), replace(CONFIG, local_epochs=3), (*examples(20), weight))
    assert update.num_examples == pytest.approx(weight.sum().item())


def test_a_task_that_weighs_its_items_registers_no_number_of_examples():
    """Or an honest count of tokens would be refused for exceeding it (S18)."""
    data = (*examples(20), torch.full((20,), 7.0, dtype=torch.float64))
    engine = Engine(Tokens(), CONFIG, run_seed=1)
    assert engine.weighs_items(data)
    assert train(Tokens(), CONFIG, data).num_examples > 20
    assert not Engine(Small(), CONFIG, run_seed=1).weighs_items(data[:2])


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_the_flat_optimizers_are_those_of_torch(optimizer):
    class Theirs(Small):
        def optimizer(self, parameters):
            if optimizer == "sgd":
                return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01)
            kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[optimizer]
            return kind(parameters, lr=0.05, weight_decay=0.01)

    config = TrainConfig(
        batch_size=8, local_epochs=4, optimizer=optimizer, lr=0.05, weight_decay=0.01, clip_norm=0.3,
        momentum=0.9 if optimizer == "sgd" else 0.0,
    )  # fmt: skip
    ours, theirs = (train(task, config, examples(30)) for task in (Small(), Theirs()))
    torch.testing.assert_close(flat(ours.delta), flat(theirs.delta), rtol=0, atol=1e-12)


def test_a_round_is_the_plain_loop_of_a_tutorial():
    x, y = examples(16)
    engine = Engine(Small(), replace(CONFIG, batch_size=0, local_epochs=5), 1)
    update = engine.train("a", (x, y), 0, engine.initial(), Arena.zeros(engine.schema))
    model = engine.task.model()
    engine.initial().bind(model)
    begun = Arena.of(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    torch.testing.assert_close(flat(update.delta), flat(Arena.of(model)) - flat(begun), rtol=0, atol=1e-14)


def test_a_clipped_gradient_has_the_norm_it_was_clipped_to():
    update = train(Small(), replace(CONFIG, lr=1.0, batch_size=0, clip_norm=0.01), examples(20))
    assert flat(update.delta).norm().item() == pytest.approx(0.01, rel=1e-3)


def test_a_strategy_corrects_each_gradient_knowing_where_the_round_began():
    seen = []

    def correct(gradient, weights, given):
        seen.append((weights - given.start).norm().item())
        gradient.zero_()

    update = train(Small(), CONFIG, examples(20), correct=correct)
    assert seen == [0.0] * 3
    assert not flat(update.delta).any()


# --- The same bits, however it is run


@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize("batch_size", [0, 8])
def test_a_dataset_and_its_tensors_train_to_the_same_bits(batch_size, epochs):
    config = replace(CONFIG, batch_size=batch_size, local_epochs=epochs)
    x, y = examples(30, dtype=torch.float32)
    forms = [(x, y), TensorDataset(x, y), Columns(x, y), list(zip(x, y, strict=True)), (x.numpy(), y.numpy())]
    digests = {train(Normed(), config, data).delta.digest for data in forms}
    assert len(digests) == 1


def test_a_round_depends_on_run_seed_round_and_site_and_on_nothing_before_it():
    engine = Engine(Normed(), CONFIG, run_seed=1)
    start, data = engine.initial(), examples(30, dtype=torch.float32)

    def digest(site, round):
        return engine.train(site, data, round, start, Arena.zeros(engine.schema)).delta.digest

    first = digest("a", 0)
    others = {digest("b", 0), digest("a", 1)}
    engine.evaluate(data, start)
    torch.manual_seed(99)
    assert digest("a", 0) == first
    assert first not in others
    assert train(Normed(), CONFIG, data).delta.digest == first


def test_all_three_random_sources_of_a_task_are_seeded():
    class Noisy(Small):
        def loss(self, model, batch):
            noise = random.random() + np.random.rand() + torch.rand(()).item()
            return super().loss(model, batch) * noise

    data = examples(30)
    assert train(Noisy(), CONFIG, data).delta.digest == train(Noisy(), CONFIG, data).delta.digest


def test_all_sites_start_from_the_same_weights():
    random.seed(5)
    engines = [Engine(Small(), CONFIG, run_seed=seed) for seed in (1, 1, 2)]
    digests = [e.initial().digest for e in engines]
    assert digests[0] == digests[1] != digests[2]


# --- Epochs, steps, batches


def counting(config, data, task=None):
    """How large the batches of a round were."""
    sizes = []

    class Watched(Small):
        def loss(self, model, batch):
            sizes.append(len(batch[0]))
            return super().loss(model, batch)

    update = train(task or Watched(), config, data)
    return sizes, update


@pytest.mark.parametrize("form", [lambda x, y: (x, y), Columns])
def test_batches_epochs_and_steps_are_those_of_the_config(form):
    data = form(*examples(20))
    assert counting(CONFIG, data)[0] == [8, 8, 4]
    assert counting(replace(CONFIG, local_epochs=2, drop_last=True), data)[0] == [8, 8, 8, 8]
    assert counting(replace(CONFIG, local_steps=5), data)[0] == [8, 8, 4, 8, 8]
    assert counting(replace(CONFIG, batch_size=0), data)[0] == [20]
    assert counting(replace(CONFIG, batch_size=64, drop_last=True), data)[0] == [20]  # never its only batch


@pytest.mark.parametrize("config", [CONFIG, replace(CONFIG, local_epochs=3), replace(CONFIG, local_steps=2)])
def test_a_site_counts_for_its_examples_however_often_they_are_seen(config):
    assert counting(config, examples(20))[1].num_examples == 20.0


def test_batches_that_the_task_made_itself_are_taken_as_they_come():
    x, y = examples(20)
    sizes, update = counting(replace(CONFIG, local_epochs=2), DataLoader(TensorDataset(x, y), batch_size=15))
    assert sizes == [15, 5, 15, 5]
    assert update.num_examples == 20.0


def test_an_iterable_dataset_is_cut_into_batches():
    class Endless(IterableDataset):
        def __iter__(self):
            return iter(zip(*examples(20), strict=True))

    assert counting(CONFIG, Endless())[0] == [8, 8, 4]


def test_a_generator_of_batches_can_not_be_two_epochs():
    x, y = examples(20)
    with pytest.raises(TaskError, match="only once"):
        train(Small(), replace(CONFIG, local_epochs=2), iter([(x, y)]))


def test_dicts_of_tensors_make_batches_that_are_dicts():
    class ByName(Small):
        def loss(self, model, batch):
            return super().loss(model, (batch["x"], batch["y"]))

    x, y = examples(20)
    assert (
        train(ByName(), CONFIG, {"x": x, "y": y}).delta.digest == train(Small(), CONFIG, (x, y)).delta.digest
    )


@pytest.mark.parametrize("data", [examples(0), Columns(*examples(0)), []])
def test_a_site_without_examples_says_so(data):
    with pytest.raises(TaskError, match="site a has no examples"):
        train(Small(), CONFIG, data)


def test_data_of_no_known_kind_is_refused():
    with pytest.raises(TaskError, match="data\\(\\) returned a int"):
        train(Small(), CONFIG, 5)


def test_a_batch_without_weight_moves_nothing():
    x, y = examples(8)
    update = train(Tokens(), replace(CONFIG, momentum=0.9, weight_decay=0.1), (x, y, torch.zeros(8)))
    assert not flat(update.delta).any()
    assert update.num_examples == 0


# --- Models of every kind


def test_batchnorm_statistics_and_counters_travel_as_deltas():
    x, y = examples(16, dtype=torch.float32)
    engine = Engine(Normed(), replace(CONFIG, local_epochs=2), 1)
    delta = engine.train("a", (x, y), 0, engine.initial(), Arena.zeros(engine.schema)).delta.views()
    assert delta["1.running_mean"].abs().min() > 0
    assert delta["1.num_batches_tracked"] == 4


def test_buffers_that_forward_replaces_still_travel_and_private_ones_start_afresh():
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 3)
            self.register_buffer("calls", torch.zeros((), dtype=torch.int32))
            self.register_buffer("ready", torch.tensor(False))
            self.register_buffer("private", torch.zeros(()), persistent=False)

        def forward(self, x):
            self.calls = self.calls + 1
            self.ready = torch.tensor(True)
            self.private += 1
            return self.linear(x) * self.private

    class Counted(Small32):
        def model(self):
            return Counter()

    engine, data = Engine(Counted(), CONFIG, 1), examples(24, dtype=torch.float32)
    start = engine.initial()
    updates = [engine.train("a", data, 0, start, Arena.zeros(engine.schema)) for _ in range(2)]
    assert updates[0].delta.views()["calls"] == 3
    assert not updates[0].delta.views()["ready"]  # a bool has no difference, so it never moves
    assert updates[0].delta.digest == updates[1].delta.digest


def test_tied_weights_travel_once_and_stay_tied():
    class Tied(Small):
        def model(self):
            model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)).double()
            model[1].weight = model[0].weight
            return model

    engine = Engine(Tied(), CONFIG, 1)
    assert [s.name for s in engine.schema.tensors] == ["0.weight"]
    assert (
        flat(engine.train("a", examples(9), 0, engine.initial(), Arena.zeros(engine.schema)).delta).norm() > 0
    )
    assert engine.model[1].weight is engine.model[0].weight


def test_frozen_parameters_stay_and_mixed_precisions_train_together():
    class Mixed(Small):
        def model(self):
            model = nn.Sequential(nn.Linear(6, 5).double(), nn.Linear(5, 4).double(), nn.Linear(4, 3))
            model[0].requires_grad_(False)
            return model

        def loss(self, model, batch):
            return F.cross_entropy(model[2](model[1](model[0](batch[0])).float()), batch[1])

    delta = train(Mixed(), CONFIG, examples(20)).delta.views()
    moved = {name for name, d in delta.items() if d.any()}
    assert moved == {"1.weight", "1.bias", "2.weight", "2.bias"}


def test_a_model_without_parameters_trains_to_nothing():
    class Empty(Small):
        def model(self):
            return nn.Identity()

    update = train(Empty(), CONFIG, examples(20))
    assert update.delta.schema.nbytes == 0
    assert update.num_examples == 20


# --- Precision


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_comes_close_to_full(precision):
    data = examples(40, dtype=torch.float32)
    full = flat(train(Small32(), CONFIG, data).delta)
    mixed = flat(train(Small32(), replace(CONFIG, precision=precision), data).delta)
    assert mixed.dtype == torch.float32
    assert 0 < (mixed - full).norm() < 0.02 * full.norm()


def test_an_overflow_in_fp16_is_retried_at_a_smaller_scale_and_loses_no_step():
    class Loud(Small32):
        def loss(self, model, batch):
            return super().loss(model, batch) * 1000

    data, quiet = examples(40, dtype=torch.float32), replace(CONFIG, lr=1e-4, batch_size=0)
    full = flat(train(Loud(), quiet, data).delta)
    mixed = flat(train(Loud(), replace(quiet, precision="fp16"), data).delta)
    assert (mixed - full).norm() < 0.02 * full.norm()


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_loss_that_is_not_finite_is_not_hidden(precision):
    class Broken(Small32):
        def loss(self, model, batch):
            return super().loss(model, batch) * float("nan")

    update = train(Broken(), replace(CONFIG, precision=precision), examples(8, dtype=torch.float32))
    assert flat(update.delta).isnan().all()
    assert np.isnan(update.metrics["loss"][0])


# --- Metrics and errors


def test_metrics_are_sums_and_counts_whose_averages_are_exact():
    x, y = examples(50)
    engine = Engine(Small(), replace(CONFIG, eval_batch_size=7), 1)
    start = engine.initial()
    parts = {"a": engine.evaluate((x[:13], y[:13]), start), "b": engine.evaluate((x[13:], y[13:]), start)}
    whole = averages({"all": engine.evaluate((x, y), start)})
    assert averages(parts) == pytest.approx(whole, abs=1e-12)
    assert set(whole) == {"loss", "accuracy"}
    model = engine.task.model()
    start.bind(model)
    assert whole["loss"] == pytest.approx(F.cross_entropy(model(x), y).item(), abs=1e-12)
    assert parts["a"]["accuracy"][1] == 13


def test_the_training_loss_of_a_round_is_reported():
    x, y = examples(20)
    engine = Engine(Small(), replace(CONFIG, batch_size=0), 1)
    update = engine.train("a", (x, y), 0, engine.initial(), Arena.zeros(engine.schema))
    before = engine.evaluate((x, y), engine.initial())["loss"]
    assert update.metrics["loss"] == pytest.approx(before)


def test_dropout_is_off_in_evaluation_and_on_again_in_training():
    engine, data = Engine(Normed(), CONFIG, 1), examples(20, dtype=torch.float32)
    start = engine.initial()
    first = engine.evaluate(data, start)
    engine.train("a", data, 0, start, Arena.zeros(engine.schema))
    assert engine.model.training
    assert engine.evaluate(data, start) == first


def test_evaluating_nothing_gives_a_loss_without_weight():
    assert Engine(Small(), CONFIG, 1).evaluate(examples(0), Engine(Small(), CONFIG, 1).initial()) == {
        "loss": (0.0, 0.0)
    }


def test_what_evaluate_returns_is_checked():
    class Wrong(Small):
        def evaluate(self, model, batch):
            return {"accuracy": 0.5}

    engine = Engine(Wrong(), CONFIG, 1)
    with pytest.raises(TaskError, match=r"gives a float as .accuracy.\. Return .*: sums and counts"):
        engine.evaluate(examples(4), engine.initial())


def test_an_error_in_the_loss_names_type_place_site_and_round_but_no_data(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", ["", *__import__("sys").path])
    (tmp_path / "faulty.py").write_text(
        "import fedtrain, torch\n"
        "class Faulty(fedtrain.Task):\n"
        "    def model(self): return torch.nn.Linear(6, 3).double()\n"
        "    def data(self, site): ...\n"
        "    def loss(self, model, batch):\n"
        "        raise ValueError(f'patient {batch}')\n"
    )
    with pytest.raises(TaskError) as caught:
        train(load_task("faulty:Faulty", tmp_path), CONFIG, examples(8), site="b", round=3)
    assert str(caught.value) == "ValueError in faulty.py:6, in loss, site b, round 4"


def test_a_task_that_drops_its_gradients_is_told_so():
    class Zeroing(Small):
        def loss(self, model, batch):
            model.zero_grad()
            return super().loss(model, batch)

    with pytest.raises(TaskError, match="leave it to us"):
        train(Zeroing(), CONFIG, examples(8))


def test_what_model_returns_is_checked():
    class NoModel(Small):
        def model(self):
            return "model"

    with pytest.raises(TaskError, match="returned a str"):
        Engine(NoModel(), CONFIG, 1)


@pytest.mark.parametrize("device", ["gpu", "cuda:99"])
def test_a_device_that_is_not_there_is_refused(device):
    with pytest.raises(ConfigError, match=r"train\.device"):
        Engine(Small(), replace(CONFIG, device=device), 1)


def test_an_arena_written_again_has_a_new_digest():
    engine, out = Engine(Small(), CONFIG, 1), None
    start = engine.initial()
    out = Arena.zeros(engine.schema)
    first = engine.train("a", examples(8), 0, start, out).delta.digest
    assert engine.train("b", examples(20), 0, start, out).delta.digest != first


# --- The learning rate over a run


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_the_learning_rate_goes_on_from_round_to_round_and_ends_with_the_run(optimizer):
    config = replace(CONFIG, batch_size=8, optimizer=optimizer, warmup=2, decay="linear", local_epochs=2)
    data = examples(16)  # two steps an epoch, four a round, eight in both rounds
    asked = []

    class Theirs(Small):
        def optimizer(self, parameters):
            kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[optimizer]
            asked.append(kind(parameters, lr=0.1))
            asked[-1].register_step_pre_hook(lambda o, *_: rates.append(o.param_groups[0]["lr"]))
            return asked[-1]

    rates = []
    ours, theirs = (Engine(task, config, 1, rounds=2) for task in (Small(), Theirs()))
    start = ours.initial()
    for round in (0, 1):
        a, b = (e.train("a", data, round, start, Arena.zeros(e.schema)).delta for e in (ours, theirs))
        torch.testing.assert_close(flat(a), flat(b), rtol=0, atol=1e-12)
    assert rates == pytest.approx([0.05, 0.1, *(0.1 * (1 - i / 6) for i in range(6))])


def test_a_stream_whose_length_nobody_knows_can_have_no_schedule():
    class Stream(IterableDataset):
        def __iter__(self):
            return zip(*examples(16), strict=True)

    batches = DataLoader(Stream(), batch_size=8)
    with pytest.raises(ConfigError, match=r"train\.warmup, train\.decay: .* Set train\.local_steps"):
        train(Small(), replace(CONFIG, decay="cosine"), batches)
    update = train(Small(), replace(CONFIG, decay="cosine", local_steps=3), batches)
    assert flat(update.delta).abs().max() > 1e-3
