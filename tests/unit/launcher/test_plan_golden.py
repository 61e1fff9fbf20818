"""Plan and batch script of jobs of every kind, compared with ``golden/``. ``make golden`` rewrites these files."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from areal_lora.config.facts import Facts
from areal_lora.config.rules.findings import Severity
from areal_lora.config.rules.guardrails import check
from areal_lora.families.registry import known_config
from tests.support.launcher.jobs import JOBS, as_text, job

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("name", JOBS)
def test_plan_and_script_are_as_recorded(name: str) -> None:
    file, text = GOLDEN / f"{name}.txt", as_text(name)
    if os.environ.get("AREAL_LORA_GOLDEN") == "1":
        GOLDEN.mkdir(exist_ok=True)
        file.write_text(text)
    assert text == file.read_text(), "if this change is wanted: make golden, and read the difference"


@pytest.mark.parametrize("name", [name for name in JOBS if name not in ("laptop", "one_gpu")])
def test_the_guardrails_accept_it_and_bash_reads_it(name: str) -> None:
    config, _ = job(name)
    findings = check(config, Facts(hf_config=known_config(config.model.path)))
    assert [str(f.error()) for f in findings if f.severity is Severity.ERROR] == []
    script = "#!/bin/bash" + as_text(name).partition("#!/bin/bash")[2]
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
