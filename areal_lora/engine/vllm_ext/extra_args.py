"""Keys in ``SamplingParams.extra_args`` by which the server speaks to the engine's processes."""

from __future__ import annotations

WHOLE = "areal_lora_whole"
"""The reader needs the request's tokens only when it has ended (`compat.cpu_scheduler`; elsewhere without effect)."""
SCORE_TEMPERATURE = "areal_lora_score_temperature"
"""Temperature of the log-probabilities of a prompt (`compat.engine.own_logprobs`)."""
