"""Which tensor of a Hugging Face model is which parameter of ours: one table per architecture.

A rule names a tensor, the parameters in it, and how its matrix lies. Reading and writing are both
derived from it (`Rule.view`). Parameters are stacked over layers here and one
tensor per layer there: `{}` in a name is the number of the layer.

Shapes: D embed, F mlp, N query heads, K key/value heads, H head dim, V vocabulary, L layers.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

STACKED = "layers/"
"""How the paths of parameters begin that hold one tensor of each layer."""


class Form(NamedTuple):
    """How a parameter [*inputs, *outputs] lies as a tensor."""

    num_inputs: int
    """Of the dims of the parameter; 0: the tensor is a vector."""
    is_transposed: bool = False
    """Stored [outputs, inputs], as `torch.nn.Linear` does, instead of [inputs, outputs]."""
    vocab_dim: int | None = None
    """Dim of the parameter that is padded beyond the vocabulary."""


VECTOR = Form(0)
LINEAR = Form(1, is_transposed=True)
LINEAR_OF_HEADS = Form(2, is_transposed=True)
"""The kernel [N, H, D] of the projection back from heads."""
CONV1D = Form(1)
CONV1D_OF_HEADS = Form(2)
TABLE = Form(1)
VOCAB_TABLE = Form(1, vocab_dim=0)
VOCAB_LINEAR = Form(1, is_transposed=True, vocab_dim=1)


@dataclasses.dataclass(frozen=True)
class Rule:
    """One tensor, or one of each layer."""

    name: str
    paths: tuple[str, ...]
    """Parameters side by side along the outputs, as many of each."""
    form: Form

    @property
    def is_stacked(self) -> bool:
        """Whether there is a tensor of each layer."""
        return self.paths[0].startswith(STACKED)

    def view(self, param: np.ndarray, vocab_size: int) -> np.ndarray:
        """A parameter, of one layer, as its part of the tensor: a view, without padding.

        What is assigned to it is read into the parameter, so that one function serves import and
        export.
        """
        if not self.form.num_inputs:
            return param.reshape(-1)
        inputs = math.prod(param.shape[: self.form.num_inputs])
        matrix = param.reshape(inputs, -1)
        if self.form.vocab_dim is not None:
            matrix = matrix[:vocab_size] if self.form.vocab_dim == 0 else matrix[:, :vocab_size]
        return matrix.T if self.form.is_transposed else matrix

    def part(self, tensor_shape: Sequence[int], index: int) -> tuple[slice, ...]:
        """Where in the tensor the parameter `paths[index]` is."""
        dim = 0 if self.form.is_transposed else len(tensor_shape) - 1
        width = tensor_shape[dim] // len(self.paths)
        whole = [slice(0, size) for size in tensor_shape]
        whole[dim] = slice(index * width, (index + 1) * width)
        return tuple(whole)

    def tensor_shape(self, shape: Sequence[int], vocab_size: int) -> tuple[int, ...]:
        """The shape of the tensor, from that of one of its parameters, of one layer."""
        sizes = list(self.view(np.broadcast_to(np.zeros((), bool), shape), vocab_size).shape)
        sizes[0 if self.form.is_transposed else -1] *= len(self.paths)
        return tuple(sizes)


def _layers(prefix: str, rules: Mapping[str, tuple[str, Form]]) -> tuple[Rule, ...]:
    return tuple(
        Rule(f"{prefix}.{{}}.{name}", tuple(STACKED + path for path in paths.split()), form)
        for name, (paths, form) in rules.items()
    )


_GPT2 = (
    Rule("wte.weight", ("embed/embedding",), VOCAB_TABLE),
    Rule("wpe.weight", ("position/embedding",), TABLE),
    *_layers(
        "h",
        {
            "ln_1.weight": ("attention_norm/scale", VECTOR),
            "ln_1.bias": ("attention_norm/bias", VECTOR),
            "attn.c_attn.weight": (
                "attention/q/kernel attention/k/kernel attention/v/kernel",
                CONV1D,
            ),
            "attn.c_attn.bias": ("attention/q/bias attention/k/bias attention/v/bias", VECTOR),
            "attn.c_proj.weight": ("attention/o/kernel", CONV1D_OF_HEADS),
            "attn.c_proj.bias": ("attention/o/bias", VECTOR),
            "ln_2.weight": ("mlp_norm/scale", VECTOR),
            "ln_2.bias": ("mlp_norm/bias", VECTOR),
            "mlp.c_fc.weight": ("mlp/up/kernel", CONV1D),
            "mlp.c_fc.bias": ("mlp/up/bias", VECTOR),
            "mlp.c_proj.weight": ("mlp/down/kernel", CONV1D),
            "mlp.c_proj.bias": ("mlp/down/bias", VECTOR),
        },
    ),
    Rule("ln_f.weight", ("final_norm/scale",), VECTOR),
    Rule("ln_f.bias", ("final_norm/bias",), VECTOR),
)

_ENDS = (
    Rule("embed_tokens.weight", ("embed/embedding",), VOCAB_TABLE),
    Rule("norm.weight", ("final_norm/scale",), VECTOR),
)
_PROJECTIONS = {
    "self_attn.q_proj.weight": ("attention/q/kernel", LINEAR),
    "self_attn.k_proj.weight": ("attention/k/kernel", LINEAR),
    "self_attn.v_proj.weight": ("attention/v/kernel", LINEAR),
    "self_attn.o_proj.weight": ("attention/o/kernel", LINEAR_OF_HEADS),
    "mlp.gate_proj.weight": ("mlp/gate/kernel", LINEAR),
    "mlp.up_proj.weight": ("mlp/up/kernel", LINEAR),
    "mlp.down_proj.weight": ("mlp/down/kernel", LINEAR),
}
_NORMS_BEFORE = {
    "input_layernorm.weight": ("attention_norm/scale", VECTOR),
    "post_attention_layernorm.weight": ("mlp_norm/scale", VECTOR),
}
_NORMS_AFTER = {
    "post_attention_layernorm.weight": ("attention_post_norm/scale", VECTOR),
    "post_feedforward_layernorm.weight": ("mlp_post_norm/scale", VECTOR),
}
_NORMS_BOTH = _NORMS_AFTER | {
    "input_layernorm.weight": ("attention_norm/scale", VECTOR),
    "pre_feedforward_layernorm.weight": ("mlp_norm/scale", VECTOR),
}
_QK_NORMS = {
    "self_attn.q_norm.weight": ("attention/q_norm/scale", VECTOR),
    "self_attn.k_norm.weight": ("attention/k_norm/scale", VECTOR),
}
_QKV_BIASES = {
    "self_attn.q_proj.bias": ("attention/q/bias", VECTOR),
    "self_attn.k_proj.bias": ("attention/k/bias", VECTOR),
    "self_attn.v_proj.bias": ("attention/v/bias", VECTOR),
}

RULES: dict[str, tuple[Rule, ...]] = {
    "gpt2": _GPT2,
    "llama": _ENDS + _layers("layers", _PROJECTIONS | _NORMS_BEFORE),
    "mistral": _ENDS + _layers("layers", _PROJECTIONS | _NORMS_BEFORE),
    "qwen2": _ENDS + _layers("layers", _PROJECTIONS | _NORMS_BEFORE | _QKV_BIASES),
    "qwen3": _ENDS + _layers("layers", _PROJECTIONS | _NORMS_BEFORE | _QK_NORMS),
    "olmo2": _ENDS + _layers("layers", _PROJECTIONS | _NORMS_AFTER | _QK_NORMS),
    "gemma2": _ENDS + _layers("layers", _PROJECTIONS | _NORMS_BOTH),
    "gemma3_text": _ENDS + _layers("layers", _PROJECTIONS | _NORMS_BOTH | _QK_NORMS),
}
"""model_type of config.json -> rules. Names are those inside of the body; see `PREFIXES`."""

HEAD = Rule("lm_head.weight", ("head/kernel",), VOCAB_LINEAR)
"""The output layer, outside of the body; in a file with tied embeddings, if at all, a copy."""

PREFIXES = {"gpt2": "transformer."}
"""What names of the body begin with; elsewhere `model.`. Files without it are read too."""

IGNORED = (
    r"(^|\.)h\.\d+\.attn\.(masked_)?bias$",  # GPT-2's causal mask
    r"(^|\.)rotary_emb\.inv_freq$",
)
"""Tensors that old files hold and that are no weights."""


def prefix_of(model_type: str) -> str:
    """What names in the body of a model begin with."""
    return PREFIXES.get(model_type, "model.")


class Placed(NamedTuple):
    """A tensor, and where its parameters are."""

    name: str
    rule: Rule
    layer: int | None
    """None for a parameter that is not stacked."""
    shape: tuple[int, ...]


def placed(
    model_type: str,
    shapes: Mapping[str, Sequence[int]],
    *,
    vocab_size: int,
    prefix: str,
) -> Iterator[Placed]:
    """Lists the tensors of a model, in the order of the file's names.

    Args:
        model_type: of config.json.
        shapes: path -> shape, of every parameter; stacked ones [L, ...].
        vocab_size: true size.
        prefix: of names in the body.

    Raises:
        AssertionError: if a parameter is in no tensor; the tables are then incomplete.
    """
    rules = [dataclasses.replace(rule, name=prefix + rule.name) for rule in RULES[model_type]]
    found = set()
    for rule in (*rules, HEAD):
        present = [path for path in rule.paths if path in shapes]
        if not present:
            continue
        found.update(present)
        shape = tuple(shapes[present[0]])
        if not rule.is_stacked:
            yield Placed(rule.name, rule, None, rule.tensor_shape(shape, vocab_size))
            continue
        tensor_shape = rule.tensor_shape(shape[1:], vocab_size)
        for layer in range(shape[0]):
            yield Placed(rule.name.format(layer), rule, layer, tensor_shape)
    missing = sorted(set(shapes) - found)
    assert not missing, f"no rule of {model_type} for {missing}"


def shapes_of(params: Any) -> dict[str, tuple[int, ...]]:
    """Path -> shape, of a tree of parameters, concrete or abstract."""
    from jaxtrain.tree import named_leaves

    return {path: tuple(leaf.shape) for path, leaf in named_leaves(params)}
