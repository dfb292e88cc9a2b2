"""Which ops have rules: those of training steps (with clipping and AdamW), and core aten."""

from __future__ import annotations

import pytest
import torch

from lazygt.graph.node import Node
from lazygt.passes.sharding.rules import RULES, has_rule, strategies_of
from tests.support.versions import TORCH

FORWARD = """
_log_softmax _scaled_dot_product_flash_attention_for_cpu _softmax _unsafe_view add.Tensor
add_.Tensor addmm arange bernoulli_.float bmm clone convolution detach div_.Scalar embedding
empty.memory_format empty_like eq.Scalar expand gelu masked_fill.Scalar max_pool2d_with_indices
mean.dim mkldnn_rnn_layer mm mul.Tensor native_batch_norm native_layer_norm nll_loss_forward
ones relu select.int sigmoid_ split.Tensor stack t tanh tanh_ transpose.int tril unbind.int
unsafe_split.Tensor view zeros
"""
BACKWARD = """
_log_softmax_backward_data _scaled_dot_product_flash_attention_for_cpu_backward
_softmax_backward_data _unsafe_view add.Tensor bmm cat clone convolution_backward detach div.Scalar
embedding_dense_backward expand gelu_backward masked_fill.Scalar max_pool2d_with_indices_backward
mkldnn_rnn_layer_backward mm mul.Tensor native_batch_norm_backward native_layer_norm_backward
nll_loss_backward ones_like select.int select_backward sigmoid_backward stack sum.dim_IntList t
tanh_backward threshold_backward transpose.int view
"""
STEP = """
add.Tensor add_.Tensor addcdiv_ addcmul_ clamp div.Tensor lerp_.Scalar lift_fresh linalg_vector_norm
mul.Tensor mul_.Tensor reciprocal sqrt stack zeros zeros_like _local_scalar_dense
_foreach_add_.Scalar _foreach_add_.Tensor _foreach_addcdiv_.ScalarList _foreach_addcmul_.Scalar
_foreach_div_.ScalarList _foreach_lerp_.Scalar _foreach_mul_.Scalar _foreach_mul_.Tensor
_foreach_norm.Scalar _foreach_sqrt _fused_adamw_
"""
#: The client waits for its answer; draws for the whole.
WITHOUT = ["_local_scalar_dense", "bernoulli_.float"]
#: Draws for the whole, sizes that depend on values or change, one number, and composites that no
#: program reaches; of distances within one set, and of values put where a mask is, each needs all.
CORE_WITHOUT = """
_local_scalar_dense.default _pdist_forward.default masked_scatter.default nonzero.default
rand.default randn.default randperm.default resize_.default scalar_tensor.default
"""


def full_name(name: str) -> str:
    return f"aten.{name}" if "." in name else f"aten.{name}.default"


def test_ops_of_training_steps() -> None:
    names = sorted({*FORWARD.split(), *BACKWARD.split(), *STEP.split()})
    assert len(names) == 86
    assert [name for name in names if not has_rule(full_name(name))] == WITHOUT


@pytest.mark.skipif(TORCH != (2, 13), reason="each release calls a few ops more or less core")
def test_ops_of_core_aten() -> None:
    names = core_ops()
    assert len(names) > 180
    without = [name.removeprefix("aten.") for name in names if not has_rule(name)]
    assert without == CORE_WITHOUT.split()


def core_ops() -> list[str]:
    found = set()
    for schema in torch._C._jit_get_all_schemas():
        space, _, name = schema.name.partition("::")
        packet = getattr(torch.ops.aten, name, None) if space == "aten" else None
        overload = schema.overload_name or "default"
        if packet is not None and overload in packet.overloads():
            op = getattr(packet, overload)
            if torch.Tag.core in op.tags and not name.startswith("sym_"):
                found.add(str(op))
    return sorted(found)


def test_rules_name_ops_that_exist() -> None:
    """Ops that this version of torch does not have would never be found wrong."""
    missing = [op for op in RULES if not op.startswith("lazygt.") and not exists(op)]
    assert missing == []


def exists(op: str) -> bool:
    _, name, overload = op.split(".")
    return overload in getattr(torch.ops.aten, name).overloads()


def test_an_op_without_a_rule_is_run_on_whole_values() -> None:
    node = Node("aten.linalg_inv_ex.default", ())
    assert [str(strategy) for strategy in strategies_of(node, (), 2)] == ["() -> ()"]
