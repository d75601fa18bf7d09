"""Refuse what an SGD cannot work with, before the ranks rely on it. Everything here is Local."""

from __future__ import annotations


def check_examples(examples: object) -> None:
    """Refuse what is no number of examples. Local."""
    if not isinstance(examples, int) or isinstance(examples, bool) or examples < 0:
        raise ValueError(
            f"found examples={examples!r}\n  needed: a whole number of examples, 0 or more\n"
            "  to do:  pass len(batch)"
        )


def check_numbers(
    lr: float, momentum: float, weight_decay: float, nesterov: bool, max_norm: float | None
) -> None:
    """Refuse settings of an SGD that are out of range, by name. Local."""
    numbers = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
    numbers["max_norm"] = 0.0 if max_norm is None else max_norm
    wrong: list[tuple[str, object]] = [
        (name, value)
        for name, value in numbers.items()
        if not isinstance(value, int | float) or not 0.0 <= value < float("inf")
    ]
    if wrong:
        name, value = wrong[0]
        raise ValueError(
            f"found {name}={value!r}\n  needed: a number, 0 or more\n  to do:  choose another"
        )
    if nesterov and momentum == 0.0:
        raise ValueError(
            "found nesterov=True with momentum=0\n  needed: momentum above 0\n"
            "  to do:  set momentum, such as 0.9"
        )
