"""Progress of long work, on stderr."""

import sys


def show(text: str, *, last: bool) -> None:
    """One line that is rewritten in a terminal, a line each elsewhere."""
    if sys.stderr.isatty():
        text, end = f"\r{text}\x1b[K", "\n" if last else ""
    else:
        end = "\n"
    print(text, end=end, file=sys.stderr, flush=True)
