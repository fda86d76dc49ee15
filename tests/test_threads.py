"""native/threads.py on made-up machines: a folder stands for the root of the file system."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from knapspec_edge.native import threads
from knapspec_edge.native.threads import ThreadChoice, choose_threads


class Machine:
    """A file system root with the kernel's files about CPUs and control groups."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")

    def cores(self, n_cores: int, *, threads_per_core: int = 1, first_cpu: int = 0) -> int:
        """Add cores whose hyper-threads have neighbouring numbers; returns the next free number."""
        for core in range(n_cores):
            first = first_cpu + core * threads_per_core
            last = first + threads_per_core - 1
            siblings = f"{first}" if first == last else f"{first}-{last}"
            for cpu in range(first, last + 1):
                self.write(
                    f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", siblings
                )
        end = first_cpu + n_cores * threads_per_core
        self.write("sys/devices/system/cpu/online", f"0-{end - 1}")
        return end

    def capacities(self, values: list[int]) -> None:
        for cpu, value in enumerate(values):
            self.write(f"sys/devices/system/cpu/cpu{cpu}/cpu_capacity", str(value))

    def choice(self, cpus: range | set[int]) -> ThreadChoice:
        return choose_threads(self.root, cpus=cpus, platform="linux")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_hyper_threads_count_once(machine: Machine) -> None:
    machine.cores(4, threads_per_core=2)
    assert machine.choice(range(8)) == ThreadChoice(4, "4 physical cores")


def test_without_any_file_each_cpu_is_a_core(machine: Machine) -> None:
    assert machine.choice(range(3)) == ThreadChoice(3, "3 physical cores")


def test_hybrid_intel_uses_its_performance_cores(machine: Machine) -> None:
    next_cpu = machine.cores(6, threads_per_core=2)
    machine.cores(8, first_cpu=next_cpu)
    machine.write("sys/devices/cpu_core/cpus", "0-11")
    machine.write("sys/devices/cpu_atom/cpus", "12-19")
    assert machine.choice(range(20)) == ThreadChoice(6, "6 performance cores of 14 cores")
    # pinned to efficiency cores, those are what there is
    assert machine.choice(range(12, 16)).threads == 4
    # part of the performance cores only
    assert machine.choice({0, 1, 2, 12, 13}).threads == 2


def test_hybrid_intel_without_hyper_threads(machine: Machine) -> None:
    machine.cores(16)
    machine.write("sys/devices/cpu_core/cpus", "0-7")
    machine.write("sys/devices/cpu_atom/cpus", "8-15")
    assert machine.choice(range(16)) == ThreadChoice(8, "8 performance cores of 16 cores")


def test_one_type_of_core_is_not_hybrid(machine: Machine) -> None:
    machine.cores(4)
    machine.write("sys/devices/cpu_core/cpus", "0-1")  # cpu_atom is missing
    assert machine.choice(range(4)).threads == 4


@pytest.mark.parametrize(
    ("capacities", "expected"),
    [
        ([400] * 4 + [1024] * 4, 4),  # big.LITTLE
        ([300] * 4 + [900] * 3 + [1024], 4),  # one prime core, three big, four small
        ([900] * 4 + [1024] * 4, 8),  # slower by little: all eight do more than four
        ([512] * 2 + [1024] * 2, 2),  # as much either way: the fewer
        ([1024] * 6, 6),
        ([0, 1024], 2),  # unreadable
    ],
)
def test_arm_cores_of_several_speeds(
    machine: Machine, capacities: list[int], expected: int
) -> None:
    machine.cores(len(capacities))
    machine.capacities(capacities)
    assert machine.choice(range(len(capacities))).threads == expected


def test_a_missing_capacity_leaves_all_cores(machine: Machine) -> None:
    machine.cores(3)
    machine.capacities([400, 1024])
    assert machine.choice(range(3)).threads == 3


def test_affinity_of_one_cpu(machine: Machine) -> None:
    machine.cores(8)
    assert machine.choice({5}) == ThreadChoice(1, "1 physical core of 8 by CPU affinity")


def test_container_quota(machine: Machine) -> None:
    machine.cores(8)
    machine.write("proc/self/cgroup", "0::/")
    machine.write("sys/fs/cgroup/cpu.max", "150000 100000")
    assert machine.choice(range(8)) == ThreadChoice(2, "container quota of 1.5 CPUs")
    # a quota above the cores decides nothing
    assert machine.choice({0}).threads == 1
    machine.write("sys/fs/cgroup/cpu.max", "5000 100000")
    assert machine.choice(range(8)).threads == 1
    machine.write("sys/fs/cgroup/cpu.max", "max 100000")
    assert machine.choice(range(8)) == ThreadChoice(8, "8 physical cores")


def test_the_smallest_quota_on_the_way_up_counts(machine: Machine) -> None:
    machine.cores(8)
    machine.write("proc/self/cgroup", "0::/user.slice/job.scope/inner")
    machine.write("sys/fs/cgroup/user.slice/job.scope/inner/cpu.max", "max 100000")
    machine.write("sys/fs/cgroup/user.slice/job.scope/cpu.max", "600000 100000")
    machine.write("sys/fs/cgroup/user.slice/cpu.max", "300000 100000")
    assert machine.choice(range(8)) == ThreadChoice(3, "container quota of 3 CPUs")
    # a quota of somebody else's group is not ours
    machine.write("sys/fs/cgroup/other.slice/cpu.max", "100000 100000")
    assert machine.choice(range(8)).threads == 3


def test_quota_of_version_1(machine: Machine) -> None:
    machine.cores(8)
    machine.write("proc/self/cgroup", "9:memory:/box\n4:cpu,cpuacct:/box/inner\n0::/")
    machine.write("sys/fs/cgroup/cpu,cpuacct/box/inner/cpu.cfs_quota_us", "-1")
    machine.write("sys/fs/cgroup/cpu,cpuacct/box/inner/cpu.cfs_period_us", "100000")
    assert machine.choice(range(8)).threads == 8
    machine.write("sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_quota_us", "250000")
    machine.write("sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_period_us", "100000")
    assert machine.choice(range(8)) == ThreadChoice(3, "container quota of 2.5 CPUs")


@pytest.mark.parametrize("path", ["/docker/0123abcd", "/../../elsewhere"])
def test_a_container_that_does_not_see_its_group(machine: Machine, path: str) -> None:
    machine.cores(8)
    machine.write("proc/self/cgroup", f"0::{path}")
    machine.write("sys/fs/cgroup/cpu.max", "200000 100000")
    # what a path with .. would lead to
    machine.write("sys/elsewhere/cpu.max", "100000 100000")
    assert machine.choice(range(8)).threads == 2


@pytest.mark.parametrize("text", ["", "nonsense", "100000", "100000 0", "x y"])
def test_an_unreadable_quota_is_none(machine: Machine, text: str) -> None:
    machine.cores(4)
    machine.write("proc/self/cgroup", "0::/")
    machine.write("sys/fs/cgroup/cpu.max", text)
    assert machine.choice(range(4)).threads == 4


def test_macos_asks_the_system(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.write("proc/self/cgroup", "0::/")
    machine.write("sys/fs/cgroup/cpu.max", "100000 100000")
    values = {"hw.perflevel0.physicalcpu": 6, "hw.physicalcpu": 10}
    monkeypatch.setattr(threads, "_sysctl", values.get)
    choice = choose_threads(machine.root, platform="darwin")
    assert choice == ThreadChoice(6, "6 performance cores")
    values.pop("hw.perflevel0.physicalcpu")  # an Intel Mac
    choice = choose_threads(machine.root, platform="darwin")
    assert choice == ThreadChoice(10, "10 physical cores")


def test_windows_halves_the_logical_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    assert choose_threads(platform="win32") == ThreadChoice(8, "half of 16 logical CPUs")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="affinity is set the Linux way")
def test_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = os.sched_getaffinity(0)
    choice = choose_threads()
    assert 1 <= choice.threads <= len(allowed)
    assert threads.default_threads() == choice.threads
    os.sched_setaffinity(0, {min(allowed)})
    try:
        assert threads.default_threads() == 1
    finally:
        os.sched_setaffinity(0, allowed)
