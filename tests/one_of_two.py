"""One of two processes of four devices each: loads a model, generates, saves. Run by test_sharded_load.py.

python one_of_two.py MODEL SMALL OUT: prints a JSON line with what it read, its tokens and the bytes of its parts.
"""

import json
import os
import sys

import jax
import numpy as np

import rzoo
from rzoo.sharding.placement import per_device

MODEL, SMALL, OUT = sys.argv[1:]
PROMPTS = np.random.default_rng(0).integers(0, 96, (4, 9)).tolist()


def bytes_read() -> int:
    """All that this process has read through system calls."""
    with open("/proc/self/io") as file:
        return int(dict(line.split(": ") for line in file)["rchar"])


def main() -> None:
    """Loads SMALL first, so that what is imported on the way is not counted."""
    small = rzoo.load(SMALL, mesh={"data": 2, "tensor": 4}, rules="tensorxdata", quiet=True)
    tokens = [answer.tokens for answer in rzoo.generate(small, PROMPTS, max_new_tokens=6)]
    before = bytes_read()
    lm = rzoo.load(MODEL, mesh={"tensor": 8}, quiet=True)
    read = bytes_read() - before
    own = sum(sum(per_device(value)) for value in lm.params.values())
    rzoo.save(small, OUT, step=3)
    print(json.dumps({"read": read, "own": own, "tokens": tokens, "devices": jax.device_count(), "pid": os.getpid()}))


main()
