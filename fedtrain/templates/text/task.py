"""Which of three wards a note is from. This file runs in simulations and at sites: replace data() first."""

import random

import torch
from torch import nn
from torch.nn import functional as F

import fedtrain

WARDS = ["heart pulse valve rhythm", "nerve reflex memory tremor", "bone joint cast knee"]
COMMON = "patient reports since week the and with no new left right mild severe before after seen today"
WORDS = {word: 1 + i for i, word in enumerate(sorted(" ".join([COMMON, *WARDS]).split()))}  # 0 is padding


class Notes(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(1 + len(WORDS), 16, padding_idx=0)
        self.reader = nn.GRU(16, 32, batch_first=True)
        self.ward = nn.Linear(32, len(WARDS))

    def forward(self, words):
        return self.ward(self.reader(self.embedding(words))[0].mean(1))


class Task(fedtrain.Task):
    def sites(self):
        return ["site-1", "site-2", "site-3"]  # who has data; without this, simulate.partition splits a pool

    def model(self):
        return Notes()

    def data(self, site):
        return notes(site, 300)  # here: read this site's notes, from self.data_dir

    def eval_data(self, site):
        return notes(f"{site} held out", 150)

    def collate(self, examples):  # notes are of any length
        words, wards = zip(*examples, strict=True)
        return nn.utils.rnn.pad_sequence(words, batch_first=True), torch.tensor(wards)

    def loss(self, model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    def evaluate(self, model, batch):  # each metric as (sum, count): averages over sites are exact
        words, wards = batch
        logits = model(words)
        wrong = F.cross_entropy(logits, wards, reduction="sum")
        return {"loss": (wrong, len(wards)), "accuracy": ((logits.argmax(1) == wards).sum(), len(wards))}


def notes(name, count):
    """Made-up notes of 8 to 16 words, three of which are their ward's: (int64 [words], ward) each."""
    draw, made = random.Random(name), []
    for _ in range(count):
        ward = draw.randrange(len(WARDS))
        words = draw.choices(WARDS[ward].split(), k=3) + draw.choices(COMMON.split(), k=draw.randint(5, 13))
        draw.shuffle(words)
        made.append((torch.tensor([WORDS[word] for word in words]), ward))
    return made
