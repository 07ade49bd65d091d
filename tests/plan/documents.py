"""Plan documents to damage, and how to damage them."""

import copy


GOOD = {
    "version": 1,
    "label": "good",
    "cluster": {"H20": 7},
    "zero": 0,
    "pipelines": [
        {
            "microbatches": 5,
            "mbs": 1,
            "stages": [{"ranks": [0, 1], "layers": [0, 1]}, {"ranks": [2, 3], "layers": [2, 3]}],
        },
        {"microbatches": 3, "mbs": 1, "stages": [{"ranks": [4], "layers": [0, 3], "tp": 1}]},
    ],
}
EXPANDED = {
    "version": 1,
    "inputs": "S0[5:3] / 0,1:R 2:R",
    "labels": "S0[5:3] / 0,1:R 2:R",
    "tensors": {"a.weight": "R / 0,1:S0 2:R", "b": {"top": "R", "subgroups": []}},
    "points": [{"module": "a", "side": "input", "kind": "tp", "spec": "S0[5:3] / 0,1:R 2:R"}],
}
EXPANDED["tensors"]["b"]["subgroups"] = [{"ranks": [0, 1], "placements": ["S1"]}]
DELETE = object()


def changed(document, path, value):
    """Return a copy of a document with the value at a path of keys replaced, added or deleted."""
    out = copy.deepcopy(document)
    *parents, last = path
    node = out
    for key in parents:
        node = node[key]
    if value is DELETE:
        del node[last]
    elif isinstance(node, list) and last == len(node):
        node.append(value)
    else:
        node[last] = value
    return out


def uniform(**changes):
    return {"uniform": {"dp": 2, "tp": 2, "pp": 1, **changes}}
