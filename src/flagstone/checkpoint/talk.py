"""How ranks come to one verdict: each says a word, the coordinator judges, all act alike. Used by save and load."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from flagstone.checkpoint.world import SilentRank, World
from flagstone.errors import FlagstoneError

Verdict = TypeVar("Verdict", bound="Ruling")


class Ruling(msgspec.Struct, omit_defaults=True):
    """What the ranks do next; to fail, when ``error`` is set."""

    error: str = ""


def settle(
    world: World,
    topic: str,
    word: msgspec.Struct | dict[str, Any] | None,
    judge: Callable[[list[Any]], Verdict],
    ruling: type[Verdict],
    seconds: float,
    speakers: Sequence[int] | None = None,
) -> Verdict:
    """The verdict of the coordinator on the words of ``speakers``, the same on all ranks, within ``seconds``.

    Its ``error`` is set when a rank was silent, or when the judge raised. Who waits in vain for the coordinator offers
    that as the verdict; as only the first offer counts, a coordinator that comes late does not go another way.
    """
    speakers = range(world.size) if speakers is None else speakers
    if world.size == 1:
        return _judged(judge, [word], ruling)
    try:
        said = _said(world, topic, word, judge, ruling, seconds, speakers)
    except OSError as error:  # the store is gone, and with it whoever held it
        return ruling(error=in_words(error))
    world.settled(topic)
    return msgspec.json.decode(said, type=ruling)


def _said(
    world: World,
    topic: str,
    word: msgspec.Struct | dict[str, Any] | None,
    judge: Callable[[list[Any]], Verdict],
    ruling: type[Verdict],
    seconds: float,
    speakers: Sequence[int],
) -> bytes:
    if world.is_coordinator:
        # A little less than the others wait, so that it is the silent rank that is named, and not the coordinator.
        wait = seconds * 0.9
        others = [r for r in speakers if r != world.rank]
        heard = dict(zip(others, world.hear(topic, others, wait) if others else [], strict=True))
        silent = [r for r, w in heard.items() if w is None]
        if silent:
            offer = ruling(error=str(SilentRank(silent, wait)))
        else:
            kind = type(word)
            words = [word if r == world.rank else msgspec.json.decode(heard[r] or b"", type=kind) for r in speakers]
            offer = _judged(judge, words, ruling)
        return world.decide(topic, msgspec.json.encode(offer))
    if world.rank in speakers:
        world.tell(topic, msgspec.json.encode(word))
    try:
        return world.verdict(topic, seconds)
    except SilentRank as error:
        return world.decide(topic, msgspec.json.encode(ruling(error=in_words(error))))


def _judged(judge: Callable[[list[Any]], Verdict], words: list[Any], ruling: type[Verdict]) -> Verdict:
    try:
        return judge(words)
    except Exception as error:  # whatever it is, the other ranks wait for a word
        return ruling(error=in_words(error))


def in_words(error: BaseException) -> str:
    """An error as one line that says what, and where."""
    if isinstance(error, OSError) and error.strerror:
        file = f"{error.filename}: " if error.filename else ""
        return f"{file}{type(error).__name__}: [Errno {error.errno}] {error.strerror}"
    if isinstance(error, (FlagstoneError, SilentRank)):
        return str(error)
    return f"{type(error).__name__}: {error}"


def merged(errors: Mapping[int, str], size: int) -> str:
    """The errors of the ranks that have one, each once, with its ranks."""
    if size == 1:
        return errors[0]
    ranks: dict[str, list[int]] = {}
    for rank, error in errors.items():
        ranks.setdefault(error, []).append(rank)
    return "; ".join(f"rank {listed(r)}: {e}" for e, r in ranks.items())


def listed(ranks: Sequence[int]) -> str:
    """Rank numbers for a message."""
    return ", ".join(map(str, ranks[:8])) + (" …" if len(ranks) > 8 else "")
