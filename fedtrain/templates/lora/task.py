"""To which of four departments a made-up note belongs: LoRA adapters on a small BERT whose base is frozen."""

import zlib

import torch
from peft import LoraConfig, get_peft_model
from torch.nn import functional as F
from transformers import BertConfig, BertForSequenceClassification

import fedtrain

DEPARTMENTS = {
    "cardiology": "heart valve rhythm stent murmur angina aorta pulse",
    "neurology": "stroke seizure nerve migraine tremor gait reflex memory",
    "oncology": "tumour biopsy lymph chemo margin staging node relapse",
    "orthopedics": "bone fracture knee cast hip tendon joint splint",
}
COMMON = "patient reports since week the and with no new known left right mild severe before after seen today"
WORDS = sorted({*COMMON.split(), *(word for words in DEPARTMENTS.values() for word in words.split())})
LENGTH = 12  # words of a note


class Task(fedtrain.Task):
    def sites(self):
        return ["site-1", "site-2", "site-3"]

    def model(self):
        config = BertConfig(
            vocab_size=1 + len(WORDS), hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
            intermediate_size=128, max_position_embeddings=LENGTH + 1, num_labels=len(DEPARTMENTS),
        )  # fmt: skip
        base = BertForSequenceClassification(config)  # or .from_pretrained(folder), the same at every site
        lora = LoraConfig(task_type="SEQ_CLS", r=8, lora_alpha=16, target_modules=["query", "value"])
        return get_peft_model(base, lora)

    def data(self, site):
        return self.notes(site, 300)

    def eval_data(self, site):
        return self.notes(f"{site}, held out", 150)

    def loss(self, model, batch):
        notes, department = batch
        return F.cross_entropy(model(input_ids=notes).logits, department)

    def evaluate(self, model, batch):
        notes, department = batch
        logits = model(input_ids=notes).logits
        loss = F.cross_entropy(logits, department, reduction="sum")
        right = (logits.argmax(1) == department).sum()
        return {"loss": (loss, len(department)), "accuracy": (right, len(department))}

    def notes(self, name, count):
        """(words as tokens, after a first token 0, [count, 1 + LENGTH]; the department's number [count]).
        Four words of a note are its department's."""
        random = torch.Generator().manual_seed(zlib.crc32(name.encode()))

        def some(words, each):
            tokens = torch.tensor([1 + WORDS.index(word) for word in words.split()])
            return tokens[torch.randint(len(tokens), (count, each), generator=random)]

        own = torch.stack([some(words, 4) for words in DEPARTMENTS.values()])
        department = torch.randint(len(own), (count,), generator=random)
        first = torch.zeros(count, 1, dtype=torch.long)
        return torch.cat(
            [first, own[department, torch.arange(count)], some(COMMON, LENGTH - 4)], 1
        ), department
