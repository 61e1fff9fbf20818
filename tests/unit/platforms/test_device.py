from __future__ import annotations

import types

import numpy as np
import pytest
import torch

from areal_lora.errors import ConfigError
from areal_lora.platforms.device import host_buffer, own_device


def test_a_rank_takes_the_device_of_its_place_on_the_node(monkeypatch):
    chosen = []
    module = types.SimpleNamespace(set_device=chosen.append)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    assert own_device("cuda", 3) == torch.device("cuda", 3)
    assert own_device("cpu", 3) == torch.device("cpu")
    assert chosen == [torch.device("cuda", 3)]


def test_an_unknown_kind_of_device_is_a_configuration_error():
    with pytest.raises(ConfigError) as e:
        own_device("meta", 0)
    assert e.value.path == "cluster.device"


def test_a_host_buffer_has_its_length_and_can_be_written():
    for nbytes in (0, 1, 5000):
        buffer = host_buffer(nbytes, torch.device("cpu"))
        assert (buffer.dtype, buffer.shape) == (np.uint8, (nbytes,))
        buffer[:] = 7
