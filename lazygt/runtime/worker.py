"""Worker: messages in, replies out. No socket, no process: the inline link uses it too."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakValueDictionary

import torch
from msgspec import structs

from lazygt.config import Config
from lazygt.errors import GraphError, ProtocolError, kind_of
from lazygt.graph.meta import TensorMeta
from lazygt.graph.recent import Recent
from lazygt.graph.sizes import Sizes, check_sizes
from lazygt.runtime import graph_codec, heap, kernels, wire
from lazygt.runtime.collectives import desync, group
from lazygt.runtime.compiling.artifacts import Cache
from lazygt.runtime.executors.compiled import compiled
from lazygt.runtime.executors.cuda_graphs import graphs_of
from lazygt.runtime.executors.eager import EagerExecutor, Outcome, TimedExecutor, code_of
from lazygt.runtime.executors.graphed import GraphedExecutor
from lazygt.runtime.executors.interpreter import Stopped
from lazygt.runtime.executors.native import NativeCode
from lazygt.runtime.foreign import loader
from lazygt.runtime.known_runs import KnownRuns, Unfinished
from lazygt.runtime.messages import (
    COLLECTIVE_ERROR,
    TO_WORKER,
    Done,
    Failure,
    Fetched,
    Left,
    Made,
    Need,
    Plain,
    Put,
    Relaid,
    Renew,
    Reply,
    Restore,
    Restored,
    Run,
    Several,
    Ship,
    Snap,
    Snapped,
    Swap,
    Swapped,
    Timings,
    Write,
    Wrote,
)
from lazygt.runtime.plan import Plan, PlanTemplate, Schedule
from lazygt.runtime.recovery.snapshot import Snapshots
from lazygt.runtime.store import Failed, Store, Value
from lazygt.runtime.wire import Buffer, DeltaCodec, Part, decode, encode

if TYPE_CHECKING:
    from lazygt.runtime.shared_memory import Arena

#: Ids of what a data-dependent node made: given by the worker, so above all of the client's.
DYNAMIC_IDS = 1 << 48


class Copier(Protocol):
    """Copies values to where a transfer of weights needs them."""

    def copy_packed(
        self, packed: Any, value_of: Callable[[int], torch.Tensor]
    ) -> tuple[tuple[int, ...], tuple[Any, ...]]:
        """Do what a request says; the checksums of what was copied, and handles to it."""

    def close(self) -> None:
        """Give back what it has."""


class _Known:
    """A plan as this worker knows it. The executor may be forgotten; the lists may not."""

    def __init__(self, own: bool) -> None:
        #: other ranks have other plans
        self.own = own
        self.inputs, self.frees = DeltaCodec(), DeltaCodec()
        self.params: tuple[Any, ...] = ()
        #: number of the process group in which all ranks have said what they are about to run
        self.checked = -1
        self.mismatch: Failure | None = None


class Worker:
    """Holds values and runs plans on them.

    Args:
        device: where to compute: ``cpu``, ``cuda`` ...
        upload: the client's arena, mapped here; large uploads are used where they lie.
        fetch: this worker's own arena, for large values on their way to the client.
        max_plans, max_plan_bytes: of the executors kept; an older one is asked for again (a NEED
            message). None: as LAZYGT_MAX_PLANS and LAZYGT_MAX_PLAN_BYTES say.
        shm_threshold: bytes from which a fetched value goes through the arena. None: as
            LAZYGT_SHM_THRESHOLD says.
        cache_dir: where compiled code lies. None: as LAZYGT_CACHE_DIR says.
        plan_code: what runs plans after their first run. None: as LAZYGT_PLAN_CODE says.
        cuda_graphs, max_cuda_graph_bytes: see ``CudaGraphs``. None: as LAZYGT_CUDA_GRAPHS and
            LAZYGT_MAX_CUDA_GRAPH_BYTES say.
        inline: the generator is the client's own, so it is lent to a run and put back.
        copier: makes what copies values for transfers, when one is asked for first.
        encode: makes what ``handle`` returns of a reply.
        snapshots: memory for copies of the values that outlive this process.
    """

    def __init__(
        self,
        device: str = "cpu",
        rank: int = 0,
        world_size: int = 1,
        upload: Arena | None = None,
        fetch: Arena | None = None,
        max_plans: int | None = None,
        max_plan_bytes: int | None = None,
        shm_threshold: int | None = None,
        inline: bool = False,
        cache_dir: str | None = None,
        plan_code: str | None = None,
        cuda_graphs: str | None = None,
        max_cuda_graph_bytes: int | None = None,
        copier: Callable[[torch.device], Copier] | None = None,
        encode: Callable[..., list[Buffer]] = encode,
        snapshots: Arena | None = None,
    ) -> None:
        self._encode = encode
        self.device = torch.device(device)
        self.rank, self.world_size = rank, world_size
        self.store = Store()
        self._upload, self._fetch = upload, fetch
        config = Config.load(
            max_plans=max_plans,
            max_plan_bytes=max_plan_bytes,
            shm_threshold=shm_threshold,
            cache_dir=cache_dir,
            plan_code=plan_code,
            cuda_graphs=cuda_graphs,
            max_cuda_graph_bytes=max_cuda_graph_bytes,
        )
        self._executors: Recent[bytes, EagerExecutor] = Recent(
            config.max_plans, config.max_plan_bytes
        )
        self._make_code = code_of(config.plan_code)
        self._graphs = graphs_of(self.device, config.cuda_graphs, config.max_cuda_graph_bytes)
        self.known_runs = KnownRuns(self.store) if self._make_code is NativeCode else None
        self._known: dict[bytes, _Known] = {}
        #: of the plans that are kept
        self._templates: WeakValueDictionary[bytes, PlanTemplate] = WeakValueDictionary()
        self._shm_threshold = config.shm_threshold
        self._cache = Cache(config.cache_dir)
        self._takes_code = config.ship_code
        self._waiting: list[list[Buffer]] = []
        self._make_copier = copier
        self._copier: Copier | None = None
        self._next_dynamic = DYNAMIC_IDS
        #: number of the process group, and the one that the client knows to be broken
        self._group, self._left = 0, -1
        self._generator_state = torch.default_generator.get_state() if inline else None
        self._first_generator = kernels.get_rng_state(self.device)
        self._snapshots = None
        if snapshots is not None:
            self._snapshots = Snapshots(snapshots, upload, self.device, world_size)

    # -- messages ------------------------------------------------------------------------

    def handle(self, frames: list[Buffer]) -> list[list[Buffer]]:
        """Act on one message; returns the replies.

        Raises:
            ProtocolError: the message is not of the schema, or names an unknown op.
        """
        if self.known_runs is not None and len(frames) == 1 and not self._waiting:
            told = self.known_runs.run(frames[0])
            if told is not None:
                done = told if type(told) is list else self.finished(told)
                return [*self._departure(), done] if self.world_size > 1 else [done]
        message = decode(frames, TO_WORKER)
        if self.known_runs is not None and type(message) is not Run:
            self.known_runs.forget()
        if self._waiting and not isinstance(message, Ship | Restore):
            self._waiting.append(_kept(frames))  # in its turn
            return []
        match message:
            case Run():
                return self._run_or_ask(message, frames)
            case Ship():
                self._plan(message, frames)
                waiting, self._waiting = self._waiting, []
                return [reply for message in waiting for reply in self.handle(message)]
            case Swap():
                return [self._encode(self._swap(message))]
            case Write():
                return [self._encode(self._write(message))]
            case Renew():
                self._renew(message)
            case Snap():
                return [self._encode(self._snap(message))]
            case Restore():
                return [self._encode(self._restore(message))]
        return []

    def _run_or_ask(self, run: Run, frames: list[Buffer]) -> list[list[Buffer]]:
        """Answer a run; if its plan is not known (any more), ask for that and let it wait."""
        if run.digest is not None and run.digest not in self._executors:
            self._waiting.append(_kept(frames))
            return [self._encode(Need(run.seq, run.digest))]
        done = self._run(run, frames[1:])
        told = [*self._departure(), *self._layouts(run.digest)]
        if self._graphs is not None and run.digest is not None:
            told += self._captures(run.digest)
        return [*told, done]

    def close(self) -> None:
        """Drop all values."""
        self.store.clear()
        self._executors.clear()
        if self.known_runs is not None:
            self.known_runs.forget()
        if self._copier is not None:
            self._copier.close()
            self._copier = None

    def _plan(self, message: Ship, frames: Sequence[Buffer]) -> None:
        digest = message.digest
        if graph_codec.plan_name(message.template, message.sizes, message.salt) != digest:
            raise ProtocolError("a plan's content does not match its name")
        template = self._template(message.template, frames)
        plan = None if template is None else _sized(template, message.sizes)
        for old in message.forget:
            self._executors.drop(old)
            self._known.pop(old, None)
        if message.fresh or digest not in self._known:
            self._known[digest] = _Known(bool(message.salt))
        if plan is None:
            self._executors.drop(digest)  # its run asks for it
        else:
            executor = EagerExecutor(plan, self.device, code=self._make_code, template=template)
            if self.device.type == "cpu" and heap.is_own() and heap.takes_turns(plan.steps.graph):
                heap.give_back()
            size = plan.outline.nbytes + sum(map(len, frames[2:]))
            self._keep(digest, executor, size)

    def _template(self, name: bytes, frames: Sequence[Buffer]) -> PlanTemplate | None:
        """The template of this name, which lives as long as a plan made of it; None: forgotten."""
        if len(frames) == 1:
            return self._templates.get(name)
        if len(frames) not in (2, 3) or graph_codec.template_name(frames[1]) != name:
            raise ProtocolError("a template's content does not match its name")
        template = self._templates.get(name)
        if template is None:
            ops = self._learn(frames[2]) if len(frames) > 2 else []
            template = self._templates[name] = _checked(frames[1])
            template.keeps = ops
        return template

    def _learn(self, definitions: Buffer) -> list[loader.LoadedOp]:
        """The foreign ops of a plan: the owner of the channel sends plans, and so their code."""
        return loader.load_ops(definitions, self.device, self._takes_code)

    def _swap(self, message: Swap) -> Swapped:
        """Put compiled groups into the place of fused nodes, from the next run of the plan on."""
        digest = message.digest
        executor = self._executors.get(digest)
        if executor is None:
            return Swapped(digest)  # forgotten; it is swapped when it comes again
        try:
            plan = executor.plan
            made = compiled(plan, self.device, message.groups, self._cache, self._make_code)
            self._keep(digest, made, plan.outline.nbytes)
        except Exception as error:  # noqa: BLE001 - reported to the client; the tier below stays
            return Swapped(digest, f"{type(error).__name__}: {error}")
        return Swapped(digest)

    def _keep(self, digest: bytes, executor: EagerExecutor, size: int) -> None:
        """Have a plan run by this executor; where there are CUDA graphs, until it is captured."""
        if self._graphs is not None:
            executor = GraphedExecutor(executor, self._graphs)
        self._executors.keep(digest, executor, size)

    def _executor(self, digest: bytes) -> EagerExecutor | None:
        """What runs a plan now; None: it is forgotten."""
        executor = self._executors.get(digest)
        given_up = isinstance(executor, GraphedExecutor) and executor.given_up
        return executor.plain if executor is not None and given_up else executor

    def _departure(self) -> list[list[Buffer]]:
        """What tells the client, once and before the answer to a run, that this rank has left its
        process group."""
        joined = group.current() if self.world_size > 1 else None
        if joined is None or not joined.left or self._left == self._group:
            return []
        self._left = self._group
        return [self._encode(Left(self._group))]

    def _layouts(self, name: bytes | None) -> list[list[Buffer]]:
        """What tells the client, before the answer to a plan's first run, which of its results
        lie otherwise than the plan says."""
        executor = None if name is None else self._executors.get(name)
        if name is None or executor is None:
            return []
        executor = executor.plain
        if not executor.interpreter.relaid:
            return []
        rows, executor.interpreter.relaid = executor.interpreter.relaid, []
        # in compiled plans nodes have other numbers; their steps were compared before
        plain = executor.schedule is executor.plan.steps
        return [self._encode(Relaid(name, tuple(rows)))] if plain else []

    def _captures(self, name: bytes) -> list[list[Buffer]]:
        """What tells the client, before the answer to a run, what became of a plan's CUDA
        graphs."""
        executor = self._executors.get(name)
        if not isinstance(executor, GraphedExecutor):
            return []
        news, executor.news = executor.news, None
        return [] if news is None else [self._encode(structs.replace(news, digest=name))]

    def _renew(self, message: Renew) -> None:
        """Join a new process group. All ranks are told so, when all have answered all runs."""
        joined = group.current()
        if joined is not None and joined.nccl:
            self._doubt(message.since)
        group.renew(message.number)
        self._group = message.number

    def _snap(self, message: Snap) -> Snapped:
        """Take a snapshot; from here on runs can be read without what was said before."""
        if self._snapshots is None:
            raise ProtocolError("this worker was started without memory for snapshots")
        self._begin_lists_anew()
        generator = self._generator_state
        if generator is None:
            generator = kernels.get_rng_state(self.device)
        return self._snapshots.take(message, self.store, self._next_dynamic, generator)

    def _restore(self, message: Restore) -> Restored:
        """Be as a snapshot has it. What this rank did since is done again, on all ranks."""
        if self._snapshots is None:
            raise ProtocolError("this worker was started without memory for snapshots")
        self._begin_lists_anew()
        self._waiting.clear()
        self._executors.clear()
        self._snapshots.restore(message, self.store)
        self._next_dynamic = message.next_dynamic or DYNAMIC_IDS
        self._set_generator(message.generator)
        if self.world_size > 1:
            group.renew(message.group)
            self._group = message.group
        return Restored(message.epoch)

    def _set_generator(self, state: bytes) -> None:
        """Have the generator of a snapshot again, or that of the beginning."""
        generator = wire.received(state) if state else self._first_generator
        if self._generator_state is None:
            kernels.set_rng_state(self.device, generator)
        else:
            self._generator_state = generator

    def _begin_lists_anew(self) -> None:
        for known in self._known.values():
            known.inputs, known.frees, known.params = DeltaCodec(), DeltaCodec(), ()

    def _doubt(self, since: int) -> None:
        """Mark values as failed: NCCL does not say which of them ranks have met for."""
        why = Failure(-1, COLLECTIVE_ERROR, "the ranks parted while it was being computed")
        for key in self.store.made_since(since):
            self.store.put(key, Failed(why))

    def _write(self, message: Write) -> Wrote:
        """Copy blocks of values to where a transfer needs them."""
        number = message.number
        try:
            if self._copier is None:
                if self._make_copier is None:
                    raise ProtocolError("this worker was started without a copier")
                self._copier = self._make_copier(self.device)
            checks, handles = self._copier.copy_packed(message.request, self._value)
        except Exception as error:  # noqa: BLE001 - reported to the client
            return Wrote(number, error=f"{type(error).__name__}: {error}")
        return Wrote(number, checks, "", handles)

    def _value(self, key: int) -> torch.Tensor:
        value = self.store.get(key)
        if isinstance(value, Failed):
            raise RuntimeError(f"the value could not be computed: {value.failure.detail}")
        return value

    # -- runs ----------------------------------------------------------------------------

    def _run(self, run: Run, buffers: Sequence[Buffer]) -> list[Buffer]:
        begin = time.monotonic_ns() if run.timed else 0
        done = Done(run.seq)
        for offset in run.releases:
            self._free(offset)
        spare = iter(buffers)
        for put in run.puts:
            self._receive(put, spare, done)
        if run.digest is None:
            done.releases.extend(self.store.free(run.frees[1] if run.frees else ()))
        else:
            self._execute(run, done)
        replies = self._fetched(run.fetches, done)
        if run.timed:
            steps = () if done.timings is None else done.timings.steps
            done.timings = Timings(begin, time.monotonic_ns(), steps)
        return self._encode(done, replies)

    def finished(self, told: Unfinished) -> list[Buffer]:
        """Finish a known run, of which the program has ended: it may have stopped at some node."""
        seq, base, digest, fetches, stopped = told
        done = Done(seq)
        if stopped is not None:
            executor = self._executor(digest)
            assert executor is not None
            outcome = executor.go_on(Stopped(*stopped), self._known[digest].params)
            self._settle(executor.plan, seq, base, outcome, done)
        return self._encode(done, self._fetched(fetches, done))

    def _fetched(self, fetches: Sequence[int], done: Done) -> list[Buffer]:
        """Note what is said of values that are wanted, whose bytes are returned."""
        replies: list[Buffer] = []
        for key in fetches:
            try:
                done.fetched.append(self._send(self.store.get(key), replies))
            except Exception as error:  # noqa: BLE001 - reported to the client
                done.fetched.append(Failure(-1, kind_of(error), str(error), done.seq))
        return replies

    def _free(self, offset: int) -> None:
        """The client does not read any more what it fetched from there."""
        try:
            if self._fetch is not None:
                self._fetch.free(offset)
        except ValueError as error:
            raise ProtocolError(f"what was not fetched can't be released: {error}") from error

    def _receive(self, put: Put, buffers: Iterator[Buffer], done: Done) -> None:
        meta = put.meta
        borrowed = put.offset
        if meta.offset or meta.extent != meta.numel:
            raise ProtocolError(f"the memory of a tensor that is sent has gaps: {meta}")
        nbytes = meta.nbytes
        if put.offset is not None:
            if self._upload is None:
                raise ProtocolError("a tensor in shared memory, but there is none")
            flat = self._upload.view(put.offset, nbytes)
        else:
            data = next(buffers, None)
            if data is None or len(data) != nbytes:
                raise ProtocolError(f"a tensor of {nbytes} bytes came without its bytes")
            flat = wire.received(data)
        try:
            value = _shaped(flat, meta)
        except RuntimeError as error:
            raise ProtocolError(f"there is no such tensor as {meta}: {error}") from error
        if self.device.type != "cpu" and put.offset is not None:
            # .to() has read the arena when it returns, so its room is free again at once
            done.releases.append(put.offset)
            borrowed = None
        self.store.put(put.id, value.to(self.device), borrowed)

    def _execute(self, run: Run, done: Done) -> None:
        assert run.digest is not None
        executor, known = self._executor(run.digest), self._known[run.digest]
        assert executor is not None
        ids = known.inputs.decode(run.inputs, run.base)
        frees = known.frees.decode(run.frees, run.base)
        if run.params is not None:
            known.params = run.params
        graph = executor.plan.outline
        if len(ids) != len(graph.inputs) or len(known.params) != len(graph.params):
            raise ProtocolError("a run with the wrong number of inputs or parameters")
        inputs = self._inputs(executor.schedule, ids, frees)
        done.releases.extend(self.store.free(frees))
        if run.timed:
            mark = None if self._snapshots is None else self._snapshots.mark
            executor = TimedExecutor(executor.plain, mark)
        if known.checked != self._group:
            known.checked = self._group
            known.mismatch = self._mismatch(executor.plan, run.seq, known.own)
        if known.mismatch is None:
            outcome = self._isolated(executor, inputs, known.params)
        else:
            outcome = _nothing(executor.plan, known.mismatch)
        if isinstance(executor, TimedExecutor):
            done.timings = Timings(0, 0, tuple(executor.times))
        self._settle(executor.plan, run.seq, run.base, outcome, done)
        lends = self._generator_state is not None and executor.plan.draws
        if self.known_runs is not None and known.mismatch is None and not (run.timed or lends):
            self.known_runs.keep(run.digest, known, executor)

    def _settle(self, plan: Plan, seq: int, base: int, outcome: Outcome, done: Done) -> None:
        """Keep what a run has made, and note what is to be said of it."""
        self.store.put_from(base, _stamped(outcome.outputs, seq))
        done.failures = [_with_seq(failure, seq) for failure in outcome.failures]
        if plan.asks:
            self._describe(outcome, done, seq, len(plan.steps.graph.nodes) - 1)

    def _mismatch(self, plan: Plan, run: int, own: bool) -> Failure | None:
        """Why the ranks must not run a plan that is new to them: they would not meet."""
        joined = group.current() if self.world_size > 1 else None
        return None if joined is None else desync.check(joined, run, plan.steps.graph, own)

    def _inputs(self, schedule: Schedule, ids: list[int], frees: list[int]) -> list[Value]:
        """The values of a run; what it overwrites without owning is copied."""
        inputs = self.store.get_all(ids)
        freed = set(frees)
        for position in schedule.writes.owned_inputs:
            value, key = inputs[position], ids[position]
            if type(value) is not Failed and (key not in freed or self.store.is_borrowed(key)):
                inputs[position] = kernels.clone(value)  # type: ignore[arg-type]
        return inputs

    def _isolated(
        self, executor: EagerExecutor, inputs: list[Value], params: tuple[Any, ...]
    ) -> Outcome:
        """Run; in the client's own process its generator is put back afterwards."""
        if self._generator_state is None or not executor.plan.draws:
            return executor.run(inputs, params)
        theirs = torch.default_generator.get_state()
        torch.default_generator.set_state(self._generator_state)
        try:
            return executor.run(inputs, params)
        finally:
            self._generator_state = torch.default_generator.get_state()
            torch.default_generator.set_state(theirs)

    def _describe(self, outcome: Outcome, done: Done, seq: int, last: int) -> None:
        """Tell the client what the data-dependent ``last`` node returned; tensors stay here."""

        if type(outcome.returned) is Failed:
            done.reply = Reply(failure=_with_seq(outcome.returned.failure, seq))
            return
        try:
            returned = tuple(map(self._told, outcome.returned))
            done.reply = Reply(returned, tuple(map(self._made, outcome.written)))
        except NotImplementedError as error:
            done.reply = Reply(failure=Failure(last, kind_of(error), str(error), seq))

    def _told(self, item: Any) -> Made | Several | Plain:
        if isinstance(item, torch.Tensor):
            return self._made(item)
        if isinstance(item, (list, tuple)):
            return Several(tuple(map(self._told, item)))
        return Plain(item)

    def _made(self, tensor: torch.Tensor) -> Made:
        """Keep a tensor under an id of this worker's own."""
        if tensor.layout != torch.strided:
            raise NotImplementedError(
                f"the result is a {tensor.layout} tensor; lazygt has dense strided ones only"
            )
        key = self._next_dynamic
        self._next_dynamic += 1
        value = _rooted(tensor)
        self.store.put(key, value)
        return Made(TensorMeta.of(value), key)

    def _send(self, value: Value, buffers: list[Buffer]) -> Fetched | Failure:
        if isinstance(value, Failed):
            return value.failure
        meta = TensorMeta.of(value)
        if meta.numel == 1 and meta.plain and meta.dtype in wire.NUMBERS:
            buffers.append(wire.NUMBERS[meta.dtype].pack(value.item()))
            return Fetched(meta)
        if value._is_zerotensor():
            value = torch.zeros_like(value)
        host = value.detach().cpu().resolve_conj().resolve_neg()
        meta = TensorMeta.of(host)
        if meta.offset or meta.extent != meta.numel:
            host = host.clone(memory_format=torch.contiguous_format)
            meta = TensorMeta.of(host)
        flat = host.as_strided(meta.shape, meta.stride) if meta == TensorMeta.of(host) else host
        flat = flat.contiguous() if meta.is_contiguous() else flat
        data = _bytes_of(flat, meta)
        if self._fetch is not None and data.numel() >= self._shm_threshold:
            slot = self._fetch.put(data)
            return Fetched(meta, slot.offset)
        buffers.append(data.numpy().data)
        return Fetched(meta)


def _kept(frames: Sequence[Buffer]) -> list[Buffer]:
    """A message that outlives the memory that it came in."""
    return [frame if isinstance(frame, Part) else bytes(frame) for frame in frames]


def _checked(data: Buffer) -> PlanTemplate:
    """The template that was sent.

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
    """The plan that a template is in these sizes.

    Raises:
        ProtocolError: it has no such sizes.
    """
    try:
        check_sizes(template.symbolic, sizes)
    except ValueError as error:
        raise ProtocolError(f"not the sizes of a plan: {error}") from error
    return Plan(form=(template, sizes))


def _nothing(plan: Plan, failure: Failure) -> Outcome:
    """The outcome of a plan that was not run."""
    failed = Failed(failure)
    return Outcome([failed for _ in plan.outline.outputs], [failure], failed, [])


def _bytes_of(host: torch.Tensor, meta: TensorMeta) -> torch.Tensor:
    """The elements of a dense CPU tensor in memory order, as bytes."""
    if meta.numel == 0:
        return torch.empty(0, dtype=torch.uint8)
    return host.as_strided((meta.numel,), (1,)).view(torch.uint8)


def _shaped(flat: torch.Tensor, meta: TensorMeta) -> torch.Tensor:
    if meta.numel == 0:
        return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype)
    return flat.view(meta.dtype).as_strided(meta.shape, meta.stride)


def _rooted(item: torch.Tensor) -> torch.Tensor:
    """A tensor that owns its memory from the beginning."""
    alone = item.storage_offset() == 0 and item.untyped_storage().nbytes() >= item.nbytes
    return item if alone and item._base is None else item.clone()


def _stamped(values: list[Value], seq: int) -> list[Value]:
    """The values; failures say in which run they happened."""
    if Failed not in map(type, values):
        return values
    return [Failed(_with_seq(v.failure, seq)) if isinstance(v, Failed) else v for v in values]


def _with_seq(failure: Failure, seq: int) -> Failure:
    if failure.seq:
        return failure
    return Failure(failure.node, failure.kind, failure.detail, seq)
