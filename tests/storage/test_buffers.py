import os
import queue

import pytest

from flagstone.storage import buffers


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(buffers, "CHUNK", 8192)
    monkeypatch.setattr(buffers, "POOL", buffers.BufferPool())  # so that no small buffer comes into the real one


@pytest.mark.parametrize("nbytes", [1, 4096, 5 << 20])
def test_memory_begins_on_a_huge_page_and_is_zero(nbytes):
    memory = buffers.aligned(nbytes)
    assert memory.nbytes == nbytes
    assert memory.ctypes.data % (2 << 20) == 0
    assert not memory.any()
    assert buffers.aligned(0).nbytes == 0


def test_a_buffer_is_used_again():
    pool = buffers.BufferPool()
    with pool.lent() as first:
        assert first.nbytes == 8192
    with pool.lent() as second:
        assert second is first


def test_no_more_buffers_are_lent_than_there_are():
    pool = buffers.BufferPool()
    taken = [pool.take() for _ in range(buffers.BUFFERS)]
    assert len({b.ctypes.data for b in taken}) == buffers.BUFFERS
    with pytest.raises(queue.Empty):
        pool._free.get_nowait()
    for buffer in taken:
        pool.give(buffer)


def test_a_buffer_for_which_there_was_no_memory_can_be_asked_for_again(monkeypatch):
    pool = buffers.BufferPool()
    with monkeypatch.context() as full:
        full.setattr(buffers, "aligned", lambda nbytes: (_ for _ in ()).throw(MemoryError()))
        for _ in range(2 * buffers.BUFFERS):
            with pytest.raises(MemoryError):
                pool.take()
    assert pool.take().nbytes == 8192


def test_a_child_does_not_wait_for_buffers_that_its_parent_has_lent():
    taken = [buffers.POOL.take() for _ in range(buffers.BUFFERS)]
    try:
        pid = os.fork()
        if pid == 0:
            os._exit(0 if buffers.POOL._free.qsize() == buffers.BUFFERS else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    finally:
        for buffer in taken:
            buffers.POOL.give(buffer)
