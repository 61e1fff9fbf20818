"""Import user code named in a configuration; `areal_lora.config.facts` has checked the name before.

Scorer processes use it: importing the configuration would double the time of their start.
"""

import contextlib
import hashlib
import importlib
import importlib.util
import logging
import os
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from areal_lora.errors import ConfigError, undo_on_error


def load_import_path(text: str) -> Any:
    """Return the object that ``package.module:name`` or ``file.py:name`` names. Raises ConfigError.

    Modules in the working folder can be imported, and those in the folder of ``file.py``, as for a script. Installed
    modules take precedence.
    """
    place, _, name = text.rpartition(":")
    is_file = place.endswith(".py")
    try:
        if is_file:
            module = _load_file(Path(os.path.expanduser(place)))
        else:
            _search(os.getcwd())
            module = importlib.import_module(place)
    except (Exception, SystemExit) as error:  # fault boundary: a user's module may fail in any way, and end us
        fix = "correct the code"
        if is_file and isinstance(error, ImportError):
            fix = "install what it lacks, or name it package.module:name and start in the package's folder"
        raise ConfigError(text, f"importing it fails: {type(error).__name__}: {error}", fix) from error
    try:
        return getattr(module, name)  # not vars(): a module may define __getattr__
    except AttributeError:
        raise ConfigError(text, f"the imported module has no {name!r}", "correct the name") from None


def _load_file(file: Path) -> ModuleType:
    file = file.resolve()
    name = f"areal_lora_user_{file.stem}_{abs(hash(str(file))):x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is not a Python file")
    _search(str(file.parent))
    _search(os.getcwd())  # also where no `python -m` has put it there
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module here
    with undo_on_error(partial(sys.modules.pop, name)):
        spec.loader.exec_module(module)
    return module


def _search(folder: str) -> None:
    if folder not in sys.path:
        sys.path.append(folder)


class UserFile:
    """The file of ``file.py:name``, if that names one; a process of a pool loads it as it is at the process's start."""

    def __init__(self, name: object) -> None:
        self._path, self._digest = str(name).rpartition(":")[0], b""

    def note_start(self, log: logging.Logger) -> None:
        """Log once that the file is another one than at the first start."""
        with contextlib.suppress(OSError):  # the process reports a file that is missing
            found = hashlib.sha256(Path(os.path.expanduser(self._path)).read_bytes()).digest()
            if self._digest not in (b"", found):
                log.warning(
                    "%s has changed: processes that start from now on load it, others keep what they have "
                    "(fix: restore it, or stop the run and resume it)",
                    self._path,
                )
                self._path = ""
            self._digest = found
