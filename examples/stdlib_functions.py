"""Real text without a download: the functions of Python's own standard library, as bytes.

    $ python examples/stdlib_functions.py
    6615 functions, 3.5 MB, from 168 files of Python 3.11 (0 skipped)
    batch of 4 x 64: [64, 63, 64, 64] tokens a row before the padding

Every training process reads them again (about a second) and draws the same batches from the same
seed, whatever its rank and the plan: ``Batches(functions, 16, 256, seed=0).at(step)``.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import logging
import platform
import sysconfig
import warnings
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor


#: Tokens 0 to 255 are bytes; these follow.
BEGIN = 256
END = 257
VOCABULARY_SIZE = 258
#: Label of positions that count for nothing, as ``torch.nn.functional.cross_entropy`` has it.
IGNORED = -100

_LOG = logging.getLogger(__name__)
_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


class Corpus(NamedTuple):
    """Functions, and how they were come by.

    Attributes:
        functions: Source of each function or method, as UTF-8 without its indentation, in order of
            file and line, each text once.
        num_files: Files that were read.
        num_skipped: Files among them that could not be read or parsed.
    """

    functions: list[bytes]
    num_files: int
    num_skipped: int


def load_functions(limit: int | None = None) -> list[bytes]:
    """Return the functions of this Python's standard library, the same list in every process.

    Args:
        limit: Stop after so many.

    Raises:
        FileNotFoundError: If this Python has no source files of its standard library.
    """
    root = Path(sysconfig.get_path("stdlib"))
    corpus = read_functions(sorted(root.glob("*.py")), limit)
    if not corpus.functions and limit != 0:
        raise FileNotFoundError(
            f"no function found in {root}/*.py ({corpus.num_files} files, {corpus.num_skipped} "
            f"unreadable). The example needs a Python whose standard library is there as source."
        )
    return corpus.functions


def read_functions(paths: Iterable[Path], limit: int | None = None) -> Corpus:
    """Return the functions of Python source files; files that do not parse are skipped and counted.

    Functions inside functions come with the outer one.

    Args:
        paths: Files in the order in which to read them.
        limit: Stop after so many functions.
    """
    found: dict[bytes, None] = {}
    num_files = num_skipped = 0
    for path in paths:
        if limit is not None and len(found) >= limit:
            break
        num_files += 1
        try:
            source = importlib.util.decode_source(path.read_bytes())
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # invalid escapes in other people's strings
                tree = ast.parse(source)
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
            _LOG.info("skipped %s: %s", path, error)
            num_skipped += 1
            continue
        lines = source.encode().split(b"\n")
        found.update(dict.fromkeys(_text(node, lines) for node in _outer_functions(tree.body)))
    return Corpus(list(found)[:limit], num_files, num_skipped)


def _outer_functions(body: Sequence[ast.AST]) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in body:
        if isinstance(node, _FUNCTION):
            yield node
        else:  # classes, and the branches of if, try, with and match
            for name in ("body", "handlers", "orelse", "finalbody", "cases"):
                children = getattr(node, name, ())
                if isinstance(children, list):
                    yield from _outer_functions(children)


def _text(node: ast.FunctionDef | ast.AsyncFunctionDef, lines: Sequence[bytes]) -> bytes:
    """Return a function's source without its indentation."""
    assert node.end_lineno is not None, "parsed nodes know where they end"
    indent = node.col_offset
    first, *others = lines[node.lineno - 1 : node.end_lineno]
    # Blank lines are short, and lines of a string may start further left.
    text = [first[indent:], *(x[indent:] if x[:indent].isspace() else x for x in others)]
    behind = len(lines[node.end_lineno - 1]) - (node.end_col_offset or 0)
    return b"\n".join(text)[:-behind] if behind else b"\n".join(text)


class Batches:
    """Batches of functions, one function a row, as a pure function of seed and step.

    >>> batches = Batches([b"abc", b"de"], batch_size=2, context=6, seed=0)
    >>> input_ids, labels = batches.at(0)
    >>> sorted(input_ids.tolist())
    [[256, 97, 98, 99, 257, 257], [256, 100, 101, 257, 257, 257]]
    >>> sorted((labels != IGNORED).sum(1).tolist())
    [4, 5]
    """

    def __init__(
        self, functions: Sequence[bytes], batch_size: int, context: int, seed: int = 0
    ) -> None:
        """Remember what to draw from.

        Args:
            functions: ``load_functions()``, or any texts.
            batch_size: Rows of a batch.
            context: Tokens of a row, at least 2.
            seed: Other seeds give other orders and other windows.

        Raises:
            ValueError: If there is nothing to draw, or a size is too small.
        """
        if not functions:
            raise ValueError("there are no functions to draw batches from.")
        if batch_size < 1 or context < 2:
            raise ValueError(
                f"batch_size must be >= 1 and context >= 2, got {batch_size} and {context}."
            )
        self.functions = functions
        self.batch_size = batch_size
        self.context = context
        self.seed = seed
        self._order = functools.lru_cache(maxsize=2)(self._shuffle)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batches of step 0, 1, 2, ... without end; every epoch has its own order."""
        step = 0
        while True:
            yield self.at(step)
            step += 1

    def at(self, step: int) -> tuple[Tensor, Tensor]:
        """Return the batch of a step, counted from 0.

        Returns:
            ``input_ids`` and ``labels``, int64 ``[batch_size, context]``. A row is BEGIN, the bytes,
            END, then END as padding; of a longer function it is a window. ``labels[b, t]`` is
            ``input_ids[b, t]``, as Hugging Face models take them (they shift by one inside), and
            IGNORED on padding: rows have different numbers of labels that count.
        """
        if step < 0:
            raise ValueError(f"steps count from 0, got {step}.")
        windows = self._generator("window", step)
        input_ids = torch.full((self.batch_size, self.context), END)
        labels = torch.full((self.batch_size, self.context), IGNORED)
        for row in range(self.batch_size):
            epoch, position = divmod(step * self.batch_size + row, len(self.functions))
            text = self.functions[self._order(epoch)[position]]
            tokens = torch.tensor([BEGIN, *text, END])
            start = 0
            if len(tokens) > self.context:
                last = len(tokens) - self.context
                start = int(torch.randint(last + 1, (), generator=windows))
            tokens = tokens[start : start + self.context]
            input_ids[row, : len(tokens)] = tokens
            labels[row, : len(tokens)] = tokens
        return input_ids, labels

    def _shuffle(self, epoch: int) -> list[int]:
        order: list[int] = torch.randperm(
            len(self.functions), generator=self._generator("order", epoch)
        ).tolist()
        return order

    def _generator(self, purpose: str, count: int) -> torch.Generator:
        # The CPU generator looks at 32 bits of its seed, so all that matters is folded into them.
        seed = zlib.crc32(f"{self.seed} {purpose} {count}".encode())
        return torch.Generator().manual_seed(seed)


def main() -> None:
    """Say what there is."""
    root = Path(sysconfig.get_path("stdlib"))
    corpus = read_functions(sorted(root.glob("*.py")))
    num_bytes = sum(map(len, corpus.functions))
    version = ".".join(platform.python_version_tuple()[:2])
    print(
        f"{len(corpus.functions)} functions, {num_bytes / 1e6:.1f} MB, from {corpus.num_files} files "
        f"of Python {version} ({corpus.num_skipped} skipped)"
    )
    _, labels = Batches(corpus.functions, batch_size=4, context=64).at(0)
    lengths = (labels != IGNORED).sum(1).tolist()
    print(f"batch of 4 x 64: {lengths} tokens a row before the padding")


if __name__ == "__main__":
    main()
