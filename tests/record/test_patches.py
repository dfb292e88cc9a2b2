"""What of torch's is replaced: all of it is listed and in force, and put back with the session."""

from typing import Any

import pytest
import torch

import lazygt
from lazygt.record import device, tensor
from lazygt.record.patches import Patch, Patches
from lazygt.record.session_patches import FLAG_PATCHES as FLAG_SETTERS

PYTHON = """\
torch.autograd.function._HookMixin._register_hook
torch.autograd.graph.saved_tensors_hooks.__init__"""
NATIVE = """\
torch.Tensor.numpy
torch.Tensor.__array__
torch.Tensor.__deepcopy__
torch.Tensor.__reduce_ex__
torch.Tensor.__repr__
torch.Tensor.__format__
torch.Tensor.untyped_storage
torch.Tensor.data_ptr
torch.Tensor.is_shared
torch.Tensor.share_memory_
torch.nn.parameter.Parameter.__deepcopy__
torch.nn.parameter.Parameter.__reduce_ex__
torch.nn.parameter.Parameter.__repr__
torch.Tensor.placements
torch.Tensor._repr_html_
torch.Tensor._repr_mimebundle_"""
ALWAYS = """\
torch.autograd._engine_run_backward
torch._has_compatible_shallow_copy_type
torch.Tensor._make_subclass
torch.Tensor.as_subclass
torch.utils.data.dataloader._MultiProcessingDataLoaderIter.__init__
torch.utils.data.dataloader._MultiProcessingDataLoaderIter._process_data
torch.optim.asgd.asgd
torch.optim.nadam.nadam
torch.optim.radam.radam
torch.optim.adamax.adamax
torch.amp.autocast_mode.autocast.__init__
torch.amp.autocast_mode.autocast.__enter__
torch.amp.autocast_mode.autocast.__exit__
torch.optim.swa_utils._get_foreach_kernels_supported_devices
torch.library.Library.define
torch.library.Library.impl
multiprocessing.queues.Queue.put
multiprocessing.queues.JoinableQueue.put"""
IN_SESSIONS = """\
torch.Tensor.data
torch.nn.parameter.Parameter.__new__
torch.jit._script.ScriptModule._apply
torch.cuda._lazy_init
torch.cuda.synchronize
torch.nn.parallel.data_parallel.DataParallel.__init__
torch.nn.parallel.distributed.DistributedDataParallel.__init__"""


def names(patches: Patches) -> list[str]:
    return [str(patch).partition(":")[0] for patch in patches.patches]


def in_force(patches: Patches) -> list[bool]:
    return [vars(patch.owner).get(patch.name) is patch.ours for patch in patches.patches]


def test_every_patch_is_listed_with_reason() -> None:
    of_recorder = PYTHON if tensor.NATIVE is None else NATIVE
    assert sorted(names(device._ALWAYS)) == sorted([*ALWAYS.split(), *of_recorder.split()])
    assert names(device._IN_SESSIONS) == [*IN_SESSIONS.split(), *names(Patches(*FLAG_SETTERS))]
    setters = {patch.name for patch in FLAG_SETTERS}
    assert {"_set_deterministic_algorithms", "_set_default_dtype", "set_num_threads"} < setters
    assert all(patch.why for patch in (*device._ALWAYS.patches, *device._IN_SESSIONS.patches))
    assert all(in_force(device._ALWAYS))


def test_sessions_restore_patched_attributes() -> None:
    before = [vars(patch.owner).get(patch.name) for patch in device._IN_SESSIONS.patches]
    with lazygt.session(launcher="inline"):
        with lazygt.session(launcher="inline"):
            assert all(in_force(device._IN_SESSIONS))
        assert all(in_force(device._IN_SESSIONS)), "the outer session is still open"
    after = [vars(patch.owner).get(patch.name) for patch in device._IN_SESSIONS.patches]
    assert all(ours is theirs for ours, theirs in zip(before, after, strict=True))


class Base:
    inherited = "torch's"


class Owner(Base):
    own = "torch's"


@pytest.mark.parametrize("name", ["own", "inherited"])
def test_a_patch_is_made_once_and_undone(name: str) -> None:
    patches = Patches(Patch(Owner, name, "ours", "a test"))
    here = dict(vars(Owner))
    for _ in range(2):
        patches.apply()
        patches.apply()
        assert getattr(Owner, name) == "ours"
        patches.undo()
        patches.undo()
        assert dict(vars(Owner)) == here
        assert getattr(Owner, name) == "torch's"


def test_patch_text_names_target_and_reason() -> None:
    patch: Any = Patch(torch.Tensor, "data", None, "a reason")
    assert str(patch) == "torch.Tensor.data: a reason"
    assert str(Patch(torch.optim, "x", None, "y")) == "torch.optim.x: y"
