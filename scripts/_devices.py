"""Machines by name, for projections: what their makers publish, and what share is assumed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """Peak figures of one machine and the assumed share of them that decoding reaches."""

    label: str
    bandwidth_gbs: float  # GB/s, of the memory that holds the weights
    compute_tflops: float  # of F16 weights; 10^12 operations, a multiply-add is two
    compute_int_tops: float  # of quantised weights
    memory_gb: float  # 10^9 bytes; infinite where it is not known
    source: str
    # Nobody measured these for this table. Three quarters of the bandwidth is what well-made
    # kernels reach; products of a few columns are far from a peak of computing.
    bandwidth_share: float = 0.75
    compute_share: float = 0.5


# Passes of a few tokens run on a GPU's vector units: its tensor cores work on tiles of 8 or 16
# columns. So FP32 figures stand here, for quantised weights as well, which is on the safe side.
# CPUs: cores x clock x operations per cycle, at the base clock where the maker states one.
DEVICES = {
    # Apple newsroom, 18 October 2021 (400 GB/s, 64 GB); 32 cores of 128 lanes at 1.296 GHz
    "m1-max": Device("Apple M1 Max", 400.0, 10.4, 10.4, 64.0, "Apple, 2021"),
    # Apple newsroom, 8 March 2022 (800 GB/s, 128 GB): two M1 Max
    "m1-ultra": Device("Apple M1 Ultra", 800.0, 20.8, 20.8, 128.0, "Apple, 2022"),
    # Apple newsroom, 30 October 2024 (546 GB/s, 128 GB, graphics up to 1.9 times an M1 Max, which
    # is where the figure for computing comes from: Apple states none)
    "m4-max": Device("Apple M4 Max, 40 GPU cores", 546.0, 19.8, 19.8, 128.0, "Apple, 2024"),
    # NVIDIA Ampere GA102 GPU Architecture, white paper: 936 GB/s, 35.6 TFLOPS FP32, 24 GB
    "rtx3090": Device("NVIDIA RTX 3090", 936.0, 35.6, 35.6, 24.0, "NVIDIA GA102 white paper"),
    # NVIDIA Ada GPU Architecture, white paper: 1,008 GB/s, 82.6 TFLOPS FP32, 24 GB
    "rtx4090": Device("NVIDIA RTX 4090", 1008.0, 82.6, 82.6, 24.0, "NVIDIA Ada white paper"),
    # NVIDIA H100 data sheet, SXM: 3.35 TB/s, 67 TFLOPS FP32, 80 GB
    "h100": Device("NVIDIA H100 SXM", 3350.0, 67.0, 67.0, 80.0, "NVIDIA H100 data sheet"),
    # NVIDIA H200 data sheet, SXM: 4.8 TB/s, 67 TFLOPS FP32, 141 GB
    "h200": Device("NVIDIA H200 SXM", 4800.0, 67.0, 67.0, 141.0, "NVIDIA H200 data sheet"),
    # AMD's page of the 7840HS: 8 cores, 3.8 GHz, two channels of DDR5-5600 (16 bytes a transfer).
    # Zen 4 starts two 256-bit FMA (32 operations) a cycle, and four times as many with VNNI.
    "ryzen-7840hs": Device(
        "AMD Ryzen 7 7840HS, dual-channel DDR5-5600", 89.6, 0.97, 3.9, 64.0, "AMD, 2023"
    ),
    # Raspberry Pi 5 product brief: 4 Cortex-A76 at 2.4 GHz, 32 bits of LPDDR4X-4267, 16 GB. An A76
    # starts two 128-bit FMA (16 operations) a cycle, and four times as many with SDOT.
    "pi5": Device("Raspberry Pi 5", 17.1, 0.15, 0.61, 16.0, "Raspberry Pi product brief"),
}
