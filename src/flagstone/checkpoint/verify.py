"""Verify: every byte of a checkpoint against its checksum."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from flagstone.checkpoint.reading import Folder, Reader
from flagstone.errors import Damage, DamagedError, LoadError
from flagstone.storage import Storage


@dataclass(frozen=True)
class VerifyReport:
    """What was checked, and found whole.

    Attributes:
        path: the checkpoint's folder.
        files: number of files.
        tensors: number of tensors.
        nbytes: bytes of all files.
    """

    path: str
    files: int
    tensors: int
    nbytes: int


def verify(storage: Storage, path: str, progress: Callable[[int, int], None] | None = None) -> VerifyReport:
    """Check a whole checkpoint.

    Raises:
        DamagedError: naming file, range and tensor of all that is damaged.
        LoadError: there is no checkpoint, or its manifest cannot be.
    """
    folder = Folder(storage, path)
    try:
        damage: list[Damage] = folder.faults()
        broken = {d.file for d in damage}
        whole = []
        for file in folder.manifest.files:
            if file.digest or file.name in broken:
                continue
            whole.append(file.name)
            try:
                if file.name.startswith("rank-"):
                    folder.rank_places(file.name)
                else:
                    folder.places(file.name)
            except DamagedError as error:
                damage += error.damage or (Damage(file.name, 0, file.size, (), str(error)),)
            except LoadError as error:
                damage.append(Damage(file.name, 0, file.size, (), str(error)))
        damage += [d for d in folder.check_small() if d.file not in broken] if not broken else []
        found = Reader(folder, [], True, progress).check(whole)
        known = {(d.file, d.start) for d in damage}
        damage += [d for d in found if (d.file, d.start) not in known]
        if damage:
            shown = "; ".join(map(str, damage[:20])) + ("; …" if len(damage) > 20 else "")
            raise DamagedError(f"{path} is damaged: {shown}", tuple(damage))
        manifest = folder.manifest
        return VerifyReport(path, len(manifest.files) + 2, len(manifest.tensors), sum(f.size for f in manifest.files))
    finally:
        folder.close()
