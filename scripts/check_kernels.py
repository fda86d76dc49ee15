#!/usr/bin/env python3
"""Check our CPU kernels for every instruction set they have, and with sanitizers.

    python scripts/check_kernels.py                     # all variants: minutes, at first more
    python scripts/check_kernels.py avx2-vnni arm-i8mm  # some of them
    python scripts/check_kernels.py --list

Builds the patched CPU backend once per processor family below build/kernels. The kernels are then
compiled for each variant, as they are shipped and (for this processor) with ASan and UBSan, and
linked with tests/native/product_check.cpp and attention_check.cpp, where they take the place of the
library's. Those compare them with scalar twins and each token with itself in batches, bit for bit.
ARM runs in an emulator: Debian's g++-aarch64-linux-gnu and qemu-user. Exit code 0 says that all
held, 1 that something did not, 2 that something is missing.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OVERLAY = ROOT / "patches" / "overlay" / "ggml-cpu"
TESTS = ROOT / "tests" / "native"
FOLDER = ROOT / "build" / "kernels"
SECONDS = 1200  # of any one check; the emulator is slow where other work goes on beside it
CHECKS = ("product", "attention")
SANITIZERS = ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]


class MissingError(Exception):
    """What is not there, and how to get it, in one line."""


@dataclass(frozen=True)
class Family:
    """Processors that one build of the library serves, and what makes programs for them."""

    name: str
    compiler: str
    package: str
    cmake: tuple[str, ...] = ()
    emulator: str = ""

    def tools(self) -> None:
        """Raises MissingError."""
        here = platform.machine()
        if not self.emulator and here != "x86_64":
            raise MissingError(f"this machine is no x86-64 but {here}")
        needed = {"cmake": "cmake", self.compiler: self.package}
        if self.emulator:
            needed[self.emulator] = "qemu-user"
        for tool, package in needed.items():
            if not shutil.which(tool):
                raise MissingError(f"{tool} is missing (Debian: {package})")


def arm(name: str, architecture: str) -> Family:
    tool = "aarch64-linux-gnu"
    return Family(
        name,
        f"{tool}-g++",
        f"g++-{tool}",
        (
            "-DCMAKE_SYSTEM_NAME=Linux",
            "-DCMAKE_SYSTEM_PROCESSOR=aarch64",
            f"-DCMAKE_C_COMPILER={tool}-gcc",
            f"-DCMAKE_CXX_COMPILER={tool}-g++",
            "-DGGML_NATIVE=OFF",
            "-DGGML_OPENMP=OFF",
            f"-DGGML_CPU_ARM_ARCH={architecture}",
        ),
        "qemu-aarch64",
    )


X86 = Family("x86", "g++", "g++")
DOTPROD, I8MM = "armv8.2-a+dotprod+fp16", "armv8.6-a+dotprod+fp16+i8mm"
# which layouts upstream packs weights in depends on what its own code is compiled for
ARM_DOTPROD, ARM_I8MM = arm("arm-dotprod", DOTPROD), arm("arm-i8mm", I8MM)


@dataclass(frozen=True)
class Variant:
    """An instruction set: flags as ggml's CMake files give them, words of /proc/cpuinfo."""

    name: str
    family: Family
    flags: str
    needs: str = ""
    upstreams: tuple[str, ...] = ()  # checks in which no kernel may be ours
    sanitized: bool = False

    @property
    def title(self) -> str:
        return f"{self.name}, sanitizers" if self.sanitized else self.name


AVX2 = "-msse4.2 -mf16c -mfma -mbmi2 -mavx -mavx2"
AVX512 = f"{AVX2} -mavx512f -mavx512cd -mavx512vl -mavx512dq -mavx512bw -mavx512vbmi -mavx512vnni"
AVX512_NEEDS = "avx512f avx512vl avx512dq avx512bw avx512vbmi avx512_vnni"
VARIANTS = [
    Variant("native", X86, "-march=native", "avx2 fma f16c"),
    Variant("avx2", X86, AVX2, "avx2 fma f16c"),
    Variant("avx2-vnni", X86, f"{AVX2} -mavxvnni", "avx2 fma f16c avx_vnni"),
    Variant("avx512-vnni", X86, AVX512, AVX512_NEEDS),
    Variant("arm-dotprod", ARM_DOTPROD, f"-march={DOTPROD}"),
    Variant("arm-i8mm", ARM_I8MM, f"-march={I8MM}"),
    Variant("arm-sve", ARM_I8MM, f"-march={I8MM}+sve2", upstreams=("attention",)),
    Variant("arm-neon", ARM_DOTPROD, "-march=armv8-a", upstreams=("product",)),
]


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def execute(
    command: Sequence[str | Path], log: Path, **more: object
) -> subprocess.CompletedProcess[str]:
    words = [str(word) for word in command]
    done = subprocess.run(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
        **more,  # type: ignore[call-overload]
    )
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text(f"{' '.join(words)}\n{done.stdout}")
    return done


def build_library(family: Family, jobs: int) -> Path:
    """The CMake folder of the patched CPU backend. Raises MissingError."""
    folder = FOLDER / family.name
    log = folder.with_suffix(".log")
    configure = ["cmake", "-S", ROOT, "-B", folder, "-DCMAKE_BUILD_TYPE=Release", *family.cmake]
    configure.append(f"-DPython_EXECUTABLE={sys.executable}")
    if not (folder / "CMakeCache.txt").is_file() and shutil.which("ninja"):
        configure += ["-G", "Ninja"]
    build = ["cmake", "--build", folder, "--target", "ggml-cpu", "--parallel", str(jobs)]
    for command in (configure, build):
        if execute(command, log).returncode:
            raise MissingError(f"the library for {family.name} does not build: see {log}")
    return folder


def processor_flags() -> set[str]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return set(next((line for line in lines if line.startswith("flags")), "").split())


def compile_checks(variant: Variant, library: Path, folder: Path) -> dict[str, Path]:
    """Programs by the name of the check, with the kernels of this variant in them. Raises
    MissingError where the compiler does not know the instruction set."""
    compiler = variant.family.compiler
    probe = [compiler, *variant.flags.split(), "-x", "c++", "-E", os.devnull]
    if execute(probe, folder / "probe.log").returncode:
        raise MissingError(f"{compiler} does not know {variant.flags.split()[-1]}")
    source = library / "llama.cpp-src" / "ggml"
    optimised = SANITIZERS if variant.sanitized else ["-O3", "-DNDEBUG"]
    include = [f"-I{source / part}" for part in ("include", "src", "src/ggml-cpu")]
    common = [compiler, "-std=gnu++17", "-fPIC", "-D_GNU_SOURCE", *optimised, *include]
    objects = []
    for file in sorted(OVERLAY.glob("*.cpp")):
        objects.append(folder / f"{file.stem}.o")
        command = [*common, *variant.flags.split(), f"-I{OVERLAY}", "-c", file, "-o", objects[-1]]
        _compile(command, folder / f"{file.stem}.log")
    programs = {}
    for name in CHECKS:
        programs[name] = folder / f"{name}_check"
        # the twins round each operation by itself
        command = [*common, "-ffp-contract=off", TESTS / f"{name}_check.cpp", *objects]
        command += [f"-L{library / 'bin'}", "-lggml-cpu", "-lggml-base", "-ldl", "-rdynamic"]
        _compile([*command, "-o", programs[name]], folder / f"{name}_check.log")
    return programs


def _compile(command: Sequence[str | Path], log: Path) -> None:
    if execute(command, log).returncode:
        raise MissingError(f"{command[-1]} does not compile: see {log}")


def run_check(variant: Variant, name: str, program: Path, library: Path) -> str:
    """What is wrong, or nothing."""
    log = program.with_name(f"{name}_run.log")
    command: list[str | Path] = [program]
    search = f"LD_LIBRARY_PATH={library / 'bin'}"
    if variant.family.emulator:
        command = [
            variant.family.emulator,
            "-cpu",
            "max",
            "-L",
            "/usr/aarch64-linux-gnu",
            "-E",
            search,
        ]
        command.append(program)
    else:
        command = [
            "env",
            search,
            "OMP_WAIT_POLICY=passive",
            "UBSAN_OPTIONS=print_stacktrace=1",
            program,
        ]
    if name in variant.upstreams:
        command.append("upstream")
    try:
        done = execute(command, log, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return f"took longer than {SECONDS} s"
    lines = done.stdout.splitlines()
    if f"kernels of {program}" not in lines:
        return f"the program's kernels were not the ones in use: see {log}"
    # ends with the verdict, which a sanitizer or a signal leaves out
    if done.returncode or not lines or not lines[-1].startswith(("products: ", "attention: ")):
        shown = next((x for x in lines if "runtime error" in x or "ERROR: " in x), "")
        return f"{shown or (lines or ['no output'])[-1]} (see {log})"
    for line in lines:
        if "upstream's; a row depends" in line:
            say(f"  {line}")
    return ""


def check(variant: Variant, library: Path) -> list[tuple[str, str]]:
    """(what was checked, what is wrong) of a variant. Raises MissingError."""
    folder = FOLDER / "programs" / variant.title.replace(", ", "-")
    folder.mkdir(parents=True, exist_ok=True)
    programs = compile_checks(variant, library, folder)
    findings = []
    for name, program in programs.items():
        wrong = run_check(variant, name, program, library)
        upstreams = " (upstream's)" if name in variant.upstreams else ""
        findings.append((f"{variant.title}: {name}{upstreams}", wrong))
    return findings


def main(arguments: Sequence[str] | None = None) -> int:
    names = [variant.name for variant in VARIANTS]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("variants", nargs="*", metavar="VARIANT", help=", ".join(names))
    parser.add_argument("--list", action="store_true", help="the variants and their flags")
    parser.add_argument("--no-sanitizers", action="store_true")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="of the build")
    parser.add_argument(
        "--build", type=Path, metavar="FOLDER", help="a CMake folder to use for x86 instead"
    )
    options = parser.parse_args(arguments)
    if options.list:
        print(*(f"{v.name:12} {v.flags}" for v in VARIANTS), sep="\n")
        return 0
    if unknown := set(options.variants) - set(names):
        parser.error(f"no such variant: {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    chosen: list[Variant] = []
    for variant in VARIANTS:
        if not options.variants or variant.name in options.variants:
            chosen.append(variant)
            if variant.family is X86 and not options.no_sanitizers:
                chosen.append(replace(variant, sanitized=True))
    begun = time.monotonic()
    libraries: dict[str, Path] = {} if options.build is None else {"x86": options.build.resolve()}
    wrong, missing = 0, 0
    for variant in chosen:
        try:
            variant.family.tools()
            if lacking := set(variant.needs.split()) - processor_flags():
                raise MissingError(f"this processor lacks {', '.join(sorted(lacking))}")
            if variant.family.name not in libraries:
                say(f"Building the library for {variant.family.name} (minutes at the first time)")
                libraries[variant.family.name] = build_library(variant.family, options.jobs)
            for name, fault in check(variant, libraries[variant.family.name]):
                print(f"{name}: {fault or 'good'}", flush=True)
                wrong += bool(fault)
        except MissingError as error:
            missing += 1
            print(f"{variant.title}: not checked, {error}", flush=True)
    say(f"{time.monotonic() - begun:.0f} s")
    return 1 if wrong else 2 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
