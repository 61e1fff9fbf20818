"""Bound what one inference request makes a server generate; the data plane and the service's gateway check it first.

A body of 256 KiB can hold 65,000 prompts of 16,384 answers each: the list of their sequences alone ends a process.
"""

from __future__ import annotations

import msgspec

Prompt = str | list[str | int | list[int]]
"""Of a completion: a text, texts, token ids, or lists of token ids."""
DEFAULT_MAX_TOKENS = 16
"""Of a completion without a limit, as OpenAI has it; a chat's is the rest of the context."""
MOST_SEQUENCES = 1024
"""Prompts times answers per prompt."""
MOST_TOKENS = 1 << 24
"""Of all sequences with their prompts, times 1 + the likeliest tokens that come with each: about 5 GB of an answer."""


def too_large(n_prompts: int, n: int, tokens: int, logprobs: int = 0) -> str | None:
    """Why a request for ``n`` answers to ``n_prompts`` prompts is too large, with the limit and the fix.

    ``tokens`` are those of one answer to every prompt, with the prompts. ``logprobs`` count per token.
    """
    if n_prompts * n > MOST_SEQUENCES:
        return f"{n_prompts} prompts x n {n} exceed {MOST_SEQUENCES} sequences; send several requests"
    if n * tokens * (1 + max(0, logprobs)) > MOST_TOKENS:
        return (
            f"{n} x {tokens} tokens x {1 + max(0, logprobs)} log-probabilities exceed {MOST_TOKENS};"
            " lower n or max_tokens, or send several requests"
        )
    return None


def prompts_of(prompt: Prompt) -> list[str] | list[list[int]]:
    """One entry per prompt. Raises msgspec.ValidationError for a mixture."""
    parts = [prompt] if isinstance(prompt, str) else prompt
    texts = [part for part in parts if isinstance(part, str)]
    numbers = [part for part in parts if isinstance(part, int)]
    lists = [part for part in parts if isinstance(part, list)]
    if len(parts) not in (len(texts), len(numbers), len(lists)):
        raise msgspec.ValidationError("prompt mixes texts, token ids and lists of token ids")
    return [numbers] if numbers else texts or lists
