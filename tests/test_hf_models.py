"""What transformers computes, we compute: every position, alone and on a mesh, and with a cache.

Shapes: B batch, T length, V vocabulary.
"""

import dataclasses
import gzip
import json

import hugging
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.compile import asked_attention
from jaxtrain.errors import ConfigError
from jaxtrain.hf import configs, tables
from jaxtrain.losses import lm_loss
from jaxtrain.models.attention import masking_of
from jaxtrain.models.functional import logits
from jaxtrain.models.transformer import TransformerConfig, transformer

pytestmark = pytest.mark.usefixtures("compile_cache")

SIZES = json.loads(gzip.decompress((hugging.ROOT / "real_sizes.json.gz").read_bytes()))

# What each architecture has beyond the transformer of before, switched off. Parameters stay.
WITHOUT = {
    "llama": [{"rope_scaling": "none", "rope_factor": 32.0, "rope_original_length": 8192}],
    "mistral": [{"window": 0}],
    "gemma2": [
        {"full_attention_every": 0},
        {"attention_softcap": 0.0},
        {"logit_softcap": 0.0},
        {"attention_scalar": 0.0},
        {"embed_scale": False},
        {"norm": "rms"},
        {"activation": "swiglu"},
    ],
    "gemma3": [{"rope_local_theta": 0.0}, {"rope_scaling": "none", "rope_factor": 32.0}],
}


@pytest.mark.parametrize("name", hugging.NAMES)
def test_logits_are_those_of_transformers_on_one_device_and_on_a_mesh(name):
    tokens, expected = hugging.expected(name)
    config, model, params, mesh = hugging.load(hugging.ROOT / name)
    found = hugging.scores(model, params, tokens, mesh)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
    assert np.abs(expected).max() > 1
    for changes in WITHOUT.get(name, ()):
        other = transformer(dataclasses.replace(config, **changes))
        changed = hugging.scores(other, params, tokens, mesh)
        assert np.abs(changed - expected).max() > 1e-2, changes
    _, model, params, mesh = hugging.load(hugging.ROOT / name, "fsdp:2,tensor:2")
    found = hugging.scores(model, params, tokens, mesh)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "mistral", "olmo2", "qwen2"])
def test_a_cache_gives_the_logits_of_transformers(name):
    """A prompt longer than the window at once, then tokens one by one."""
    tokens, expected = hugging.expected(name)
    _, model, params, _ = hugging.load(hugging.ROOT / name)
    rows, length = tokens.shape
    decode = jax.jit(model.decode)
    positions = np.arange(12)[None].repeat(rows, 0)
    hidden, cache = decode(params, model.init_cache(rows, length), tokens[:, :12], positions)
    parts = [hidden]
    for position in range(12, length):
        token = tokens[:, position : position + 1]
        hidden, cache = decode(params, cache, token, np.full((rows, 1), position))
        parts.append(hidden)
    found = np.asarray(logits(model, params, jnp.concatenate(parts, 1)))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", SIZES)
def test_every_tensor_of_a_published_size_has_its_place(name):
    size = SIZES[name]
    architecture, config = configs.read_config(size["config"], name)
    abstract, _ = jax.eval_shape(transformer(config).init, jax.random.key(0))
    placed = tables.placed(
        architecture.model_type,
        tables.shapes_of(abstract),
        vocab_size=config.vocab_size,
        prefix=tables.prefix_of(architecture.model_type),
    )
    assert {piece.name: list(piece.shape) for piece in placed} == size["tensors"]
    again = configs.write_config(config, max_length=2048)
    assert configs.differences(config, configs.read_config(again, name)[1]) == []


@pytest.mark.parametrize("chunk_bytes", [None, 4 * 2 * 64 * 8])
def test_the_loss_and_its_gradient_respect_the_limit_of_logits(chunk_bytes):
    config = TransformerConfig(
        vocab_size=61, vocab_multiple=8, num_layers=1, embed_dim=16, num_heads=2, mlp_dim=24,
        logit_softcap=1.5, tie_embeddings=True,
    )  # fmt: skip
    model = transformer(config)
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(2, 24, 16)), jnp.float32)
    table = {"embed": {"embedding": jnp.asarray(rng.normal(size=(64, 16)), jnp.float32)}}
    batch = {
        "targets": rng.integers(0, 61, (2, 24)).astype(np.int32),
        "loss_mask": np.ones((2, 24), np.float32),
    }

    def ours(hidden, table):
        return lm_loss(model, chunk_bytes=chunk_bytes)(hidden, batch, table)["loss"][0]

    def plain(hidden, table):
        scores = 1.5 * jnp.tanh(hidden @ table["embed"]["embedding"][:61].T / 1.5)
        nll = -jnp.take_along_axis(jax.nn.log_softmax(scores), batch["targets"][..., None], -1)
        return jnp.sum(nll)

    found = jax.value_and_grad(ours, (0, 1))(hidden, table)
    wanted = jax.value_and_grad(plain, (0, 1))(hidden, table)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_a_window_counts_tokens_of_packed_rows_too():
    """A token sees neither another document nor what lies beyond its window."""
    config = TransformerConfig(
        vocab_size=61, num_layers=1, embed_dim=16, num_heads=2, mlp_dim=24, window=3
    )
    model = transformer(config)
    params, _ = model.init(jax.random.key(0))
    tokens = np.arange(10, dtype=np.int32)[None]
    segments = np.array([[0] * 6 + [1] * 4], np.int32)
    positions = np.array([[*range(6), *range(4)]], np.int32)

    def outputs(table):
        batch = {"tokens": tokens, "segment_ids": segments, "positions": positions}
        changed = {**params, "embed": {"embedding": table}}
        return model.apply(changed, {}, batch, key=None, train=True)[0][0].sum(-1)

    jacobian = jax.jacrev(outputs)(params["embed"]["embedding"])
    seen = np.abs(np.asarray(jacobian)).sum(-1)[:, :10] > 0
    index = np.arange(10)
    near = (index[:, None] >= index) & (index[:, None] - index < 3)
    np.testing.assert_array_equal(seen, near & (segments[0][:, None] == segments[0]))


@pytest.mark.parametrize(("changes", "word"), [({"window": 8}, "window"), ({}, "limit")])
def test_cudnn_is_not_taken_for_what_it_does_not_compute(changes, word):
    config = TransformerConfig(attention_softcap=0.0 if changes else 2.0, **changes)
    masking = masking_of(config, has_segments=False)

    class H100:
        platform, compute_capability = "gpu", "9.0"

    choice = asked_attention("auto", H100, "bfloat16", 64, masking=masking)
    assert choice.implementation == "xla"
    assert word in choice.reason
    with pytest.raises(ConfigError, match=rf"attention='cudnn' has no .*{word}"):
        asked_attention("cudnn", H100, "bfloat16", 64, masking=masking)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"full_attention_every": 2}, "full_attention_every=2 is for layers with a window"),
        ({"rope_local_theta": 5.0}, "rope_local_theta=5.0 is for layers with a window"),
        ({"qk_norm_over": "heads"}, "qk_norm_over=heads is read only with qk_norm"),
        ({"qkv_bias": True, "use_bias": True}, "qkv_bias"),
    ],
)
def test_settings_that_nothing_reads_are_refused(changes, match):
    with pytest.raises(ConfigError, match=match):
        TransformerConfig(**changes)
