if __name__ != "rzoo.models":
    raise ImportError(
        "write `import rzoo.models`: the folder models/ is the source of that package and no package by itself"
    )
