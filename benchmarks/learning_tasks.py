"""The tasks of benchmarks/learning.py: pictures of clothing dealt by label, and Shakespeare's roles.

Each site has test data of its own, drawn as its training data is. Every test example is at one site, so the
average of an evaluation is the accuracy on the whole test set; of a method that has a model for each site it
is that of each site's own model on the site's own examples.
"""

import importlib.util
import re
from collections import Counter, OrderedDict
from functools import cache
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import fedtrain
from fedtrain.digest import seed_of
from fedtrain.population import Population
from fedtrain.training.partition import partition

EXAMPLES = Path(__file__).parents[1] / "examples"
SITES = 20
LEAST = 10  # training examples that a site has: a partition that gives one fewer is drawn again
SPEECH = re.compile(r"(?m)^\s*([A-Z][A-Z ]+)\.?\n")  # the line that names who speaks
LENGTH = 32  # characters of an example


def example(name):
    """The module of an example's task.py; both examples call it `task`."""
    spec = importlib.util.spec_from_file_location(f"{name}_task", EXAMPLES / name / "task.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


fashion = example("fashion_mnist")


class Clothing(fashion.FashionMNIST):
    """Fashion-MNIST, or the first so many examples of it, dealt by Dirichlet(alpha)."""

    def __init__(self, alpha, seed, train, test, convolutions=False):
        self.alpha, self.seed, self.train, self.test, self.convolutions = (
            alpha,
            seed,
            train,
            test,
            convolutions,
        )

    def sites(self):
        return Population(SITES)

    def model(self):
        return convolutional() if self.convolutions else perceptron()

    def data(self, site):
        return self.of(site, "train", self.train, 0)

    def eval_data(self, site):
        return self.of(site, "t10k", self.test, 1)

    def of(self, site, part, count, which):
        """What is dealt to a site of the training (0) or the test examples (1)."""
        images, labels = (tensor[:count] for tensor in self.read(part))
        mine = torch.from_numpy(self.dealt()[site][which])
        return images[mine], labels[mine]

    def dealt(self):
        labels = [self.read("train")[1][: self.train], self.read("t10k")[1][: self.test]]
        return deal(tuple(torch.cat(labels).tolist()), self.train, self.alpha, self.seed)


@cache
def deal(labels, train, alpha, seed):
    """site -> (indices of its training examples, of its test examples). The first `train` of the labels are
    for training; both kinds are dealt in the same shares."""
    for attempt in range(1000):
        parts = partition(labels, f"dirichlet:{alpha}", SITES, seed_of(seed, "dealt", attempt))
        found = [(part[part < train], part[part >= train] - train) for part in parts]
        if all(len(own) >= LEAST and len(tests) for own, tests in found):
            return dict(zip(Population(SITES), found, strict=True))
    raise fedtrain.FedtrainError(f"no partition gave each site {LEAST} examples: take more examples")


class Roles(fedtrain.Task):
    """The next character of what a role says; the 20 roles that speak most are the sites. The last fifth of
    each role's text is for testing."""

    def __init__(self, characters=10**9):
        self.characters = characters  # of each role, at most

    def sites(self):
        return list(speeches())

    def model(self):
        return Speaker()

    def data(self, site):
        return self.windows(site, 0, 0.8)

    def eval_data(self, site):
        return self.windows(site, 0.8, 1)

    def loss(self, model, batch):
        x, y = batch
        return F.cross_entropy(model(x).flatten(0, 1), y.flatten())

    def evaluate(self, model, batch):
        x, y = batch
        return {"accuracy": ((model(x).argmax(-1) == y).sum(), y.numel())}

    def windows(self, site, begin, end):
        """(characters, the same one further), each [n, LENGTH], of a part of the role's text."""
        text = torch.tensor(list(speeches()[site].encode()[: self.characters]))
        part = text[int(begin * len(text)) : int(end * len(text))]
        count = (len(part) - 1) // LENGTH
        return part[: count * LENGTH].view(count, LENGTH), part[1 : count * LENGTH + 1].view(count, LENGTH)


@cache
def speeches():
    """Role -> all that it says in the plays of examples/shakespeare, of the roles that speak most."""
    said, size = {}, Counter()
    for path in sorted((EXAMPLES / "shakespeare" / "data").glob("*.txt")):
        pieces = SPEECH.split(path.read_text("ascii", errors="ignore"))
        for role, text in zip(pieces[1::2], pieces[2::2], strict=True):
            name = role.strip().lower().replace(" ", "-")
            said[name] = said.get(name, "") + text.strip() + "\n"
            size[name] += len(text)
    return {name: said[name] for name, _ in sorted(size.most_common(SITES))}


class Speaker(nn.Module):
    """A character's scores from the 8 characters before it: [n, LENGTH] to [n, LENGTH, 128]."""

    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(128, 16)
        self.mix = nn.Conv1d(16, 64, 8)
        self.norm = nn.LayerNorm(64)
        self.head = nn.Linear(64, 128)

    def forward(self, x):
        seen = F.pad(self.token(x).transpose(1, 2), (7, 0))
        return self.head(F.relu(self.norm(self.mix(seen).transpose(1, 2))))


def perceptron():
    """51,018 parameters: pixels, 64 hidden units with a norm layer, ten kinds."""
    layers = {"flat": nn.Flatten(), "body": nn.Linear(28 * 28, 64), "norm": nn.LayerNorm(64)}
    return nn.Sequential(OrderedDict(layers | {"relu": nn.ReLU(), "head": nn.Linear(64, 10)}))


def convolutional():
    """The network of examples/fashion_mnist with norm layers, its last layer called `head`."""
    layers = {
        "conv1": nn.Conv2d(1, 16, 5, padding=2), "norm1": nn.GroupNorm(4, 16), "relu1": nn.ReLU(),
        "pool1": nn.MaxPool2d(2), "conv2": nn.Conv2d(16, 32, 5, padding=2), "norm2": nn.GroupNorm(4, 32),
        "relu2": nn.ReLU(), "pool2": nn.MaxPool2d(2), "flat": nn.Flatten(), "body": nn.Linear(32 * 7 * 7, 64),
        "relu3": nn.ReLU(), "head": nn.Linear(64, 10),
    }  # fmt: skip
    return nn.Sequential(OrderedDict(layers))
