"""Grouped experts with LoRA inside against one expert after the other in float64, by autograd."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from areal_lora.engine.layers.active import ActiveAdapters, PackedTokens
from areal_lora.engine.layers.expert_mlp import ExpertLora
from tests.support.lazy import Lazy

modules = Lazy("areal_lora.engine.megatron_utils.modules")
pytestmark = pytest.mark.usefixtures("cpu_patches")

HIDDEN, WIDTH, RANK, SCALE = 12, 6, 3, 1.7
SPLITS = [4, 0, 7, 1]
TOLERANCE = 1e-6  # of the norm; fp32 against float64


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


def make_experts(dtype: torch.dtype = torch.float32) -> modules.GroupedExperts:
    config = SimpleNamespace(hidden_size=HIDDEN, moe_ffn_hidden_size=WIDTH, params_dtype=dtype)
    groups = SimpleNamespace(expt_tp=SimpleNamespace(size=lambda: 1, rank=lambda: 0))
    experts = modules.GroupedExperts(len(SPLITS), config, pg_collection=groups)
    for parameter in experts.parameters():
        nn.init.normal_(parameter.requires_grad_(False), std=0.3)
    return experts


def adapter(shared: bool, n_out: int, n_in: int) -> tuple[nn.Parameter, nn.Parameter]:
    stack = () if shared else (len(SPLITS),)
    a, b = nn.Parameter(torch.randn(*stack, RANK, n_in)), nn.Parameter(torch.randn(*stack, n_out, RANK))
    a.grad, b.grad = torch.zeros_like(a), torch.zeros_like(b)
    return a, b


def adapt(linear: modules.GroupedLinear, a: torch.Tensor, b: torch.Tensor, name: str = "a") -> None:
    linear.residents[name] = ExpertLora(a, b, SCALE)
    linear.active = ActiveAdapters({name: None})


def one_by_one(experts: modules.GroupedExperts, x: Tensor, probs: Tensor, lora: list[Tensor]) -> Tensor:
    """The same function written per expert; ``lora`` holds A1, B1, A2, B2, each [n, ...] or [...]."""
    parts = []
    for e, (rows, p) in enumerate(zip(x.split(SPLITS), probs.split(SPLITS), strict=True)):
        a1, b1, a2, b2 = (t[e] if t.dim() == 3 else t for t in lora)
        w1 = experts.linear_fc1.weight[e].double() + SCALE * b1 @ a1
        w2 = experts.linear_fc2.weight[e].double() + SCALE * b2 @ a2
        gate, up = (rows @ w1.t()).chunk(2, dim=-1)
        parts.append((functional.silu(gate) * up * p[:, None]) @ w2.t())
    return torch.cat(parts)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("splits", [SPLITS, [0, 0, 12, 0]])
def test_grouped_experts_equal_experts_one_by_one(
    shared: bool, splits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "SPLITS", splits)
    torch.manual_seed(7)
    print("seed 7")
    experts = make_experts()
    pairs = [adapter(shared, 2 * WIDTH, HIDDEN), adapter(shared, HIDDEN, WIDTH)]
    adapt(experts.linear_fc1, *pairs[0])
    adapt(experts.linear_fc2, *pairs[1])
    x = torch.randn(sum(splits), HIDDEN, requires_grad=True)
    probs = torch.rand(sum(splits), requires_grad=True)
    inputs = [x, probs, *pairs[0], *pairs[1]]
    exact = [t.detach().double().requires_grad_() for t in inputs]
    out, bias = experts(x, torch.tensor(splits), probs)
    want = one_by_one(experts, exact[0], exact[1], exact[2:])
    assert bias is None
    assert error(out, want) < TOLERANCE
    weights = torch.randn_like(out)
    (out * weights).sum().backward()
    (want * weights.double()).sum().backward()
    for got, expected in zip(inputs, exact, strict=True):
        assert got.grad is not None
        assert got.grad.dtype == torch.float32
        assert expected.grad is not None
        assert error(got.grad, expected.grad) < TOLERANCE


def test_each_row_has_the_weights_of_its_adapter() -> None:
    """Against one row after the other in float64. One adapter has no row, one no part in fc1; some rows have none."""
    print("seed 11")
    torch.manual_seed(11)
    experts, lora = make_experts(), dict[str, list[Tensor]]()
    first, second = experts.linear_fc1, experts.linear_fc2
    for name in ("b", "a", "c"):
        pairs = [*adapter(False, 2 * WIDTH, HIDDEN), *adapter(False, HIDDEN, WIDTH)]
        lora[name] = [x if name != "c" or i > 1 else torch.zeros_like(x) for i, x in enumerate(pairs)]
        if name != "c":
            first.residents[name] = ExpertLora(*pairs[:2], SCALE)
        second.residents[name] = ExpertLora(*pairs[2:], SCALE)
    names = ["b", "base", "a", "c"]
    owners = torch.tensor([3, 0, 1, 0, 0, 1, 0, 3, 3, 1, 3, 0])  # of the rows by expert, in any order
    first.active = second.active = ActiveAdapters(dict.fromkeys(names))
    experts.rows = PackedTokens(keys=torch.zeros(12, dtype=torch.int64), owners=owners)
    x, probs = torch.randn(12, HIDDEN, requires_grad=True), torch.rand(12, requires_grad=True)
    out, _ = experts(x, torch.tensor(SPLITS), probs)
    inputs = [x, probs, *lora["b"], *lora["a"], *lora["c"][2:]]
    exact = [t.detach().double().requires_grad_() for t in inputs]
    parts = {"b": exact[2:6], "a": exact[6:10], "c": [*(x.double() for x in lora["c"][:2]), *exact[10:]]}
    parts["base"] = [torch.zeros_like(t) for t in exact[2:6]]
    of_row = torch.arange(len(SPLITS)).repeat_interleave(torch.tensor(SPLITS)).tolist()
    rows = []
    for i, (e, owner) in enumerate(zip(of_row, owners.tolist(), strict=True)):
        a1, b1, a2, b2 = (t[e] for t in parts[names[owner]])
        g = (first.weight[e].double() + SCALE * b1 @ a1) @ exact[0][i]
        u = functional.silu(g[:WIDTH]) * g[WIDTH:] * exact[1][i]
        rows.append((second.weight[e].double() + SCALE * b2 @ a2) @ u)
    want = torch.stack(rows)
    assert error(out.detach(), want) < TOLERANCE
    weights = torch.randn_like(out)
    (out * weights).sum().backward()
    (want * weights.double()).sum().backward()
    for got, expected in zip(inputs, exact, strict=True):
        assert got.grad is not None
        if expected.grad is None:
            assert not got.grad.any(), "it has no row"
        else:
            assert error(got.grad, expected.grad) < TOLERANCE


def test_an_adapter_that_is_off_leaves_the_base() -> None:
    torch.manual_seed(8)
    print("seed 8")
    experts = make_experts()
    x, probs, splits = torch.randn(12, HIDDEN), torch.rand(12), torch.tensor(SPLITS)
    base, _ = experts(x, splits, probs)
    for linear, shape in ((experts.linear_fc1, (2 * WIDTH, HIDDEN)), (experts.linear_fc2, (HIDDEN, WIDTH))):
        adapt(linear, *adapter(False, *shape))
    assert not torch.equal(experts(x, splits, probs)[0], base)
    for linear in (experts.linear_fc1, experts.linear_fc2):
        linear.active = ActiveAdapters()
    assert torch.equal(experts(x, splits, probs)[0], base)


def test_only_one_of_the_two_layers_may_have_an_adapter() -> None:
    torch.manual_seed(9)
    print("seed 9")
    experts = make_experts()
    a, b = adapter(False, HIDDEN, WIDTH)
    adapt(experts.linear_fc2, a, b)
    x = torch.randn(12, HIDDEN, requires_grad=True)
    experts(x, torch.tensor(SPLITS), torch.rand(12))[0].sum().backward()
    assert all(t.grad is not None for t in (a, b, x))


def test_bf16_experts_train_an_adapter_in_fp32() -> None:
    torch.manual_seed(10)
    print("seed 10")
    experts = make_experts(torch.bfloat16)
    a, b = (nn.Parameter(weights.detach().bfloat16()) for weights in adapter(False, 2 * WIDTH, HIDDEN))
    for weights in (a, b):  # as `AdapterMemory` has them
        weights.grad_dtype = None
        weights.grad = torch.zeros(weights.shape)
    adapt(experts.linear_fc1, a, b)
    out, _ = experts(torch.randn(12, HIDDEN).bfloat16(), torch.tensor(SPLITS), torch.rand(12))
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    for weights in (a, b):
        assert weights.grad is not None
        assert weights.grad.dtype == torch.float32
        assert weights.grad.any()
