"""Who writes which bytes: laws of the division, then whole saves of files by ranks that are threads."""

import secrets
import threading
from collections import Counter
from itertools import pairwise
from math import prod

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from flagstone.checkpoint import writing
from flagstone.checkpoint.manifest import Extent, tiling_fault
from flagstone.checkpoint.piece import ArrayPiece
from flagstone.checkpoint.placement import FilePlan, needs_link
from flagstone.checkpoint.world import Link, World
from flagstone.checkpoint.writing import RankWriter, Writer
from flagstone.layout import BLOCK, DTYPES, Sharding, TensorSpec, intersect, lay_out
from flagstone.storage import buffers
from flagstone.storage.memory import Memory
from worlds import DictStore, in_threads, make_worlds, unread

fast = settings(deadline=None, max_examples=100)
ROUND = 2 * BLOCK
_MEMORY = {"uint8": "u1", "int16": "i2", "float32": "f4", "float64": "f8", "complex128": "c16"}


class Endless(buffers.BufferPool):
    """Buffers for as many ranks as there are in this one process."""

    def take(self):
        return buffers.aligned(buffers.CHUNK) if self._free.empty() else super().take()


@pytest.fixture(autouse=True, scope="module")
def _small():
    """Chunks, rounds and runs so small that every file has several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buffers, "CHUNK", 4 * BLOCK)
        patch.setattr(buffers, "BUFFERS", 8)
        patch.setattr(buffers, "WRITERS", 2)
        patch.setattr(buffers, "POOL", Endless())
        patch.setattr(writing, "ROUND", ROUND)
        patch.setattr(writing, "RUN", BLOCK)
        yield


@st.composite
def shapes(draw, size):
    extents = st.sampled_from([0, 1, 1, 2, 3, 4, 5, 7, 16, 33, 64, 100, 513, 1024, 4096])
    shape = ()
    for n in draw(st.lists(extents, max_size=3)):
        if prod(shape) * n * size <= 40_000:
            shape = (*shape, n)
    return shape


@st.composite
def shardings(draw, ndim, ranks):
    """Replicas on some ranks, rows, columns, both, one dimension twice in either order, replicas of shards."""
    meshes = st.sampled_from([m for m in _MESHES if prod(m) <= ranks])
    mesh = draw(st.one_of(st.just((ranks,)), meshes))
    members = tuple(draw(st.permutations(range(ranks)))[: prod(mesh)])
    if not ndim or (draw(st.booleans()) and draw(st.booleans())):
        return Sharding.replicated(members)
    chosen = draw(st.permutations(range(len(mesh))))[: draw(st.integers(1, len(mesh)))]
    return Sharding(mesh, members, tuple((m, draw(st.sampled_from([0, *range(ndim)]))) for m in chosen))


_MESHES = [m for n in (1, 2, 3) for m in np.ndindex(*(9,) * n) if 1 <= prod(m) <= 8]


@st.composite
def states(draw):
    """A number of ranks, tensors, and how each is divided."""
    ranks = draw(st.integers(1, 8))
    specs, divided = [], {}
    for i in range(draw(st.integers(1, 6))):
        dtype = draw(st.sampled_from(list(_MEMORY)))
        shape = draw(shapes(DTYPES[dtype].size))
        specs.append(TensorSpec(f"t{i}", "model", f"t{i}", dtype, shape))
        divided[f"t{i}"] = draw(shardings(len(shape), ranks))
    return ranks, specs, divided


def plans_of(specs, divided, file_bytes=1 << 30):
    return [FilePlan(i, f, divided) for i, f in enumerate(lay_out(specs, file_bytes))]


def data_region(plan):
    return len(plan.layout.header), plan.layout.size


def assert_tiled(ranges, begin, end):
    ordered = sorted(r for r in ranges if r[0] < r[1])
    assert (ordered[0][0], ordered[-1][1]) == (begin, end) if begin < end else not ordered
    assert all(a[1] == b[0] for a, b in pairwise(ordered))


def written_by(plan, rank):
    """The ranges of a file that a rank writes, those of the rounds among them."""
    ranges = [plan.written(s) for s, mixed in plan.owned(rank) if not mixed]
    for extent in plan.mixed:
        for parts in plan.rounds(extent, ROUND):
            for writer, begin, end in parts:
                if writer == rank:
                    ranges.append((begin, min(-(-end // BLOCK) * BLOCK, plan.layout.size)))
    return [r for r in ranges if r[0] < r[1]]


# Laws of the division.


@fast
@given(states())
def test_every_byte_of_the_data_has_one_owner_who_holds_it(state):
    ranks, specs, divided = state
    for plan in plans_of(specs, divided):
        stretches = [s for rank in range(ranks) for s, _ in plan.owned(rank)]
        assert_tiled([(s.begin, s.end) for s in stretches], *data_region(plan))
        assert all(s.owner in s.holders for s in stretches)


@fast
@given(states())
def test_who_owns_a_byte_is_found_from_the_byte_alone(state):
    ranks, specs, divided = state
    for plan in plans_of(specs, divided):
        for rank in range(ranks):
            for stretch, mixed in plan.owned(rank):
                for byte in (stretch.begin, (stretch.begin + stretch.end) // 2, stretch.end - 1):
                    found, extent = plan.at(byte)
                    assert found == stretch
                    assert (extent.kind == "mixed") == mixed


@fast
@given(states())
def test_every_block_of_the_data_is_written_by_one_rank(state):
    ranks, specs, divided = state
    for plan in plans_of(specs, divided):
        ranges = [r for rank in range(ranks) for r in written_by(plan, rank)]
        assert all(begin % BLOCK == 0 for begin, _ in ranges)
        assert_tiled(ranges, *data_region(plan))


@fast
@given(states())
def test_a_rank_writes_about_its_share_of_what_it_holds_with_others(state):
    ranks, specs, divided = state
    for plan in plans_of(specs, divided):
        for rank in range(ranks):
            for stretch, _ in plan.owned(rank):
                whole = len(stretch.holders) * (stretch.end - stretch.begin)
                held = sum(
                    s.end - s.begin for r in stretch.holders for s, _ in plan.owned(r) if s.holders == stretch.holders
                )
                assert whole <= held + len(stretch.holders) * 2 * BLOCK


@fast
@given(states())
def test_what_one_rank_sends_at_the_edges_another_one_awaits(state):
    ranks, specs, divided = state
    for plan in plans_of(specs, divided):
        sent, awaited = Counter(), Counter()
        for rank in range(ranks):
            for fragment in plan.edges(rank):
                assert fragment.source != fragment.target
                assert rank in (fragment.source, fragment.target)
                (sent if fragment.source == rank else awaited)[fragment] += 1
        assert sent == awaited
        assert all(n == 1 for n in sent.values())


@fast
@given(states())
def test_what_is_sent_at_the_edges_is_held_by_its_source_and_of_a_block_that_its_target_writes(state):
    ranks, specs, divided = state
    for plan in plans_of(specs, divided):
        for rank in range(ranks):
            writes = written_by(plan, rank)
            for fragment in plan.edges(rank):
                if fragment.target == rank:
                    assert fragment.begin // BLOCK == (fragment.end - 1) // BLOCK
                    assert any(begin <= fragment.begin and fragment.end <= end for begin, end in writes)
                    assert fragment.nbytes <= fragment.end - fragment.begin
                elif fragment.box is not None:
                    slot = plan.layout.slots[fragment.slot]
                    assert intersect(fragment.box, divided[slot.name].box(slot.shape, rank)) == fragment.box


@fast
@given(states())
def test_a_writer_gets_every_byte_of_a_round_once_from_who_holds_it_itself_if_it_can(state):
    _, specs, divided = state
    for plan in plans_of(specs, divided):
        for extent in plan.mixed:
            slot = plan.layout.slots[extent.low]
            size = DTYPES[slot.dtype].size
            sharding = divided[slot.name]
            for parts in plan.rounds(extent, ROUND):
                assert len({writer for writer, _, _ in parts}) == len(parts)
                for writer, begin, end in parts:
                    assert 0 < end - begin <= ROUND
                    count = np.zeros(slot.shape, int)
                    for fragment in plan.sources(extent, begin, end, writer):
                        count[fragment.box.slices] += 1
                        held = sharding.box(slot.shape, fragment.source)
                        assert intersect(held, fragment.box) == fragment.box
                        own = intersect(sharding.box(slot.shape, writer), fragment.box)
                        assert fragment.source == writer or own is None
                        assert fragment.nbytes == fragment.box.numel * size
                    at = slice((begin - slot.begin) // size, (end - slot.begin) // size)
                    assert (count.ravel()[at] == 1).all()
                    assert count.sum() == (end - begin) // size


@fast
@given(states())
def test_where_the_plan_says_that_nothing_is_exchanged_nothing_is(state):
    ranks, specs, divided = state
    plans = plans_of(specs, divided)
    edges = [f for plan in plans for rank in range(ranks) for f in plan.edges(rank)]
    if ranks == 1:
        assert not edges
    if not needs_link(plans):
        assert not edges
        assert not any(plan.mixed for plan in plans)


def test_replicas_on_all_ranks_need_no_exchange():
    specs = [TensorSpec(f"t{i}", "model", f"t{i}", "float32", (n,)) for i, n in enumerate((1, 1000, 5000))]
    divided = {s.name: Sharding.replicated((0, 1, 2)) for s in specs}
    assert not needs_link(plans_of(specs, divided))


# Whole saves.


def piece_of(array, sharding, rank):
    """A rank's part of an array, on odd ranks not contiguous."""
    box = sharding.box(array.shape, rank)
    if box is None:
        return None
    part = array[box.slices]
    return np.asfortranarray(part) if rank % 2 else np.ascontiguousarray(part).reshape(part.shape)


def save(ranks, specs, divided, truth, file_bytes=1 << 30):
    """Write all files from threads that are the ranks; the files, what each rank wrote, and the bytes exchanged."""
    memory, token = Memory(), secrets.token_hex(16)
    worlds = make_worlds(ranks)
    first = memory.stage("step-1", token)
    plans = plans_of(specs, divided, file_bytes)
    for plan in plans:
        first.create(plan.layout.file, plan.layout.size)

    def work(world):
        staging = first if world.rank == 0 else memory.join("step-1", token)
        writer = Writer(staging, None)
        parts = {s.name: piece_of(truth[s.name], divided[s.name], world.rank) for s in specs}
        pieces = {s.name: None if parts[s.name] is None else ArrayPiece(parts[s.name], s.dtype) for s in specs}
        try:
            RankWriter(plans_of(specs, divided, file_bytes), pieces, world, writer, 60.0).run()
        finally:
            extents = writer.close()
        return extents

    written = in_threads(worlds, work)
    assert unread(worlds) == 0
    first.publish()
    return memory, plans, written, sum(w.link.sent for w in worlds)


def random_truth(specs):
    rng = np.random.default_rng(len(specs))
    arrays = {}
    for s in specs:
        data = rng.integers(0, 255, s.nbytes, np.uint8)
        arrays[s.name] = data.view(_MEMORY[s.dtype]).reshape(s.shape)
    return arrays


def assert_saved(memory, plans, written, truth):
    for plan in plans:
        file = memory.get("step-1", plan.layout.file)
        header, size = data_region(plan)
        extents = sorted((e for rank in written for e in rank.get(plan.layout.file, [])), key=lambda e: e.begin)
        top = Extent(0, header, b"".join(xxhash.xxh3_128_digest(bytes(BLOCK)) for _ in range(header // BLOCK)))
        assert tiling_fault([top, *extents], size, BLOCK) == ""
        for slot in plan.layout.slots:
            assert file[slot.begin : slot.end] == truth[slot.name].tobytes(), slot
        for extent in extents:
            runs = [file[i : min(i + BLOCK, extent.end)] for i in range(extent.begin, extent.end, BLOCK)]
            assert b"".join(map(xxhash.xxh3_128_digest, runs)) == extent.digests


@settings(deadline=None, max_examples=120)
@given(states(), st.sampled_from([1 << 30, 30_000]))
def test_whatever_is_divided_how_the_files_hold_the_tensors(state, file_bytes):
    ranks, specs, divided = state
    truth = random_truth(specs)
    memory, plans, written, sent = save(ranks, specs, divided, truth, file_bytes)
    assert_saved(memory, plans, written, truth)
    if not needs_link(plans):
        assert sent == 0


@pytest.mark.parametrize(
    ("mesh", "splits"),
    [
        ((4,), ((0, 0),)),
        ((4,), ((0, 1),)),
        ((2, 2), ((0, 0), (1, 1))),
        ((2, 2), ((1, 1), (0, 1))),
        ((2, 2), ((1, 0), (0, 0))),
        ((2, 2), ((1, 0),)),
        ((2, 2), ((1, 1),)),
        ((2, 2), ()),
    ],
    ids=["rows", "columns", "rows and columns", "columns twice", "strided rows", "hsdp", "hsdp of columns", "replicas"],
)
def test_the_usual_ways_to_divide_a_model(mesh, splits):
    shapes = [(33, 129), (64, 64), (5, 7), (1, 3), (4, 1024), (2, 3, 5)]
    specs = [TensorSpec(f"t{i}", "model", f"t{i}", "float32", s) for i, s in enumerate(shapes)]
    divided = {s.name: Sharding(mesh, (0, 1, 2, 3), splits) for s in specs}
    truth = random_truth(specs)
    memory, plans, written, _ = save(4, specs, divided, truth)
    assert_saved(memory, plans, written, truth)


def test_rows_exchange_less_than_a_block_at_each_edge():
    specs = [TensorSpec("t", "model", "t", "float32", (1000, 33))]
    divided = {"t": Sharding((4,), (0, 1, 2, 3), ((0, 0),))}
    truth = random_truth(specs)
    memory, plans, written, sent = save(4, specs, divided, truth)
    assert_saved(memory, plans, written, truth)
    assert 0 < sent < 3 * BLOCK


def test_many_tensors_that_share_a_block_come_together_from_all_ranks():
    specs = [TensorSpec(f"t{i}", "model", f"t{i}", "int16", (3,)) for i in range(100)]
    divided = {s.name: Sharding((1,), (i % 5,), ((0, 0),)) for i, s in enumerate(specs)}
    truth = random_truth(specs)
    memory, plans, written, _ = save(5, specs, divided, truth)
    assert_saved(memory, plans, written, truth)


class Fair(buffers.BufferPool):
    """Who asked first is served first, which the real one may do too."""

    def __init__(self):
        super().__init__()
        self._turn = threading.Condition()
        self._tickets = []

    def take(self):
        ticket = object()
        with self._turn:
            self._tickets.append(ticket)
            self._turn.wait_for(lambda: self._tickets[0] is ticket and not self._free.empty())
            self._tickets.pop(0)
            self._turn.notify_all()
            return super().take()

    def give(self, buffer):
        with self._turn:
            super().give(buffer)
            self._turn.notify_all()


class NoLink(Link):
    def exchange(self, send, receive, seconds):
        pass

    def reset(self):
        pass


def test_an_exchange_beside_many_chunks_does_not_take_all_buffers_and_wait_for_ever(monkeypatch):
    monkeypatch.setattr(buffers, "BUFFERS", 4)
    monkeypatch.setattr(buffers, "WRITERS", 3)
    pool = Fair()
    monkeypatch.setattr(buffers, "POOL", pool)
    specs = [TensorSpec("rows", "model", "rows", "float32", (2048, 1024))]
    specs += [TensorSpec("columns", "model", "columns", "float32", (256, 1024))]
    divided = {"rows": Sharding((2,), (0, 1), ((0, 0),)), "columns": Sharding((2,), (0, 1), ((0, 1),))}
    parts = {"rows": np.ones((1024, 1024), np.float32), "columns": np.ones((256, 512), np.float32)}
    pieces = {name: ArrayPiece(part, "float32") for name, part in parts.items()}
    plans = plans_of(specs, divided)
    staging = Memory().stage("step-1", secrets.token_hex(16))
    staging.create(plans[0].layout.file, plans[0].layout.size)

    def work():
        writer = Writer(staging, None)
        RankWriter(plans, pieces, World(0, 2, DictStore(), NoLink()), writer, 20.0).run()
        writer.close()

    saving = threading.Thread(target=work, daemon=True)
    saving.start()
    saving.join(10)
    is_stuck = saving.is_alive()
    while saving.is_alive():  # let it go, or the threads would keep the tests from ending
        pool.give(buffers.aligned(buffers.CHUNK))
        saving.join(0.01)
    assert not is_stuck
