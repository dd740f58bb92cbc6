import dataclasses
import json
import pathlib
import re

import pytest
from absl import flags as absl_flags

from jaxtrain import flags
from jaxtrain.config import Config, OptimizerConfig, RunConfig, dump, field, leaves, to_dict
from jaxtrain.errors import ConfigError, ExitCode

GOLDEN = pathlib.Path(__file__).parent / "golden"


@dataclasses.dataclass(frozen=True, kw_only=True)
class NetConfig(Config):
    num_layers: int = field(4, minimum=1, help="layers")
    embed_dim: int = field(128, minimum=1, help="width")
    tied: bool = field(True, help="tied head")
    widths: tuple[int, ...] = field((8, 16), minimum=1, help="widths")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextConfig(Config):
    source: str = field("stdlib", help="text to read")
    shuffle: bool = field(True, help="random order")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExperimentConfig(RunConfig):
    model: NetConfig = field(default_factory=NetConfig)
    data: TextConfig = field(default_factory=TextConfig)
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(warmup_steps=10))


PRESETS = {
    "model": {
        "nano": {},
        "big": NetConfig(num_layers=12, embed_dim=768),
        "wide": {"embed_dim": 512, "widths": [1, 2]},
    }
}


def parse(*words: str, own: absl_flags.FlagValues | None = None) -> ExperimentConfig:
    return flags.parse(
        ["train.py", *words],
        ExperimentConfig,
        presets=PRESETS,
        flag_values=absl_flags.FlagValues() if own is None else own,
    )


def message_of(*words: str, own: absl_flags.FlagValues | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(*words, own=own)
    assert caught.value.exit_code == ExitCode.CONFIG
    return str(caught.value)


def write(tmp_path: pathlib.Path, text: str) -> str:
    path = tmp_path / "config.json"
    path.write_text(text)
    return f"--config={path}"


# Case G1: each input with its message


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--remat", "False"], "--remat=False must be one of none, dots, full"),
        (
            ["--evaluate", "False"],
            "'False' is a stray word; switches are written --name, --noname or --name=false",
        ),
        (["steps=5"], "'steps=5' is a stray word; did you mean --num_steps=5?"),
        (["go"], "'go' is a stray word; flags are written --name=value"),
        (["--", "--seed=1"], "--seed=1 is not a flag; did you mean --seed?"),
        (["--stesp=5"], "--stesp=5 is not a flag; did you mean --num_steps?"),
        (["--stesp", "5"], "--stesp is not a flag; did you mean --num_steps?"),
        (["--xyzzy=1"], "--xyzzy=1 is not a flag; --help lists them"),
        (["--num_steps=1e3"], "--num_steps=1e3 must be a whole number written out; use 1000"),
        (["--num_steps=10.5"], "--num_steps=10.5 must be a whole number"),
        (["--num_steps=ten"], "--num_steps=ten must be a whole number"),
        (["--num_steps="], "--num_steps= must be a whole number"),
        (["--num_steps=1,000"], "must be a whole number; a comma is not a decimal point"),
        (["--num_steps=-5"], "--num_steps=-5 must be at least 1 (steps)"),
        (["--num_steps", "-5"], "--num_steps=-5 must be at least 1 (steps)"),
        (["--num_steps"], "Missing value for flag --num_steps"),
        (["--workdir", "--seed=1"], "--workdir=--seed=1 looks like a flag; the value before it"),
        (["--nonum_steps"], "--nonum_steps is not a flag; did you mean --num_steps?"),
        (
            ["--lr=nan"],
            "--lr=nan is not a flag; did you mean --optimizer.learning_rate?",
        ),
        (
            ["--optimizer.learning_rate=nan"],
            "--optimizer.learning_rate=nan must be a finite number",
        ),
        (["--optimizer.learning_rate=inf"], "--optimizer.learning_rate=inf must be a finite"),
        (
            ["--optimizer.learning_rate=1,5"],
            "--optimizer.learning_rate=1,5 must be a finite number; a comma is not a decimal point",
        ),
        (["--optimizer.learning_rate=0"], "must be greater than 0"),
        (["--optimizer.lr=1"], "--optimizer.lr=1 is not a flag; did you mean --optimizer.learn"),
        (["--batch_size=0"], "--batch_size=0 is not a flag; did you mean --global_batch_size?"),
        (["--global_batch_size=0"], "--global_batch_size=0 must be at least 1 (rows)"),
        (["--optimizer=muon"], "--optimizer.name=muon is not available: optax's picks"),
        (["--optimizer=adam"], "must be one of adamw, lion, sgd; did you mean adamw?"),
        (["--optimizer.momentum=0.5"], "optimizer: momentum=0.5 is read only with name=sgd"),
        (["--model=huge"], "--model=huge must be one of nano, big, wide"),
        (["--model="], "--model= must be one of nano, big, wide"),
        (["--data=stdlib"], "--data=stdlib is not a flag, data is a section: --data.source"),
        (["--evaluate=maybe"], "--evaluate=maybe must be true or false"),
        (["--noevaluate=true"], "--noevaluate=true does not take an argument"),
        (["--data.noshuffle=false"], "--data.noshuffle takes no value"),
        (["--model.widths=8,x"], "--model.widths=8,x must be a whole number"),
        (["--nonfinite=ignore"], "nonfinite=ignore must be stop, or skip:N"),
        (["--profile=9:3"], "profile=9:3 must be START:STOP"),
        (["--config=absent.json"], "config file absent.json cannot be read: No such file"),
        (["--config"], "Missing value for flag --config"),
        (["--flagfile=absent.txt"], "Unable to open flagfile"),
    ],
)
def test_bad_command_lines(words, message):
    assert message in message_of(*words)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"learing_rate": 1}', "learing_rate=1 is not a field; did you mean optimizer.learning_"),
        ('{"num_steps": "ten"}', "num_steps='ten' must be a whole number"),
        ('{"num_steps": "10"}', "num_steps='10' must be a whole number"),
        ('{"num_steps": true}', "num_steps=true must be a whole number"),
        ('{"num_steps": null}', "num_steps=None must be a whole number"),
        ('{"optimizer": {"learning_rate": NaN}}', "optimizer.learning_rate=nan must be a finite"),
        ('{"optimizer": {"learning_rate": 1e999}}', "optimizer.learning_rate=inf must be a finite"),
        ('{"seed": 1, "seed": 2}', "is not a JSON configuration: seed is given twice"),
        ("seed: 1", "is not a JSON configuration: Expecting value: line 1 column 1"),
        ("", "is not a JSON configuration: Expecting value: line 1 column 1"),
        ("[1]", "is not a JSON configuration: must hold one JSON object"),
        ("\xff", "is not a JSON configuration"),
        ('{"config": 3}', "config=3 must hold the fields, by name"),
        ('{"config": {}, "num_steps": 5}', "num_steps must stand inside of 'config'"),
        ('{"config": {}, "num_step": 5}', "num_step must stand inside of 'config'"),
        ('{"config": {}, "model": {}}', "model must stand inside of 'config'"),
    ],
)
def test_bad_config_files(tmp_path, text, message):
    flag = write(tmp_path, text)
    if text == "\xff":
        (tmp_path / "config.json").write_bytes(b"\xff\xfe{")
    found = message_of(flag)
    assert found.startswith(f"config file {tmp_path / 'config.json'}")
    assert message in found


def test_a_directory_is_no_config_file(tmp_path):
    assert message_of(f"--config={tmp_path}") == (
        f"config file {tmp_path} cannot be read: Is a directory"
    )


def test_all_problems_at_once(tmp_path):
    flag = write(tmp_path, '{"seed": -1, "steps": 3}')
    found = message_of(flag, "steps=5", "--stesp=5", "--num_steps=1e3", "--model=x", "--lr=1")
    assert [line.split(" ")[2] for line in found.splitlines()[1:]] == [
        "'steps=5'",
        "--stesp=5",
        "--lr=1",
        "--model=x",
        "config",
        "config",
        "--num_steps=1e3",
    ]


# What works


def test_defaults():
    assert parse() == ExperimentConfig()
    assert parse().optimizer.warmup_steps == 10


@pytest.mark.parametrize(
    ("words", "path", "value"),
    [
        (["--num_steps=5"], "num_steps", 5),
        (["--num_steps", "5"], "num_steps", 5),
        (["-num_steps=5"], "num_steps", 5),
        (["--num_steps=10.0"], "num_steps", 10),
        (["--num_steps=1_000"], "num_steps", 1000),
        (["--num_steps=3", "--num_steps=4"], "num_steps", 4),
        (["--optimizer.learning_rate=3e-4"], "optimizer.learning_rate", 3e-4),
        (["--optimizer.weight_decay=0"], "optimizer.weight_decay", 0.0),
        (["--optimizer=lion"], "optimizer.name", "lion"),
        (["--optimizer=lion", "--optimizer.name=sgd"], "optimizer.name", "sgd"),
        (["--optimizer.name=sgd", "--optimizer=lion"], "optimizer.name", "lion"),
        (["--evaluate"], "evaluate", True),
        (["--evaluate=true"], "evaluate", True),
        (["--evaluate", "--noevaluate"], "evaluate", False),
        (["--evaluate=False"], "evaluate", False),
        (["--nodata.shuffle"], "data.shuffle", False),
        (["--data.noshuffle"], "data.shuffle", False),
        (["--data.noshuffle", "--data.shuffle"], "data.shuffle", True),
        (["--data.shuffle", "--data.noshuffle"], "data.shuffle", False),
        (["--data.shuffle=false"], "data.shuffle", False),
        (["--model.widths=1,2, 3"], "model.widths", (1, 2, 3)),
        (["--model.widths="], "model.widths", ()),
        (["--workdir=./a b/\u00fc"], "workdir", "./a b/\u00fc"),
        (["--optimizer.freeze=^layers/(q|k)=?"], "optimizer.freeze", "^layers/(q|k)=?"),
        (["--model=big"], "model.num_layers", 12),
        (["--model=wide"], "model.widths", (1, 2)),
    ],
)
def test_good_command_lines(words, path, value):
    config = parse(*words)
    found = {leaf.path: leaf.value for leaf in leaves(config)}[path]
    assert (found, type(found)) == (value, type(value))


def test_precedence_is_defaults_preset_file_flags(tmp_path, caplog):
    flag = write(tmp_path, '{"model": {"num_layers": 6}, "seed": 7, "num_steps": 10.0}')
    config = parse("--num_steps=5", flag, "--model=big")
    assert config.model == NetConfig(num_layers=6, embed_dim=768)
    assert (config.seed, config.num_steps) == (7, 5)
    # The preset loses against the file: the user may not have meant that.
    assert "overrides model.num_layers of --model" in caplog.text


def test_the_resolved_configuration_is_taken_back(tmp_path):
    config = parse("--model=big", "--optimizer=sgd", "--optimizer.momentum=0.9", "--data.noshuffle")
    assert parse(write(tmp_path, dump(config, versions={"jax": "1"}))) == config
    assert parse(write(tmp_path, json.dumps(to_dict(config)))) == config
    assert parse(write(tmp_path, dump(config)), "--data.shuffle").data.shuffle


def test_a_flagfile_is_read_in_place(tmp_path):
    path = tmp_path / "flags.txt"
    path.write_text("# a comment\n--seed=3\n--data.noshuffle\n--num_steps=2\n")
    config = parse(f"--flagfile={path}", "--num_steps=9")
    assert (config.seed, config.data.shuffle, config.num_steps) == (3, False, 9)


def test_each_parse_stands_alone():
    parse("--seed=3", "--evaluate")
    assert parse() == ExperimentConfig()


# Flags of the experiment's own


def test_flags_that_the_experiment_defined_are_parsed_along():
    own = absl_flags.FlagValues()
    absl_flags.DEFINE_integer("temperature", 1, "of sampling", flag_values=own, short_name="t")
    absl_flags.DEFINE_boolean("loud", True, "noise", flag_values=own)
    config = parse("--seed=2", "-t", "3", "--noloud", own=own)
    assert (config.seed, own.temperature, own.loud) == (2, 3, False)
    assert "--temperature=x" in message_of("--temperature=x", own=own)
    assert message_of("--temprature=3", own=own).endswith("did you mean --temperature?")


def test_the_global_flags_are_marked_as_parsed():
    own = absl_flags.FlagValues()
    absl_flags.DEFINE_integer("temperature", 1, "of sampling", flag_values=own)
    with pytest.raises(absl_flags.UnparsedFlagAccessError):
        _ = own.temperature
    parse(own=own)
    assert own.temperature == 1
    # None means absl's global flags, with which libraries define theirs.
    flags.parse(["train.py"], ExperimentConfig)
    assert absl_flags.FLAGS.is_parsed()


def test_a_name_cannot_be_taken_twice():
    own = absl_flags.FlagValues()
    absl_flags.DEFINE_integer("seed", 1, "mine", flag_values=own)
    with pytest.raises(TypeError, match="defines --seed, which the configuration has too"):
        parse(own=own)

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Clash(RunConfig):
        config: str = field("", help="taken")

    with pytest.raises(TypeError, match="cannot have the name config"):
        flags.parse(["train.py"], Clash)


# Help


@pytest.mark.parametrize("word", ["--help", "--helpfull", "--helpshort"])
def test_help_exits_with_0_whatever_else_is_wrong(word, capsys):
    with pytest.raises(SystemExit) as caught:
        parse("steps=5", "--num_steps=x", word)
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith("Usage: train.py [--flag=value ...]")


@pytest.mark.parametrize("columns", [80, 100, 300])
def test_help_names_everything_and_fits(columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns + 1))
    own = absl_flags.FlagValues()
    absl_flags.DEFINE_integer("temperature", 1, "of sampling", flag_values=own)
    with pytest.raises(SystemExit):
        flags.parse(
            ["dir/train.py", "--help"],
            ExperimentConfig,
            presets=PRESETS,
            flag_values=own,
            description="Trains a model.\n\nIn five minutes.\n",
        )
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= min(columns, 100)
    for leaf in leaves(ExperimentConfig):
        shown = rf"\[no\]{leaf.path}" if leaf.type is bool else rf"{leaf.path}="
        assert re.search(rf"^  --{shown}", text, re.MULTILINE), leaf.path
    for line in (
        "Usage: train.py [--flag=value ...]",
        "In five minutes.",
        "devices and compiler",
        "optimizer",
        "  --optimizer.warmup_steps=10",
        "  --temperature=1 ",
        "  nano  the defaults",
        "  wide  embed_dim=512 widths=1,2",
    ):
        assert f"\n{line}" in f"\n{text}", line
    assert "(steps)" in text
    assert "(none | dots | full)" in text


def test_help_is_the_reviewed_text(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "101")
    with pytest.raises(SystemExit):
        flags.parse(["train.py", "--help"], RunConfig, flag_values=absl_flags.FlagValues())
    assert capsys.readouterr().out == (GOLDEN / "help.txt").read_text(), (
        "The help changed. Read it as a user would; if it is good, store it in "
        "tests/golden/help.txt."
    )


# Repeated flags


@dataclasses.dataclass(frozen=True, kw_only=True)
class AskConfig(Config):
    prompt: tuple[str, ...] = field(("a",), repeated=True, help="what to ask")
    stop: tuple[str, ...] = field((), repeated=True, choices=("x", "y,z"), help="where to end")


def ask(*words: str) -> AskConfig:
    return flags.parse(["ask.py", *words], AskConfig, flag_values=absl_flags.FlagValues())


def test_a_repeated_flag_gives_one_element_each_time():
    assert ask() == AskConfig(prompt=("a",), stop=())
    found = ask("--prompt=one, two", "--stop=y,z", "--prompt", "three", "--prompt=")
    assert found == AskConfig(prompt=("one, two", "three", ""), stop=("y,z",))
    with pytest.raises(ConfigError, match="must be one of x, y,z"):
        ask("--stop=x", "--stop=w")
    with pytest.raises(ConfigError, match="looks like a flag"):
        ask("--prompt", "--stop=x")


def test_a_repeated_flag_wins_over_a_file(tmp_path):
    file = write(tmp_path, '{"prompt": ["from", "file, whole"]}')
    assert ask(file).prompt == ("from", "file, whole")
    assert ask(file, "--prompt=b").prompt == ("b",)


def test_help_says_that_a_flag_may_be_repeated(capsys):
    with pytest.raises(SystemExit):
        ask("--help")
    assert "what to ask (may be given several times)" in capsys.readouterr().out
