"""The least makespan of routes with up to one relay at each end, as a linear programme for HiGHS.

Written from the definition of a route alone: every way that a cell can take is one variable.
"""

import itertools
from collections import defaultdict

import highspy


def ways(topology, alive, owners, needers):
    """Each way is a list of hops (src, dst) that brings a cell to needers of one node."""
    members = [r for r in topology.neighbours(needers[0]) if r in alive]
    near = [o for o in owners if o in members]
    star = {first: [(first, n) for n in needers if n != first] for first in members}
    for chosen in itertools.product(owners, repeat=len(needers)):
        yield [(o, n) for o, n in zip(chosen, needers, strict=True)]
    for owner, first in itertools.product(near, members):
        if first != owner:
            yield [(owner, first), *star[first]]
    for owner in owners:
        if owner not in near:
            for leave in topology.neighbours(owner):
                if leave in alive:
                    start = [] if leave == owner else [(owner, leave)]
                    for first in members:
                        yield [*start, (leave, first), *star[first]]


def least_makespan(needs, topology, alive):
    """Seconds of the optimum.

    Args:
        needs: (owners, needers of one node that own nothing of it, bytes).
    """
    model = highspy.Highs()
    model.setOptionValue("output_flag", False)
    makespan = model.addVariable(lb=0, obj=1)
    busy = defaultdict(list)
    for owners, needers, num_bytes in needs:
        shares = []
        for hops in ways(topology, alive, owners, needers):
            share = model.addVariable(lb=0)
            shares.append(share)
            for src, dst in hops:
                crosses = topology.node(src) != topology.node(dst)
                out, into = topology.seconds_per_byte(src, dst)
                busy[src, crosses, "out"].append((share, out * num_bytes))
                busy[dst, crosses, "in"].append((share, into * num_bytes))
        model.addConstr(sum(shares[1:], shares[0] + 0) == 1)
    for terms in busy.values():
        expression = -1 * makespan
        for share, seconds in terms:
            expression = expression + seconds * share
        model.addConstr(expression <= 0)
    model.run()
    assert model.getModelStatus() == highspy.HighsModelStatus.kOptimal
    return model.getInfo().objective_function_value
