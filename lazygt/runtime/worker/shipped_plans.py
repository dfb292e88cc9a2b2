"""Plans that a worker has received, and their executors."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from functools import cache
from typing import Any
from weakref import WeakValueDictionary

import torch
from msgspec import structs

from lazygt.config import Config
from lazygt.errors import GraphError, ProtocolError, in_one_line
from lazygt.graph.node import Graph
from lazygt.graph.placement import LAUNCH
from lazygt.graph.recent import Recent
from lazygt.graph.sizes import Sizes, check_sizes
from lazygt.runtime import custom_ops, graph_codec
from lazygt.runtime.executors import kernels
from lazygt.runtime.executors.compiled import Cache, compiled, load
from lazygt.runtime.executors.cuda_graphs import graphs_of
from lazygt.runtime.executors.eager import EagerExecutor, code_of
from lazygt.runtime.executors.graphed import GraphedExecutor
from lazygt.runtime.executors.kernel_group import toolchain
from lazygt.runtime.messages import (
    Captured,
    Failure,
    Install,
    Installed,
    Relaid,
    Ship,
    Swap,
    Swapped,
)
from lazygt.runtime.plan import Plan, PlanTemplate
from lazygt.runtime.wire import Buffer, DeltaCodec

# -- malloc policy of a CPU worker -----------------------------------------------------------------
# By default malloc retains freed memory, so that a step reuses the pages of the last one. A run
# that gathers weights and scatters gradients alternates between full tensors and shards. That
# fragments the heap: resident memory grows by half. So the worker of such a plan returns the
# memory of large tensors to the kernel when they are freed.

#: Bytes from which a tensor is large.
LARGE = 1 << 20
_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of malloc.h


def gathers_or_scatters(graph: Graph) -> bool:
    """Return whether a graph has an all-gather or reduce-scatter of a large tensor."""
    return any(
        node.op == LAUNCH
        and node.args[0] in ("all_gather", "reduce_scatter")
        and (meta := node.fresh[0]) is not None
        and meta.nbytes >= LARGE
        for node in graph.nodes
    )


def is_worker_process() -> bool:
    """Return whether this process is a worker, not a client with an inline worker."""
    return os.environ.get("LAZYGT_WORKER") == "1"


@cache
def return_large_frees() -> bool:
    """Make malloc return the memory of large tensors to the kernel when they are freed.

    Returns:
        True if malloc supports that (glibc's does).
    """
    libc = ctypes.CDLL(None)
    try:
        done: bool = libc.mallopt(_MMAP_THRESHOLD, LARGE) == 1
        libc.malloc_trim(0)
    except AttributeError:
        return False
    return done


# -- received plans --------------------------------------------------------------------------------


class KnownPlan:
    """Per-plan state of a worker that survives the eviction of the executor.

    Attributes:
        inputs, frees: delta codecs of the ids of a run's inputs, and of the values freed by it.
        params: run-time numbers of the last run.
        mismatch: failure of each run, if the ranks' plans launch different collectives.
    """

    def __init__(self, plans_differ: bool) -> None:
        #: True if ranks have different plans
        self.plans_differ = plans_differ
        self.inputs, self.frees = DeltaCodec(), DeltaCodec()
        self.params: tuple[Any, ...] = ()
        #: number of the process group in which the ranks have compared their plans
        self.checked = -1
        self.mismatch: Failure | None = None


class ShippedPlans:
    """Plans of one worker, with an LRU cache of executors.

    Args:
        config: limits of the cache, and the kind of code that runs plans.
    """

    def __init__(self, device: torch.device, config: Config) -> None:
        self._device = device
        #: device that the code of custom ops is loaded for; None: they are never called
        self.ops_device: torch.device | None = device
        self.executors: Recent[bytes, EagerExecutor] = Recent(
            config.max_plans, config.max_plan_bytes
        )
        #: name of a plan -> its state
        self.known: dict[bytes, KnownPlan] = {}
        #: templates of the cached plans
        self.templates: WeakValueDictionary[bytes, PlanTemplate] = WeakValueDictionary()
        self.make_code = code_of(config.plan_code)
        self._graphs = graphs_of(device, config.cuda_graphs, config.max_cuda_graph_bytes)
        self._artifacts = Cache(config.cache_dir)
        self._accepts_code = config.ship_code

    def clear(self) -> None:
        """Evict all executors; their plans are requested again when they run."""
        self.executors.clear()

    def reset_codecs(self) -> None:
        """Reset the delta codecs: the next runs send full lists of ids."""
        for known in self.known.values():
            known.inputs, known.frees, known.params = DeltaCodec(), DeltaCodec(), ()

    def take(self, message: Ship, frames: Sequence[Buffer]) -> Swapped | None:
        """Receive a plan, and build its executor.

        Returns:
            The answer of a failed swap to compiled code; else None.

        Raises:
            ProtocolError: the content does not match its name, or is no program.
        """
        digest = message.digest
        if graph_codec.plan_name(message.template, message.sizes, message.salt) != digest:
            raise ProtocolError("a plan's content does not match its name")
        template = self._template(message.template, frames)
        plan = None if template is None else _plan_in_sizes(template, message.sizes)
        for old in message.forget:
            self.executors.drop(old)
            self.known.pop(old, None)
        if message.fresh or digest not in self.known:
            self.known[digest] = KnownPlan(bool(message.salt))
        if plan is None:
            self.executors.drop(digest)  # requested again when it runs
        else:
            executor = EagerExecutor(plan, self._device, code=self.make_code, template=template)
            if (
                self._device.type == "cpu"
                and is_worker_process()
                and gathers_or_scatters(plan.steps.graph)
            ):
                return_large_frees()
            size = plan.outline.nbytes + sum(map(len, frames[2:]))
            self._cache_executor(digest, executor, size)
        swapped = self.swap(Swap(digest, message.groups)) if message.groups else None
        return swapped if swapped is not None and swapped.error else None

    def _template(self, name: bytes, frames: Sequence[Buffer]) -> PlanTemplate | None:
        """Return the template of this name, decoded if it was sent; None: evicted."""
        if len(frames) == 1:
            return self.templates.get(name)
        if len(frames) not in (2, 3) or graph_codec.template_name(frames[1]) != name:
            raise ProtocolError("a template's content does not match its name")
        template = self.templates.get(name)
        if template is None:
            # plans, and so code of custom ops, come only from the owner of the channel
            code = frames[2:]
            ops = custom_ops.load_ops(code[0], self.ops_device, self._accepts_code) if code else []
            template = self.templates[name] = _decoded_template(frames[1])
            template.keeps = ops
        return template

    def swap(self, message: Swap) -> Swapped:
        """Replace fused nodes by compiled groups, from the next run of the plan on."""
        digest = message.digest
        executor = self.executors.get(digest)
        if executor is None:
            return Swapped(digest)  # evicted; swapped when it is sent again
        try:
            plan = executor.plan
            compiled_executor = compiled(
                plan, self._device, message.groups, self._artifacts, self.make_code
            )
            self._cache_executor(digest, compiled_executor, plan.outline.nbytes)
        except Exception as error:  # noqa: BLE001 - reported to the client; the tier below stays
            return Swapped(digest, in_one_line(error))
        return Swapped(digest)

    def install(self, message: Install, buffers: Sequence[Buffer]) -> Installed:
        """Store an artifact from another host, or report whether it is cached and loads."""
        key, remote_toolchain = message.key, message.toolchain
        if not self._accepts_code:
            return Installed(key, error="its worker takes no code (LAZYGT_SHIP_CODE=0)")
        try:
            if remote_toolchain != (local_toolchain := toolchain(self._device.type)):
                raise ValueError(
                    f"code is compiled for {remote_toolchain!r}, and this is {local_toolchain!r}"
                )
            if buffers:
                record, code = buffers
                self._artifacts.store_copy(key, bytes(record), bytes(code))
            lacks = bool(key) and self._artifacts.find(key) is None
            if key and not lacks:
                load(self._artifacts.code(key), self._device)
            return Installed(key, lacks)
        except Exception as error:  # noqa: BLE001 - reported to the client; nothing is compiled
            return Installed(key, error=in_one_line(error))

    def _cache_executor(self, digest: bytes, executor: EagerExecutor, size: int) -> None:
        """Cache a plan's executor, wrapped if CUDA graphs are on."""
        if self._graphs is not None:
            executor = GraphedExecutor(executor, self._graphs)
        self.executors.keep(digest, executor, size)

    def executor(self, digest: bytes) -> EagerExecutor | None:
        """Return the executor for the next run of a plan; None if it was evicted.

        If CUDA graphs were given up, that is the one that they wrap.
        """
        executor = self.executors.get(digest)
        given_up = isinstance(executor, GraphedExecutor) and executor.given_up
        return executor.plain if executor is not None and given_up else executor

    def pending_reports(self, digest: bytes) -> list[Relaid | Captured]:
        """Return the messages to send before the answer to a plan's run; each is returned once.

        These report results with unexpected strides, and the decision about CUDA graphs.
        """
        executor = self.executors.get(digest)
        if executor is None:
            return []
        reports: list[Relaid | Captured] = []
        plain = executor.plain
        relaid, plain.interpreter.unexpected_strides = plain.interpreter.unexpected_strides, []
        # in compiled plans nodes have other numbers; their steps were compared before
        if relaid and plain.schedule is plain.plan.steps:
            reports.append(Relaid(digest, tuple(relaid)))
        if isinstance(executor, GraphedExecutor):
            captured, executor.pending_report = executor.pending_report, None
            if captured is not None:
                reports.append(structs.replace(captured, digest=digest))
        return reports


def _decoded_template(data: Buffer) -> PlanTemplate:
    """Decode and check a received template.

    Raises:
        ProtocolError: the data is no runnable program.
    """
    try:
        template = PlanTemplate.decoded(data)
        for op in template.ops:
            kernels.check(op)
    except ProtocolError:
        raise
    except GraphError as error:
        raise ProtocolError(str(error)) from error
    except KeyError as error:
        raise ProtocolError(f"unknown op {error.args[0]!r}") from error
    except Exception as error:
        raise ProtocolError(f"not a program: {type(error).__name__}: {error}") from error
    return template


def _plan_in_sizes(template: PlanTemplate, sizes: Sizes) -> Plan:
    """Build the plan of a template with these sizes.

    Raises:
        ProtocolError: the sizes do not fit the template.
    """
    try:
        check_sizes(template.symbolic, sizes)
    except ValueError as error:
        raise ProtocolError(f"not the sizes of a plan: {error}") from error
    return Plan(form=(template, sizes))
