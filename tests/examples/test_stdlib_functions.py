import ast
import itertools
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st

from examples.stdlib_functions import (
    BEGIN,
    END,
    IGNORED,
    VOCABULARY_SIZE,
    Batches,
    load_functions,
    read_functions,
)


ROOT = Path(__file__).resolve().parent.parent.parent
texts = st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=9)


@pytest.fixture(scope="module")
def functions():
    return load_functions()


def write(folder, **sources):
    paths = []
    for name, source in sources.items():
        paths.append(folder / f"{name}.py")
        paths[-1].write_bytes(source if isinstance(source, bytes) else source.encode())
    return paths


def test_the_standard_library_gives_some_thousand_functions(functions):
    assert 4_000 < len(functions) < 12_000
    assert 2_000_000 < sum(map(len, functions)) < 6_000_000
    assert len(set(functions)) == len(functions)


def test_every_text_is_one_function_that_parses_by_itself(functions):
    for text in functions[::7]:
        (node,) = ast.parse(text).body
        assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


def test_a_known_function_is_there_as_it_is_written(functions):
    source = Path(sysconfig.get_path("stdlib"), "bisect.py").read_text(encoding="utf-8")
    (node,) = (n for n in ast.parse(source).body if getattr(n, "name", "") == "bisect_right")
    assert ast.get_source_segment(source, node).encode() in functions


def test_a_limit_gives_the_first_functions(functions):
    assert load_functions(limit=50) == functions[:50]
    assert load_functions(limit=0) == []


def test_another_process_finds_the_same(functions):
    code = (
        "import hashlib; from examples.stdlib_functions import *; f = load_functions(300);"
        "b = Batches(f, 4, 32, seed=5).at(3);"
        "print(hashlib.sha256(repr((f, [t.tolist() for t in b])).encode()).hexdigest())"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1


def test_functions_come_from_all_branches_without_indentation_and_once(tmp_path):
    paths = write(
        tmp_path,
        one="""
            def plain(): return 1  # not part of it

            class A:
                x = 3
                async def method(self):
                    '''Text
            further left.
                    '''

                    def inner():
                        pass
                @property
                def other(self): pass  # nor this
                class B:
                    def method(self): return "\u00e4"
            if x:
                def in_if(): pass
            elif y:
                def in_elif(): pass
            else:
                def in_else(): pass
            try:
                def in_try(): pass
            except E:
                def in_except(): pass
            finally:
                def in_finally(): pass
            with x:
                def in_with(): pass
            match x:
                case 1:
                    def in_match(): pass
        """.replace("\n            ", "\n"),
        two="def plain(): return 1",
    )
    corpus = read_functions(paths)
    assert corpus.functions[:4] == [
        b"def plain(): return 1",
        b"async def method(self):\n    '''Text\nfurther left.\n    '''\n\n    def inner():\n        pass",
        b"def other(self): pass",
        'def method(self): return "\u00e4"'.encode(),
    ]
    assert [text.split(b"(")[0][4:].decode() for text in corpus.functions[4:]] == [
        "in_if",
        "in_elif",
        "in_else",
        "in_try",
        "in_except",
        "in_finally",
        "in_with",
        "in_match",
    ]
    assert (corpus.num_files, corpus.num_skipped) == (2, 0)


def test_files_that_are_no_python_are_skipped_and_counted(tmp_path):
    paths = write(
        tmp_path,
        good="def f(): pass",
        bytes_=b"\xff\xfe def g(): pass",
        cookie=b"# coding: no-such-codec\ndef g(): pass",
        null=b"def g():\x00 pass",
        syntax="def g(:",
        deep="(" * 500 + ")" * 500,
    )
    corpus = read_functions([*paths, tmp_path / "missing.py", tmp_path])
    assert corpus.functions == [b"def f(): pass"]
    assert (corpus.num_files, corpus.num_skipped) == (8, 7)


def test_other_encodings_and_line_ends_become_utf8_and_newlines(tmp_path):
    paths = write(
        tmp_path,
        latin=b"# coding: latin-1\ndef f():\r\n    return '\xe4'; x = 1\r\n",
        marked=b"\xef\xbb\xbfdef g():\r    pass\r",
    )
    assert read_functions(paths).functions == [
        "def f():\n    return '\u00e4'; x = 1".encode(),
        b"def g():\n    pass",
    ]


def test_doubtful_escapes_do_not_warn(tmp_path):
    (path,) = write(tmp_path, odd=r"def f(): return '\d'")
    assert read_functions([path]).functions == [rb"def f(): return '\d'"]


def test_a_python_without_sources_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(FileNotFoundError, match="no function found in"):
        load_functions()


@given(texts, st.integers(1, 6), st.integers(2, 24), st.integers(0, 1 << 40), st.integers(0, 50))
def test_a_row_is_a_window_of_a_text_and_its_padding(functions, batch_size, context, seed, step):
    input_ids, labels = Batches(functions, batch_size, context, seed).at(step)
    whole = [[BEGIN, *text, END] for text in functions]
    assert input_ids.shape == labels.shape == (batch_size, context)
    assert input_ids.dtype == labels.dtype == torch.int64
    assert 0 <= input_ids.min() <= input_ids.max() < VOCABULARY_SIZE
    for ids, targets in zip(input_ids.tolist(), labels.tolist(), strict=True):
        length = sum(target != IGNORED for target in targets)
        assert targets == ids[:length] + [IGNORED] * (context - length)
        assert ids[length:] == [END] * (context - length)
        assert any(
            ids[:length] == tokens[at : at + context]
            for tokens in whole
            for at in range(max(len(tokens) - context, 0) + 1)
            if length == min(len(tokens), context)
        )


@given(texts, st.integers(1, 6), st.integers(0, 9))
def test_batches_depend_on_seed_and_step_alone(functions, batch_size, seed):
    torch.manual_seed(seed)  # the global generator plays no part
    forward = [Batches(functions, batch_size, 8, seed).at(step) for step in range(6)]
    torch.manual_seed(seed + 1)
    before = torch.get_rng_state()
    backward = [Batches(functions, batch_size, 8, seed).at(step) for step in range(5, -1, -1)]
    iterated = list(itertools.islice(Batches(functions, batch_size, 8, seed), 6))
    assert torch.equal(torch.get_rng_state(), before)
    for one, two, three in zip(forward, reversed(backward), iterated, strict=True):
        assert all(
            torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(one, two, three, strict=True)
        )


@given(st.integers(1, 12), st.integers(1, 5), st.integers(0, 9))
def test_each_epoch_shows_every_function_once(num_functions, batch_size, seed):
    functions = [bytes([i]) for i in range(num_functions)]
    batches = Batches(functions, batch_size, 3, seed)
    shown = torch.cat([batches.at(step)[0][:, 1] for step in range(3 * num_functions)]).tolist()
    for epoch in range(3 * batch_size):
        part = shown[epoch * num_functions : (epoch + 1) * num_functions]
        assert sorted(part) == list(range(num_functions))


def test_seeds_and_epochs_have_their_own_order():
    functions = [bytes([i]) for i in range(100)]
    firsts = [Batches(functions, 100, 3, seed).at(0)[0][:, 1].tolist() for seed in range(4)]
    epochs = [Batches(functions, 100, 3, 0).at(epoch)[0][:, 1].tolist() for epoch in range(4)]
    assert len({tuple(order) for order in firsts + epochs}) == 7  # one order is in both


def test_seeds_that_differ_above_32_bits_differ():
    functions = [bytes([i]) for i in range(100)]
    one, two = (Batches(functions, 100, 3, seed).at(0)[0] for seed in (1, 1 + (1 << 32)))
    assert not torch.equal(one, two)


def test_rows_of_a_real_batch_have_different_numbers_of_labels(functions):
    _, labels = Batches(functions, 16, 256, seed=0).at(0)
    counts = (labels != IGNORED).sum(1)
    assert len(counts.unique()) >= 5
    assert counts.min() < counts.max()


@pytest.mark.parametrize(
    ("functions", "batch_size", "context", "message"),
    [
        ([], 1, 8, "no functions"),
        ([b"a"], 0, 8, "batch_size must be >= 1"),
        ([b"a"], 1, 1, "context >= 2"),
    ],
)
def test_batches_that_cannot_be_are_refused(functions, batch_size, context, message):
    with pytest.raises(ValueError, match=message):
        Batches(functions, batch_size, context)


def test_steps_count_from_zero():
    with pytest.raises(ValueError, match="count from 0, got -1"):
        Batches([b"a"], 1, 8).at(-1)


def test_the_command_of_the_docstring_says_what_there_is(capsys):
    from examples import stdlib_functions  # noqa: PLC0415 - only this test runs it as a program

    stdlib_functions.main()
    first, second = capsys.readouterr().out.splitlines()
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert f"of Python {version} (0 skipped)" in first
    assert second.startswith("batch of 4 x 64: [")
