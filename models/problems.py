"""What keeps a model from being captured, collected: each sentence once, with all the places it is about."""

from __future__ import annotations

from ..runtime.errors import brief

SHOWN = 2
"""Places that a sentence names."""


def error_text(error: Exception) -> str:
    """An error of code that is not ours: its kind and the first line of its text."""
    return f"{type(error).__name__}: {brief(str(error).strip().partition(chr(10))[0])}"


class Problems:
    """Sentences in the order of their first report, with module paths."""

    def __init__(self) -> None:
        self._places: dict[str, list[str]] = {}

    def __bool__(self) -> bool:
        return bool(self._places)

    def add(self, text: str, place: str = "") -> None:
        """Report something, at a module path if it has one."""
        places = self._places.setdefault(text, [])
        if place and place not in places:
            places.append(place)

    def repeat(self, old: str, new: str) -> None:
        """What is below the module path `old` is below `new` too."""
        for places in self._places.values():
            copies = [new + place[len(old) :] for place in places if (place + ".").startswith(old + ".")]
            places += [copy for copy in copies if copy not in places]

    def sentences(self) -> list[str]:
        """The sentences with their places."""
        return [text + _listed(places) for text, places in self._places.items()]


def _listed(places: list[str]) -> str:
    if not places:
        return ""
    more = f" and {len(places) - SHOWN} more" if len(places) > SHOWN else ""
    return f", in {', '.join(places[:SHOWN])}{more}"
