"""What a mesh's engine does that needs no second process: sizes, cuts, steps left out, memory, plans."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.bias import CausalBias, causal_lower_right
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from fedtrain.config import Config, ParallelConfig, TrainConfig
from fedtrain.errors import ConfigError, TaskError
from fedtrain.schema import Schema, TensorSpec
from fedtrain.training.engine import MAX_SKIPPED
from fedtrain.training.mesh import Mesh, Sizes
from fedtrain.training.optimizers import TorchOptimizer, schedule
from fedtrain.training.parallel import context
from fedtrain.training.parallel.engine import MeshEngine
from fedtrain.training.parallel.estimate import estimate
from fedtrain.training.parallel.families import Heads, plan_of
from fedtrain.training.parallel.flops import peak_flops
from fedtrain.training.parallel.outer import split
from fedtrain.training.parallel.outside import Replay, inputs_of
from fedtrain.training.parallel.pipeline import even_cuts
from fedtrain.training.parallel.plan import Plan
from fedtrain.training.parallel.wrap import save_memory
from fedtrain.training.task import Task

CPU = torch.device("cpu")


class Rows(Task):
    poison = False

    def model(self):
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))

    def data(self, site):
        return torch.randn(32, 4, generator=torch.Generator().manual_seed(0)), torch.arange(32) % 2

    def loss(self, model, batch):
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        return loss * float("inf") if self.poison else loss


def config_of(parallel: ParallelConfig | None = None, **train) -> Config:
    return Config(train=TrainConfig(**{"lr": 0.1} | train), parallel=parallel or ParallelConfig())


def engine(task: Task, precision: str = "fp32", **parallel) -> MeshEngine:
    config = config_of(ParallelConfig(**parallel), precision=precision)
    return MeshEngine(task, config, Mesh(Sizes(), CPU))


def weights(found: MeshEngine) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for part in found.parts for p in part.parameters()])


# --- sizes


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_sizes_multiply_to_the_world(dp, tp, pp, cp):
    config = ParallelConfig(tp=tp, pp=pp, cp=cp)
    sizes = Sizes.of(config, dp * tp * pp * cp)
    assert sizes.world == dp * tp * pp * cp
    assert sizes.dp == dp
    with pytest.raises(
        ConfigError, match=f"= {dp * tp * pp * cp}, but there are {dp * tp * pp * cp + 1} ranks"
    ):
        Sizes.of(replace(config, dp=dp), dp * tp * pp * cp + 1)


def test_copies_must_divide_the_data_parallel_ranks():
    with pytest.raises(ConfigError, match="4 data-parallel ranks can't form 3 equal copies"):
        Sizes.of(ParallelConfig(replicate=3), 4)


def test_islands_are_single_ranks_unless_told():
    assert Sizes.of(ParallelConfig(sync="local"), 4).dp_replicate == 4
    assert Sizes.of(ParallelConfig(sync="local", replicate=2), 4) == Sizes(dp_replicate=2, dp_shard=2)


# --- cuts


@given(st.lists(st.integers(0, 100), min_size=1, max_size=20), st.integers(1, 20))
def test_layers_are_cut_into_runs_that_are_never_empty(weights, parts):
    if len(weights) < parts:
        with pytest.raises(ConfigError):
            even_cuts(weights, parts)
        return
    cuts = even_cuts(weights, parts)
    assert cuts[0] == 0
    assert cuts[-1] == len(weights)
    assert len(cuts) == parts + 1
    assert all(a < b for a, b in itertools.pairwise(cuts))


def test_equal_layers_are_cut_equally():
    assert even_cuts([5] * 8, 4) == [0, 2, 4, 6, 8]


@given(st.lists(st.integers(1, 100), min_size=1, max_size=20), st.integers(1, 6))
def test_fragments_hold_every_tensor_once(sizes, parts):
    schema = Schema(tuple(TensorSpec(str(i), (n,), "float32", True) for i, n in enumerate(sizes)))
    fragments = split(schema, parts)
    assert [t for fragment in fragments for t in fragment.tensors] == list(schema.tensors)
    assert len(fragments) <= parts


# --- a loss in two halves


def test_a_loss_runs_as_far_as_its_model_and_then_from_there():
    task, batch = Rows(), (torch.ones(3, 4), torch.tensor([0, 1, 0]))
    (x,) = inputs_of(task.loss, batch)
    assert x is batch[0]
    model = task.model()
    assert torch.equal(task.loss(Replay(model(x)), batch), task.loss(model, batch))


def test_a_loss_that_never_calls_its_model_is_told_so():
    with pytest.raises(TaskError, match="never called its model"):
        inputs_of(lambda model, batch: batch.sum(), torch.ones(2))


def test_a_model_called_by_name_cannot_be_a_pipeline():
    with pytest.raises(TaskError, match="not with mask="):
        inputs_of(lambda model, batch: model(batch, mask=None), torch.ones(2))


# --- steps


def test_a_step_whose_gradient_is_not_finite_is_left_out():
    task = Rows()
    found = engine(task)
    before = weights(found).clone()
    task.poison = True
    step = found.steps.take([(task.data(""), 32)], "step 1")
    assert not step.taken
    assert torch.equal(weights(found), before)
    task.poison = False
    assert found.steps.take([(task.data(""), 32)], "step 2").taken
    assert not torch.equal(weights(found), before)


def test_or_it_ends_the_run_where_that_is_wished():
    task = Rows()
    task.poison = True
    with pytest.raises(TaskError, match=r"step 7: the gradient is not finite"):
        engine(task, nonfinite="raise").steps.take([(task.data(""), 32)], "step 7")


def test_steps_may_be_left_out_but_not_for_ever():
    task = Rows()
    found = engine(task)
    shares = [(task.data(""), 32)]
    task.poison = True
    for step in range(1, MAX_SKIPPED):
        assert not found.steps.take(shares, f"step {step}").taken
    task.poison = False
    assert found.steps.take(shares, "step 20").taken
    task.poison = True
    for step in range(21, 20 + MAX_SKIPPED):
        assert not found.steps.take(shares, f"step {step}").taken
    found.steps.check("step 39")
    assert not found.steps.take(shares, "step 40").taken
    with pytest.raises(TaskError, match=r"step 40: the gradient was not finite in 20 steps in a row"):
        found.steps.check("step 40")


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(
    "train", [{"momentum": 0.9}, {"optimizer": "adam"}, {"optimizer": "adamw", "clip_norm": 0.1}]
)
def test_kernels_that_leave_a_step_out_leave_what_nobody_taking_it_leaves(train, first):
    """torch's SGD has unwritten memory for momentum, where the very first step is left out by its kernels."""
    left = []
    for waits in (False, True):
        task = Rows()
        found = MeshEngine(task, config_of(weight_decay=0.1, **train), Mesh(Sizes(), CPU))
        found.steps.optimizer._asks &= not waits
        for number, task.poison in enumerate([first, False, True, True, False, True, False]):
            taken = found.steps.take([(task.data(""), 32)], "", number).taken
            assert bool(taken) is not task.poison
            assert isinstance(taken, bool) is (waits or number <= first)
        left.append((weights(found), *tensors_in(found.optimizer.state_dict())))
    assert all(map(torch.equal, *left))
    assert len(left[0]) == len(left[1]) > 4


def tensors_in(state) -> list[torch.Tensor]:
    if isinstance(state, dict):
        return [tensor for value in state.values() for tensor in tensors_in(value)]
    return [state] if isinstance(state, torch.Tensor) else []


class Tokens(Rows):
    """Its loss is a sum, with a weight that is a tensor, as of a mask."""

    weight: torch.Tensor | float = 0.0

    def loss(self, model, batch):
        return super().loss(model, batch) * len(batch[1]), self.weight


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("batches", [1, 2])
def test_a_weight_that_nobody_has_read_weighs_as_one_that_is_read(batches, precision):
    found = []
    for kind in (float, torch.tensor):
        task = Tokens()
        one = engine(task, precision)
        share = task.data(""), 32
        for task.weight in (kind(32.0), kind(0.0), kind(7.0)):
            step = one.steps.take([share] * batches)
            assert bool(step.taken) is bool(task.weight)
            assert isinstance(step.weight, torch.Tensor) is (kind is not float)
        found.append((weights(one), torch.tensor(step.total(), dtype=torch.float64), step.loss))
    assert all(map(torch.equal, *found))


class Blocks(Rows):
    def model(self):
        return nn.Sequential(*(nn.Sequential(nn.Linear(n, 8), nn.ReLU()) for n in (4, 8, 8)), nn.Linear(8, 2))


@pytest.mark.parametrize("again", [False, True])
def test_a_steps_arithmetic_is_that_of_its_model_also_where_activations_are_computed_again(again):
    task = Blocks()
    found = engine(task, peak_tflops=1.0, checkpoint_activations=again)
    found.steps.take([(task.data(""), 32)], "step 1")
    forward = [2 * 32 * inputs * outputs for inputs, outputs in ((4, 8), (8, 8), (8, 8), (8, 2))]
    assert (
        found.flops.of_step == 3 * sum(forward) - forward[0]
    )  # nobody asks for the gradient of the examples


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 NVL", 835), ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989), ("NVIDIA GB200", 2500), ("NVIDIA B200", 2250), ("NVIDIA L40", 181),
        ("NVIDIA L40S", 362), ("NVIDIA L4", 121), ("NVIDIA A100-SXM4-80GB", 312), ("NVIDIA A10", 0),
    ],
)  # fmt: skip
def test_a_gpu_is_known_by_whole_words_of_its_name(monkeypatch, name, tflops):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(torch.device("cuda")) == tflops * 1e12


def test_a_rank_without_examples_in_its_first_step_says_what_to_change():
    with pytest.raises(ConfigError, match=r"train\.batch_size"):
        engine(Rows()).steps.take([(None, 1)], "step 1")


class Planless(nn.Module):
    """A model whose blocks no plan names."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x):
        return self.layer(x)


def test_compile_without_a_plan_compiles_the_whole_model(monkeypatch):
    task, compiled = Rows(), []

    def compile(forward):
        compiled.append(forward.__self__)
        return forward

    monkeypatch.setattr(torch, "compile", compile)
    task.model = Planless
    found = engine(task, compile=True)
    assert compiled == found.parts
    found.steps.take([(task.data(""), 32)])
    with pytest.raises(ConfigError, match=r"^parallel\.checkpoint_activations: .* blocks .* Name them"):
        engine(task, checkpoint_activations=True)


def test_to_compile_without_a_compiler_is_refused_before_the_first_step(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match=r"needs a C\+\+ compiler, and no-such-compiler is not here"):
        engine(Rows(), compile=True)


@pytest.mark.parametrize(("decay", "last"), [("none", 1.0), ("linear", 1 / 90), ("cosine", 0.0003)])
def test_the_learning_rate_rises_and_then_decays_to_the_last_step(decay, last):
    inner = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    optimizer, factor = TorchOptimizer(inner), schedule(TrainConfig(warmup=10, decay=decay), 100)
    rates = []
    for step in range(100):
        optimizer.step([], factor(step))
        rates.append(inner.param_groups[0]["lr"])
    assert rates[:10] == pytest.approx([i / 10 for i in range(1, 11)])
    assert max(rates) == pytest.approx(1.0)
    assert rates[-1] == pytest.approx(last, abs=1e-4)


def test_decay_needs_to_know_the_last_step():
    with pytest.raises(ConfigError, match=r"train\.decay"):
        schedule(TrainConfig(decay="cosine"), None)


# --- memory


def memory(ranks: int, task: Task | None = None, optimizer: str = "adamw", device="cpu", **parallel):
    train = TrainConfig(optimizer=optimizer, device=device)
    config = Config(train=train, parallel=ParallelConfig(**parallel))
    task = task or Rows()
    return estimate(task, config, ranks, task.data(""))


def test_memory_is_what_the_mesh_leaves_of_the_model():
    model = (4 * 8 + 8 + 8 * 2 + 2) * 4
    whole = memory(4)
    assert (whole.parameters, whole.gradients, whole.optimizer) == (model, model, 2 * model)
    assert memory(4, zero=1).optimizer == 2 * model // 4
    assert memory(4, zero=2).gradients == model // 4
    assert memory(4, zero=3).parameters < memory(4, zero=2).parameters
    assert memory(4, optimizer="sgd").optimizer == 0
    parts = whole.parameters + whole.gradients + whole.optimizer + whole.activations
    assert whole.total == parts


def test_frozen_parameters_have_no_gradients_and_no_optimizer_state():
    class Half(Rows):
        def model(self):
            model = super().model()
            next(model.children()).requires_grad_(False)
            return model

    trained = (8 * 2 + 2) * 4
    found = memory(4, Half())
    assert (found.gradients, found.optimizer) == (trained, 2 * trained)
    assert found.parameters == memory(4).parameters


def test_activations_are_those_of_a_ranks_share_of_the_batch():
    assert memory(1).activations == 4 * memory(4).activations > 0


def test_activations_that_are_computed_again_are_not_kept():
    class Deep(Rows):
        def model(self):
            blocks = (nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 4)) for _ in range(3))
            return nn.Sequential(*blocks, nn.Linear(4, 2))

    assert memory(1, Deep(), checkpoint_activations=True).activations < memory(1, Deep()).activations / 3


# --- plans


def test_the_tasks_own_plan_comes_first():
    class Own(Rows):
        def parallel_plan(self):
            return Plan(blocks="mine")

    assert plan_of(Own(), nn.Linear(1, 1)).blocks == "mine"
    assert plan_of(Rows(), nn.Linear(1, 1)) == Plan()


class Shipping(nn.Module):
    """What a transformers' model says of itself."""

    base_model_prefix = "body"

    def __init__(self, style):
        super().__init__()
        self.body = nn.ModuleDict({"words": nn.Embedding(5, 4)})
        self.head = nn.Linear(4, 5)
        plan = {"layers.*.attn.q_proj": "colwise", "layers.*.attn.o_proj": style}
        self.config = SimpleNamespace(base_model_tp_plan=plan)

    def get_input_embeddings(self):
        return self.body["words"]

    def get_output_embeddings(self):
        return self.head


def test_a_model_is_split_as_it_says_itself_where_that_is_by_columns_and_rows_alone():
    plan = plan_of(Rows(), Shipping("rowwise"))
    assert plan.blocks == "body.layers"
    layers = {f"body.layers.*.{name}" for name in ("attn", "attn.q_proj", "attn.o_proj")}
    assert plan.tensor.keys() == {*layers, "body.words", "head"}
    assert isinstance(plan.tensor["body.layers.*.attn"], Heads)
    assert plan_of(Rows(), Shipping("moe_tp_experts")) == Plan()


def test_blocks_that_are_not_there_are_named():
    with pytest.raises(ConfigError, match=r"'layers' is not in the model, which has 0, 1, 2"):
        Plan(blocks="layers").units(Rows().model())


@pytest.mark.parametrize("kind", ["zero-bubble", "zbv"])
def test_a_gradient_in_two_halves_is_refused_where_torch_gets_it_wrong(kind):
    for other, named in (({"zero": 3}, "zero = 3"), ({"compile": True}, "compile")):
        config = ParallelConfig(pp=2, schedule=kind, **other)
        with pytest.raises(ConfigError, match=f"^parallel.schedule: {kind} .* beside {named}"):
            save_memory(nn.Identity(), [], config)


@pytest.mark.parametrize("rank", [0, 1])
def test_causal_attention_over_parts_is_that_over_the_whole_and_makes_no_mask(monkeypatch, rank):
    query, key, value = torch.randn(3, 2, 4, 8, 16, generator=torch.Generator().manual_seed(1)).unbind()
    parts = [t.chunk(2, -2)[rank] for t in (query, key, value)]
    whole = {id(part): t for part, t in zip(parts, (query, key, value), strict=True)}
    asked = []

    class Asked(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if function is F.scaled_dot_product_attention:
                asked.append(args)
            return function(*args, **(kwargs or {}))

    monkeypatch.setattr(context, "all_gather", lambda part, dim, group: whole[id(part)])
    monkeypatch.setattr(torch.Tensor, "contiguous", lambda part: part)  # else it is another one
    gathered = object.__new__(context.Gathered)
    gathered.rank, gathered.ranks, gathered.group = rank, 2, None
    gathered.causal = causal_lower_right(1, 1)
    with Asked(), FlopCounterMode(display=False):  # as in a run's first step, where a GPU's peak is known
        mine = gathered.attention(*parts, is_causal=True)
    monkeypatch.undo()
    plain = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    assert torch.allclose(mine, plain.chunk(2, -2)[rank], atol=1e-6)
    ((_, keys, _, mask, *_), *_) = asked
    assert isinstance(mask, CausalBias)  # which a kernel takes for what it is
    assert keys.shape[-2] == 4 * (rank + 1)  # later ones are seen by none of these queries


def test_a_stage_without_the_positions_of_a_plan_takes_its_part_all_the_same():
    """They are in another stage; where there are no stages, a name that isn't there is an error."""
    plan, x = Plan(positions=("embedding.positions",)), torch.arange(16).view(2, 8)
    gathered = context.Gathered.__new__(context.Gathered)
    gathered.rank, gathered.ranks = 1, 2
    mesh = SimpleNamespace(sizes=Sizes(pp=2, cp=2), at={"cp": 1})
    with context.in_parts(Rows().model(), x, plan, mesh, gathered, alike=False) as mine:
        assert torch.equal(mine, x[:, 4:])
    mesh.sizes = Sizes(cp=2)
    with (
        pytest.raises(AttributeError, match="embedding"),
        context.in_parts(Rows().model(), x, plan, mesh, gathered, alike=False),
    ):
        pass
