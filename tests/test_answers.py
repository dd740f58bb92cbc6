"""Answers are cut at stop strings and stop tokens, whatever the batch."""

import jax
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, pre_tokenizers
from tokenizers.models import WordLevel

from jaxtrain.answers import answer, cut
from jaxtrain.data.tokenizing import ByteTokenizer, LibraryTokenizer
from jaxtrain.errors import ConfigError
from jaxtrain.models.sample import generate
from jaxtrain.models.transformer import TransformerConfig, transformer
from jaxtrain.prompts import Prompt, text_prompt

pytestmark = pytest.mark.usefixtures("compile_cache")

BYTES = ByteTokenizer()
# ASCII alone, so that a token is a character.
CONFIG = TransformerConfig(vocab_size=128, num_layers=1, embed_dim=16, num_heads=2, mlp_dim=24)


@pytest.fixture(scope="module")
def ascii_model():
    model = transformer(CONFIG)
    shapes, _ = jax.eval_shape(model.init, jax.random.key(0))
    rng = np.random.default_rng(3)
    params = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), shapes)
    return model, params


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("one two", (), ("one two", False)),
        ("one two", ("three",), ("one two", False)),
        ("one two", ("two", "e"), ("on", True)),
        ("one two", ("one",), ("", True)),
        ("a\n\nb\n\n", ("\n\n",), ("a", True)),
    ],
)
def test_the_first_stop_string_cuts(text, stops, expected):
    assert cut(text, stops) == expected


def answers(model, prompts, **settings):
    prompts = [text_prompt(text, BYTES) for text in prompts]
    return answer(*model, prompts, BYTES, **{"num_tokens": 80, "temperature": 0} | settings)


PROMPTS = ["one", "a longer one of forty characters or so..", "x"]


def test_answers_are_the_tokens_of_generate_whatever_the_batch(ascii_model):
    rows = [list(text.encode()) for text in PROMPTS]
    settings = {"num_tokens": 80, "temperature": 0.9, "seed": 5}
    expected = [BYTES.decode(row) for row in generate(*ascii_model, rows, **settings)]
    found, speed = answers(ascii_model, PROMPTS, **settings)
    assert found == expected
    assert answers(ascii_model, PROMPTS, batch_size=1, **settings)[0] == expected
    assert answers(ascii_model, PROMPTS, batch_size=2, **settings)[0] == expected
    assert (speed.num_rows, speed.prompt_tokens, speed.tokens) == (3, 3 + 40 + 1, 3 * 79)
    assert min(speed.compile_seconds, speed.prefill_seconds, speed.decode_seconds) > 0
    assert "3 rows: prefill 44 tokens of prompts in" in str(speed)


def test_stop_strings_cut_each_row_and_end_it(ascii_model):
    free, _ = answers(ascii_model, PROMPTS)
    # Of the second piece of one row; wherever else it stands, it cuts too.
    stop = free[0][40:43]
    expected = [text.split(stop)[0] for text in free]
    assert 0 < len(expected[0]) < 80
    found, speed = answers(ascii_model, PROMPTS, stop_strings=["never there", stop])
    assert found == expected
    alone, speed = answers(ascii_model, PROMPTS[:1], stop_strings=[stop])
    assert alone == expected[:1]
    # The piece in which it was found was the last.
    assert speed.tokens in (32, 64)


def test_stop_tokens_are_no_part_of_an_answer(ascii_model):
    free, _ = answers(ascii_model, PROMPTS)
    stop = free[1][7]
    found, speed = answers(ascii_model, PROMPTS, stop_tokens=[ord(stop)])
    assert found == [text.split(stop)[0] for text in free]
    assert speed.tokens == sum(min(len(text) + 1, 80) - 1 for text in found)


def test_an_empty_stop_string_is_refused(ascii_model):
    with pytest.raises(ConfigError, match="a stop string is empty; give at least one character"):
        answers(ascii_model, PROMPTS, stop_strings=["a", ""])


def test_words_stay_apart_where_a_tokenizer_writes_no_space_at_the_start(ascii_model):
    names = ["</s>", *(f"\u2581w{number}" for number in range(1, 128))]
    vocabulary = {name: number for number, name in enumerate(names)}
    library = tokenizers.Tokenizer(WordLevel(vocabulary, unk_token="</s>"))
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.decoder = decoders.Metaspace()
    tokenizer = LibraryTokenizer(library.to_str().encode(), "words")
    assert tokenizer.decode([5, 6]) == "w5 w6"
    prompt = Prompt("w5 w6", [5, 6])
    ((text,), _) = answer(
        *ascii_model, [prompt], tokenizer, num_tokens=3, temperature=0, stop_tokens=[0]
    )
    (tokens,) = generate(*ascii_model, [[5, 6]], num_tokens=3, temperature=0)
    assert 0 not in tokens
    assert text == "".join(f" w{token}" for token in tokens)
