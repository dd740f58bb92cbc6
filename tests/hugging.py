"""The committed models of Hugging Face, and changed copies of them."""

import functools
import json
import pathlib

import jax
import numpy as np
import optax
import safetensors.numpy
import tokenizers

from jaxtrain.hf import files
from jaxtrain.hf.load import load_params, opening_model
from jaxtrain.mesh import make_mesh
from jaxtrain.models.functional import logits
from jaxtrain.models.transformer import transformer
from jaxtrain.sharding import use_rules
from jaxtrain.state import placed_state

ROOT = pathlib.Path(__file__).parent / "fixtures" / "hf"
NAMES = sorted(path.name for path in ROOT.iterdir() if path.is_dir())
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DTYPES = {np.dtype(dtype): name for name, dtype in files.DTYPES.items()}


@functools.cache
def expected(name):
    """(tokens [B, T], logits [B, T, V]) that transformers computed."""
    found = safetensors.numpy.load_file(ROOT / name / "expected.safetensors")
    return found["tokens"], found["logits"]


def read_tensors(directory):
    """All tensors of a directory, by name, read by the library."""
    tensors = {}
    for path in sorted(pathlib.Path(directory).glob("model*.safetensors")):
        tensors |= safetensors.numpy.load_file(path)
    return tensors


def read_json(path):
    return json.loads(pathlib.Path(path).read_text())


def copy(name, directory, *, config=None, tensors=None, without=(), dtype=None, shard_bytes=None):
    """A copy of a committed model with other values in config.json or other tensors.

    `config`: key -> value, None in the place of a value takes the key away. `tensors`: name ->
    array, instead of or besides those of the model.
    """
    content = read_json(ROOT / name / "config.json") | (config or {})
    content = {key: value for key, value in content.items() if value is not REMOVED}
    found = read_tensors(ROOT / name) | (tensors or {})
    found = {key: value for key, value in found.items() if key not in without}
    if dtype is not None:
        found = {key: value.astype(dtype) for key, value in found.items()}
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(content))
    wanted = [
        files.Wanted(key, DTYPES.get(value.dtype, "F32"), value.shape, lambda value=value: value)
        for key, value in found.items()
    ]
    files.write_weights(directory, wanted, shard_bytes=shard_bytes or files.SHARD_BYTES)
    return directory


REMOVED = object()


def write_tokenizer(directory):
    """Writes a token for each printable ASCII character, and a chat template: 99 of 101 tokens."""
    names = ["<unk>", "\n", *map(chr, range(32, 127)), "<|im_start|>", "<|im_end|>"]
    model = tokenizers.models.WordLevel({name: i for i, name in enumerate(names)}, "<unk>")
    library = tokenizers.Tokenizer(model)
    library.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    library.decoder = tokenizers.decoders.Fuse()
    library.add_special_tokens(names[-2:])
    (directory / "tokenizer.json").write_text(library.to_str())
    config = {"eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


def load(directory, mesh="fsdp:1"):
    """(configuration, model, parameters on the mesh, mesh)."""
    sizes = np.prod([int(part.partition(":")[2]) for part in mesh.split(",")])
    mesh = make_mesh(mesh, devices=jax.devices()[:sizes])
    with opening_model(pathlib.Path(directory)) as source:
        model = transformer(source.config)
        abstract = placed_state(model, optax.identity(), mesh)
        return source.config, model, load_params(source, abstract.params), mesh


def scores(model, params, tokens, mesh):
    """Logits [B, T, V] on the mesh."""

    @jax.jit
    def forward(params, tokens):
        with use_rules(mesh):
            hidden, _ = model.apply(params, {}, {"tokens": tokens}, key=None, train=False)
            return logits(model, params, hidden)

    return np.asarray(forward(params, tokens))
