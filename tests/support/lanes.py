"""Which tests run one after another when the suite runs in two lanes (pytest-xdist, ``make test``).

A whole stack takes both cores: such tests share one lane. All tests with a vLLM server share one, and with it the
session's server. Every other file is a group of its own, so that what a module's fixture holds is made once.
"""

from pathlib import PurePosixPath

from xdist.scheduler import LoadScopeScheduling

WHOLE_STACKS = ("tests/e2e", "tests/soak/test_publishes.py")
SERVERS = ("tests/process/engine/vllm_ext",)


def group(path: str) -> str:
    """The group of a test file; ``path`` from the repository's root."""
    file = PurePosixPath(path)
    for name, places in (("stack", WHOLE_STACKS), ("server", SERVERS)):
        if any(file.is_relative_to(place) for place in places):
            return name
    return path


class Lanes(LoadScopeScheduling):
    """Give a lane the next group once it has finished one."""

    def _split_scope(self, nodeid: str) -> str:
        return group(nodeid.partition("::")[0])
