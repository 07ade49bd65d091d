"""Attention over a sequence that ranks share: which scores a rank computes, kernels on them, and who brings the keys."""
