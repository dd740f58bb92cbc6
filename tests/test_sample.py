"""Decoding with a cache equals the parallel forward; sampling draws what it is asked to."""

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.errors import ConfigError
from jaxtrain.models.functional import functional, logits
from jaxtrain.models.sample import generate, sample
from jaxtrain.models.transformer import TransformerConfig, transformer

pytestmark = pytest.mark.usefixtures("compile_cache")

SMALL = {"vocab_size": 61, "num_layers": 2, "embed_dim": 24, "mlp_dim": 40}
GPT2 = TransformerConfig(
    **SMALL, num_heads=3, activation="gelu", norm="layer", use_bias=True, positions="learned",
    max_length=40, tie_embeddings=True,
)  # fmt: skip
QWEN3 = TransformerConfig(**SMALL, num_heads=4, num_kv_heads=2, head_dim=10, qk_norm=True)


def random_model(config, scale=0.3):
    model = transformer(config)
    shapes, _ = jax.eval_shape(model.init, jax.random.key(0))
    rng = np.random.default_rng(0)
    draw = lambda leaf: jnp.asarray(scale * rng.normal(size=leaf.shape), jnp.float32)  # noqa: E731
    return model, jax.tree.map(draw, shapes)


@pytest.fixture(scope="module")
def gpt2():
    return random_model(GPT2)


@pytest.fixture(scope="module")
def qwen3():
    return random_model(QWEN3)


def log_probs(model, params, tokens_BT):
    hidden, _ = model.apply(params, {}, {"tokens": tokens_BT}, key=None, train=False)
    return np.asarray(jax.nn.log_softmax(logits(model, params, hidden)))


@pytest.mark.parametrize("style", ["gpt2", "qwen3"])
def test_token_by_token_equals_the_parallel_forward(style, request):
    model, params = request.getfixturevalue(style)
    tokens = np.random.default_rng(1).integers(0, 61, (2, 24)).astype(np.int32)
    expected = log_probs(model, params, tokens)
    decode = jax.jit(model.decode)
    cache = model.init_cache(2, 24)
    before = jax.tree.leaves(cache)[0]
    # The first tokens at once, the rest one by one.
    hidden, cache = decode(params, cache, tokens[:, :7], np.arange(7)[None].repeat(2, 0))
    parts = [hidden]
    for position in range(7, 24):
        positions = np.full((2, 1), position)
        hidden, cache = decode(params, cache, tokens[:, position : position + 1], positions)
        parts.append(hidden)
    ours = jax.nn.log_softmax(logits(model, params, jnp.concatenate(parts, 1)))
    np.testing.assert_allclose(ours, expected, atol=1e-4)
    assert (np.asarray(before) == 0).all(), "the cache is an argument, never changed in place"


def test_a_cache_takes_its_dtype(qwen3):
    model, _ = qwen3
    cache = jax.eval_shape(lambda: model.init_cache(3, 8, jnp.bfloat16))
    assert {(leaf.shape, leaf.dtype.name) for leaf in cache} == {((2, 3, 8, 2, 10), "bfloat16")}
    assert model.init_cache(3, 8)[0].dtype == jnp.float32


@pytest.mark.parametrize("style", ["gpt2", "qwen3"])
def test_greedy_generation_equals_repeated_argmax(style, request):
    """Prompts of different lengths in one call: padding must not be seen."""
    model, params = request.getfixturevalue(style)
    prompts = [[5, 3, 60, 1], [7]]
    ours = generate(model, params, prompts, num_tokens=6, temperature=0.0)
    assert (ours.shape, ours.dtype) == ((2, 6), np.int32)
    apply = jax.jit(lambda tokens: log_probs_at_end(model, params, tokens))
    for row, prompt in zip(ours, prompts, strict=True):
        tokens = list(prompt)
        for _ in range(6):
            padded = np.array([tokens + [0] * (12 - len(tokens))], np.int32)
            tokens.append(int(np.argmax(apply(padded)[0, len(tokens) - 1])))
        assert row.tolist() == tokens[len(prompt) :]


def log_probs_at_end(model, params, tokens_BT):
    hidden, _ = model.apply(params, {}, {"tokens": tokens_BT}, key=None, train=False)
    return logits(model, params, hidden)


def test_one_compilation_serves_all_settings(qwen3):
    model, params = qwen3
    compiled = []

    def listener(event, duration, **kwargs):
        del duration, kwargs
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    run = lambda **kwargs: generate(model, params, [[1, 2, 3], [4]], num_tokens=5, **kwargs)  # noqa: E731
    first = run(seed=0)
    jax.monitoring.register_event_duration_secs_listener(listener)
    again, other = run(seed=0), run(seed=1)
    run(seed=2, temperature=0.5, top_k=3, top_p=0.9)
    run(seed=2, temperature=0.0)
    generate(model, params, [[5], [6, 7, 8, 9]], num_tokens=5)
    jax.monitoring.unregister_event_duration_listener(listener)
    assert not compiled
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


def test_rows_do_not_depend_on_each_other(qwen3):
    model, params = qwen3
    together = generate(model, params, [[1, 2], [9, 9, 9]], num_tokens=5, seed=3)
    beside = generate(model, params, [[1, 2], [4]], num_tokens=5, seed=3)
    np.testing.assert_array_equal(together[0], beside[0])
    same = generate(model, params, [[1, 2], [1, 2]], num_tokens=20, seed=3)
    assert (same[0] != same[1]).any()


SCORES = np.log(np.array([0.5, 0.25, 0.15, 0.1])).astype(np.float32)


def frequencies(temperature=1.0, top_k=4, top_p=1.0, scores=SCORES):
    keys = jax.random.split(jax.random.key(0), 4000)
    args = (jnp.asarray(scores), jnp.float32(temperature), jnp.int32(top_k), jnp.float32(top_p))
    drawn = jax.jit(jax.vmap(sample, (0, None, None, None, None)))(keys, *args)
    return np.bincount(np.asarray(drawn), minlength=len(scores)) / len(keys)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [0.5, 0.25, 0.15, 0.1]),
        ({"temperature": 0.5}, np.square([0.5, 0.25, 0.15, 0.1]) / 0.345),
        ({"temperature": 0.0}, [1, 0, 0, 0]),
        ({"top_k": 2}, [2 / 3, 1 / 3, 0, 0]),
        ({"top_k": 1}, [1, 0, 0, 0]),
        ({"top_p": 0.76}, [0.5 / 0.9, 0.25 / 0.9, 0.15 / 0.9, 0]),
        ({"top_p": 0.74}, [2 / 3, 1 / 3, 0, 0]),
        ({"top_p": 1e-6}, [1, 0, 0, 0]),
        # top-p counts what top-k left: 0.5 of 0.75 is two thirds.
        ({"top_k": 2, "top_p": 0.6}, [1, 0, 0, 0]),
        ({"top_k": 2, "top_p": 0.7}, [2 / 3, 1 / 3, 0, 0]),
    ],
)
def test_frequencies(settings, expected):
    found = frequencies(**settings)
    np.testing.assert_allclose(found, expected, atol=0.03)
    assert ((found > 0) == (np.asarray(expected) > 0)).all()


def test_the_order_of_the_vocabulary_does_not_matter():
    found = frequencies(top_k=2, scores=SCORES[::-1].copy())
    np.testing.assert_allclose(found, [0, 0, 1 / 3, 2 / 3], atol=0.03)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"num_tokens": 0}, "num_tokens=0"),
        ({"temperature": -1.0}, "temperature=-1.0 must not be negative"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_k": -1}, "top_k=-1"),
        ({"top_p": 0.0}, "top_p=0.0 must be above 0"),
        ({"prompts": [[1], []]}, "at least one token"),
        ({"prompts": []}, "at least one token"),
        ({"prompts": [[1, 61, -2]]}, r"tokens \[61, -2\] of the prompts"),
        ({"num_tokens": 40}, "41 tokens do not fit the 40 learned positions"),
    ],
)
def test_bad_requests_are_refused(gpt2, changes, match):
    model, params = gpt2
    request = {"prompts": [[1]], "num_tokens": 4} | changes
    with pytest.raises(ConfigError, match=match):
        generate(model, params, request.pop("prompts"), **request)


def test_a_model_without_cache_is_refused():
    from flax import nnx

    model = functional(lambda rngs: nnx.Linear(2, 2, rngs=rngs))
    with pytest.raises(ConfigError, match="language model"):
        generate(model, {}, [[1]], num_tokens=1)
