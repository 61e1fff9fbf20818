"""What every command and launcher imports, but for huggingface_hub, which reads its variables at its import."""

import sys

import anyio.streams.tls  # noqa: F401
import filelock  # noqa: F401
import httpcore2  # noqa: F401
import httpx2  # noqa: F401
import rich.table  # noqa: F401
import tqdm.auto  # noqa: F401
import yaml  # noqa: F401

from areal_lora.checkpoint import recover  # noqa: F401
from areal_lora.cli import adapters, app, evaluate, find_run, logs, status, stop  # noqa: F401
from areal_lora.config import facts, load, models  # noqa: F401
from areal_lora.config.rules import guardrails  # noqa: F401
from areal_lora.doctor import checks, examine, probes  # noqa: F401
from areal_lora.launcher import plan, restarts, start, watch  # noqa: F401
from areal_lora.launcher.slurm import job_steps, script  # noqa: F401
from areal_lora.obs.report import page  # noqa: F401
from areal_lora.tasks import check  # noqa: F401

assert "huggingface_hub" not in sys.modules
restarts.LONGER = 1.0  # runs of tests do not wait ever longer for what was killed again
