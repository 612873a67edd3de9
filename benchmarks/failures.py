"""What goes wrong in a benchmark: named as it happens, and in the exit status, while the rest goes on."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator


class Failures:
    def __init__(self) -> None:
        self.count = 0

    def add(self, text: str) -> None:
        self.count += 1
        print(f"FAILED: {text}", file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def caught(self, what: str) -> Iterator[None]:
        """Of a block: an exception ends the block alone."""
        try:
            yield
        except Exception as error:
            self.add(f"{what}: {summary(error)}")

    @property
    def exit_status(self) -> int:
        return min(self.count, 1)


def summary(error: Exception) -> str:
    """One line."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
