"""Saved states as external weights, by which the SDK takes weights home since 0.38.

    load_weights of a download         --> its new model is another name of the state; no adapter is made
    save_weights_external of that one  --> MODEL/external_weights/NAME~KEY~..., another name of the state and its keys
    save_weights_external of a model   --> a saved state like any other; its notes have the keys

The SDK's downloads load a state into a new model only to save it in another form. Here that needs neither a place nor
the trainer: nothing is made, and so there is nothing to delete or to expire.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from areal_lora.service.age import MAX_RECIPIENTS, recipient_key
from areal_lora.service.queue.queue_rows import SCHEME, Kind, SavedState, model_id
from areal_lora.service.queue.requests import CreatedModel, StoredState
from areal_lora.service.refused import RequestError

EXTERNAL = "external_weights"
KEYS = "age_encryption_recipients"
"""Of the notes of a state whose files are to be encrypted."""
_BETWEEN = "~"  # in no name of a state, and in no key
_CREATORS = {"tinker_cookbook.weights.download", "tinker checkpoint download"}
MAX_DOWNLOADS = 64
"""Downloads of a tenant that are remembered."""


class Exports:
    """Models of downloads. They are in memory: after a restart of the service a download starts again."""

    def __init__(self) -> None:
        self._states: dict[tuple[str, str], SavedState] = {}

    @staticmethod
    def wanted(notes: Mapping[str, str]) -> bool:
        """Whether the model that is to have these notes is one of a download."""
        return notes.get("created_by") in _CREATORS

    def start(self, tenant: str, session: str, seq: int, state: SavedState) -> str:
        """The id of a request that is answered."""
        mine = [key for key in self._states if key[0] == tenant]
        for key in mine[: len(mine) - MAX_DOWNLOADS + 1]:
            del self._states[key]
        self._states[tenant, model := model_id(session, seq)] = state
        return f"{model}:export"

    def state(self, tenant: str, model: str) -> SavedState | None:
        return self._states.get((tenant, model))

    def save(self, tenant: str, model: str, keys: Sequence[str] | None) -> str | None:
        """As `start`; None for a model that is none of a download. Raises RequestError for keys that are none."""
        if (state := self.state(tenant, model)) is None:
            return None
        return f"{SCHEME}{state.model}/{EXTERNAL}/{_BETWEEN.join((state.name, *keys_of(keys)))}"

    def answer(self, tenant: str, request: str) -> CreatedModel | StoredState | None:
        """None for a request that is not one of these."""
        model = request.removesuffix(":export")
        if (tenant, model) in self._states:
            return CreatedModel(model=model)
        return StoredState(path=request) if request.startswith(SCHEME) else None


def keys_of(given: Sequence[str] | None) -> tuple[str, ...]:
    """Raises RequestError for what is no key of age."""
    keys = tuple(given or ())
    if len(keys) > MAX_RECIPIENTS:
        raise RequestError(422, KEYS, f"there are {len(keys)}", f"give up to {MAX_RECIPIENTS}")
    for key in keys:
        recipient_key(key)
    return keys


def notes_with(keys: Sequence[str]) -> dict[str, str]:
    return {KEYS: _BETWEEN.join(keys)} if keys else {}


def keys_in(notes: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(notes[KEYS].split(_BETWEEN)) if KEYS in notes else ()


def seen_through(model: str, kind: str, name: str) -> tuple[str, tuple[str, ...]]:
    """The path of the saved state that a name of external weights stands for, and its keys. Raises RequestError."""
    kept, *keys = name.split(_BETWEEN)
    return f"{SCHEME}{model}/{Kind.WEIGHTS if kind == EXTERNAL else kind}/{kept}", keys_of(keys)
