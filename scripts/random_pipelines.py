"""Train random plans of pipelines on real processes, each beside one device, and tell which differ.

    .venv/bin/python -m scripts.random_pipelines --seeds 0 150    # some 0.7 s a plan on two cores
    .venv/bin/python -m scripts.random_pipelines --seeds 17 18    # one plan again

The tests run the first few of these seeds.
"""

import argparse
import sys
import time
from collections.abc import Sequence

from tests.pipeline.random_plans import check, draw
from tests.support.world import WorldError, run_world


def main(argv: Sequence[str]) -> int:
    """Run a range of seeds; return 1 if a plan does not train as one device does."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--seeds",
        nargs=2,
        type=int,
        default=(0, 150),
        metavar=("FIRST", "END"),
        help="default 0 150",
    )
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="a plan that takes longer hangs; default 60"
    )
    options = parser.parse_args(argv)
    start = time.perf_counter()
    cases = sorted((draw(seed) for seed in range(*options.seeds)), key=lambda c: c.world_size)
    failed = []
    for case in cases:
        try:
            run_world(check, case.world_size, case, timeout=options.seconds)
        except WorldError as error:
            failed.append(case.seed)
            print(f"seed {case.seed}: {case}\n{str(error)[-3000:]}\n", flush=True)
    seconds = time.perf_counter() - start
    print(f"{len(cases)} plans, {len(failed)} differ or fail {sorted(failed)}, {seconds:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
