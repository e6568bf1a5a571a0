"""Random faults of real servers: ``python -m tests.disaggregation.server_soak --faults 20 --transport shm``.

A prefill and a decode server, and requests whose transfers cross a cable. Each fault is drawn: a server or its core is
killed (and restarted), a server or the cable is stopped for some seconds, the connection is cut; at a drawn phase of
the transfer. After each fault every request has its answer or one error, the living servers hold nothing, and the next
request is transferred. The result is written as JSON.
"""

import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from benchmarks import report
from tests.disaggregation.faulty import Cable
from tests.disaggregation.pair import FLAGS, Pair
from tests.disaggregation.test_kills import PHASES, Trial, everything, is_free, is_transferred
from tests.e2e.server_process import ServerProcess

FAULTS = ("kill prefill", "kill prefill core", "kill decode", "stop prefill", "stop decode", "stop cable", "cut")
LONGEST_STOP = 14.0
"""Seconds: longer than the silence limit of a peer."""


class Servers:
    """The pair, its cable, and the bytes of a transfer."""

    def __init__(self, folder: Path, transport: str) -> None:
        self._folder, self._flags = folder, ("--disaggregation-transfer-backend", transport)
        self.pair = Pair(folder, *self._flags).__enter__()
        self.cable = Cable(self.pair.port)
        assert is_transferred(self.pair)
        self.trial("none", lambda: None)
        begun = self.cable.num_bytes
        assert self.trial("none", lambda: None).is_answered
        self.total = self.cable.num_bytes - begun

    def trial(self, phase: str, fault: Any) -> Trial:
        trial = Trial(self.pair, self.cable, getattr(self, "total", 1 << 60))
        trial.run(phase, fault)
        return trial

    def restart(self, side: str) -> None:
        """Replaces a killed server by a new one with the same ports for its peer."""
        getattr(self.pair, side).__exit__()
        mode = ("--disaggregation-bootstrap-port", str(self.pair.port), "--disaggregation-mode", side)
        setattr(self.pair, side, ServerProcess(self._folder, *FLAGS, *self._flags, *mode).__enter__())

    def close(self) -> None:
        self.cable.close()
        for server in (self.pair.prefill, self.pair.decode):
            server.__exit__()

    def cause(self, fault: str) -> None:
        verb, _, what = fault.partition(" ")
        if verb == "cut":
            self.cable.cut()
        elif fault == "stop cable":
            self.cable.stop()
            threading.Timer(random.uniform(1, LONGEST_STOP), self.cable.go_on).start()
        elif verb == "stop":
            stopped = everything(getattr(self.pair, what))
            for process in stopped:
                process.send_signal(signal.SIGSTOP)
            resume = lambda: [process.send_signal(signal.SIGCONT) for process in stopped]  # noqa: E731
            threading.Timer(random.uniform(1, LONGEST_STOP), resume).start()
        else:
            prefill = self.pair.prefill
            doomed = [prefill.core] if what == "prefill core" else everything(getattr(self.pair, what))
            for process in doomed:
                process.kill()

    def after(self, fault: str, trial: Trial) -> None:
        """Checks the outcome, and that nothing is held."""
        killed = fault.split()[1] if fault.startswith("kill") else ""
        if killed == "decode":
            assert not trial.is_answered
            assert isinstance(trial.prefill, httpx.Response) and trial.prefill.status_code == 200
        else:
            assert trial.is_answered, (fault, trial.error, trial.lines[-3:])
        if killed:
            is_free(self.pair.prefill if killed == "decode" else self.pair.decode)
            self.restart(killed)
        for server in (self.pair.prefill, self.pair.decode):
            is_free(server)
        # the first request may use the old connection
        assert is_transferred(self.pair) or is_transferred(self.pair), fault


def main(argv: list[str] | None = None) -> int:
    parser = report.command_parser("disaggregation_server_faults", __doc__, allow_abbrev=False)
    parser.prog = "python -m tests.disaggregation.server_soak"
    parser.add_argument("--transport", default="tcp", help="--disaggregation-transfer-backend (default: tcp)")
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    report.add_result_options(parser)
    args = parser.parse_args(argv)
    random.seed(args.seed)
    began, counts, unreached = time.perf_counter(), Counter[str](), 0
    with tempfile.TemporaryDirectory() as folder:
        servers = Servers(Path(folder), args.transport)
        try:
            while counts.total() < args.faults:
                fault, phase = random.choice(FAULTS), random.choice(PHASES)
                trial = servers.trial(phase, partial(servers.cause, fault))
                if not trial.fired:  # the transfer ended before the phase was seen
                    unreached += 1
                    assert trial.is_answered and unreached <= args.faults
                    continue
                servers.after(fault, trial)
                counts[fault] += 1
                print(f"{counts.total()} of {args.faults}: {fault} at {phase}", file=sys.stderr)
        finally:
            servers.close()
    found = {"faults": dict(counts), "held_resources": 0, "seconds": time.perf_counter() - began}
    print(found)
    options = {"transport": args.transport, "faults": args.faults, "seed": args.seed}
    report.write_if_asked(args, "disaggregation_server_faults", found | {"options": options})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
