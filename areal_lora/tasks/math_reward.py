r"""Equality of mathematical expressions by the package math-verify (sympy).

A text with ``#### x`` states x, as in GSM8K; in any other text math-verify searches for LaTeX
(``\boxed{}``, ``$...$``) and numbers. Both sides may use either form. The scorer process limits
the time, not math-verify.
"""

from __future__ import annotations

import logging
import re
from typing import Any

from math_verify import parse, verify

logging.getLogger("math_verify").setLevel(logging.ERROR)  # warns at every start that it has no time limit

_PROSE = re.compile(r"(?<!\\)\b[A-Za-z]{2,}")
_DELIMITED = re.compile(r"\$|\\boxed|\\\(|\\\[")


def math_verify(completion: str, gold: str) -> bool:
    """Return whether both state equal expressions. Raises ValueError if ``gold`` states no readable expression."""
    expected = _expressions(gold, whole=True)
    if not expected:
        raise ValueError(f"gold answer states no expression: {gold[-80:]!r}")
    stated = _expressions(completion, whole=False)
    try:
        return bool(stated) and bool(verify(expected, stated, timeout_seconds=None, raise_on_error=True))
    except MemoryError:
        raise
    except Exception:  # fault boundary: the library raises many types about text that is no mathematics  # noqa: BLE001
        return False


def _expressions(text: str, *, whole: bool) -> list[Any]:
    """Return the expressions in ``text``, parsed by math-verify. ``whole``: all of it may be one bare expression."""
    _, marker, tail = text.partition("####")
    if marker:
        text, whole = tail.lstrip(" ").partition("\n")[0], True
    text = text.strip()
    forms = [text]
    if whole and not _DELIMITED.search(text):
        forms.insert(1 if _PROSE.search(text) else 0, f"${text}$")
    return next((found for form in forms if (found := _parse(form))), [])


def _parse(text: str) -> list[Any]:
    try:
        found = parse(text, parsing_timeout=None, raise_on_error=True, fallback_mode="no_fallback")
    except MemoryError:
        raise
    except Exception:  # fault boundary: as above  # noqa: BLE001
        return []
    return list(found)
