"""How many threads this process may use with profit."""

from __future__ import annotations

import ctypes
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


@dataclass(frozen=True)
class ThreadChoice:
    """A number of threads and, in a few words, what it follows from."""

    threads: int
    reason: str


def default_threads() -> int:
    """Cores this process may run on: affinity, container quota, performance cores only."""
    return choose_threads().threads


def usable_threads() -> int:
    """Logical CPUs this process may use: by affinity and container quota, whatever their kind."""
    usable = len(_affinity())
    quota = _cgroup_quota(Path("/")) if sys.platform.startswith("linux") else None
    return max(1, usable if quota is None else min(usable, math.ceil(quota)))


def choose_threads(
    root: Path = Path("/"),
    *,
    cpus: Iterable[int] | None = None,
    platform: str = sys.platform,
) -> ThreadChoice:
    """The number of threads for this process, and the reason.

    `root` is where sys and proc lie, `cpus` the logical CPUs that the process may run on (None:
    asked for); both are for tests. Hyper-threads count once, because they share the units that
    matrix products need. Of a hybrid CPU only the performance cores are used: the threads of a
    matrix product wait for the slowest one.
    """
    count = os.cpu_count() or 1
    if platform == "darwin":
        performance = _sysctl("hw.perflevel0.physicalcpu")
        cores = performance or _sysctl("hw.physicalcpu") or count
        choice = ThreadChoice(cores, _counted(cores, "performance" if performance else "physical"))
    elif platform.startswith("linux"):
        choice = _linux_cores(root, set(_affinity() if cpus is None else cpus))
    else:
        cores = max(1, count // 2)
        choice = ThreadChoice(cores, f"half of {count} logical CPUs")
    quota = _cgroup_quota(root) if platform.startswith("linux") else None
    if quota is not None and math.ceil(quota) < choice.threads:
        return ThreadChoice(max(1, math.ceil(quota)), f"container quota of {quota:g} CPUs")
    return choice


def _affinity() -> set[int]:
    if sys.platform == "win32" or not hasattr(os, "sched_getaffinity"):
        return set(range(os.cpu_count() or 1))
    return os.sched_getaffinity(0)


def _counted(number: int, what: str, more: str = "") -> str:
    return f"{number} {what} core{'' if number == 1 else 's'}{more}"


# -- cores


def _linux_cores(root: Path, allowed: set[int]) -> ThreadChoice:
    fast = _performance_cpus(root, allowed)
    cores = max(1, len(_physical_cores(root, fast)))
    if fast != allowed:
        all_cores = len(_physical_cores(root, allowed))
        return ThreadChoice(cores, _counted(cores, "performance", f" of {all_cores} cores"))
    online = _cpu_list(_read(root / "sys/devices/system/cpu/online"))
    of_all = len(_physical_cores(root, online | allowed))
    if len(_physical_cores(root, allowed)) < of_all:
        return ThreadChoice(cores, _counted(cores, "physical", f" of {of_all} by CPU affinity"))
    return ThreadChoice(cores, _counted(cores, "physical"))


def _performance_cpus(root: Path, allowed: set[int]) -> set[int]:
    """Those of the allowed logical CPUs on which evenly split work is done soonest."""
    # Intel's hybrid CPUs register one measuring unit per type of core
    performance = _cpu_list(_read(root / "sys/devices/cpu_core/cpus"))
    if performance and _read(root / "sys/devices/cpu_atom/cpus"):
        return allowed & performance or allowed
    speeds: dict[int, int] = {}
    for cpu in allowed:
        text = _read(root / f"sys/devices/system/cpu/cpu{cpu}/cpu_capacity")
        if not text.isdecimal() or not int(text):
            return allowed
        speeds[cpu] = int(text)
    return _fastest_together(speeds)


def _fastest_together(speeds: Mapping[int, int]) -> set[int]:
    """The CPUs at or above the speed s for which (how many there are) x s is largest.

    Work is split evenly and all wait for the slowest, so a slower core helps only where it adds
    more than it holds up the others.
    """
    sets = [{c for c, speed in speeds.items() if speed >= least} for least in set(speeds.values())]
    # of equals the fewer, faster ones
    return max(
        sets, key=lambda s: (len(s) * min(speeds[c] for c in s), -len(s)), default=set(speeds)
    )


def _physical_cores(root: Path, cpus: Iterable[int]) -> set[str]:
    """The distinct cores of these logical CPUs."""
    topology = root / "sys/devices/system/cpu"
    return {_read(topology / f"cpu{cpu}/topology/thread_siblings_list") or str(cpu) for cpu in cpus}


def _cpu_list(text: str) -> set[int]:
    """CPU numbers of the kernel's list format, such as 0-3,8; empty where it cannot be read."""
    found: set[int] = set()
    try:
        for part in filter(None, text.split(",")):
            first, _, last = part.partition("-")
            found.update(range(int(first), int(last or first) + 1))
    except ValueError:
        return set()
    return found


# -- quota


def _cgroup_quota(root: Path) -> float | None:
    """CPUs granted to this process's control group and those above it; None without a limit.

    Control groups of version 2 and of version 1, also both at once.
    """
    quotas = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            mounts = ["unified", "."]
        elif "cpu" in controllers.split(","):
            mounts = [controllers, "cpu"]
        else:
            continue
        for mount in mounts:
            for folder in _group_and_above(root / "sys/fs/cgroup" / mount, path):
                quotas.append(_quota_v1(folder) if controllers else _quota_v2(folder))
    return min((quota for quota in quotas if quota is not None), default=None)


def _group_and_above(mount: Path, path: str) -> Iterator[Path]:
    """Folder of a control group and of all groups above it. In a container that does not see its
    own group's name, only the mount itself exists, and it is the container's group."""
    group = PurePosixPath(path.lstrip("/"))
    if ".." not in group.parts:  # a group outside what this namespace can see
        for folder in (group, *group.parents):
            if folder != PurePosixPath("."):
                yield mount / folder
    yield mount


def _quota_v2(folder: Path) -> float | None:
    return _ratio(*(_read(folder / "cpu.max").split() + ["", ""])[:2])


def _quota_v1(folder: Path) -> float | None:
    return _ratio(_read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us"))


def _ratio(quota: str, period: str) -> float | None:
    """None for "max", for -1 and for what cannot be read."""
    if not quota.isdecimal() or not period.isdecimal() or not int(period):
        return None
    return int(quota) / int(period) or None


def _read(path: Path) -> str:
    """The text of a small kernel file without the space around it; empty if there is none."""
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def _sysctl(name: str) -> int | None:
    value = ctypes.c_int(0)
    size = ctypes.c_size_t(ctypes.sizeof(value))
    libc = ctypes.CDLL(None)
    failed = libc.sysctlbyname(name.encode(), ctypes.byref(value), ctypes.byref(size), None, 0)
    return None if failed else value.value
