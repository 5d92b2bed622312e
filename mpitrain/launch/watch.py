"""When to give a launch up: a rule without clock or process."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mpitrain.system.launched.rank_status import READY, STARTED, STARTING_MPI, RankStatus
from mpitrain.system.processes import is_gone, runs

GONE_GRACE_S = 5.0  # from the death of a rank that has not begun to train to the end of the launcher
NEVER_HEARD_S = 60.0  # longest wait of all the others, in MPI's start, for a rank that has never reported


@dataclass
class Watch:
    """When ranks that neither end nor get on are given up. `died`, `silent`: whether that was because one has died
    before it trained, or nothing was heard of a host.

    Args:
        num_ranks: how many were started; owed: the state that they must come to.
        start_timeout_s, host_timeout_s: see `mpitrain launch --help`; 0 is never.
    """

    num_ranks: int
    owed: str
    start_timeout_s: float
    host_timeout_s: float
    died: bool = False
    silent: bool = False
    _began_s: float | None = None
    _num_pauses: int = 0
    _progress_s: float = 0.0
    _seen_s: dict[int, float] = field(default_factory=dict)
    _gone_s: dict[int, float] = field(default_factory=dict)
    _all_wait_s: float | None = None
    _before: dict[int, RankStatus] = field(default_factory=dict)

    def look(self, now_s: float, statuses: Mapping[int, RankStatus], num_pauses: int = 0) -> str:
        """Why the launch is to be ended; empty as long as it is not. `statuses` may lack a rank that was there
        before: its file could not be read for a moment. `now_s`, `num_pauses`: of a clock that stands while the launch
        does (`system/awake.py`); after a pause all ranks have their time again."""
        statuses = {**self._before, **statuses}
        if self._began_s is None:
            self._began_s = self._progress_s = now_s
        if num_pauses > self._num_pauses:
            self._num_pauses = num_pauses
            self._begin_anew(now_s, self._began_s)
        for rank, status in statuses.items():
            before = self._before.get(rank)
            if before is None or before.beat != status.beat:
                self._seen_s[rank] = now_s
            if before is None or before.progress != status.progress or before.state != status.state:
                self._progress_s = now_s
        self._before = statuses
        return self._why_not_started(now_s, statuses) or self._why_silent(now_s, statuses)

    def forgive(self, now_s: float) -> None:
        """No rank could report: all of them have all of the time again."""
        self._begin_anew(now_s, now_s)

    def _begin_anew(self, now_s: float, began_s: float) -> None:
        self._began_s, self._progress_s = began_s, now_s
        self._seen_s = dict.fromkeys(self._seen_s, now_s)
        self._gone_s.clear()
        self._all_wait_s = None
        self.died = self.silent = False

    def _why_not_started(self, now_s: float, statuses: Mapping[int, RankStatus]) -> str:
        owed = stage_of(self.owed)
        late = [rank for rank in range(self.num_ranks) if rank not in statuses or statuses[rank].stage < owed]
        if self.owed != READY and not any(one.stage >= stage_of(STARTING_MPI) for one in statuses.values()):
            self._began_s = now_s  # a script owes nothing before one of its ranks waits in MPI for the others
            return ""
        if not late:
            return ""
        gone = {rank for rank in late if rank in statuses and is_gone(statuses[rank].process)}
        self._gone_s = {rank: self._gone_s.get(rank, now_s) for rank in gone}
        if gone and now_s - min(self._gone_s.values()) > GONE_GRACE_S:
            self.died = True
            return f"{named(sorted(gone), statuses)} died before it began to train"
        assert self._began_s is not None
        if self.start_timeout_s <= 0:
            return ""
        if now_s - self._began_s <= self.start_timeout_s:
            never_heard = self._never_heard(now_s, statuses)
            self.died = bool(never_heard)
            return f"{named(never_heard, statuses)} died before it began to train" if never_heard else ""
        holds_up = [rank for rank in late if rank not in statuses or not _waits(statuses[rank])] or late
        return (
            f"{named(holds_up, statuses)} did not begin to train within {self.start_timeout_s:g} s"
            " (--start-timeout-s); "
            f"{self.num_ranks - len(late)} of {self.num_ranks} ranks did"
        )

    def _never_heard(self, now_s: float, statuses: Mapping[int, RankStatus]) -> list[int]:
        """Ranks of `mpitrain train` that must have died before their first report, which they write before they import
        torch: all the others have waited for them for long, by what they themselves have needed."""
        missing = [rank for rank in range(self.num_ranks) if rank not in statuses]
        if self.owed != READY or not statuses or not missing or not all(map(_waits, statuses.values())):
            self._all_wait_s = None
            return []
        if self._all_wait_s is None:
            self._all_wait_s = now_s
        assert self._began_s is not None
        patience_s = max(NEVER_HEARD_S, 3 * (self._all_wait_s - self._began_s))
        return missing if now_s - self._all_wait_s > patience_s else []

    def _why_silent(self, now_s: float, statuses: Mapping[int, RankStatus]) -> str:
        """A host of which nothing is heard any more, while nobody gets on either: a run that has lost ranks and goes on
        without them is left alone."""
        if self.host_timeout_s <= 0 or now_s - self._progress_s <= self.host_timeout_s:
            return ""
        hosts: dict[str, list[int]] = {}
        for rank, status in statuses.items():
            if status.state == READY:
                hosts.setdefault(status.host, []).append(rank)
        for host, ranks in hosts.items():
            silent_s = now_s - max(self._seen_s[rank] for rank in ranks)
            if silent_s > self.host_timeout_s and not any(runs(statuses[rank].process) for rank in ranks):
                names = ", ".join(map(str, sorted(ranks)))
                self.silent = True
                return (
                    f"host {host} (rank {names}) has been silent for {silent_s:.0f} s (--host-timeout-s), and no other "
                    "rank gets on"
                )
        return ""


def stage_of(state: str) -> int:
    return RankStatus(-1, "", "", state).stage


def _waits(status: RankStatus) -> bool:
    return status.state == STARTING_MPI or (status.state == STARTED and status.waits)


def named(ranks: Sequence[int], statuses: Mapping[int, RankStatus]) -> str:
    """ "rank 2 on host n7 (preparing)", at most eight of them."""
    names = [
        f"rank {rank} on host {statuses[rank].host} ({_phase(statuses[rank])})"
        if rank in statuses
        else f"rank {rank} (nothing was heard of it; {_hosts(statuses)})"
        for rank in ranks[:8]
    ]
    return ", ".join(names) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


def _phase(status: RankStatus) -> str:
    return "about to train" if status.state == READY and status.step < 0 else status.state


def _hosts(statuses: Mapping[int, RankStatus]) -> str:
    known = sorted({status.host for status in statuses.values()})
    return f"the others are on {', '.join(known[:8])}" if known else f"started from {os.uname().nodename}"
