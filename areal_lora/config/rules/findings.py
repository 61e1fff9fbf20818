"""Inputs and results of a configuration rule, and targets in their canonical names."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from areal_lora.config.facts import Facts
from areal_lora.config.models import AdapterConfig, Config
from areal_lora.errors import ConfigError
from areal_lora.families import targets


class Severity(StrEnum):
    ERROR = "error"
    WARNING = "warning"


@dataclass(frozen=True, slots=True)
class Finding:
    """One broken rule: the dotted key (or file), why, and what to do about it.

    One mistake may break several rules about one key: a size that divides neither heads nor vocabulary. Findings
    with one ``path`` and ``subject`` are such a mistake.
    """

    path: str
    reason: str
    fix: str
    severity: Severity = Severity.ERROR
    subject: str = ""

    def error(self) -> ConfigError:
        return ConfigError(self.path, self.reason, self.fix)


def warning(path: str, reason: str, fix: str) -> Finding:
    return Finding(path, reason, fix, Severity.WARNING)


Rule = Callable[[Config, Facts], Iterator[Finding]]


def of_each_adapter(rule: Callable[[Config, Facts, AdapterConfig], Iterator[Finding]]) -> Rule:
    """``rule`` for every entry of ``adapters``; it names keys of the entry."""

    def of_all(config: Config, facts: Facts) -> Iterator[Finding]:
        for i, adapter in enumerate(config.adapters):
            yield from (replace(found, path=f"adapters.{i}.{found.path}") for found in rule(config, facts, adapter))

    return of_all


def resolve_targets(config: Config, facts: Facts) -> Config:
    """``config`` with canonical ``target_modules`` and nothing left to exclude.

    Raises ConfigError for targets that the model does not have, and where its sizes are unknown.
    """
    if (shape := facts.shape) is None:
        raise ConfigError("model.path", "its sizes are unknown", "give a Hugging Face model folder")
    adapters = []
    for adapter in config.adapters:
        found = list(targets.resolve(adapter.target_modules, adapter.exclude_modules, shape))
        adapters.append(adapter.model_copy(update={"target_modules": found, "exclude_modules": []}))
    if (service := config.service) is not None:
        every = list(targets.resolve(service.target_modules, [], shape))
        service = service.model_copy(update={"target_modules": every})
    return config.model_copy(update={"adapters": adapters, "service": service})
