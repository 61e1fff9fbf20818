"""A second reward for gdpo.yaml."""


def brief(n_tokens: int) -> float:
    """1 for an answer of at most 32 tokens."""
    return float(n_tokens <= 32)
