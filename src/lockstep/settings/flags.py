"""A frozen dataclass whose fields are flags, read from the command line and checked when made."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

from lockstep.errors import SettingsError

S = TypeVar("S")


def flag(
    default: Any, about: str, choices: Sequence[str] | None = None, least: int | None = None
) -> Any:
    """Return a field of a dataclass that is a flag of a job, with its smallest value. Local."""
    return field(default=default, metadata={"help": about, "choices": choices, "least": least})


@dataclass(frozen=True)
class Checked:
    """Base of all groups of flags: each checks its own in ``__post_init__``, then calls super's."""

    def __post_init__(self) -> None:
        """Refuse numbers that make no sense."""
        for one in fields(self):
            least = one.metadata["least"]
            good = least is None or getattr(self, one.name) >= least
            self._need(one.name, good, f"{least} or more")

    def _need(self, name: str, good: bool, needed: str) -> None:
        if not good:
            flags = "--" + name.replace("_", "-")
            raise SettingsError(
                f"found {flags} {getattr(self, name)!r}", needed=needed, cure=f"change {flags}"
            )

    def _need_above_0(self, *names: str) -> None:
        for name in names:
            self._need(name, 0 < getattr(self, name) < math.inf, "above 0")

    def _need_0_or_more(self, *names: str) -> None:
        for name in names:
            self._need(name, 0 <= getattr(self, name) < math.inf, "0 or more")


def parse(
    kind: type[S],
    argv: Sequence[str] | None,
    description: str | None,
    presets: Callable[[S], dict[str, Any]] | None = None,
) -> S:
    """Read the settings from the command line. Local; starts no MPI.

    Args:
        kind: a frozen dataclass whose fields are made with `flag`.
        argv: the arguments; None for those of the command line.
        description: what the job does, for --help.
        presets: given the settings, returns other defaults for the flags that were not given.

    Raises:
        SystemExit: 0 after --help; 2, with a message, after a flag that is unknown or wrong.
    """
    parser = argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # a flag that is left out must not be taken for a longer one
    )
    hints = get_type_hints(kind)
    for one in fields(kind):  # type: ignore[arg-type]  # a dataclass
        _add(parser, one.name, hints[one.name], one.default, one.metadata)
    try:
        settings = kind(**vars(parser.parse_args(argv)))
        if presets is not None and (others := presets(settings)):
            parser.set_defaults(**others)
            settings = kind(**vars(parser.parse_args(argv)))
    except SettingsError as error:
        parser.error(str(error))
    return settings


def _path(text: str) -> Path:
    """Refuse "", which a variable gives that is not set: Path("") is where the job was started."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty; a directory of one's own is '.'")
    return Path(text)


def _add(
    parser: argparse.ArgumentParser, name: str, hint: Any, default: Any, metadata: Any
) -> None:
    flags, about = "--" + name.replace("_", "-"), metadata["help"]
    if hint is bool:
        parser.add_argument(flags, action="store_true", default=default, help=about)
        return
    kind = next((one for one in get_args(hint) if one is not type(None)), hint)
    kind = _path if kind is Path else kind
    about += "" if default is None else f" (default {default})"
    parser.add_argument(flags, type=kind, default=default, choices=metadata["choices"], help=about)
