"""Options that a run would not read are refused: by `fit`, and for a model of one's own."""

import looping
import optax
import pytest

import jaxtrain
from jaxtrain.config import OptimizerConfig, RunConfig
from jaxtrain.errors import ConfigError
from jaxtrain.main import Experiment, main


def fit(**options):
    config = RunConfig(num_steps=1, global_batch_size=8, **options.pop("config", {}))
    return jaxtrain.fit(looping.MODEL, looping.loss_fn, looping.TRAIN, config=config, **options)


@pytest.mark.parametrize(
    ("name", "value"), [("evaluate", True), ("audit", True), ("plan", "h100:1x8")]
)
def test_fit_trains_nothing_when_told_not_to_train(name, value):
    with pytest.raises(ConfigError, match=f"^{name}={value!r} is not for fit; call jaxtrain"):
        fit(config={name: value})


def test_options_of_the_optimizer_beside_an_own_one():
    options = {"optimizer": OptimizerConfig(learning_rate=0.5, clip_norm=2.0)}
    rule = r"^optimizer.learning_rate, optimizer.clip_norm would not be read.*\(tx\)"
    with pytest.raises(ConfigError, match=rule):
        fit(config=options, tx=optax.sgd(0.1))


def test_the_average_of_the_parameters_goes_with_an_own_optimizer():
    result = fit(config={"optimizer": OptimizerConfig(ema_decay=0.9)}, tx=optax.sgd(0.1))
    assert result.state.ema_params is not None


def test_simulated_devices_that_come_too_late():
    with pytest.raises(ConfigError, match=r"^num_cpu_devices=3 comes too late"):
        fit(config={"num_cpu_devices": 3})


@pytest.mark.parametrize("flag", ["--precision=bfloat16", "--remat=full"])
@pytest.mark.parametrize("is_read", [False, True])
def test_flags_for_the_model_that_build_does_not_look_at(flag, is_read, capsys):
    def build(config):
        if is_read:
            assert (config.precision, config.remat) != ("float32", "none")
        return Experiment(model=looping.MODEL, loss_fn=looping.loss_fn, train_data=looping.TRAIN)

    with pytest.raises(SystemExit) as ended:
        main(RunConfig, build, argv=["prog", "--num_steps=1", "--global_batch_size=8", flag])
    name, value = flag.removeprefix("--").split("=")
    message = f"error: {name}={value!r} would do nothing: this experiment's build() does not read"
    assert (message in capsys.readouterr().err) == (not is_read)
    assert ended.value.code == (0 if is_read else 2)
