"""What is asked becomes tokens: plain texts, files of them, and messages in a chat template."""

import json

import jinja2
import pytest

from jaxtrain.data.chat import ChatTemplate
from jaxtrain.data.tokenizing import ByteTokenizer
from jaxtrain.errors import ConfigError, DataError
from jaxtrain.prompts import Prompt, make_prompts, read_prompts

BYTES = ByteTokenizer()
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "\u00e4?"}]


def test_a_text_is_its_tokens_behind_those_that_begin_texts():
    assert make_prompts(["ab", "c"], BYTES) == [Prompt("ab", [97, 98]), Prompt("c", [99])]
    assert make_prompts(["ab"], BYTES, beginning=[7]) == [Prompt("ab", [7, 97, 98])]


def test_messages_are_what_jinja_renders_with_the_prompt_for_an_answer():
    template = ChatTemplate(CHATML, "chatml")
    render = jinja2.Template(CHATML, trim_blocks=True).render
    found = make_prompts([MESSAGES, "Hi"], BYTES, beginning=[7], template=template)
    user = [{"role": "user", "content": "Hi"}]
    for one, messages in zip(found, (MESSAGES, user), strict=True):
        text = render(messages=messages, add_generation_prompt=True)
        assert text.endswith("<|im_start|>assistant\n")
        # The template writes the beginning itself, if there is one.
        assert bytes(one.tokens).decode() == text
    assert [one.shown for one in found] == ["\u00e4?\n", "Hi\n"]


def test_messages_need_a_template_and_texts_a_character():
    with pytest.raises(
        ConfigError, match="messages are rendered with a chat template; give --chat"
    ):
        make_prompts([MESSAGES], BYTES)
    with pytest.raises(ConfigError, match="prompt is empty; give at least one character"):
        make_prompts(["a", ""], BYTES)


def test_a_file_asks_line_by_line(tmp_path):
    path = tmp_path / "asked.txt"
    path.write_text('one\n\n {"prompt": "two"} \n')
    assert read_prompts(str(path)) == ["one", ' {"prompt": "two"} ']
    path = tmp_path / "asked.jsonl"
    records = [{"prompt": "one\ntwo", "id": 3}, {"messages": MESSAGES}]
    path.write_text("\n".join(map(json.dumps, records)))
    assert read_prompts(str(path)) == ["one\ntwo", MESSAGES]


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("a.txt", b"\n \n", r"prompts_file=.*a\.txt holds no prompts"),
        ("a.txt", b"\xff", r"a\.txt cannot be read: it is not UTF-8"),
        ("a.jsonl", b"{", r"a\.jsonl:1 is not JSON"),
        ("a.jsonl", b"[1]", r"a\.jsonl:1 is list, not an object"),
        ("a.jsonl", b'\n{"text": "x", "id": 1}', r"a\.jsonl:2 has no text in 'prompt'.*text, id"),
        ("a.jsonl", b'{"messages": []}', r"a\.jsonl:1 has no list of messages"),
        ("a.jsonl", b'{"messages": [{"role": "x", "content": ""}]}', "has the role 'x'"),
        ("a.jsonl", b"{\n" * 7, r"a\.jsonl:5 .*; and 2 more"),
    ],
)
def test_files_that_ask_nothing_are_refused(tmp_path, name, content, match):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=match):
        read_prompts(str(tmp_path / name))
