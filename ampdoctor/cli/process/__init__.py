"""Streams, exit codes, files written, and what surrounds a command."""
