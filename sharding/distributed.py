"""Several processes as one machine: joined through the environment variables that launchers set."""

import ipaddress
import os
import socket

import jax

from rzoo.core import RzooError

VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
LAUNCHERS = ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")  # jax.distributed reads the rest of what these say by itself


def join_processes() -> None:
    """Joins the other processes where the environment names them; else, and the second time, nothing.

    VARIABLES are set by hand: host:port of the first process, how many there are, which this is. Under Slurm and Open
    MPI with more than one task they are not needed. On CPUs collectives run through gloo. Raises RzooError for a part
    of the variables, malformed ones, and a loopback coordinator where the processes are on several machines.
    """
    given = {name: os.environ[name] for name in VARIABLES if os.environ.get(name)}
    launched = any(os.environ.get(name, "1") not in ("", "1") for name in LAUNCHERS)
    if jax.distributed.is_initialized() or not (given or launched):
        return
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        if given:
            _join(given)
        else:
            jax.distributed.initialize()
    except (RuntimeError, ValueError) as error:
        raise RzooError(
            f"the processes could not join: {error}",
            field="environment",
            value=given,
            fix="load before any other use of JAX; every process needs the same address and count",
        ) from error


def _join(given: dict[str, str]) -> None:
    lacking = [name for name in VARIABLES if name not in given]
    if lacking:
        raise RzooError(
            f"{' and '.join(given)} set without {' and '.join(lacking)}", field=lacking[0], fix="set all three, or none"
        )
    address, count, number = (given[name] for name in VARIABLES)
    host, _, port = address.rpartition(":")
    if not (host and port.isdigit()):
        raise RzooError(f"{VARIABLES[0]} ({address}) must be host:port", field=VARIABLES[0], value=address)
    if not (count.isdigit() and number.isdigit() and int(number) < int(count)):
        raise RzooError(
            f"{VARIABLES[2]} ({number}) must be one of 0..{VARIABLES[1]} - 1 ({count})",
            field=VARIABLES[2],
            value=number,
        )
    loopback = _is_loopback(host)
    if loopback and os.environ.get("SLURM_JOB_NUM_NODES", "1") != "1":
        raise RzooError(
            f"{VARIABLES[0]} ({address}) is a loopback address, but the job is on several machines",
            field=VARIABLES[0],
            value=address,
            fix="give the name by which the other machines reach the first one",
        )
    bind = address if loopback else None  # by default the first process listens on every interface
    jax.distributed.initialize(address, int(count), int(number), coordinator_bind_address=bind)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(socket.gethostbyname(host.strip("[]"))).is_loopback
    except (OSError, ValueError):
        return False
