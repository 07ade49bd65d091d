"""Schedules carried out in other ways than the package's: by blocking FIFO channels, in random order.

Each place is a program of receives, computations and sends; each channel end has a clerk of its own that
does the posted operations one after another. A random scheduler picks who moves next.
"""

from collections import defaultdict

from hdtensor.pipeline import Action, Kind


def needs(action, lane, whole):
    """What a computation needs of others: (producer's stage, kind, micro-batch)."""
    stage, kind, mb = action
    if kind is Kind.FORWARD:
        return [Action(e.src, Kind.FORWARD, mb) for e in lane.edges if e.dst == stage]
    if kind is Kind.BACKWARD_WEIGHT:
        return []
    return [Action(e.dst, whole(e.dst, mb), mb) for e in lane.edges if e.src == stage]


def messages(rows, lane, at):
    """Return (channel -> messages in the order of sending, what each action needs)."""
    all_actions = {a for row in rows for a in row}

    def whole(stage, mb):
        kept = Action(stage, Kind.BACKWARD, mb) in all_actions
        return Kind.BACKWARD if kept else Kind.BACKWARD_INPUT

    needed = {action: needs(action, lane, whole) for action in all_actions}
    sent = defaultdict(list)
    for place, row in enumerate(rows):
        for action in row:
            takers = sorted(taker for taker in all_actions if action in needed[taker])
            for taker in takers:
                if at[taker.stage] != place:
                    channel = (place, at[taker.stage], action.kind is Kind.FORWARD)
                    sent[channel].append((action, taker))
    return sent, needed


def programs(rows, lane):
    """Place -> list of operations in order: (what, action or channel, number on the channel)."""
    at = {stage: p for p, place in enumerate(lane.places) for stage in place.stages}
    sent, needed = messages(rows, lane, at)
    out = []
    for place, row in enumerate(rows):
        todo, posted = [], defaultdict(int)
        for action in row:
            waits = []
            for need in needed[action]:
                if at[need.stage] == place:
                    waits.append(("local", need, 0))
                    continue
                channel = (at[need.stage], place, need.kind is Kind.FORWARD)
                index = sent[channel].index((need, action))
                for number in range(posted[channel], index + 1):  # those sent before it come first
                    todo.append(("post", channel, number))
                posted[channel] = max(posted[channel], index + 1)
                waits.append(("arrive", channel, index))
            todo += [*waits, ("compute", action, 0)]
            own = [
                (channel, number)
                for channel in sent
                if channel[0] == place
                for number, message in enumerate(sent[channel])
                if message[0] == action
            ]
            todo += [(what, *pair) for what in ("send", "taken") for pair in own]
        out.append(todo)
    return out


def run(rows, lane, choose, *, is_blocking=False):
    """Return the actions that were computed, in the order in which it happened, until nobody could move.

    An action's receives are posted together, and so are its sends.

    Args:
        rows: Actions of each place.
        lane: Stages and edges.
        choose: Picks one of a list: who moves next.
        is_blocking: Whether a place waits after an action until its messages are taken.
    """
    todo = programs(rows, lane)
    position = [0] * len(todo)
    counts = {"send": defaultdict(int), "post": defaultdict(int)}
    order = []

    def can_move(place):
        if position[place] == len(todo[place]):
            return False
        what, subject, number = todo[place][position[place]]
        if what == "local":
            return subject in order
        if what == "arrive" or (what == "taken" and is_blocking):
            return all(count[subject] > number for count in counts.values())
        return True

    while movable := [place for place in range(len(todo)) if can_move(place)]:
        place = choose(movable)
        what, subject, number = todo[place][position[place]]
        if what == "compute":
            order.append(subject)
        elif what in counts:
            assert counts[what][subject] == number, f"{what} {number} on {subject} is out of order"
            counts[what][subject] += 1
        position[place] += 1
    return order
