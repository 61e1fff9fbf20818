"""What all tests share: a tiny model, a server that serves it. torch and vLLM are imported on first use."""

from __future__ import annotations

import atexit
import logging
import os
import resource
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from areal_lora.processes.startup import collector_paused

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler import Scheduling
    from xdist.workermanage import WorkerController

    from tests.support.engine.vllm_ext.serving import RunningServer
    from tests.support.launcher.driven import Run
    from tests.support.launcher.real_slurm import Slurm
    from tests.support.rollout.running import Running


# Some tests crash processes, and the working folder is the repository.
resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))

# Of an example: 200 ms by default, which a machine that stalls exceeds.
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.support.engine.vllm_ext.serving import make_model

    return make_model(tmp_path_factory.mktemp("tiny model"))


@pytest.fixture(scope="session")
def even_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every token goes to all experts.

    Where two experts are equally good for a token, a rounding error chooses between them, and of
    200,000 tokens one sequence differed by 0.05 for that reason alone.
    """
    from tests.support.gpu.engines import evened

    return evened(tiny_model, tmp_path_factory.mktemp("even") / "model")


@pytest.fixture(scope="session")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    from tests.support.engine.vllm_ext.serving import running_server

    with running_server(tmp_path_factory.mktemp("server") / "run folder", tiny_model) as running:
        yield running


@pytest.fixture(scope="session")
def cluster() -> Iterator[Slurm]:
    """Real Slurm daemons on pretended nodes of this machine; ask for ``slurm``."""
    from tests.support.launcher import real_slurm

    if reason := real_slurm.why_not():
        pytest.skip(reason)
    with real_slurm.started() as daemons:
        yield daemons


@pytest.fixture(scope="module")
def slurm(cluster: Slurm) -> Iterator[Slurm]:
    """The cluster, idle at the start; jobs of the module that remain at its end are cancelled."""
    cluster.until_idle()
    yield cluster
    cluster.cancel(cluster.jobs())


_LIBRARIES = set[str]()


@pytest.fixture(autouse=True)
def _user_code(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Forget the folders and modules of user code that a test has loaded: the next one has others of the same names."""
    path, folder = sys.path.copy(), f"{tmp_path_factory.getbasetemp()}{os.sep}"
    yield
    sys.path[:] = path
    if _LIBRARIES.issuperset(sys.modules):  # a difference of ten thousand names would take longer than many tests
        return
    for name in sys.modules.keys() - _LIBRARIES:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(folder):
            del sys.modules[name]
        else:
            _LIBRARIES.add(name)


@pytest.fixture(autouse=True)
def _package_logger() -> Iterator[None]:
    """Undo ``setup_logging`` of a process whose ``main`` a test has called."""
    logger = logging.getLogger("areal_lora")
    before = list(logger.handlers), logger.level, logger.propagate
    yield
    logger.handlers, logger.level, logger.propagate = before


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Start launchers of small programs in the run folder ``run``."""
    from tests.support.launcher.driven import beginning

    with beginning(tmp_path / "run") as start:
        yield start


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    """Start controllers with fake servers."""
    from tests.support.rollout.running import controllers

    with controllers(tmp_path) as start:
        yield start


def pytest_configure(config: pytest.Config) -> None:
    from tests.support.forks.starter import session
    from tests.support.sizes import seed

    seed()  # kept for the lanes of this run
    if "PYTEST_XDIST_WORKER" not in os.environ:  # killed processes leave sockets and files
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())  # keeps those of three runs
        os.environ["TMPDIR"] = tempfile.tempdir = folder = tempfile.mkdtemp(prefix="areal-lora-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)  # after that of the forks
    session()  # shared by the lanes


def pytest_report_header() -> str:
    from tests.support.sizes import NIGHTLY, VARIABLE, seed

    return (
        "whole matrices" if NIGHTLY else f"samples of matrices; the same ones: {VARIABLE}={seed()}; all: make test-all"
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduling:
    from tests.support.lanes import Lanes

    config.option.loadscopereorder = False
    return Lanes(config, log)


DEAR = {"vllm", "megatron", "peft", "datasets", "openai", "anthropic", "agents"}
"""Half of the time of all imports; a few files need them."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collection imports much; what it has made is never looked through for garbage (``gc.freeze``)."""
    with collector_paused():
        result = yield
    if early := sorted(DEAR & sys.modules.keys()):
        raise pytest.UsageError(f"collection has imported {', '.join(early)} (fix: tests/support/lazy.py)")
    return result


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        from tests.support.lanes import turn

        items.sort(key=lambda item: turn(item.nodeid.partition("::")[0]))


_STATUS = pytest.StashKey[int]()
_THREADS = "threads that did not end"


def threads_left() -> list[str]:
    return [t.name for t in threading.enumerate() if not t.daemon and t is not threading.main_thread()]


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    session.config.stash[_STATUS] = int(exitstatus)
    if "PYTEST_XDIST_WORKER" in os.environ:
        session.config.workeroutput[_THREADS] = threads_left()  # type: ignore[attr-defined]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: WorkerController) -> None:
    """A lane has ended: print here what it could not print."""
    if left := getattr(node, "workeroutput", {}).get(_THREADS):  # one that crashed has none
        node.config.get_terminal_writer().line(f"{_THREADS} in {node.gateway.id}: {', '.join(left)}")


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """End although a failed test left a thread that does not: the interpreter would wait for it, and CI with it."""
    left = threads_left()
    if left and _STATUS in config.stash:
        print(f"{_THREADS}: {', '.join(left)}", flush=True)
        sys.stderr.flush()
        os._exit(config.stash[_STATUS])
