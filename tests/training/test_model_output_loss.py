"""The loss of the model itself."""

from __future__ import annotations

import pytest
from torch import nn

from hp_core import InputError, ModelOutputLoss
from hp_core.testing.models import tiny_model


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_vl_moe"])
def test_a_model_that_balances_its_routers_for_each_micro_batch_is_refused(family):
    model = tiny_model(family)
    ModelOutputLoss().bind_model(model, None)
    model.config.get_text_config().output_router_logits = True
    with pytest.raises(InputError, match=r"adds a router loss to its own.*write loss_fn: causal_lm"):
        ModelOutputLoss().bind_model(model, None)
    model.config.get_text_config().router_aux_loss_coef = 0.0
    ModelOutputLoss().bind_model(model, None)


def test_any_other_model_is_taken():
    ModelOutputLoss().bind_model(tiny_model("llama"), None)
    ModelOutputLoss().bind_model(nn.Linear(1, 1), None)
