"""What a caller should know although the call goes on, said at the line of the caller's."""

from __future__ import annotations

import sys
import warnings

_OURS = ("attngen", "torch")


class AttngenNotice(UserWarning):
    """Something worth knowing once, such as that CPU tensors run the reference."""


class AttngenWarning(UserWarning):
    """Something does not work as well as it could (a cache that cannot be written, say); results are unaffected."""


def say(text: str, category: type[Warning] = AttngenNotice) -> None:
    """Warn, as from the innermost frame that is neither ours nor torch's.

    Calls come through few frames or many (gradients, autocast, a sibling's dtype, torch's dispatcher): a fixed
    `stacklevel` would name one of those.
    """
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _OURS:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category, stacklevel=level)


_said: set[str] = set()


def say_once(topic: str, text: str) -> None:
    """The first notice of a topic in this process; the others are dropped."""
    if topic not in _said:
        _said.add(topic)
        say(text)
