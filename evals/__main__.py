"""`python -m rzoo.evals …` is `rzoo eval …`."""

import runpy
import sys

if __name__ == "__main__":
    sys.argv[1:1] = ["eval"]
    runpy.run_module("rzoo", run_name="__main__")
