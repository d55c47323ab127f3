"""What every storage must do, as tests to inherit:

    from flagstone.storage.testing import StorageSuite

    class TestMyStorage(StorageSuite):
        def storage(self, tmp_path):
            return MyStorage(), "bucket/run/step-1"

They run under pytest, and need nothing of it but the fixture ``tmp_path``.
"""

from __future__ import annotations

import random
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np

from flagstone.layout import BLOCK
from flagstone.storage.base import Bytes, Staging, Storage
from flagstone.storage.buffers import aligned

SIZE = 5 * BLOCK + 137  # bytes of a file whose end is on no block


class StorageSuite(ABC):
    """Tests of a storage. ``storage`` makes one, with nothing in it that the tests could meet."""

    @abstractmethod
    def storage(self, tmp_path: Path) -> tuple[Storage, str]:
        """A storage, and the name of a folder in it that is not there yet; names that begin with it are used too."""

    # What is there.

    def test_there_is_nothing_where_nothing_was_published(self, tmp_path: Path) -> None:
        storage, folder = self.storage(tmp_path)
        assert not storage.exists(folder)
        with _raises(FileNotFoundError):
            storage.list(folder)
        with _raises(FileNotFoundError):
            storage.open(folder, "a")

    def test_a_published_folder_exists_and_lists_its_files_with_their_sizes(self, tmp_path: Path) -> None:
        storage, folder = self.storage(tmp_path)
        _publish(storage, folder, {"a": b"one", "b.json": b"", "c": bytes(SIZE)})
        assert storage.exists(folder)
        assert storage.list(folder) == {"a": 3, "b.json": 0, "c": SIZE}

    def test_a_file_that_is_not_in_the_folder_cannot_be_opened(self, tmp_path: Path) -> None:
        storage, folder = self.storage(tmp_path)
        _publish(storage, folder, {"a": b"one"})
        with _raises(FileNotFoundError):
            storage.open(folder, "b")

    # Building a folder.

    def test_what_is_staged_is_seen_by_nobody_until_it_is_published(self, tmp_path: Path) -> None:
        storage, folder = self.storage(tmp_path)
        staging = storage.stage(folder, _token())
        _fill(staging, {"a": b"one"})
        assert not storage.exists(folder)
        with _raises(FileNotFoundError):
            storage.list(folder)
        with _raises(FileNotFoundError):
            storage.open(folder, "a")
        staging.publish()
        assert _content(storage, folder) == {"a": b"one"}

    def test_a_folder_that_is_there_is_not_staged_again(self, tmp_path: Path) -> None:
        storage, folder = self.storage(tmp_path)
        _publish(storage, folder, {"a": b"one"})
        with _raises(FileExistsError):
            storage.stage(folder, _token())
        assert _content(storage, folder) == {"a": b"one"}

    def test_a_file_is_created_once_and_with_its_size(self, tmp_path: Path) -> None:
        storage, folder = self.storage(tmp_path)
        staging = storage.stage(folder, _token())
        staging.create("a", SIZE)
        with _raises(FileExistsError):
            staging.create("a", SIZE)
        staging.publish()
        assert storage.list(folder) == {"a": SIZE}

    def test_a_file_that_was_not_created_cannot_be_written(self, tmp_path: Path) -> None:
        storage, folder = self.storage(tmp_path)
        staging = storage.stage(folder, _token())
        with _raises(FileNotFoundError):
            staging.open("a")
        staging.discard()

    def test_threads_write_parts_of_any_size_at_any_offset_from_any_memory(self, tmp_path: Path) -> None:
        storage, folder = self.storage(tmp_path)
        rng = random.Random(1)
        truth = _random(40 * BLOCK + 137)
        cuts = {0, truth.nbytes, *range(0, 20 * BLOCK, 2 * BLOCK), *rng.sample(range(20 * BLOCK, truth.nbytes), 30)}
        parts = list(pairwise(sorted(cuts)))
        rng.shuffle(parts)
        staging = storage.stage(folder, _token())
        staging.create("a", truth.nbytes)
        with staging.open("a") as file, ThreadPoolExecutor(4) as threads:

            def write(number: int) -> None:
                begin, end = parts[number]
                shift = number % 3  # memory that begins on a page, or does not
                data = aligned(end - begin + shift)[shift:]
                data[:] = truth[begin:end]
                file.write(begin, data)

            list(threads.map(write, range(len(parts))))
            file.sync()
        staging.publish()
        assert _content(storage, folder)["a"] == truth.tobytes()

    def test_memory_that_must_not_be_changed_can_be_written(self, tmp_path: Path) -> None:
        storage, folder = self.storage(tmp_path)
        _publish(storage, folder, {"a": bytes(range(256)) * 32})
        assert _content(storage, folder) == {"a": bytes(range(256)) * 32}

    def test_a_file_may_be_closed_twice(self, tmp_path: Path) -> None:
        storage, folder = self.storage(tmp_path)
        staging = storage.stage(folder, _token())
        staging.create("a", 1)
        writing = staging.open("a")
        writing.write(0, np.ones(1, np.uint8))
        writing.close()
        writing.close()
        staging.publish()
        reading = storage.open(folder, "a")
        reading.close()
        reading.close()

    # Several ranks.

    def test_who_joins_writes_the_files_that_another_created_and_creates_its_own(self, tmp_path: Path) -> None:
        storage, folder = self.storage(tmp_path)
        token = _token()
        first = storage.stage(folder, token)
        first.create("a", 2 * BLOCK)
        second = storage.join(folder, token)
        second.create("b", 1)
        for staging, begin in ((first, 0), (second, BLOCK)):
            with staging.open("a") as file:
                file.write(begin, np.full(BLOCK, 1 + begin % 251, np.uint8))
                file.sync()
        second.release()
        first.publish()
        assert _content(storage, folder) == {"a": bytes([1]) * BLOCK + bytes([1 + BLOCK % 251]) * BLOCK, "b": bytes(1)}

    def test_what_nobody_began_cannot_be_joined(self, tmp_path: Path) -> None:
        storage, folder = self.storage(tmp_path)
        staging = storage.stage(folder, _token())
        for name, token in ((folder, _token()), (f"{folder}-other", _token())):
            with _raises(FileNotFoundError):
                storage.join(name, token)
        staging.discard()

    def test_what_is_published_or_discarded_cannot_be_joined(self, tmp_path: Path) -> None:
        storage, folder = self.storage(tmp_path)
        ends: tuple[Callable[[Staging], None], ...] = (lambda s: s.discard(), lambda s: s.publish())
        for end in ends:
            token = _token()
            end(storage.stage(folder, token))
            with _raises(FileNotFoundError):
                storage.join(folder, token)

    # Reading.

    def test_any_bytes_are_read_into_any_memory(self, tmp_path: Path) -> None:
        storage, folder = self.storage(tmp_path)
        truth = _random(SIZE)
        _publish(storage, folder, {"a": truth.tobytes()})
        rng = random.Random(2)
        edges = (0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK, SIZE - 1, SIZE)
        cases = [(begin, length) for begin in edges for length in (0, 1, BLOCK, 2 * BLOCK, SIZE)]
        cases += [(rng.randrange(SIZE), rng.randrange(SIZE)) for _ in range(50)]
        with storage.open(folder, "a") as file:
            assert file.size == SIZE
            for begin, length in cases:
                length = min(length, SIZE - begin)
                for shift in (0, 1):
                    out = aligned(length + shift)[shift:]
                    file.read(begin, out)
                    assert out.tobytes() == truth[begin : begin + length].tobytes(), (begin, length, shift)

    def test_a_read_may_reach_past_the_end(self, tmp_path: Path) -> None:
        storage, folder = self.storage(tmp_path)
        truth = _random(SIZE)
        _publish(storage, folder, {"a": truth.tobytes(), "empty": b""})
        with storage.open(folder, "a") as file:
            for begin in (0, 7, BLOCK, 5 * BLOCK, SIZE - 1, SIZE, 6 * BLOCK, SIZE + 1000):
                for length in (1, 8 * BLOCK):
                    out = aligned(length)
                    file.read(begin, out)
                    wanted = truth[begin : begin + length].tobytes()
                    assert out[: len(wanted)].tobytes() == wanted, (begin, length)
        with storage.open(folder, "empty") as file:
            assert file.size == 0
            file.read(0, aligned(BLOCK))

    def test_threads_read_one_open_file(self, tmp_path: Path) -> None:
        storage, folder = self.storage(tmp_path)
        truth = _random(64 * BLOCK)
        _publish(storage, folder, {"a": truth.tobytes()})
        with storage.open(folder, "a") as file, ThreadPoolExecutor(4) as threads:

            def is_right(begin: int) -> bool:
                out = aligned(2 * BLOCK)
                file.read(begin, out)
                return out.tobytes() == truth[begin : begin + 2 * BLOCK].tobytes()

            assert all(threads.map(is_right, [*range(0, 62 * BLOCK, BLOCK), *range(0, 62 * BLOCK, 1009)]))

    def test_what_is_read_from_memory_is_a_right_beginning(self, tmp_path: Path) -> None:
        storage, folder = self.storage(tmp_path)
        truth = _random(SIZE)
        _publish(storage, folder, {"a": truth.tobytes()})
        with storage.open(folder, "a") as file:
            for _ in range(2):  # the second time it may well be in memory
                for begin in (0, 1, BLOCK, SIZE - 100, SIZE, SIZE + BLOCK):
                    out = [np.zeros(n, np.uint8) for n in (10, 0, BLOCK, 3 * BLOCK, SIZE)]
                    count = file.read_cached(begin, out)
                    assert 0 <= count <= max(SIZE - begin, 0)
                    assert np.concatenate(out)[:count].tobytes() == truth[begin : begin + count].tobytes()
                file.read(0, np.zeros(SIZE, np.uint8))
            assert file.read_cached(0, []) == 0

    # In one step, and nobody else's.

    def test_a_folder_that_appeared_meanwhile_is_not_published_over(self, tmp_path: Path) -> None:
        storage, folder = self.storage(tmp_path)
        for replace in (False, True):
            name = f"{folder}-{replace}"
            late = storage.stage(name, _token(), replace=replace)
            _fill(late, {"a": b"late"})
            _publish(storage, name, {"a": b"quick"})
            with _raises(FileExistsError):
                late.publish()
            late.discard()
            assert _content(storage, name) == {"a": b"quick"}

    def test_a_replacement_swaps_the_whole_folder(self, tmp_path: Path) -> None:
        storage, folder = self.storage(tmp_path)
        _publish(storage, folder, {"a": b"old", "b": b"old"})
        staging = storage.stage(folder, _token(), replace=True)
        _fill(staging, {"a": b"new", "c": b"new"})
        assert _content(storage, folder) == {"a": b"old", "b": b"old"}
        staging.publish()
        assert _content(storage, folder) == {"a": b"new", "c": b"new"}
        storage.clean(folder)
        assert _content(storage, folder) == {"a": b"new", "c": b"new"}

    def test_a_replacement_does_not_take_the_place_of_another_one(self, tmp_path: Path) -> None:
        storage, folder = self.storage(tmp_path)
        _publish(storage, folder, {"a": b"old"})
        late = storage.stage(folder, _token(), replace=True)
        _fill(late, {"a": b"late"})
        quick = storage.stage(folder, _token(), replace=True)
        _fill(quick, {"a": b"quick"})
        quick.publish()
        with _raises(FileExistsError):
            late.publish()
        late.discard()
        assert _content(storage, folder) == {"a": b"quick"}

    def test_a_replacement_of_nothing_is_an_ordinary_folder(self, tmp_path: Path) -> None:
        storage, folder = self.storage(tmp_path)
        staging = storage.stage(folder, _token(), replace=True)
        _fill(staging, {"a": b"new"})
        staging.adopt(frozenset())
        staging.publish()
        assert _content(storage, folder) == {"a": b"new"}

    def test_files_that_are_not_ours_move_into_the_new_folder(self, tmp_path: Path) -> None:
        storage, folder = self.storage(tmp_path)
        _publish(storage, folder, {"a": b"old", "b": b"old", "notes.txt": b"mine", "empty": b""})
        staging = storage.stage(folder, _token(), replace=True)
        _fill(staging, {"a": b"new"})
        staging.adopt(frozenset({"a", "b"}))
        staging.publish()
        assert _content(storage, folder) == {"a": b"new", "notes.txt": b"mine", "empty": b""}

    def test_a_file_that_is_not_ours_is_not_replaced(self, tmp_path: Path) -> None:
        storage, folder = self.storage(tmp_path)
        _publish(storage, folder, {"a": b"old", "notes.txt": b"mine"})
        staging = storage.stage(folder, _token(), replace=True)
        _fill(staging, {"a": b"new", "notes.txt": b"new"})
        with _raises(FileExistsError):
            staging.adopt(frozenset({"a"}))
        staging.discard()
        assert _content(storage, folder) == {"a": b"old", "notes.txt": b"mine"}

    # What is left over.

    def test_what_is_discarded_leaves_nothing(self, tmp_path: Path) -> None:
        storage, folder = self.storage(tmp_path)
        staging = storage.stage(folder, _token())
        _fill(staging, {"a": b"one"})
        staging.discard()
        staging.discard()
        assert not storage.exists(folder)
        assert not storage.clean(folder)
        _publish(storage, folder, {"a": b"two"})
        assert _content(storage, folder) == {"a": b"two"}

    def test_a_discarded_replacement_leaves_the_old_folder(self, tmp_path: Path) -> None:
        storage, folder = self.storage(tmp_path)
        _publish(storage, folder, {"a": b"old", "notes.txt": b"mine"})
        staging = storage.stage(folder, _token(), replace=True)
        _fill(staging, {"a": b"new"})
        staging.adopt(frozenset({"a"}))
        staging.discard()
        assert _content(storage, folder) == {"a": b"old", "notes.txt": b"mine"}

    def test_what_everybody_released_is_cleaned_away(self, tmp_path: Path) -> None:
        storage, folder = self.storage(tmp_path)
        token = _token()
        staging = storage.stage(folder, token)
        _fill(staging, {"a": b"one"})
        staging.release()
        staging.release()
        assert len(storage.clean(folder)) == 1
        assert not storage.clean(folder)
        with _raises(FileNotFoundError):
            storage.join(folder, token)
        assert not storage.exists(folder)

    def test_what_somebody_still_builds_is_not_cleaned_away(self, tmp_path: Path) -> None:
        storage, folder = self.storage(tmp_path)
        token = _token()
        first = storage.stage(folder, token)
        _fill(first, {"a": b"one"})
        second = storage.join(folder, token)
        assert not storage.clean(folder)
        second.release()
        assert not storage.clean(folder)
        first.publish()
        assert _content(storage, folder) == {"a": b"one"}

    def test_what_one_rank_released_is_kept_for_the_others(self, tmp_path: Path) -> None:
        storage, folder = self.storage(tmp_path)
        token = _token()
        first = storage.stage(folder, token)
        second = storage.join(folder, token)
        first.release()
        assert not storage.clean(folder)
        _fill(second, {"a": b"one"})
        second.publish()
        assert _content(storage, folder) == {"a": b"one"}

    def test_cleaning_touches_nothing_that_is_published(self, tmp_path: Path) -> None:
        storage, folder = self.storage(tmp_path)
        assert not storage.clean(folder)
        _publish(storage, folder, {"a": b"one"})
        _publish(storage, f"{folder}-other", {"a": b"two"})
        assert not storage.clean(folder)
        assert _content(storage, folder) == {"a": b"one"}
        assert _content(storage, f"{folder}-other") == {"a": b"two"}


def _token() -> str:
    return secrets.token_hex(16)


def _random(nbytes: int) -> Bytes:
    return np.frombuffer(random.Random(nbytes).randbytes(nbytes), np.uint8)


def _fill(staging: Staging, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        staging.create(name, len(data))
        with staging.open(name) as file:
            file.write(0, np.frombuffer(data, np.uint8))
            file.sync()


def _publish(storage: Storage, folder: str, files: dict[str, bytes]) -> None:
    staging = storage.stage(folder, _token())
    _fill(staging, files)
    staging.publish()


def _content(storage: Storage, folder: str) -> dict[str, bytes]:
    found = {}
    for name in storage.list(folder):
        with storage.open(folder, name) as file:
            out = np.empty(file.size, np.uint8)
            file.read(0, out)
            found[name] = out.tobytes()
    return found


@contextmanager
def _raises(kind: type[Exception]) -> Iterator[None]:
    try:
        yield
    except kind:
        return
    raise AssertionError(f"{kind.__name__} was not raised")
