"""Steps that all ranks take together: without the wait after each, ranks that refuse alone would hang the others."""

import datetime
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hdtensor.errors import HDTensorError, NonLocalError
from tests.ops.outcomes import CRASH, REFUSED, RIGHT, WRONG


AGREE_SECONDS = 30

#: What ranks outside raise where an operator reads a value, by contract; the others go on.
NON_LOCAL = "not local"

#: What torch itself says of any tensor without storage of its own.
TORCH_REFUSALS = ("its data is not allocated yet",)


class CaseEndedError(Exception):
    """Ends a case with an outcome that all ranks agree on."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind, self.text = kind, text


def agreed(step: Callable[[], Any]) -> Any:
    """Run a step on every rank and return its value; stop the case on all ranks if one rank's raised.

    Ranks that raise unlike errors are a crash, whatever the errors are: without this wait they would hang.
    """
    value, kind, text = None, RIGHT, ""
    try:
        value = step()
    except CaseEndedError as stop:
        kind, text = stop.kind, stop.text
    except NonLocalError as error:
        kind, text = NON_LOCAL, f"{type(error).__name__}: {error}"
    except HDTensorError as error:
        kind, text = REFUSED, f"{type(error).__name__}: {error}"
    except Exception as error:
        refusal = any(message in str(error) for message in TORCH_REFUSALS)
        kind, text = REFUSED if refusal else CRASH, _describe(error)
    kinds = _everyone(kind)
    if set(kinds) == {RIGHT}:
        return value
    if NON_LOCAL in kinds and set(kinds) <= {RIGHT, REFUSED, NON_LOCAL}:
        raise CaseEndedError(
            REFUSED, "NonLocalError on the ranks outside: the operator reads a value"
        )
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, text, group=_agreement_group())
    if len(set(kinds)) == 1 or WRONG in kinds:
        at = kinds.index(WRONG) if WRONG in kinds else 0
        raise CaseEndedError(kinds[at], said[at] if at == 0 else f"rank {at}: {said[at]}")
    listing = "; ".join(
        f"rank {r}: {k} {t[:300]}" for r, (k, t) in enumerate(zip(kinds, said, strict=True))
    )
    raise CaseEndedError(CRASH, f"ranks disagree: {listing}")


_KINDS = (RIGHT, REFUSED, NON_LOCAL, WRONG, CRASH)


def _everyone(kind: str) -> list[str]:
    codes = torch.zeros(dist.get_world_size(), dtype=torch.int64)
    codes[dist.get_rank()] = _KINDS.index(kind)
    dist.all_reduce(codes, group=_agreement_group())
    return [_KINDS[code] for code in codes.tolist()]


@functools.cache
def _agreement_group() -> Any:
    timeout = datetime.timedelta(seconds=AGREE_SECONDS)
    return dist.new_group(backend="gloo", timeout=timeout)


def _describe(error: Exception) -> str:
    """Return the error and the innermost frames of this repository."""
    frames, tb = [], error.__traceback__
    while tb is not None:
        code = tb.tb_frame.f_code
        frames.append(f"{Path(code.co_filename).name}:{tb.tb_lineno} {code.co_name}")
        tb = tb.tb_next
    message = str(error).splitlines()[0][:300] if str(error) else ""
    return f"{type(error).__name__}: {message} [{' < '.join(reversed(frames[-6:]))}]"
