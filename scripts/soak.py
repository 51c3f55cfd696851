"""Kill ``xgr recommend`` at random moments, run it again, compare; see scripts/soak.sh.

Each trial starts a run in an empty directory, sends the signal after a random time between its start and the time that
an uninterrupted run takes, runs the same command to the end, and compares parts, rows, bits and rejects.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "nightly"), str(ROOT / "tests" / "job"), str(ROOT / "benchmarks")]

from faults import Job, expected_code, leftovers, manifest, stop  # noqa: E402
from job_support import make_model, make_vocabulary  # noqa: E402
from nightly_support import same_output, write_users  # noqa: E402
from provenance import provenance  # noqa: E402

GRACE_SECONDS = 20.0


@dataclass(frozen=True)
class Trial:
    """One interruption and what came of it.

    Attributes:
        moment: seconds from the start of the run to the signal.
        ended_first: the run was over before the signal came.
        code: exit code of the interrupted run, as a shell reports it; stop_seconds: from the signal to its end.
        shards_kept: finished shards that the second run found.
        equal: the output after the second run is that of an uninterrupted one, and nothing is left behind.
    """

    signal: str
    moment: float
    ended_first: bool
    code: int
    stop_seconds: float
    shards_kept: int
    resume_seconds: float
    equal: bool


def one_trial(job: Job, whole: Path, out: Path, number: signal.Signals, moment: float) -> Trial:
    """Interrupts a run, resumes it, compares it with ``whole``."""
    process = job.start(out, "--grace", f"{GRACE_SECONDS:g}s")
    time.sleep(moment)
    ended = process.poll() is not None
    seconds, code = stop(process, number)
    kept = len(list(out.glob("part-*")))
    started = time.monotonic()
    again, err = job.finish(out)
    resumed = time.monotonic() - started
    equal = again == 0 and same_output(out, whole) and not leftovers(out)
    if not equal:
        print(f"not equal after {number.name} at {moment:.2f} s: exit {again}\n{err}", file=sys.stderr)
    if not ended and number != signal.SIGKILL and (code not in (0, expected_code(number)) or seconds > GRACE_SECONDS):
        print(f"{number.name} at {moment:.2f} s: exit {code} after {seconds:.1f} s", file=sys.stderr)
        equal = False
    shutil.rmtree(out)
    return Trial(number.name, round(moment, 3), ended, code, round(seconds, 3), kept, round(resumed, 2), equal)


def summary(trials: list[Trial], shards: int, rows: int, whole_seconds: float) -> dict[str, object]:
    """What goes into the results file."""
    found = {}
    for name in dict.fromkeys(trial.signal for trial in trials):
        mine = [trial for trial in trials if trial.signal == name]
        found[name] = {
            "trials": len(mine),
            "equal": sum(trial.equal for trial in mine),
            "runs_that_ended_first": sum(trial.ended_first for trial in mine),
            "exit_codes": dict(Counter(str(trial.code) for trial in mine)),
            "longest_stop_seconds": max(trial.stop_seconds for trial in mine),
            "median_shards_kept": statistics.median(trial.shards_kept for trial in mine),
        }
    return {
        **provenance(),
        "rows": rows,
        "shards": shards,
        "uninterrupted_seconds": round(whole_seconds, 2),
        "signals": found,
        "trials": [asdict(trial) for trial in trials],
    }


def main() -> int:
    """Runs all trials; 0 if every output was equal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=25, help="trials with SIGKILL")
    parser.add_argument("--terms", type=int, default=10, help="trials with SIGTERM")
    parser.add_argument("--users", type=int, default=6000)
    parser.add_argument("--shard-rows", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "soak.json")
    given = parser.parse_args()
    rng = random.Random(given.seed)
    with tempfile.TemporaryDirectory(prefix="xgr-soak-") as name:
        root = Path(name)
        write_users(root / "users.parquet", given.users, 1000)
        job = Job(root, make_vocabulary(root / "vocab"), make_model(root / "model"), given.shard_rows)
        started = time.monotonic()
        code, err = job.finish(root / "whole")
        seconds = time.monotonic() - started
        if code != 0:
            print(err, file=sys.stderr)
            return 1
        shards = manifest(root / "whole")["shards"]
        print(f"uninterrupted: {given.users} users, {shards} shards, {seconds:.1f} s", file=sys.stderr)
        trials = []
        numbers = [signal.SIGKILL] * given.kills + [signal.SIGTERM] * given.terms
        for at, number in enumerate(numbers, start=1):
            trial = one_trial(job, root / "whole", root / "recs", number, rng.uniform(0.0, seconds))
            trials.append(trial)
            print(
                f"{at}/{len(numbers)} {trial.signal} at {trial.moment:.2f} s: exit {trial.code}, "
                f"{trial.shards_kept} of {shards} shards kept, {'equal' if trial.equal else 'NOT EQUAL'}",
                file=sys.stderr,
            )
    record = summary(trials, shards, given.users, seconds)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(record["signals"]))
    return 0 if all(trial.equal for trial in trials) else 1


if __name__ == "__main__":
    sys.exit(main())
