"""Questions to a served version, in the format of the run's task."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from typing import Any

from areal_lora.cli.serving import ServingEndpoint
from areal_lora.config.models import AdapterConfig
from areal_lora.data.formatting import Formatter
from areal_lora.errors import RolloutError
from areal_lora.tasks.typed import typed_sample

ANSWER_S = 600.0


@dataclass
class Conversation:
    """``turns`` are the messages so far; a task without chat format has none."""

    adapter: AdapterConfig
    formatter: Formatter
    server: ServingEndpoint
    temperature: float
    max_tokens: int
    turns: list[dict[str, Any]] = field(default_factory=list)

    def answer(self, text: str) -> str:
        """The answer to ``text``. Raises RolloutError with the server's reason."""
        sample = typed_sample(self.adapter.task, text, self.turns)
        body = {
            "model": self.server.model,
            "prompt": self.formatter.token_ids(sample),
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "stop": self.adapter.sampling.stop,
        }
        answer: str = self.formatter.prefill + _post(f"{self.server.url}/completions", body)["choices"][0]["text"]
        if sample.messages is not None:
            self.turns += [sample.messages[-1], {"role": "assistant", "content": answer}]
        return answer.strip()


def _post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
            content: dict[str, Any] = json.loads(answer.read())
            return content
    except urllib.error.HTTPError as error:
        reason = " ".join(error.read().decode(errors="replace").split())
        raise RolloutError(f"the server refuses the prompt: {reason[:300]} (fix: a shorter prompt or answer)") from None
    except (urllib.error.URLError, ConnectionError, TimeoutError) as error:
        raise RolloutError(f"{url}: {error} (fix: start the command again)") from None
