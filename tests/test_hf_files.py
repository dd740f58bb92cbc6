"""Files of Hugging Face that are broken, tied or transposed: cases F1 to F3."""

import json
import shutil
import struct

import hugging
import ml_dtypes
import numpy as np
import pytest
from hugging import REMOVED

from jaxtrain.errors import CheckpointError, ConfigError
from jaxtrain.hf import configs, files, load
from jaxtrain.hf.exporting import tensors_of
from jaxtrain.hf.keep import Kept
from jaxtrain.hf.load import opening_model

pytestmark = pytest.mark.usefixtures("compile_cache")


def refusal(directory, kind=CheckpointError):
    """What opening says, which reads no weight."""
    with pytest.raises(kind) as caught, opening_model(directory):
        pass
    return str(caught.value)


def exported(directory, out, **options):
    """Imports and exports a model, without a run in between."""
    with opening_model(directory) as source:
        _, _, params, _ = hugging.load(directory, "fsdp:2,tensor:2")
        origin = Kept(directory, str(directory), source.prefix, source.dtypes())
        wanted = tensors_of(params, source.config, source.architecture.model_type, origin)
    out.mkdir()
    shutil.copy(directory / "config.json", out)
    files.write_weights(out, wanted, **options)
    return out


def same_bytes(first, second):
    one, other = hugging.read_tensors(first), hugging.read_tensors(second)
    assert one.keys() == other.keys()
    for name, values in one.items():
        assert values.dtype == other[name].dtype
        assert values.shape == other[name].shape
        assert values.tobytes() == other[name].tobytes(), name


def header(path):
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + size])


@pytest.mark.parametrize("name", hugging.NAMES)
def test_what_was_imported_is_exported_byte_for_byte(name, tmp_path):
    same_bytes(exported(hugging.ROOT / name, tmp_path / "out"), hugging.ROOT / name)


def test_the_host_holds_one_tensor_of_one_layer_at_a_time(monkeypatch):
    read, held = load._read, []

    def noting(*args, **kwargs):
        values = read(*args, **kwargs)
        held.append(values.nbytes)
        return values

    monkeypatch.setattr(load, "_read", noting)
    with opening_model(hugging.ROOT / "gpt2") as source:
        name, largest = load.largest_tensor(source)
        hugging.load(hugging.ROOT / "gpt2")
    assert name == "transformer.wte.weight", "its padding counts"
    assert max(held) == largest == 32 * 128 * 4
    assert len(held) == 4 + 3 * 16, "the fused matrix and bias are three parameters each"


# F1: index, shards, types


@pytest.fixture
def sharded(tmp_path):
    return hugging.copy("llama", tmp_path / "model", shard_bytes=60_000)


def test_shards_and_their_index_are_read_and_written(sharded, tmp_path):
    index = hugging.read_json(sharded / files.INDEX)
    names = sorted(path.name for path in sharded.glob("*.safetensors"))
    assert len(names) >= 3
    assert names == sorted(set(index["weight_map"].values()))
    same_bytes(sharded, hugging.ROOT / "llama")
    out = exported(sharded, tmp_path / "out", shard_bytes=50_000)
    same_bytes(out, hugging.ROOT / "llama")
    index = hugging.read_json(out / files.INDEX)
    total = sum(values.nbytes for values in hugging.read_tensors(out).values())
    assert index["metadata"]["total_size"] == total
    for path in out.glob("*.safetensors"):
        content = header(path)
        assert content.pop("__metadata__") == {"format": "pt"}
        assert all(index["weight_map"][key] == path.name for key in content)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_half_precision_comes_back_bit_for_bit(dtype, tmp_path):
    model = hugging.copy("qwen2", tmp_path / "model", dtype=dtype)
    _, _, params, _ = hugging.load(model)
    ours = np.asarray(params["layers"]["mlp"]["down"]["kernel"][1])
    theirs = hugging.read_tensors(model)["model.layers.1.mlp.down_proj.weight"]
    assert ours.dtype == np.float32
    np.testing.assert_array_equal(ours.T, theirs.astype(np.float32))
    same_bytes(exported(model, tmp_path / "out"), model)


def test_a_shard_that_is_absent_is_named_with_its_tensors(sharded):
    shard = sorted(sharded.glob("*.safetensors"))[1]
    lost = [key for key in header(shard) if key != "__metadata__"]
    shard.rename(sharded / "other.safetensors")
    text = refusal(sharded)
    assert f"{shard.name} with {len(lost)} tensors" in text
    assert lost[0] in text
    assert "other.safetensors, which it does not name, is there" in text


def test_other_broken_files_are_errors_before_a_weight_is_read(sharded, tmp_path):
    shards = sorted(sharded.glob("*.safetensors"))
    index = hugging.read_json(sharded / files.INDEX)
    whole = shards[0].read_bytes()
    for data in (whole[: len(whole) // 2], whole[:5], b""):
        shards[0].write_bytes(data)
        assert f"{shards[0]} ({len(data):,} bytes) is cut off or damaged" in refusal(sharded)
    shards[0].write_bytes(whole)

    def with_index(**changes):
        names = {**index["weight_map"], **changes}
        names = {key: value for key, value in names.items() if value}
        (sharded / files.INDEX).write_text(json.dumps({"weight_map": names}))
        return refusal(sharded)

    name = "model.norm.weight"
    assert "tensors that are in no file: 'x.weight' in" in with_index(
        **{"x.weight": shards[0].name}
    )
    assert f"not all that the files hold: {name!r}" in with_index(**{name: ""})
    assert f"tensors in another file: {name!r}" in with_index(**{name: shards[0].name})
    assert "not a file beside it" in with_index(**{name: "../elsewhere.safetensors"})
    (sharded / files.INDEX).write_text(json.dumps(index))
    doubled = [files.Wanted(name, "F32", (32,), lambda: np.zeros(32, np.float32))]
    files.write_weights(tmp_path, doubled)
    (tmp_path / files.SINGLE).replace(shards[0])
    assert f"{name!r} in {shards[0].name} and" in refusal(sharded)
    (sharded / files.INDEX).unlink()
    assert f"belong to an index, {files.INDEX}, which is absent" in refusal(sharded)
    for path in shards:
        path.unlink()
    assert "there is neither model.safetensors nor" in refusal(sharded)
    (sharded / "pytorch_model.bin").write_bytes(b"")
    assert "weights in other formats are not read" in refusal(sharded)
    (sharded / "config.json").unlink()
    assert "holds no config.json" in refusal(sharded)


def test_tensors_that_do_not_fit_are_listed_together(tmp_path):
    model = hugging.copy(
        "mistral", tmp_path / "model",
        without=["model.layers.1.mlp.up_proj.weight"],
        tensors={
            "model.layers.7.mlp.up_proj.weight": np.zeros((56, 32), np.float32),
            "model.norm.weight": np.zeros(31, np.float32),
        },
    )  # fmt: skip
    text = refusal(model)
    assert "tensors are missing: 'model.layers.1.mlp.up_proj.weight'" in text
    assert "tensors are not expected: 'model.layers.7.mlp.up_proj.weight'" in text
    assert "'model.norm.weight' is [31], [32] is expected" in text


def test_names_without_prefix_and_the_mask_of_old_gpt2_files_are_read(tmp_path):
    found = hugging.read_tensors(hugging.ROOT / "gpt2")
    bare = {key.removeprefix("transformer."): value for key, value in found.items()}
    mask = {"h.0.attn.bias": np.zeros((1, 1, 64, 64), np.float32)}
    model = hugging.copy("gpt2", tmp_path / "model", without=found, tensors=bare | mask)
    del mask
    out = exported(model, tmp_path / "out")
    assert hugging.read_tensors(out).keys() == bare.keys()


# F2: tied embeddings

HEAD = "lm_head.weight"


def test_the_head_of_tied_embeddings_may_be_there_if_it_is_equal(tmp_path):
    table = hugging.read_tensors(hugging.ROOT / "qwen3")["model.embed_tokens.weight"]
    both = hugging.copy("qwen3", tmp_path / "both", tensors={HEAD: table})
    _, model, params, mesh = hugging.load(both)
    assert "head" not in params, "one parameter, one gradient, one slot of the optimizer"
    tokens, expected = hugging.expected("qwen3")
    found = hugging.scores(model, params, tokens, mesh)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
    same_bytes(exported(both, tmp_path / "out"), both)
    other = hugging.copy("qwen3", tmp_path / "other", tensors={HEAD: table + 1})
    assert f"{HEAD} and model.embed_tokens.weight differ" in refusal(other)


@pytest.mark.parametrize("said", [False, REMOVED])
def test_an_untied_model_needs_its_head(said, tmp_path):
    model = hugging.copy(
        "llama", tmp_path / "m", without=[HEAD], config={"tie_word_embeddings": said}
    )
    text = refusal(model)
    assert f"tensors are missing: '{HEAD}'" in text
    assert ("absent, which means false" if said is REMOVED else "is false") in text


def test_an_absent_flag_means_what_it_means_in_transformers():
    for name, is_tied in (("gpt2", True), ("llama", False), ("gemma2", True), ("qwen2", False)):
        content = hugging.read_json(hugging.ROOT / name / "config.json")
        del content["tie_word_embeddings"]
        assert configs.read_config(content, name)[1].tie_embeddings is is_tied


# F3: transposed layers


def test_gpt2_matrices_are_not_transposed_and_thirds_are_q_k_v(tmp_path):
    """By hand, on square matrices, which pass every check of shapes."""
    sizes = {"n_embd": 4, "n_layer": 1, "n_head": 2}
    small = {}
    for name, values in hugging.read_tensors(hugging.ROOT / "gpt2").items():
        if ".h." in name and ".h.0." not in name:
            continue
        shape = [{32: 4, 96: 12, 128: 16}.get(size, size) for size in values.shape]
        small[name] = np.zeros(shape, np.float32)
    small["transformer.h.0.attn.c_proj.weight"][0, 1] = 1
    fused = np.arange(48, dtype=np.float32).reshape(4, 12)
    small["transformer.h.0.attn.c_attn.weight"] = fused
    everything = hugging.read_tensors(hugging.ROOT / "gpt2")
    model = hugging.copy(
        "gpt2", tmp_path / "model", without=everything.keys() - small.keys(), tensors=small,
        config=sizes,
    )  # fmt: skip
    _, _, params, _ = hugging.load(model)
    attention = params["layers"]["attention"]
    row = np.einsum("d,dnh->nh", [1, 0, 0, 0], np.asarray(attention["q"]["kernel"][0]))
    np.testing.assert_array_equal(row.reshape(4), fused[0, :4])
    for part, name in enumerate("qkv"):
        kernel = np.asarray(attention[name]["kernel"][0]).reshape(4, 4)
        np.testing.assert_array_equal(kernel, fused[:, 4 * part : 4 * part + 4])
    out = np.einsum("nh,nhd->d", [[1, 0], [0, 0]], np.asarray(attention["o"]["kernel"][0]))
    np.testing.assert_array_equal(out, [0, 1, 0, 0])
    same_bytes(exported(model, tmp_path / "out"), model)


# config.json


@pytest.mark.parametrize(
    ("name", "changes", "match"),
    [
        ("llama", {"model_type": "mamba"}, r"model_type='mamba' is not supported.*gpt2, llama"),
        ("gemma3", {"model_type": "gemma3"}, "only the text models"),
        ("llama", {"architectures": ["LlamaForTokenClassification"]}, "only LlamaForCausalLM"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported, only 'silu'"),
        ("llama", {"attention_bias": True}, "attention_bias=True is not supported"),
        ("llama", {"mlp_bias": True}, "mlp_bias=True"),
        ("gpt2", {"activation_function": "relu"}, "activation_function='relu'"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, "quant_method 'gptq'"),
        ("llama", {"rope_parameters": {"rope_type": "yarn"}}, "rope_type='yarn' is not supported"),
        ("llama", {"rope_parameters": {"rope_type": "llama3"}}, "'llama3' needs factor, low_freq"),
        ("llama", {"num_hidden_layers": REMOVED}, "num_hidden_layers is missing"),
        ("llama", {"num_attention_heads": 3}, "num_heads=3"),
        ("gemma2", {"layer_types": ["chunked_attention"] * 3}, "layer_types must name"),
        ("gemma2", {"sliding_window": None}, "sliding_window=None"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        (
            "qwen2",
            {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
            "layer_types.*",
        ),
    ],
)
def test_what_is_not_computed_is_refused_before_weights_are_looked_at(
    name, changes, match, tmp_path
):
    content = hugging.read_json(hugging.ROOT / name / "config.json") | changes
    content = {key: value for key, value in content.items() if value is not REMOVED}
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=match), opening_model(tmp_path):
        pass


OLD_SPELLING = {
    "llama": {
        "rope_theta": 10_000.0,
        "rope_scaling": {
            "type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "gemma3": {
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "sliding_window_pattern": 3,
        "layer_types": None,
    },
    "mistral": {"rope_theta": 10_000.0},
}  # fmt: skip


@pytest.mark.parametrize("name", OLD_SPELLING)
def test_the_older_spelling_of_rotary_positions_means_the_same(name):
    content = hugging.read_json(hugging.ROOT / name / "config.json")
    _, expected = configs.read_config(content, name)
    del content["rope_parameters"]
    _, found = configs.read_config(content | OLD_SPELLING[name], name)
    assert found == expected


def test_windows_of_qwen_are_those_of_its_upper_layers():
    content = hugging.read_json(hugging.ROOT / "qwen2" / "config.json")
    content |= {"layer_types": None, "use_sliding_window": True, "sliding_window": 9}
    _, config = configs.read_config(content | {"max_window_layers": 0}, "x")
    assert (config.window, config.full_attention_every) == (9, 0)
    _, config = configs.read_config(content | {"max_window_layers": 3}, "x")
    assert config.window == 0
    with pytest.raises(ConfigError, match="all but every n-th one"):
        configs.read_config(content | {"max_window_layers": 1}, "x")
