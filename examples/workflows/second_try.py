"""An environment that asks once more after a wrong answer: half the reward for being right then."""

from areal_lora.rollout.conversations import Reply
from areal_lora.tasks.rewards import numeric_match
from areal_lora.types import Sample


class SecondTry:
    def __init__(self, *, second_reward: float = 0.5) -> None:
        self.second_reward = second_reward
        self.tries = 0

    def reset(self, sample: Sample) -> None:
        self.sample = sample

    def step(self, text: str) -> Reply:
        self.tries += 1
        right = numeric_match(text, self.sample.answer) == 1.0
        if self.tries == 1 and not right:
            return Reply(text=f"\n{self.sample.prompt}")
        return Reply(done=True, reward=float(right) * (1.0 if self.tries == 1 else self.second_reward))
