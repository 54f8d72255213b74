"""Plain frozen data that every room speaks: where, traces, ranges, checkpoint summaries, findings, reports."""
