"""The log of a simulation: the lines of a server, which `moe-engine doctor --log` reads."""

from __future__ import annotations

import io
import json
import re
from collections import Counter

import pytest

from moe_engine.cli.main import main
from moe_engine.tuning.costs.measured import CostFile, Curve
from moe_engine.tuning.doctor.log_lines import parse
from moe_engine.tuning.simulator.fleet import Fleet, FleetSpec
from moe_engine.tuning.simulator.rank_log import RankLog, messages_to
from moe_engine.tuning.simulator.replica_spec import ReplicaSpec
from moe_engine.tuning.simulator.workload import Arrival, Fixed, Numbers
from moe_engine.types.step_settings import GraphSettings
from tests.models.published import V3
from tests.tuning.test_simulator import Linear, config

INTERVAL = 8


def simulated(spec, arrivals, names=("",)):
    """The outcome and the events of its log."""
    stream = io.StringIO()
    log = RankLog(stream, names, INTERVAL)
    with messages_to(log):
        outcome = Fleet(spec, Fixed(arrivals, len(arrivals)), log=log).run()
    events = [parse(line) for line in stream.getvalue().splitlines()]
    assert None not in events and {event.kind for event in events} <= {"prefill", "decode", "retraction"}
    return outcome, events


def arrivals(count, prompt_len=100, output_len=60, seconds=0.05):
    numbers = Numbers()
    return [
        Arrival(i * seconds, list(range(first, first + prompt_len)), output_len, output_len)
        for i, first in ((i, numbers.take(prompt_len)) for i in range(count))
    ]


def test_the_lines_have_the_tokens_and_steps_of_each_rank():
    names = ["DP0 TP0", "DP1 TP2", "DP2 TP0", "DP3 TP2"]
    spec = FleetSpec(ReplicaSpec(config(), Linear(), num_groups=2, graphs=GraphSettings((2,))), num_replicas=2)
    outcome, events = simulated(spec, arrivals(40), names)
    prefilled = Counter()
    for event in events:
        if event.kind == "prefill":
            prefilled[event.rank] += event.values["new_token"] + event.values["cached_token"]
    assert set(prefilled) == set(names) and sum(prefilled.values()) == outcome.prompt_tokens == 40 * 100
    times = [event.time for event in events if event.rank == names[0]]
    assert times == sorted(times) and times[0] >= 0 and times[-1] <= outcome.recorder.ended_at
    decodes = [event.values for event in events if event.kind == "decode"]
    assert all(values["running"] > 0 and values["tokens"] > 100 for values in decodes)
    graphs = {values["cuda_graph"] for values in decodes if values["running"] <= 2}  # the other group may have a prompt
    assert 1.0 in graphs and not any(values["cuda_graph"] for values in decodes if values["running"] > 2)


def test_a_decode_line_every_interval_with_the_throughput_of_the_steps_since():
    spec = FleetSpec(ReplicaSpec(config(), Linear(row=0.0)))
    _, events = simulated(spec, arrivals(1, output_len=1 + 4 * INTERVAL))
    decodes = [event for event in events if event.kind == "decode"]
    assert len(decodes) == 4 and {event.rank for event in decodes} == {""}
    assert decodes[-1].values["throughput"] == pytest.approx(1 / 0.01, rel=0.01)  # a step takes 10 ms


def test_retractions():
    spec = FleetSpec(ReplicaSpec(config(num_slots=600, schedule_conservativeness=0.1), Linear()))
    outcome, events = simulated(spec, arrivals(6, prompt_len=60, output_len=200, seconds=0.0))
    assert outcome.retractions > 0
    assert sum(event.values["retracted"] for event in events if event.kind == "retraction") == outcome.retractions


def test_a_disk_that_fills_during_the_run_is_named(tmp_path, capsys):
    path = tmp_path / "costs.json"
    path.write_text(CostFile({0: Curve((1.0,), (0.002,))}, Curve((1.0,), (0.002,))).to_json())
    assert main(["simulate", "--cost-file", str(path), "--num-prompts", "200", "--log-file", "/dev/full"]) == 2
    error = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
    assert len(error) == 1 and "--log-file /dev/full: cannot be written (No space left on device)" in error[0]


def test_the_command_writes_a_log_that_the_doctor_reads(tmp_path, capsys):
    path, log = tmp_path / "config.json", tmp_path / "server.log"
    path.write_text(json.dumps(V3))
    form = ["--hardware", "8xH200", "--tp", "8", "--attn-dp-size", "4", "--ep-size", "8"]
    load = ["--num-prompts", "60", "--request-rate", "20", "--random-output-len", "100"]
    assert main(["simulate", "--model-path", str(path), *form, *load, "--log-file", str(log)]) == 0
    capsys.readouterr()
    lines = log.read_text().splitlines()
    assert {match[1] for match in re.finditer(r" (DP\d TP\d)\] Prefill", "\n".join(lines))} == {
        f"DP{i} TP{2 * i}" for i in range(4)
    }
    startup = next(event for event in map(parse, lines) if event is not None and event.kind == "startup")
    assert 0 < startup.values["available_gpu_mem"] < 141
    main(["doctor", "--log", str(log)])
    assert "0 rules" not in capsys.readouterr().out
    assert main(["doctor", "--log", str(log), "--json"]) in (0, 1)
    assert json.loads(capsys.readouterr().out)
