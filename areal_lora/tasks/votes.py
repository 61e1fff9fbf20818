"""What an answer states, as text: answers with the same text vote for the same in majority@k."""

from __future__ import annotations

from areal_lora.tasks.rewards import extract_answer


def vote_of(reward_kind: str, text: str) -> str | None:
    r"""The answer that ``text`` states; None if it states none.

    For the reward ``numeric_match`` it is the number that the reward compares. For others it is what follows ``####``,
    else the content of the last ``\boxed{}``, else the last line, without white space around it.
    """
    if reward_kind == "numeric_match":
        number = extract_answer(text)
        return None if number is None else str(number)
    _, marker, tail = text.partition("####")
    if marker:
        return tail.lstrip(" ").partition("\n")[0].strip() or None
    _, marker, tail = text.rpartition(r"\boxed{")
    if marker and "}" in tail:
        return tail[: _closing(tail)].strip() or None
    return text.strip().rpartition("\n")[2].strip() or None


def _closing(text: str) -> int:
    """Index of the brace that closes one opened before ``text``; the end if there is none."""
    depth = 1
    for position, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return position
    return len(text)
