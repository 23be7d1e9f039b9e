"""Benchmarks: contenders measured in turn on the same prompts, their records, tables and report."""
