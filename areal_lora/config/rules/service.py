"""Rules of a run that takes adapters over HTTP."""

from __future__ import annotations

from collections.abc import Iterator

from areal_lora.config.facts import Facts
from areal_lora.config.models import Config
from areal_lora.config.rules.findings import Finding
from areal_lora.config.slots import has_tenants


def service_fits(config: Config, facts: Facts) -> Iterator[Finding]:
    if not has_tenants(config):
        return
    if config.cluster.kind != "local":
        yield Finding(
            path="cluster.kind",
            reason="the service listens on the loopback address of the launcher's machine, and a Slurm job has several",
            fix="start it with cluster.kind=local, inside an allocation for example",
        )
    for problem in facts.service_problems:
        yield Finding(path=problem.path, reason=problem.reason, fix=problem.fix)
