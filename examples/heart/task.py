"""Heart disease at four hospitals: from ten findings, is a coronary artery narrowed?"""

import csv
import math

import torch
from torch import nn
from torch.nn import functional as F

import fedtrain

HOSPITALS = {
    "cleveland": "Cleveland",
    "hungary": "Hungary",
    "switzerland": "Switzerland",
    "va-long-beach": "VA Long Beach",
}  # site -> its name in the column "dataset"
# Typical value and spread of each measurement, from textbooks: no hospital's data is needed to scale it.
MEASURED = {"age": (54, 9), "trestbps": (130, 18), "chol": (240, 50), "thalch": (140, 25), "oldpeak": (1, 1)}
YES_NO = {"sex": "Male", "fbs": "TRUE", "exang": "TRUE"}
CODES = {"sex": ("Female", "Male"), "fbs": ("FALSE", "TRUE"), "exang": ("FALSE", "TRUE")}
ONE_OF = {
    "cp": ("typical angina", "atypical angina", "non-anginal", "asymptomatic"),
    "restecg": ("normal", "st-t abnormality", "lv hypertrophy"),
}
INPUTS = len(MEASURED) + len(YES_NO) + sum(map(len, ONE_OF.values()))


class Heart(fedtrain.Task):
    def sites(self):
        return list(HOSPITALS)

    def model(self):
        return nn.Linear(INPUTS, 1)  # logistic regression: 15 odds that a physician can read, and a bias

    def data(self, site):
        return self.patients(site, test=False)

    def eval_data(self, site):
        return self.patients(site, test=True)

    def loss(self, model, batch):
        x, sick = batch
        return F.binary_cross_entropy_with_logits(model(x).squeeze(1), sick)

    def evaluate(self, model, batch):
        x, sick = batch
        logits = model(x).squeeze(1)
        loss = F.binary_cross_entropy_with_logits(logits, sick, reduction="sum")
        return {"loss": (loss, len(x)), "accuracy": (((logits > 0) == (sick > 0.5)).sum(), len(x))}

    def columns(self, site):
        """All rows, complete or not, as the hospital wrote them: what `fedtrain stats` tells of."""
        rows = self.rows(site)
        found = {name: [measured(row, name) for row in rows] for name in MEASURED}
        found |= {name: ([row[name] for row in rows], kinds) for name, kinds in ONE_OF.items()}
        found |= {name: ([row[name] for row in rows], CODES[name]) for name in YES_NO}
        return found | {"sick": ([("no", "yes")[row["num"] != "0"] for row in rows], ("no", "yes"))}

    def rows(self, site):
        """A hospital's own file if it is there, else its rows of the common one."""
        own = self.data_dir / f"{site}.csv"
        with (own if own.exists() else self.data_dir / "heart_disease_uci.csv").open(newline="") as f:
            return [row for row in csv.DictReader(f) if row["dataset"] == HOSPITALS[site]]

    def patients(self, site, test):
        """The complete rows of a hospital; each third is a test."""
        rows = [row for i, row in enumerate(filter(complete, self.rows(site))) if (i % 3 == 2) == test]
        return torch.tensor([findings(r) for r in rows]), torch.tensor([float(r["num"] != "0") for r in rows])


def complete(row):
    return all(row[name] for name in (*MEASURED, *YES_NO, *ONE_OF))


def measured(row, name):
    """A measurement; NaN where there is none."""
    value = float(row[name] or "nan")
    unknown = value == 0 and name in ("trestbps", "chol")  # how the hospitals wrote "not measured"
    return math.nan if unknown else value


def findings(row):
    """One patient as INPUTS numbers of about unit size."""
    x = []
    for name, (typical, spread) in MEASURED.items():
        value = measured(row, name)
        x.append(0.0 if math.isnan(value) else (value - typical) / spread)
    x += [float(row[name] == yes) for name, yes in YES_NO.items()]
    x += [float(row[name] == kind) for name, kinds in ONE_OF.items() for kind in kinds]
    return x
