"""What the agents' endpoint refuses, by name: what would change the policy that is sampled, or cannot be done.

Other fields that the endpoint does not know are ignored, as OpenAI's servers ignore `user` or `metadata`.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

from areal_lora.config.models import SamplingConfig
from areal_lora.errors import RolloutError
from areal_lora.processes.log import get_logger

log = get_logger(__name__)
_POLICY = "it would change the policy that is sampled and trained; leave it out"
_GRAMMAR = "the endpoint has JSON schemas only; give response_format"
_TEMPLATE = "the run's configuration has the template's arguments (task.format); leave it out"
_ABSENT = "the endpoint does not have it; leave it out"
_TOOLS = "it is deprecated; use tools and tool_choice"

REASONS: dict[str, str] = {
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "repetition_penalty", "length_penalty"), _POLICY),
    **dict.fromkeys(("logit_bias", "bad_words", "allowed_token_ids", "logits_processors", "prediction"), _POLICY),
    **dict.fromkeys(("best_of", "use_beam_search", "ignore_eos", "stop_token_ids"), _POLICY),
    **dict.fromkeys(("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"), _GRAMMAR),
    **dict.fromkeys(("chat_template", "chat_template_kwargs", "continue_final_message", "documents"), _TEMPLATE),
    **dict.fromkeys(("functions", "function_call"), _TOOLS),
    **dict.fromkeys(("audio", "web_search_options", "echo", "suffix", "background", "conversation"), _ABSENT),
}
"""By field: why it is refused, unless its value changes nothing."""
_NOTHING: dict[str, Any] = {"repetition_penalty": 1, "length_penalty": 1, "best_of": 1, "function_call": "none"}
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "min_tokens")
_STATUS = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error"}


class AgentRequestError(RolloutError):
    """A request that is answered with ``status`` and an OpenAI error body; ``param`` is the field at fault."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        self.status, self.param, self.code = status, param, code
        super().__init__(message)


def refuse(param: str, reason: str) -> AgentRequestError:
    return AgentRequestError(400, f"{param}: {reason}", param)


@cache
def warn_once(message: str) -> None:
    """Log what agents may repeat in every request once in the process."""
    log.warning(message)


def context_full(n: int, limit: int) -> AgentRequestError:
    """In the words of both APIs, by which clients recognise that they have to shorten their messages."""
    message = (
        f"prompt is too long: {n} tokens > {limit - 1} maximum. This model's maximum context length is {limit} tokens."
        f" However, your messages have {n} tokens"
    )
    return AgentRequestError(400, message, "messages", "context_length_exceeded")


def check_fields(body: Mapping[str, Any], sampling: SamplingConfig | None) -> None:
    """Raises AgentRequestError. Without ``sampling`` (an evaluation has its own) any temperature or top_p is served."""
    for name in _SAMPLING if sampling is not None else ():
        wanted, used = body.get(name), getattr(sampling, name)
        if name == "top_k" and wanted == -1:
            wanted = 0
        if isinstance(wanted, int | float) and wanted != used:
            raise AgentRequestError(400, f"{name} {wanted:g} is not the run's {used:g}; leave it out", name)
    for name, reason in REASONS.items():
        if (value := body.get(name)) and value != _NOTHING.get(name):
            raise refuse(name, reason)
    if body.get("modalities") not in (None, ["text"]):
        raise refuse("modalities", _ABSENT)


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """OpenAI's error body."""
    kind = _STATUS.get(status, "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code or status}}


def anthropic_error(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    kind = _STATUS.get(status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}
