"""A game with gymnasium's ``reset`` and ``step``: find the row's number, with a hint after each wrong answer."""

from typing import Any

from areal_lora.tasks.rewards import extract_answer


class Hints:
    def __init__(self, *, tries: int = 3) -> None:
        self.tries = tries

    def reset(self, *, seed: int | None = None, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """``options`` has the fields of the row's sample."""
        self.number = float(extract_answer(options["answer"]) or "nan")
        return options["prompt"], {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Observation, reward, terminated, truncated, info."""
        self.tries -= 1
        try:
            found = float(extract_answer(action) or "nan")
        except ValueError:
            found = float("nan")
        hint = "less" if found > self.number else "more" if found < self.number else "a number"
        return f"It is {hint}.", float(found == self.number), found == self.number, self.tries == 0, {}
