"""Which loans will not be paid back? Six lenders, each with loans for another purpose."""

import csv
import gzip

import torch
from torch import nn
from torch.nn import functional as F

import fedtrain
from fedtrain import metrics

LENDERS = {
    "new-cars": ("car (new)",),
    "used-cars": ("car (used)",),
    "furniture": ("furniture/equipment",),
    "television": ("radio/television",),
    "business": ("business",),
    "other": ("education", "repairs", "domestic appliances", "retraining", "others"),
}
# Typical value and spread; no lender's data is needed to scale it.
AMOUNTS = {
    "duration_in_month": (20, 12),
    "credit_amount": (3000, 2500),
    "installment_rate_in_percentage_of_disposable_income": (3, 1),
    "present_residence_since": (3, 1),
    "age_in_years": (35, 11),
    "number_of_existing_credits_at_this_bank": (1.5, 0.6),
}
KINDS = {
    "status_of_existing_checking_account": (
        "... < 0 DM", "0 <= ... < 200 DM", "... >= 200 DM / salary assignments for at least 1 year",
        "no checking account",
    ),
    "credit_history": (
        "no credits taken/ all credits paid back duly", "all credits at this bank paid back duly",
        "existing credits paid back duly till now", "delay in paying off in the past",
        "critical account/ other credits existing (not at this bank)",
    ),
    "savings_account_and_bonds": (
        "... < 100 DM", "100 <= ... < 500 DM", "500 <= ... < 1000 DM", "... >= 1000 DM",
        "unknown/ no savings account",
    ),
    "present_employment_since": (
        "unemployed", "... < 1 year", "1 <= ... < 4 years", "4 <= ... < 7 years", "... >= 7 years",
    ),
    "other_debtors_or_guarantors": ("none", "co-applicant", "guarantor"),
    "property": (
        "real estate", "building society savings agreement/ life insurance",
        "car or other, not in attribute Savings account/bonds", "unknown / no property",
    ),
    "other_installment_plans": ("bank", "stores", "none"),
    "housing": ("rent", "own", "for free"),
}  # fmt: skip
INPUTS = len(AMOUNTS) + sum(map(len, KINDS.values()))
BAD_COSTS = 5  # a bad loan granted costs five times a good one refused: the data's own cost matrix
THRESHOLD = 1 / (1 + BAD_COSTS)  # of the probability, from which on refusing costs less


class Credit(fedtrain.Task):
    def sites(self):
        return list(LENDERS)

    def model(self):
        return nn.Linear(INPUTS, 1)

    def data(self, site):
        return self.loans(site, test=False)

    def eval_data(self, site):
        return self.loans(site, test=True)

    def loss(self, model, batch):
        x, bad = batch
        return F.binary_cross_entropy_with_logits(model(x).squeeze(1), bad)

    def evaluate(self, model, batch):
        x, bad = batch
        logits = model(x).squeeze(1)
        chance, refused = logits.sigmoid(), logits.sigmoid() > THRESHOLD
        cost = (refused & (bad == 0)).sum() + BAD_COSTS * (~refused & (bad == 1)).sum()
        loss = F.binary_cross_entropy_with_logits(logits, bad, reduction="sum")
        return {
            "loss": (loss, len(x)), "cost": (cost, len(x)), **metrics.binary_histogram(chance, bad, bins=200),
        }  # fmt: skip

    def metrics(self, sums):
        return {"cost": sums["cost"][0] / sums["cost"][1], "auroc": metrics.auroc(sums)}

    def loans(self, site, test):
        """A lender's loans; each third is a test."""
        own = self.data_dir / f"{site}.csv.gz"
        path = own if own.exists() else self.data_dir / "german_credit.csv.gz"
        with gzip.open(path, "rt", newline="") as f:
            known = [row for row in csv.DictReader(f) if row["purpose"] in LENDERS[site]]
        rows = [row for i, row in enumerate(known) if (i % 3 == 2) == test]
        bad = torch.tensor([float(row["creditability"] == "bad") for row in rows])
        return torch.tensor([numbers(row) for row in rows]), bad


def numbers(row):
    """A loan as INPUTS numbers of about unit size. Sex, family, nationality and telephone are left out."""
    x = [(float(row[name]) - typical) / spread for name, (typical, spread) in AMOUNTS.items()]
    return x + [float(row[name] == kind) for name, kinds in KINDS.items() for kind in kinds]
