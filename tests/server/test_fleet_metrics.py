"""The metrics of targets, as they stand in the exposition."""

from __future__ import annotations

from server.fleet.metrics import TargetsCollector
from server.metrics import ServerMetrics


def test_targets_of_several_models_are_one_family() -> None:
    first = TargetsCollector("a", lambda: {"w/0": True, "w/1": False}, lambda: {"w/0": 3, "w/1": 0})
    second = TargetsCollector("b", lambda: {"v/0": True}, lambda: {"v/0": 1})
    text = ServerMetrics().scrape(None, [first, second]).decode()
    assert text.count("# TYPE headrace_target_ready gauge") == 1
    assert text.count("# TYPE headrace_target_in_flight gauge") == 1
    samples = dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("headrace_target_"))
    assert samples == {
        'headrace_target_ready{model="a",target="w/0"}': "1.0",
        'headrace_target_ready{model="a",target="w/1"}': "0.0",
        'headrace_target_ready{model="b",target="v/0"}': "1.0",
        'headrace_target_in_flight{model="a",target="w/0"}': "3.0",
        'headrace_target_in_flight{model="a",target="w/1"}': "0.0",
        'headrace_target_in_flight{model="b",target="v/0"}': "1.0",
    }
