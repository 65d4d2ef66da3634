"""Speed as ratios: rzoo beside its peers, taking turns in one run.

cases.py      what is timed: prompts, batches, new tokens
child.py      the process that one engine lives in, answering "run this case once"
turns.py      the parent's end of that conversation, with time limits
peers.py      the engines: rzoo, transformers, llama.cpp
bandwidth.py  the engine that measures how fast this machine reads float32
compare.py    `bench`: the turns, medians, ratios and spreads; `plot`

This file imports nothing, since every child passes through it and must hold only its own engine's libraries.
"""
