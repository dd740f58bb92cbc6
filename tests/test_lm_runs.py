"""What the directory of a run says of its model and its text, whichever script made it."""

import dataclasses
import json

import pytest
import tokenizers
from tokenizers.models import WordLevel

from jaxtrain.config import RunConfig, dump, field
from jaxtrain.data.examples_config import ExamplesConfig
from jaxtrain.data.text_config import TextDataConfig
from jaxtrain.errors import CheckpointError, ConfigError, DataError
from jaxtrain.hf.importing import ImportedRun
from jaxtrain.lm_runs import read_lm_run
from jaxtrain.models.lora_config import LoraConfig
from jaxtrain.models.transformer_config import TransformerConfig

MODEL = TransformerConfig(num_layers=3)
LORA = LoraConfig(rank=2, alpha=4.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trained(RunConfig):
    model: TransformerConfig = field(default_factory=TransformerConfig)
    data: TextDataConfig = field(default_factory=TextDataConfig)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuned(RunConfig):
    model: TransformerConfig = field(default_factory=TransformerConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    data: ExamplesConfig = field(default_factory=ExamplesConfig)


IMPORTED = ImportedRun(model=MODEL)
TRAINED = Trained(model=MODEL, precision="bfloat16", data=TextDataConfig(sequence_length=9))
TUNED = Tuned(model=MODEL, lora=LORA, data=ExamplesConfig(sequence_length=50))


@pytest.fixture
def write(tmp_path):
    """Writes config.json, and what the run keeps of a model."""

    def write(config, /, **files):
        (tmp_path / "config.json").write_text(dump(config))
        for name, content in files.items():
            (tmp_path / "hf").mkdir(exist_ok=True)
            text = content if isinstance(content, str) else json.dumps(content)
            (tmp_path / "hf" / f"{name}.json").write_text(text)
        return tmp_path

    return write


def tokenizer_text(*others):
    vocabulary = {name: number for number, name in enumerate(["<s>", "</s>", "a", "b", *others])}
    library = tokenizers.Tokenizer(WordLevel(vocabulary, "a"))
    library.add_special_tokens(["<s>", "</s>"])
    library.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    return library.to_str()


def test_the_model_of_each_kind_of_run_is_read(write):
    run = read_lm_run(write(IMPORTED))
    assert (run.model, run.lora, run.data) == (MODEL, LoraConfig(), None)
    assert (run.precision, run.sequence_length) == ("float32", MODEL.max_length)
    for name in ("max_position_embeddings", "n_positions"):
        assert read_lm_run(write(IMPORTED, config={name: 77})).sequence_length == 77
    run = read_lm_run(str(write(TRAINED)))
    assert (run.model, run.data, run.precision) == (MODEL, TRAINED.data, "bfloat16")
    assert run.sequence_length == 9
    run = read_lm_run(write(TUNED))
    assert (run.lora, run.data, run.sequence_length) == (LORA, TUNED.data, 50)


def test_directories_without_a_transformer_are_refused(write, tmp_path):
    with pytest.raises(CheckpointError, match=r"holds no run: .*config\.json: No such file"):
        read_lm_run(tmp_path)
    with pytest.raises(CheckpointError, match="is no run of a transformer"):
        read_lm_run(write(RunConfig()))


@pytest.mark.parametrize("config", [IMPORTED, TUNED])
def test_a_model_s_own_tokenizer_begins_and_ends_its_texts(write, config):
    kept = {"tokenizer": tokenizer_text(), "config": {"eos_token_id": 3}}
    text = read_lm_run(write(config, **kept)).open_text()
    assert text.tokenizer.vocab_size == 4
    assert (text.beginning, text.stop_tokens) == ((0,), (1, 3))
    # What generation_config.json says counts more, be it one token or several.
    for ends, expected in ((2, (1, 2)), ([1, 2, 3], (1, 2, 3))):
        kept["generation_config"] = {"eos_token_id": ends}
        assert read_lm_run(write(config, **kept)).open_text().stop_tokens == expected


def test_bytes_and_other_tokenizers_do_not_end_at_a_model_s_tokens(write, tmp_path):
    text = read_lm_run(write(TRAINED)).open_text()
    assert (text.tokenizer.name, text.beginning, text.stop_tokens) == ("bytes", (), (255,))
    path = tmp_path / "other.json"
    path.write_text(tokenizer_text("c", "d"))
    config = TUNED.replace(data=ExamplesConfig(tokenizer=str(path)))
    text = read_lm_run(write(config, config={"eos_token_id": 3})).open_text()
    assert (text.tokenizer.vocab_size, text.stop_tokens) == (6, (1,))


def test_a_run_without_its_tokenizer_says_so(write):
    with pytest.raises(DataError, match="keeps no tokenizer; sample from a run of train_lm"):
        read_lm_run(write(IMPORTED)).open_text()


def test_the_chat_template_is_the_run_s_or_that_of_a_file(write, tmp_path):
    kept = {"tokenizer": tokenizer_text(), "tokenizer_config": {"chat_template": "kept"}}
    text = read_lm_run(write(TUNED, **kept)).open_text()
    assert text.chat_template().prompt([]) == "kept"
    (tmp_path / "a.jinja").write_text("of a file")
    assert text.chat_template(str(tmp_path / "a.jinja")).prompt([]) == "of a file"
    (tmp_path / "b.jinja").write_text("of the run")
    data = ExamplesConfig(chat_template=str(tmp_path / "b.jinja"))
    text = read_lm_run(write(TUNED.replace(data=data), **kept)).open_text()
    assert text.chat_template().prompt([]) == "of the run"
    data = ExamplesConfig(tokenizer="bytes")
    text = read_lm_run(write(TUNED.replace(data=data))).open_text()
    with pytest.raises(ConfigError, match="no chat template; give --chat_template=FILE"):
        text.chat_template()


def test_an_answer_longer_than_what_was_practised_is_warned_of(write, caplog):
    run = read_lm_run(write(TRAINED))
    run.warn_of_length(4, 5)
    assert not caplog.records
    run.warn_of_length(5, 5)
    assert "num_tokens=5 make 10 tokens; the model was trained on 9 at a time" in caplog.text
