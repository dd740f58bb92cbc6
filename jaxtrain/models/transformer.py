"""A decoder-only transformer: GPT-2, Llama, Mistral, Qwen, OLMo 2 and Gemma by configuration.

Parameters (leaf names as on Hugging Face where shapes allow; L is stacked first under `layers`):

    embed/embedding [V, D]      position/embedding [P, D] (learned positions)
    layers/attention/{q,k,v}/kernel [L, D, N or K, H]      layers/attention/o/kernel [L, N, H, D]
    layers/attention/{q_norm,k_norm}/scale [L, H], or [L, N or K, H] over all heads
    layers/mlp/{gate,up}/kernel [L, D, F]                  layers/mlp/down/kernel [L, F, D]
    layers/{attention_norm,mlp_norm}/{scale,bias} [L, D]   and a bias beside each kernel
    layers/{attention_post_norm,mlp_post_norm}/...         norms of what comes out
    layers/.../lora_a [L, *inputs, R], lora_b [L, R, *outputs] beside a kernel, with `lora`
    final_norm/{scale,bias} [D]                            head/kernel [D, V] (untied)

Shapes: B batch, T length, D embed, F mlp, N query heads, K key/value heads, H head dim,
V padded vocabulary, P learned positions, L layers, R rank.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxtrain.compile import (
    ATTENTION_KERNELS,
    SUMMED,
    asked_attention,
    attention_cost,
    target_device,
)
from jaxtrain.compile import remat as remat_block
from jaxtrain.errors import ConfigError
from jaxtrain.models.attention import Attention, Cache, LayerRotation, masking_of
from jaxtrain.models.decoder import make_decoder, takes_layers_apart
from jaxtrain.models.functional import Batch, Model, Params, functional, row_keys
from jaxtrain.models.layers import (
    Embedding,
    Mlp,
    Norm,
    Projection,
    dropout,
    logical_axes,
    normal,
    residual_init,
)
from jaxtrain.models.lora import ADAPTERS, BASE, adapt, is_adapter, keep_base
from jaxtrain.models.lora_config import LoraConfig
from jaxtrain.models.transformer_checks import check_batch, check_length
from jaxtrain.models.transformer_config import PRESETS, TransformerConfig
from jaxtrain.sharding import constrain
from jaxtrain.throughput import training_flops_per_token
from jaxtrain.tree import named_leaves

__all__ = ["PRESETS", "TransformerConfig", "transformer"]

ATTENTION_IMPLEMENTATIONS = ("auto", *ATTENTION_KERNELS)

_INPUTS = ("tokens", "positions", "segment_ids")

# Up to here the layers' loop is unrolled on CPU, where XLA then writes gradients in place instead
# of copying slices: measured 20 to 25 % of a step at 4 and 6 layers. Compile time grows with it.
_MAX_UNROLLED_LAYERS = 8


class Block(nnx.Module):
    """One layer: attention and feed-forward layers, each with norms of its own."""

    def __init__(
        self, config: TransformerConfig, attention: str, lora: LoraConfig, *, rngs: nnx.Rngs
    ):
        norm = lambda: Norm(  # noqa: E731
            config.norm, (("embed", config.embed_dim),), epsilon=config.norm_epsilon, rngs=rngs
        )
        self.norms_input, self.norms_output = (
            config.block_norms in (place, "both") for place in ("before", "after")
        )
        if self.norms_input:
            self.attention_norm = norm()
        self.attention = Attention(config, attention, rngs=rngs)
        if self.norms_input:
            self.mlp_norm = norm()
        if self.norms_output:
            self.attention_post_norm, self.mlp_post_norm = norm(), norm()
        self.mlp = Mlp(
            config.activation, config.embed_dim, config.mlp_dim,
            use_bias=config.use_bias, init_down=residual_init(config.num_layers), rngs=rngs,
        )  # fmt: skip
        self.dropout = config.dropout
        if lora.rank:
            adapt(self, lora, rngs=rngs)

    def __call__(
        self,
        x_BTD: jax.Array,
        rotation: LayerRotation | None,
        keys_B: jax.Array | None,
        layer: jax.Array,
        segment_ids_BT: jax.Array | None = None,
    ) -> jax.Array:
        """Adds what the layer computes; `keys_B` draws the dropout masks of this layer."""
        with jax.named_scope("attention"):
            normed_BTD = self.attention_norm(x_BTD) if self.norms_input else x_BTD
            angles = None if rotation is None else rotation.of(layer)
            added_BTD = self.attention(normed_BTD, angles, layer, segment_ids_BT)
            if self.norms_output:
                added_BTD = self.attention_post_norm(added_BTD)
            x_BTD = self._add(x_BTD, added_BTD, keys_B, 2 * layer + 1)
            # What devices have added up is not added up again by a rematerialisation.
            x_BTD = checkpoint_name(x_BTD, SUMMED)
        with jax.named_scope("mlp"):
            added_BTD = self._feed_forward(x_BTD)
            return self._add(x_BTD, added_BTD, keys_B, 2 * layer + 2)

    def decode(self, x_BTD, rotation, cache: Cache, layer: jax.Array, positions_BT: jax.Array):
        """The same for new tokens after those in the cache."""
        normed_BTD = self.attention_norm(x_BTD) if self.norms_input else x_BTD
        angles = None if rotation is None else rotation.of(layer)
        added_BTD, cache = self.attention.decode(normed_BTD, angles, cache, layer, positions_BT)
        if self.norms_output:
            added_BTD = self.attention_post_norm(added_BTD)
        x_BTD += added_BTD
        return x_BTD + self._feed_forward(x_BTD), cache

    def _feed_forward(self, x_BTD: jax.Array) -> jax.Array:
        added_BTD = self.mlp(self.mlp_norm(x_BTD) if self.norms_input else x_BTD)
        return self.mlp_post_norm(added_BTD) if self.norms_output else added_BTD

    def _add(self, x_BTD, added_BTD, keys_B, site):
        added_BTD = dropout(added_BTD, keys_B, site, self.dropout)
        return constrain(x_BTD + added_BTD, "batch", "length", "embed")


class Transformer(nnx.Module):
    """Embedding, stacked layers, final norm, and the output layer's parameters."""

    def __init__(
        self, config: TransformerConfig, lora: LoraConfig, *,
        dtype: str, remat: str, attention: str, rngs: nnx.Rngs, is_stacked: bool = True,
    ):  # fmt: skip
        vocab, width = config.padded_vocab_size, config.embed_dim
        self.config, self.dtype, self.remat = config, dtype, remat
        self.embed = Embedding("vocab", vocab, width, rngs=rngs)
        if config.positions == "learned":
            self.position = Embedding("length", config.max_length, width, rngs=rngs)
        block = lambda key: Block(config, attention, lora, rngs=nnx.Rngs(key))  # noqa: E731
        keys = jax.random.split(rngs.params(), config.num_layers)
        self.layers = jax.vmap(block)(keys) if is_stacked else nnx.List(map(block, keys))
        self.final_norm = Norm(
            config.norm, (("embed", width),), epsilon=config.norm_epsilon, rngs=rngs
        )
        if not config.tie_embeddings:
            self.head = Projection(
                (("embed", width),), (("vocab", vocab),), init=normal(), rngs=rngs
            )

    def __call__(
        self,
        tokens_BT: jax.Array,
        positions_BT: jax.Array | None,
        keys_B: jax.Array | None,
        segment_ids_BT: jax.Array | None = None,
    ) -> jax.Array:
        """Hidden states after the final norm, hidden_BTD."""
        config = self.config
        x_BTD, angles = self._embed(tokens_BT, positions_BT)
        x_BTD = dropout(x_BTD, keys_B, 0, config.dropout)
        unroll = config.scan_unroll or _automatic_unroll(config.num_layers)

        def block(x_BTD, scanned):
            layer, index = scanned
            return layer(x_BTD, angles, keys_B, index, segment_ids_BT), None

        # A loop that is unrolled whole disappears, and XLA could undo the rematerialisation.
        block = remat_block(block, self.remat, is_scanned=unroll < config.num_layers)
        with jax.named_scope("layers"):
            xs = (self.layers, jnp.arange(config.num_layers))
            x_BTD, _ = jax.lax.scan(block, x_BTD, xs, unroll=min(unroll, config.num_layers))
        return self.final_norm(x_BTD)

    def decode(
        self, cache: Cache, tokens_BT: jax.Array, positions_BT: jax.Array
    ) -> tuple[jax.Array, Cache]:
        """Hidden states of new tokens, and the cache with their keys and values."""
        x_BTD, angles = self._embed(tokens_BT, positions_BT)

        def block(carry, scanned):
            (x_BTD, cache), (layer, index) = carry, scanned
            return layer.decode(x_BTD, angles, cache, index, positions_BT), None

        is_apart, indices = isinstance(cache.keys, tuple), jnp.arange(self.config.num_layers)
        if isinstance(self.layers, nnx.List):
            written = []
            for index, (layer, *own) in enumerate(zip(self.layers, *cache.apart(), strict=True)):
                (x_BTD, new), _ = block((x_BTD, Cache(*own)), (layer, indices[index]))
                written.append(new)
            cache = Cache(*zip(*written, strict=True))
        else:
            carry = (x_BTD, cache.stacked())
            (x_BTD, cache), _ = jax.lax.scan(block, carry, (self.layers, indices))
        return self.final_norm(x_BTD), cache.apart() if is_apart else cache.stacked()

    def _embed(self, tokens_BT: jax.Array, positions_BT: jax.Array | None):
        """Residual stream before the first layer, and the angles of rotary positions."""
        length = tokens_BT.shape[1]
        with jax.named_scope("embed"):
            # The constraint is for the gradient: scattered into the layout of the lookup, and only
            # then reduced into that of storage. In one go XLA would replicate the activations.
            table_VD = constrain(self.embed.gathered("embedding", self.dtype), "vocab", "embed")
            x_BTD = table_VD[tokens_BT]
            if self.config.embed_scale:
                x_BTD *= jnp.asarray(math.sqrt(self.config.embed_dim), x_BTD.dtype)
            if self.config.positions == "learned":
                table_PD = self.position.gathered("embedding", self.dtype)
                x_BTD += table_PD[None, :length] if positions_BT is None else table_PD[positions_BT]
                angles = None
            else:
                if positions_BT is None:
                    positions_BT = jnp.arange(length)[None]
                angles = LayerRotation.make(self.config, positions_BT)
            return constrain(x_BTD, "batch", "length", "embed"), angles


def transformer(
    config: TransformerConfig,
    *,
    precision: str = "float32",
    remat: str = "none",
    attention: str = "auto",
    lora: LoraConfig | None = None,
) -> Model:
    """Makes the pure model. Outputs are hidden_BTD; `logits` makes scores of them.

    Args:
        config: sizes and kinds.
        precision: dtype of the computation, "float32" or "bfloat16". Parameters, norms and the
            softmax stay float32.
        remat: what the backward pass computes again: "none", "dots" or "full".
        attention: "auto": the kernel that `compile.attention_implementation` has for the devices
            that the step is traced for; or "xla" or "cudnn".
        lora: adapters of projections, which alone are trained; None: none. The other parameters
            then are in `lora.base_dtype`.

    The batch holds tokens [B, T] int32, and may hold positions [B, T] int32 (else 0, 1, ... in each
    row) and, for packed rows, segment_ids [B, T] int32: a token then attends to those of its own
    segment only. Dropout draws from `row_keys`.
    """
    if attention not in ATTENTION_IMPLEMENTATIONS:
        raise ConfigError(
            f"attention={attention!r} does not exist; use {' or '.join(ATTENTION_IMPLEMENTATIONS)}."
        )

    lora = lora or LoraConfig()

    def build(rngs: nnx.Rngs, *, is_stacked: bool = True) -> Transformer:
        kinds = {"dtype": precision, "remat": remat, "attention": attention}
        return Transformer(config, lora, **kinds, rngs=rngs, is_stacked=is_stacked)

    forward = functional(
        build,
        call=lambda module, b: module(
            b["tokens"], b.get("positions"), b.get("row_key"), b.get("segment_ids")
        ),
    )
    decoder = make_decoder(build, num_layers=config.num_layers, precision=precision)

    def init(key: jax.Array) -> tuple[Params, Params]:
        params, model_state = forward.init(key)
        return (keep_base(params, lora.base_dtype) if lora.rank else params), model_state

    def apply(
        params: Params, model_state: Params, batch: Batch, *, key: jax.Array | None, train: bool
    ) -> tuple[jax.Array, Params]:
        check_batch(config, batch)
        inputs = {name: batch[name] for name in _INPUTS if name in batch}
        if train and config.dropout:
            inputs["row_key"] = _row_keys(key, batch)
        return forward.apply(params, model_state, inputs, key=None, train=train)

    def init_cache(batch_size: int, length: int, dtype: Any = precision) -> Cache:
        check_length(config, length)
        shape = (config.num_layers, batch_size, config.kv_heads, length, config.head_size)
        cache = Cache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))
        return cache.apart() if takes_layers_apart() else cache

    def unembed(params: Params) -> jax.Array:
        return params["embed"]["embedding"].T if config.tie_embeddings else params["head"]["kernel"]

    def kernels(device: Any, batch: Mapping[str, jax.Array]) -> dict[str, str]:
        tokens = batch["tokens"]
        num_rows, length = tokens.sharding.shard_shape(tokens.shape)[-2:]
        masking = masking_of(config, has_segments="segment_ids" in batch)
        name, reason = asked_attention(
            attention, device, precision, config.head_size, masking=masking
        )
        cost = attention_cost(name, num_rows, config.num_heads, length, masking=masking)
        return {"attention": f"{name} ({reason}); {cost}"}

    skeleton = nnx.eval_shape(lambda: build(nnx.Rngs(0)))
    abstract_params, _ = jax.eval_shape(init, jax.random.key(0))
    num_tables = 1 if config.tie_embeddings else 2
    padding = (config.padded_vocab_size - config.vocab_size) * config.embed_dim * num_tables
    multiplied = _num_multiplied(config, abstract_params)
    adapters = [leaf.size for path, leaf in named_leaves(abstract_params) if is_adapter(path)]
    num_frozen = multiplied - sum(adapters) if lora.rank else 0

    def flops_per_token(length: int) -> float:
        return training_flops_per_token(
            multiplied,
            num_frozen=num_frozen,
            num_layers=config.num_layers,
            attention_dim=config.num_heads * config.head_size,
            sequence_length=length,
        )

    return dataclasses.replace(
        forward,
        init=init,
        apply=apply,
        frozen=BASE if lora.rank else "",
        kept_whole=ADAPTERS if lora.rank else "",
        logical_axes=logical_axes(skeleton, abstract_params),
        num_padding_params=padding,
        flops_per_token=flops_per_token,
        unembed=unembed,
        vocab_size=config.vocab_size,
        logit_softcap=config.logit_softcap,
        kernels=kernels,
        init_cache=init_cache,
        decode=decoder.decode,
        for_decode=decoder.for_decode,
    )


def _num_multiplied(config: TransformerConfig, abstract_params: Params) -> int:
    """Parameters that a token is multiplied with: the layers, the last norm, the output layer."""
    parts = [abstract_params["layers"], abstract_params["final_norm"]]
    num_params = sum(leaf.size for leaf in jax.tree.leaves(parts))
    return num_params + config.vocab_size * config.embed_dim


def _row_keys(key: jax.Array | None, batch: Batch) -> jax.Array:
    if key is None and "row_key" not in batch:
        raise ConfigError("a model with dropout needs a key to train.")
    return row_keys(key, batch)  # pyright: ignore[reportArgumentType]


def _automatic_unroll(num_layers: int) -> int:
    is_cpu = target_device().platform == "cpu"
    return num_layers if is_cpu and num_layers <= _MAX_UNROLLED_LAYERS else 1
