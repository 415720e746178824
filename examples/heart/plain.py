"""A plain training script, which knows nothing of fedtrain but its files: `train.command` runs it at a site.

    fedtrain simulate --set run.name=by-script --set 'train.command=python plain.py {request}'

What stands between the two marks is anyone's loop: torchtitan's or accelerate's, say.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from task import INPUTS, Heart  # for its patients alone
from torch import nn
from torch.nn import functional as F

request = json.loads(Path(sys.argv[1]).read_text())
settings, model = request["train"], nn.Linear(INPUTS, 1)
model.load_state_dict(load_file(request["weights"]))

# ---
torch.manual_seed(request["seed"])
x, sick = Heart().data(request["site"])
optimizer = torch.optim.SGD(model.parameters(), settings["lr"])
total = 0.0
for rows in torch.randperm(len(x)).split(settings["batch_size"]):
    loss = F.binary_cross_entropy_with_logits(model(x[rows]).squeeze(1), sick[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    total += loss.item() * len(rows)
# ---

save_file(model.state_dict(), request["out"])
Path(request["report"]).write_text(json.dumps({"examples": len(x), "metrics": {"loss": total / len(x)}}))
