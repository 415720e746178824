"""MLflow: a run's numbers, settings and end. `where`: the tracking URI; else MLFLOW_TRACKING_URI, or MLflow's
own default. The experiment is the run's name."""

from __future__ import annotations

import re
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag

from ... import events as e
from ...events import Event
from ...tracking.runs import settings_of
from .base import Tracker, scalars

ODD = re.compile(r"[^\w\-. /]")  # MLflow takes no other characters in a name
TEXT_CHARS = 500  # of a setting
BATCH = 1000  # metrics in a call


class MLflow(Tracker):
    """A run of an MLflow experiment; the same one when the command is started again."""

    extra = "mlflow"

    def __init__(self, run_dir: Path, where: str, kept: dict[str, str]) -> None:
        super().__init__(run_dir, where, kept)
        self._client, self._waiting = MlflowClient(where or None), list[Metric]()

    def __call__(self, event: Event) -> None:
        if isinstance(event, e.RunStarted):
            self._begin(event)
        at, found = scalars(event)
        when = round(event.time * 1000)
        self._waiting += [Metric(ODD.sub("_", name), value, when, at) for name, value in found.items()]
        if isinstance(event, e.RunFinished):
            self.flush()
            self._client.set_terminated(self.kept["run"], end_time=when)

    def flush(self) -> None:
        while self._waiting:
            self._client.log_batch(self.kept["run"], metrics=self._waiting[:BATCH])
            del self._waiting[:BATCH]

    def _begin(self, event: e.RunStarted) -> None:
        if "run" in self.kept:
            self._client.update_run(self.kept["run"], status="RUNNING")
            return
        found = self._client.get_experiment_by_name(event.run)
        experiment = self._client.create_experiment(event.run) if found is None else found.experiment_id
        made = self._client.create_run(experiment, round(event.time * 1000), run_name=self.run_dir.name)
        self.kept["run"] = made.info.run_id
        settings = settings_of(self.run_dir)
        params = [Param(ODD.sub("_", key), value[:TEXT_CHARS]) for key, value in settings.items()]
        tags = [RunTag("fedtrain.mode", event.mode), RunTag("fedtrain.config_digest", event.config_digest)]
        for at in range(0, max(1, len(params)), 100):  # as many as a call takes
            self._client.log_batch(made.info.run_id, params=params[at : at + 100], tags=tags)
