"""What the ranks of a node are doing, as one of them can see it. Local: waits for nobody."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from time import monotonic_ns
from typing import IO, TYPE_CHECKING, Any

from lockstep.notes import GAVE_UP, HELD, RAISED, SHOW, STACKS, TOLD, read_word, write_word
from lockstep.watchdog import stacks
from lockstep.watchdog.life import Life, state
from lockstep.watchdog.reading import Notes, read
from lockstep.watchdog.report import RankReport, report
from lockstep.watchdog.words import waits_in

if TYPE_CHECKING:
    from lockstep.shared_memory import Segment

# So many ranks of a node, the first ones, look after all of them.
REPORTERS = 2


class Node:
    """The ranks of a node.

    Args:
        segment: their notes.
        ranks: their ranks in the world, in the order of the segment.
        host: its name.

    Attributes:
        ranks: as given.
        parts: the notes of each.
        lives: its process, once they are watched.
    """

    def __init__(self, segment: Segment, ranks: Sequence[int], host: str) -> None:
        self.ranks, self._mine, self._host = ranks, segment.rank, host
        self.parts: list[Any] = [segment.part(r) for r in range(segment.size)]
        self.lives: dict[int, Life] = {}
        self._kept: dict[int, IO[bytes] | None] = {}

    def watch(self) -> None:
        """Look at their processes from now on; they have written their numbers."""
        self.lives = {local: Life(read(part).pid) for local, part in enumerate(self.parts)}

    def look(self) -> Iterator[tuple[int, Notes]]:
        """Yield what each has noted."""
        for local, part in enumerate(self.parts):
            said = read(part)
            if said.stacks and local not in self._kept:
                self._kept[local] = stacks.keep(said.pid, said.stacks)
            yield local, said

    def said(self, local: int) -> Notes:
        """Return what one has noted."""
        return read(self.parts[local])

    def report_of(self, local: int) -> RankReport:
        """Return what one has noted, and how it is; they are watched."""
        life = self.lives[local]
        how_it_is = "gone" if life.gone else "stopped" if life.stopped else "running"
        how = life.how() if how_it_is == "gone" else ""
        return report(self.ranks[local], self._host, read(self.parts[local]), how_it_is, how)

    def reports(self, *, now: bool = False) -> list[RankReport]:
        """Return what is known of each; they are watched.

        Args:
            now: ask them where they are. What a rank has noted of it may be of a moment before; one
                that is on its way looks then as if it did something else.
        """
        found = [self.report_of(local) for local in range(len(self.parts))]
        ask = [n for n, it in enumerate(found) if it.life == "running" and (now or it.stuck)]
        ask = [n for n in ask if n != self._mine and not self._stays(n, found[n])]
        places = stacks.places({n: self._offer(n) for n in ask})
        for local, it in enumerate(found):
            if it.life == "gone":  # where it has crashed it cannot say itself
                places[local] = stacks.place(stacks.of_crash(self._kept.get(local)))
            elif places.get(local) == "" and self.lives[local].gone:
                found[local] = self.report_of(local)
        return [replace(it, place=places.get(n) or it.place) for n, it in enumerate(found)]

    def stacks_of(self, ranks: Sequence[int]) -> dict[int, str]:
        """Return the stacks of those of the ranks that are here; "" of one that cannot answer.

        Another one that looks after the node answers for itself if it can, and waits for nobody.
        """
        found, offers = {}, {}
        for local in (n for n, rank in enumerate(self.ranks) if rank in ranks):
            it = self.report_of(local)
            if it.life == "gone":
                found[local] = stacks.of_crash(self._kept.get(local))
            elif local == self._mine:
                found[local] = stacks.own()
            elif it.life == "stopped":
                found[local] = ""
            elif local >= REPORTERS or it.stuck:
                offers[local] = self._offer(local)
        found |= stacks.fetch(offers, lambda n: write_word(self.parts[n], SHOW, 1))
        return {self.ranks[local]: text for local, text in found.items()}

    def can_speak(self, rank: int) -> bool:
        """Say whether a rank is neither stopped nor gone, as far as can be seen from here."""
        if rank not in self.ranks:
            return True
        return state(self._noted_by(rank).pid) not in ("", "Z", "X", "T", "t")

    def gave_up(self, rank: int) -> bool:
        """Say whether a rank, if it is here, has noted that it ends by an error."""
        return rank in self.ranks and self._noted_by(rank).state in (RAISED, GAVE_UP)

    def is_first(self) -> bool:
        """Say whether this rank is the first of the reporters that can speak."""
        able = [rank for rank in self.ranks[:REPORTERS] if self.can_speak(rank)]
        return bool(able) and able[0] == self.ranks[self._mine]

    def is_mute(self) -> bool:
        """Say whether no reporter can speak, so that any other rank has to."""
        return not any(self.can_speak(rank) for rank in self.ranks[:REPORTERS])

    def tell(self) -> None:
        """Let all know that a verdict was given; nobody but reporters writes there."""
        now = monotonic_ns()
        for part in self.parts:
            write_word(part, TOLD, now)

    def close(self) -> None:
        """Let go of the processes and their stacks."""
        for life in self.lives.values():
            life.close()
        for file in self._kept.values():
            if file is not None:
                file.close()

    def _noted_by(self, rank: int) -> Notes:
        return read(self.parts[list(self.ranks).index(rank)])

    def _offer(self, local: int) -> tuple[int, int]:
        return self.lives[local].pid, read_word(self.parts[local], STACKS)

    def _stays(self, local: int, it: RankReport) -> bool:
        """Say whether a rank is where it has noted: in a call, or where it raised an error."""
        return waits_in(it) is not None or bool(read_word(self.parts[local], HELD))
