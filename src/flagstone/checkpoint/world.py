"""How the ranks of a save or a load talk: a key-value store for words, a link for bytes. No torch here.

The coordinator, rank 0 of the group, collects a word from every rank and answers all with one. Who waits too long
does not simply leave: a verdict is a key that only the first writer sets, so whatever happens, all ranks that are
alive come to the same end.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from flagstone.storage.base import Bytes


class SilentRank(Exception):
    """Ranks that did not say anything in time: ``ranks``."""

    def __init__(self, ranks: Sequence[int], seconds: float) -> None:
        shown = ", ".join(map(str, ranks[:8])) + (" …" if len(ranks) > 8 else "")
        super().__init__(f"rank {shown} was silent for {seconds:g} s: it died, hangs, or did not make the call")
        self.ranks = list(ranks)


class Store(ABC):
    """A key-value store that all ranks see."""

    @abstractmethod
    def set(self, key: str, value: bytes) -> None: ...

    @abstractmethod
    def get(self, keys: Sequence[str], seconds: float) -> list[bytes | None]:
        """The values, waiting at most so long for those that are not there yet; None for what never came."""

    @abstractmethod
    def first(self, key: str, value: bytes) -> bytes:
        """Set a key unless it is set; what it holds then."""

    @abstractmethod
    def delete(self, key: str) -> None: ...


class Link(ABC):
    """A way for bytes from rank to rank."""

    @abstractmethod
    def exchange(self, send: Mapping[int, Bytes], receive: Mapping[int, Bytes], seconds: float) -> None:
        """Send and receive at the same time; every message has its counterpart on the other side.

        Raises:
            SilentRank, OSError: a peer is gone.
        """

    @abstractmethod
    def reset(self) -> None:
        """Something went wrong, and all ranks know it: begin anew with the next exchange."""


class World:
    """The ranks that do one thing together, seen from one of them."""

    def __init__(self, rank: int, size: int, store: Store | None = None, link: Link | None = None) -> None:
        if size > 1 and store is None:
            raise ValueError("several ranks need a store")
        self.rank, self.size = rank, size
        self._store, self._link = store, link
        self._calls = 0
        self._settled: list[str] = []

    @property
    def is_coordinator(self) -> bool:
        return self.rank == 0

    @property
    def link(self) -> Link:
        if self._link is None:
            raise ValueError("this world has no link between its ranks")
        return self._link

    def tell(self, topic: str, word: bytes) -> None:
        """Say a word to the coordinator."""
        if self._store is not None:
            self._store.set(f"{topic}/{self.rank}", word)

    def hear(self, topic: str, ranks: Sequence[int], seconds: float) -> list[bytes | None]:
        """On the coordinator: what these ranks said; None for those who were silent for ``seconds``."""
        if self._store is None:
            raise ValueError("a world of one rank has nobody to hear")
        return self._store.get([f"{topic}/{r}" for r in ranks], seconds)

    def decide(self, topic: str, word: bytes) -> bytes:
        """Offer a verdict; the one that was offered first, by whichever rank."""
        return word if self._store is None else self._store.first(f"{topic}/verdict", word)

    def verdict(self, topic: str, seconds: float) -> bytes:
        """Wait for the verdict. Raises SilentRank: it did not come."""
        if self._store is None:
            raise ValueError("a world of one rank decides by itself")
        (word,) = self._store.get([f"{topic}/verdict"], seconds)
        if word is None:
            raise SilentRank([0], seconds)
        return word

    def reset_link(self) -> None:
        if self._link is not None:
            self._link.reset()

    def topic(self, call: str) -> str:
        """A name for the next thing that the ranks do together: the same on all, as all do the same things."""
        self._calls += 1
        return f"{call}/{self._calls}"

    def settled(self, topic: str) -> None:
        """All ranks will have read a topic's verdict when they next say a word to the coordinator."""
        if self._store is not None:
            self._store.delete(f"{topic}/{self.rank}")
            self._settled.append(topic)

    def forget(self) -> None:
        """On the coordinator, when it has heard from all ranks again: remove the verdicts that they have read."""
        topics, self._settled = self._settled, []
        if self._store is not None and self.is_coordinator:
            for topic in topics:
                self._store.delete(f"{topic}/verdict")
