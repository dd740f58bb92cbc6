"""Requests of lm-eval as tokens: parted pairs, windows, cuts."""

import itertools

import pytest
import tokenizers

from jaxtrain.data.tokenizing import ByteTokenizer, LibraryTokenizer, train_bpe
from jaxtrain.errors import ConfigError, DataError
from jaxtrain.evals.pairs import Coder, Pair, bucket, cut, windows

BYTES = Coder(ByteTokenizer(), 255)
TEXT = b"the cat sat on the mat. the cat is on the mat, the mat is on the cat. " * 4


@pytest.fixture(scope="module")
def library():
    """A tokenizer that begins texts with <s>."""
    found = tokenizers.Tokenizer.from_str(train_bpe([TEXT], 290).decode())
    found.add_special_tokens(["<s>"])
    found.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", found.token_to_id("<s>"))]
    )
    return found


@pytest.fixture(scope="module")
def coder(library):
    tokenizer = LibraryTokenizer(library.to_str().encode(), "bpe")
    return Coder(tokenizer, tokenizer.beginning[0])


def test_bytes_are_parted_where_the_context_ends_without_its_spaces():
    assert BYTES.pair("ab", "cd") == Pair([*b"ab"], [*b"cd"])
    assert BYTES.pair("ab \n", "cd") == Pair([*b"ab"], [*b" \ncd"])
    assert BYTES.pair("", "cd") == Pair([255], [*b"cd"])
    assert BYTES.pair("  ", "cd") == Pair([255], [*b"  cd"])


def test_a_pair_is_encoded_in_one_piece(coder, library):
    """Expected tokens are those of the library itself, of the whole text."""
    whole = library.encode("the cat sat").ids
    found = coder.pair("the cat", " sat")
    assert found.context + found.continuation == whole
    assert library.decode(found.continuation) == " sat"
    assert found.context[0] == coder.prefix
    # The space at the end of the context goes over, so that " sat" is the token it is in a text.
    assert coder.pair("the cat ", "sat") == found
    apart = library.encode("sat", add_special_tokens=False).ids
    assert found.continuation != apart


def test_a_token_over_the_border_belongs_to_neither(coder, library):
    """As lm-eval does it: the context's own tokens, then what the whole has more of."""
    context = library.encode("the c").ids
    whole = library.encode("the cat sat on").ids
    assert context != whole[: len(context)]
    assert coder.pair("the c", "at sat on") == Pair(context, whole[len(context) :])


def test_an_empty_context_is_the_prefix(coder, library):
    text = library.encode("the cat", add_special_tokens=False).ids
    assert coder.pair("", "the cat") == Pair([coder.prefix], text)
    # Nor is a beginning doubled that is written out.
    assert coder.pair("", "<s>the cat") == Pair([coder.prefix], text)
    assert coder.encode("<s>the cat") == coder.encode("the cat") == [coder.prefix, *text]


def test_a_continuation_without_tokens_is_refused(coder):
    with pytest.raises(DataError, match=r"'' adds none to 'the cat'. Change doc_to_target"):
        coder.pair("the cat", "")


def test_windows_are_those_of_lm_eval():
    """The example in the docstring of its LM.loglikelihood_rolling, as pairs without overlap."""
    assert windows(range(10), 99, 4) == [
        Pair([99], [0, 1, 2, 3]),
        Pair([3], [4, 5, 6, 7]),
        Pair([5, 6, 7], [8, 9]),
    ]
    assert windows([], 99, 4) == []
    assert windows([1, 2], 99, 4) == [Pair([99], [1, 2])]


@pytest.mark.parametrize(("length", "most"), [*itertools.product((1, 7, 8, 9, 20), (1, 2, 5, 8))])
def test_windows_score_each_token_once_after_those_before_it(length, most):
    tokens = list(range(length))
    whole = [99, *tokens]
    scored = []
    for context, continuation in windows(tokens, 99, most):
        read = context + continuation
        assert len(read) <= most + 1
        begin = whole.index(read[0])
        assert read == whole[begin : begin + len(read)]
        assert len(read) == min(most + 1, begin + len(read)), "as much context as there is room"
        scored += continuation
    assert scored == tokens


def test_texts_are_cut_on_the_left():
    pair = Pair([1, 2, 3, 4], [5, 6])
    assert cut(pair, 9) == ([1, 2, 3, 4, 5], [2, 3, 4, 5, 6])
    assert cut(pair, 3) == ([3, 4, 5], [4, 5, 6])
    assert cut(pair, 2) == ([4, 5], [5, 6])
    with pytest.raises(ConfigError, match=r"continuation of 2 tokens does not fit max_length=1"):
        cut(pair, 1)


@pytest.mark.parametrize(
    ("length", "most", "expected"),
    [(1, 999, 64), (64, 999, 64), (65, 999, 128), (513, 999, 999), (20, 32, 32)],
)
def test_lengths_are_rounded_to_powers_of_two(length, most, expected):
    assert bucket(length, most) == expected
