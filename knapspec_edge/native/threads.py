"""How many threads this process may use with profit."""

from __future__ import annotations

import ctypes
import math
import os
import sys
from pathlib import Path


def default_threads() -> int:
    """Cores this process may run on: affinity, container quota, performance cores on Apple."""
    if sys.platform == "darwin":
        cores = _sysctl("hw.perflevel0.physicalcpu") or _sysctl("hw.physicalcpu")
    elif hasattr(os, "sched_getaffinity"):
        cores = _physical_cores(os.sched_getaffinity(0))
    else:
        # hyper-threads share the units that matrix products need
        cores = max(1, (os.cpu_count() or 1) // 2)
    cores = cores or os.cpu_count() or 1
    quota = _cgroup_quota()
    return max(1, min(cores, math.ceil(quota)) if quota else cores)


def _physical_cores(cpus: set[int]) -> int:
    """Of these logical CPUs, the number of distinct cores (hyper-threads counted once)."""
    cores = set()
    for cpu in cpus:
        try:
            siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
            cores.add(siblings.read_text().strip())
        except OSError:
            cores.add(str(cpu))
    return len(cores)


def _cgroup_quota() -> float | None:
    """CPUs granted by the container (cgroup v2 or v1), or None without a limit."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()[:2]
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        pass
    try:
        base = Path("/sys/fs/cgroup/cpu")
        us = int((base / "cpu.cfs_quota_us").read_text())
        return us / int((base / "cpu.cfs_period_us").read_text()) if us > 0 else None
    except (OSError, ValueError, ZeroDivisionError):
        return None


def _sysctl(name: str) -> int | None:
    value = ctypes.c_int(0)
    size = ctypes.c_size_t(ctypes.sizeof(value))
    libc = ctypes.CDLL(None)
    failed = libc.sysctlbyname(name.encode(), ctypes.byref(value), ctypes.byref(size), None, 0)
    return None if failed else value.value
