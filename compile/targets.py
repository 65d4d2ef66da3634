"""GPUs that are not there: one table of hardware numbers, and from it what XLA needs to compile for one of them.

Sources: NVIDIA's data sheets (dense rates, without sparsity) and the properties that the CUDA runtime reports. Rates
and links serve the roofline alone and are the sheet's: a program reaches some share of them.
"""

from dataclasses import dataclass

from rzoo.core import RzooError, closest

GB = 10**9


@dataclass(frozen=True, kw_only=True)
class Target:
    """One device. memory: bytes. bandwidth: bytes/s of its memory. rates: operations/s of dense matrix products by the
    type of their factors. link: bytes/s that it receives from the others of its node; network: from another node; 0
    where there is none. node: devices of a node. chip: what XLA must know to compile for it; None: arithmetic alone.
    """

    name: str
    memory: int
    bandwidth: int
    rates: tuple[tuple[str, float], ...]
    link: int = 0
    network: int = 50 * GB
    node: int = 8
    chip: "Chip | None" = None

    def rate(self, kind: str) -> float:
        """Operations/s for factors of type `kind`: those of bf16 where the device has no rate of its own for it."""
        rates = dict(self.rates)
        return rates.get(kind, rates["bf16"])

    @property
    def description(self) -> str:
        """GpuTargetConfigProto as text. Raises RzooError for a device that nothing is compiled for."""
        if self.chip is None:
            compiled = ", ".join(name for name, known in TARGETS.items() if known.chip)
            raise RzooError(
                f"nothing is compiled for {self.name}: it is known for arithmetic alone",
                field="gpu",
                value=self.name,
                fix=f"programs are compiled for {compiled}",
            )
        return _description(self, self.chip)


@dataclass(frozen=True, kw_only=True)
class Chip:
    """Of one GPU: compute capability, cores (SMs) and FPUs in each, clocks in GHz, bytes of L2 cache, of shared memory
    in a core and of what one block may ask for. matrix_operations: of a core's matrix unit in a clock, for 8-bit types;
    0 leaves XLA's own estimate.
    """

    device: str
    capability: int
    accelerated: bool
    cores: int
    fpus: int = 128
    clock: float
    matrix_clock: float = 0.0
    matrix_operations: int = 0
    l2: int
    shared: int = 233472
    shared_optin: int = 232448
    pcie: int = 34359738368
    dnn: tuple[int, int, int] = (9, 10, 0)


HOPPER = {"bf16": 989e12, "fp8": 1979e12, "int8": 1979e12}
TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        Target(
            name="a100-80gb",
            memory=85100068864,
            bandwidth=2039040000000,
            rates=(("bf16", 312e12), ("int8", 624e12)),
            link=300 * GB,
            network=25 * GB,
            chip=Chip(
                device="NVIDIA A100-SXM4-80GB",
                capability=8,
                accelerated=False,
                cores=108,
                fpus=64,
                clock=1.41,
                l2=41943040,
                shared=167936,
                shared_optin=166912,
                dnn=(8, 9, 4),
            ),
        ),
        Target(
            name="h100",
            memory=84942979072,
            bandwidth=3352320000000,
            rates=tuple(HOPPER.items()),
            link=450 * GB,
            chip=Chip(
                device="NVIDIA H100 80GB HBM3",
                capability=9,
                accelerated=True,
                cores=132,
                clock=1.98,
                matrix_clock=1.8295201,
                matrix_operations=1024,
                l2=52428800,
            ),
        ),
        Target(
            name="h200",
            memory=151397597184,
            bandwidth=4800000000000,
            rates=tuple(HOPPER.items()),
            link=450 * GB,
            chip=Chip(
                device="NVIDIA H200 141GB HBM3e",
                capability=9,
                accelerated=True,
                cores=132,
                clock=1.98,
                matrix_clock=1.8295201,
                matrix_operations=1024,
                l2=52428800,
            ),
        ),
        Target(
            name="b200",
            memory=191514411008,
            bandwidth=7672320000000,
            rates=(("bf16", 2250e12), ("fp8", 4500e12), ("int8", 4500e12)),
            link=900 * GB,
            chip=Chip(
                device="NVIDIA B200",
                capability=10,
                accelerated=True,
                cores=148,
                clock=1.965,
                matrix_clock=1.8353101,
                matrix_operations=2048,
                l2=132644864,
                pcie=68719476736,
            ),
        ),
        # 4 cores of 2.4 GHz with two 128-bit units: 77 Gflop/s in float32.
        Target(name="rpi5", memory=8 * GB, bandwidth=17 * GB, rates=(("bf16", 77e9),), network=0, node=1),
    )
}


def target(name: str) -> Target:
    """The device called `name`, in any case. Raises RzooError with the known ones for another."""
    found = TARGETS.get(str(name).lower())
    if found is None:
        known = closest(str(name).lower(), list(TARGETS))
        raise RzooError(f"gpu ({name}) is unknown; {known}", field="gpu", value=name)
    return found


# XLA's numbers of types, by the width of their numbers in bits.
FULL_RATE = {8: (2, 6, 19, 20), 16: (10, 16), 32: (4, 8, 11)}


def _description(device: Target, chip: Chip) -> str:
    major, minor, patch = chip.dnn
    feature = "ACCELERATED_FEATURES" if chip.accelerated else "NONE"
    capability = f"{chip.capability}.0{'a' if chip.accelerated else ''}"
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {chip.shared}
  threads_per_core_limit: 2048
  core_count: {chip.cores}
  fpus_per_core: {chip.fpus}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {device.bandwidth}
  l2_cache_size: {chip.l2}
  clock_rate_ghz: {chip.clock}
  device_memory_size: {device.memory}
  shared_memory_per_block_optin: {chip.shared_optin}
  cuda_compute_capability {{ major: {chip.capability} feature_extension: {feature} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
{_rates(chip)}
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  device_vendor: "NVIDIA Corporation"
  platform_version: "Compute Capability {capability}"
  device_address_bits: 64
  pcie_bandwidth: {chip.pcie}
  ecc_enabled: true
  name: "{chip.device}"
  driver_version: "13.0.0"
  runtime_version: "12.8.0"
  compile_time_toolkit_version: "12.8.0"
  dnn_version: "{major}.{minor}.{patch}"
  cub_version: "3.1.2"
  device_interconnect_info {{ active_links: 18 }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: {major} minor: {minor} patch: {patch} }}
device_description_str: "{chip.device}"
"""


def _rates(chip: Chip) -> str:
    """What the scalar and matrix units of a core do in a clock; wider types at a fraction of it."""
    if not chip.matrix_operations:
        return ""
    scalar = [_rate(key, chip.clock, chip.fpus, 2) for keys in FULL_RATE.values() for key in keys]
    matrix = [
        _rate(key, chip.matrix_clock, 4, chip.matrix_operations * 8 // bits)
        for bits, keys in FULL_RATE.items()
        for key in keys
    ]
    units = {"scalar_unit_description": scalar, "matrix_unit_description": matrix}
    return "\n".join(f"  {name} {{ {' '.join(rates)} }}" for name, rates in units.items())


def _rate(key: int, clock: float, units: int, operations: int) -> str:
    value = f"clock_rate_ghz: {clock} units_per_core: {units} ops_per_clock: {operations}"
    return f"rate_infos {{ key: {key} value {{ {value} }} }}"
