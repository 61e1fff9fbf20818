"""Whether the run can train an adapter: the checks of a start, for one more entry of ``adapters``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from areal_lora.config.facts import gather_facts
from areal_lora.config.load import load_config
from areal_lora.config.models import AdapterConfig, Config
from areal_lora.config.recorded import alone, joined, own_path
from areal_lora.config.rules.adapter_rules import unserved
from areal_lora.config.rules.findings import Severity
from areal_lora.config.rules.guardrails import check, resolve_targets
from areal_lora.config.sections.service import ApiConfig
from areal_lora.errors import ArealLoraError, ConfigError, ConfigErrors
from areal_lora.run_folder.desired import DesiredAdapter
from areal_lora.service.allowed import allowed
from areal_lora.service.queue.lifecycle import AdapterRequest, check_name
from areal_lora.service.queue.queue_rows import Quota
from areal_lora.service.queue.requests import Lora
from areal_lora.service.refused import RequestError
from areal_lora.tasks.check import task_problems


class Acceptance:
    """Checks adapters against the configuration of the run. Blocks: it reads the task's rows."""

    def __init__(self, config: Config) -> None:
        self._config, self._offered = config, api_of(config)

    def of_tenant(self, section: Mapping[str, Any], tenant: str, quota: Quota) -> AdapterRequest:
        """A section that came over HTTP: code and files must be offered, relative paths are those of the tenant's.

        Raises RequestError with a key of the section.
        """
        _check_driver(section)
        return self._of_tenant(section, tenant, quota)

    def of_client(self, name: str, tenant: str, lora: Lora, quota: Quota) -> AdapterRequest:
        """The adapter of an SDK client's model, or one that serves a saved state of it. Raises RequestError."""
        section: dict[str, Any] = {
            "name": name,
            "workflow": {"kind": "client"},
            "rank": lora.rank,
            "alpha": lora.alpha,
            "target_modules": list(lora.target_modules),
        }
        return self._of_tenant(section | ({} if lora.seed is None else {"seed": lora.seed}), tenant, quota)

    def _of_tenant(self, section: Mapping[str, Any], tenant: str, quota: Quota) -> AdapterRequest:
        name = _name(section)
        settings = {key: value for key, value in section.items() if key != "name"}
        try:
            adapter = joined(self._config, DesiredAdapter(name=name, incarnation=1, adapter=settings))
        except ConfigError as error:
            reason = error.reason.replace(f" in the settings of {name}.1", "")
            raise RequestError(422, error.path, reason, error.fix) from None
        except RecursionError:
            raise RequestError(422, "adapter", "it is nested too deeply", "flatten it") from None
        named = adapter.model_copy(update={"name": name})
        return self._checked(allowed(named, self._offered, quota, tenant), name)

    def of_operator(self, section: Mapping[str, Any]) -> AdapterRequest:
        """A section of the operator's own, caller may name any code and file. Raises RequestError."""
        _check_driver(section)
        name = _name(section)
        base = self._config.model_dump(mode="json") | {"adapters": []}
        try:
            (adapter,) = load_config([base, {"adapters": [dict(section)]}]).adapters  # paths from the working folder
        except ConfigErrors as refused:
            raise RequestError.of(own_path(refused.errors[0])) from None
        except ConfigError as error:
            raise RequestError.of(own_path(error)) from None
        return self._checked(adapter, name)

    def _checked(self, adapter: AdapterConfig, name: str) -> AdapterRequest:
        config = alone(self._config, adapter)
        facts = gather_facts(config, runs_here=False)
        for finding in check(config, facts):
            # What the operator offers may have changed since the start; tenants are not shown how.
            if finding.severity is Severity.ERROR and not finding.path.startswith("service."):
                raise RequestError.of(own_path(finding.error()))
        try:
            for problem in task_problems(config, online=False):
                raise RequestError.of(own_path(problem))
            (resolved,) = resolve_targets(config, facts).adapters
        except ConfigError as error:
            raise RequestError.of(own_path(error)) from None
        except ArealLoraError as error:
            raise RequestError(422, "task", str(error), "turn to the operator of the run") from None
        if (lacking := unserved(self._config, resolved, facts)) is not None:
            raise RequestError.of(own_path(lacking.error()))
        settings = resolved.model_dump(mode="json", exclude={"name"}, exclude_unset=True)
        return AdapterRequest(name=name, rank=resolved.spec("").max_rank, weight=resolved.weight, settings=settings)


def api_of(config: Config) -> ApiConfig:
    """The section of the API. Raises ConfigError for a run without one."""
    if config.service is None or config.service.api is None:
        raise ConfigError("service.api", "the run has no such section", "start it with --serve")
    return config.service.api


def _check_driver(section: Mapping[str, Any]) -> None:
    workflow = section.get("workflow")
    if isinstance(workflow, Mapping) and workflow.get("kind") == "client":
        reason = "only models of SDK clients have it"
        raise RequestError(422, "workflow.kind", reason, "make a model with the SDK, or leave it out")


def _name(section: Mapping[str, Any]) -> str:
    name = section.get("name")
    if not isinstance(name, str):
        raise RequestError(422, "name", "the adapter has no name", "add name: NAME")
    check_name(name)
    return name
