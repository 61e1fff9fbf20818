"""What the benchmark of publishes shows of a server that failed."""

import pytest
from weight_sync import first_error

LOG = """\
(EngineCore pid=7) WARNING 11-24 [utils.py:597] fallback to torch linear. RuntimeError: could not create a primitive
(EngineCore pid=7) ERROR 11-24 [core.py:1510] EngineCore failed to start.
(EngineCore pid=7) ERROR 11-24 [core.py:1510] Traceback (most recent call last):
(EngineCore pid=7) ERROR 11-24 [core.py:1510]   File "core.py", line 1482, in run_engine_core
(EngineCore pid=7) ERROR 11-24 [core.py:1510] ValueError: the cause
Process EngineCore:
ValueError: the cause
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
nanobind: leaked 4 instances!
 - leaked instance 0x7f278015a808 of type "triton._C.libtriton.ir.attribute"
"""


@pytest.mark.parametrize(
    ("log", "shown"), [(LOG, "ValueError: the cause"), ("one\nKilled\n\n", "Killed"), ("", "it wrote nothing")]
)
def test_the_cause_of_a_failed_server_is_shown(log: str, shown: str) -> None:
    assert first_error(log) == shown
