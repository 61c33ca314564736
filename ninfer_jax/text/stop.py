"""Stop strings over a stream of text pieces."""

from collections.abc import Sequence


class StopMatcher:
    """Finds the first stop string in streamed text, also across piece borders.

    The first stop string to be complete wins, character by character; of several complete at the same character the
    one that starts first, so the longest. The result therefore does not depend on how the text is cut into pieces,
    and no text is awaited once a stop string is there. Neither the stop string nor anything after it is emitted.

    matched: the stop string found, or None.
    """

    def __init__(self, stops: Sequence[str]):
        """stops: non-empty strings; an empty list never matches. ValueError names a bad entry."""
        if isinstance(stops, str) or not isinstance(stops, Sequence):
            raise ValueError(f"stop: must be a list of strings, not {type(stops).__name__}")
        for index, stop in enumerate(stops):
            if not isinstance(stop, str) or not stop:
                raise ValueError(f"stop[{index}]: must be a non-empty string, not {stop!r}")
        self._stops = tuple(dict.fromkeys(stops))
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> tuple[str, bool]:
        """(text that is safe to show, whether a stop string was found). After a match: always ("", True)."""
        if self.matched is not None:
            return "", True
        text = self._held + text
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            _, start, self.matched = min(found)
            self._held = ""
            return text[:start], True
        keep = self._open_suffix(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def flush(self) -> str:
        """Ends the stream: the text held back as a possible stop, which it no longer can become."""
        held, self._held = self._held, ""
        return held

    def _open_suffix(self, text: str) -> int:
        """Length of the longest suffix of `text` that begins a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            suffix = text[-length:]
            if any(stop.startswith(suffix) for stop in self._stops):
                return length
        return 0
