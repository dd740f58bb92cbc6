# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "numpy==2.4.6", "peft==0.21.2", "safetensors==0.8.0", "torch==2.13.0", "transformers==5.24.0",
# ]
# ///
"""Compares what PEFT makes of an adapter with the merged model of the same run.

    jaxtrain export-hf ADAPTER --workdir=RUN --adapter
    jaxtrain export-hf MERGED --workdir=RUN
    python scripts/check_adapter.py ADAPTER MERGED

Runs in an environment of its own (the block above; `uv run` reads it), on the base that
adapter_config.json names. Prints how far the logits of random tokens are apart, and how far the
adapter moves them; exit code 1 if the first is not small.
"""

import json
import pathlib
import sys

import numpy as np
import peft
import torch
import transformers

NUM_ROWS, LENGTH = 2, 40
ALLOWED = 1e-4
"""Where logits are larger than 1, of the largest."""


def logits_of(model, tokens):
    """Float32 [B, T, V]."""
    with torch.no_grad():
        return model(torch.from_numpy(tokens)).logits.float().numpy()


def read(directory):
    """A model of a directory in float32, with plain attention."""
    kinds = {"dtype": torch.float32, "attn_implementation": "eager"}
    return transformers.AutoModelForCausalLM.from_pretrained(directory, **kinds).eval()


def main():
    adapter, merged = map(pathlib.Path, sys.argv[1:])
    config = json.loads((adapter / "adapter_config.json").read_text())
    base = read(config["base_model_name_or_path"])
    shape = NUM_ROWS, LENGTH
    tokens = np.random.default_rng(0).integers(0, base.config.vocab_size, shape)
    before = logits_of(base, tokens)
    adapted = peft.PeftModel.from_pretrained(base, adapter).eval()
    found, expected = logits_of(adapted, tokens), logits_of(read(merged), tokens)
    apart, largest = np.abs(found - expected).max(), np.abs(expected).max()
    print(
        f"PEFT {peft.__version__} and the merged model are at most {apart:.2g} apart, logits up to "
        f"{largest:.3g}; the adapter moves them by up to {np.abs(found - before).max():.3g}"
    )
    sys.exit(bool(apart > ALLOWED * max(largest, 1)))


if __name__ == "__main__":
    main()
