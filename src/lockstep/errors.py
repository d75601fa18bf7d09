"""One exception a kind of failure.

Every message answers three questions: what was found, what is needed, what to do. The message is
put together here so that no caller can forget one of them.
"""

from __future__ import annotations


class LockstepError(RuntimeError):
    """Base of all failures that Lockstep reports.

    It derives from RuntimeError because that is what torch.distributed raises, so that existing
    ``except RuntimeError`` clauses keep working.

    Args:
        found: what was seen.
        needed: what should have been there instead.
        cure: what to type or change.
    """

    def __init__(self, found: str, *, needed: str = "", cure: str = "") -> None:
        self.found, self.needed, self.cure = found, needed, cure
        lines = [found]
        if needed:
            lines.append(f"  needed: {needed}")
        if cure:
            lines.append(f"  to do:  {cure}")
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.found, self.needed, self.cure)


def _rebuild(kind: type[LockstepError], found: str, needed: str, cure: str) -> LockstepError:
    return kind(found, needed=needed, cure=cure)


def counted(number: int, what: str) -> str:
    """Return "1 rank" or "2 ranks" for 1 or 2 of "rank". Local."""
    return f"{number} {what}{'' if number == 1 else 's'}"


class LaunchError(LockstepError):
    """The processes were not started as one world, or the MPI library cannot start."""


class RendezvousError(LaunchError):
    """The ranks of a launch cannot meet to open torch.distributed: no shared directory, no way."""


class DeviceError(LaunchError):
    """The devices that were asked for are not there, on at least one rank."""


class SpawnError(LockstepError):
    """Ranks that `lockstep.spawn` started did not all return a result."""


class SpawnTimeout(SpawnError, TimeoutError):
    """Ranks that `lockstep.spawn` started did not end within their limit, and were ended."""


class CollectiveTimeout(LockstepError, TimeoutError):
    """A verb did not finish within the timeout of its group."""


class CollectiveMismatch(LockstepError):
    """The ranks of a group called different verbs, or the same verb with different arguments."""


class GroupBroken(LockstepError):
    """A verb was called on a group that an earlier failure has left unusable, or that is closed."""


class MPIFailure(LockstepError):
    """MPI itself reported an error; the message carries MPI's own text."""


class DataError(LockstepError):
    """A data set is missing, damaged, or cannot be fetched."""


class StorageError(LockstepError):
    """A file of a run cannot be written or read, or another job is using it."""


class CheckpointError(LockstepError):
    """A checkpoint cannot be used: it is damaged, or of another model or optimizer."""


class SettingsError(LockstepError, ValueError):
    """A setting of a job, such as a flag on its command line, cannot be used."""


class HostfileError(SettingsError):
    """A hostfile, or Slurm's list of nodes, cannot be used; the message has the line's number."""


class RefusedByPeer(LockstepError, TypeError, ValueError):
    """Another rank refused the arguments of a collective verb; this rank's own were good.

    It is a TypeError and a ValueError, since that is what the refusing rank itself raises: one
    ``except`` clause then serves on all ranks.
    """


def cure_of_late(*, gone: bool) -> str:
    """Return what to do about a rank that did not come, or whose process is gone. Local."""
    if gone:
        return (
            "look at what that rank printed last, and for a lack of memory (dmesg on its host, the "
            "batch system's limits)"
        )
    return (
        "look at where the verdict above says that rank is, or at what it prints; if it is "
        "stopped: kill -CONT on its host; a longer timeout: session(timeout=SECONDS), or "
        "init_process_group(…, timeout=timedelta(seconds=…))"
    )
