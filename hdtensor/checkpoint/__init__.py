"""Checkpoints: torch's distributed ones, and Hugging Face's safetensors."""
