"""The section ``service``, and ``service.api``: with it a run takes adapters over HTTP and from its inbox."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from areal_lora.config.sections.section import NonNegInt, PositiveInt, Section

CODE_REWARD = "code"


class QuotaConfig(Section):
    """Of each tenant. ``areal-lora adapters keys --quota`` can give one tenant others of these limits, and of those in
    `service.rows.Quota` that no run sets for all."""

    adapters: PositiveInt = Field(4, description="Adapters at a time; deleted ones do not count.")
    rank: PositiveInt = Field(32, description="Largest rank of an adapter.")
    sequences: PositiveInt = Field(4096, description="Answers of one training step: prompts times answers per prompt.")
    tokens: PositiveInt = Field(
        1 << 23, description="Tokens of inference in progress: prompts and the longest answers, times 1 + `logprobs`."
    )
    requests: PositiveInt = Field(12_000, description="Requests a minute; a minute's may come at once.")


class ApiConfig(Section):
    """The HTTP API and the inbox of a run (`areal_lora.service`)."""

    port: NonNegInt = Field(0, description="Port of the HTTP API on loopback; 0: the system chooses.")
    data: Path | None = Field(
        None, description="Folder of the tenants' files: each may name those in its folder `TENANT/` and in `shared/`."
    )
    data_sets: list[str] = Field(default_factory=list, description="Hub data sets that tenants may name.")
    code: list[str] = Field(
        default_factory=list,
        description="User code that tenants may name, like `package.module:name` or `/folder/file.py:name`, and "
        "`code` for the reward of that kind, whose tests are programs in the tenants' rows.",
    )
    judges: dict[str, str | None] = Field(
        default_factory=dict,
        description="Base URLs of judges that tenants may use, each with the variable of its key, or null.",
    )
    quota: QuotaConfig = QuotaConfig()


class ServiceConfig(Section):
    """Adapters join and leave while the run works (`run_folder.desired`); it does not end without any."""

    target_modules: list[str] = Field(
        ["all-linear"],
        min_length=1,
        description="Modules that servers adapt beside those of the listed adapters; others cannot join.",
    )
    api: ApiConfig | None = Field(
        None,
        description="HTTP API and inbox through which adapters come (`--serve`); without it a program of yours does.",
    )
