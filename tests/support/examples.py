"""How many random examples the slow property tests draw: ``HDTENSOR_TEST_EXAMPLES`` multiplies them."""

import os


def num_examples(default):
    """Return ``default``, or that many times ``HDTENSOR_TEST_EXAMPLES`` for a long search by hand."""
    return default * int(os.environ.get("HDTENSOR_TEST_EXAMPLES", "1"))
