"""Survival with lung cancer at 18 institutions: a Cox model, stratified by institution."""

import csv

import torch
from torch import nn

import fedtrain

# Typical value and spread of each finding, from textbooks: no institution's data is needed to scale it.
FINDINGS = {
    "age": (62, 9),
    "sex": (1.5, 0.5),  # 1 male, 2 female
    "ph.ecog": (1, 0.7),  # 0 well … 4 bedbound, by the physician
    "ph.karno": (80, 12),  # 100 well … 0, by the physician
    "pat.karno": (80, 15),  # the same, by the patient
    "wt.loss": (10, 13),  # pounds in six months
}


class Lung(fedtrain.Task):
    def sites(self):
        """Institutions with four patients or more."""
        return [f"institution-{n}" for n in (1, 2, 3, 4, 5, 6, 7, 10, 11, 12, 13, 15, 16, 21, 22, 26, 32)]

    def model(self):
        model = nn.Linear(len(FINDINGS), 1, bias=False)  # a log hazard ratio for each finding
        nn.init.zeros_(model.weight)
        return model

    def data(self, site):
        return self.patients(site, test=False)

    def eval_data(self, site):
        return self.patients(site, test=True)

    def loss(self, model, batch):
        """Cox's partial likelihood, negative, of each death among those of the institution then at risk."""
        x, days, died = batch
        risk = model(x).squeeze(1)
        at_risk = days >= days[:, None]  # [who died, who was there]; ties as in Breslow's method
        among = torch.logsumexp(torch.where(at_risk, risk, -torch.inf), 1)
        return ((among - risk) * died).sum(), float(died.sum())

    def evaluate(self, model, batch):
        x, days, died = batch
        loss, deaths = self.loss(model, batch)
        risk = model(x).squeeze(1)
        pairs = (died[:, None] > 0) & (days[:, None] < days)  # of an institution: who died before whom
        higher = (risk[:, None] > risk) + 0.5 * (risk[:, None] == risk)
        return {"loss": (loss, deaths), "concordance": ((higher * pairs).sum(), int(pairs.sum()))}

    def patients(self, site, test):
        """An institution's patients; each third is a test."""
        own = self.data_dir / f"{site}.csv"
        with (own if own.exists() else self.data_dir / "lung.csv").open(newline="") as f:
            known = [
                r for r in csv.DictReader(f) if r["inst"] and site == f"institution-{float(r['inst']):.0f}"
            ]
        rows = [row for i, row in enumerate(known) if (i % 3 == 2) == test]
        x = [[scaled(row[name], *FINDINGS[name]) for name in FINDINGS] for row in rows]
        columns = x, [float(row["time"]) for row in rows], [float(row["status"]) for row in rows]
        return tuple(torch.tensor(column) for column in columns)


def scaled(value, typical, spread):
    """About unit size; a finding that was not taken is a typical one."""
    return (float(value) - typical) / spread if value else 0.0
