"""Both trackers as a test needs them: the command's options and environment, and what has arrived."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.paths import ROOT
from tests.support.tracking.wandb_file import payloads
from tests.support.tracking.wandb_server import Runs
from tests.support.wheels import installed

WANDB = ("wandb", "platformdirs", "sentry-sdk", "gitpython", "gitdb", "smmap")
MLFLOW = ("mlflow-skinny", "databricks-sdk", "gitpython", "gitdb", "smmap", "importlib_metadata<10", "zipp", "sqlparse")
TRACKIO = ("trackio", "gradio-client", "orjson", "brotli")
SWANLAB = (
    *("swanlab", "orjson", "platformdirs", "prettytable", "pwinput", "pydantic-settings", "python-dotenv", "pyecharts"),
    *("simplejson", "pyroaring", "watchdog", "wrapt", "nvidia-ml-py"),
)
SQL = ("python-dotenv", "google-auth", "pyasn1", "pyasn1-modules", "sqlalchemy", "alembic", "mako")
SETTINGS = ("WANDB_", "MLFLOW_", "TRACKIO_", "SWANLAB_", "GIT_")
Curves = dict[str, list[tuple[int, float]]]
"""``{tag: [(step, value), ...]}`` in the order of arrival."""


def environment(folder: Path, home: Path, **more: str) -> dict[str, str]:
    """Of a program that uses an SDK in ``folder``; nothing of the user's own settings reaches it."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(SETTINGS)}
    return own | {"PYTHONPATH": str(folder), "HOME": str(home), "OMP_NUM_THREADS": "1", **more}


@dataclass(frozen=True, kw_only=True)
class Wandb:
    """W&B without a network."""

    home: Path
    env: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        env = environment(installed(*WANDB), self.home, WANDB_MODE="offline", WANDB_API_KEY="0123456789" * 4)
        object.__setattr__(self, "env", env)

    @property
    def options(self) -> list[str]:
        return ["--wandb", "a project", "--entity", "a-team"]

    def arrived(self, run: Path) -> int:
        """About how many rows are there."""
        return sum(1 for file in self.files(run) for _ in payloads(file.read_bytes()))

    def files(self, run: Path) -> list[Path]:
        return sorted((run / "tracking").glob("wandb/offline-run-*/run-*.wandb"))

    def read(self, run: Path) -> dict[str, Any]:
        [file] = self.files(run)
        script = ROOT / "tests" / "support" / "tracking" / "wandb_file.py"
        done = subprocess.run([sys.executable, script, file], env=self.env, capture_output=True, text=True, check=True)
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def curves(self, run: Path) -> Curves:
        return of_rows([row["values"] for row in self.read(run)["rows"]])


def of_rows(rows: list[dict[str, Any]]) -> Curves:
    """The curves of W&B's history, each over the axis of its adapter."""
    found: Curves = defaultdict(list)
    for values in rows:
        [axis] = [key for key in values if key.endswith("/step") and key.count("/") == 1]
        for tag, value in values.items():
            if tag != axis and not tag.startswith("_") and isinstance(value, int | float):
                found[tag].append((values[axis], value))
    return dict(found)


@dataclass(frozen=True, kw_only=True)
class WandbOnline:
    """W&B with a server of its own."""

    home: Path
    url: str
    runs: Runs
    env: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        env = environment(installed(*WANDB), self.home, WANDB_BASE_URL=self.url, WANDB_API_KEY="0123456789" * 4)
        env["WANDB_X_FILE_STREAM_TRANSMIT_INTERVAL"] = "1"  # the SDK sends what is new every 15 s
        object.__setattr__(self, "env", env)

    @property
    def options(self) -> list[str]:
        return ["--wandb", "a project", "--entity", "a-team"]

    def _history(self, run: Path) -> list[dict[str, Any]]:
        found = [name for name in self.runs.buckets if name.startswith(f"{run.name}-")]
        return self.runs.history(found[0]) if found else []

    def arrived(self, run: Path) -> int:
        return len(self._history(run))

    def curves(self, run: Path) -> Curves:
        return of_rows(self._history(run))


@dataclass(frozen=True, kw_only=True)
class Mlflow:
    """MLflow with an SQLite store. The test reads its tables."""

    home: Path
    env: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "env", environment(installed(*MLFLOW, *SQL), self.home))

    @property
    def store(self) -> Path:
        return self.home / "mlflow.db"

    @property
    def options(self) -> list[str]:
        return ["--mlflow", f"sqlite:///{self.store}", "--experiment", "an experiment"]

    def rows(self, query: str, *values: object) -> list[Any]:
        with sqlite3.connect(self.store) as connection:
            return connection.execute(query, values).fetchall()

    def run_id(self, run: Path) -> str:
        [(found,)] = self.rows("select run_uuid from runs where name = ?", run.name)
        return str(found)

    def arrived(self, run: Path) -> int:
        if not self.store.exists():
            return 0
        try:
            query = "select count(*) from metrics join runs using (run_uuid) where runs.name = ?"
            return int(self.rows(query, run.name)[0][0])
        except sqlite3.OperationalError:
            return 0  # no tables yet

    def curves(self, run: Path) -> Curves:
        found: Curves = defaultdict(list)
        query = "select key, step, value from metrics where run_uuid = ? order by rowid"
        for key, step, value in self.rows(query, self.run_id(run)):
            if not key.startswith("summary/"):
                found[key].append((step, value))
        return dict(found)


@dataclass(frozen=True, kw_only=True)
class Trackio:
    """Trackio with its store in ``home``. The test reads its tables."""

    home: Path
    env: dict[str, str] = field(init=False)
    options = ("--trackio", "a-project")

    def __post_init__(self) -> None:
        env = environment(installed(*TRACKIO), self.home, TRACKIO_DIR=str(self.home), TRACKIO_PROJECT="a-project")
        object.__setattr__(self, "env", env)

    def rows(self, run: Path) -> list[tuple[int, dict[str, float]]]:
        """Step and values of each row, in the order of arrival."""
        if not (self.home / "a-project.db").exists():
            return []
        with sqlite3.connect(self.home / "a-project.db") as connection:
            query = "select step, metrics from metrics where run_name like ? order by id"
            try:
                return [
                    (step, json.loads(values))
                    for step, values in connection.execute(query, (f"{run.name.replace(' ', '-')}-%",))
                ]
            except sqlite3.OperationalError:
                return []  # no tables yet

    def arrived(self, run: Path) -> int:
        return len(self.rows(run))

    def curves(self, run: Path) -> Curves:
        return of_rows([values for _, values in self.rows(run)])


@dataclass(frozen=True, kw_only=True)
class Swanlab:
    """SwanLab without a network; its file has W&B's form."""

    home: Path
    env: dict[str, str] = field(init=False)
    options = ("--swanlab", "a-project")

    def __post_init__(self) -> None:
        object.__setattr__(self, "env", environment(installed(*SWANLAB), self.home, SWANLAB_MODE="offline"))

    def curves(self, run: Path) -> Curves:
        [file] = (run / "tracking").glob("run-*/*.swanlab")
        script = ROOT / "tests" / "support" / "tracking" / "wandb_file.py"
        done = subprocess.run([sys.executable, script, file], env=self.env, capture_output=True, text=True, check=True)
        found: Curves = json.loads(done.stdout)
        return {tag: [(step, value) for step, value in curve] for tag, curve in found.items()}
