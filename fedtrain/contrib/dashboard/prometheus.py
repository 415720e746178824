"""Prometheus: a run's newest numbers in its text format, which `fedtrain dashboard` serves at /metrics.

Metrics and units are named as https://prometheus.io/docs/practices/naming/ says. A training process opens no
port: whoever watches the run directories is asked.
"""

from __future__ import annotations

from collections.abc import Iterable

from ... import events as e
from ...events import Averages, Event

Labels = tuple[tuple[str, str], ...]
GAUGES = {
    "running": "1 while a process works on the run.",
    "round": "The last committed round.",
    "rounds": "The planned rounds.",
    "training_loss": "Of the last committed round: the exact mean over the sites.",
    "round_seconds": "What the last committed round took.",
    "commit_seconds": "What writing the last round to the disk took.",
    "round_sites": "The sites whose updates are in the last round.",
    "metric": "Of the newest evaluation, over all sites.",
    "trained_metric": "Of the last round's training, beside its loss; moved, say.",
    "site_metric": "Of the newest evaluation, at one site.",
    "site_loss": "Of a site's last update.",
    "epsilon": "What a site's updates tell of its data at most.",
    "step": "The optimizer's last step.",
    "step_loss": "Of the last steps.",
    "step_seconds": "What a step takes.",
    "items_per_second": "Tokens, say, that all ranks train on in a second.",
    "mfu": "The share of the devices' peak that the model's arithmetic used.",
    "memory_bytes": "The most that rank 0 has used.",
    "last_event_timestamp_seconds": "When the run last wrote an event.",
}
COUNTERS = {
    "bytes_total": "Of models and updates.",
    "updates_total": "Updates that passed every check.",
    "updates_refused_total": "Updates that were refused.",
    "rounds_failed_total": "Attempts at a round without a result.",
    "sites_lost_total": "Connections to sites that broke.",
}


class Prometheus:
    """The newest numbers of one run."""

    def __init__(self, run: str) -> None:
        self.run = run
        self.values: dict[tuple[str, Labels], float] = {}

    def __call__(self, event: Event) -> None:
        """Take one event in, in the order in which they were written."""
        self._set("last_event_timestamp_seconds", event.time)
        if isinstance(event, e.RoundCommitted | e.Evaluated | e.PeersAgreed):
            self._count("bytes_total", event.bytes_in, direction="in")
            self._count("bytes_total", event.bytes_out, direction="out")
        match event:
            case e.RunStarted():
                self._set("rounds", event.rounds)
                self._set("round", event.resumed_from or 0)
            case e.UpdateReceived():
                self._count("updates_total", 1, site=event.site)
                self._set("site_loss", event.loss, site=event.site)
            case e.UpdateRefused():
                self._count("updates_refused_total", 1, site=event.site)
            case e.RoundFailed():
                self._count("rounds_failed_total", 1)
            case e.SiteLost():
                self._count("sites_lost_total", 1, site=event.site)
            case e.RoundCommitted():
                self._set("round", event.round)
                self._set("training_loss", event.loss)
                self._set("round_seconds", event.seconds)
                self._set("commit_seconds", event.commit_s)
                self._set("round_sites", event.sites)
                self._metrics("trained_metric", event.metrics)
            case e.Evaluated():
                self._metrics("metric", event.metrics)
                for site, own in event.by_site.items():
                    self._metrics("site_metric", own, site=site)
            case e.PrivacySpent():
                self._set("epsilon", event.epsilon, site=event.site, unit=event.unit)
            case e.Stepped():
                self._set("step", event.step)
                self._set("step_loss", event.loss)
                self._set("step_seconds", event.seconds)
                self._set("items_per_second", event.items_per_s)
                self._set("mfu", event.mfu)
                self._set("memory_bytes", event.memory_bytes)

    def running(self, alive: bool) -> None:
        """Say whether a process works on the run now."""
        self._set("running", float(alive))

    def _metrics(self, name: str, metrics: Averages, **labels: str) -> None:
        for metric, value in metrics.items():
            self._set(name, value, metric=metric, **labels)

    def _set(self, name: str, value: float | None, **labels: str) -> None:
        if value is not None:
            self.values[name, (("run", self.run), *labels.items())] = value

    def _count(self, name: str, more: float, **labels: str) -> None:
        key = name, (("run", self.run), *labels.items())
        self.values[key] = self.values.get(key, 0) + more


def exposition(runs: Iterable[Prometheus]) -> str:
    """The text format 0.0.4 of all these runs."""
    told = [run.values for run in runs]
    parts = []
    for kind, names in (("gauge", GAUGES), ("counter", COUNTERS)):
        for name, meaning in names.items():
            parts += _family(name, kind, meaning, told)
    return "".join(parts)


def _family(
    name: str, kind: str, meaning: str,
    told: Iterable[dict[tuple[str, Labels], float]],
) -> list[str]:  # fmt: skip
    samples = [
        f"fedtrain_{name}{{{_labels(labels)}}} {value!r}\n"
        for values in told
        for (its, labels), value in values.items()
        if its == name
    ]
    return [f"# HELP fedtrain_{name} {meaning}\n# TYPE fedtrain_{name} {kind}\n", *samples] if samples else []


def _labels(labels: Labels) -> str:
    return ",".join(f'{key}="{_escaped(text)}"' for key, text in labels)


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
