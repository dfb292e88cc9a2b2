"""Worker: messages in, replies out. No socket, no process: the inline link uses it too."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from lazygt.config import Config
from lazygt.errors import GraphError, ProtocolError, kind_of
from lazygt.graph import alias
from lazygt.graph.meta import TensorMeta
from lazygt.graph.recent import Recent
from lazygt.runtime import agreement, group, kernels, wire
from lazygt.runtime.compiling.artifacts import Cache
from lazygt.runtime.executors.compiled import compiled
from lazygt.runtime.executors.eager import EagerExecutor, Outcome
from lazygt.runtime.executors.timed import TimedExecutor
from lazygt.runtime.plan import Plan, Schedule
from lazygt.runtime.store import Failed, Store, Value
from lazygt.runtime.wire import Buffer, Done, Failure, Fetched, Prediction, Put, Run, Timings

if TYPE_CHECKING:
    from lazygt.runtime.shm import Arena
    from lazygt.transfer.writer import Writer

#: Ids of what a data-dependent node made: given by the worker, so above all of the client's.
DYNAMIC_IDS = 1 << 48


class _Known:
    """A plan as this worker knows it. The executor may be forgotten; the lists may not."""

    def __init__(self, own: bool) -> None:
        #: other ranks have other plans
        self.own = own
        self.inputs, self.frees = Prediction(), Prediction()
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
        inline: the generator is the client's own, so it is lent to a run and put back.
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
    ) -> None:
        self.device = torch.device(device)
        self.rank, self.world_size = rank, world_size
        self.store = Store()
        self._upload, self._fetch = upload, fetch
        config = Config.load(
            max_plans=max_plans,
            max_plan_bytes=max_plan_bytes,
            shm_threshold=shm_threshold,
            cache_dir=cache_dir,
        )
        self._executors: Recent[bytes, EagerExecutor] = Recent(
            config.max_plans, config.max_plan_bytes
        )
        self._known: dict[bytes, _Known] = {}
        self._shm_threshold = config.shm_threshold
        self._cache = Cache(config.cache_dir)
        self._waiting: list[list[Buffer]] = []
        self._writer: Writer | None = None
        self._next_dynamic = DYNAMIC_IDS
        #: number of the process group, and the one that the client knows to be broken
        self._group, self._left = 0, -1
        self._generator_state = torch.default_generator.get_state() if inline else None

    # -- messages ------------------------------------------------------------------------

    def handle(self, frames: list[Buffer]) -> list[list[Buffer]]:
        """Act on one message; returns the replies.

        Raises:
            ProtocolError: the message is not of the schema, or names an unknown op.
        """
        header = wire.unpack(frames[0])
        kind = header[0] if isinstance(header, tuple) and header else None
        if kind == wire.PLAN:
            self._plan(header, frames)
            waiting, self._waiting = self._waiting, []
            return [reply for message in waiting for reply in self.handle(message)]
        if kind == wire.RUN:
            if self._waiting:
                self._waiting.append([bytes(frame) for frame in frames])
                return []
            run = wire.decode_run(header)
            if run.digest is not None and run.digest not in self._executors:
                self._waiting.append([bytes(frame) for frame in frames])
                return [wire.encode_need(run.seq, run.digest)]
            done = self._run(run, frames[1:])
            return [*self._departure(), done]
        if kind == wire.SWAP:
            return [self._swap(header)]
        if kind == wire.WRITE:
            return [self._write(header)]
        if kind == wire.RENEW:
            self._renew(header)
            return []
        raise ProtocolError(f"unknown message kind {kind!r}")

    def close(self) -> None:
        """Drop all values."""
        self.store = Store()
        self._executors.clear()
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _plan(self, header: Any, frames: Sequence[Buffer]) -> None:
        try:
            _, digest, fresh, forget, *salt = header
            data = frames[1]
            name = wire.plan_name(data, *salt)
        except (TypeError, ValueError, IndexError) as error:
            raise ProtocolError(f"not a PLAN message: {error}") from error
        if name != digest:
            raise ProtocolError("a plan's content does not match its name")
        try:
            plan = Plan.build(wire.decode_graph(data))
            for node in plan.steps.graph.nodes:
                kernels.check(node.op)
        except GraphError as error:
            raise ProtocolError(str(error)) from error
        except KeyError as error:
            raise ProtocolError(f"unknown op {error.args[0]!r}") from error
        for old in forget:
            self._executors.drop(old)
            self._known.pop(old, None)
        if fresh or digest not in self._known:
            self._known[digest] = _Known(bool(salt and salt[0]))
        self._executors.keep(digest, EagerExecutor(plan, self.device), plan.graph.nbytes)

    def _swap(self, header: Any) -> list[Buffer]:
        """Put compiled groups into the place of fused nodes, from the next run of the plan on."""
        try:
            _, digest, groups = header
            executor = self._executors.get(digest)
            wanted = [(int(number), str(key)) for number, key in groups]
        except (TypeError, ValueError) as error:
            raise ProtocolError(f"not a SWAP message: {error}") from error
        if executor is None:
            return wire.encode_swapped(digest, "")  # forgotten; it is swapped when it comes again
        try:
            plan = executor.plan
            made = compiled(plan, self.device, wanted, self._cache)
            self._executors.keep(digest, made, plan.graph.nbytes)
        except Exception as error:  # noqa: BLE001 - reported to the client; the tier below stays
            return wire.encode_swapped(digest, f"{type(error).__name__}: {error}")
        return wire.encode_swapped(digest, "")

    def _departure(self) -> list[list[Buffer]]:
        """What tells the client, once and before the answer to a run, that this rank has left its
        process group."""
        joined = group.current() if self.world_size > 1 else None
        if joined is None or not joined.left or self._left == self._group:
            return []
        self._left = self._group
        return [wire.encode_left(self._group)]

    def _renew(self, header: Any) -> None:
        """Join a new process group. All ranks are told so, when all have answered all runs."""
        try:
            _, number, since = header
        except (TypeError, ValueError) as error:
            raise ProtocolError(f"not a RENEW message: {error}") from error
        joined = group.current()
        if joined is not None and joined.nccl:
            self._doubt(since)
        group.renew(number)
        self._group = number

    def _doubt(self, since: int) -> None:
        """Mark values as failed: NCCL does not say which of them ranks have met for."""
        why = Failure(-1, wire.COLLECTIVE_ERROR, "the ranks parted while it was being computed")
        for key in self.store.made_since(since):
            self.store.put(key, Failed(why))

    def _write(self, header: Any) -> list[Buffer]:
        """Copy blocks of values to where a transfer needs them."""
        # why: few workers ever send weights
        from lazygt.transfer import orders, writer

        _, number, order = header
        try:
            if self._writer is None:
                self._writer = writer.Writer(writer.threads(), self.device)
            done = self._writer.write(orders.Order.read(order), self._value)
        except Exception as error:  # noqa: BLE001 - reported to the client
            return wire.encode_wrote(number, (), f"{type(error).__name__}: {error}")
        return wire.encode_wrote(number, done.checks, "", done.handles)

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
            if self._fetch is not None:
                self._fetch.free(offset)
        spare = iter(buffers)
        for put in run.puts:
            self._receive(put, spare, done)
        if run.digest is None:
            self._release(list(run.frees or ()), done)
        else:
            self._execute(run, done)
        replies: list[Buffer] = []
        for key in run.fetches:
            try:
                done.fetched.append(self._send(self.store.get(key), replies))
            except Exception as error:  # noqa: BLE001 - reported to the client
                done.fetched.append(Failure(-1, kind_of(error), str(error), run.seq))
        if run.timed:
            steps = () if done.timings is None else done.timings.steps
            done.timings = Timings(begin, time.monotonic_ns(), steps)
        return wire.encode_done(done, replies)

    def _receive(self, put: Put, buffers: Iterator[Buffer], done: Done) -> None:
        meta = put.meta
        borrowed = put.offset
        nbytes = meta.extent * meta.dtype.itemsize
        if put.offset is not None:
            if self._upload is None:
                raise ProtocolError("a tensor in shared memory, but there is none")
            flat = self._upload.view(put.offset, nbytes)
        else:
            data = next(buffers, None)
            if data is None or len(data) != nbytes:
                raise ProtocolError(f"a tensor of {nbytes} bytes came without its bytes")
            flat = wire.received(data)
        value = _shaped(flat, meta)
        if self.device.type != "cpu" and put.offset is not None:
            # .to() has read the arena when it returns, so its room is free again at once
            done.releases.append(put.offset)
            borrowed = None
        self.store.put(put.id, value.to(self.device), borrowed)

    def _release(self, keys: list[int], done: Done) -> None:
        for key in keys:
            offset = self.store.free(key)
            if offset is not None:
                done.releases.append(offset)

    def _execute(self, run: Run, done: Done) -> None:
        assert run.digest is not None
        executor, known = self._executors.get(run.digest), self._known[run.digest]
        assert executor is not None
        ids = known.inputs.decode(run.inputs, run.base)
        frees = known.frees.decode(run.frees, run.base)
        if run.params is not None:
            known.params = run.params
        graph = executor.plan.graph
        if len(ids) != len(graph.inputs) or len(known.params) != len(graph.params):
            raise ProtocolError("a run with the wrong number of inputs or parameters")
        inputs = self._inputs(executor.schedule, ids, frees)
        self._release(frees, done)
        if run.timed:
            executor = TimedExecutor(executor)
        if known.checked != self._group:
            known.checked = self._group
            known.mismatch = self._mismatch(executor.plan, run.seq, known.own)
        if known.mismatch is None:
            outcome = self._isolated(executor, inputs, known.params)
        else:
            outcome = _nothing(executor.plan, known.mismatch)
        if isinstance(executor, TimedExecutor):
            done.timings = Timings(0, 0, tuple(executor.times))
        for offset, value in enumerate(outcome.outputs):
            self.store.put(run.base + offset, _stamped(value, run.seq))
        done.failures = [_with_seq(failure, run.seq) for failure in outcome.failures]
        if executor.plan.asks:
            self._describe(outcome, done, run.seq, len(executor.plan.steps.graph.nodes) - 1)

    def _mismatch(self, plan: Plan, run: int, own: bool) -> Failure | None:
        """Why the ranks must not run a plan that is new to them: they would not meet."""
        joined = group.current() if self.world_size > 1 else None
        return None if joined is None else agreement.mismatch(joined, run, plan.steps.graph, own)

    def _inputs(self, schedule: Schedule, ids: list[int], frees: list[int]) -> list[Value]:
        """The values of a run; what it overwrites without owning is copied."""
        inputs = [self.store.get(key) for key in ids]
        freed = set(frees)
        for position in schedule.writes.owned_inputs:
            value, key = inputs[position], ids[position]
            if type(value) is not Failed and (key not in freed or self.store.is_borrowed(key)):
                inputs[position] = kernels.twin(value)  # type: ignore[arg-type]
        return inputs

    def _isolated(
        self, executor: EagerExecutor, inputs: list[Value], params: tuple[Any, ...]
    ) -> Outcome:
        """Run; in the client's own process its generator is put back afterwards."""
        if self._generator_state is None or not draws(executor.plan):
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

        def tell(item: Any) -> Any:
            if isinstance(item, torch.Tensor):
                if item.layout != torch.strided:
                    raise NotImplementedError(
                        f"the result is a {item.layout} tensor; lazygt has dense strided ones only"
                    )
                key = self._next_dynamic
                self._next_dynamic += 1
                value = _rooted(item)
                self.store.put(key, value)
                return TensorMeta.of(value), key
            if isinstance(item, (list, tuple)):
                return ["list", [tell(one) for one in item]]
            return ["value", item]

        if type(outcome.returned) is Failed:
            done.returned = _refused(_with_seq(outcome.returned.failure, seq))
            return
        try:
            done.returned = [tell(item) for item in outcome.returned]
            done.written = [tell(item) for item in outcome.written]
        except NotImplementedError as error:
            done.returned = _refused(Failure(last, kind_of(error), str(error), seq))

    def _send(self, value: Value, buffers: list[Buffer]) -> Fetched | Failure:
        if isinstance(value, Failed):
            return value.failure
        if value._is_zerotensor():
            value = torch.zeros_like(value)
        host = value.detach().cpu().resolve_conj().resolve_neg()
        meta = TensorMeta.of(host)
        if meta.offset or meta.extent != meta.numel:
            meta = TensorMeta.of(host.contiguous())
        flat = host.as_strided(meta.shape, meta.stride) if meta == TensorMeta.of(host) else host
        flat = flat.contiguous() if meta.is_contiguous() else flat
        data = _bytes_of(flat, meta)
        if self._fetch is not None and data.numel() >= self._shm_threshold:
            slot = self._fetch.put(data)
            return Fetched(meta, slot.offset)
        buffers.append(data.numpy().data)
        return Fetched(meta)


def _nothing(plan: Plan, failure: Failure) -> Outcome:
    """The outcome of a plan that was not run."""
    failed = Failed(failure)
    return Outcome([failed for _ in plan.graph.outputs], [failure], failed, [])


def _refused(failure: Failure) -> list[Any]:
    """What is told in place of what a data-dependent node would have returned."""
    return ["failed", failure.node, failure.kind, failure.detail, failure.seq]


def draws(plan: Plan) -> bool:
    """Whether a plan reads or writes the generator."""
    return any(alias.draws(node) for node in plan.steps.graph.nodes)


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


def _stamped(value: Value, seq: int) -> Value:
    return Failed(_with_seq(value.failure, seq)) if isinstance(value, Failed) else value


def _with_seq(failure: Failure, seq: int) -> Failure:
    if failure.seq:
        return failure
    return Failure(failure.node, failure.kind, failure.detail, seq)
