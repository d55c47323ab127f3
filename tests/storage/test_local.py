"""Local disk: the suite on all its ways, then what only a file system has: crashes, links, pipes, full disks."""

import contextlib
import ctypes
import errno
import fcntl
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest

from flagstone.layout import BLOCK
from flagstone.storage import local, resolve
from flagstone.storage.buffers import aligned
from flagstone.storage.local import LocalDisk
from flagstone.storage.testing import StorageSuite

disk = LocalDisk()


class TestLocalDisk(StorageSuite):
    def storage(self, tmp_path):
        return disk, str(tmp_path / "runs" / "step-1")


class TestMemoryFileSystem(StorageSuite):
    @pytest.fixture(autouse=True)
    def _folder(self):
        if not os.access("/dev/shm", os.W_OK):
            pytest.skip("no /dev/shm here")
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            self.folder = folder
            yield

    def storage(self, tmp_path):
        return disk, os.path.join(self.folder, "step-1")


class TestWhereDirectIsRefused(TestLocalDisk):
    @pytest.fixture(autouse=True)
    def _refused(self, monkeypatch):
        opened = os.open

        def refuse(path, flags, *args, **kwargs):
            if flags & os.O_DIRECT:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
            return opened(path, flags, *args, **kwargs)

        monkeypatch.setattr(os, "open", refuse)


class TestWhereDirectFailsWhenItIsUsed(TestLocalDisk):
    @pytest.fixture(autouse=True)
    def _refused(self, monkeypatch):
        pwrite, preadv = os.pwrite, os.preadv

        def check(fd):
            if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

        def write(fd, *args):
            check(fd)
            return pwrite(fd, *args)

        def read(fd, *args):
            check(fd)
            return preadv(fd, *args)

        monkeypatch.setattr(os, "pwrite", write)
        monkeypatch.setattr(os, "preadv", read)


class TestWhereAtMostHalfIsReadAndWrittenAtOnce(TestLocalDisk):
    @pytest.fixture(autouse=True)
    def _halved(self, monkeypatch):
        pwrite, preadv = os.pwrite, os.preadv

        def part(fd, data):
            half = -(-len(data) // 2)
            if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
                half = max(half // BLOCK * BLOCK, min(len(data), BLOCK))
            return data[:half]

        def read(fd, out, at, flags=0):
            return preadv(fd, [part(fd, out[0])] if out else [], at, flags)

        monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, part(fd, data), at))
        monkeypatch.setattr(os, "preadv", read)


class TestWhereFoldersCannotBeExchanged(TestLocalDisk):
    @pytest.fixture(autouse=True)
    def _no_exchange(self, monkeypatch):
        monkeypatch.setattr(local, "_swap", lambda a, b: False)


class TestWhereNothingIsReadFromMemory(TestLocalDisk):
    @pytest.fixture(autouse=True)
    def _no_cache(self, monkeypatch):
        preadv = os.preadv

        def read(fd, out, at, flags=0):
            if flags:
                raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
            return preadv(fd, out, at)

        monkeypatch.setattr(os, "preadv", read)


# Helpers.


def token():
    return secrets.token_hex(16)


def fill(staging, files):
    for name, data in files.items():
        staging.create(name, len(data))
        with staging.open(name) as file:
            file.write(0, np.frombuffer(data, np.uint8))
            file.sync()


def publish(folder, files):
    staging = disk.stage(str(folder), token())
    fill(staging, files)
    staging.publish()


def content(folder):
    return {p.name: p.read_bytes() for p in Path(folder).iterdir()}


def hidden(parent):
    return [n for n in os.listdir(parent) if ".flagstone-" in n]


@pytest.fixture
def folder(tmp_path):
    return str(tmp_path / "step-1")


def in_child(work):
    """Run something in a process of its own, that may kill itself; whether it came to its end."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except BaseException as error:
            os.write(2, f"{error!r}\n".encode())
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status in (0, -signal.SIGKILL)
    return status == 0


# What is at a path.


def test_a_plain_path_names_the_local_disk_by_its_absolute_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    storage, name = resolve(Path("runs/../step-1/"))
    assert isinstance(storage, LocalDisk)
    assert name == str(tmp_path / "step-1")


def test_an_unknown_scheme_is_refused():
    with pytest.raises(ValueError, match=r"s3://.*memory://"):
        resolve("s3://bucket/step-1")


def test_an_empty_folder_is_nothing_and_is_filled(folder):
    os.mkdir(folder)
    assert not disk.exists(folder)
    publish(folder, {"a": b"one"})
    assert content(folder) == {"a": b"one"}


@pytest.mark.parametrize("replace", [False, True])
def test_a_file_that_came_into_an_empty_folder_meanwhile_is_not_lost(folder, replace):
    os.mkdir(folder)
    staging = disk.stage(folder, token(), replace=replace)
    fill(staging, {"a": b"one"})
    Path(folder, "notes.txt").write_bytes(b"mine")
    if replace:
        staging.adopt(frozenset())
        staging.publish()
        assert content(folder) == {"a": b"one", "notes.txt": b"mine"}
    else:
        with pytest.raises(FileExistsError):
            staging.publish()
        staging.discard()
        assert content(folder) == {"notes.txt": b"mine"}


@pytest.mark.parametrize("replace", [False, True])
def test_a_file_in_the_folders_place_stays(folder, replace):
    Path(folder).write_bytes(b"mine")
    assert disk.exists(folder)
    with pytest.raises(NotADirectoryError):
        disk.list(folder)
    with pytest.raises(FileExistsError):  # noqa: PT012
        staging = disk.stage(folder, token(), replace=replace)
        try:
            staging.publish()
        finally:
            staging.discard()
    assert Path(folder).read_bytes() == b"mine"
    assert not hidden(os.path.dirname(folder))


def test_where_a_link_points_to_is_what_is_built(tmp_path):
    os.symlink(tmp_path / "big" / "step-1", tmp_path / "link")
    publish(tmp_path / "link", {"a": b"one"})
    assert os.path.islink(tmp_path / "link")
    assert content(tmp_path / "big" / "step-1") == {"a": b"one"}


def test_where_a_link_points_to_is_what_is_replaced(tmp_path):
    publish(tmp_path / "step-1", {"a": b"old", "notes.txt": b"mine"})
    os.symlink("step-1", tmp_path / "latest")
    staging = disk.stage(str(tmp_path / "latest"), token(), replace=True)
    fill(staging, {"a": b"new"})
    staging.adopt(frozenset({"a"}))
    staging.publish()
    assert os.readlink(tmp_path / "latest") == "step-1"
    assert content(tmp_path / "step-1") == {"a": b"new", "notes.txt": b"mine"}
    assert not hidden(tmp_path)


# Files that are none.


def test_a_link_out_of_the_folder_is_not_followed(folder, tmp_path):
    publish(folder, {"a": b"one"})
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "step-1-other").mkdir()
    (tmp_path / "step-1-other" / "b").write_bytes(b"secret")
    for i, target in enumerate(("../secret", tmp_path / "secret", "../step-1-other/b", "/etc/passwd", "..")):
        os.symlink(target, f"{folder}/link-{i}")
        with pytest.raises(PermissionError, match="link out of the checkpoint folder"):
            disk.open(folder, f"link-{i}")


def test_a_link_within_the_folder_is_followed(folder):
    publish(folder, {"a": b"one"})
    os.symlink("a", f"{folder}/b")
    with disk.open(folder, "b") as file:
        assert file.size == 3


def test_a_pipe_a_folder_or_a_device_in_a_files_place_is_refused_at_once(folder):
    os.makedirs(f"{folder}/folder")
    os.mkfifo(f"{folder}/pipe")
    for name in ("folder", "pipe"):
        with pytest.raises(OSError, match="not a regular file"):
            disk.open(folder, name)
    assert disk.list(folder) == {}


def test_no_descriptor_is_left_open(folder):
    before = os.listdir("/proc/self/fd")
    publish(folder, {"a": b"one", "b": bytes(2 * BLOCK)})
    staging = disk.stage(folder, token(), replace=True)
    other = disk.join(folder, os.path.basename(staging._path)[-32:])
    fill(staging, {"a": b"new"})
    with pytest.raises(FileNotFoundError):
        staging.open("none")
    other.release()
    staging.publish()
    with disk.open(folder, "a"):
        pass
    os.mkfifo(f"{folder}/pipe")
    with pytest.raises(OSError, match="regular"):
        disk.open(folder, "pipe")
    with pytest.raises(FileExistsError):
        disk.stage(folder, token())
    disk.clean(folder)
    assert os.listdir("/proc/self/fd") == before


# Past the page cache.


def test_whole_blocks_of_aligned_memory_go_past_the_page_cache_and_the_rest_through_it(folder, monkeypatch):
    pwrite, preadv, direct = os.pwrite, os.preadv, []

    def note(fd, length, at):
        direct.append((at, length, bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)))

    def write(fd, data, at):
        note(fd, len(data), at)
        return pwrite(fd, data, at)

    def read(fd, out, at):
        note(fd, len(out[0]), at)
        return preadv(fd, out, at)

    monkeypatch.setattr(os, "pwrite", write)
    monkeypatch.setattr(os, "preadv", read)
    memory = aligned(4 * BLOCK)
    staging = disk.stage(folder, token())
    staging.create("a", 4 * BLOCK)
    with staging.open("a") as file:
        if file._direct is None:
            pytest.skip("no direct I/O here")
        for shift in (1, 0):  # what is not aligned does not end it for what is
            file.write(0, memory[shift : 2 * BLOCK + 100 + shift])
        file.write(3, memory[:BLOCK])
    assert direct == [
        (0, 2 * BLOCK + 100, False),
        (0, 2 * BLOCK, True),
        (2 * BLOCK, 100, False),
        (3, BLOCK, False),
    ]
    staging.publish()
    direct.clear()
    with disk.open(folder, "a") as file:
        file.read(0, memory[1 : BLOCK + 1])
        file.read(3, memory[:BLOCK])
        file.read(BLOCK, memory[: 2 * BLOCK])
        file.read(BLOCK, memory[: 2 * BLOCK + 1])
    assert direct == [
        (0, BLOCK, False),
        (3, BLOCK, False),
        (BLOCK, 2 * BLOCK, True),
        (BLOCK, 2 * BLOCK + 1, False),
    ]


# Reading while something happens.


@pytest.mark.parametrize("shift", [0, 1])
def test_a_file_that_became_shorter_is_an_error_that_names_it(folder, shift):
    publish(folder, {"a": bytes(4 * BLOCK)})
    with disk.open(folder, "a") as file:
        os.truncate(f"{folder}/a", BLOCK + 10)
        file.read(0, aligned(BLOCK))
        with pytest.raises(OSError, match=f"ends at byte 4,106 of 16,384.*{folder}/a"):
            file.read(0, aligned(4 * BLOCK + shift)[shift:])


def test_a_file_that_is_open_stays_what_it_was_when_its_folder_is_replaced(folder):
    publish(folder, {"a": b"old" * BLOCK})
    with disk.open(folder, "a") as file:
        staging = disk.stage(folder, token(), replace=True)
        fill(staging, {"a": b"new" * BLOCK})
        staging.publish()
        out = aligned(3 * BLOCK)
        file.read(0, out)
        assert out.tobytes() == b"old" * BLOCK


def test_a_closed_file_reads_and_writes_nothing(folder):
    staging = disk.stage(folder, token())
    staging.create("a", BLOCK)
    writing = staging.open("a")
    writing.close()
    staging.publish()
    reading = disk.open(folder, "a")
    reading.close()
    for call in (lambda: reading.read(0, aligned(BLOCK)), lambda: writing.write(0, aligned(BLOCK)), writing.sync):
        with pytest.raises((OSError, ValueError), match="file descriptor"):
            call()


def test_what_was_just_written_is_read_from_memory_or_not_at_all(folder):
    publish(folder, {"a": bytes(range(256)) * 64})
    with disk.open(folder, "a") as file:
        first = np.zeros(256 * 64, np.uint8)
        file.read(0, np.zeros(256 * 64 - 1, np.uint8))  # through the page cache
        assert file.read_cached(0, [first[:100], first[100:]]) in (0, 256 * 64)


# Disks that are full, or broken.


def failing(code, when=lambda *args: True, call=None):
    def fail(*args, **kwargs):
        if when(*args):
            raise OSError(code, os.strerror(code))
        return call(*args, **kwargs)

    return fail


def test_a_disk_without_space_shows_when_a_file_is_created(folder, monkeypatch):
    class Libc:
        @staticmethod
        def fallocate(fd, mode, offset, size):
            ctypes.set_errno(errno.ENOSPC)
            return -1

    monkeypatch.setattr(local, "_libc", Libc)
    staging = disk.stage(folder, token())
    with pytest.raises(OSError, match=r"No space left.*/a'$") as caught:
        staging.create("a", 1000)
    assert caught.value.errno == errno.ENOSPC
    staging.discard()
    assert not hidden(os.path.dirname(folder))


def test_where_space_cannot_be_taken_a_file_has_its_size_and_a_full_disk_shows_all_the_same(folder, monkeypatch):
    class Libc:
        @staticmethod
        def fallocate(fd, mode, offset, size):
            ctypes.set_errno(errno.EOPNOTSUPP)
            return -1

    monkeypatch.setattr(local, "_libc", Libc)
    staging = disk.stage(folder, token())
    staging.create("a", 12345)
    with pytest.raises(OSError, match="No space left") as caught:
        staging.create("b", 1 << 60)
    assert caught.value.filename.endswith("/b")
    staging.discard()
    publish(folder, {"a": b"one"})


def test_a_disk_that_fills_up_while_a_file_is_written_is_an_error_that_names_the_file(folder, monkeypatch):
    staging = disk.stage(folder, token())
    staging.create("a", 2 * BLOCK)
    monkeypatch.setattr(os, "pwrite", failing(errno.ENOSPC))
    with staging.open("a") as file:
        for length in (2 * BLOCK, 10):
            with pytest.raises(OSError, match=r"No space left.*/a'$"):
                file.write(0, aligned(length))
    staging.discard()


def test_a_disk_that_writes_nothing_is_an_error_and_no_endless_loop(folder, monkeypatch):
    staging = disk.stage(folder, token())
    staging.create("a", 10)
    monkeypatch.setattr(os, "pwrite", lambda *args: 0)
    with staging.open("a") as file, pytest.raises(OSError, match="nothing of 10 bytes was written"):
        file.write(0, aligned(10))
    staging.discard()


def test_a_disk_that_cannot_be_read_is_an_error_that_names_the_file(folder, monkeypatch):
    publish(folder, {"a": bytes(2 * BLOCK)})
    monkeypatch.setattr(os, "preadv", failing(errno.EIO))
    with disk.open(folder, "a") as file:
        for length in (2 * BLOCK, 10):
            with pytest.raises(OSError, match=f"{folder}/a"):
                file.read(0, aligned(length))


def test_bytes_that_could_not_be_made_durable_are_an_error_that_names_the_file(folder, monkeypatch):
    staging = disk.stage(folder, token())
    staging.create("a", 10)
    with staging.open("a") as file:
        monkeypatch.setattr(os, "fsync", failing(errno.EIO))
        with pytest.raises(OSError, match=r"/a'$"):
            file.sync()
    staging.discard()


@pytest.mark.parametrize("what", ["hidden folder", "parent"])
@pytest.mark.parametrize("old", [None, {"a": b"old", "notes.txt": b"mine"}])
@pytest.mark.parametrize("exchange", [True, False])
def test_a_publication_that_is_not_durable_is_withdrawn(folder, monkeypatch, what, old, exchange):
    if not exchange:
        monkeypatch.setattr(local, "_swap", lambda a, b: False)
    if old is not None:
        publish(folder, old)
    staging = disk.stage(folder, token(), replace=True)
    fill(staging, {"a": b"new"})
    staging.adopt(frozenset({"a"}))
    path = os.path.dirname(folder) if what == "parent" else staging._path

    def is_it(fd):
        return os.path.exists(path) and os.path.samestat(os.fstat(fd), os.stat(path))

    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", failing(errno.EIO, is_it, os.fsync))
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            staging.publish()
    staging.discard()
    assert (content(folder) if os.path.exists(folder) else None) == old
    assert not hidden(os.path.dirname(folder))


def test_folders_that_cannot_be_synced_are_taken_as_they_are(folder, monkeypatch):
    def is_folder(fd):
        return os.path.isdir(f"/proc/self/fd/{fd}")

    monkeypatch.setattr(os, "fsync", failing(errno.EINVAL, is_folder, os.fsync))
    publish(folder, {"a": b"one"})
    assert content(folder) == {"a": b"one"}


# The order of things.


@pytest.fixture
def calls(monkeypatch):
    """What is done to files and folders, in order."""
    found = []
    fsync, rename, swap, rmtree = os.fsync, os.rename, local._swap, shutil.rmtree

    def record(name, call, *args):
        result = call(*args)
        found.append((name, *args))
        return result

    monkeypatch.setattr(os, "fsync", lambda fd: (found.append(("sync", os.readlink(f"/proc/self/fd/{fd}"))), fsync(fd)))
    monkeypatch.setattr(os, "rename", lambda a, b: record("rename", rename, a, b))
    monkeypatch.setattr(local, "_swap", lambda a, b: record("swap", swap, a, b))
    monkeypatch.setattr(shutil, "rmtree", lambda path, **k: (found.append(("remove", path)), rmtree(path, **k)))
    return found


def test_files_then_their_folder_are_durable_before_it_appears_and_that_before_we_say_so(folder, calls):
    staging = disk.stage(folder, token())
    fill(staging, {"a": b"one", "b": b"two"})
    staging.publish()
    path, parent = staging._path, os.path.dirname(folder)
    assert calls == [
        ("sync", f"{path}/a"),
        ("sync", f"{path}/b"),
        ("sync", path),
        ("rename", path, folder),
        ("sync", parent),
    ]


def test_the_old_folder_is_removed_when_the_new_one_is_durable_under_its_name(folder, calls):
    publish(folder, {"a": b"old"})
    staging = disk.stage(folder, token(), replace=True)
    fill(staging, {"a": b"new"})
    calls.clear()
    staging.publish()
    path, parent = staging._path, os.path.dirname(folder)
    assert calls == [("sync", path), ("swap", path, folder), ("sync", parent), ("remove", path)]


def test_without_an_exchange_too_the_old_folder_is_removed_last(folder, calls, monkeypatch):
    publish(folder, {"a": b"old"})
    staging = disk.stage(folder, token(), replace=True)
    fill(staging, {"a": b"new"})
    calls.clear()
    monkeypatch.setattr(local, "_swap", lambda a, b: False)
    staging.publish()
    path, parent = staging._path, os.path.dirname(folder)
    aside = f"{path}.old"
    assert calls == [
        ("sync", path),
        ("rename", folder, aside),
        ("rename", path, folder),
        ("sync", parent),
        ("remove", aside),
    ]


def test_folders_above_are_made_durable_too(tmp_path, calls):
    disk.stage(str(tmp_path / "a" / "b" / "step-1"), token()).discard()
    assert [c for c in calls if c[0] == "sync"] == [("sync", str(tmp_path)), ("sync", str(tmp_path / "a"))]


# Taking over what is not ours.


def test_folders_and_links_of_others_move_into_the_new_folder(folder, calls):
    publish(folder, {"a": b"old"})
    os.makedirs(f"{folder}/logs/deep")
    Path(folder, "logs", "deep", "events").write_bytes(b"mine")
    os.symlink("../elsewhere", f"{folder}/link")
    os.symlink("deep", f"{folder}/logs/link")
    staging = disk.stage(folder, token(), replace=True)
    fill(staging, {"a": b"new"})
    calls.clear()
    staging.adopt(frozenset({"a"}))
    synced = [path.removeprefix(staging._path) for name, path in calls if name == "sync"]
    assert sorted(synced) == ["/logs", "/logs/deep"]
    staging.publish()
    assert Path(folder, "a").read_bytes() == b"new"
    assert Path(folder, "logs", "deep", "events").read_bytes() == b"mine"
    assert os.readlink(f"{folder}/link") == "../elsewhere"
    assert os.readlink(f"{folder}/logs/link") == "deep"
    assert not hidden(os.path.dirname(folder))


def test_a_folder_that_is_not_ours_is_not_replaced(folder):
    publish(folder, {"a": b"old"})
    os.makedirs(f"{folder}/b")
    staging = disk.stage(folder, token(), replace=True)
    fill(staging, {"a": b"new", "b": b"new"})
    with pytest.raises(FileExistsError):
        staging.adopt(frozenset({"a"}))
    staging.discard()
    assert os.path.isdir(f"{folder}/b")


def test_where_there_are_no_hard_links_files_are_copied_and_made_durable(folder, calls, monkeypatch):
    publish(folder, {"a": b"old", "notes.txt": b"mine"})
    os.symlink("a", f"{folder}/link")
    monkeypatch.setattr(os, "link", failing(errno.EPERM))
    staging = disk.stage(folder, token(), replace=True)
    fill(staging, {"a": b"new"})
    staging.adopt(frozenset({"a"}))
    assert ("sync", f"{staging._path}/notes.txt") in calls
    staging.publish()
    assert content(folder) == {"a": b"new", "notes.txt": b"mine", "link": b"new"}
    assert os.path.islink(f"{folder}/link")


def test_an_old_folder_that_was_removed_meanwhile_is_not_missed(folder):
    publish(folder, {"a": b"old"})
    staging = disk.stage(folder, token(), replace=True)
    fill(staging, {"a": b"new"})
    shutil.rmtree(folder)
    staging.adopt(frozenset())
    staging.publish()
    assert content(folder) == {"a": b"new"}


@pytest.mark.parametrize("exchange", [True, False])
@pytest.mark.parametrize("other", ["folder", "file", "link", "link to nothing"])
def test_what_took_the_old_folders_place_by_other_means_is_put_back(folder, monkeypatch, exchange, other):
    if not exchange:
        monkeypatch.setattr(local, "_swap", lambda a, b: False)
    publish(folder, {"a": b"old"})
    staging = disk.stage(folder, token(), replace=True)
    fill(staging, {"a": b"new"})
    os.rename(folder, f"{folder}-moved")
    make = {
        "folder": os.mkdir,
        "file": lambda path: Path(path).write_bytes(b"mine"),
        "link": lambda path: os.symlink("/", path),
        "link to nothing": lambda path: os.symlink("nothing", path),
    }
    make[other](folder)
    before = os.lstat(folder)
    with pytest.raises(FileExistsError):
        staging.publish()
    staging.discard()
    assert os.path.samestat(os.lstat(folder), before)
    assert content(f"{folder}-moved") == {"a": b"old"}
    assert not hidden(os.path.dirname(folder))


def test_a_second_rename_that_fails_brings_the_old_folder_back(folder, monkeypatch):
    publish(folder, {"a": b"old"})
    staging = disk.stage(folder, token(), replace=True)
    fill(staging, {"a": b"new"})
    monkeypatch.setattr(local, "_swap", lambda a, b: False)
    with monkeypatch.context() as broken:
        broken.setattr(os, "rename", failing(errno.EIO, lambda a, b: a == staging._path, os.rename))
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            staging.publish()
    staging.discard()
    assert content(folder) == {"a": b"old"}
    assert not hidden(os.path.dirname(folder))


# Processes that die.

_STAGES = """
import sys
import numpy as np
from flagstone.storage.local import LocalDisk

folder, token = sys.argv[1:]
staging = LocalDisk().stage(folder, token)
staging.create("a", 10_000)
with staging.open("a") as file:
    file.write(0, np.ones(10_000, np.uint8))
    file.sync()
print("staged", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def builder(folder, token):
    """A process that stages a folder, writes into it, and then waits."""
    command = [sys.executable, "-c", _STAGES, folder, token]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout.readline() == b"staged\n"
            yield process
        finally:
            process.kill()


def test_what_a_killed_process_left_is_cleaned_away_and_what_a_live_one_builds_is_not(folder, tmp_path):
    dead, alive = token(), token()
    with builder(folder, dead) as first, builder(f"{folder}-other", alive):
        assert disk.clean(folder) == []
        assert len(hidden(tmp_path)) == 2
        first.send_signal(signal.SIGKILL)
        first.wait()
        assert disk.clean(folder) == [str(tmp_path / f".step-1.flagstone-{dead}")]
        assert hidden(tmp_path) == [f".step-1-other.flagstone-{alive}"]
        assert not os.path.exists(folder)
    assert len(disk.clean(folder)) == 1
    assert os.listdir(tmp_path) == []


def test_a_folder_whose_first_builder_was_killed_is_kept_while_another_rank_writes(folder, tmp_path):
    name = token()
    with builder(folder, name) as first:
        joined = disk.join(folder, name)
        first.send_signal(signal.SIGKILL)
        first.wait()
        assert disk.clean(folder) == []
        joined.release()
        assert len(disk.clean(folder)) == 1


def test_only_folders_that_are_ours_by_name_are_cleaned_away(folder, tmp_path):
    name = f".step-1.flagstone-{token()}"
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "a").write_bytes(b"mine")
    os.symlink("elsewhere", tmp_path / name)
    os.symlink("elsewhere", tmp_path / f".gone.flagstone-{token()}.old")
    (tmp_path / f".x.flagstone-{token()}").write_bytes(b"a file")
    for other in (".step-1", ".step-1.flagstone-", name[:-1], f"{name}.new", f"{name}.old.old", name[1:]):
        (tmp_path / other).mkdir()
        (tmp_path / other / "a").write_bytes(b"mine")
    before = sorted(os.walk(tmp_path))
    assert disk.clean(folder) == []
    assert sorted(os.walk(tmp_path)) == before
    assert disk.clean(str(tmp_path / "none" / "step-1")) == []


def test_where_there_are_no_locks_folders_are_built_and_leftovers_are_left(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", failing(errno.ENOSYS))
    publish(folder, {"a": b"one"})
    staging = disk.stage(folder, token(), replace=True)
    fill(staging, {"a": b"two"})
    left = disk.stage(f"{folder}-left", token())
    left.release()
    assert disk.clean(folder) == []
    assert len(hidden(tmp_path)) == 2
    staging.publish()
    assert content(folder) == {"a": b"two"}


def test_a_cleaner_that_comes_before_the_lock_does_not_stop_a_builder(folder, monkeypatch):
    mkdir, cleaned = os.mkdir, []

    def made(path, *args, **kwargs):
        mkdir(path, *args, **kwargs)
        if not cleaned:
            cleaned.extend(disk.clean(folder))

    monkeypatch.setattr(os, "mkdir", made)
    publish(folder, {"a": b"one"})
    assert len(cleaned) == 1
    assert content(folder) == {"a": b"one"}


def test_a_builder_waits_for_a_cleaner_that_has_the_lock_already(folder, monkeypatch):
    mkdir, cleaners = os.mkdir, []

    def made(path, *args, **kwargs):
        mkdir(path, *args, **kwargs)
        if cleaners:
            return
        lock = local._claim(path)

        def remove():
            shutil.rmtree(path)
            os.close(lock)

        cleaners.append(threading.Timer(0.05, remove))
        cleaners[0].start()

    monkeypatch.setattr(os, "mkdir", made)
    staging = disk.stage(folder, token())
    cleaners[0].join()
    fill(staging, {"a": b"one"})
    staging.publish()
    assert content(folder) == {"a": b"one"}


_CALLS = ("open", "mkdir", "rename", "link", "fsync", "pwrite", "unlink", "rmdir", "close")


def killed_at(number, work):
    """Do something in a process that is killed at its ``number``-th call of the system; whether it came to its end."""

    def run():
        left = number

        def counted(call):
            def count(*args, **kwargs):
                nonlocal left
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return call(*args, **kwargs)

            return count

        for name in _CALLS:
            setattr(os, name, counted(getattr(os, name)))
        local._swap = counted(local._swap)
        work()

    return in_child(run)


@pytest.mark.parametrize("exchange", [True, False])
@pytest.mark.parametrize("replace", [True, False])
def test_whenever_a_process_is_killed_there_is_the_old_or_the_new(tmp_path, monkeypatch, exchange, replace):
    if not exchange:
        monkeypatch.setattr(local, "_swap", lambda a, b: False)
    old = {"a": b"old", "b": b"old", "notes.txt": b"mine"} if replace else None
    new = {"a": b"new", "c": b"new"} | ({"notes.txt": b"mine"} if replace else {})
    seen, number, is_done = [], 0, False

    while not is_done:
        folder = tmp_path / f"{number}" / "step-1"
        folder.parent.mkdir()
        if old is not None:
            publish(folder, old)

        def work(folder=folder):
            staging = disk.stage(str(folder), token(), replace=replace)
            fill(staging, {"a": b"new", "c": b"new"})
            staging.adopt(frozenset({"a", "b"}))
            staging.publish()

        is_done = killed_at(number, work)
        disk.clean(str(folder))
        assert not hidden(folder.parent)
        found = content(folder) if folder.exists() else None
        assert found in (old, new)
        seen.append(found == new)
        number += 1
    assert number > 15
    assert seen == sorted(seen)  # first the old, then the new
    assert not seen[0]
    assert seen[-1]


def test_a_crash_between_two_renames_leaves_the_old_folder_to_be_brought_back(folder, monkeypatch):
    publish(folder, {"a": b"old"})

    def work():
        staging = disk.stage(folder, token(), replace=True)
        fill(staging, {"a": b"new"})
        rename, count = os.rename, iter(range(2))

        def once(a, b):
            if next(count):
                os.kill(os.getpid(), signal.SIGKILL)
            rename(a, b)

        local._swap = lambda a, b: False
        os.rename = once
        staging.publish()

    assert not in_child(work)
    assert not disk.exists(folder)
    assert len(hidden(os.path.dirname(folder))) == 2
    assert len(disk.clean(folder)) == 1
    assert content(folder) == {"a": b"old"}
    assert not hidden(os.path.dirname(folder))


def test_an_old_folder_that_was_moved_aside_is_not_brought_back_while_its_replacement_lives(folder):
    publish(folder, {"a": b"old"})
    staging = disk.stage(folder, token(), replace=True)
    fill(staging, {"a": b"new"})
    os.rename(folder, f"{staging._path}.old")  # the first of two renames
    assert disk.clean(folder) == []
    assert not os.path.exists(folder)
    os.rename(f"{staging._path}.old", folder)
    staging.publish()
    assert content(folder) == {"a": b"new"}
