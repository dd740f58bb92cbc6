"""`jaxtrain verify-hf DIR`: is a model of Hugging Face computed right, and exported as it was?

    jaxtrain verify-hf models/SmolLM2-135M
    jaxtrain verify-hf models/SmolLM2-135M --python=/opt/torch/bin/python --text=README.md

One line for each check, then the verdict. Logits are compared with those of transformers where it
and torch are installed: here, or beside the interpreter that --python names. With --text so is the
perplexity of a text. Exit code 0 if all that was checked is right.

Shapes: B rows, T length, V vocabulary.
"""

import dataclasses
import importlib.util
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxtrain.config import Config, RunConfig, field, override
from jaxtrain.data.tokenizing import open_tokenizer
from jaxtrain.errors import CheckpointError, DataError, JaxtrainError
from jaxtrain.hf.configs import CONFIG, load_json
from jaxtrain.hf.exporting import tensors_of
from jaxtrain.hf.files import DTYPES
from jaxtrain.hf.importing import one_directory
from jaxtrain.hf.keep import Kept
from jaxtrain.hf.load import Source, load_params, opening_model
from jaxtrain.progress import setup_logging

TOLERANCE = 1e-4
"""Of logits in float32; where they are larger than 1, of the largest."""

PERPLEXITY_TOLERANCE = 1e-3
"""Of the perplexity of a text, relative to that of transformers."""

_MAX_LENGTH = 1024
_ROWS = 2

# Runs in an interpreter that need not have jaxtrain.
_REFERENCE = """
import sys
import numpy, torch, transformers
directory, tokens, logits = sys.argv[1:]
model = transformers.AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")
tokens = torch.from_numpy(numpy.load(tokens).astype("int64"))
with torch.no_grad():
    numpy.save(logits, model.float().eval()(tokens).logits.numpy())
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifyConfig(Config):
    """What --flags set."""

    python: str = field("", help="interpreter with torch and transformers; empty: this one")
    length: int = field(
        0, unit="tokens", minimum=0, help="of the rows; 0: the model's context, at most 1024"
    )
    text: str = field(
        "", help="file of UTF-8 text that is computed, from its begin; empty: random tokens"
    )
    mesh: str = override(RunConfig, "mesh", "fsdp:-1")


def run(words: Sequence[str]) -> None:
    """The command; see the module's docstring.

    Raises:
        CheckpointError: after the verdict, if anything is wrong.
    """
    config, directory = one_directory("verify-hf", words, VerifyConfig, __doc__)
    setup_logging()
    try:
        wrong = verify(directory, config)
    except JaxtrainError as error:
        _say("WRONG", "files", "they cannot be imported")
        print("verdict: wrong", flush=True)
        raise error
    print(f"verdict: {'wrong' if wrong else 'right'}", flush=True)
    if wrong:
        raise CheckpointError(f"{directory} is not computed or exported right: {', '.join(wrong)}.")


def verify(directory: Path, config: VerifyConfig) -> list[str]:
    """Prints a line for each check; returns those that failed."""
    import optax

    from jaxtrain.mesh import describe_mesh, make_mesh
    from jaxtrain.models.functional import logits
    from jaxtrain.models.transformer import transformer
    from jaxtrain.sharding import use_rules
    from jaxtrain.state import placed_state

    mesh = make_mesh(config.mesh)
    with opening_model(directory) as source:
        model = transformer(source.config)
        names = f"{len(source.weights.tensors)} tensors"
        _say("ok", "files", f"{source.architecture.model_type}, {names}, all as expected")
        params = load_params(source, placed_state(model, optax.identity(), mesh).params)
        tokens_BT = _tokens(source, config, mesh.size)

        def forward(params: Any, tokens_BT: jax.Array) -> jax.Array:
            with use_rules(mesh):
                hidden, _ = model.apply(params, {}, {"tokens": tokens_BT}, key=None, train=False)
                return logits(model, params, hidden)

        ours_BTV = np.asarray(jax.jit(forward)(params, tokens_BT))
        is_finite = bool(np.isfinite(ours_BTV).all())
        wrong = [] if is_finite else ["forward"]
        rows, length = tokens_BT.shape
        _say(
            "ok" if is_finite else "WRONG",
            "forward",
            f"{rows} x {length} positions, {describe_mesh(mesh)}, logits "
            f"{f'up to {np.abs(ours_BTV).max():.4g}' if is_finite else 'that are not finite'}",
        )
        changed = _changed_tensors(source, params)
        wrong += ["round trip"] if changed else []
        _say(
            "WRONG" if changed else "ok",
            "round trip",
            f"these tensors differ after import and export: {', '.join(changed[:5])}"
            if changed
            else f"{names}, byte for byte",
        )
    if not config.python and not all(map(importlib.util.find_spec, ("torch", "transformers"))):
        _say(
            "skip", "logits", "torch and transformers are not installed; name a --python with both"
        )
        return wrong
    theirs_BTV = _reference(directory, config.python or sys.executable, tokens_BT)
    largest = float(np.abs(theirs_BTV).max())
    error = float(np.abs(ours_BTV - theirs_BTV).max())
    is_right = error <= TOLERANCE * max(largest, 1)
    wrong += [] if is_right else ["logits"]
    _say(
        "ok" if is_right else "WRONG",
        "logits",
        f"at most {error:.3g} from those of transformers, which are up to {largest:.4g}",
    )
    if config.text:
        ours, theirs = perplexity(ours_BTV, tokens_BT), perplexity(theirs_BTV, tokens_BT)
        is_right = abs(ours / theirs - 1) <= PERPLEXITY_TOLERANCE
        wrong += [] if is_right else ["perplexity"]
        text = f"{ours:.7g}, by transformers {theirs:.7g}"
        _say("ok" if is_right else "WRONG", "perplexity", text)
    return wrong


def perplexity(logits_BTV: np.ndarray, tokens_BT: np.ndarray) -> float:
    """exp of the mean negative log-likelihood of every token but the first of each row."""
    losses = []
    for logits_TV, tokens_T in zip(logits_BTV, tokens_BT, strict=True):
        scores_TV = logits_TV[:-1] - logits_TV[:-1].max(-1, keepdims=True)
        sums_T = np.exp(scores_TV).sum(-1, dtype=np.float64)
        losses.append(np.log(sums_T) - scores_TV[np.arange(len(sums_T)), tokens_T[1:]])
    return float(np.exp(np.mean(losses)))


def _say(verdict: str, check: str, text: str) -> None:
    print(f"{verdict:<5}  {check:<10}  {text}", flush=True)


def _tokens(source: Source, config: VerifyConfig, num_devices: int) -> np.ndarray:
    """Random tokens, or those of a text, [B, T]; rows that every mesh of so many devices divides.

    Raises:
        DataError: for a text that cannot be read, or is too short.
    """
    content = load_json(source.directory / CONFIG)
    context = content.get("n_positions") or content.get("max_position_embeddings") or _MAX_LENGTH
    length = config.length or min(context, _MAX_LENGTH)
    shape = (-(-_ROWS // num_devices) * num_devices, length)
    if config.text:
        try:
            text = Path(config.text).expanduser().read_bytes()
        except OSError as error:
            raise DataError(f"text={config.text} cannot be read: {error.strerror}.") from error
        (tokens,) = open_tokenizer(str(source.directory)).encode([text])
        if len(tokens) < math.prod(shape):
            raise DataError(
                f"text={config.text} has {len(tokens):,} tokens, and {shape[0]} rows of length="
                f"{length} need {math.prod(shape):,}; lower --length, or give a longer text."
            )
        return np.asarray(tokens[: math.prod(shape)], np.int32).reshape(shape)
    return np.random.default_rng(0).integers(0, source.config.vocab_size, shape).astype(np.int32)


def _changed_tensors(source: Source, params: Any) -> list[str]:
    """Names of tensors that an export would not write as they are, without writing it."""
    directory = source.directory
    origin = Kept(directory, str(directory), source.prefix, source.dtypes())
    wanted = tensors_of(params, source.config, source.architecture.model_type, origin)
    changed = sorted(source.dtypes().keys() ^ {tensor.name for tensor in wanted})
    for tensor in wanted:
        whole = tuple(slice(0, size) for size in tensor.shape)
        before = source.weights.read(tensor.name, whole)
        after = np.ascontiguousarray(tensor.make(), DTYPES[tensor.dtype])
        if before.dtype != after.dtype or before.tobytes() != after.tobytes():
            changed.append(tensor.name)
    return changed


def _reference(directory: Path, python: str, tokens_BT: np.ndarray) -> np.ndarray:
    """Logits of transformers, float32, from a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        tokens, logits = Path(folder, "tokens.npy"), Path(folder, "logits.npy")
        np.save(tokens, tokens_BT)
        # Nothing is looked up on a hub.
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        words = [python, "-c", _REFERENCE, str(directory), str(tokens), str(logits)]
        try:
            done = subprocess.run(
                words, env=environment, capture_output=True, text=True, check=False
            )
        except OSError as error:
            raise CheckpointError(f"python={python} cannot be run: {error.strerror}.") from error
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise CheckpointError(f"transformers could not compute {directory}: {last}")
        return np.load(logits)
