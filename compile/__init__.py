if __name__ != "rzoo.compile":
    raise ImportError(
        "write `import rzoo.compile`: the folder compile/ is the source of that package and no package by itself"
    )
