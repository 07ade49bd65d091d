"""The verbs: cut, build, collect, parallelize."""
