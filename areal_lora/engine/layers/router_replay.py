"""Router replay: a token goes to the experts that the server, or an earlier pass, chose for it (arXiv 2510.11370).

Weights of the experts are what the model's own router makes of its scores for them (softmax before or after the choice,
sums of 1, factors), so hidden states get the gradients of its formula. The base is frozen: no auxiliary loss is added,
and no bias of a router moves. A choice is replaced where it is made, so a layer that is recomputed replays it again.
"""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from areal_lora.engine.layers.active import ActiveAdapters
from areal_lora.errors import ConfigError


def replay(scores: Tensor, own: Tensor, routes: Tensor) -> tuple[Tensor, Tensor]:
    """A router's ``scores`` [t, E] of the experts ``routes`` [t, K], and these; where -1, of its ``own`` [t, K]."""
    chosen = torch.where(routes < 0, own, routes)
    return scores.gather(1, chosen), chosen


class RouterReplay(TorchFunctionMode):  # type: ignore[misc]
    """Replace what a router of transformers chooses of all ``n`` experts by ``routes`` [t, K].

    That is the `topk` of K of scores [t, n]; others choose groups of experts. Nothing where ``active`` chooses.
    """

    def __init__(self, active: ActiveAdapters, routes: Tensor, n: int) -> None:
        super().__init__()
        self._active, self._routes, self._shapes, self.replayed = active, routes, [(len(routes), n), routes.shape], 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk) or [args[0].shape, found[1].shape] != self._shapes:
            return found
        self.replayed += 1
        if self._active.chosen(found[1], self._routes):
            return found
        return type(found)(replay(args[0], found[1], self._routes))


def follow_routes(router: Any, active: ActiveAdapters, layer: int, n: int) -> None:
    """Let a ``router`` of ``n`` experts, at a layer counted among those with experts, follow the tokens' routes.

    A pass with routes raises ConfigError unless the router chooses of all experts once.
    """
    forward = router.forward

    def routed(*args: Any, **kwargs: Any) -> Any:
        if (routes := active.routes(layer)) is None:
            return forward(*args, **kwargs)
        with RouterReplay(active, routes, n) as mode:
            found = forward(*args, **kwargs)
        if mode.replayed != 1:
            raise refused(type(router).__name__)
        return found

    router.forward = routed


def refused(name: str) -> ConfigError:
    """Of a model or a part of it."""
    return ConfigError(
        "model.path", f"{name} does not choose experts in a way that replays", "set behaviour.router_replay to off"
    )
