import ast
import dataclasses
import json
import pathlib
import threading

import pytest

import jaxtrain
from jaxtrain.config import (
    CheckpointConfig,
    Config,
    Difference,
    OptimizerConfig,
    RunConfig,
    dump,
    field,
    from_dict,
    leaves,
    record_reads,
    replace_paths,
    resume_differences,
    summary,
    to_dict,
    unread,
    versions,
)
from jaxtrain.errors import ConfigError, ExitCode
from jaxtrain.values import nearest

GOLDEN = pathlib.Path(__file__).parent / "golden"


@dataclasses.dataclass(frozen=True, kw_only=True)
class NetConfig(Config):
    num_layers: int = field(4, minimum=1, help="layers")
    dropout: float = field(0.0, minimum=0, below=1, help="dropout rate")
    widths: tuple[int, ...] = field((8, 16), minimum=1, help="widths")
    tied: bool = field(True, help="tied head")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_layers > 8 and self.tied:
            raise ConfigError(f"num_layers={self.num_layers} needs tied=false")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExperimentConfig(RunConfig):
    model: NetConfig = field(default_factory=NetConfig)
    other: NetConfig = field(default_factory=lambda: NetConfig(num_layers=2))


# The classes


def test_defaults_are_the_reviewed_ones():
    text = json.dumps(to_dict(RunConfig()), indent=2) + "\n"
    golden = (GOLDEN / "run_config.json").read_text()
    assert text == golden, (
        "The defaults changed. If that is wanted, say so in CHANGELOG.md and store the new text "
        "in tests/golden/run_config.json."
    )


def test_fixed_fields_are_the_reviewed_ones():
    fixed = [leaf.path for leaf in leaves(RunConfig) if leaf.on_resume == "fixed"]
    optimizer = [leaf.path for leaf in leaves(OptimizerConfig, "optimizer.")]
    assert fixed == ["seed", "precision", *optimizer]


def test_every_field_has_help():
    assert [leaf.path for leaf in leaves(RunConfig) if not leaf.help] == []


def test_every_field_is_read_somewhere_in_the_package():
    read = set()
    for path in pathlib.Path(jaxtrain.__file__).parent.rglob("*.py"):
        if path.name != "config.py":
            tree = ast.parse(path.read_text())
            read |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    # Read through a property of the configuration.
    read |= {"nonfinite"} if "max_skipped" in read else set()
    dead = [leaf.path for leaf in leaves(RunConfig) if leaf.path.rpartition(".")[2] not in read]
    assert dead == []


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RunConfig(num_steps=-5), "num_steps=-5 must be at least 1 (steps)"),
        (lambda: RunConfig(num_steps=2**31), "num_steps=2147483648 must be at most 2147483647"),
        (lambda: RunConfig(num_steps="20"), "num_steps='20' must be a whole number"),
        (lambda: RunConfig(num_steps=1.5), "num_steps=1.5 must be a whole number"),
        (lambda: RunConfig(num_steps=True), "num_steps=true must be a whole number"),
        (lambda: RunConfig(num_steps=float("inf")), "num_steps=inf must be a whole number"),
        (lambda: RunConfig(seed=2**32), "seed=4294967296 must be at most 4294967295"),
        (lambda: RunConfig(seed=-1), "seed=-1 must be at least 0"),
        (lambda: RunConfig(evaluate=1), "evaluate=1 must be true or false"),
        (lambda: RunConfig(workdir=3), "workdir=3 must be text"),
        (lambda: RunConfig(global_batch_size=0), "global_batch_size=0 must be at least 1 (rows)"),
        (lambda: RunConfig(remat="False"), "remat=False must be one of none, dots, full"),
        (lambda: RunConfig(precision="bfloat"), "did you mean bfloat16?"),
        (lambda: RunConfig(nonfinite="ignore"), "nonfinite=ignore must be stop, or skip:N"),
        (lambda: RunConfig(nonfinite="skip:0"), "nonfinite=skip:0 must be stop, or skip:N"),
        (lambda: RunConfig(profile="7"), "profile=7 must be START:STOP"),
        (lambda: RunConfig(profile="7:7"), "profile=7:7 must be START:STOP"),
        (
            lambda: RunConfig(profile="5:9", num_steps=5),
            "profile=5:9 must start before the end, num_steps=5",
        ),
        (lambda: RunConfig(evaluate=True, audit=True), "plan, evaluate, audit and peek exclude"),
        (lambda: RunConfig(optimizer="lion"), "optimizer must be a OptimizerConfig"),
        (
            lambda: OptimizerConfig(learning_rate=float("nan")),
            "learning_rate=nan must be a finite number",
        ),
        (lambda: OptimizerConfig(learning_rate=0), "learning_rate=0.0 must be greater than 0"),
        (lambda: OptimizerConfig(b1=1), "b1=1.0 must be less than 1"),
        (lambda: OptimizerConfig(freeze="("), "freeze=( must be a regular expression"),
        (lambda: OptimizerConfig(name="muon"), "name=muon is not available"),
        (lambda: OptimizerConfig(name="adam"), "must be one of adamw, lion, sgd; did you mean"),
        (
            lambda: OptimizerConfig(momentum=0.9),
            "momentum=0.9 is read only with name=sgd, and name is adamw; leave momentum=0.0",
        ),
        (lambda: CheckpointConfig(keep_last=0), "keep_last=0 must be at least 1 (checkpoints)"),
        (lambda: NetConfig(widths=3), "widths=3 must be a list"),
        (lambda: NetConfig(widths=(8, 0)), "widths=8,0 must be at least 1"),
    ],
)
def test_bad_values_say_what_would_be_accepted(make, message):
    with pytest.raises(ConfigError) as caught:
        make()
    assert message in str(caught.value)
    assert caught.value.exit_code == ExitCode.CONFIG


def test_all_problems_are_listed_at_once():
    with pytest.raises(ConfigError) as caught:
        RunConfig(num_steps=0, seed=-1, precision="float16")
    assert [line.split()[0] for line in str(caught.value).splitlines()[1:]] == [
        "num_steps=0",
        "seed=-1",
        "precision=float16",
    ]


def test_values_are_brought_to_the_type_of_their_field():
    config = RunConfig(num_steps=10.0, optimizer=OptimizerConfig(learning_rate=1))
    assert (config.num_steps, type(config.num_steps)) == (10, int)
    assert type(config.optimizer.learning_rate) is float
    assert NetConfig(widths=[1, 2.0]).widths == (1, 2)


def test_fields_read_only_under_a_condition_keep_their_default_elsewhere():
    assert OptimizerConfig(name="sgd", momentum=0.9).momentum == 0.9
    assert OptimizerConfig(schedule="wsd", decay_fraction=0.5).decay_fraction == 0.5
    with pytest.raises(ConfigError, match=r"decay_fraction=0.5 is read only with schedule=wsd"):
        OptimizerConfig(schedule="cosine", decay_fraction=0.5)


def test_a_field_needs_a_default_and_a_declaration():
    with pytest.raises(TypeError, match="exactly one of default and default_factory"):
        field()

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Bare(Config):
        size: int = 3

    with pytest.raises(ConfigError, match=r"of Bare .*; write size = jaxtrain\.field\(3, help="):
        Bare()

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Plain(RunConfig):
        num_steps: int = 20

    line = r"write num_steps = jaxtrain\.config\.override\(RunConfig, 'num_steps', 20\)\."
    with pytest.raises(ConfigError, match=line):
        Plain()


def test_max_skipped():
    assert (RunConfig().max_skipped, RunConfig(nonfinite="skip:3").max_skipped) == (0, 3)


# To and from mappings


def test_round_trip_through_json():
    config = ExperimentConfig(
        num_steps=7,
        optimizer=OptimizerConfig(learning_rate=0.1 + 0.2),
        model=NetConfig(widths=(1,)),
    )
    stored = json.loads(dump(config, versions=versions()))
    assert from_dict(ExperimentConfig, stored["config"], source="test") == config
    assert stored["versions"]["jax"]


def test_from_dict_takes_dotted_paths_and_whole_floats():
    config = from_dict(ExperimentConfig, {"model.num_layers": 2, "num_steps": 10.0}, source="test")
    assert config == ExperimentConfig(num_steps=10, model=NetConfig(num_layers=2))


def test_from_dict_keeps_the_defaults_of_the_experiment():
    assert from_dict(
        ExperimentConfig, {"other": {"tied": False}}, source="test"
    ).other == NetConfig(num_layers=2, tied=False)


def test_from_dict_lists_every_problem():
    mapping = {
        "learing_rate": 1,
        "num_steps": "ten",
        "seed": None,
        "model": {"num_layer": 3, "dropout": 1.5, "widths": [1, "a"]},
        "optimizer": "lion",
        "model.tied": 0,
        "modle": dict.fromkeys("abcdefghijklmnop", 0),
    }
    with pytest.raises(ConfigError) as caught:
        from_dict(ExperimentConfig, mapping, source="the file")
    assert str(caught.value).splitlines() == [
        "the file: 9 problems:",
        "  learing_rate=1 is not a field; did you mean optimizer.learning_rate?",
        "  num_steps='ten' must be a whole number",
        "  seed=None must be a whole number",
        "  model.num_layer=3 is not a field; did you mean model.num_layers?",
        "  model.dropout=1.5 must be less than 1",
        "  model.widths=[1, 'a'] must be a whole number",
        "  optimizer=lion must hold the fields of optimizer, by name",
        "  model.tied=0 must be true or false",
        "  modle={'a': 0, 'b': 0, 'c': 0, 'd': 0, 'e': 0, 'f': 0, 'g': 0, ... is not a field; "
        "did you mean model?",
    ]


def test_the_same_path_twice_is_refused():
    with pytest.raises(ConfigError, match=r"model.num_layers is given twice"):
        from_dict(
            ExperimentConfig, {"model": {"num_layers": 2}, "model.num_layers": 3}, source="test"
        )


def test_rules_across_fields_name_their_section():
    with pytest.raises(ConfigError, match=r"model: num_layers=9 needs tied=false"):
        replace_paths(ExperimentConfig(), {"model.num_layers": 9})


def test_replace_paths():
    config = replace_paths(ExperimentConfig(seed=3), {"model.num_layers": 2, "num_steps": 5})
    assert config == ExperimentConfig(seed=3, num_steps=5, model=NetConfig(num_layers=2))
    with pytest.raises(
        ConfigError, match=r"model.num_layer=2 is not a field; did you mean model.n"
    ):
        replace_paths(config, {"model.num_layer": 2})


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("stesp", "num_steps"),
        ("steps", "num_steps"),
        ("batch_size", "global_batch_size"),
        ("lr", "optimizer.learning_rate"),
        ("optimizer.lr", "optimizer.learning_rate"),
        ("optimiser.b1", "optimizer.b1"),
        ("model.layers", "model.num_layers"),
        ("epochs", ""),
        ("xyzzy", ""),
    ],
)
def test_nearest(name, meant):
    assert nearest(name, [leaf.path for leaf in leaves(ExperimentConfig)]) == meant


# Resume


def test_resume_differences():
    saved = to_dict(ExperimentConfig())
    config = replace_paths(
        ExperimentConfig(),
        {
            "num_steps": 2000,
            "mesh": "data:2",
            "checkpoint.keep_last": 1,
            "seed": 1,
            "model.widths": (8,),
        },
    )
    fixed, free = resume_differences(saved, config)
    assert fixed == [Difference("seed", 0, 1), Difference("model.widths", (8, 16), (8,))]
    assert [d.path for d in free] == ["num_steps", "mesh", "checkpoint.keep_last"]
    assert str(fixed[1]) == "model.widths: 8,16 -> 8"
    assert resume_differences(json.loads(json.dumps(saved)), ExperimentConfig()) == ([], [])


def test_a_field_the_saved_run_did_not_know_had_its_default():
    saved = to_dict(ExperimentConfig())
    del saved["seed"], saved["model"]["tied"]
    saved["model"]["gone"] = 3
    fixed, free = resume_differences(saved, ExperimentConfig(model=NetConfig(tied=False)))
    assert fixed == [Difference("model.tied", True, False)]
    assert free == [Difference("model.gone", 3, None)]


# Reads


def test_reads_are_recorded_by_path_in_any_thread():
    config = ExperimentConfig()
    with record_reads() as reads:
        _ = config.num_steps, config.model.num_layers
        thread = threading.Thread(target=lambda: config.other.tied)
        thread.start()
        thread.join()
        assert config.max_skipped == 0
    assert reads == {"num_steps", "model.num_layers", "other.tied", "nonfinite"}
    assert "__getattribute__" not in vars(Config)
    _ = config.seed
    assert "seed" not in reads


def test_bookkeeping_is_not_a_read():
    config = ExperimentConfig()
    with record_reads() as reads:
        dataclasses.replace(config, seed=3)
        dataclasses.replace(config.model, num_layers=3)
        dataclasses.asdict(config)
        replace_paths(config, {"seed": 2})
        assert config == ExperimentConfig()
        _ = repr(config), hash(config), summary(config), to_dict(config), list(leaves(config))
        resume_differences(to_dict(config), config)
    assert reads == set()


def test_unread_leaves_out_what_does_not_apply():
    config = OptimizerConfig(name="sgd", schedule="constant")
    skipped = {"b1", "b2", "eps", "decay_fraction", "final_learning_rate_ratio"}
    paths = [leaf.path for leaf in leaves(config) if leaf.path not in skipped]
    assert unread(config, set()) == paths
    with record_reads() as reads:
        for path in paths[1:]:
            getattr(config, path)
    assert unread(config, reads) == ["name"]
    held = [path for path in unread(RunConfig(optimizer=config), reads) if "optimizer" in path]
    assert held == ["optimizer.name"]


def test_a_section_on_its_own_is_recorded_by_class():
    config = ExperimentConfig()
    with record_reads() as reads:
        _ = config.model.replace(num_layers=3).num_layers
    assert reads == {"NetConfig.num_layers"}
    assert not {"model.num_layers", "other.num_layers"} & set(unread(config, reads))
    assert "model.tied" in unread(config, reads)


# For the eye


def test_an_empty_text_is_seen_in_a_difference():
    assert str(Difference("bug", "", "extra")) == "bug: '' -> extra"


def test_summary_shows_the_essentials_and_the_changes():
    config = replace_paths(
        ExperimentConfig(workdir="runs/a b"),
        {"model.tied": False, "optimizer.warmup_steps": 10, "precision": "bfloat16"},
    )
    assert summary(config, width=90) == (
        "config  workdir=runs/a b  num_steps=1000  global_batch_size=32  accumulate_steps=1"
        "  seed=0\n"
        "        precision=bfloat16  mesh=fsdp:-1  optimizer.name=adamw\n"
        "        optimizer.learning_rate=0.001\n"
        "changed optimizer.warmup_steps=10 (0)  model.tied=false (true)"
    )
