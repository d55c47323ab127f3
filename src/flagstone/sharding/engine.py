"""The order of a training step: when weights are gathered and given up, when gradients are reduced.

forward of the root     weights may be read from here on; resident streams are made whole
  forward of a unit     gather it, begin to gather the next; compute; give it up
backward of a unit      gather it, begin to gather the one before; compute; gradients go into its slot
  its last gradient     begin to reduce it, finish the reduction before; give it up
end of backward         finish all; gradients are in ``parameter.grad``
optimizer step          the first write waits until no rank reads weights
"""

from __future__ import annotations

import functools
import hashlib
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from flagstone.errors import FlagstoneError
from flagstone.flat.places import ParameterPlace
from flagstone.layout import Span
from flagstone.sharding.comm import DONE, Comm, Ticket
from flagstone.sharding.host import RankError
from flagstone.sharding.slots import Slot, assign
from flagstone.sharding.stream import Stream
from flagstone.sharding.unit import Unit

RESIDENT_BYTES = 64 << 10  # a stream below this is gathered once a step, with the root's
SLOTS = 2
F = TypeVar("F", bound=Callable[..., Any])


def _told(method: F) -> F:
    """Where another rank has failed, say who holds which buffer here."""

    @functools.wraps(method)
    def call(self: Engine, *args: Any) -> Any:
        try:
            return method(self, *args)
        except RankError as error:
            if not hasattr(error, "__notes__"):
                error.add_note(self.dump())
            raise

    return cast(F, call)


class Engine:
    """The units below one root, and the ranks that they are divided over.

    Attributes:
        mesh: ranks of the job; a row for each replica.
        ranks: this rank's row.
        index: this rank's place in it.
        size: its length.
        comm: how these ranks exchange bytes.
        replicas: how this rank exchanges with those that have the same part in other rows; None for one row.
        epoch: how often weights have been changed and read again.
        reading: whether a rank may be reading weights.
    """

    def __init__(
        self, mesh: tuple[tuple[int, ...], ...], me: int, comm: Comm, replicas: Comm | None, device: torch.device
    ) -> None:
        self.mesh = mesh
        self.ranks = next(row for row in mesh if me in row)
        self.index, self.size = self.ranks.index(me), len(self.ranks)
        self.rank = me
        self.comm, self.replicas, self.device = comm, replicas, device
        self.debug = False
        self._issued: list[str] = []  # what was begun since the last comparison
        self.epoch = 0
        self.reading = False
        self.depth = 0  # of units' forwards within each other
        self.in_backward = False
        self._units: list[weakref.ref[Unit]] = []
        self._is_ready = False
        self.slots: list[Slot] = []
        self._flags_changed = False  # some requires_grad
        self._asker: weakref.ref[object] | None = None  # a module whose state_dict is being made
        self._hidden: list[weakref.ref[Stream]] = []  # the streams whose whole parameters are hidden from it
        self._reducing: list[tuple[Stream, Ticket]] = []
        self._next: dict[tuple[str, int], weakref.ref[Unit]] = {}  # what came after a unit, in forward and in backward
        self._last: tuple[str, weakref.ref[Unit] | None] = ("", None)

    # Units.

    @property
    def units(self) -> list[Unit]:
        return [u for r in self._units if (u := r()) is not None]

    @property
    def streams(self) -> list[Stream]:
        return [s for u in self.units for s in u.streams]

    @property
    def is_computing(self) -> bool:
        return self.depth > 0 or _in_graph()

    def add(self, unit: Unit) -> None:
        self._units.append(weakref.ref(unit))
        self._is_ready = False

    def absorb(self, other: Engine) -> None:
        """Take over the units of another engine of the same ranks."""
        for unit in other.units:
            unit.engine = self
            for stream in unit.streams:
                for parameter in stream.parameters:
                    parameter.placement.move(self)
            self.add(unit)
        other._units = []

    def ready(self) -> None:
        """Find the roots, name everything, and give each stream its buffers. All ranks do it at the same time."""
        if not self._is_ready:
            with torch.inference_mode(False), torch.no_grad():  # what is made here outlives an evaluation
                self._make_ready()

    def _make_ready(self) -> None:
        units = {id(m): u for u in self.units for m in u.modules}
        order: dict[Unit, list[Unit]] = {}
        for top in self.units:
            inside = [units[id(c)] for m in top.modules for c in m.modules() if id(c) in units]
            for below in inside:
                if below is not top:
                    order.setdefault(below, []).append(top)
        roots = [u for u in self.units if u not in order]
        arranged: dict[Unit, None] = {}
        for root in roots:
            for module in root.modules:
                for path, child in module.named_modules():
                    unit = units.get(id(child))
                    if unit is not None and unit not in arranged:
                        arranged[unit] = None
                        unit.name = path or type(child).__name__
                        for stream in unit.streams:
                            stream.rename(path)
        self._units = [weakref.ref(u) for u in arranged]
        for unit in arranged:
            unit.is_root = unit in roots
        for number, stream in enumerate(self.streams):
            stream.number = number
            stream.resident |= stream.unit.is_root or stream.nbytes <= RESIDENT_BYTES
        self._give_slots(order)
        self.comm.begin(self.streams)
        if self.replicas is not None:
            self.replicas.begin(self.streams)
        self._is_ready = True

    def _give_slots(self, above: dict[Unit, list[Unit]]) -> None:
        streams = self.streams

        def around(unit: Unit) -> Sequence[Unit]:
            return above.get(unit, ())

        self.slots = []
        if not self.comm.shares_weights:
            shared = [(s, s.nbytes) for s in streams if not s.resident and s.unit.reshard_after_forward]
            weights = assign(shared, around, SLOTS, "whole weights, in turn")
            self.slots = list(dict.fromkeys(weights.values()))
            for slot in self.slots:
                slot.everyone = [self.comm.whole(slot.nbytes, self.device)]
            for stream in streams:
                stream.weight_slot = weights.get(stream)
                own = stream.weight_slot
                buffer = self.comm.whole(stream.nbytes, self.device) if own is None else own.mine[: stream.nbytes]
                stream.full = buffer.view(stream.compute_dtype)[: stream.numel]
                stream.epoch = -1
        trainable = [s for s in streams if any(p.requires_grad for p in s.parameters)]
        turns = [(s, s.gradient_nbytes) for s in trainable]
        gradients = assign([(s, n) for s, n in turns if not s.resident], around, SLOTS, "gradients, in turn")
        for stream, nbytes in turns:
            if stream.resident:
                gradients[stream] = Slot("gradients")
                gradients[stream].add(stream, nbytes)
        slots = list(dict.fromkeys(gradients.values()))
        offsets = [0]
        for slot in slots:
            offsets.append(offsets[-1] + -(-slot.nbytes // 4096) * 4096)
        buffers, mine = self.comm.gradients(offsets[-1], self.device) if slots else ([], 0)
        for slot, at in zip(slots, offsets, strict=False):
            slot.everyone = [b[at : at + slot.nbytes] for b in buffers]
            slot.rank = mine
        self.slots += slots
        for stream in streams:
            stream.gradient_slot = gradients.get(stream)
            stream.gradients = None
            stream.make_views()

    # Order of reading and writing weights.

    @_told
    def begin_reading(self) -> None:
        """Weights may be read until the next write."""
        self.ready()
        if self.in_backward and not _in_graph():
            self.recover()
        if self._flags_changed:
            self._flags_changed = False
            for stream in self.streams:
                stream.follow()
            if any(s.expected and s.gradient_slot is None for s in self.streams):
                self._is_ready = False
                self.ready()
        if not self.reading:
            unset = [p.placement.name for s in self.streams for p in s.parameters if p.placement.is_unset]
            if unset:
                some = ", ".join(unset[:5]) + (" …" if len(unset) > 5 else "")
                raise FlagstoneError(
                    f"{some} came from the meta device and has no values yet; initialise it, or load a checkpoint, "
                    "before the first forward"
                )
            for stream in self.streams:
                stream.cast()
            self.comm.read_weights()
            self.epoch += 1
            self.reading = True

    @_told
    def before_write(self) -> None:
        """Wait until this rank's part of the weights may be changed."""
        if self.reading:
            if self.in_backward and not _in_graph():
                self.recover()
            if self.depth or self.in_backward:
                raise FlagstoneError("weights cannot be changed while forward or backward is under way")
            self.ready()
            self.rest()
            self.comm.write_weights()
            self.reading = False

    def flags_changed(self) -> None:
        self._flags_changed = True

    # Weights of a unit.

    def begin_loading(self, unit: Unit) -> None:
        """Begin to make a unit's weights whole."""
        for stream in unit.streams:
            self._load(stream)

    def acquire(self, unit: Unit) -> None:
        """Make a unit's weights whole, and let its modules have them."""
        for stream in unit.streams:
            self._load(stream).finish()
            stream.loading = None
            stream.views.install()
        unit.was_evicted = False

    def _load(self, stream: Stream) -> Ticket:
        slot = stream.weight_slot
        if slot is not None and slot.holder is not stream:
            self._evict(slot, stream)
            slot.holder = stream
            stream.epoch = -1
        if stream.epoch != self.epoch:
            stream.epoch = self.epoch
            stream.loading = self.comm.gather(stream)
            self._issue("gather", stream)
        return stream.loading or DONE

    def _evict(self, slot: Slot, stream: Stream) -> None:
        holder = slot.holder
        if holder is None:
            return
        if holder.unit.is_busy:
            if holder.unit.entered or holder.unit.pinned or holder.unit.computing:
                raise FlagstoneError(
                    f"{stream.unit.name} and {holder.unit.name} are in use at the same time and share a buffer for "
                    "weights; give one of them its own with reshard_after_forward=False"
                )
            holder.unit.was_evicted = True
        if holder.loading is not None:
            holder.loading.finish()
            holder.loading = None
        holder.epoch = -1

    def release(self, unit: Unit) -> None:
        """Give a unit's weights up; another may have the buffers."""
        for stream in unit.streams:
            if not stream.resident or not self.reading:
                stream.views.remove()
        if self.debug:
            self._poison(unit)

    def prefetch(self, unit: Unit, way: str) -> None:
        """Begin to gather what came after this unit the last time."""
        chosen = unit.forward_prefetch if way == "forward" else unit.backward_prefetch
        if chosen is None:
            after = self._next.get((way, id(unit)))
            chosen = [] if after is None else [after]
        for reference in chosen:
            target = reference()
            for stream in target.streams if target is not None else ():
                slot = stream.weight_slot
                free = slot is None or slot.holder is None or slot.holder is stream or not slot.holder.unit.is_busy
                if free:
                    self._load(stream)

    def _learn(self, unit: Unit, way: str) -> None:
        before_way, before = self._last
        last = before() if before is not None and before_way == way else None
        if last is not None and last is not unit:
            self._next[way, id(last)] = weakref.ref(unit)
        self._last = way, weakref.ref(unit)

    # Forward.

    @_told
    def enter(self, unit: Unit) -> None:
        if not _in_graph() and (unit.in_backward or (unit.is_root and unit.entered > unit.methods)):
            self.recover()  # the last backward was not ended, or the last forward was interrupted
        if self.depth == 0 and not _in_graph():
            self.begin_reading()
            self._last = "", None
            for other in self.units:
                if other.is_resident:
                    self.acquire(other)
                else:
                    for stream in other.streams:
                        if stream.resident:
                            self._load(stream).finish()
                            stream.views.install()
        self.depth += 1
        unit.entered += 1
        self.acquire(unit)
        if not self.comm.shares_weights:
            self._learn(unit, "forward")
            self.prefetch(unit, "forward")

    def leave(self, unit: Unit, keep: bool, more: bool) -> None:
        """A module of the unit has computed; ``keep``: backward may follow; ``more``: other modules of it will."""
        if not unit.entered:
            return  # entering has failed
        self.depth -= 1
        unit.entered -= 1
        if more:
            return
        if not unit.is_busy and not (keep and not unit.reshard_after_forward):
            self.release(unit)
        if not self.is_computing:
            if not keep and sys.exc_info()[0] is None:
                self.comm.finish_sending()
            self.rest()

    def rest(self) -> None:
        """Let all modules that do not compute have their sharded parameters; also after an exception in backward."""
        failed = self.in_backward and not _in_graph()
        for unit in self.units if self._is_ready else ():
            if not unit.is_busy or (failed and not unit.entered and not unit.pinned):
                for stream in unit.streams:
                    stream.views.remove()

    def show_sharded(self, asker: object) -> None:
        """Let even modules that compute have their sharded parameters, until the same asks to show them whole."""
        self.rest()
        if self._asker is None or self._asker() in (None, asker):
            self._asker = weakref.ref(asker)
            self._hidden = [weakref.ref(s) for s in self.streams if s.views.installed] if self._is_ready else []
            for stream in self._hidden:
                cast(Stream, stream()).views.remove()

    def show_whole(self, asker: object) -> None:
        if self._asker is not None and self._asker() is asker:
            self._asker = None
            for reference in self._hidden:
                stream = reference()
                if stream is not None:
                    stream.views.install()

    # Backward.

    @_told
    def enter_backward(self, unit: Unit, epoch: int, call: object | None) -> None:
        """A gradient of what a call of forward has returned is there; no call: who says when it is done?"""
        if epoch != self.epoch or not self.reading:
            raise FlagstoneError(f"backward through {unit.name}, whose weights were changed since its forward")
        if torch.is_grad_enabled() and any(s.weight_slot is not None for s in unit.streams):
            raise FlagstoneError(
                f"backward with create_graph=True through {unit.name}, which shares its buffer for weights with other "
                "units: they would be gone in the second backward; give it its own with reshard_after_forward=False"
            )
        self._begin_backward()
        if call is None:
            unit.ends_late = True
        else:
            unit.computing.add(call)
        if not unit.in_backward:
            unit.in_backward = True
            self.acquire(unit)
            if not self.comm.shares_weights:
                self._learn(unit, "backward")
                self.prefetch(unit, "backward")

    def _begin_backward(self) -> None:
        if not self.in_backward:
            self.in_backward = True
            self._last = "", None
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def leave_backward(self, unit: Unit) -> None:
        """A unit's gradients, and those of its inputs, are there."""
        if unit.in_backward:
            if unit.was_evicted:
                raise FlagstoneError(
                    f"the weights of {unit.name} were replaced while its backward was under way, as another unit "
                    "shares its buffer; give it its own with reshard_after_forward=False"
                )
            unit.end_backward()
            if not unit.is_busy and unit.reshard_after_backward:
                self.release(unit)

    def inputs_done(self, unit: Unit, call: object) -> None:
        unit.computing.discard(call)
        if not unit.computing and not unit.ends_late:
            self.leave_backward(unit)

    @_told
    def arrived(self, stream: Stream, place: ParameterPlace, gradient: Tensor) -> None:
        """Autograd has a parameter's gradient."""
        self._begin_backward()
        unit = stream.unit
        if unit.was_evicted or (not stream.resident and stream.epoch != self.epoch):
            raise FlagstoneError(
                f"a gradient of {place.fqn} came when its weights were not there: return the tensors of {unit.name}'s "
                "forward in lists, tuples, dicts or dataclasses, so that they are found"
            )
        if gradient.layout != torch.strided:
            raise FlagstoneError(f"the gradient of {place.fqn} is {gradient.layout}; only dense ones can be reduced")
        if unit.sync:
            if not stream.is_open:
                self._open(stream)
            assert stream.gradients is not None
            stream.gradients.add(place, gradient)
        else:
            stream.hold(place, gradient)
        stream.arrivals.add(place)
        if len(stream.arrivals) == stream.expected:
            stream.arrivals.clear()
            if unit.sync and not stream.resident:
                self._close(stream)
            if all(not s.arrivals and not s.is_open for s in unit.streams):
                self.leave_backward(unit)

    def _open(self, stream: Stream) -> None:
        slot = stream.gradient_slot
        assert slot is not None
        holder = slot.holder
        if holder is not None and holder is not stream and holder.is_open:
            self._close(holder)
        if slot.ticket is not None:
            slot.ticket.release()
            slot.ticket = None
        slot.holder = stream
        stream.open()

    def _close(self, stream: Stream) -> None:
        """Begin to reduce what a stream has, and finish what was begun before that."""
        self._reduce(stream)
        while len(self._reducing) >= SLOTS:
            self._reducing.pop(0)[1].finish()

    def _reduce(self, stream: Stream) -> None:
        assert stream.gradient_slot is not None
        ticket = self.comm.reduce(stream, stream.close())
        stream.gradient_slot.ticket = ticket
        self._issue("reduce", stream)
        self._reducing.append((stream, ticket))

    def reduced(self, stream: Stream, parts: Sequence[Tensor], used: Sequence[bool]) -> None:
        """The ranks' gradients of this rank's part are here: add them up."""
        if any(used):
            unit = stream.unit
            divide = unit.divide if unit.divide is not None else float(self.size * len(self.mesh))
            stream.add_up(parts, used, divide, self.replicas, unit.all_reduce)

    @_told
    def _end_backward(self) -> None:
        for stream in self.streams:
            stream.arrivals.clear()
            if stream.unit.sync and stream.expected:
                if stream.unsynced is not None and not stream.is_open:
                    self._open(stream)
                if stream.is_open:
                    self._reduce(stream)
        reduces = any(s.unit.sync for s in self.streams)
        if reduces:
            self.comm.close_backward(self.streams)
        for _, ticket in self._reducing:
            ticket.finish()
        self._reducing.clear()
        if reduces:
            self.comm.end_backward()
        self.comm.finish_sending()
        for slot in self.slots:
            if slot.ticket is not None:
                slot.ticket.release()
                slot.ticket = None
        if self.debug:
            self._compare_issues()
        for unit in self.units:
            unit.end_backward()
        self.in_backward = False
        self.rest()

    def set_reshard(self, unit: Unit, reshard: bool) -> None:
        if unit.reshard_after_forward != reshard:
            unit.reshard_after_forward = reshard
            self._is_ready = False

    def recover(self) -> None:
        """Forget a backward that has ended in an exception."""
        self.in_backward = False
        under_way = [self._reducing, [s.ticket for s in self.slots], [s.loading for s in self.streams]]
        self._reducing = []
        for slot in self.slots:
            slot.ticket, slot.holder = None, None
        for unit in self.units:
            unit.end_backward()
            unit.entered, unit.was_evicted = 0, False
            unit.todo.clear()
            for stream in unit.streams:
                stream.arrivals.clear()
                stream.is_open, stream.unsynced, stream.partial = False, None, None
                stream.loading, stream.epoch = None, -1
                if stream.weight_slot is not None:
                    stream.weight_slot.holder = None
        self.depth = 0
        self.rest()
        self.comm.recover(self.streams)
        if self.replicas is not None:
            self.replicas.recover(self.streams)
        del under_way  # not before all ranks are here: some may have been waiting for it

    # What sharded tensors ask for.

    def gather(self, shard: Tensor, spans: Sequence[Span], what: str) -> Tensor:
        self.ready()
        return self.comm.gather_flat(shard, spans, what)

    def total(self, values: Tensor, what: str, maximum: bool = False) -> Tensor:
        self.ready()
        return self.comm.all_reduce(values, what, maximum)

    # For people who look for a fault.

    def dump(self) -> str:
        """Who holds which buffer."""
        lines = []
        for slot in self.slots:
            holder = slot.holder
            users = ", ".join(s.name for r in slot.users if (s := r()) is not None)
            state = (
                "being reduced" if slot.ticket is not None else "open" if holder is not None and holder.is_open else ""
            )
            lines.append(f"{slot.kind}, {slot.nbytes} bytes: {holder.name if holder else 'free'} {state} (of {users})")
        busy = [u.name for u in self.units if u.is_busy]
        return "\n".join([f"in use: {', '.join(busy) or 'no unit'}", *lines])

    def _issue(self, verb: str, stream: Stream) -> None:
        if self.debug:
            self._issued.append(f"{verb} {stream.name}")

    def _compare_issues(self) -> None:
        """Debug: whether all ranks have begun the same things in the same order."""
        issued, self._issued = self._issued, []
        digest = int.from_bytes(hashlib.sha256("\n".join(issued).encode()).digest()[:6], "little")
        most = self.comm.all_reduce(torch.tensor([digest, -digest], device=self.device), "the order of issue", True)
        if most[0] != -most[1]:
            raise FlagstoneError(f"the ranks have not begun the same in the same order; this one: {', '.join(issued)}")
        for slot in self.slots:
            if not slot.kind.startswith("whole"):
                slot.mine.fill_(0xFF)  # NaN in every floating type

    def _poison(self, unit: Unit) -> None:
        for stream in unit.streams:
            if stream.weight_slot is not None and stream.full.is_floating_point() and not self.comm.shares_slots:
                stream.full.data.fill_(float("nan"))
                stream.epoch = -1


def _in_graph() -> bool:
    """Whether autograd's engine is running backward in this thread."""
    return torch._C._current_graph_task_id() != -1
