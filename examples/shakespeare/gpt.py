"""A small GPT, written so that it can be split along every axis: by layers, tensors, and the sequence."""

import torch
from torch import nn
from torch.nn import functional as F

import fedtrain


class Embedding(nn.Module):
    def __init__(self, vocabulary, length, width):
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.place = nn.Embedding(length, width)
        self.register_buffer("positions", torch.arange(length), persistent=False)

    def forward(self, tokens):
        return self.token(tokens) + self.place(self.positions[: tokens.shape[1]])


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.head_width = width // heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = (
            part(x).view(batch, length, -1, self.head_width).transpose(1, 2)  # heads: as many as are here
            for part in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.feed_forward = Attention(width, heads), FeedForward(width)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.feed_forward(self.norm2(x))


class GPT(nn.Module):
    """Next-character logits [batch, length, vocabulary]. A stage of a pipeline lacks some of the parts."""

    def __init__(self, vocabulary=128, length=64, width=64, heads=4, layers=4):
        super().__init__()
        self.embedding = Embedding(vocabulary, length, width)
        self.blocks = nn.ModuleDict({str(i): Block(width, heads) for i in range(layers)})
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, x):
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(self.norm(x))


def stage(model, blocks, first, last):
    """One stage of a pipeline: some blocks, the embedding in the first, the head in the last."""
    if not first:
        model.embedding = None
    if not last:
        model.norm = model.head = None
    model.blocks = nn.ModuleDict({name: b for name, b in model.blocks.items() if int(name) in blocks})
    return model


def plan():
    """How a GPT is split between tensor-parallel ranks, and where the cuts of the other axes are."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        PrepareModuleOutput,
        RowwiseParallel,
        SequenceParallel,
    )

    attention, mlp = "blocks.*.attention", "blocks.*.feed_forward"
    columns = {f"{attention}.{name}": ColwiseParallel() for name in ("query", "key", "value")}
    tensor = {
        **columns, f"{attention}.out": RowwiseParallel(),
        f"{mlp}.up": ColwiseParallel(), f"{mlp}.down": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }  # fmt: skip
    whole = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    sequence = tensor | {  # between attention and feed-forward each rank has a part of the sequence
        "embedding": PrepareModuleOutput(output_layouts=(Replicate(),), desired_output_layouts=(Shard(1),)),
        **dict.fromkeys(("blocks.*.norm1", "blocks.*.norm2", "norm"), SequenceParallel()),
        attention: whole, f"{attention}.out": RowwiseParallel(output_layouts=Shard(1)),
        mlp: whole, f"{mlp}.down": RowwiseParallel(output_layouts=Shard(1)),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }  # fmt: skip
    return fedtrain.Plan(
        blocks="blocks", tensor=tensor, sequence=sequence, stage=stage, positions=("embedding.positions",)
    )
