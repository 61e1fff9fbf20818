"""Record training steps with torch's profiler: which operators and kernels run when, in which phase of the step."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

from areal_lora.config.sections.run import ProfileConfig
from areal_lora.processes.log import get_logger

log = get_logger(__name__)


def profiled(
    config: ProfileConfig | None, folder: Path, adapter: str, step: int, rank: int
) -> AbstractContextManager[None]:
    """Context of training step ``step`` (from 1) of ``adapter``; a trace of it in ``folder`` if ``config`` names both.

    The spans of the step are its ranges (`Spans`, whose label is `torch.autograd.profiler.record_function`).
    """
    if config is None or step not in config.steps or rank not in config.ranks:
        return nullcontext()
    return _recorded(folder / f"{adapter}-step-{step}-rank-{rank}.json.gz")


@contextmanager
def _recorded(trace: Path) -> Iterator[None]:
    from torch.profiler import profile  # not for commands, which import this package

    with profile() as recorded:
        yield
    try:
        trace.parent.mkdir(exist_ok=True)
        recorded.export_chrome_trace(str(trace))
    except OSError as error:
        log.warning("%s was not written: %s; the run continues", trace, error)
    else:
        log.info("wrote %s; open it in https://ui.perfetto.dev", trace)
