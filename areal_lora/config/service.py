"""The section ``service``, and ``service.api``: with it a run takes adapters over HTTP and from its inbox."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, PositiveFloat

from areal_lora.config.section import NonNegInt, PositiveInt, Section

CODE_REWARD = "code"


class QuotaConfig(Section):
    """Of each tenant; ``areal-lora adapters keys`` can give one tenant another quota."""

    adapters: PositiveInt = Field(4, description="Adapters at a time; deleted ones do not count.")
    rank: PositiveInt = Field(32, description="Largest rank of an adapter.")
    weight: PositiveFloat = Field(1.0, description="Largest `weight` of an adapter.")
    operations: PositiveInt = Field(64, description="Acknowledged operations that the run has not carried out yet.")
    body_kib: PositiveInt = Field(256, description="Longest body of a request, KiB.")
    sequences: PositiveInt = Field(4096, description="Answers of one training step: prompts times answers per prompt.")
    problems: PositiveInt = Field(100_000, description="Generated problems of a `word_problems` split.")
    workers: PositiveInt = Field(4, description="Scorer processes of an adapter.")
    queued: PositiveInt = Field(256, description="Requests of SDK clients that are not answered yet.")
    queued_mib: PositiveInt = Field(
        256, description="Data of SDK clients that are kept: of requests that wait, and of those since the last step."
    )
    pass_kib: PositiveInt = Field(8192, description="Longest body of a pass of an SDK client, KiB.")
    saved: PositiveInt = Field(64, description="Saved states of SDK clients.")
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
        description="Base URLs of judges that tenants may ask, each with the variable of its key, or null.",
    )
    quota: QuotaConfig = QuotaConfig()


class ServiceConfig(Section):
    """Adapters join and leave while the run works (`run_folder.desired`); it does not end without any."""

    target_modules: list[str] = Field(
        ["all-linear"],
        min_length=1,
        description="Modules that servers can adapt beside those of the listed adapters; a newcomer with others fails.",
    )
    api: ApiConfig | None = Field(
        None,
        description="HTTP API and inbox through which adapters come (`--serve`); without it a program of yours does.",
    )
