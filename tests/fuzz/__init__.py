"""A fuzzer for everything that reads: `python -m tests.fuzz --seconds 60`."""
