"""Contestants take turns, so that a change of clock meets all of them."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from typing import Any, Protocol


class Contestant(Protocol):
    """Something that computes a cell `calls` times a run, and says how long runs in a row took."""

    name: str
    calls: int

    def seconds(self, runs: int) -> float: ...

    def out(self) -> Any: ...


@dataclasses.dataclass(frozen=True)
class Timing:
    """Microseconds a call: the median of the repeats, and their range over the median."""

    us: float
    spread: float


def take_turns(contestants: Sequence[Contestant], repeats: int, seconds: float) -> list[Timing]:
    """`repeats` measurements of each, of `seconds` or one run at the least, in an order that turns round each time."""
    runs = []
    for contestant in contestants:
        contestant.seconds(3)  # on a GPU: a warm-up, the capture of the graph, a replay
        runs.append(max(1, math.ceil(seconds / max(contestant.seconds(1), 1e-6))))
    times: list[list[float]] = [[] for _ in contestants]
    order = list(range(len(contestants)))
    for _ in range(repeats):
        for i in order:
            spent = contestants[i].seconds(runs[i])
            times[i].append(spent / (runs[i] * contestants[i].calls) * 1e6)
        order.reverse()
    return [Timing(statistics.median(t), (max(t) - min(t)) / statistics.median(t)) for t in times]
