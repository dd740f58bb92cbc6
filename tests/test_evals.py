"""Log-likelihoods and answers of our models.

The reference are the logits that transformers computed for the committed models, or those of one
forward of each row alone, and a log-softmax in NumPy's float64.
"""

import dataclasses

import hugging
import jax
import numpy as np
import pytest

from jaxtrain.data.tokenizing import open_tokenizer
from jaxtrain.errors import ConfigError, NonFiniteError
from jaxtrain.evals import scoring
from jaxtrain.evals.answers import Answers, GenerationSettings
from jaxtrain.evals.generating import Generator
from jaxtrain.evals.pairs import Coder, Pair
from jaxtrain.evals.scoring import Scorer
from jaxtrain.evals.subject import Subject

pytestmark = pytest.mark.usefixtures("compile_cache")

CONTEXT = 40


def log_softmax(logits):
    """In float64."""
    logits = np.asarray(logits, np.float64)
    logits = logits - logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def reference(logits_TV, targets):
    """(log-likelihood, is greedy) of the tokens that follow the last positions."""
    log_probs = log_softmax(logits_TV)[-len(targets) :]
    total = sum(log_probs[place, token] for place, token in enumerate(targets))
    return total, log_probs.argmax(-1).tolist() == list(targets)


def pairs_of(name):
    """Pairs out of the committed tokens, with what they are by the logits of transformers."""
    tokens, logits = hugging.expected(name)
    pairs, expected = [], []
    for row, (begin, end) in enumerate([(1, 40), (30, 33), (5, 6), (39, 40), (10, 27), (2, 9)]):
        row %= len(tokens)
        pairs.append(Pair(tokens[row, :begin].tolist(), tokens[row, begin:end].tolist()))
        expected.append(reference(logits[row, : end - 1], tokens[row, begin:end]))
    # The likeliest token after a context is a greedy continuation.
    for row in range(len(tokens)):
        best = int(logits[row, 19].argmax())
        pairs.append(Pair(tokens[row, :20].tolist(), [best]))
        expected.append(reference(logits[row, :20], [best]))
    return pairs, expected


def compare(found, expected):
    np.testing.assert_allclose(
        [score.log_likelihood for score in found], [total for total, _ in expected], atol=2e-3
    )
    assert [score.is_greedy for score in found] == [is_greedy for _, is_greedy in expected]


@pytest.mark.parametrize("mesh", ["fsdp:1", "data:2,fsdp:2,tensor:2"])
@pytest.mark.parametrize("name", ["gpt2", "gemma2"])
def test_log_likelihoods_are_those_of_transformers(name, mesh):
    """gpt2 has padding in its vocabulary, gemma2 a limit of its logits."""
    pairs, expected = pairs_of(name)
    _, model, params, mesh = hugging.load(hugging.ROOT / name, mesh)
    scorer = Scorer(model, params, mesh, max_length=CONTEXT, global_batch_size=4)
    compare(scorer.score(pairs), expected)
    assert {is_greedy for _, is_greedy in expected} == {True, False}
    assert scorer.score([]) == []


def test_scores_in_chunks_are_the_same(monkeypatch):
    pairs, expected = pairs_of("gpt2")
    _, model, params, mesh = hugging.load(hugging.ROOT / "gpt2")
    sizes = []
    real = Scorer._of_chunk

    def noting(self, hidden, head, targets):
        sizes.append(targets.shape)
        return real(self, hidden, head, targets)

    monkeypatch.setattr(Scorer, "_of_chunk", noting)
    # Seven positions of four rows, of a vocabulary of 128 with padding.
    monkeypatch.setattr(scoring, "_CHUNK_BYTES", 7 * 4 * 4 * 128)
    scorer = Scorer(model, params, mesh, max_length=CONTEXT, global_batch_size=4)
    compare(scorer.score(pairs), expected)
    assert set(sizes) == {(4, 7)}


def test_long_contexts_are_cut_on_the_left():
    tokens, _ = hugging.expected("llama")
    _, model, params, mesh = hugging.load(hugging.ROOT / "llama")
    scorer = Scorer(model, params, mesh, max_length=16, global_batch_size=2)
    row = tokens[0].tolist()
    logits = hugging.scores(model, params, tokens[:1, 23:39], mesh)
    compare(scorer.score([Pair(row[:36], row[36:40])]), [reference(logits[0], row[36:40])])


def test_few_programs_serve_all_lengths():
    _, model, params, mesh = hugging.load(hugging.ROOT / "llama")
    scorer = Scorer(model, params, mesh, max_length=512, global_batch_size=8)
    rng = np.random.default_rng(0)
    compiled = []

    def listener(event, duration, **kwargs):
        del duration
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(kwargs)

    def pairs(lengths):
        return [Pair(rng.integers(0, 101, n).tolist(), [3] * (1 + n % 5)) for n in lengths]

    jax.monitoring.register_event_duration_secs_listener(listener)
    scorer.score(pairs(range(3, 300, 4)))
    first = len(compiled)
    scorer.score(pairs(range(5, 400, 3)))
    jax.monitoring.unregister_event_duration_listener(listener)
    assert first <= 4, "for 64, 128, 256 and 512 tokens"
    assert len(compiled) == first


def test_bad_requests_are_refused():
    _, model, params, mesh = hugging.load(hugging.ROOT / "gpt2", "fsdp:2")
    scorer = Scorer(model, params, mesh, max_length=8)
    with pytest.raises(ConfigError, match="token 101 is outside of the model's vocabulary of 101"):
        scorer.score([Pair([1], [2]), Pair([1, 2], [101])])
    with pytest.raises(ConfigError, match="9 tokens does not fit max_length=8; raise --max_length"):
        scorer.score([Pair([1], [2] * 9)])
    with pytest.raises(ConfigError, match="global_batch_size=3 is not divisible by the 2 batch sh"):
        Scorer(model, params, mesh, max_length=8, global_batch_size=3)
    broken = jax.tree.map(lambda leaf: leaf * np.nan, params)
    with pytest.raises(NonFiniteError, match="log-likelihoods must be finite"):
        Scorer(model, broken, mesh, max_length=8).score([Pair([1], [2])])


def test_several_processes_are_refused(monkeypatch):
    _, model, params, mesh = hugging.load(hugging.ROOT / "gpt2")
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ConfigError, match="by one process; this run has 2"):
        Scorer(model, params, mesh, max_length=8)


# Answers: texts in, texts out, through a tokenizer of one token for each character


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = hugging.copy("qwen3", tmp_path_factory.mktemp("hf") / "model")
    hugging.write_tokenizer(directory)
    return directory


def subject_on(directory, mesh="fsdp:1", max_length=CONTEXT):
    _, model, params, mesh = hugging.load(directory, mesh)
    return Subject(
        name="qwen3", model=model, params=params, mesh=mesh, max_length=max_length,
        tokenizer=open_tokenizer(str(directory)), folder=directory,
        template_place=str(directory),
    )  # fmt: skip


def likeliest(subject, tokens, count):
    """The next tokens, each from a forward of all before it."""
    tokens = list(tokens)
    for _ in range(count):
        row = np.zeros((1, 128), np.int32)
        row[0, : len(tokens)] = tokens
        logits = hugging.scores(subject.model, subject.params, row, subject.mesh)
        tokens.append(int(logits[0, len(tokens) - 1].argmax()))
    return tokens[-count:]


def test_a_whole_text_is_scored_in_windows(directory):
    subject = subject_on(directory, max_length=16)
    coder = Coder(subject.tokenizer, subject.prefix)
    texts = ["The quick brown fox jumps over it.", "short", ""]
    expected = []
    for text in texts:
        whole = [subject.prefix, *coder.encode(text)]
        total = 0.0
        for begin in range(0, len(whole) - 1, 16):
            end = min(begin + 16, len(whole) - 1)
            read = np.array([whole[max(end - 16, 0) : end]], np.int32)
            logits = hugging.scores(subject.model, subject.params, read, subject.mesh)
            total += reference(logits[0], whole[begin + 1 : end + 1])[0]
        expected.append(total)
    found = Answers(subject).rolling_log_likelihoods(texts)
    np.testing.assert_allclose(found, expected, atol=2e-3)
    assert found[2] == 0


@pytest.mark.parametrize("mesh", ["fsdp:1", "fsdp:2,tensor:2"])
def test_answers_are_the_likeliest_tokens(directory, mesh):
    subject = subject_on(directory, mesh, max_length=128)
    one = subject_on(directory, max_length=128)
    coder = Coder(subject.tokenizer, subject.prefix)
    prompts = ["The quick", "A", "once more " * 5]
    settings = {"max_gen_toks": 40, "until": []}
    found = Answers(subject, global_batch_size=2).generate_until(
        [(prompt, settings) for prompt in prompts]
    )
    for prompt, text in zip(prompts, found, strict=True):
        tokens = likeliest(one, coder.encode(prompt), 40)
        end = tokens.index(subject.tokenizer.end_of_document) if (
            subject.tokenizer.end_of_document in tokens
        ) else 40  # fmt: skip
        assert text == subject.tokenizer.decode(tokens[:end])


def test_answers_end_at_stops_and_at_their_length(directory):
    subject = subject_on(directory, max_length=128)
    answers = Answers(subject)
    whole = answers.generate_until([("The quick", {"max_gen_toks": 40})])[0]
    stop = whole[21:23]
    asked = [
        ("The quick", {"until": stop, "max_gen_toks": 40}),
        ("The quick", {"until": ["never", whole[:1], ""], "max_gen_toks": 40}),
        ("The quick", {"max_new_tokens": 7, "do_sample": False, "temperature": 0.7}),
        ("The quick", {"max_gen_toks": 40}),
    ]
    assert answers.generate_until(asked) == [whole.partition(stop)[0], "", whole[:7], whole]


def test_an_answer_ends_at_any_token_that_ends_the_model_s_text(directory):
    subject = subject_on(directory, max_length=128)
    coder = Coder(subject.tokenizer, subject.prefix)
    tokens = likeliest(subject, coder.encode("The quick"), 20)
    end = tokens[10]
    place = tokens.index(end)
    model = (subject.model, subject.params, subject.mesh, coder)
    generator = Generator(*model, ends=[end], max_length=128)
    found = generator.generate(["The quick"], stops=(), max_tokens=20)
    assert found == [subject.tokenizer.decode(tokens[:place])]


def test_prompts_are_cut_to_leave_room_for_the_answer(directory):
    subject = subject_on(directory, max_length=24)
    coder = Coder(subject.tokenizer, subject.prefix)
    prompt = "a long prompt of many characters"
    found = Answers(subject).generate_until([(prompt, {"max_gen_toks": 8})])
    tokens = likeliest(subject, coder.encode(prompt)[-16:], 8)
    assert found == [subject.tokenizer.decode(tokens)]
    with pytest.raises(ConfigError, match=r"max_gen_toks=256 must .* model's context of 24; set"):
        Answers(subject).generate_until([(prompt, {})])


def test_generation_settings():
    assert GenerationSettings.of({}) == ((), 256)
    assert GenerationSettings.of({"until": "x", "max_tokens": 3}) == (("x",), 3)
    assert GenerationSettings.of({"until": ["x"], "do_sample": True, "temperature": 0.0}).stops
    with pytest.raises(ConfigError, match=r"ask for samples \(do_sample=True, temperature=0.8\)"):
        GenerationSettings.of({"do_sample": True, "temperature": 0.8})
    with pytest.raises(ConfigError, match=r"hold num_beams=4, which is not done here"):
        GenerationSettings.of({"num_beams": 4})


def test_a_subject_begins_and_ends_as_its_files_say(directory, tmp_path):
    subject = subject_on(directory)
    tokenizer = subject.tokenizer
    assert subject.prefix == tokenizer.end_of_document, "no other token is named"
    assert subject.ends == {tokenizer.end_of_document}
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "tokenizer_config.json").write_text('{"bos_token": {"content": "<|im_start|>"}}')
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, 7]}')
    other = dataclasses.replace(subject, folder=folder)
    assert other.prefix == tokenizer.encode_marked("<|im_start|>")[0][0]
    assert other.ends == {tokenizer.end_of_document, 5, 7}


def test_chats_become_prompts_by_the_model_s_template(directory):
    answers = Answers(subject_on(directory))
    asked = {"role": "user", "content": "Hi?"}
    begin = "<|im_start|>user\nHi?<|im_end|>\n<|im_start|>assistant\n"
    assert answers.chat_prompt([asked], asks=True) == begin
    said = {"role": "assistant", "content": "Well, "}
    assert answers.chat_prompt([asked, said], asks=False) == begin + "Well,"
    bare = dataclasses.replace(answers.subject, template_place="")
    with pytest.raises(ConfigError, match="qwen3 has no chat template; leave out --apply_chat_t"):
        bare.template()
