"""The faults. Each takes a bench, does its harm, and returns one line of what was measured."""

from __future__ import annotations

import collections
import collections.abc as cabc
import signal
import time
import typing as t

from matrix.bench import Bench, Effect, NotMeasured

__all__ = ["TRIALS", "Trial"]

Trial: t.TypeAlias = cabc.Callable[[Bench], str]

SLOTS = 4


def kill(bench: Bench) -> str:
    """`kill -9` of a worker with 4 running jobs, beside an idle one"""
    victim = bench.work(stretch=8)  # its jobs outlast the preparations
    jobs = bench.enqueue(SLOTS, 1.0)
    _occupied(bench, jobs)
    bench.work()
    time.sleep(1)
    bench.workers.remove(victim)
    victim.kill()
    victim.wait()
    killed = time.monotonic()
    bench.until(lambda: not bench.unfinished(jobs), 13, revive=True)
    again = [line for line in bench.effects("start") if line.at > killed]
    when = f" after {again[-1].at - killed:.1f} s" if again else ""
    return f"{len({line.job for line in again})} of {SLOTS} started again{when}; {_lost(bench, jobs)}"


def restart(bench: Bench) -> str:
    """PostgreSQL away for 3 s under load, fast shutdown"""
    return _outage(bench, "fast")


def crash(bench: Bench) -> str:
    """PostgreSQL away for 3 s under load, immediate shutdown"""
    return _outage(bench, "immediate")


def terminate(bench: Bench) -> str:
    """`pg_terminate_backend` of all sessions under load"""
    jobs = _load(bench)
    ended = bench.execute("""SELECT pg_terminate_backend(pid) FROM pg_stat_activity
                              WHERE datname = current_database() AND pid <> pg_backend_pid()""")
    if not ended:
        raise NotMeasured("there was no session")
    return _recovery(bench, jobs, time.monotonic())


def sigterm(bench: Bench) -> str:
    """SIGTERM to a worker with 4 running jobs, 20 waiting"""
    worker = bench.work()
    jobs = bench.enqueue(SLOTS + 20, 2.0)
    _occupied(bench, jobs)
    asked = time.monotonic()
    worker.send_signal(signal.SIGTERM)
    bench.until(lambda: worker.poll() is not None, 10)
    took = time.monotonic() - asked
    states = collections.Counter(bench.states(jobs).values())
    begun = {line.job for line in bench.effects("start")}
    ended = {line.job for line in bench.effects("end")}
    return (
        f"exit {worker.poll()} after {took:.1f} s; {len(ended)} of {len(begun)} begun jobs ended, "
        f"{states[bench.system.done]} recorded, {states[bench.system.claimed]} left claimed"
    )


def late(bench: Bench) -> str:
    """A frozen worker comes back with a success after its job was taken over"""
    frozen = bench.work()
    [job] = bench.enqueue(1, 2.0)
    bench.must(lambda: bench.effects("start"), 5, "the job has begun")
    frozen.send_signal(signal.SIGSTOP)
    other = bench.work(stretch=2)
    if not bench.until(lambda: any(line.pid == other.pid for line in bench.effects("start")), 13):
        return "not taken over within 13 s"
    bench.must(lambda: _claimed(bench, [job]), 1, "the second run has a claim")
    frozen.send_signal(signal.SIGCONT)
    if not bench.until(lambda: _ends(bench, frozen.pid), 3):
        return "the frozen worker did not come back"
    verdict = _verdict(bench, job, other.pid)
    bench.until(lambda: _ends(bench, other.pid), 5)
    bench.until(lambda: not bench.unfinished([job]), 1)
    return f"{verdict}; in the end {bench.states([job])[job]}"


def nul(bench: Bench) -> str:
    """An error with a NUL in its message, 8 good jobs beside it"""
    return _poison(bench, bench.enqueue(1, 0.0, "nul"))


def leave(bench: Bench) -> str:
    """A handler that raises SystemExit, 8 good jobs beside it"""
    return _poison(bench, bench.enqueue(1, 0.0, "exit"))


def payload(bench: Bench) -> str:
    """A payload with other fields than the handler's, 8 good jobs beside it"""
    bad = bench.enqueue(1, 0.0)
    if bench.execute(bench.system.spoil, *bad) != 1:
        raise NotMeasured("the payload was not changed")
    return _poison(bench, bad)


def duplicate(bench: Bench) -> str:
    """A duplicate of a pending job, enqueued in the caller's transaction"""
    return "; ".join(f"`{way}`: {what}" for way, what in bench.call("duplicate").items())


TRIALS: dict[str, Trial] = {
    trial.__name__: trial for trial in (kill, restart, crash, terminate, sigterm, late, nul, leave, payload, duplicate)
}


def _load(bench: Bench) -> list[str]:
    for _ in range(2):
        bench.work(stale=6)  # an outage is shorter than what makes jobs stale
    jobs = bench.enqueue(60, 0.5)
    bench.must(lambda: len(bench.effects("end")) >= 2 * SLOTS, 8, f"{2 * SLOTS} jobs have ended")
    return jobs


def _occupied(bench: Bench, jobs: list[str]) -> None:
    bench.must(lambda: len(bench.effects("start")) == SLOTS, 5, f"{SLOTS} jobs have begun")
    bench.must(lambda: _claimed(bench, jobs) >= SLOTS, 1, f"{SLOTS} jobs are claimed")


def _claimed(bench: Bench, jobs: list[str]) -> int:
    return list(bench.states(jobs).values()).count(bench.system.claimed)


def _verdict(bench: Bench, job: str, second: int) -> str:
    """What became of the first run's late result, while the second run goes on in another process."""
    if bench.until(lambda: not _claimed(bench, [job]) and not _ends(bench, second), 2):
        return f"accepted: {bench.states([job])[job]} while the second run goes on"
    if _ends(bench, second):
        raise NotMeasured("the second run ended too early")
    if bench.system.refusal and not bench.said(job, bench.system.refusal):
        return "neither accepted nor refused by its log"
    return "refused"


def _outage(bench: Bench, mode: t.Literal["fast", "immediate"]) -> str:
    jobs = _load(bench)
    bench.server.stop(mode)
    time.sleep(3)
    bench.server.start()
    return _recovery(bench, jobs, time.monotonic())


def _recovery(bench: Bench, jobs: list[str], since: float) -> str:
    finished = bench.until(lambda: not bench.unfinished(jobs), 12, revive=True)
    took = time.monotonic() - since
    later = [line.at - since for line in bench.effects("start") if line.at > since]
    goes_on = f"next job after {min(later):.1f} s" if later else "no job after it"
    runs = collections.Counter(line.job for line in bench.effects("end"))
    twice = sum(count > 1 for count in runs.values())
    over = f", all done after {took:.1f} s" if finished else ""
    return f"{_exits(bench)}; {goes_on}{over}; {_lost(bench, jobs)}, {twice} run to the end twice"


def _exits(bench: Bench) -> str:
    return f"workers exited {bench.exits}×, the script restarted them" if bench.exits else "workers go on"


def _lost(bench: Bench, jobs: list[str]) -> str:
    unfinished = bench.unfinished(jobs)
    ended = {line.job for line in bench.effects("end")}
    never_run = dict.fromkeys({*jobs} - unfinished.keys() - ended, f"{bench.system.done} and never run")
    left = collections.Counter((unfinished | never_run).values())
    told = ", ".join(f"{count} {state}" for state, count in sorted(left.items()))
    return f"{told} in the end" if left else "0 lost"


def _ends(bench: Bench, pid: int) -> list[Effect]:
    return [line for line in bench.effects("end") if line.pid == pid]


def _poison(bench: Bench, bad: list[str]) -> str:
    good = bench.enqueue(8, 0.1)
    bench.work()
    settled = bench.until(lambda: _given_up(bench, bad) and not bench.unfinished(good), 14, revive=True)
    done = len(good) - len(bench.unfinished(good))
    [state] = bench.states(bad).values()
    runs = len(bench.effects("start", bad[0]))
    when = "" if settled else " after 14 s"
    return (
        f"{_exits(bench)}; {done} of {len(good)} good jobs done, the bad one {state}{when}; its handler began {runs}×"
    )


def _given_up(bench: Bench, bad: list[str]) -> bool:
    return set(bench.states(bad).values()) <= {"dead", "failed"}
