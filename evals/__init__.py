if __name__ != "rzoo.evals":
    raise ImportError(
        "write `import rzoo.evals`: the folder evals/ is the source of that package and no package by itself"
    )
