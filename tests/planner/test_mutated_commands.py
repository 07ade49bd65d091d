"""Mutated command lines: each ends with one line of ours and code 2, or with a valid answer."""

import random

from tests.planner.commands_fuzz import Fuzz


def test_a_mutated_command_line_is_our_error_or_a_valid_answer(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fuzz = Fuzz(tmp_path)
    codes, faults = [], {}
    for seed in range(400):
        words = fuzz.command(random.Random(seed))
        if words[0] == "profile":  # it may start processes
            continue
        fault = fuzz.fault(words)
        codes.append(fuzz.code)
        if fault is not None:
            faults[seed] = (words, fault)
    assert not faults
    assert len(codes) >= 300
    assert 0.1 < codes.count(0) / len(codes) < 0.9
