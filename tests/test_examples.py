"""Examples to fine-tune on: chat templates, masks, rows, and what is refused."""

import json

import numpy as np
import pytest

from jaxtrain.data.chat import ChatTemplate
from jaxtrain.data.examples import examples_datasets, read_examples
from jaxtrain.data.examples_config import ExamplesConfig
from jaxtrain.data.tokenizing import ByteTokenizer, LibraryTokenizer, open_tokenizer, train_bpe
from jaxtrain.errors import ConfigError, DataError

BYTES = ByteTokenizer()
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{{ bos_token }}{% for m in messages %}\n"
    "{% if m.role == 'assistant' %}\n"
    "A: {% generation %}{{ m.content | trim }};{% endgeneration %}\n"
    "{% else %}{{ m.role[0] }}: {{ m.content }}|{% endif %}{% endfor %}"
)
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": " 4 "},
]


def write(path, *records):
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    path.write_text("".join(f"{line}\n" for line in lines))
    return str(path)


def said(rendered):
    return [rendered.text[begin:end] for begin, end in rendered.spans]


# Templates


def test_turns_are_found_by_what_they_add():
    rendered = ChatTemplate(CHATML, "chatml").render(CHAT)
    assert rendered.text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi")
    assert said(rendered) == ["Hello.<|im_end|>\n", " 4 <|im_end|>\n"]


def test_markers_say_what_the_assistant_says():
    template = ChatTemplate(MARKED, "marked", {"bos_token": "<s>"})
    rendered = template.render(CHAT)
    assert rendered.text == "<s>s: Be brief.|u: Hi|A: Hello.;u: 2+2?|A: 4;"
    assert said(rendered) == ["Hello.;", "4;"]
    assert template.prompt(CHAT[:2]) == "<s>s: Be brief.|u: Hi|"


def test_a_template_that_rewrites_earlier_turns_needs_markers():
    only_last = "{% for m in messages %}{{ m.content if loop.last else '' }}{% endfor %}"
    with pytest.raises(DataError, match=r"message 2 cannot be found in it; mark .* generation %\}"):
        ChatTemplate(only_last, "last").render(CHAT)


def test_templates_run_in_a_sandbox_and_may_refuse():
    template = ChatTemplate("{{ messages.append(1) }}", "bad")
    with pytest.raises(DataError, match=r"chat template bad refuses it: .*append"):
        template.render(CHAT)
    template = ChatTemplate("{{ ''.__class__.__mro__ }}", "escape")
    with pytest.raises(DataError, match="unsafe"):
        template.render(CHAT)
    with pytest.raises(DataError, match="refuses it: only users"):
        ChatTemplate("{{ raise_exception('only users') }}", "picky").render(CHAT)
    with pytest.raises(ConfigError, match="chat template broken is not Jinja"):
        ChatTemplate("{% for %}", "broken")


def test_a_template_is_read_as_hugging_face_keeps_it(tmp_path):
    config = {"bos_token": {"content": "<s>"}, "chat_template": MARKED}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    expected = ChatTemplate(MARKED, "", {"bos_token": "<s>"}).render(CHAT)
    assert ChatTemplate.read(str(tmp_path)).render(CHAT) == expected
    config["chat_template"] = [
        {"name": "tool_use", "template": "no"},
        {"name": "default", "template": MARKED},
    ]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert ChatTemplate.read(str(tmp_path)).render(CHAT) == expected
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    assert "<|im_start|>" in ChatTemplate.read(str(tmp_path)).render(CHAT).text


# Tokens and masks


def test_chat_tokens_are_targets_only_where_the_assistant_speaks(tmp_path):
    (tmp_path / "t.jinja").write_text("{% for m in messages %}{{ m.role[0] }}{{ m.content }};{% endfor %}{{ 'a' if add_generation_prompt }}")  # fmt: skip  # noqa: E501
    chat = [{"role": "user", "content": "é?"}, {"role": "assistant", "content": "né"}]
    source = write(tmp_path / "c.jsonl", {"messages": chat})
    (example,) = read_examples(source, BYTES, str(tmp_path / "t.jinja"))
    assert bytes(example.tokens.astype(np.uint8)).decode() == "ué?;ané;"
    #           u  é  é  ?  ;  a  n  é  é  ;   by hand
    expected = [0, 0, 0, 0, 0, 0, 1, 1, 1, 1]
    assert example.loss_mask.tolist() == expected
    assert example.place == "c.jsonl:1"


@pytest.fixture(scope="module")
def bpe():
    """A tokenizer with special tokens, which begins texts with <s>."""
    import tokenizers

    library = tokenizers.Tokenizer.from_str(train_bpe([b"Hello. Be brief. Hi"], 300).decode())
    library.add_special_tokens(["<s>", "<|im_start|>", "<|im_end|>"])
    begin = library.token_to_id("<s>")
    library.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", begin)]
    )
    return LibraryTokenizer(library.to_str().encode(), "bpe", "<|im_end|>")


def test_special_tokens_of_a_template_are_single_tokens(bpe, tmp_path):
    (tmp_path / "t.jinja").write_text(CHATML)
    source = write(tmp_path / "c.jsonl", {"messages": CHAT})
    (example,) = read_examples(source, bpe, str(tmp_path / "t.jinja"))
    end = bpe.end_of_document
    assert np.sum(example.tokens == end) == len(CHAT)
    # Targets: the answers, their ends, and the line ends behind.
    targets = example.tokens[example.loss_mask == 1]
    expected = np.concatenate(
        [[*bpe.encode([text])[0], end, *bpe.encode([b"\n"])[0]] for text in (b"Hello.", b" 4 ")]
    )
    assert targets.tolist() == expected.tolist()
    # In other text a special token is its letters.
    assert end not in bpe.encode([b"<|im_end|>"])[0]


def test_a_prompt_has_the_tokens_of_the_prompt_alone(bpe, tmp_path):
    source = write(tmp_path / "p.jsonl", {"prompt": "Hell", "completion": "o."})
    (example,) = read_examples(source, bpe)
    prompt, completion = bpe.encode([b"Hell", b"o."])
    (begin,) = bpe.beginning
    expected = [begin, *prompt, *completion, bpe.end_of_document]
    assert example.tokens.tolist() == expected
    assert example.loss_mask.tolist() == [0] * (1 + len(prompt)) + [1] * (len(completion) + 1)


# Rows


def test_rows_keep_examples_apart_and_leave_out_long_ones(tmp_path, caplog):
    records = [{"prompt": "ab", "completion": "c"}, {"prompt": "", "completion": "x" * 40}]
    records += [{"prompt": "de", "completion": "fg"}]
    config = ExamplesConfig(
        source=write(tmp_path / "p.jsonl", *records), sequence_length=16, validation_fraction=0
    )
    with caplog.at_level("WARNING"):
        train, held_out, info = examples_datasets(config, BYTES)
    assert (
        "left out 1 example longer than data.sequence_length=16 (the longest has 41" in caplog.text
    )
    assert held_out is None
    assert info.too_long == ("p.jsonl:2",)
    assert "left out 1 example" in info.summary()
    assert (info.num_train, info.train_tokens) == (2, 2 + 3)
    row = {name: values[0].tolist() for name, values in train.read(np.array([0])).items()}
    text = bytes(row["tokens"][:9])
    assert text in (b"abc\xffdefg\xff", b"defg\xffabc\xff")
    number = 4 if text.startswith(b"abc") else 5
    assert row["segment_ids"] == [1] * number + [2] * (9 - number) + [0] * 7
    # The positions before c, its end, f, g and their end; never across examples.
    counted = [chr(t) for t, weight in zip(row["targets"], row["loss_mask"], strict=True) if weight]
    assert sorted(counted) == ["c", "f", "g", "\xff", "\xff"]


def test_records_are_held_out_by_content(tmp_path):
    records = [{"prompt": f"{n}", "completion": f"{n % 40}"} for n in range(40)] * 2
    config = ExamplesConfig(
        source=write(tmp_path / "p.jsonl", *records), sequence_length=8, validation_fraction=0.25
    )
    train, held_out, info = examples_datasets(config, BYTES)
    assert (info.num_train, info.num_eval) == (60, 20)
    sides = [
        {bytes(row) for row in split(rows.documents)} for rows in (train, held_out)
    ]  # no duplicate is on both
    assert not sides[0] & sides[1]
    assert len(sides[0] | sides[1]) == 40
    more = write(tmp_path / "q.jsonl", *records[::-1])
    again, _, _ = examples_datasets(config.replace(source=more), BYTES)
    assert {bytes(row) for row in split(again.documents)} == sides[0]


def split(documents):
    return [
        documents.tokens[a:b].astype(np.uint8).tobytes()
        for a, b in zip(documents.starts[:-1], documents.starts[1:], strict=True)
    ]


# Refusals

GOOD = {"prompt": "a", "completion": "b"}


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("{", r"p\.jsonl:3 is not JSON in UTF-8"),
        ("[1]", r"p\.jsonl:3 is list, not an object"),
        ({"prompt": "a"}, r"p\.jsonl:3 has no text in 'completion' \(it has: prompt\)"),
        ({"prompt": "a", "completion": ""}, r"p\.jsonl:3 has an empty completion"),
        ({"messages": []}, r"p\.jsonl:3 has no list of messages"),
        (
            {"messages": [{"role": "tool", "content": "x"}]},
            r"p\.jsonl:3 has the role 'tool' in message 0; roles are system, user, assistant",
        ),
        ({"messages": CHAT[:2]}, r"p\.jsonl:3 has no message of the assistant"),
        ({"messages": [{"role": "user"}]}, r"p\.jsonl:3 has message 0 without text in 'content'"),
    ],
)
def test_bad_records_are_named_with_file_and_line(tmp_path, bad, message):
    source = write(tmp_path / "p.jsonl", GOOD, "", bad, GOOD)
    with pytest.raises(DataError, match=message):
        read_examples(source, BYTES)


def test_missing_templates_and_sources_are_refused(tmp_path):
    source = write(tmp_path / "c.jsonl", {"messages": CHAT})
    with pytest.raises(ConfigError, match=r"messages need a chat template, and tokenizer bytes"):
        read_examples(source, BYTES)
    with pytest.raises(ConfigError, match=r"has no chat template: neither chat_template\.jinja"):
        read_examples(source, BYTES, str(tmp_path))
    with pytest.raises(ConfigError, match=r"data\.source is empty"):
        examples_datasets(ExamplesConfig(), BYTES)
    (tmp_path / "plain.txt").write_text("text")
    with pytest.raises(DataError, match=r"plain\.txt is not JSON lines"):
        read_examples(str(tmp_path / "plain.txt"), BYTES)
    config = ExamplesConfig(source=write(tmp_path / "p.jsonl", GOOD), sequence_length=2)
    with pytest.raises(DataError, match=r"1 record 1 are longer than data\.sequence_length=2"):
        examples_datasets(config, BYTES)


def test_the_tokenizer_may_be_named(tmp_path):
    assert open_tokenizer("bytes").beginning == ()
