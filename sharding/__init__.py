if __name__ != "rzoo.sharding":
    raise ImportError(
        "write `import rzoo.sharding`: the folder sharding/ is the source of that package and no package by itself"
    )
