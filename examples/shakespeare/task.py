"""Next character of three plays by Shakespeare, one play a site."""

import torch
from gpt import GPT, plan
from torch.nn import functional as F

import fedtrain

LENGTH = 64  # characters that the model sees at once
HELD_OUT = 0.1  # of each play, its end


class Shakespeare(fedtrain.Task):
    def sites(self):
        return ["macbeth", "midsummer-nights-dream", "tempest"]

    def model(self):
        return GPT(vocabulary=128, length=LENGTH)

    def data(self, site):
        return self.windows(site, held_out=False)

    def eval_data(self, site):
        return self.windows(site, held_out=True)

    def loss(self, model, batch):
        characters, following = batch
        logits = model(characters)
        return F.cross_entropy(logits.flatten(0, 1), following.flatten(), reduction="sum"), following.numel()

    def evaluate(self, model, batch):
        characters, following = batch
        right = (model(characters).argmax(-1) == following).sum()
        return {"accuracy": (right, following.numel())}

    def parallel_plan(self):
        return plan()

    def windows(self, site, held_out):
        """(characters, the same one further), each [n, LENGTH]."""
        text = torch.frombuffer(bytearray((self.data_dir / f"{site}.txt").read_bytes()), dtype=torch.uint8)
        cut = int(len(text) * (1 - HELD_OUT))
        part = (text[cut:] if held_out else text[:cut]).long()
        count = (len(part) - 1) // LENGTH
        return part[: count * LENGTH].view(count, LENGTH), part[1 : count * LENGTH + 1].view(count, LENGTH)
