"""Adaptable layers of a model, and the Hugging Face projections that each stands for.

An adapted Megatron layer (a *site*) has one whole lora_A [r, in] and one whole lora_B [out, r]. All of its
projections share lora_A, and each takes some rows of lora_B. Rows are index ranges, so packing for the wire
and loading from a file follow the same data.

Sizes of adapters and floating point operations of passes follow from them; a multiply-add counts as two.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from areal_lora.errors import UnknownTensorError
from areal_lora.families.family import ATTENTION_LINEARS, MLP_LINEARS, Scope, covers
from areal_lora.families.shape import DTYPE_BYTES, ModelShape
from areal_lora.types import AdapterStructure, ExpertLayout

LORA_A, LORA_B = "lora_A", "lora_B"
_OUTER = {"linear_fc1": LORA_A, "linear_fc2": LORA_B}

RowRanges = tuple[tuple[int, int], ...]
"""Ranges [start, stop) of the rows of a matrix, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteKey:
    """Identify an adapted layer: Megatron's name of the linear, global layer number, scope.

    ``expert`` is the global number of a routed expert, None in every scope but ``EXPERT``. ``shared`` is the side
    (``lora_A``, ``lora_B``) that it has in common with the layer's other experts (`ExpertLayout.SHARED_OUTER`).
    """

    linear: str
    layer: int
    scope: Scope
    expert: int | None = None
    shared: str = ""

    def covered(self, target_modules: Sequence[str]) -> bool:
        """Whether an adapter with these (canonical) targets adapts this site; see `covers`."""
        return covers(target_modules, self.linear, self.scope)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One Hugging Face projection of a site, and its rows of lora_B.

    ``aliases`` are further modules with the same lora_A and lora_B (``ALL_EXPERTS``: the other experts). ``a_of`` and
    ``b_of`` name the module whose lora_A or lora_B this one has, if it has none of its own.
    """

    name: str  # `model.layers.0.self_attn.q_proj`
    in_features: int
    rows: RowRanges
    aliases: tuple[str, ...] = ()
    a_of: str = ""
    b_of: str = ""

    @property
    def lora_a(self) -> str:
        """Wire name of its lora_A, if the projection is the first of its site."""
        return f"{self.a_of or self.name}.lora_A.weight"

    @property
    def lora_b(self) -> str:
        return f"{self.b_of or self.name}.lora_B.weight"

    @property
    def out_features(self) -> int:
        return sum(stop - start for start, stop in self.rows)


def _linears(shape: ModelShape, layer: int) -> dict[Scope, Sequence[str]]:
    """The linear layers of a layer by scope, in order."""
    sparse = layer in shape.sparse_layers
    if shape.checkpoint is not None:
        own = [linear.path for linear in shape.checkpoint.linears if layer in linear.layers]
        found: dict[Scope, Sequence[str]] = {Scope.LINEAR: own}
    else:
        found = {Scope.ATTENTION: ATTENTION_LINEARS, **({} if sparse else {Scope.MLP: MLP_LINEARS})}
    if sparse:
        found |= {**({Scope.SHARED_EXPERT: MLP_LINEARS} if shape.shared_ffn else {}), Scope.EXPERT: MLP_LINEARS}
    return found


@lru_cache(maxsize=8)
def linear_sites(shape: ModelShape) -> tuple[SiteKey, ...]:
    """One site for each linear layer, in the order of `sites_of`; the first expert stands for all of its layer."""
    return tuple(
        SiteKey(linear=linear, layer=layer, scope=scope, expert=0 if scope is Scope.EXPERT else None)
        for layer in range(shape.layers)
        for scope, linears in _linears(shape, layer).items()
        for linear in linears
    )


def sites_of(shape: ModelShape, expert_layout: ExpertLayout) -> list[SiteKey]:
    """List the adaptable layers.

    Order: by layer; in a layer linear_qkv, linear_proj, dense fc1, fc2, shared expert fc1, fc2, then fc1 of
    every expert, fc2 of every expert (or fc1, fc2 of all experts at once). A family without a row has its own linear
    layers by name in place of the dense ones.
    """
    found = []
    for key in linear_sites(shape):
        if key.scope is not Scope.EXPERT:
            found.append(key)
        elif expert_layout is ExpertLayout.SHARED:
            found.append(replace(key, scope=Scope.ALL_EXPERTS, expert=None))
        else:
            shared = _OUTER[key.linear] if expert_layout is ExpertLayout.SHARED_OUTER else ""
            found += [replace(key, expert=expert, shared=shared) for expert in range(shape.experts)]
    return found


def pieces_of(shape: ModelShape, key: SiteKey) -> list[Piece]:
    """Projections of a site, in Megatron's order. Raises UnknownTensorError for a site that the model does not have."""
    if key.scope is Scope.LINEAR:
        for linear in shape.checkpoint.linears if shape.checkpoint else ():
            if linear.path == key.linear and key.layer in linear.layers:
                name = f"{linear.prefix}.{key.layer}.{linear.path}"
                return [Piece(name=name, in_features=linear.inputs, rows=((0, linear.outputs),))]
        raise UnknownTensorError(f"layer {key.layer}: {key.linear} does not exist")
    _check(shape, key)
    paths = shape.family.projections(key.linear, key.scope)
    numbers: Sequence[int | None] = range(shape.experts) if key.scope is Scope.ALL_EXPERTS else [key.expert]
    inputs, rows = _sizes(shape, key)
    found = []
    for path, held in zip(paths, rows, strict=True):
        first, *others = (_name(key, path, number) for number in numbers)
        found.append(
            Piece(
                name=first,
                in_features=inputs,
                rows=held,
                aliases=tuple(others),
                a_of=_name(key, paths[0], 0) if key.shared == LORA_A and key.expert else "",
                b_of=_name(key, path, 0) if key.shared == LORA_B and key.expert else "",
            )
        )
    return found


def linear_elements(shape: ModelShape) -> int:
    """Weights of the layers that can be adapted, of all experts: no routers, embeddings or output layer."""
    sites = ((piece, key.scope) for key in linear_sites(shape) for piece in pieces_of(shape, key))
    return sum(p.in_features * p.out_features * (shape.experts if s is Scope.EXPERT else 1) for p, s in sites)


def _name(key: SiteKey, path: str, expert: int | None) -> str:
    return f"model.layers.{key.layer}.{path.format(expert)}"


def _sizes(shape: ModelShape, key: SiteKey) -> tuple[int, list[RowRanges]]:
    """Inputs of a site, and the rows of each of its projections."""
    widths = {Scope.MLP: shape.ffn, Scope.SHARED_EXPERT: shape.shared_ffn}
    hidden, ffn = shape.hidden, widths.get(key.scope, shape.expert_ffn)
    match key.linear:
        case "linear_qkv":
            return hidden, _qkv_rows(shape)
        case "linear_proj":
            return shape.heads * shape.head_dim, [((0, hidden),)]
        case "linear_fc1":  # the gate rows, then the up rows
            return hidden, [((0, ffn),), ((ffn, 2 * ffn),)]
        case _:
            return ffn, [((0, hidden),)]


def _qkv_rows(shape: ModelShape) -> list[RowRanges]:
    """Rows of q, k and v: Megatron keeps, per query group, the group's queries, then its key, then its value."""
    d = shape.head_dim
    queries = shape.heads // shape.kv_heads * d
    starts = [group * (queries + 2 * d) for group in range(shape.kv_heads)]
    return [
        tuple((s, s + queries) for s in starts),
        tuple((s + queries, s + queries + d) for s in starts),
        tuple((s + queries + d, s + queries + 2 * d) for s in starts),
    ]


def _check(shape: ModelShape, key: SiteKey) -> None:
    scope = Scope.EXPERT if key.scope is Scope.ALL_EXPERTS else key.scope
    expert = shape.experts if key.expert is None else key.expert
    numbered = (key.scope is Scope.EXPERT) == (0 <= expert < shape.experts)
    if key.linear not in _linears(shape, key.layer).get(scope, ()) or not numbered:
        which = "" if numbered else f" of expert {key.expert}, there are {shape.experts}"
        raise UnknownTensorError(f"layer {key.layer}: {key.scope}.{key.linear} does not exist{which}")


def wire_names(pieces: Sequence[Piece]) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """``({unique tensor name: shape without rank}, {alias: unique name})`` of one site's pieces (contract C5).

    Shapes have -1 where the rank goes. lora_A travels once, under the first projection's name;
    modules with the same numbers (``Piece.aliases``) do not travel.
    """
    lora_a = pieces[0].lora_a
    shapes: dict[str, tuple[int, ...]] = {} if pieces[0].a_of else {lora_a: (-1, pieces[0].in_features)}
    aliases: dict[str, str] = {}
    for piece in pieces:
        if not piece.b_of:
            shapes[piece.lora_b] = (piece.out_features, -1)
        aliases |= {f"{name}.lora_A.weight": lora_a for name in (piece.name, *piece.aliases)}
        aliases |= {f"{name}.lora_B.weight": piece.lora_b for name in (piece.name, *piece.aliases)}
    return shapes, {alias: name for alias, name in aliases.items() if alias != name}


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSize:
    """Sizes of one adapter version.

    ``parameters`` in ``tensors`` go over the wire. They stand for ``names`` Hugging Face names, which hold
    ``file_parameters`` in a PEFT file because shared tensors are repeated there.
    They change ``weights`` parameters of the base, which are what travels where versions are merged.
    """

    parameters: int
    file_parameters: int
    weights: int
    tensors: int
    names: int

    def nbytes(self, dtype: str) -> int:
        return self.parameters * DTYPE_BYTES[dtype]


def adapter_size(shape: ModelShape, spec: AdapterStructure) -> AdapterSize:
    """Count the unique numbers of an adapter (canonical targets).

    ``linear_qkv`` and ``linear_fc1`` are fused: one lora_A [rank, in] serves q, k, v (gate, up). It is counted
    and sent once, while every Hugging Face name needs its own. What the experts of a layer share (`ExpertLayout`) is
    counted once, too.
    """
    parameters = file_parameters = weights = tensors = names = 0
    for key in linear_sites(shape):
        if not key.covered(spec.target_modules):
            continue
        pieces = pieces_of(shape, key)
        rank, inputs, outputs = spec.rank_of(pieces[0].name), pieces[0].in_features, sum(p.out_features for p in pieces)
        modules = shape.experts if key.scope is Scope.EXPERT else 1
        n_a, n_b = distinct(spec.expert_layout, key.linear, modules)
        parameters += rank * (n_a * inputs + n_b * outputs)
        file_parameters += rank * modules * (len(pieces) * inputs + outputs)
        weights += modules * inputs * outputs
        tensors += n_a + n_b * len(pieces)
        names += 2 * modules * len(pieces)
    return AdapterSize(
        parameters=parameters, file_parameters=file_parameters, weights=weights, tensors=tensors, names=names
    )


def distinct(expert_layout: ExpertLayout, linear: str, modules: int) -> tuple[int, int]:
    """How many lora_A and lora_B so many experts of one linear layer have."""
    match expert_layout:
        case ExpertLayout.PER_EXPERT:
            return modules, modules
        case ExpertLayout.SHARED:
            return 1, 1
        case ExpertLayout.SHARED_OUTER:
            return (1, modules) if linear == "linear_fc1" else (modules, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PassSizes:
    """Multiply-adds of a forward pass: ``layers``, ``output`` and ``adapter`` of a token, ``attention`` of a pair of
    a query and a key (scores and weighted values, all layers).

    A token meets the router and the chosen experts only. Norms, rotations and activations do not count, as usual
    (Chowdhery et al., PaLM, arXiv 2204.02311, appendix B). Sliding windows count as full causal attention.
    """

    layers: int
    output: int
    adapter: int
    attention: int

    @classmethod
    def of(cls, shape: ModelShape, adapter: AdapterStructure | None) -> "PassSizes":
        """Of a pass with ``adapter``, or of the base alone; a value head takes the place of the output layer."""
        layers, adapted = shape.moe_layers * shape.hidden * shape.experts, 0
        for key in linear_sites(shape):
            pieces = pieces_of(shape, key)
            times = shape.experts_per_token if key.scope is Scope.EXPERT else 1
            inputs, outputs = pieces[0].in_features, sum(piece.out_features for piece in pieces)
            layers += times * inputs * outputs
            if adapter is not None and key.covered(adapter.target_modules):
                adapted += times * adapter.rank_of(pieces[0].name) * (inputs + outputs)
        values = adapter is not None and adapter.value_head
        return cls(
            layers=layers,
            output=shape.hidden * (1 if values else shape.vocab),
            adapter=adapted,
            attention=2 * shape.layers * shape.heads * shape.head_dim,
        )

    def forward(self, tokens: int, pairs: int, predictions: int | None = None) -> int:
        """FLOPs of a forward pass over ``tokens``; ``pairs`` are those of causal attention (`Tree.pairs`).

        Without a number of ``predictions`` there are as many as tokens.
        """
        return self.recompute(tokens, pairs) + 2 * (tokens if predictions is None else predictions) * self.output

    def training(self, tokens: int, pairs: int, predictions: int | None = None) -> int:
        """FLOPs of a forward and a backward pass.

        Backward, frozen weights have the gradient of their input alone (as many as forward), adapters also that of
        their weights, attention those of both factors of its products (twice as many).
        """
        return 2 * (self.forward(tokens, pairs, predictions) + tokens * self.adapter + pairs * self.attention)

    def recompute(self, tokens: int, pairs: int) -> int:
        """FLOPs of the layers alone, which `trainer.recompute` computes once more in the backward pass.

        `selective` keeps what attention returns: no ``pairs``.
        """
        return 2 * (tokens * (self.layers + self.adapter) + pairs * self.attention)
