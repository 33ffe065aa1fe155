"""Benchmarks: heats side by side with what one would use instead."""
