"""MLflow: a run for each training, at MLFLOW_TRACKING_URI or in an SQLite file of the result folder."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from contextlib import suppress
from typing import Any

from linvit.locks import flat
from linvit.training.trackers import TRACKERS, Tracker

TAG = "linvit.run"  # by which a run is found again
FIRST = "train_loss"  # which every row of the log has


@TRACKERS.register("mlflow")
class MLflow(Tracker):
    """Parameters are the experiment's settings, metrics the lines of its log and what the test images say."""

    package = "mlflow"

    def begin(self, step: int) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # who asks for a tracker has not asked for that
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")  # a server that is not there is said so at once
        from mlflow import MlflowClient

        for name in ("alembic", "mlflow"):  # how a new store is set up is of no interest
            logging.getLogger(name).setLevel(logging.WARNING)
        stored = os.environ.get("MLFLOW_TRACKING_URI")
        self.client: Any = MlflowClient(tracking_uri=stored or f"sqlite:///{self.home.resolve() / 'mlflow.db'}")
        self.run = self._run(None if stored else (self.home.resolve() / "mlflow").as_uri())
        history = self.client.get_metric_history(self.run, FIRST)
        self.told = max((metric.step for metric in history), default=-1)  # the same numbers come again

    def _run(self, artifacts: str | None) -> str:
        """This training's, from an earlier process or new."""
        from mlflow.entities import Param
        from mlflow.exceptions import MlflowException

        name = f"linvit {self.experiment.data.name}"
        if self.client.get_experiment_by_name(name) is None:
            with suppress(MlflowException):  # another process was faster
                self.client.create_experiment(name, artifact_location=artifacts)
        home = self.client.get_experiment_by_name(name).experiment_id
        place = hashlib.sha256(str(self.folder.resolve()).encode()).hexdigest()[:12]
        mine = f"{self.experiment.id}-{place}"
        if runs := self.client.search_runs([home], f"tags.`{TAG}` = '{mine}'", max_results=1):
            self.client.update_run(runs[0].info.run_id, "RUNNING")
            return runs[0].info.run_id
        who = f"{self.experiment.label or self.experiment.model.attention} seed {self.experiment.seed}"
        if self.experiment.source and (fold := self.experiment.source.fold):
            who += f" fold {fold.index}"
        run = self.client.create_run(home, tags={TAG: mine}, run_name=who).info.run_id
        settings = flat(self.experiment.settings()) | {"folder": str(self.folder)}
        self.client.log_batch(run, params=[Param(key, str(value)) for key, value in settings.items()])
        return run

    def log(self, step: int, row: dict[str, float]) -> None:
        from mlflow.entities import Metric

        if FIRST in row and step <= self.told:
            return
        now = int(1000 * time.time())
        self.client.log_batch(self.run, metrics=[Metric(key, value, now, step) for key, value in row.items()])

    def end(self, diverged: bool) -> None:
        self.client.set_terminated(self.run, "FAILED" if diverged else "FINISHED")
