"""The train step of a configuration, put together but not compiled."""

import pytest

from jaxtrain import RunConfig
from jaxtrain.errors import ConfigError
from jaxtrain.losses import lm_loss
from jaxtrain.mesh import make_mesh
from jaxtrain.models.transformer import TransformerConfig, transformer
from jaxtrain.program import train_program
from jaxtrain.rules import DEFAULT_RULES


def test_everything_that_does_not_divide_is_named_at_once():
    # Case B1: 2 key/value heads on tensor=4 and a batch of 19 on data=2.
    model = transformer(TransformerConfig(num_heads=8, num_kv_heads=2))
    config = RunConfig(global_batch_size=19, mesh="data:2,tensor:4")
    with pytest.raises(ConfigError) as raised:
        train_program(model, lm_loss(model), config, make_mesh(config.mesh), rules=DEFAULT_RULES)
    text = str(raised.value)
    for words in ("global_batch_size=19", "data=2", "attention/k", "attention/v", "tensor=4"):
        assert words in text, text
