"""Decoding with a cache equals the parallel forward; rows do not see each other or padding."""

import contextlib
import functools

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.errors import ConfigError
from jaxtrain.mesh import make_mesh
from jaxtrain.models.functional import functional, logits
from jaxtrain.models.lora_config import LoraConfig
from jaxtrain.models.sample import generate, greedy_answer, start
from jaxtrain.models.transformer import TransformerConfig, transformer
from jaxtrain.sharding import DEFAULT_RULES, param_shardings
from jaxtrain.tree import named_leaves

pytestmark = pytest.mark.usefixtures("compile_cache")

SMALL = {"vocab_size": 61, "num_layers": 2, "embed_dim": 24, "mlp_dim": 40}
GPT2 = TransformerConfig(
    **SMALL, num_heads=3, activation="gelu", norm="layer", use_bias=True, positions="learned",
    max_length=40, tie_embeddings=True,
)  # fmt: skip
QWEN3 = TransformerConfig(**SMALL, num_heads=4, num_kv_heads=2, head_dim=10, qk_norm=True)


def random_model(config, scale=0.3, lora=None):
    model = transformer(config, lora=lora)
    shapes, _ = jax.eval_shape(model.init, jax.random.key(0))
    rng = np.random.default_rng(0)
    draw = lambda leaf: jnp.asarray(scale * rng.normal(size=leaf.shape), leaf.dtype)  # noqa: E731
    return model, jax.tree.map(draw, shapes)


GEMMA3 = TransformerConfig(
    **SMALL, num_heads=2, num_kv_heads=1, norm="rms_plus_one", block_norms="both", qk_norm=True,
    window=5, full_attention_every=2, activation="geglu", embed_scale=True, tie_embeddings=True,
)  # fmt: skip
STYLES = ["gpt2", "qwen3", "gemma3", "adapted"]


@pytest.fixture(scope="module")
def gemma3():
    return random_model(GEMMA3)


@pytest.fixture(scope="module")
def adapted():
    """With LoRA, its base in bfloat16."""
    return random_model(QWEN3, lora=LoraConfig(rank=3, targets="attention/(q|v)|mlp/down"))


@pytest.fixture(scope="module")
def gpt2():
    return random_model(GPT2)


@pytest.fixture(scope="module")
def qwen3():
    return random_model(QWEN3)


@functools.partial(jax.jit, static_argnums=0)
def log_probs(model, params, tokens_BT):
    hidden, _ = model.apply(params, {}, {"tokens": tokens_BT}, key=None, train=False)
    return jax.nn.log_softmax(logits(model, params, hidden))


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("is_prepared", [False, True])
def test_token_by_token_equals_the_parallel_forward(style, is_prepared, request):
    model, params = request.getfixturevalue(style)
    tokens = np.random.default_rng(1).integers(0, 61, (2, 24)).astype(np.int32)
    expected = log_probs(model, params, tokens)
    decode = jax.jit(model.decode)
    cache = model.init_cache(2, 24)
    if is_prepared:
        params = jax.jit(model.for_decode)(params)
        assert set(params["layers"]) == {"0", "1"}, "on CPU, layer by layer"
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


def test_parameters_for_decoding_have_the_dtype_of_the_computation():
    model = transformer(QWEN3, precision="bfloat16")
    given, _ = jax.eval_shape(model.init, jax.random.key(0))
    params = jax.eval_shape(model.for_decode, given)
    dtypes = {path.rpartition("/")[2]: leaf.dtype.name for path, leaf in named_leaves(params)}
    assert dtypes == {"embedding": "bfloat16", "kernel": "bfloat16", "scale": "float32"}


def test_a_cache_takes_its_dtype_and_keeps_its_form(qwen3):
    model, params = qwen3
    cache = model.init_cache(3, 8, jnp.bfloat16)
    found = [(leaf.shape, leaf.dtype.name) for leaf in jax.tree.leaves(cache)]
    assert found == 2 * 2 * [((3, 2, 8, 10), "bfloat16")], "keys and values of two layers"
    assert jax.tree.leaves(model.init_cache(3, 8))[0].dtype == jnp.float32
    tokens = np.array([[1], [2], [3]])
    hidden = []
    for given in (cache, cache.stacked()):
        for form in (params, model.for_decode(params)):
            one, written = model.decode(form, given, tokens, 0 * tokens)
            assert jax.tree.structure(written) == jax.tree.structure(given)
            assert (np.asarray(written.stacked().keys[:, :, :, 0]) != 0).all()
            hidden.append(one)
    np.testing.assert_allclose(hidden[1:], 3 * hidden[:1], atol=1e-5)


@pytest.mark.parametrize("style", STYLES)
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


@contextlib.contextmanager
def compilations():
    """A list that gets an element for each program that XLA is asked for meanwhile."""
    found = []

    def listener(event, duration, **kwargs):
        del duration, kwargs
        if event == "/jax/core/compile/backend_compile_duration":
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(listener)
    yield found
    jax.monitoring.unregister_event_duration_listener(listener)


def test_one_compilation_serves_a_bucket(qwen3):
    model, params = qwen3
    run = lambda **kwargs: generate(model, params, [[1, 2, 3], [4]], num_tokens=5, **kwargs)  # noqa: E731
    first = run(seed=0)
    with compilations() as compiled:
        again, other = run(seed=0), run(seed=1)
        run(seed=2, temperature=0.5, top_k=3, top_p=0.9)
        run(seed=2, temperature=0.0, stop_tokens=[3, 4, 5])
        generate(model, params, [[5], [6, 7, 8, 9]], num_tokens=20)
        generate(model, params, [[5], list(range(31))], num_tokens=5)
    assert not compiled
    with compilations() as compiled:
        generate(model, params, [[1], [2]], num_tokens=70)
        generate(model, params, [[1], [2]], num_tokens=100)
    assert len(compiled) == 2, "reading prompts, and a piece, for a longer cache"
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


LONG = np.random.default_rng(5).integers(0, 61, 50).tolist()


@pytest.mark.parametrize(
    ("others", "num_tokens"),
    [
        ([[4]], 5),
        ([LONG], 5),  # a longer prompt: other padding, and another bucket
        ([], 5),  # alone
        ([[3], [4, 5]], 5),  # three rows are filled up to four
        ([[9]], 40),  # a longer cache, and two pieces
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_a_row_depends_on_no_other_and_on_no_padding(qwen3, others, num_tokens, temperature):
    model, params = qwen3
    settings = {"seed": 3, "temperature": temperature}
    expected = generate(model, params, [[1, 2], [9, 9, 9]], num_tokens=5, **settings)[0]
    found = generate(model, params, [[1, 2], *others], num_tokens=num_tokens, **settings)[0]
    np.testing.assert_array_equal(found[:5], expected)


def test_a_row_depends_on_its_index(qwen3):
    model, params = qwen3
    same = generate(model, params, [[1, 2], [1, 2]], num_tokens=20, seed=3)
    assert (same[0] != same[1]).any()
    later = start(model, params, [[1, 2]], num_tokens=20, seed=3, first_row=1)
    tokens = np.concatenate([later.read(), later.go_on()], axis=1)
    np.testing.assert_array_equal(tokens[0], same[1])


def test_a_row_ends_with_its_stop_token_and_the_batch_with_the_last_row(qwen3):
    model, params = qwen3
    prompts = [[1, 2], [9, 9, 9], [4]]
    free = generate(model, params, prompts, num_tokens=80, temperature=0)
    # Stop tokens for which the first row ends at once, and the last rows later.
    stops = [int(free[0, 0]), int(free[1, 6]), int(free[2, 9])]
    ends = [next(i for i, token in enumerate(row) if token in stops) for row in free.tolist()]
    ours = generate(model, params, prompts, num_tokens=80, temperature=0, stop_tokens=stops)
    for row, expected, end in zip(ours, free, ends, strict=True):
        np.testing.assert_array_equal(row[: end + 1], expected[: end + 1])
        assert (row[end:] == expected[end]).all()
    decoding = start(model, params, prompts, num_tokens=80, temperature=0, stop_tokens=stops)
    decoding.read()
    decoding.go_on()
    assert decoding.is_done
    assert decoding.num_done == max(ends) + 1 < 32


def test_a_batch_ends_when_nobody_needs_more(qwen3):
    model, params = qwen3
    decoding = start(model, params, [[1], [2]], num_tokens=100, temperature=0)
    assert decoding.read().shape == (2, 1)
    assert decoding.go_on().shape == (2, 32)
    decoding.finish(0)
    assert not decoding.is_done
    expected = generate(model, params, [[1], [2]], num_tokens=65, temperature=0)[1]
    np.testing.assert_array_equal(decoding.go_on()[1], expected[33:])
    decoding.finish(1)
    assert decoding.is_done
    assert decoding.go_on().shape == (2, 0)


def test_parameters_on_a_mesh_give_the_same_tokens(qwen3):
    model, params = qwen3
    expected = generate(model, params, [[1, 2], [3]], num_tokens=40, temperature=0)
    mesh = make_mesh("fsdp:2,tensor:2", devices=jax.devices()[:4])
    shardings = param_shardings(params, model.logical_axes, mesh, DEFAULT_RULES)
    split = jax.device_put(params, shardings)
    generate(model, split, [[1, 2], [3]], num_tokens=100, temperature=0)
    with compilations() as compiled:
        found = generate(model, split, [[1, 2], [3]], num_tokens=100, temperature=0)
    assert not compiled
    np.testing.assert_array_equal(found[:, :40], expected)


def test_a_greedy_answer_ends_before_its_end(qwen3):
    model, params = qwen3
    (row,) = generate(model, params, [[1, 2]], num_tokens=8, temperature=0).tolist()
    found = greedy_answer(model, params, [1, 2], num_tokens=8, end=row[5])
    assert found == row[: row.index(row[5])]
    unused = next(token for token in range(61) if token not in row)
    assert greedy_answer(model, params, [1, 2], num_tokens=8, end=unused) == row


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
