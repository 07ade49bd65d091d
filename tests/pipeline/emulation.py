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
    """Place -> list of ("recv", channel, what), ("compute", action), ("send", channel, what)."""
    at = {stage: p for p, place in enumerate(lane.places) for stage in place.stages}
    sent, needed = messages(rows, lane, at)
    out = []
    for place, row in enumerate(rows):
        todo, taken = [], defaultdict(int)
        for action in row:
            for need in needed[action]:
                if at[need.stage] == place:
                    todo.append(("local", need, action))
                    continue
                channel = (at[need.stage], place, need.kind is Kind.FORWARD)
                index = sent[channel].index((need, action))
                while taken[channel] <= index:  # those sent before it come first
                    todo.append(("recv", channel, sent[channel][taken[channel]]))
                    taken[channel] += 1
            todo.append(("compute", action, None))
            own = [channel for channel in sent if channel[0] == place]
            todo += [("send", c, m) for c in own for m in sent[c] if m[0] == action]
        out.append(todo)
    return out


def run(rows, lane, choose, *, is_blocking=False):
    """Return the actions that were computed, in the order in which it happened, until nobody could move.

    Args:
        rows: Actions of each place.
        lane: Stages and edges.
        choose: Picks one of a list: who moves next.
        is_blocking: Whether a send waits for its receive.
    """
    todo = programs(rows, lane)
    position = [0] * len(todo)
    pipes, done, order = defaultdict(list), set(), []

    def can_move(place):
        if position[place] == len(todo[place]):
            return False
        what, subject, _ = todo[place][position[place]]
        if what == "local":
            return subject in done
        if what == "recv":
            return bool(pipes[subject])
        if what == "send" and is_blocking:
            peer = subject[1]
            there = todo[peer][position[peer]] if position[peer] < len(todo[peer]) else None
            return there is not None and there[:2] == ("recv", subject) and not pipes[subject]
        return True

    while movable := [place for place in range(len(todo)) if can_move(place)]:
        place = choose(movable)
        what, subject, message = todo[place][position[place]]
        if what == "compute":
            done.add(subject)
            order.append(subject)
        elif what == "send":
            pipes[subject].append(message)
        elif what == "recv":
            got = pipes[subject].pop(0)
            assert got == message, f"{place} got {got} for {message}"
        position[place] += 1
    return order
