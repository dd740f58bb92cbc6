# /// script
# requires-python = ">=3.11"
# dependencies = ["numpy==2.4.6", "safetensors==0.8.0", "torch==2.13.0", "transformers==5.24.0"]
# ///
"""Writes the reference models of tests/fixtures/hf with PyTorch and transformers.

    python scripts/make_hf_fixtures.py              writes them anew
    python scripts/make_hf_fixtures.py --check      compares: exit code 1 if one has changed

Runs in an environment of its own (the block above; `uv run` reads it): neither jaxtrain nor its
tests need PyTorch. Each directory holds a tiny model with random numbers of ours, as transformers
saves it (config.json, model.safetensors), and expected.safetensors with tokens [B, T] and the
float32 logits [B, T, V] that transformers computes from them. Rows are longer than sliding windows,
norms and biases are not ones and zeros, and no two dims that could be mixed up are equal where the
architecture allows it. real_sizes.json.gz holds configuration, names and shapes of published sizes.

Shapes: B rows, T length, V vocabulary.
"""

import argparse
import gzip
import json
import pathlib
import sys
import tempfile

import numpy as np
import safetensors.numpy
import torch
import transformers

ROOT = pathlib.Path(__file__).parents[1] / "tests" / "fixtures" / "hf"
SIZES = "real_sizes.json.gz"
NUM_ROWS, LENGTH = 2, 40

COMMON = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FIXTURES = {
    "gpt2": (
        "GPT2",
        {
            "vocab_size": 101, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64,
            "bos_token_id": 1, "eos_token_id": 2,
        },
    ),
    "llama": ("Llama", COMMON | {"head_dim": 12, "rope_parameters": LLAMA3_ROPE}),
    "llama_tied": (
        "Llama",
        COMMON | {"tie_word_embeddings": True, "rope_parameters": PLAIN_ROPE, "head_dim": 8},
    ),
    "mistral": (
        "Mistral",
        COMMON | {"head_dim": 12, "sliding_window": 9, "rope_parameters": PLAIN_ROPE},
    ),
    "qwen2": ("Qwen2", COMMON | {"rope_parameters": PLAIN_ROPE, "rms_norm_eps": 1e-6}),
    "qwen3": (
        "Qwen3",
        COMMON | {"head_dim": 12, "rope_parameters": PLAIN_ROPE, "tie_word_embeddings": True},
    ),
    "olmo2": ("Olmo2", COMMON | {"rope_parameters": PLAIN_ROPE, "rms_norm_eps": 1e-6}),
    "gemma2": (
        "Gemma2",
        COMMON
        | {
            "head_dim": 12, "query_pre_attn_scalar": 20, "sliding_window": 9,
            "attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0,
            "tie_word_embeddings": True, "rope_parameters": PLAIN_ROPE,
        },
    ),
    "gemma3": (
        "Gemma3",
        COMMON
        | {
            "head_dim": 12, "query_pre_attn_scalar": 20, "sliding_window": 9,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "tie_word_embeddings": True,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
                "sliding_attention": PLAIN_ROPE,
            },
        },
    ),
}  # fmt: skip
"""Name -> (what transformers calls the class, its configuration)."""


def _sizes(vocab, width, inner, layers, heads, kv_heads, positions, **more):
    return {
        "vocab_size": vocab,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": positions,
        "tie_word_embeddings": False,
        **more,
    }


def _rope(theta, **more):
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta} | more}


def _llama3(factor):
    return _rope(
        500_000.0, rope_type="llama3", factor=factor, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )  # fmt: skip


TIED = {"tie_word_embeddings": True}
REAL = {
    "gpt2": ("GPT2", {}),
    "gpt2-xl": ("GPT2", {"n_layer": 48, "n_embd": 1600, "n_head": 25}),
    "llama-2-7b": ("Llama", _sizes(32_000, 4096, 11_008, 32, 32, 32, 4096) | _rope(10_000.0)),
    "llama-3-8b": ("Llama", _sizes(128_256, 4096, 14_336, 32, 32, 8, 8192) | _rope(500_000.0)),
    "llama-3.1-70b": ("Llama", _sizes(128_256, 8192, 28_672, 80, 64, 8, 131_072) | _llama3(8.0)),
    "llama-3.2-1b": (
        "Llama",
        _sizes(128_256, 2048, 8192, 16, 32, 8, 131_072, head_dim=64) | _llama3(32.0) | TIED,
    ),
    "smollm2-135m": (
        "Llama",
        _sizes(49_152, 576, 1536, 30, 9, 3, 8192) | _rope(100_000.0) | TIED,
    ),
    "mistral-7b-v0.1": (
        "Mistral",
        _sizes(32_000, 4096, 14_336, 32, 32, 8, 32_768, sliding_window=4096) | _rope(10_000.0),
    ),
    "mistral-7b-v0.3": (
        "Mistral",
        _sizes(32_768, 4096, 14_336, 32, 32, 8, 32_768, sliding_window=None) | _rope(1e6),
    ),
    "qwen2-0.5b": ("Qwen2", _sizes(151_936, 896, 4864, 24, 14, 2, 131_072) | _rope(1e6) | TIED),
    "qwen2-7b": ("Qwen2", _sizes(152_064, 3584, 18_944, 28, 28, 4, 131_072) | _rope(1e6)),
    "qwen3-0.6b": (
        "Qwen3",
        _sizes(151_936, 1024, 3072, 28, 16, 8, 40_960, head_dim=128) | _rope(1e6) | TIED,
    ),
    "qwen3-8b": ("Qwen3", _sizes(151_936, 4096, 12_288, 36, 32, 8, 40_960, head_dim=128)),
    "olmo2-1b": ("Olmo2", _sizes(100_352, 2048, 8192, 16, 16, 16, 4096) | _rope(500_000.0)),
    "olmo2-7b": ("Olmo2", _sizes(100_352, 4096, 11_008, 32, 32, 32, 4096) | _rope(500_000.0)),
    "olmo2-32b": ("Olmo2", _sizes(100_352, 5120, 27_648, 64, 40, 8, 4096) | _rope(500_000.0)),
    "gemma2-2b": (
        "Gemma2",
        _sizes(256_000, 2304, 9216, 26, 8, 4, 8192, head_dim=256, query_pre_attn_scalar=256) | TIED,
    ),
    "gemma2-27b": (
        "Gemma2",
        _sizes(256_000, 4608, 36_864, 46, 32, 16, 8192, head_dim=128, query_pre_attn_scalar=144)
        | TIED,
    ),
    "gemma3-1b": (
        "Gemma3",
        _sizes(
            262_144, 1152, 6912, 26, 4, 1, 32_768, head_dim=256, sliding_window=512,
            query_pre_attn_scalar=256,
        )
        | TIED,
    ),
}  # fmt: skip


def make_model(kind, values):
    """A model of transformers on the device of the context, in float32, with plain attention."""
    name = "Gemma3TextConfig" if kind == "Gemma3" else f"{kind}Config"
    config = getattr(transformers, name)(**values)
    config._attn_implementation = "eager"
    head = "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"
    return getattr(transformers, head)(config).eval()


def fill(model, kind, seed):
    """Random numbers of NumPy, whose stream does not change with the version of PyTorch."""
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            values = rng.normal(size=tuple(parameter.shape))
            if "norm" in name or ".ln_" in name:
                is_scale = name.endswith("weight") and not kind.startswith("Gemma")
                values = 0.3 * values + is_scale
            elif name.endswith("bias"):
                values *= 0.3
            else:
                values *= 1 / np.sqrt(parameter.shape[-1])
            parameter.copy_(torch.from_numpy(values.astype(np.float32)))


def make_fixture(name, directory):
    """Writes one model, tokens and logits."""
    kind, values = FIXTURES[name]
    model = make_model(kind, values)
    seed = sum(name.encode())
    fill(model, kind, seed)
    tokens = np.random.default_rng(seed + 1).integers(0, values["vocab_size"], (NUM_ROWS, LENGTH))
    with torch.no_grad():
        logits = model(torch.from_numpy(tokens)).logits.numpy()
    model.save_pretrained(directory)
    expected = {"tokens": tokens.astype(np.int32), "logits": np.ascontiguousarray(logits)}
    safetensors.numpy.save_file(expected, directory / "expected.safetensors")


def real_sizes():
    """Configuration, names and shapes of published sizes, as transformers would save them."""
    found = {}
    for name, (kind, values) in REAL.items():
        with torch.device("meta"):
            model = make_model(kind, values)
        tensors = {key: list(tensor.shape) for key, tensor in model.state_dict().items()}
        if model.config.tie_word_embeddings:
            del tensors["lm_head.weight"]
        config = model.config.to_diff_dict()
        config.pop("_attn_implementation", None)
        config["architectures"] = [type(model).__name__]
        found[name] = {"config": config, "tensors": tensors}
    return found


def write(root):
    """Writes everything below `root`."""
    for name in FIXTURES:
        (root / name).mkdir(parents=True, exist_ok=True)
        make_fixture(name, root / name)
    text = json.dumps(real_sizes(), sort_keys=True).encode()
    (root / SIZES).write_bytes(gzip.compress(text, mtime=0))


def differences(made, kept):
    """What differs between two directories of fixtures, in words."""
    for name in FIXTURES:
        for file in ("model.safetensors", "expected.safetensors"):
            new = safetensors.numpy.load_file(made / name / file)
            old = safetensors.numpy.load_file(kept / name / file)
            if new.keys() != old.keys():
                yield f"{name}/{file}: names"
                continue
            for key in new:
                if not np.allclose(new[key], old[key], rtol=0, atol=1e-5):
                    yield f"{name}/{file}: {key}"
    if gzip.decompress((made / SIZES).read_bytes()) != gzip.decompress((kept / SIZES).read_bytes()):
        yield SIZES


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    if not parser.parse_args().check:
        write(ROOT)
        size = sum(path.stat().st_size for path in ROOT.rglob("*") if path.is_file())
        print(f"wrote {len(FIXTURES)} models and {len(REAL)} sizes, {size:,} bytes")
        return
    with tempfile.TemporaryDirectory() as folder:
        write(pathlib.Path(folder))
        found = list(differences(pathlib.Path(folder), ROOT))
    print("\n".join(found) or "all fixtures are as committed")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
