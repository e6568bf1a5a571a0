"""Random faults of transfers between a prefill and a decode server: ``python -m tests.disaggregation.soak``.

For each transport: rounds of concurrent transfers with faults (calls of the transport that fail, writes that fail late
or end late, a cut or stopped connection, a killed and restarted side) until `--faults` have occurred. After each round
every transfer has ended on both sides that live, filled transfers have the sender's bytes, and no slot, room or
registered memory is in use. A wrong byte or a leak ends the run with an error. The result is written as JSON.
"""

from __future__ import annotations

import random
import sys
import time
from typing import Any

from benchmarks import report
from moe_engine.core.kv_transfer import thread, wire
from moe_engine.core.kv_transfer.transports.protocol import Send
from moe_engine.core.kv_transfer.transports.table import TRANSPORTS
from tests.disaggregation.faulty import FaultyRow
from tests.disaggregation.test_faults import play
from tests.disaggregation.transport_names import why_absent


def soak(name: str, num_faults: int, rate: float) -> dict[str, Any]:
    """One transport; the counts of faults and of filled transfers."""
    made, row = list[FaultyRow](), TRANSPORTS[name]

    def make(host: str, send: Send) -> FaultyRow:
        made.append(FaultyRow(row(host, send), random.Random(random.getrandbits(32)), rate))
        return made[-1]

    TRANSPORTS["faulty"] = make
    began = time.perf_counter()
    try:
        count, filled = play(made, num_faults, lambda faults: print(f"{name}: {faults}", end="\r", file=sys.stderr))
    finally:
        del TRANSPORTS["faulty"]
    return {"faults": count, "filled": filled, "leaks": 0, "seconds": time.perf_counter() - began}


def main(argv: list[str] | None = None) -> int:
    parser = report.command_parser("disaggregation_faults", __doc__, allow_abbrev=False)
    parser.prog = "python -m tests.disaggregation.soak"
    parser.add_argument("--transports", nargs="+", choices=list(TRANSPORTS), help="default: all that start here")
    parser.add_argument("--faults", type=int, default=1000, help="of each transport (default: 1000)")
    parser.add_argument("--rate", type=float, default=0.1, help="share of a transport's calls that fail (default: 0.1)")
    parser.add_argument("--seed", type=int, default=1)
    report.add_result_options(parser)
    args = parser.parse_args(argv)
    random.seed(args.seed)
    wire.BEAT_SECONDS, wire.SILENCE_SECONDS, wire.MEET_SECONDS, thread.POLL_MS = 0.05, 0.4, 0.4, 20
    found = {}
    for name in args.transports or list(TRANSPORTS):
        if reason := why_absent(name):
            print(f"{name}: left out: {reason}", file=sys.stderr)
            continue
        found[name] = soak(name, args.faults, args.rate)
        print(f"{name}: {found[name]}")
    options: dict[str, Any] = {"faults": args.faults, "rate": args.rate, "seed": args.seed}
    report.write_if_asked(args, "disaggregation_faults", {"transports": found, "options": options})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
