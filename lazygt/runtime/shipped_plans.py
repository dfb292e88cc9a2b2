"""Shipped plans: the plans that a worker was sent, and their executors."""

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
from lazygt.runtime import custom_ops, graph_codec, kernels
from lazygt.runtime.compiling.artifacts import Cache
from lazygt.runtime.compiling.kernel_group import toolchain
from lazygt.runtime.executors.compiled import compiled, load
from lazygt.runtime.executors.cuda_graphs import graphs_of
from lazygt.runtime.executors.eager import EagerExecutor, code_of
from lazygt.runtime.executors.graphed import GraphedExecutor
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

# -- policy of malloc in a CPU worker: freed memory is kept, or returned to the kernel -------------
# Workers keep freed memory, so that a step finds the pages of the last one. There, blocks of one
# size replace each other. A run that gathers weights and scatters gradients alternates between
# whole tensors and blocks, which leaves holes that nothing fits: half as much memory again is
# kept for nothing. So such a worker returns large tensors to the kernel as they die.

#: Bytes from which a tensor is large.
LARGE = 1 << 20
_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of malloc.h


def takes_turns(graph: Graph) -> bool:
    """Return whether a graph gathers or scatters something large."""
    return any(
        node.op == LAUNCH
        and node.args[0] in ("all_gather", "reduce_scatter")
        and (meta := node.fresh[0]) is not None
        and meta.nbytes >= LARGE
        for node in graph.nodes
    )


def is_own() -> bool:
    """Return whether this process is a worker's, and not the client's as well."""
    return os.environ.get("LAZYGT_WORKER") == "1"


@cache
def give_back() -> bool:
    """Return large tensors to the kernel when they die, from now on, and free memory now.

    Returns:
        Whether malloc can do that: glibc's can.
    """
    libc = ctypes.CDLL(None)
    try:
        done: bool = libc.mallopt(_MMAP_THRESHOLD, LARGE) == 1
        libc.malloc_trim(0)
    except AttributeError:
        return False
    return done


# -- shipped plans: the plans that a worker was sent, and their executors --------------------------


class KnownPlan:
    """A plan as this worker knows it. The executor may be forgotten; the lists may not."""

    def __init__(self, own: bool) -> None:
        #: True if other ranks have other plans
        self.own = own
        self.inputs, self.frees = DeltaCodec(), DeltaCodec()
        self.params: tuple[Any, ...] = ()
        #: number of the process group in which the ranks have compared their plans
        self.checked = -1
        self.mismatch: Failure | None = None


class ShippedPlans:
    """The plans of one worker. Executors may be forgotten; the lists of a last run may not.

    Args:
        config: limits on kept executors, and the kind of code that runs plans.
    """

    def __init__(self, device: torch.device, config: Config) -> None:
        self._device = device
        #: device that the code of foreign ops is loaded for; None: they are never called
        self.ops_device: torch.device | None = device
        self.executors: Recent[bytes, EagerExecutor] = Recent(
            config.max_plans, config.max_plan_bytes
        )
        self.known: dict[bytes, KnownPlan] = {}
        #: templates of the kept plans
        self.templates: WeakValueDictionary[bytes, PlanTemplate] = WeakValueDictionary()
        self.make_code = code_of(config.plan_code)
        self._graphs = graphs_of(device, config.cuda_graphs, config.max_cuda_graph_bytes)
        self._cache = Cache(config.cache_dir)
        self._takes_code = config.ship_code

    def clear(self) -> None:
        """Forget all executors: their plans are asked for again."""
        self.executors.clear()

    def begin_anew(self) -> None:
        """Forget the lists of last runs: the next runs come complete."""
        for known in self.known.values():
            known.inputs, known.frees, known.params = DeltaCodec(), DeltaCodec(), ()

    def take(self, message: Ship, frames: Sequence[Buffer]) -> Swapped | None:
        """Take a plan; return the error if it was to run compiled and does not.

        Raises:
            ProtocolError: it does not match its name, or is no program.
        """
        digest = message.digest
        if graph_codec.plan_name(message.template, message.sizes, message.salt) != digest:
            raise ProtocolError("a plan's content does not match its name")
        template = self._template(message.template, frames)
        plan = None if template is None else _sized(template, message.sizes)
        for old in message.forget:
            self.executors.drop(old)
            self.known.pop(old, None)
        if message.fresh or digest not in self.known:
            self.known[digest] = KnownPlan(bool(message.salt))
        if plan is None:
            self.executors.drop(digest)  # its run asks for it
        else:
            executor = EagerExecutor(plan, self._device, code=self.make_code, template=template)
            if self._device.type == "cpu" and is_own() and takes_turns(plan.steps.graph):
                give_back()
            size = plan.outline.nbytes + sum(map(len, frames[2:]))
            self._keep(digest, executor, size)
        swapped = self.swap(Swap(digest, message.groups)) if message.groups else None
        return swapped if swapped is not None and swapped.error else None

    def _template(self, name: bytes, frames: Sequence[Buffer]) -> PlanTemplate | None:
        """Return the template of this name, which lives as long as its plans; None: forgotten."""
        if len(frames) == 1:
            return self.templates.get(name)
        if len(frames) not in (2, 3) or graph_codec.template_name(frames[1]) != name:
            raise ProtocolError("a template's content does not match its name")
        template = self.templates.get(name)
        if template is None:
            # the owner of the channel sends plans, and so the code of foreign ops
            code = frames[2:]
            ops = custom_ops.load_ops(code[0], self.ops_device, self._takes_code) if code else []
            template = self.templates[name] = _checked(frames[1])
            template.keeps = ops
        return template

    def swap(self, message: Swap) -> Swapped:
        """Replace fused nodes by compiled groups, from the next run of the plan on."""
        digest = message.digest
        executor = self.executors.get(digest)
        if executor is None:
            return Swapped(digest)  # forgotten; it is swapped when it comes again
        try:
            plan = executor.plan
            made = compiled(plan, self._device, message.groups, self._cache, self.make_code)
            self._keep(digest, made, plan.outline.nbytes)
        except Exception as error:  # noqa: BLE001 - reported to the client; the tier below stays
            return Swapped(digest, in_one_line(error))
        return Swapped(digest)

    def install(self, message: Install, buffers: Sequence[Buffer]) -> Installed:
        """Keep an artifact from another host, or report whether it is here and can be loaded."""
        key, theirs = message.key, message.toolchain
        if not self._takes_code:
            return Installed(key, error="its worker takes no code (LAZYGT_SHIP_CODE=0)")
        try:
            if theirs != (here := toolchain(self._device.type)):
                raise ValueError(f"code is compiled for {theirs!r}, and this is {here!r}")
            if buffers:
                record, code = buffers
                self._cache.take(key, bytes(record), bytes(code))
            lacks = bool(key) and self._cache.find(key) is None
            if key and not lacks:
                load(self._cache.code(key), self._device)
            return Installed(key, lacks)
        except Exception as error:  # noqa: BLE001 - reported to the client; nothing is compiled
            return Installed(key, error=in_one_line(error))

    def _keep(self, digest: bytes, executor: EagerExecutor, size: int) -> None:
        """Keep a plan's executor; with CUDA graphs, wrap it until it is captured."""
        if self._graphs is not None:
            executor = GraphedExecutor(executor, self._graphs)
        self.executors.keep(digest, executor, size)

    def executor(self, digest: bytes) -> EagerExecutor | None:
        """Return the current executor of a plan; None: it is forgotten."""
        executor = self.executors.get(digest)
        given_up = isinstance(executor, GraphedExecutor) and executor.given_up
        return executor.plain if executor is not None and given_up else executor

    def news(self, digest: bytes) -> list[Relaid | Captured]:
        """Return the messages to send before the answer to a plan's run.

        They report results with other strides than the plan has, and the state of its CUDA graphs.
        """
        executor = self.executors.get(digest)
        if executor is None:
            return []
        told: list[Relaid | Captured] = []
        plain = executor.plain
        rows, plain.interpreter.relaid = plain.interpreter.relaid, []
        # in compiled plans nodes have other numbers; their steps were compared before
        if rows and plain.schedule is plain.plan.steps:
            told.append(Relaid(digest, tuple(rows)))
        if isinstance(executor, GraphedExecutor):
            captured, executor.news = executor.news, None
            if captured is not None:
                told.append(structs.replace(captured, digest=digest))
        return told


def _checked(data: Buffer) -> PlanTemplate:
    """Decode and check a template that was sent.

    Raises:
        ProtocolError: it can't be run.
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


def _sized(template: PlanTemplate, sizes: Sizes) -> Plan:
    """Build the plan of a template in these sizes.

    Raises:
        ProtocolError: it has no such sizes.
    """
    try:
        check_sizes(template.symbolic, sizes)
    except ValueError as error:
        raise ProtocolError(f"not the sizes of a plan: {error}") from error
    return Plan(form=(template, sizes))
