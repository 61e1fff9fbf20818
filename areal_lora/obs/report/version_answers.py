"""Answers of served versions to the same prompts: ``areal-lora chat --save`` keeps them, the page shows them."""

from collections import deque
from html import escape

import msgspec

from areal_lora.errors import ConfigError
from areal_lora.run_folder.events import JsonlSink, whole_lines
from areal_lora.run_folder.paths import RunFolder

SHOWN = 20
"""The newest prompts, on the page."""
SHOWN_CHARS = 4000
"""Of each text."""


class VersionAnswers(msgspec.Struct, frozen=True, kw_only=True):
    """Answers to one prompt by version (``name@vN``); ``gold`` is empty for a prompt that a user typed."""

    at: str
    prompt: str
    gold: str = ""
    answers: dict[str, str]


def save_answers(folder: RunFolder, saved: VersionAnswers) -> None:
    """Append to the run's ``answers.jsonl``. Raises RecordError where it cannot be written."""
    sink = JsonlSink(folder.answers)
    sink.write(msgspec.json.encode(saved))
    sink.close()


def read_answers(folder: RunFolder) -> list[VersionAnswers]:
    """The newest `SHOWN`, newest first. Raises ConfigError for a line that is none."""
    if not folder.answers.exists():
        return []
    newest = deque(enumerate(whole_lines(folder.answers), 1), SHOWN)
    return [_decoded(folder, number, line) for number, line in reversed(newest)]


def _decoded(folder: RunFolder, number: int, line: bytes) -> VersionAnswers:
    try:
        return msgspec.json.decode(line, type=VersionAnswers)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{folder.answers}:{number}", f"it holds no answers: {error}", "remove the line") from None


def answers_section(folder: RunFolder) -> str:
    """HTML of each prompt with its answers side by side; empty without any."""
    found = [_shown(saved) for saved in read_answers(folder)]
    return f'<section id="answers"><h2>Answers of versions</h2>{"".join(found)}</section>' if found else ""


def _shown(saved: VersionAnswers) -> str:
    gold = f" · gold {_text(saved.gold)}" if saved.gold else ""
    each = "".join(f"<div><h4>{escape(name)}</h4><pre>{_text(x)}</pre></div>" for name, x in saved.answers.items())
    return (
        f'<h3>{escape(saved.at)}{gold}</h3><pre class="prompt">{_text(saved.prompt)}</pre>'
        f'<div class="beside">{each}</div>'
    )


def _text(text: str) -> str:
    return escape(text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}... ({len(text)} characters)")
