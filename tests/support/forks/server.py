"""What every rollout server imports, with the variables that vLLM reads at its import."""

import sys

from areal_lora.config.models import Config
from areal_lora.engine.vllm_ext.server import main as server

server.set_environment(
    Config.model_validate(
        {
            "run": {"name": "none", "steps": 1},
            "model": {"path": "none"},
            "service": {},
            "trainer": {"world_size": 1},
            "cluster": {"device": "cpu"},
        }
    )
)

from areal_lora.engine.vllm_ext.compat import cpu_kernels  # noqa: E402, F401
from areal_lora.engine.vllm_ext.server import assemble  # noqa: E402, F401

del sys.modules[server.__name__]  # a fork runs it as its main program
