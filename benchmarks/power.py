"""Two times of a contestant on a GPU that is limited by power: burst, after a rest, and sustained, after a load."""

from __future__ import annotations

import math
import time
from typing import NamedTuple

from jax_mla.bench.timing import Contestant

REST, LOAD = 0.25, 0.15  # seconds without work before a burst, and of work before what counts as sustained
SPAN, RUNS = 0.03, 9  # seconds that are measured, and runs at most


class Times(NamedTuple):
    """Microseconds a call."""

    burst: float
    sustained: float


def measure(contestant: Contestant) -> Times:
    """Each contestant starts rested, whoever came before it.

    Runs follow each other without the host in between: a peer is timed by the device's events, and a run of one call
    would otherwise be charged with its dispatch and the wait for its end.
    """
    contestant.seconds(3)  # a warm-up, the capture of the graph, a replay
    run = max(contestant.seconds(1), 1e-6)
    runs = min(max(math.ceil(SPAN / run), 1), RUNS)

    def microseconds() -> float:
        return contestant.seconds(runs) / (runs * contestant.calls) * 1e6

    time.sleep(REST)
    contestant.seconds(min(2, runs))
    burst = microseconds()
    contestant.seconds(int(LOAD / run) + 1)
    return Times(burst, microseconds())
