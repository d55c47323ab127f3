from flagstone.storage import resolve
from flagstone.storage.memory import SHARED, Memory
from flagstone.storage.testing import StorageSuite


class TestMemory(StorageSuite):
    def storage(self, tmp_path):
        return Memory(), "runs/step-1"


def test_a_memory_path_names_a_folder_of_this_process():
    assert resolve("memory://runs/step-1/") == (SHARED, "runs/step-1")


def test_a_file_can_be_put_into_a_folder_and_taken_from_it():
    memory = Memory()
    memory.put("a", "notes.txt", b"mine")
    assert memory.list("a") == {"notes.txt": 4}
    assert memory.get("a", "notes.txt") == b"mine"


def test_nothing_is_kept_of_a_folder_that_was_replaced():
    memory = Memory()
    for token in ("0" * 32, "1" * 32):
        memory.stage("a", token, replace=True).publish()
    assert not memory._attempts
